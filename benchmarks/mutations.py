"""Mutate every file format that the toolkit reads, 20,000 times: no traceback, no hang, nothing written elsewhere.

    python benchmarks/mutations.py --work DIR [--mutations 20000] [--seed 0] [--workers 2] [--format NAME]

Formats, mutations and the property are those of the test suite (`tests/file_mutations/`, `tests/test_mutations.py`): a
command on a mutated file ends with exit code 0, 1 or 2, and 2 comes with a message of a few lines. Checkpoints are made
by six runs of the toolkit on two CPU ranks. Chunks of mutations run in processes of their own, with a limit on memory;
finished chunks are lines of DIR/chunks.jsonl, and the same command resumes. The smallest input of each family
of failures is kept with its traceback in DIR/failures.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from record import ROOT, append_line, print_table, read_lines, write_result

sys.path.append(str(ROOT / "tests"))

from file_mutations.attempts import Case, Outcome, attempt
from file_mutations.checkpoint_formats import checkpoint_formats, exported_formats, run_format
from file_mutations.formats import Format, light_formats, mutated_cases
from hypothesis import HealthCheck, Phase, given, seed, settings
from small_job import small_model, train

CASES = ("ddp", "zero2", "zero3", "zero3-lora", "fsdp2", "fsdp2-lora")
COUNTS = ("tried", "accepted", "refused", "failed")
CHUNK = 200
HANG_SECONDS = 2.0  # of CPU time: the machine may be busy
CHUNK_SECONDS = 1_200
# Of one process. torch alone maps several GB.
MEMORY_BYTES = 16 * 2**30
HEADER = ["kind of file", "tried", "accepted", "refused", "failed", "slowest (CPU s)"]


class Chunk(NamedTuple):
    """Mutations of one format that one process tries."""

    format: str
    number: int
    mutations: int

    @property
    def name(self) -> str:
        return f"{self.format} {self.number}"


def formats(work: Path) -> list[Format]:
    """Return every format. Runs the toolkit for the checkpoints that are missing in the work folder."""
    from toolkit.checkpoint.hf_export import export
    from toolkit.record.checkpoints import list_checkpoints

    runs = {case: work / "runs" / case for case in CASES}
    model = small_model(work / "runs" / "model", vocab_size=300)  # the words are bytes, so that checkpoints are small
    job = {"model_name_or_path": model, "dataset": ROOT / "examples" / "data.jsonl", "seed": 1, "max_steps": 2}
    job |= {"save_steps": 1, "per_device_train_batch_size": 2, "save_model": "true", "max_seq_length": 320}
    for case, folder in runs.items():
        preset, _, lora = case.partition("-")
        if not any(folder.glob("*model.safetensors")):
            train(preset, folder, **job, **({"lora_r": 2} if lora else {}))
    shards = work / "runs" / "exported"
    if not shards.is_dir():
        export(list_checkpoints(runs["ddp"])[0].path, shards, max_shard_bytes=150_000, base_model=str(model))
    return [*light_formats(), run_format(runs["ddp"]), *exported_formats(shards), *checkpoint_formats(runs, model)]


def chunks(kinds: list[Format], mutations: int) -> list[Chunk]:
    """Divide the mutations among the formats by their shares, largest number first."""
    shares = sum(kind.share for kind in kinds)
    found = []
    for kind in kinds:
        wanted = -(-mutations * kind.share // shares)
        starts = range(0, wanted, CHUNK)
        found += [Chunk(kind.name, number, min(CHUNK, wanted - start)) for number, start in enumerate(starts)]
    return sorted(found, key=lambda chunk: chunk.number)


def run_chunk(kind: Format, chunk: Chunk, first_seed: int, work: Path) -> dict[str, Any]:
    """Try the mutations of a chunk in this process."""
    outcomes: list[tuple[Case, Outcome]] = []
    folder = work / "attempts" / slug(chunk.name)
    shutil.rmtree(folder, ignore_errors=True)
    unchanged = {str(case.command): case for case in kind.valid()}
    for number, case in enumerate(unchanged.values()):  # imports count for no mutation
        attempt(case, folder / f"valid-{number}")

    alone = {"database": None, "deadline": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}

    @seed(int.from_bytes(hashlib.sha256(f"{first_seed} {chunk.name}".encode()).digest()[:8]))
    @settings(max_examples=chunk.mutations, **alone)
    @given(mutated_cases(kind))
    def try_each(case: Case) -> None:
        faulthandler.dump_traceback_later(120, exit=True)  # where no signal handler of Python's would run
        outcomes.append((case, attempt(case, folder / str(len(outcomes)))))
        faulthandler.cancel_dump_traceback_later()

    try_each()
    shutil.rmtree(folder, ignore_errors=True)
    return summary(chunk, outcomes, work)


def summary(chunk: Chunk, outcomes: list[tuple[Case, Outcome]], work: Path) -> dict[str, Any]:
    """Return the counts of a chunk, and save its failures; what took more than two seconds has failed."""
    counts, families = Counter(dict.fromkeys(COUNTS, 0), tried=len(outcomes)), Counter[str]()
    for case, outcome in outcomes:
        if outcome.kind != "failed" and outcome.cpu_seconds > HANG_SECONDS:
            report = f"{outcome.cpu_seconds:.1f} s of CPU time; then {outcome.kind}: {outcome.message}"
            outcome = replace(outcome, kind="failed", family="slow", message=report)
        counts[outcome.kind] += 1
        if outcome.kind == "failed":
            families[outcome.family] += 1
            save_failure(case, outcome, work)
    slowest = round(max((outcome.cpu_seconds for _, outcome in outcomes), default=0.0), 3)
    return {"chunk": chunk.name, "format": chunk.format, **counts, "slowest_cpu_seconds": slowest, "families": families}


def save_failure(case: Case, outcome: Outcome, work: Path) -> None:
    """Keep the smallest input of a family, with its command and traceback."""
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
    kept.write_text(json.dumps(facts | {"traceback": outcome.message}, indent=2))


def slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)[:120].strip("-")


def run_in_process(chunk: Chunk, options: argparse.Namespace) -> dict[str, Any]:
    """Run a chunk in a process of its own; one that dies is a failure of the attempt that it left behind."""
    command = [sys.executable, __file__, "--work", str(options.work), "--seed", str(options.seed)]
    command += ["--chunk", json.dumps(chunk)]
    # With one thread, CPU time is at most wall time.
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    limited: dict[str, Any] = {"env": variables, "timeout": CHUNK_SECONDS}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, **limited)
        code, message = ended.returncode, ended.stderr
    except subprocess.TimeoutExpired:
        code, message = -1, f"no end after {CHUNK_SECONDS} s"
    if code == 0:
        return dict(json.loads(ended.stdout.splitlines()[-1]))
    assert "Timeout" in message or code < 0, message[-3_000:]  # otherwise it is our own bug
    left = options.work / "attempts" / slug(chunk.name)
    crash = options.work / "failures" / "crash" / slug(chunk.name)
    shutil.copytree(left, crash, dirs_exist_ok=True, symlinks=True)
    (crash / "stderr.txt").write_text(message)
    tried = max((int(path.name) for path in left.iterdir() if path.name.isdigit()), default=0) + 1
    counts = {"tried": tried, "accepted": 0, "refused": tried - 1, "failed": 1, "slowest_cpu_seconds": 0.0}
    return {"chunk": chunk.name, "format": chunk.format, **counts, "families": {f"process ended with {code}": 1}}


def by_format(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the counts per kind of file, checkpoints of all engines together."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for chunk in chunks:
        kinds.setdefault(chunk["format"].partition(" (")[0], []).append(chunk)
    return [{"kind": kind, **total(kinds[kind])} for kind in sorted(kinds)]


def total(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts = {key: sum(chunk[key] for chunk in chunks) for key in COUNTS}
    return counts | {"slowest_cpu_seconds": max(chunk["slowest_cpu_seconds"] for chunk in chunks)}


def table_rows(_: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Return one row per kind of file, and the total."""
    return [list(row.values()) for row in (*rows, {"kind": "all", **total(rows)})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
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
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        chunk = Chunk(*options.chunk)
        kind = next(kind for kind in kinds if kind.name == chunk.format)
        print(json.dumps(run_chunk(kind, chunk, options.seed, options.work)))
        return
    ledger = options.work / "chunks.jsonl"
    done = {chunk["chunk"] for chunk in read_lines(ledger)}
    with ThreadPoolExecutor(options.workers) as pool:
        left = [chunk for chunk in chunks(kinds, options.mutations) if chunk.name not in done]
        for future in as_completed([pool.submit(run_in_process, chunk, options) for chunk in left]):
            append_line(ledger, future.result())
            print(future.result(), flush=True)
    tried = read_lines(ledger)
    rows = by_format(tried)
    print_table(HEADER, table_rows({}, rows))
    print("\n".join(sorted({f"{chunk['format']}: {family}" for chunk in tried for family in chunk["families"]})))
    if not options.format:
        write_result("mutations", {"seed": options.seed}, rows)


if __name__ == "__main__":
    main()
