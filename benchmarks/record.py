"""Helpers of every benchmark: tables, and a record of one line per run with where it was measured.

    write_result("peers", {"setting": {}}, rows)        # benchmarks/results/peers.jsonl
    facts, rows = read_result("peers")

The first line of a record has what holds for all of its rows: the command, commit, versions and machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.hardware.node import describe_node, git_commit, library_versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def circumstances() -> dict[str, Any]:
    """Return this process's command, and the date, commit, versions and machine that its figures belong to."""
    return {
        "command": repeatable_command(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(Path(__file__).parent),
        "versions": library_versions(),
        "machine": describe_node() | {"load_average_1_minute": os.getloadavg()[0]},
    }


def repeatable_command(argv: Sequence[str]) -> str:
    """Return the command to type elsewhere: `DIR` stands for folders of this machine, which say nothing there."""
    words = ["DIR" if Path(word).is_absolute() else word for word in argv[1:]]
    return shlex.join(["python", argv[0], *words])


def write_result(name: str, facts: Row, rows: Iterable[Row]) -> Path:
    """Write benchmarks/results/NAME.jsonl: circumstances and facts, then one row per line; return its path.

    Paths, which messages in the rows may have, are relative to the repository or to `~`.
    """
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    text = json.dumps([{**circumstances(), **facts}, *rows])
    write_lines(path, json.loads(text.replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")))
    return path


def read_result(name: str) -> tuple[Row, list[Row]]:
    """Return the facts and the rows of a record; nothing of each where there is none yet."""
    facts, *rows = read_lines(RESULTS / f"{name}.jsonl") or [{}]
    return facts, rows


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON line per row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[Row]:
    """Return a ledger's rows, without a last line that was cut off; none where there is no file."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def append_line(path: Path, row: Row) -> None:
    """Append a row to a ledger, on the disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
