"""Run the same fine-tuning job in a bare Trainer, the toolkit, TRL, LLaMA-Factory, ms-swift and axolotl.

    python benchmarks/peers.py --work DIR --repeats 5
    python benchmarks/peers.py --work DIR --peers bare toolkit trl --jobs single-full ddp-lora --repeats 9
    python benchmarks/peers.py --work DIR --in-turns      # speed, without the node's changes; no memory
    python benchmarks/peers.py --work DIR --device cuda --precision bf16 --size 1b --ranks 8 --environments DIR

Each program that needs other versions gets an environment of its own, which is built first (`--build-only` stops
there; the folder can be taken to a node without network). Every program trains the same model on the same rows in the
same order, with the same optimizer, schedule, clipping and precision and without activation checkpointing; a run whose
losses differ from the bare Trainer's is shown as not the same job. All are measured in the same way, from outside:
memory and processor time from /proc, the time of each step by a hook that only writes a line. A finished run is a line
in DIR/runs.jsonl, and the same command resumes.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from peer_jobs import comparison, environments, measurement
from peer_jobs.commands import PROGRAMS, environment_of, observe_launch
from peer_jobs.job import METHODS, PRESETS, SIZES, Job, Setting, prepare
from peer_jobs.turns import run_in_turns
from record import append_line, print_table, read_lines, write_result

# Figure of a run -> its column.
SPEED = {"tokens_per_cpu_second": "tokens per CPU second", "tokens_per_second": "per second"}
SPEED |= {"first_step_seconds": "first step"}
MEMORY = {"peak_pss_bytes": "peak memory"}
RATIO = "ours / theirs (95 % CI)"
BASELINE, OURS = "bare", "toolkit"
JOBS = [f"{preset}-{method}" for preset in PRESETS for method in METHODS]
Record = dict[str, Any]


def runs_in_order(programs: Sequence[str], jobs: Sequence[str], repeats: int) -> Iterator[tuple[int, str, str]]:
    """Yield every run, interleaved: each repeat has all of them, and begins with another program.

    >>> [program for _, _, program in runs_in_order(["bare", "trl"], ["ddp-full"], 2)]
    ['bare', 'trl', 'trl', 'bare']
    """
    for repeat in range(repeats):
        first = repeat % len(programs)
        for job in jobs:
            for program in (*programs[first:], *programs[:first]):
                yield repeat, job, program


def waiting(wanted: Iterator[tuple[int, str, str]], done: Sequence[Record]) -> list[tuple[int, str, str]]:
    """Return the runs that are left: not those that finished, nor repeats of one that failed."""
    finished = {(run["repeat"], run["job"], run["program"]) for run in done}
    failed = {(run["job"], run["program"]) for run in done if run["error"] is not None}
    return [run for run in wanted if run not in finished and run[1:] not in failed]


def run_program(
    program: str,
    job: Job,
    folder: Path,
    *,
    environments_folder: Path,
    timeout: float,
    observed: bool = False,
    turns_port: int | None = None,
) -> measurement.Run:
    """Run a program once in an empty folder, if wanted observed, or in turns with others."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python = environments.python_of(program, environments_folder)
    launch = PROGRAMS[program](job, str(python), folder)
    launch = observe_launch(launch, folder) if observed else launch
    for name, text in launch.files.items():
        (folder / name).write_text(text)
    extensions = environments.extensions_of(program, environments_folder)
    own = {"python": python, "extensions": extensions, "folder": folder, "turns_port": turns_port}
    where = {"environment": environment_of(launch, job, **own), "folder": folder, "cwd": launch.cwd or folder}
    # Reading the memory of all processes takes a fifth of a core, and says nothing where others share it.
    where["sample_seconds"] = measurement.SAMPLE_SECONDS if turns_port is None else 10
    run = measurement.run(launch.argv, timeout_seconds=timeout, **where)
    if run.error is None and any(len(rank) != job.setting.steps for rank in run.ranks):
        raise SystemExit(f"{folder}: {[len(rank) for rank in run.ranks]} steps were recorded, of {job.setting.steps}")
    return run


