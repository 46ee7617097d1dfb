"""The first parts of `check.py`, 14 minutes: what nobody has measured, in the order of what it teaches."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grid import CALIBRATION
from hot_kernels import hot_kernels
from parts import (
    GENERATIONS,
    ROOT,
    SMALL,
    Check,
    Part,
    Row,
    Step,
    Variant,
    comparison,
    row_of,
    supported,
    unmeasured,
    validation,
    words,
)
from record import read_lines

from toolkit.hardware.shared_gpu import WAY_VARIABLE
from toolkit.presets.compatibility import Device
from toolkit.record.folder import read_json

GLOBAL_BATCH = 8  # the same for any number of ranks, so that losses compare
SIX_RANKS_BYTES = 120e9  # of a full fine-tune of 0.6 billion parameters, beside their contexts
REHEARSED = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp2_grad_op")


# -- ranks: real ranks on one GPU


def ranks(check: Check) -> Iterator[Step | list[Step]]:
    """Yield every preset that runs with 2, 4 and 8 ranks, three steps each, beside `single`, plan and rehearsal.

    Their speed is not measured, so several steps run at a time. Ranks take turns on the GPU in slices of time, and wait
    there for each other: four and eight train a smaller model, and presets that need so many come first.
    """
    small, smaller = small_model(check), smaller_model(check)
    yield [sharing(check), alone(check, "single", small), alone(check, "single_smaller", smaller)]
    works = check.tiny or check.gpus != 1 or "works_by" in last_json(check.output / "sharing.log")
    if not works:  # gloo moves the gradients of DDP, and no shards
        by_gloo = {"ddp": Variant(preset="ddp", arguments="--ddp_backend gloo")}
        yield ranks_of(check, "ranks-2", 2, small, by_gloo, "single")
        return
    new, rest, left_out = {}, {}, []
    for size in (2,) if check.tiny else (2, 4, 8):
        shared = max(1, size // (check.gpus or size))
        device = Device(type="cpu" if check.tiny else "gpu", count=None, ranks_per_gpu=shared)
        groups, left_out = supported(size, device)
        seen = {name for variants in new.values() for name in variants["presets"] | variants["experts"]}
        new[size] = {key: {k: v for k, v in groups[key].items() if k not in seen} for key in ("presets", "experts")}
        rest[size] = {key: each for key, each in groups["presets"].items() if key in seen}
    presets = list(new[2]["presets"].items())
    at_a_time = 3 if not check.tiny and check.gpu.memory_bytes > SIX_RANKS_BYTES else 2
    yield [
        ranks_of(check, f"ranks-2-{letter}", 2, small, dict(presets[start::at_a_time]), "single")
        for start, letter in zip(range(at_a_time), "abc", strict=False)
    ]
    saved, converted = conversion(check)
    yield [ranks_of(check, "ranks-2-experts", 2, tiny_experts(check), new[2]["experts"]), rehearsed(check), saved]
    more = [size for size in new if size > 2]
    few = [ranks_of(check, f"ranks-{size}", size, smaller, new[size]["presets"], "single_smaller") for size in more]
    few += [ranks_of(check, f"ranks-{size}-experts", size, tiny_experts(check), new[size]["experts"]) for size in more]
    yield [converted, *few[:1]]
    yield from few[1:]
    for size in more:
        yield ranks_of(check, f"ranks-{size}-rest", size, smaller, rest[size], "single_smaller")
    yield "left-out", [sys.executable, "-c", ""], lambda: left_out


def job_of_ranks(check: Check) -> Row:
    return {"max_seq_length": 64 if check.tiny else 1024, "max_steps": 3, "lr_scheduler_type": "constant"}


def alone(check: Check, name: str, model: Path) -> Step:
    return ranks_of(check, f"ranks-{name}", 1, model, {name: Variant()})


def ranks_of(
    check: Check, name: str, size: int, model: Path, variants: dict[str, Variant], single: str | None = None
) -> Step:
    """Return a comparison of presets with so many ranks; nothing where there is none."""
    if not variants:
        return name, [sys.executable, "-c", ""], list
    given = {"model": model, "options": ["--untimed-steps", "0"], "world_size": size}
    rows = GLOBAL_BATCH // size
    label, command, read = comparison(
        check, name, variants, **given, per_device_train_batch_size=rows, **job_of_ranks(check)
    )
    if single is None:
        return label, command, read
    return label, command, functools.partial(with_losses, check, label, size, variants, read, single)


def sharing(check: Check) -> Step:
    """Return the all-reduce of two ranks on one GPU; what works is what the next steps use."""

    def read() -> list[Row]:
        found = last_json(check.output / "sharing.log")
        if found.get("works_by"):
            os.environ[WAY_VARIABLE] = found["works_by"]
        note = found.get("skipped") or f"NCCL {found.get('nccl')}, by {found.get('works_by')}"
        return unmeasured("two ranks on one GPU", "; ".join([note, *found.get("findings", [])]))

    return "sharing", [sys.executable, str(Path(__file__).with_name("sharing.py"))], read


def last_json(log: Path) -> Row:
    return next((line for line in reversed(read_lines(log)) if isinstance(line, dict)), {})


def with_losses(
    check: Check, name: str, size: int, variants: dict[str, Variant], read: Callable[[], list[Row]], single: str
) -> list[Row]:
    """Return the rows of a comparison, then each preset's last loss beside that of `single` with the same batch."""
    expected = measured_of(check.output / f"ranks-{single}" / "trials" / f"{single}-n1-r0").get("last_loss")
    trials = {key: check.output / name / "trials" / f"{key}-n{size}-r0" for key in variants}
    runs = {key: read_json(folder / "run.json") or {} for key, folder in trials.items()}
    # Ranks that share their rows have more of them in a step.
    same = {key: run for key, run in runs.items() if (run.get("spec") or {}).get("global_batch_size") == GLOBAL_BATCH}
    pairs = {key: (run.get("measured") or {}).get("last_loss") for key, run in same.items()}
    note = "planned: the loss of `single`"
    return [
        *read(),
        *(row_of(key, "loss", expected, loss, world_size=size, note=note) for key, loss in pairs.items() if loss),
    ]


