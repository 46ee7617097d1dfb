"""Compare the planner with rehearsals on a GPU: peaks by phase, reserved bytes, compute seconds of a step.

    python benchmarks/gpu/validate.py --output out --minutes 9        # resumes where it stopped
    python benchmarks/gpu/validate.py --output out --report           # only the table, from out/cases.jsonl
    python benchmarks/gpu/validate.py --output out --tiny             # on a CPU: a few tiny cases, to try the script
    python benchmarks/gpu/validate.py --output out --fake-tensors     # on a CPU: the grid's FSDP2 and DDP cases, traced
    python benchmarks/gpu/validate.py --output out --fits             # rows of README's table instead, of `fits.py`

The grid is in `grid.py`; its digest is part of every result. Each case is one JSON line in `cases.jsonl`, flushed;
`results.jsonl` has the errors of all of them and what is needed to repeat them. A case that runs out of memory is a
result.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

import fits
import psutil
from forked_rehearsals import log_tail, prepare, rehearse
from grid import ARCHITECTURES, TINY_ARCHITECTURES, Case, digest, registered_grid, tiny_grid
from plan_errors import recorded, summary
from record import Row, append_line, circumstances, print_table, read_lines, write_lines, write_result
from small_job import words

from toolkit.hardware.gpu_table import find_gpu

STEPS, UNTIMED_STEPS, LORA_RANK = 6, 2, 16
TIMEOUT_SECONDS = 150
AT_ONCE = min(4, max(1, (os.cpu_count() or 1) // 4))
UNTIMED_SHARE = 2 / 3
KILLED = {"status": "failed", "message": "the process that ran it was killed"}
HOST_OF_PROCESS = 3 * 2**30
MEASURED = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "num_params", "num_trainable_params")
MEASURED += ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes", "phase_peaks", "compute_step_seconds")
MEASURED += ("peaks",)
CONFIGS = ARCHITECTURES | TINY_ARCHITECTURES | fits.configs()
TRACED = ("single", "ddp", "fsdp2", "fsdp2_grad_op", "fsdp2_hybrid")
JOB = ("max_seq_length", "per_device_train_batch_size", "activation_checkpointing", "gradient_accumulation_steps")


def adapters(case: Case) -> dict[str, Any]:
    """Return the arguments of a case's adapters: none for a full fine-tune."""
    return {} if case["method"] == fits.FULL else {"lora_r": LORA_RANK}


def fits_grid(gpu: str, *, tiny: bool) -> list[Case]:
    """Return the rows of README's table in each column whose GPU is no larger than this one; tiny: a few, of a CPU.

    QLoRA needs weights to quantize, and a rehearsal has none.
    """
    memory = {name: find_gpu(name).memory_bytes for name in (gpu, *(each["gpu"] for each in fits.HARDWARE.values()))}
    columns = [name for name, each in fits.HARDWARE.items() if memory[each["gpu"]] <= 1.01 * memory[gpu]]
    rows = [row for row in fits.rows() if row[1] != fits.QLORA][: 5 if tiny else None]
    found = [fits.case_of(*row, column) for column in columns[: 1 if tiny else None] for row in rows]
    small = {"architecture": "tiny-qwen3", "max_seq_length": 32, "per_device_train_batch_size": 2} if tiny else {}
    return [case | small for case in found if case is not None]


def measured(case: Case, work: Path, *, fake_tensors: bool = False) -> dict[str, Any]:
    """Run one rehearsal in its own process; return its facts, or how it failed."""
    model = work / case["architecture"] / "config.json"
    job = {"model_name_or_path": model, "max_steps": STEPS, "untimed_steps": UNTIMED_STEPS, "dataset": "synthetic"}
    job |= {name: str(case[name]).lower() for name in JOB if name in case} | adapters(case)
    folder, started = work / case["id"], time.monotonic()
    named = {name: case[name] for name in ("preset", "world_size", "rank")}
    how = {"timeout_seconds": TIMEOUT_SECONDS, "fake_tensors": fake_tensors}
    code = rehearse(**named, words=words(**job), folder=folder, **how)
    seconds = {"wall_seconds": round(time.monotonic() - started, 1)}
    run_json, failure_json = folder / "run.json", folder / "failure.json"
    run = json.loads(run_json.read_text()) if run_json.is_file() else {}
    if code == 0:
        return {"status": run["status"], **{name: run["rehearsal"].get(name) for name in MEASURED}, **seconds}
    failure = json.loads(failure_json.read_text()) if failure_json.is_file() else {"message": log_tail(folder)}
    status = "timed_out" if code is None else failure.get("kind", "failed")
    return {"status": status, "message": failure["message"][-500:], "phase": failure.get("phase"), **seconds}


