"""Check what a configuration really does, in any accelerate YAML, DeepSpeed JSON or Trainer arguments.

>>> from pathlib import Path
>>> lint_paths([Path("ds_configs")]).findings
[]
"""

from toolkit.lint.check import LintResult, fixed_text, lint_document, lint_paths
from toolkit.lint.findings import Finding

__all__ = ["Finding", "LintResult", "fixed_text", "lint_document", "lint_paths"]