def measured_of(folder: Path) -> Row:
    return (read_json(folder / "run.json") or {}).get("measured") or {}


def train(check: Check, name: str, preset: str, size: int, job: Row) -> Step:
    """Return one run of `toolkit train`, which is not run again once it has completed."""
    folder = check.output / name
    if (read_json(folder / "run.json") or {}).get("status") == "completed":
        return name, [sys.executable, "-c", ""], list
    argv = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", str(size)]
    argv += ["--ranks-per-gpu", str(size)] if check.gpus == 1 and size > 1 else []
    known = {"dataset": check.rows("text") / "train.jsonl", "bf16": True, "output_dir": folder, "untimed_steps": 0}
    known |= {"overwrite_output_dir": True, "learning_rate": 1e-5, "save_model": False, "save_strategy": "no"}
    return name, [*argv, *(["--cpu"] if check.tiny else []), "--", *words(known | job)], list


def conversion(check: Check) -> tuple[Step, Step]:
    """Return a run under `zero3` that saves half-way, and one under `fsdp2` that goes on from there."""
    job = job_of_ranks(check) | {"model_name_or_path": smaller_model(check), "per_device_train_batch_size": 4}
    job |= {"max_steps": 4}
    first = train(check, "ranks-saved", "zero3", 2, job | {"save_strategy": "steps", "save_steps": 2})
    saved = check.output / "ranks-saved" / "checkpoint-2"
    label, command, _ = train(check, "ranks-converted", "fsdp2", 2, job | {"resume_from_checkpoint": saved})

    def read() -> list[Row]:
        pair = [measured_of(check.output / name).get("last_loss") for name in ("ranks-saved", "ranks-converted")]
        note = "planned: the loss of zero3, which was not interrupted"
        return [row_of("zero3 converted to fsdp2", "loss", *pair, note=note if all(pair) else "no loss")]

    return first, (label, command, read)


