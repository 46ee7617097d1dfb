"""Host memory of real two-rank CPU runs against the plan, for every preset, while loading and over the run.

    python benchmarks/host_memory.py                  # all rows; several minutes
    python benchmarks/host_memory.py --missing        # only those without a row, or with an error

Measured: the sum of the ranks' peak resident memory from the run folder (`peak_host_bytes`); and while loading, the
highest sum, observed from outside, of memory that the kernel cannot drop (`/proc/PID/smaps_rollup`, proportional set
size without files). The launcher is counted separately. Planned: on a CPU the accelerator's memory is host memory, so a
rank needs the plan's process, its peak GPU memory (without CUDA's overhead), and the plan's offloaded blocks, which are
not page-locked and so not rounded up. Everything is in fp32, as in every CPU run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from record import ROOT, print_table, read_result, write_lines, write_result
from small_job import JobSetting, accelerate_command, cpu_environment, words

from toolkit.demo.assets import prepare_default_model
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.engine_buffers import PROCESS_BYTES
from toolkit.plan.engine_settings import engine_settings
from toolkit.plan.memory import plan_engine_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset
from toolkit.units import GIB

HEADER = ["job", "loading, measured GiB", "planned", "", "run, measured GiB", "planned", ""]
RANKS, STEPS, SECONDS_BETWEEN = 2, 2, 0.02
LOSS = "full"  # of the recorded runs, which are older than the chunked loss
# glibc keeps freed blocks below 32 MiB, per thread; with this threshold it returns tensors to the system.
MMAP_THRESHOLD_BYTES = 65_536
SHARED = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp2_grad_op")
OFFLOADED = ("zero2_cpu_offload", "zero3_cpu_offload", "fsdp2_cpu_offload")


@dataclass(frozen=True, kw_only=True)
class Setting(JobSetting):
    """Settings of one run of the default model."""

    seq_length: int = 128
    keeps_freed: bool = False
    """Whether malloc is as it is, instead of giving every freed tensor back."""

    @property
    def ranks(self) -> int:
        """Number of ranks: two, or one under `single`."""
        return 1 if self.preset == "single" else RANKS

    @property
    def name(self) -> str:
        """Name of the setting, for example `zero3 128 lora`."""
        extras = {"lora": self.lora_r, f"a{self.accumulation}": self.accumulation > 1}
        return self.named(self.seq_length, **extras, ckpt=self.checkpointing, malloc=self.keeps_freed)


def settings() -> list[Setting]:
    """Return every preset with a small job, and jobs that change one part of memory each."""
    found = [Setting(preset=name) for name in ("single", *SHARED, *OFFLOADED)]
    found += [Setting(preset=name, lora_r=16) for name in ("ddp", "zero3", "fsdp2", "zero2_cpu_offload")]
    found += [Setting(preset=name, accumulation=2) for name in ("zero2", "fsdp2")]
    found += [Setting(preset=name, seq_length=1024) for name in ("ddp", "zero3", "fsdp2")]
    found += [Setting(preset="fsdp2", seq_length=1024, checkpointing=True)]
    return found + [Setting(preset=name, keeps_freed=True) for name in ("ddp", "zero2", "zero3")]


def planned(setting: Setting, shape: ModelShape) -> dict[str, int]:
    """Return the planned bytes of all ranks together."""
    preset = load_preset(setting.preset)
    engine = engine_settings(preset, world_size=setting.ranks, hidden_size=shape.hidden_size, mixed_precision="no")
    job = PlannedJob(max_seq_length=setting.seq_length, per_device_train_batch_size=1, loss=LOSS, **setting.planned)
    memory = plan_engine_memory(shape, replace(engine, pins_memory=False), job)
    held = {phase.phase: setting.ranks * phase.allocated_bytes for phase in memory.phases}
    # Until FSDP2 wraps the model, rank 0 has the full model on the host next to all shards; other engines move it.
    whole_first = memory.host.loading_bytes + (held["load"] if preset.engine == "fsdp2" else 0)
    loading = max(whole_first, setting.ranks * PROCESS_BYTES + held["load"] + memory.host.before_first_step_bytes)
    return {"loading_bytes": loading, "run_bytes": max(loading, memory.host.training_bytes + max(held.values()))}


def measured(setting: Setting, model: Path, output: Path) -> dict[str, int]:
    """Return the highest sums of the ranks' memory; raise with the run's last lines if it failed."""
    job = setting.words | {"model_name_or_path": model, "output_dir": output, "save_strategy": "no", "loss": LOSS}
    job |= {"dataset": long_rows(output.with_suffix(".jsonl")), "save_model": "false", "max_steps": STEPS}
    job |= {"per_device_train_batch_size": 1, "max_seq_length": setting.seq_length}
    argv = [*accelerate_command(setting.preset, setting.ranks, "-m", "toolkit.train"), *words(**job)]
    malloc = {} if setting.keeps_freed else {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES)}
    log = output.with_suffix(".log")
    with log.open("w") as file:
        run = subprocess.Popen(argv, cwd=ROOT, env=cpu_environment(**malloc), stdout=file, stderr=subprocess.STDOUT)
        samples = watched(run)
    if run.returncode != 0:
        raise RuntimeError(" ".join(log.read_text().strip().splitlines()[-3:]))
    return reduced(samples, json.loads((output / "run.json").read_text()), output)


def bf16_copy(model: Path, folder: Path) -> Path:
    """Write the model in bf16 like most checkpoints: the script casts it to fp32, so weights are not a mapped file."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    save_file({name: one.to(torch.bfloat16) for name, one in load_file(weights).items()}, weights, {"format": "pt"})
    return folder


