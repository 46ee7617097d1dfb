"""Tokens per CPU-second of the timed steps under `toolkit train`, against a plain Trainer script on the same job.

    python benchmarks/overhead.py --work DIR
    python benchmarks/overhead.py --work DIR --first-step      # seconds until the first step is done

Both sides train the default model in fp32 on CPU ranks of one thread each, on the same batches: their losses are
compared step by step. They run in alternating order. A ratio above 1 means that the toolkit trains more tokens with the
same processor time. CPU-seconds, since the wall time of two runs on a node with other load differs severalfold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from record import EVIDENCE, ROOT, append_line, print_table, read_lines, spread, write_result, write_table
from small_job import accelerate_command, words

from toolkit.cache import path_with_ninja
from toolkit.compare.significance import mean_interval
from toolkit.launch.command import inherited_environment
from toolkit.launch.launch import command_of
from toolkit.launch.options import TrainOptions
from toolkit.presets import load_preset

DOCUMENT, TABLE, FIRST_STEP_TABLE = EVIDENCE / "speed-and-memory.md", "overhead", "first_step"
HEADER = ("job", "pairs", "tokens per CPU-second: toolkit / plain script (95 % CI)", "goal", "largest loss difference")
FIRST_STEP_HEADER = ("job", "pairs", "toolkit (s)", "plain script (s)", "difference (s)")
MAX_SEQ_LENGTH = 64
LORA_R = {"full": 0, "lora": 8}
WORLD_SIZES = {"single": 1, "ddp": 2, "zero2": 2, "fsdp2": 2}
CASES = [f"{preset}/{method}" for preset in WORLD_SIZES for method in LORA_R]
# torchtune 0.6.1 trains LoRA in one process with 1.12 times the tokens per CPU-second of a plain Trainer.
GOALS = {"single/lora": 1.12}
GOAL = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Input of both sides."""

    model: Path
    dataset: Path
    tokens: Path
    """The same rows, tokenised, on disk."""
    steps: int
    untimed_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Result of one run."""

    cpu_seconds: float
    """Of all ranks, over the timed steps."""
    first_step_seconds: float
    """From the launch until rank 0 has printed its first step."""
    losses: list[list[float]]
    """Per step, each rank's."""


def run_toolkit(case: str, job: Job, output: Path) -> Side:
    options = train_options(case, job, output)
    command = [sys.executable, "-m", "toolkit", "train", "--preset", options.preset, "--cpu"]
    command += ["--num-processes", str(options.num_processes), "--", *options.training_arguments]
    seconds = first_step_seconds(command, inherited_environment())
    paths = [output / "ranks" / f"rank{rank}.jsonl" for rank in range(options.num_processes)]
    return side([read_lines(path) for path in paths], job.untimed_steps, seconds)


def run_bare(case: str, job: Job, output: Path) -> Side:
    preset, method = case.split("/")
    ranks = WORLD_SIZES[preset]
    script = [str(ROOT / "benchmarks" / "bare_trainer.py"), "--model", str(job.model), "--data", str(job.tokens)]
    script += ["--output", str(output), "--max_steps", str(job.steps), "--lora_r", str(LORA_R[method])]
    argv = accelerate_command(preset, ranks, *script)
    # Threads, compiled ops and warnings as `toolkit train` sets them, so that only the scripts differ.
    variables = command_of(train_options(case, job, output), load_preset(preset)).environment
    seconds = first_step_seconds(argv, {**inherited_environment(), **variables})
    rows = [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return side(rows, job.untimed_steps, seconds)


def train_options(case: str, job: Job, output: Path) -> TrainOptions:
    preset, method = case.split("/")
    training = {"model_name_or_path": job.model, "dataset": job.dataset, "output_dir": output}
    training |= {"max_steps": job.steps, "untimed_steps": job.untimed_steps, "max_seq_length": MAX_SEQ_LENGTH}
    training |= {"per_device_train_batch_size": 1, "learning_rate": 1e-4, "save_model": "false"}
    training |= {"save_strategy": "no"} | ({"lora_r": LORA_R[method]} if LORA_R[method] else {})
    arguments = tuple(words(**training))
    return TrainOptions(preset=preset, num_processes=WORLD_SIZES[preset], training_arguments=arguments, cpu=True)


def first_step_seconds(argv: Sequence[str], environment: Mapping[str, str]) -> float:
    """Run a command to its end; return the seconds until it printed that its first step is done."""
    started, seconds, lines = time.monotonic(), math.nan, []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(argv, env=environment, text=True, errors="replace", **pipes)  # type: ignore[call-overload]
    for line in process.stdout:
        if line.startswith("step 1/"):
            seconds = time.monotonic() - started
        lines.append(line)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(argv)}\nended with {process.returncode}:\n{''.join(lines)[-4000:]}")
    return seconds


def side(ranks: list[list[dict[str, Any]]], untimed_steps: int, first_step: float) -> Side:
    """Reduce the rows of all ranks, in the same way for both sides."""
    steps = list(zip(*ranks, strict=True))
    cpu_seconds = math.fsum(row["cpu_seconds"] for step in steps[untimed_steps:] for row in step)
    losses = [[row["loss"] for row in step] for step in steps]
    return Side(cpu_seconds=cpu_seconds, first_step_seconds=first_step, losses=losses)