def planner(gpu: str, work: Path) -> Callable[[Case], Row | None]:
    """Return a function from a case to its plan, a row of `toolkit plan --json`, or None if there is no plan."""
    from toolkit.errors import ToolkitError
    from toolkit.models.read_model import read_model
    from toolkit.plan.planned_job import PlannedJob
    from toolkit.plan.planner import PlanRequest, make_plans
    from toolkit.presets import load_preset

    @functools.cache
    def shape_of(architecture: str) -> Any:
        path = work / f"{architecture}.json"
        path.write_text(json.dumps(CONFIGS[architecture]))
        return read_model(str(path))

    def plan(case: Case) -> Row | None:
        given = {name: case[name] for name in (*JOB, "gradient_as_bucket_view") if name in case}
        job = PlannedJob(**given, **adapters(case), lengths_differ=False)
        shape = shape_of(case["architecture"])
        names = {"presets": [load_preset(case["preset"])], "world_sizes": [case["world_size"]]}
        try:
            row = make_plans(PlanRequest(shape=shape, **names, job=job, gpu=find_gpu(case.get("gpu", gpu))))[0].as_row()
            return row | {"activations_from": shape.activations_from}
        except ToolkitError as error:
            print(f"{case['id']}: no plan: {error.message}", file=sys.stderr)
            return None

    return plan


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that cases take: of the GPU as planned, and of the host."""

    gpu: float
    host: float

    def __sub__(self, taken: Room) -> Room:
        return Room(gpu=self.gpu - taken.gpu, host=self.host - taken.host)

    @classmethod
    def of(cls, case: Case, plan: Row | None) -> Room:
        """Return what a case needs: its weights pass through the host, unless they are sharded as they are made."""
        if plan is None:
            return cls(gpu=math.inf, host=math.inf)
        sharded = case["preset"].startswith("zero3")
        weights = 0 if sharded else plan["num_params"] * (4 if case["method"] == fits.FULL else 2)
        offloaded = plan["host_bytes"] / min(case["world_size"], 8) if "offload" in case["preset"] else 0
        return cls(gpu=plan["planned_peak_bytes"], host=HOST_OF_PROCESS + weights + offloaded)


def run_cases(
    left: Sequence[Case], plan: Callable[[Case], Row | None], work: Path, *, room: Room, until: float, **how: Any
) -> Iterator[Case]:
    """Run cases in their order, several at a time as far as they fit together; yield each with its plan and outcome.

    A case that is timed, on one rank, runs alone, in the last third of the time: memory is measured as well beside
    others. One that needs more of the host than there is, is left out.
    """
    for architecture in {case["architecture"] for case in left}:
        (work / architecture).mkdir(exist_ok=True)
        (work / architecture / "config.json").write_text(json.dumps(CONFIGS[architecture]))
    began, running = time.monotonic(), dict[int, tuple[Case, Row | None, Room]]()
    timed = [case for case in left if case["world_size"] == 1]
    for alone, cases in ((False, [case for case in left if case not in timed]), (True, timed)):
        ends = until if alone or not timed else began + (until - began) * UNTIMED_SHARE
        waiting = deque(cases)
        while waiting or running:
            if time.monotonic() > ends:
                waiting.clear()
            while waiting:
                planned = plan(waiting[0])
                need, free = Room.of(waiting[0], planned), room
                if need.host > room.host and planned is not None:
                    why = f"needs {need.host / 2**30:.0f} GiB of the host's memory"
                    yield waiting.popleft() | {"planned": planned, "measured": {"status": "left_out", "message": why}}
                    continue
                for *_, taken in running.values():
                    free -= taken
                beside = need.gpu <= free.gpu and need.host <= free.host and len(running) < AT_ONCE and not alone
                if running and not beside:
                    break
                case = waiting.popleft()
                running[_start(case, work, **how)] = (case, planned, need)
            ended = os.wait()[0] if running else None
            if ended in running:
                case, planned, _ = running.pop(ended)
                outcome = work / f"{case['id']}.json"
                found = json.loads(outcome.read_text()) if outcome.is_file() else KILLED
                yield case | {"planned": planned, "measured": found}


def _start(case: Case, work: Path, **how: Any) -> int:
    """Fork a process that runs a case and writes what it measured; return the process's number."""
    child = os.fork()
    if child == 0:
        try:
            (work / f"{case['id']}.json").write_text(json.dumps(measured(case, work, **how)))
        finally:
            os._exit(0)
    return child


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print a short table."""
    done = sum(row["status"] == "completed" for row in rows)
    print(f"{len(rows)} cases, {done} completed")
    form = "{split}|{what}|{name}|{cases}|{mean:.1%}|{p95:.1%}|{under:.1%}|{worst:+.1%} ({worst_case})"
    head = ("half", "of", "", "cases", "mean error", "p95", "planned less", "worst")
    print_table(head, [form.format(**row).split("|") for row in summary(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of cases.jsonl and results.jsonl")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no case after this long")
    parser.add_argument("--tiny", action="store_true", help="run a few tiny cases on the CPU")
    parser.add_argument("--fake-tensors", action="store_true", help="run the cases that can be traced, on a CPU")
    parser.add_argument("--fits", action="store_true", help="run the rows of README's table instead of the grid")
    parser.add_argument("--cases", type=Path, help="run the cases of a JSON file instead of the grid")
    parser.add_argument("--limit", type=int, help="run at most this many cases of the grid")
    parser.add_argument("--gpu", default="h100", help="name of the GPU in the planner")
    parser.add_argument("--record", action="store_true", help="write the record `traced_grid` and its table")
    parser.add_argument("--report", action="store_true", help="run no cases")
    given = parser.parse_args()
    started, grid = time.monotonic(), tiny_grid() if given.tiny else registered_grid()
    grid = fits_grid(given.gpu, tiny=given.tiny) if given.fits else grid
    grid = json.loads(given.cases.read_text()) if given.cases else grid
    if given.fake_tensors:
        grid = [case for case in grid if case["preset"] in TRACED]
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / "cases.jsonl"
    finished = read_lines(path)
    write_lines(path, finished)  # without an incomplete last line
    done = {case["id"] for case in finished}
    left = [] if given.report else [case for case in grid[: given.limit] if case["id"] not in done]
    if left:
        prepare(cpu=given.tiny or given.fake_tensors)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plan = planner(given.gpu, folder)
        room = Room(gpu=find_gpu(given.gpu).memory_bytes, host=0.9 * psutil.virtual_memory().available)
        how = {"room": room, "until": started + given.minutes * 60, "fake_tensors": given.fake_tensors}
        for case in run_cases(left, plan, folder, **how):
            append_line(path, case)
            print(case["id"], case["architecture"], case["preset"], case["measured"]["status"], file=sys.stderr)
        # Plans are cheap: they are made again for all cases, so that a new planner needs no new measurements.
        cases = [case | {"planned": plan(case) or case.get("planned")} for case in read_lines(path)]
    facts = {"grid_sha256": digest(grid), "registered_cases": len(grid), "steps": STEPS}
    facts |= {"untimed_steps": UNTIMED_STEPS, "lora_rank": LORA_RANK}
    rows = [recorded(case) for case in cases]
    print_summary(rows)
    write_lines(given.output / "results.jsonl", [circumstances() | facts, *rows])
    if given.record:
        print(write_result("traced_grid", facts, rows))


if __name__ == "__main__":
    main()