def long_rows(path: Path) -> Path:
    """Write rows that fill any length, with a loss on every token."""
    words = [f"{number} is {number % 7} more than a multiple of seven." for number in range(400)]
    rows = [{"text": " ".join(words[start:] + words[:start])} for start in range(16)]
    write_lines(path, rows)
    return path


Sample = tuple[float, dict[int, int]]


def watched(run: subprocess.Popen[bytes]) -> list[Sample]:
    """Sample the bytes that each rank holds until the run ends, with the time."""
    samples = []
    while run.poll() is None:
        with contextlib.suppress(psutil.Error):
            children = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
            samples.append((time.time(), {pid: held_bytes(pid) for pid in children}))
        time.sleep(SECONDS_BETWEEN)
    return samples


def held_bytes(pid: int) -> int:
    """Return what the kernel cannot drop of a rank: proportional set size without files.

    It is 0 for the launcher, for any other process, and for one that has ended.
    """
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"toolkit.train" not in words or b"accelerate.commands.launch" in words:
            return 0
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kinds = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return kinds["Pss"] - kinds["Pss_File"]
    return 0


def reduced(samples: list[Sample], run: dict[str, Any], output: Path) -> dict[str, int]:
    """Return the highest sum sampled while loading, and the sum of the peaks that the ranks recorded themselves."""
    began = {name: at for name, at in reversed(run["phases"])}  # the first start of each phase
    loading = [sum(ranks.values()) for at, ranks in samples if began["load"] <= at < began["attest"]]
    rows = [path.read_text().splitlines() for path in (output / "ranks").glob("rank*.jsonl")]
    peaks = [max(json.loads(line)["peak_host_bytes"] for line in lines) for lines in rows]
    return {"loading_bytes": max(loading), "run_bytes": sum(peaks)}


def difference(one: dict[str, Any], part: str) -> float:
    """Return planned over measured, minus one."""
    return float(one["planned"][f"{part}_bytes"] / one["measured"][f"{part}_bytes"] - 1)


def errors(rows: Sequence[dict[str, Any]], part: str) -> tuple[str, str, str]:
    """Return mean and 95th percentile of the absolute error, and how often the plan was too low.

    Rows with the default malloc are left out.
    """
    signed = [difference(one, part) for one in rows if "measured" in one and not one["setting"].endswith("malloc")]
    absolute = sorted(map(abs, signed))
    p95 = absolute[math.ceil(0.95 * len(absolute)) - 1]
    too_low = f"{sum(error < 0 for error in signed)} of {len(signed)}"
    return f"{statistics.fmean(absolute):.1%}", f"{p95:.1%}", too_low


def table_rows(_: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return table rows: GiB of all ranks together and the differences, then the errors over all rows."""
    table = [[one["setting"], *cells(one, "loading"), *cells(one, "run")] for one in rows]
    names = ("mean error", "95th percentile", "planned too low")
    sums = zip(names, *(errors(rows, part) for part in ("loading", "run")), strict=True)
    return table + [[f"**{name}**", "", "", first, "", "", second] for name, first, second in sums]


def cells(one: dict[str, Any], part: str) -> list[str]:
    """Return the cells measured, planned and difference."""
    if "measured" not in one:
        return ["failed", "", ""]
    sizes = [f"{one[side][f'{part}_bytes'] / GIB:.2f}" for side in ("measured", "planned")]
    return [*sizes, f"{difference(one, part):+.1%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", action="append", help="a preset to run; repeatable; rows of other presets are kept")
    parser.add_argument("--missing", action="store_true", help="skip what has been measured")
    given = parser.parse_args()
    rows = {one["setting"]: one for one in read_result("host_memory")[1]}
    done = {name for name, one in rows.items() if "measured" in one and given.missing}
    wanted = [one for one in settings() if (not given.only or one.preset in given.only) and one.name not in done]
    source = prepare_default_model()
    shape, facts = read_model(str(source)), {"config": json.loads((source / "config.json").read_text())}
    with tempfile.TemporaryDirectory() as scratch:
        model = bf16_copy(source, Path(scratch) / "model")
        for setting in wanted:
            rows[setting.name] = outcome = {"setting": setting.name, "ranks": setting.ranks}
            try:
                outcome["measured"] = measured(setting, model, Path(scratch) / setting.name.replace(" ", "-"))
            except RuntimeError as error:
                outcome["error"] = str(error)
            print(setting.name, rows[setting.name].get("error", "measured"), file=sys.stderr, flush=True)
            kept = [rows[one.name] | {"planned": planned(one, shape)} for one in settings() if one.name in rows]
            write_result("host_memory", facts, kept)
    facts, kept = read_result("host_memory")
    print_table(HEADER, table_rows(facts, kept))
    return 0 if all("measured" in one for one in kept) else 1


if __name__ == "__main__":
    sys.exit(main())
