"""Mutate every file format that the toolkit reads, 20,000 times: no traceback, no hang, nothing written elsewhere.

    python benchmarks/mutations.py WORK_FOLDER [--mutations 20000] [--seed 0] [--workers 2] [--format NAME]

Formats, mutations and the property are those of the test suite (`tests/file_mutations/`, `tests/test_mutations.py`): a
command on a mutated file ends with exit code 0, 1 or 2, and 2 comes with a message of a few lines. Checkpoints are made
by six runs of the toolkit on two CPU ranks. Chunks of mutations run in processes of their own, with a limit on memory;
finished chunks are lines of WORK_FOLDER/chunks.jsonl, and the same command resumes. The smallest input of each family
of failures is kept with its traceback in WORK_FOLDER/failures.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import faulthandler
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

import yaml  # noqa: E402
from file_mutations.attempts import Case, Outcome, attempt, limit_memory  # noqa: E402
from file_mutations.checkpoint_formats import checkpoint_formats, exported_formats, run_format  # noqa: E402
from file_mutations.documents import json_text, yaml_text  # noqa: E402
from file_mutations.formats import Format, content_of, light_formats  # noqa: E402
from file_mutations.small_runs import exported, small_runs  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from record import print_table, write_result, write_table  # noqa: E402

DOCUMENT = ROOT / "docs" / "evidence" / "mutated-files.md"
TABLE = "mutations"
CHUNK = 200
HANG_SECONDS = 2.0  # of CPU time: the machine may be busy
CHUNK_SECONDS = 1_200
# Of one process. torch alone maps several GB.
MEMORY_BYTES = 16 * 2**30
HEADER = ["kind of file", "tried", "accepted", "refused", "failed", "slowest (CPU s)"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Mutations of one format that one process tries."""

    format: str
    number: int
    mutations: int

    @property
    def name(self) -> str:
        return f"{self.format} {self.number}"


def formats(work: Path) -> list[Format]:
    """Return every format. Runs the toolkit for the checkpoints that are missing in the work folder."""
    runs = small_runs(work / "runs")
    model = work / "runs" / "model"
    shards = exported(runs["ddp"], work / "runs" / "exported", model)
    return [*light_formats(), run_format(runs["ddp"]), *exported_formats(shards), *checkpoint_formats(runs, model)]


def chunks(kinds: list[Format], mutations: int) -> list[Chunk]:
    """Divide the mutations among the formats by their shares, largest number first."""
    shares = sum(kind.share for kind in kinds)
    found = []
    for kind in kinds:
        left, number = -(-mutations * kind.share // shares), 0
        while left > 0:
            found.append(Chunk(format=kind.name, number=number, mutations=min(CHUNK, left)))
            left, number = left - CHUNK, number + 1
    return sorted(found, key=lambda chunk: chunk.number)


def run_chunk(kind: Format, chunk: Chunk, first_seed: int, work: Path) -> dict[str, Any]:
    """Try the mutations of a chunk in this process."""
    outcomes: list[tuple[Case, Outcome]] = []
    folder = attempts_folder(work, chunk)
    shutil.rmtree(folder, ignore_errors=True)
    unchanged = {str(case.command): case for case in kind.valid()}
    for number, case in enumerate(unchanged.values()):  # imports count for no mutation
        attempt(case, folder / f"valid-{number}")

    @seed(int.from_bytes(hashlib.sha256(f"{first_seed} {chunk.name}".encode()).digest()[:8]))
    @settings(
        max_examples=chunk.mutations,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.cases())
    def try_each(case: Case) -> None:
        faulthandler.dump_traceback_later(120, exit=True)  # where no signal handler of Python's would run
        outcomes.append((case, attempt(case, folder / str(len(outcomes)))))
        faulthandler.cancel_dump_traceback_later()

    try_each()
    shutil.rmtree(folder, ignore_errors=True)
    return summary(chunk, outcomes, work)


def summary(chunk: Chunk, outcomes: list[tuple[Case, Outcome]], work: Path) -> dict[str, Any]:
    """Return the counts of a chunk, and save its failures."""
    kinds = [outcome.kind for _, outcome in outcomes]
    slow = [(case, slow_failure(outcome)) for case, outcome in outcomes]
    failures = [(case, outcome) for case, outcome in slow if outcome.kind == "failed"]
    families: dict[str, int] = {}
    for case, outcome in failures:
        families[outcome.family] = families.get(outcome.family, 0) + 1
        save_failure(case, outcome, work)
    return {
        "chunk": chunk.name,
        "format": chunk.format,
        "tried": len(kinds),
        "accepted": sum(outcome.kind == "accepted" for _, outcome in slow),
        "refused": sum(outcome.kind == "refused" for _, outcome in slow),
        "failed": len(failures),
        "slowest_cpu_seconds": round(max((outcome.cpu_seconds for _, outcome in outcomes), default=0.0), 3),
        "families": families,
    }


def slow_failure(outcome: Outcome) -> Outcome:
    """Count what took more than two seconds as failed."""
    if outcome.kind == "failed" or outcome.cpu_seconds <= HANG_SECONDS:
        return outcome
    report = f"{outcome.cpu_seconds:.1f} s of CPU time; then {outcome.kind}: {outcome.message}"
    return Outcome(kind="failed", cpu_seconds=outcome.cpu_seconds, family="slow", report=report)


def save_failure(case: Case, outcome: Outcome, work: Path) -> None:
    """Keep the smallest input of a family."""
    folder = work / "failures" / slug(case.format) / slug(outcome.family)
    files = {name: content for name, content in case.files.items() if isinstance(content, bytes)}
    size = sum(map(len, files.values()))
    kept = folder / "failure.json"
    if kept.exists() and json.loads(kept.read_text())["bytes"] <= size:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / "input" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    facts = {"bytes": size, "command": str(case.command), "family": outcome.family, "changed": case.changed}
    facts |= {"difference": difference(case), "traceback": outcome.report}
    kept.write_text(json.dumps(facts, indent=2))


def difference(case: Case) -> str:
    """Return the changed lines of a text file, as far as they are short."""
    before, after = (
        case.original.decode("utf-8", "replace"),
        content_of(case.files[case.changed]).decode("utf-8", "replace"),
    )
    with contextlib.suppress(ValueError, yaml.YAMLError):  # as the mutated file is written
        if case.changed.endswith(".json"):
            before = json_text(json.loads(before))
        elif case.changed.endswith((".yaml", ".yml")):
            before = yaml_text(yaml.safe_load(before))
    lines = difflib.unified_diff(before.splitlines(), after[:500_000].splitlines(), lineterm="", n=1)
    return "\n".join(line[:160] for line in itertools.islice(lines, 2, 30))


def slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)[:120].strip("-")


