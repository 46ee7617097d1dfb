"""Versions and interfaces of the installed libraries, read without importing them: most of them import torch.

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

# In the clone: the package is not published.
INSTALL_GPU_PACKAGES = "pip install -c constraints.txt -e '.[gpu]'"


def installed_version(library: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built with; None for a CPU build, and without torch."""
    tree = _source("torch", "version.py")
    values = {
        ast.unparse(target): node.value
        for node in (tree.body if tree else [])
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    cuda = values.get("cuda")
    return str(cuda.value) if isinstance(cuda, ast.Constant) and cuda.value is not None else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, for comparison.

    >>> version_numbers("0.19.8+cpu")
    (0, 19, 8)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


@functools.cache
def training_argument_types() -> dict[str, str]:
    """Return field name to annotation of transformers' `TrainingArguments`, in order, read from its source.

    Empty if transformers is not installed.
    """
    return _field_types("transformers", "training_args.py", "TrainingArguments")


@functools.cache
def lora_config_types() -> dict[str, str]:
    """Return field name to annotation of peft's `LoraConfig`, without inherited fields."""
    return _field_types("peft", "tuners/lora/config.py", "LoraConfig")


@functools.cache
def tracker_names() -> tuple[str, ...]:
    """Return the trackers that transformers' `report_to` accepts, read from its source."""
    tree = _source("transformers", "integrations/integration_utils.py")
    tables = [
        node.value
        for node in (tree.body if tree else [])
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTEGRATION_TO_CALLBACK"
    ]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return tuple(str(key.value) for key in keys if isinstance(key, ast.Constant))


@functools.cache
def optimizer_names() -> tuple[str, ...]:
    """Return the optimizers that transformers' `optim` accepts, read from its source; empty if it is not installed."""
    return _enum_values("transformers", "training_args.py", "OptimizerNames")


@functools.cache
def scheduler_names() -> tuple[str, ...]:
    """Return the schedules of `lr_scheduler_type`, read from transformers' source; empty if it is not installed."""
    return _enum_values("transformers", "trainer_utils.py", "SchedulerType")


@functools.cache
def model_types() -> tuple[str, ...]:
    """Return every `model_type` of transformers, read from its source; empty if it is not installed."""
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
    """Return True if a module can be imported; only the packages above it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _source(library: str, file: str) -> ast.Module | None:
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return None
    return ast.parse((Path(spec.origin).parent / file).read_text("utf-8"))


def _field_types(library: str, file: str, name: str) -> dict[str, str]:
    tree = _source(library, file)
    classes = [node for node in (tree.body if tree else []) if isinstance(node, ast.ClassDef) and node.name == name]
    fields = [node for node in (classes[0].body if classes else []) if isinstance(node, ast.AnnAssign)]
    return {node.target.id: ast.unparse(node.annotation) for node in fields if isinstance(node.target, ast.Name)}


def _enum_values(library: str, file: str, name: str) -> tuple[str, ...]:
    tree = _source(library, file)
    classes = [node for node in (tree.body if tree else []) if isinstance(node, ast.ClassDef) and node.name == name]
    assigned = [node.value for node in (classes[0].body if classes else []) if isinstance(node, ast.Assign)]
    return tuple(str(value.value) for value in assigned if isinstance(value, ast.Constant))