def measure(program: str, job: Job, given: argparse.Namespace, turns_port: int | None = None) -> Record:
    """Run a program once, if it could be built; what it wrote is deleted, unless it failed."""
    folder: Path = given.work / "runs" / f"{job.name}-{program}"
    limits = {"environments_folder": given.environments, "timeout": given.timeout_seconds}
    if program in given.unbuilt:
        return {"exit_code": None, "error": given.unbuilt[program]}
    run = run_program(program, job, folder, **limits, turns_port=turns_port)
    if run.error is None:
        shutil.rmtree(folder)
    # Programs that are alive at the same time share pages, so that a share of them is not what one needs alone.
    return asdict(run) | ({} if turns_port is None else {"peak_pss_bytes": None})


def measure_in_turns(programs: Sequence[str], job: Job, given: argparse.Namespace) -> list[Record]:
    starts = [functools.partial(measure, program, job, given) for program in programs]
    return run_in_turns(starts, ranks=job.ranks, rounds=job.setting.timed_steps)


def results(done: Sequence[Record], given: argparse.Namespace) -> list[Record]:
    """Return a row for each job and program that was run, in the order of the table."""
    rows = []
    for job in (job_of(name, given) for name in given.jobs):
        own = [run for run in done if run["job"] == job.name]
        for run in (run for run in own if run["error"] is None):
            run["figures"] = comparison.figures(run, job.setting.untimed_steps, job.tokens_per_step)
        runs = {program: [run for run in own if run["program"] == program] for program in PROGRAMS}
        rows += [row_of(program, job, runs) for program in given.peers if runs[program]]
    return rows


def row_of(program: str, job: Job, by_program: dict[str, list[Record]]) -> Record:
    """Return a program's row: its failure, or its figures, our ratio to them, and how its job differs."""
    row: Record = {"job": job.name, "program": program}
    for run in by_program[program]:
        if run["error"] is not None:
            return row | {name: run[name] for name in ("error", "exit_code")}
    own, ours, bare = ([run for run in by_program[name] if run["error"] is None] for name in (program, OURS, BASELINE))
    figures = own[0]["figures"]
    row |= comparison.row(own, ours) | {"facts": figures["facts"]}
    return row | ({"differences": comparison.differences(figures, bare[0]["figures"], job)} if bare else {})


def header(figures: Mapping[str, str]) -> list[str]:
    return ["job", "program", "runs", *(cell for column in figures.values() for cell in (column, RATIO))]


def cells_of(row: Record, figures: Mapping[str, str]) -> list[object]:
    """Return a row of the table: figures, a reason where a program could not run, a note where it differs."""
    head = [f"`{row['job']}`", row["program"]]
    if "error" in row:
        code = "not run" if row["exit_code"] is None else f"exit {row['exit_code']}"
        reason = row["error"].replace("|", "/").replace("<", "&lt;")
        return [*head, code, "n/a", reason, *["n/a"] * (2 * len(figures) - 2)]
    different = f"not the same job: {'; '.join(row['differences'])}" if row.get("differences") else None
    cells: list[object] = [*head, row["repeats"]]
    for name in figures:
        cells.append(format_figure(name, row["medians"].get(name)))
        cells.append("" if row["program"] == OURS else different or shown(row["ours_over_theirs"].get(name)))
    return cells


def format_figure(name: str, value: float | None) -> str:
    if value is None:
        return "n/a"
    if name == "peak_pss_bytes":
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:.1f} s" if name == "first_step_seconds" else f"{value:,.0f}"


def shown(ratio: Record | None) -> str:
    """Return a ratio with its 95 % CI.

    >>> shown({"ratio": 1.104, "interval": [1.05, 1.161]})
    '1.10 (1.05 to 1.16)'
    """
    if ratio is None:
        return "n/a"
    interval = ratio["interval"]
    return f"{ratio['ratio']:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def job_of(name: str, given: argparse.Namespace) -> Job:
    preset, method = name.split("-")
    model, rows = given.work / "model", given.work / "rows" / "train.jsonl"
    return Job(preset=preset, method=method, setting=given.setting, model=model, rows=rows)


