"""Turn a comparison's results into a report: a pure function of one plain dict, without torch.

>>> files = write_report(load_results("out/comparison"), "out/comparison")     # doctest: +SKIP
"""

from toolkit.compare.report.console import console_table
from toolkit.compare.report.files import ReportFiles, json_text, write_report
from toolkit.compare.report.summary import notes, summary_sentence

__all__ = ["ReportFiles", "console_table", "json_text", "notes", "summary_sentence", "write_report"]
