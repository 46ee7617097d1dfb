"""Figures in the pages of docs/ are those that the planner gives today, or those of a recorded run.

A page has a block `<!-- planned: NAME -->` up to `<!-- /NAME -->`. To write them again:

    python tests/docs/test_planned_figures.py
"""

import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.program import main
from toolkit.units import GIB

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MODEL = "Qwen/Qwen3-8B"
MODEL_CONFIG = ROOT / "tests" / "fixtures" / "qwen3-8b" / "config.json"
THREE_GPUS = {"H100 80 GB": "h100", "L40S 48 GB": "l40s", "RTX 4090 24 GB": "rtx-4090"}
NAMES = {"fits": "fits", "too_close": "too close", "does_not_fit": "does not fit"}
Steps = dict[str, str]
"""Rows of a table: what is changed, and the options of `toolkit plan` for it."""


def run(*words: str) -> tuple[int, str, str]:
    """Return exit code and both streams of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@cache
def answer(command: str) -> Any:
    """Return what a `toolkit ... --json` command prints, with the model's config.json in place of its hub id."""
    words = [str(MODEL_CONFIG) if word == MODEL else word for word in shlex.split(command)[1:]]
    code, out, err = run(*words, "--json")
    assert code == 0, f"{command}: {err}"
    return json.loads(out)


def plans(options: str) -> list[dict[str, Any]]:
    return list(answer(f"toolkit plan {MODEL} {options}")["plans"])


def gib(number: float) -> str:
    return f"{number / GIB:.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: int) -> str:
    aligned = [":---"] * (len(head) - right) + ["---:"] * right
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, aligned, *rows))


# -- docs/how-to/choose-a-preset.md

JOB = "--num-processes 8 --max-seq-length 2048"
SMALL = "--per-device-train-batch-size 1 --gradient-accumulation-steps 8"
LARGE = "--per-device-train-batch-size 8"
LEAN = f"{SMALL} --activation-checkpointing"
CHEAPEST_FIRST: Steps = {
    "start: `zero2`, per-GPU batch 8, `--loss full`": f"{JOB} --preset zero2 {LARGE} --loss full",
    "1. the chunked loss, the default": f"{JOB} --preset zero2 {LARGE}",
    "2. and per-GPU batch 1, 8 accumulation steps": f"{JOB} --preset zero2 {SMALL}",
    "3. and activation checkpointing": f"{JOB} --preset zero2 {LEAN}",
    "4. and `zero3` instead of `zero2`": f"{JOB} --preset zero3 {LEAN}",
    "5. and 16 GPUs instead of 8, 4 accumulation steps": (
        f"{JOB} --preset zero3 {LEAN}".replace("processes 8", "processes 16").replace("steps 8", "steps 4")
    ),
    "6. 8 GPUs, LoRA of rank 16": f"{JOB} --preset zero3 {LEAN} --lora-r 16",
    "7. 8 GPUs, QLoRA of rank 16, under `ddp`": f"{JOB} --preset ddp {LEAN} --lora-r 16 --load-in-4bit",
    "8. 8 GPUs, all weights, `zero3_cpu_offload`": f"{JOB} --preset zero3_cpu_offload {LEAN}",
}


def on_gpu(options: str, gpu: str = "h100") -> dict[str, Any]:
    (plan,) = plans(f"{options} --gpu {gpu}")
    return plan


def steps_table(steps: Steps) -> str:
    rows = []
    for label, options in steps.items():
        verdicts = [NAMES[on_gpu(options, gpu)["verdict"]] for gpu in THREE_GPUS.values()]
        rows.append([label, gib(on_gpu(options)["planned_peak_bytes"]), *verdicts])
    return table(["job", "planned peak, GiB", *THREE_GPUS], rows, right=len(THREE_GPUS) + 1)


def out_of_memory() -> str:
    command = f"toolkit plan {MODEL} {list(CHEAPEST_FIRST.values())[3]} --gpu h100"
    return f"{steps_table(CHEAPEST_FIRST)}\n\nPlanned, not measured. The row of step 3 is of `{command}`."


# -- docs/concepts/ddp-zero-fsdp2.md

STATES = "--num-processes 8 --gpu h100 --max-seq-length 2048 --per-device-train-batch-size 1 --activation-checkpointing"
EXPLAINED = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp2_grad_op")


def explained(options: str) -> dict[str, dict[str, Any]]:
    found = {plan["preset"]: plan for plan in plans(options)}
    return {name: found[name] for name in EXPLAINED}


def states() -> str:
    rows = []
    for name, plan in explained(STATES).items():
        parts = [plan[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer")]
        rows.append([f"`{name}`", *map(gib, [*parts, sum(parts), plan["planned_peak_bytes"]]), NAMES[plan["verdict"]]])
    head = ["preset", "parameters", "gradients", "optimizer", "together", "peak", "on 80 GB"]
    return f"{table(head, rows, right=6)}\n\nGiB per GPU, planned with this command."


def traffic() -> str:
    several, key = f"{STATES} --gradient-accumulation-steps 8", "communication_bytes_per_step"
    once, often = explained(STATES), explained(several)
    rows = [[f"`{name}`", gib(once[name][key]), gib(often[name][key])] for name in once]
    head = ["preset", "1 accumulation step", "8 accumulation steps"]
    return f"{table(head, rows, right=2)}\n\nGiB that one GPU sends per optimizer step of that job."


BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "out of memory": ("how-to/choose-a-preset.md", out_of_memory),
    "model states": ("concepts/ddp-zero-fsdp2.md", states),
    "communication": ("concepts/ddp-zero-fsdp2.md", traffic),
}


def with_figures(text: str, names: Iterable[str]) -> str:
    for name in names:
        block = re.compile(rf"(<!-- \w+: {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        text, number = block.subn(lambda found, name=name: found[1] + BLOCKS[name][1]() + found[2], text)
        assert number == 1, f"{number} blocks {name!r}"
    return text


@pytest.mark.parametrize("name", BLOCKS)
def test_a_pages_figures_are_those_of_today(name: str) -> None:
    text = (DOCS / BLOCKS[name][0]).read_text()
    assert with_figures(text, [name]) == text, "run: python tests/docs/test_planned_figures.py"


def test_the_command_that_the_page_shows_is_the_one_that_its_tables_are_planned_with() -> None:
    assert f"toolkit plan {MODEL} {STATES}" in (DOCS / "concepts" / "ddp-zero-fsdp2.md").read_text()


def test_each_of_the_first_steps_against_running_out_of_memory_needs_less_than_the_one_before() -> None:
    peaks = [on_gpu(options)["planned_peak_bytes"] for options in list(CHEAPEST_FIRST.values())[:6]]
    assert peaks == sorted(set(peaks), reverse=True)


if __name__ == "__main__":
    for written in {DOCS / page for page, _ in BLOCKS.values()}:
        own = [name for name, (page, _) in BLOCKS.items() if DOCS / page == written]
        written.write_text(with_figures(written.read_text(), own))