def build_all(given: argparse.Namespace) -> dict[str, str]:
    """Build what is missing; return the programs whose environment could not be built, with the reason."""
    unbuilt = {}
    for program in given.peers:
        print(f"{program}: environment", flush=True)
        try:
            environments.build(program, given.environments)
        except environments.Unbuildable as reason:
            unbuilt[program] = f"environment: {reason}"
            continue
        if given.device == "cpu" and any(name.startswith("zero") for name in given.jobs):
            environments.compile_ops(program, given.environments)
    return unbuilt


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same fine-tuning job in other programs.")
    parser.add_argument("--peers", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--in-turns", action="store_true", help="the programs of a job train in turns, a step each")
    choices = {"device": ("cpu", "cuda"), "precision": ("fp32", "bf16"), "size": tuple(SIZES)}
    for field in fields(Setting):
        flag, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        parser.add_argument(flag, type=kind, choices=choices.get(field.name), default=field.default)
    parser.add_argument("--timeout-seconds", type=float, default=400)
    parser.add_argument("--work", type=Path, required=True, help="folder for finished runs; the same command resumes")
    parser.add_argument("--environments", type=Path, help="folder of the built environments; default: in --work")
    parser.add_argument("--build-only", action="store_true", help="build the environments and stop")
    parser.add_argument("--at-most-seconds", type=float, help="start no run after this long; the next call resumes")
    parser.add_argument("--name", default="peers", help="name of the result file")
    given = parser.parse_args()
    given.setting = Setting(**{field.name: getattr(given, field.name) for field in fields(Setting)})
    given.work = given.work.resolve()
    given.environments = (given.environments or given.work / "environments").resolve()
    return given


def run_all(given: argparse.Namespace, done: list[Record]) -> int:
    """Run what is left, as long as there is time; return how many runs are still left."""
    began, ledger = time.monotonic(), given.work / "runs.jsonl"
    left = waiting(runs_in_order(given.peers, given.jobs, given.repeats), done)
    while left and (given.at_most_seconds is None or time.monotonic() - began < given.at_most_seconds):
        repeat, job_name, program = left[0]
        job = job_of(job_name, given)
        if given.in_turns:
            programs = [other for *which, other in left if which == [repeat, job_name]]
            measured = measure_in_turns(programs, job, given)
        else:
            programs, measured = [program], [measure(program, job, given)]
        for program, run in zip(programs, measured, strict=True):
            record: Record = {"repeat": repeat, "job": job_name, "program": program, **run}
            done.append(record)
            append_line(ledger, record)
        left = waiting(runs_in_order(given.peers, given.jobs, given.repeats), done)
        ended = [f"{program}: {run['error'] or 'finished'}" for program, run in zip(programs, measured, strict=True)]
        print(f"repeat {repeat + 1}, {job_name}, {', '.join(ended)}; {len(left)} left", flush=True)
    return len(left)


def main() -> None:
    # The program that runs is ended too; those that train in turns go on to their end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = read_arguments()
    prepare(given.work, given.setting)
    given.unbuilt = build_all(given)
    if given.build_only:
        raise SystemExit("\n".join(f"{program}: {reason}" for program, reason in given.unbuilt.items()) or 0)
    done = read_lines(given.work / "runs.jsonl")
    left = run_all(given, done)
    rows = results(done, given)
    for figures in (SPEED,) if given.in_turns else (SPEED, MEMORY):
        print_table(header(figures), [cells_of(row, figures) for row in rows])
    if left:
        raise SystemExit(f"{left} runs are left: the same command resumes")
    built = [program for program in given.peers if program not in given.unbuilt]
    libraries = {program: environments.versions(program, given.environments) for program in built}
    print(write_result(given.name, {"setting": asdict(given.setting), "libraries": libraries}, rows))


if __name__ == "__main__":
    main()
