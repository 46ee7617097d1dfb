"""Lint: what a configuration does in fact, in anybody's accelerate YAML, DeepSpeed JSON or Trainer arguments.

>>> from pathlib import Path
>>> lint_paths([Path("ds_configs")]).findings
[]
"""

from toolkit.lint.check import Linted, fixed_text, lint_document, lint_paths
from toolkit.lint.finding import Finding

__all__ = ["Finding", "Linted", "fixed_text", "lint_document", "lint_paths"]
