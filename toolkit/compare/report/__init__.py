"""Turn a comparison's results into a report: from `results.json` alone, without torch."""

from toolkit.compare.report.console_tables import console_table
from toolkit.compare.report.report_files import ReportFiles, write_report
from toolkit.compare.report.summary import notes, summary_sentence

__all__ = ["ReportFiles", "console_table", "notes", "summary_sentence", "write_report"]
