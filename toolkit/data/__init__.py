"""Rows of training data: which format they have, and where in a file the wrong one is. No torch here.

>>> detect_format({"instruction": "Hej", "output": "Hello"})
'alpaca'
"""

from toolkit.data.files import (
    SUFFIXES,
    FileCheck,
    Source,
    check_file,
    is_hub_id,
    iter_rows,
    resolve_source,
)
from toolkit.data.formats import FORMATS, Sample, check_row, detect_format, to_sample

__all__ = [
    "FORMATS",
    "SUFFIXES",
    "FileCheck",
    "Sample",
    "Source",
    "check_file",
    "check_row",
    "detect_format",
    "is_hub_id",
    "iter_rows",
    "resolve_source",
    "to_sample",
]