def rehearsed(check: Check) -> Step:
    """Return rehearsals of rank 0 of two under the usual presets: the same jobs as those of real ranks."""
    same = {"split": "test", "architecture": "tiny-qwen3" if check.tiny else "Qwen3-0.6B", "world_size": 2, "rank": 0}
    length = job_of_ranks(check)["max_seq_length"]
    same |= {"method": "full", "activation_checkpointing": False, "max_seq_length": length}
    same |= {"per_device_train_batch_size": GLOBAL_BATCH // 2}
    cases = [same | {"id": f"rehearsed-{preset}", "preset": preset} for preset in REHEARSED]
    return cases_of(check, "ranks-rehearsed", cases, minutes=1.5)


def cases_of(check: Check, name: str, cases: list[Row], *, minutes: float) -> Step:
    file = check.output / f"{name}.cases.json"
    file.write_text(json.dumps(cases))
    return validation(check, name, "--cases", str(file), minutes=minutes)


def small_model(check: Check) -> Path:
    """Return a model of 0.6 billion parameters with random weights."""
    if check.tiny:
        return check.written("tiny", CALIBRATION["llama-1b"] | SMALL)
    return check.written("qwen3-0.6b", json.loads((ROOT / "tests/fixtures/qwen3-0.6b/config.json").read_text()))


def smaller_model(check: Check) -> Path:
    """Return eight of its layers, with a smaller vocabulary: what ranks send each other takes most of their time."""
    if check.tiny:
        return small_model(check)
    config = json.loads((ROOT / "tests/fixtures/qwen3-0.6b/config.json").read_text())
    return check.written("qwen3-layers", config | {"num_hidden_layers": 8, "vocab_size": 32_768})


def tiny_experts(check: Check) -> Path:
    """Return a mixture of experts that is small on a GPU too."""
    sizes = SMALL if check.tiny else {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    name = "tiny-experts" if check.tiny else "small-experts"
    return check.written(name, CALIBRATION["mixtral-1b"] | sizes)


# -- profile: where the time of a step goes


PROFILED = {
    "eager": ({}, "model"),
    "liger": ({"use_liger_kernel": True}, "model"),
    "compiled": ({"torch_compile": True}, "model"),
    "lora-8b": ({"lora_r": 16}, "layers of 8B"),
}


def profile(check: Check) -> Iterator[Step]:
    """Yield a profiled run of each variant; its row has the most expensive kernels, and the gaps between them."""
    for name, (arguments, which) in PROFILED.items():
        if check.tiny and name in ("liger", "compiled"):  # Liger has no kernels for a CPU; compiling takes a minute
            continue
        model, rows = check.model if which == "model" else (layers_of_8b(check), 2)
        job: Row = {"model_name_or_path": model, "per_device_train_batch_size": rows, "max_steps": 7}
        job |= {"max_seq_length": check.length, "profile_steps": "6:7", **arguments}
        label, command, _ = train(check, f"profile-{name}", "single", 1, job)
        yield label, command, functools.partial(profiled, check, name)


def profiled(check: Check, name: str) -> list[Row]:
    trace = check.output / f"profile-{name}" / "profile" / "rank0.json.gz"
    if not trace.is_file():
        return unmeasured(name, "no trace")
    found = hot_kernels(trace)
    # Traces are large: the table is what is kept.
    busy = found["busy_seconds"] / found["step_seconds"] if found["step_seconds"] else None
    note = f"GPU at work {busy:.0%} of two steps" if busy else "no kernels"
    return [{**row_of(name, "profile", None, found["step_seconds"]), "note": note, "table": found}]


def layers_of_8b(check: Check) -> Path:
    """Return eight layers of an 8B: the kernels of each are those of the whole model, which takes a minute to write."""
    config = json.loads((ROOT / "tests/fixtures/llama-8b/config.json").read_text()) | {"num_hidden_layers": 8}
    return check.written("tiny", CALIBRATION["llama-1b"] | SMALL) if check.tiny else check.written("8b-layers", config)


# -- what has changed since it was measured, and what never was


def again(check: Check, minutes: float) -> Iterator[Step]:
    """Yield what the code has changed since a GPU measured it, or what was planned too low."""
    tiny: Row = {"architecture": "tiny-llama", "max_seq_length": 32, "per_device_train_batch_size": 2}
    large: Row = {"architecture": "llama-1b", "max_seq_length": 2048, "per_device_train_batch_size": 2}
    same = {"split": "test", "rank": 0, "activation_checkpointing": False, "method": "full"}
    adapters = {"preset": "fsdp2", "method": "lora", "activation_checkpointing": True}
    cases = [
        {"id": "ddp-buckets", "preset": "ddp", "world_size": 2},
        {"id": "fsdp2-lora-2", "world_size": 2, **adapters},
        {"id": "fsdp2-lora-8", "world_size": 8, **adapters},
    ]
    made = [same | (tiny if check.tiny else large) | case for case in cases]
    yield cases_of(check, "again", made, minutes=minutes / 2)
    yield comparison(check, "again-experts", {"zero2": Variant(preset="zero2")}, model=check.experts)


def unseen(check: Check) -> Iterator[Step]:
    """Yield GRPO, and a plan with what a run measured."""
    lengths = {"num_generations": GENERATIONS, "max_completion_length": check.completion}
    grpo: Any = {"method": "grpo", "reward_funcs": "think_format_reward", "gradient_checkpointing": False, **lengths}
    yield comparison(check, "grpo", {"grpo": Variant()}, **grpo)
    run = check.output / "profile-eager"
    argv = ["plan", str(check.model[0]), "--preset", "zero2", "--num-processes", "8", "--gpu", check.gpu.name]
    log = check.output / "measured.log"

    def read() -> list[Row]:
        text = log.read_text() if log.is_file() else ""
        return unmeasured("--measured on a run", "planned" if '"plans"' in text else text.strip()[-200:])

    yield "measured", [sys.executable, "-m", "toolkit", *argv, "--measured", str(run), "--json"], read


FIRST_PARTS = {
    "ranks": Part(
        minutes=5,
        teaches="every preset with 2, 4 and 8 real ranks: peaks against plan and rehearsal, losses, a conversion",
        steps=lambda check, _: ranks(check),
    ),
    "profile": Part(
        minutes=3, teaches="where the time of a step goes: kernels and gaps", steps=lambda check, _: profile(check)
    ),
    "again": Part(minutes=2, teaches="DDP's bucket views, FSDP2 with LoRA, experts under ZeRO-2", steps=again),
    "fits": Part(
        minutes=2,
        teaches="peaks of README's table: one rank of each row, rehearsed",
        steps=lambda check, left: [validation(check, "fits", "--fits", minutes=left - 0.5)],
    ),
    "unseen": Part(minutes=1, teaches="GRPO, and a plan by what a run measured", steps=lambda check, _: unseen(check)),
}
