"""Helpers of every benchmark: interleaved pairs, medians, tables, and a result file with where it was measured.

figures = pairs(5, run_a, run_b)
write_result("overhead", {"pairs": figures})
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from toolkit.hardware.node import describe_node, git_commit, library_versions

RESULTS = Path(__file__).parent / "results"

Figures = TypeVar("Figures")


def pairs(number: int, a: Callable[[], Figures], b: Callable[[], Figures]) -> list[tuple[Figures, Figures]]:
    """Run A B, B A, A B, ..., so that neither side always runs on the warmer or busier machine."""
    measured = []
    for index in range(number):
        if index % 2 == 0:
            first = a()
            measured.append((first, b()))
        else:
            second = b()
            measured.append((a(), second))
    return measured


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


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json: every figure, and command, commit, versions and machine; return its path."""
    result = {"benchmark": name, **circumstances(), **figures}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def write_table(document: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Replace the table between the lines `<!-- name -->` and `<!-- end of name -->` of a document."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in [header, [":---"] * len(header), *rows]]
    before, opened, rest = document.read_text().partition(f"<!-- {name} -->\n")
    _, closed, after = rest.partition(f"<!-- end of {name} -->")
    assert closed, f"{document} has no lines for the table {name}"
    document.write_text("\n".join([before + opened, *lines, "", closed + after]))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
