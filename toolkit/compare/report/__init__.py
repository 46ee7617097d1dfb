"""Turn a comparison's results into a report: a pure function of one plain dict, without torch.

>>> files = write_report(load_results("out/comparison"), "out/comparison")     # doctest: +SKIP
"""

from toolkit.compare.report.console import console_table
from toolkit.compare.report.files import ReportFiles, json_text, write_report
from toolkit.compare.report.pair_files import pair_table, write_pair
from toolkit.compare.report.pairs import pair_sentence, pair_up
from toolkit.compare.report.summary import notes, summary_sentence

__all__ = [
    "ReportFiles",
    "console_table",
    "json_text",
    "notes",
    "pair_sentence",
    "pair_table",
    "pair_up",
    "summary_sentence",
    "write_pair",
    "write_report",
]
