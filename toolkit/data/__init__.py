"""Rows of training data: their formats, and reading and checking the files that hold them. No torch.

>>> detect_format({"instruction": "Hej", "output": "Hello"})
'alpaca'
"""

from toolkit.data.data_files import (
    SUFFIXES,
    DataSource,
    FileCheck,
    check_file,
    config_error,
    first_sample,
    is_hub_id,
    iter_rows,
    resolve_source,
    resolve_sources,
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
    "config_error",
    "detect_format",
    "first_sample",
    "is_hub_id",
    "iter_rows",
    "resolve_source",
    "resolve_sources",
    "to_sample",
]
