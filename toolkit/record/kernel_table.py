"""The table of fast paths of a run: what was asked for, what ran, what the difference costs, and what repairs it.

>>> rows = [row("attention", "flash_attention_2", "eager", "differs", repair="pip install flash-attn")]
>>> print(*table_lines(rows), sep="\\n")
kernels      asked              ran
  attention  flash_attention_2  eager  not as asked; repair: pip install flash-attn
>>> kernels_summary(rows)
'attention eager for flash_attention_2'
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolkit.record.reading import RankReading

KernelRow = dict[str, Any]
"""`name`, `asked` (None where nothing names one), `ran`, `verdict`, `detail`, `costs`, and `repair`: what to type."""
Rows = Sequence[Mapping[str, Any]]
VERDICTS = AS_ASKED, SLOWER, DIFFERS = ("as asked", "slower path", "not as asked")
"""The second is a path that nobody asked for by name, where there may be a faster one."""
# Rows whose `ran` may be named by `--require NAME=VALUE`, and what computes attention.
ATTENTION_PATHS = ("flash", "efficient", "cudnn", "flex", "math", "eager")
REQUIRABLE_ROWS = ("attention", "experts", "mixers", "loss_path", "optimizer_path", "recomputed_blocks", "documents")


def row(
    name: str, asked: str | None, ran: str, differs: str = "", detail: str = "", costs: str = "", repair: str = ""
) -> KernelRow:
    """Return a row: not as asked where it `differs`, or nothing ran; a slower path where something repairs it."""
    verdict, ran = DIFFERS if differs or not ran else SLOWER if repair else AS_ASKED, ran or "nothing"
    return dict(name=name, asked=asked, ran=ran, verdict=verdict, detail=detail, costs=costs, repair=repair)


def reading_of(rows: Iterable[KernelRow]) -> RankReading:
    """Return what a rank reads: the rows as `kernels`, and what ran by the names of some."""
    kernels = list(rows)
    ran = {each["name"]: each["ran"] for each in kernels if each["name"] in REQUIRABLE_ROWS}
    return RankReading.of(kernels=kernels, **ran)


def table_lines(rows: Rows, heading: str = "kernels") -> list[str]:
    """Return the table as lines; words follow what is not as asked, or slower than it could be."""
    cells = [(heading, "asked", "ran", "")] if rows else []
    for each in rows:
        verdict, repair = "" if each["verdict"] == AS_ASKED else each["verdict"], each["repair"]
        words = filter(None, (verdict, each["detail"], each["costs"], repair and f"repair: {repair}"))
        cells.append((f"  {each['name']}", each["asked"] or "-", each["ran"], "; ".join(words)))
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)] if cells else []
    return ["  ".join(map(str.ljust, cell, (*widths, 0))).rstrip() for cell in cells]


def merged_rows(ranks: Iterable[RankReading]) -> list[KernelRow]:
    """Return each row once, of the rank on which it is worst, the worst rows first."""
    rows = [each for rank in ranks for each in rank.kernels or ()]
    worst = {each["name"]: each for each in sorted(rows[::-1], key=lambda each: VERDICTS.index(each["verdict"]))}
    names = dict.fromkeys(each["name"] for each in rows)
    return sorted(({**worst[name]} for name in names), key=lambda each: -VERDICTS.index(each["verdict"]))


def kernels_summary(rows: Rows) -> str | None:
    """Return the cell of a comparison: what ran, and in place of what where it is not as asked."""
    words = [(f"{each['name']} {each['ran']}", each["verdict"] == DIFFERS, each["asked"]) for each in rows]
    return "; ".join(f"{ran} for {asked}" if differs else ran for ran, differs, asked in words) or None
