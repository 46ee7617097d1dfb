"""The table of fast paths of a run: what was asked for, what ran, what the difference costs, and what repairs it.

>>> rows = [row("attention", "flash_attention_2", "eager", "differs", repair="pip install flash-attn")._asdict()]
>>> print(*table_lines(rows), sep="\\n")
kernels      asked              ran
  attention  flash_attention_2  eager  not as asked; repair: pip install flash-attn
>>> kernels_summary(rows)
'attention eager for flash_attention_2'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

VERDICTS = AS_ASKED, SLOWER, DIFFERS = ("as asked", "slower path", "not as asked")
"""The second is a path that nobody asked for by name, where there may be a faster one."""
# Rows whose `ran` may be named by `--require NAME=VALUE`.
REQUIRABLE_ROWS = ("attention", "experts", "mixers", "loss_path", "optimizer_path", "recomputed_blocks", "documents")
Rows = Sequence[Mapping[str, Any]]


class KernelRow(NamedTuple):
    """One fast path of one rank; `asked` is None where nothing names one, `repair` what to type or to change."""

    name: str
    asked: str | None
    ran: str
    verdict: str
    detail: str
    costs: str
    repair: str


def row(
    name: str, asked: str | None, ran: str, differs: str = "", detail: str = "", costs: str = "", repair: str = ""
) -> KernelRow:
    """Return a row: not as asked where it `differs`, or nothing ran; a slower path where something repairs it."""
    verdict = DIFFERS if differs or not ran else SLOWER if repair else AS_ASKED
    return KernelRow(name, asked, ran or "nothing", verdict, detail, costs, repair)


def readings(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Return what `attestation.json` has of a rank: the rows as `kernels`, and what ran by the names of some."""
    ran = {each.name: each.ran for each in rows if each.name in REQUIRABLE_ROWS}
    return {"kernels": [each._asdict() for each in rows], **ran}


def table_lines(rows: Rows, heading: str = "kernels") -> list[str]:
    """Return the table as lines; words follow what is not as asked, or slower than it could be."""
    cells = [(heading, "asked", "ran", "")] if rows else []
    for each in rows:
        verdict, repair = "" if each["verdict"] == AS_ASKED else each["verdict"], each["repair"]
        words = (verdict, each["detail"], each["costs"], repair and f"repair: {repair}")
        cells.append((f"  {each['name']}", each["asked"] or "-", each["ran"], "; ".join(filter(None, words))))
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)] if cells else []
    return ["  ".join(map(str.ljust, cell, (*widths, 0))).rstrip() for cell in cells]


def merged_rows(ranks: Rows) -> list[dict[str, Any]]:
    """Return each row once, of the rank on which it is worst, the worst rows first."""
    rows = [each for rank in ranks for each in rank.get("kernels", ())]
    worst = {each["name"]: each for each in sorted(rows[::-1], key=lambda each: VERDICTS.index(each["verdict"]))}
    names = dict.fromkeys(each["name"] for each in rows)
    return sorted(({**worst[name]} for name in names), key=lambda each: -VERDICTS.index(each["verdict"]))


def kernels_summary(rows: Rows) -> str | None:
    """Return the cell of a comparison: what ran, and in place of what where it is not as asked."""
    words = [(f"{each['name']} {each['ran']}", each["verdict"] == DIFFERS, each["asked"]) for each in rows]
    return "; ".join(f"{ran} for {asked}" if differs else ran for ran, differs, asked in words) or None
