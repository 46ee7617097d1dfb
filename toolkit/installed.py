"""What the installed libraries are, found out without importing them: importing most of them imports torch.

>>> installed_version("no-such-library") is None
True
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path


def installed_version(library: str) -> str | None:
    """The version text of an installed distribution, or None."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.19.8+cpu` as (0, 19, 8), for comparing."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


@functools.cache
def training_argument_types() -> dict[str, str]:
    """Field name to annotation text of transformers' `TrainingArguments`, in its order, read from its source.

    Empty where transformers is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    tree = ast.parse((Path(spec.origin).parent / "training_args.py").read_text())
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    fields = [node for node in bodies[0] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: ast.unparse(node.annotation) for node in fields if isinstance(node.target, ast.Name)}