def attempts_folder(work: Path, chunk: Chunk) -> Path:
    return work / "attempts" / slug(chunk.name)


def run_in_process(chunk: Chunk, options: argparse.Namespace) -> dict[str, Any]:
    """Run a chunk in a process of its own; one that dies is a failure of the attempt that it left behind."""
    words = [
        str(options.work),
        "--seed",
        str(options.seed),
        "--chunk",
        json.dumps([chunk.format, chunk.number, chunk.mutations]),
    ]
    command = [sys.executable, __file__, *words]
    try:
        # With one thread, CPU time is at most wall time.
        variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=CHUNK_SECONDS, check=False
        )
        code, message = ended.returncode, ended.stderr
    except subprocess.TimeoutExpired:
        code, message = -1, f"no end after {CHUNK_SECONDS} s"
    if code == 0:
        return dict(json.loads(ended.stdout.splitlines()[-1]))
    assert "Timeout" in message or code < 0, message[-3_000:]  # otherwise it is our own bug
    left = attempts_folder(options.work, chunk)
    crash = options.work / "failures" / "crash" / slug(chunk.name)
    shutil.copytree(left, crash, dirs_exist_ok=True, symlinks=True)
    (crash / "stderr.txt").write_text(message)
    tried = (
        max((int(path.name) for path in left.iterdir() if path.name.isdigit()), default=0) + 1 if left.exists() else 1
    )
    counts = {"tried": tried, "accepted": 0, "refused": tried - 1, "failed": 1, "slowest_cpu_seconds": 0.0}
    return {"chunk": chunk.name, "format": chunk.format, **counts, "families": {f"process ended with {code}": 1}}


def finished(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def table_rows(found: dict[str, Any]) -> list[list[object]]:
    """Return one row per kind of file, checkpoints of all engines together, and the total."""
    chunks = found["chunks"]
    kind_of = {chunk["chunk"]: chunk["format"].partition(" (")[0] for chunk in chunks}
    groups = {
        kind: [chunk for chunk in chunks if kind_of[chunk["chunk"]] == kind] for kind in sorted(set(kind_of.values()))
    }
    rows: list[list[object]] = []
    for name, group in [*groups.items(), ("all", chunks)]:
        counts = [sum(chunk[key] for chunk in group) for key in ("tried", "accepted", "refused", "failed")]
        rows.append([name, *counts, max((chunk["slowest_cpu_seconds"] for chunk in group), default=0)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--format", action="append", help="only formats of this name; repeatable")
    parser.add_argument("--chunk", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in formats(options.work) if not options.format or kind.name in options.format]
    if options.chunk is not None:
        limit_memory(MEMORY_BYTES)
        name, number, mutations = options.chunk
        chunk = Chunk(format=name, number=number, mutations=mutations)
        kind = next(kind for kind in kinds if kind.name == name)
        print(json.dumps(run_chunk(kind, chunk, options.seed, options.work)))
        return
    record = options.work / "chunks.jsonl"
    found = list(finished(record))
    done = {chunk["chunk"] for chunk in found}
    planned = chunks(kinds, options.mutations)
    started = time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool, record.open("a") as file:
        futures = [pool.submit(run_in_process, chunk, options) for chunk in planned if chunk.name not in done]
        for future in as_completed(futures):
            found.append(future.result())
            file.write(json.dumps(found[-1]) + "\n")
            file.flush()
            tried, failed = (sum(chunk[key] for chunk in found) for key in ("tried", "failed"))
            print(
                f"{tried:,} tried, {failed:,} failed, {time.monotonic() - started:.0f} s: {found[-1]['chunk']}",
                flush=True,
            )
    result = {"seed": options.seed, "chunks": sorted(found, key=lambda chunk: str(chunk["chunk"]))}
    print_table(HEADER, table_rows(result))
    families = {f"{chunk['format']}: {family}" for chunk in found for family in chunk["families"]}
    print("\n".join(sorted(families)))
    if not options.format:
        write_result("mutations", result)
        write_table(DOCUMENT, TABLE, HEADER, table_rows(result))


if __name__ == "__main__":
    main()
