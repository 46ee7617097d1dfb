"""Versions and interfaces of the installed libraries, read without importing them: most of them import torch.

>>> installed_version("no-such-library") is None
True
"""

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

# The attention functions of transformers 5.23, for an installation without it.
ATTENTION_NAMES = (
    *("flash_attention_4", "flash_attention_3", "flash_attention_2", "flex_attention", "sdpa", "paged|eager"),
)


@functools.cache
def installed_version(library: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built with; None for a CPU build, and without torch."""
    cuda = re.search(r"^cuda\b.*= '([\d.]+)'", _text("torch", "version.py"), re.MULTILINE)
    return cuda[1] if cuda else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, for comparison.

    >>> version_numbers("0.19.8+cpu")
    (0, 19, 8)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def is_importable(module: str) -> bool:
    """Return True if a module can be imported; only the packages above it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def lora_config_fields() -> tuple[str, ...]:
    """Return the fields of peft's `LoraConfig`, without inherited ones."""
    source = _text("peft", "tuners/lora/config.py").partition("\nclass LoraConfig(")[2].partition("\nclass ")[0]
    return tuple(re.findall(r"^    (\w+): ", source, re.MULTILINE))


@functools.cache
def attention_names() -> tuple[str, ...]:
    """Return the attention functions that transformers registers; `eager` is each model's own."""
    table = _text("transformers", "modeling_utils.py").partition("_global_mapping = {")[2].partition("}")[0]
    return ("eager", *(re.findall(r'"([^"]+)":', table) or ATTENTION_NAMES))


@functools.cache
def model_types() -> tuple[str, ...]:
    """Return every `model_type` of transformers, read from its source; empty if it is not installed."""
    return tuple(_pairs("CONFIG_MAPPING_NAMES"))


@functools.cache
def model_class_flags(model_type: str) -> dict[str, Any] | None:
    """Return the class attributes of an architecture's `...PreTrainedModel`, read from its source.

    Values that are not literals are left out. None for an architecture that the installed transformers does not have.
    """
    classes = _classes_of_model(model_type, "modeling")
    return next((_literals(node) for node in classes if node.name.endswith("PreTrainedModel")), None)


@functools.cache
def model_plans(model_type: str) -> dict[str, dict[str, str]]:
    """Return how transformers splits an architecture: `tp` and `ep`, each with a style per name pattern.

    A plan that the architecture does not have is left out. Read from the source of its configuration.
    """
    for node in _classes_of_model(model_type, "configuration"):
        values = _literals(node)
        if values.get("model_type") == model_type:
            plans = {kind: values.get(f"base_model_{kind}_plan") for kind in ("tp", "ep")}
            return {kind: plan for kind, plan in plans.items() if plan}
    return {}


def _classes_of_model(model_type: str, kind: str) -> list[ast.ClassDef]:
    """The classes in an architecture's `modeling_...` or `configuration_...` file; none if there is no such file."""
    folder = _pairs("SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model_type, model_type.replace("-", "_"))
    source = _text("transformers", f"models/{folder}/{kind}_{folder}.py") if folder.isidentifier() else ""
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


@functools.cache
def _pairs(table: str) -> dict[str, str]:
    text = _text("transformers", "models/auto/auto_mappings.py").partition(f"\n{table} = OrderedDict(")[2]
    return dict(re.findall(r'\("([^"]+)", "([^"]+)"\)', text.partition("\n)")[0]))


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    literals = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            with contextlib.suppress(ValueError):
                literals[ast.unparse(statement.targets[0])] = ast.literal_eval(statement.value)
    return literals


def _text(library: str, file: str) -> str:
    spec = importlib.util.find_spec(library)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    return path.read_text("utf-8") if path and path.is_file() else ""
