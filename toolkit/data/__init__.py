"""Rows of training data: their formats, and reading and checking the files that hold them. No torch.

>>> detect_format({"instruction": "Hej", "output": "Hello"})
'alpaca'
"""

from toolkit.data.data_files import (
    SUFFIXES,
    DataSource,
    FileCheck,
    check_file,
    is_hub_id,
    iter_rows,
    resolve_source,
)
from toolkit.data.formats import FORMATS, Sample, check_row, detect_format, to_sample

__all__ = [
    "FORMATS",
    "SUFFIXES",
    "DataSource",
    "FileCheck",
    "Sample",
    "check_file",
    "check_row",
    "detect_format",
    "is_hub_id",
    "iter_rows",
    "resolve_source",
    "to_sample",
]
