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
    return _field_types("transformers", "training_args.py", "TrainingArguments")


@functools.cache
def lora_config_types() -> dict[str, str]:
    """The same of peft's `LoraConfig`, without what it inherits."""
    return _field_types("peft", "tuners/lora/config.py", "LoraConfig")


@functools.cache
def tracker_names() -> tuple[str, ...]:
    """What transformers' `report_to` knows, read from its source."""
    tree = _source("transformers", "integrations/integration_utils.py")
    tables = [
        node.value
        for node in (tree.body if tree else [])
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTEGRATION_TO_CALLBACK"
    ]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return tuple(str(key.value) for key in keys if isinstance(key, ast.Constant))


@functools.cache
def model_types() -> tuple[str, ...]:
    """Every `model_type` that transformers has a configuration for, read from its source; none if not installed."""
    tree = _source("transformers", "models/auto/auto_mappings.py")
    tables = [
        node.value
        for node in (tree.body if tree else [])
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG_MAPPING_NAMES"
    ]
    return tuple(ast.literal_eval(pair.elts[0]) for table in tables for pair in _pairs(table))


def _pairs(table: ast.expr) -> list[ast.Tuple]:
    """The `("llama", "LlamaConfig")` inside an `OrderedDict([...])`."""
    listed = table.args[0].elts if isinstance(table, ast.Call) and isinstance(table.args[0], ast.List) else []
    return [pair for pair in listed if isinstance(pair, ast.Tuple)]


def is_importable(module: str) -> bool:
    """Whether a module is there; it is not imported, only the packages above it are."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _source(library: str, file: str) -> ast.Module | None:
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return None
    return ast.parse((Path(spec.origin).parent / file).read_text())


def _field_types(library: str, file: str, name: str) -> dict[str, str]:
    tree = _source(library, file)
    classes = [node for node in (tree.body if tree else []) if isinstance(node, ast.ClassDef) and node.name == name]
    fields = [node for node in (classes[0].body if classes else []) if isinstance(node, ast.AnnAssign)]
    return {node.target.id: ast.unparse(node.annotation) for node in fields if isinstance(node.target, ast.Name)}