def prepare(scratch: Path, model: Path | None, steps: int, untimed_steps: int) -> Job:
    """Prepare model and data, the demo's by default, and write the toolkit's tokens to disk for the plain script."""
    import datasets

    from toolkit.demo.assets import default_data_file, prepare_default_model
    from toolkit.job.argument_fields import DataArguments, ModelArguments
    from toolkit.train.data.tokenization import EncodedSource, encode_rows, load_rows, row_encoder
    from toolkit.train.model.loading import load_tokenizer

    datasets.disable_progress_bars()
    model, dataset, tokens = model or prepare_default_model(), default_data_file(), scratch / "tokens"
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=str(model)), chat_template=None)
    rows, data_format = load_rows(str(dataset), "train")
    encoder = row_encoder(tokenizer, data_format, DataArguments(max_seq_length=MAX_SEQ_LENGTH))
    source = EncodedSource(name=str(dataset), rows=encode_rows(rows, encoder), encoder=encoder)
    source.supervised()[0].save_to_disk(tokens)
    return Job(model=model, dataset=dataset, tokens=tokens, steps=steps, untimed_steps=untimed_steps)


def measure_pair(case: str, number: int, job: Job) -> dict[str, Any]:
    """Run both sides once; every second pair begins with the plain script."""
    sides = {"toolkit": run_toolkit, "bare": run_bare}
    measured = {}
    for name in sides if number % 2 == 0 else reversed(sides):
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = sides[name](case, job, Path(folder) / "run")
    losses = zip(*(chain.from_iterable(measured[name].losses) for name in sides), strict=True)
    pair: dict[str, Any] = {"case": case, "number": number}
    for key in ("cpu_seconds", "first_step_seconds"):
        pair[key] = {name: getattr(measured[name], key) for name in sides}
    return pair | {"loss_difference": max(abs(ours - bare) / abs(bare) for ours, bare in losses)}


def cases_of(pairs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {case: [pair for pair in pairs if pair["case"] == case] for case in dict.fromkeys(p["case"] for p in pairs)}


def table_rows(_: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Return per case the ratio of tokens per CPU-second, with Student's t on logarithms."""
    rows: list[list[object]] = []
    for case, own in cases_of(pairs).items():
        # Both sides train the same tokens, so that the ratio of tokens per second is the inverse ratio of the seconds.
        ratios = [pair["cpu_seconds"]["bare"] / pair["cpu_seconds"]["toolkit"] for pair in own]
        mean, interval, goal = statistics.geometric_mean(ratios), mean_interval(ratios), GOALS.get(case, GOAL)
        shown = f"{mean:.3f}" + ("" if interval is None else " ({:.3f} to {:.3f})".format(*interval))
        reached = f"{goal:.2f} {'reached' if mean >= goal else 'missed'}"
        rows.append([case, len(own), shown, reached, f"{max(pair['loss_difference'] for pair in own):.0e}"])
    return rows


def first_step_rows(_: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> list[list[object]]:
    rows: list[list[object]] = []
    for case, own in cases_of(pairs).items():
        seconds = [pair["first_step_seconds"] for pair in own]
        medians = [f"{spread([each[name] for each in seconds])['median']:.1f}" for name in ("toolkit", "bare")]
        differences = spread([each["toolkit"] - each["bare"] for each in seconds])
        rows.append([case, len(own), *medians, "{median:+.1f} ({min:+.1f} to {max:+.1f})".format(**differences)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of `toolkit train` against a plain Trainer script.")
    parser.add_argument("--case", nargs="+", default=CASES, choices=CASES, metavar="PRESET/METHOD")
    parser.add_argument("--model", type=Path, help="a folder; the default model if not given")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--untimed-steps", type=int, default=2)
    parser.add_argument("--first-step", action="store_true", help="one step, for the seconds until it is done")
    parser.add_argument("--work", type=Path, required=True, help="folder for finished pairs; the same command resumes")
    parser.add_argument("--at-most", type=int, help="stop after this many pairs; the next call resumes")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    # The same threads for both sides. And the same ninja: another version of it would compile DeepSpeed's ops again in
    # every second run.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": path_with_ninja()}
    name, header, rows_of = TABLE, HEADER, table_rows
    if given.first_step:
        name, header, rows_of = FIRST_STEP_TABLE, FIRST_STEP_HEADER, first_step_rows
        given.steps, given.untimed_steps = 1, 0
    ledger = given.work / f"{name}.jsonl"
    finished = {(pair["case"], pair["number"]) for pair in read_lines(ledger)}
    wanted = [(case, number) for number in range(given.pairs) for case in given.case]
    waiting = [pair for pair in wanted if pair not in finished]
    with tempfile.TemporaryDirectory() as scratch:
        job = prepare(Path(scratch), given.model, given.steps, given.untimed_steps)
        for case, number in waiting[: given.at_most]:
            append_line(ledger, measure_pair(case, number, job))
    if given.at_most is not None and len(waiting) > given.at_most:
        raise SystemExit(f"{len(waiting) - given.at_most} of {len(wanted)} pairs are left: the same command resumes")
    pairs = sorted(read_lines(ledger), key=lambda pair: (CASES.index(pair["case"]), pair["number"]))
    print_table(header, rows_of({}, pairs))
    print(write_result(name, {"steps": given.steps, "untimed_steps": given.untimed_steps}, pairs))
    write_table(DOCUMENT, name, header, rows_of({}, pairs))


if __name__ == "__main__":
    main()
