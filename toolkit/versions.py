"""Versions and interfaces of the installed libraries, read without importing them: most of them import torch.

>>> installed_version("no-such-library") is None
True
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

# In the clone: the package is not published.
INSTALL_GPU_PACKAGES = "pip install -c constraints.txt -e '.[gpu]'"


@functools.cache
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
def lora_config_types() -> dict[str, str]:
    """Return field name to annotation of peft's `LoraConfig`, without inherited fields."""
    return _field_types("peft", "tuners/lora/config.py", "LoraConfig")


@functools.cache
def optimizer_module(optim: str) -> tuple[str, str] | None:
    """Return the module that an optimizer of transformers is imported from, and the command that installs it.

    None for those of torch and of transformers itself.
    """
    handler = _optimizer_handlers().get(optim)
    imported = [node.module for node in ast.walk(handler) if isinstance(node, ast.ImportFrom)] if handler else []
    modules = [name.partition(".")[0] for name in imported if name]
    found = next((name for name in modules if name != "torch"), None)
    if handler is None or found is None:
        return None
    command = re.search(r"pip install [^`]*[^`.]", ast.unparse(handler))
    return found, command[0] if command else f"pip install {found}"


@functools.cache
def optimizer_arguments(optim: str) -> dict[str, str] | None:
    """Return what `optim_args` may set for an optimizer, each with its type: `float`, `int`, or empty for a word.

    Read from the function of transformers that makes the optimizer; None if there is none. Of bitsandbytes' optimizers,
    which share a function, AdEMAMix alone reads numbers from it.
    """
    handler = _optimizer_handlers().get(optim)
    if handler is None:
        return None
    needed = optimizer_module(optim)
    if needed is not None and needed[0] == "bitsandbytes" and "ademamix" not in optim:
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(handler):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("float", "int") and _read_options(node.args[0]):
            found |= dict.fromkeys(_read_options(node.args[0]), ast.unparse(node.func))
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            found |= dict.fromkeys(map(str, ast.literal_eval(node.iter)), "float")
        elif isinstance(node, ast.expr):
            found = dict.fromkeys(_read_options(node), "") | found
    return found


def _read_options(node: ast.expr) -> list[str]:
    """The name in `optim_args.get("name", ...)`, `.pop("name", ...)`, `["name"]` and `"name" in optim_args`."""
    match node:
        case ast.Call(func=ast.Attribute(value=options, attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]):
            pass
        case ast.Subscript(value=options, slice=ast.Constant(value=str(name))):
            pass
        case ast.Compare(left=ast.Constant(value=str(name)), comparators=[options]):
            pass
        case _:
            return []
    return [name] if ast.unparse(options).endswith("optim_args") else []


@functools.cache
def attention_names() -> tuple[str, ...]:
    """Return the attention functions that transformers registers; `eager` is each model's own."""
    tree = _source("transformers", "modeling_utils.py")
    return ("eager", *(str(key.value) for key, _ in _table(tree, "_global_mapping") if isinstance(key, ast.Constant)))


@functools.cache
def model_class_flags(model_type: str) -> dict[str, Any] | None:
    """Return the class attributes of an architecture's `...PreTrainedModel`, read from its source.

    Values that are not literals are left out. None for an architecture that the installed transformers does not have.
    """
    classes = _classes_of_model(model_type, "modeling")
    base = next((node for node in classes if node.name.endswith("PreTrainedModel")), None)
    return _literals(base) if base else None


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
    tree = _source("transformers", "models/auto/auto_mappings.py")
    listed = _assigned(tree, "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    folders = dict(ast.literal_eval(pair) for pair in (_pairs(listed) if listed else []))
    folder = folders.get(model_type, model_type.replace("-", "_"))
    if not folder.isidentifier():
        return []
    try:
        tree = _source("transformers", f"models/{folder}/{kind}_{folder}.py")
    except FileNotFoundError:
        return []
    return [node for node in (tree.body if tree else []) if isinstance(node, ast.ClassDef)]


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    found = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            with contextlib.suppress(ValueError):
                found[ast.unparse(statement.targets[0])] = ast.literal_eval(statement.value)
    return found


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


@functools.cache
def _source(library: str, file: str) -> ast.Module | None:
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return None
    return ast.parse((Path(spec.origin).parent / file).read_text("utf-8"))


def _class(library: str, file: str, name: str) -> ast.ClassDef | None:
    tree = _source(library, file)
    return next(
        (node for node in (tree.body if tree else []) if isinstance(node, ast.ClassDef) and node.name == name), None
    )


def _fields(library: str, file: str, name: str) -> dict[str, ast.AnnAssign]:
    found = _class(library, file, name)
    fields = [node for node in (found.body if found else []) if isinstance(node, ast.AnnAssign)]
    return {node.target.id: node for node in fields if isinstance(node.target, ast.Name)}


def _field_types(library: str, file: str, name: str) -> dict[str, str]:
    return {field: ast.unparse(node.annotation) for field, node in _fields(library, file, name).items()}


def _enum_members(library: str, file: str, name: str) -> list[tuple[str, str]]:
    """Value and name of each member, in order."""
    found = _class(library, file, name)
    assigned = [node for node in (found.body if found else []) if isinstance(node, ast.Assign)]
    return [
        (str(node.value.value), ast.unparse(node.targets[0]))
        for node in assigned
        if isinstance(node.value, ast.Constant)
    ]


def _optimizer_handlers() -> dict[str, ast.FunctionDef]:
    """Optimizer to the function that makes it: the table's pairs, and `**dict.fromkeys(list, function)`."""
    tree = _source("transformers", "trainer_optimizer.py")
    functions = {node.name: node for node in _functions(tree)}
    members = {member: value for value, member in _enum_members("transformers", "training_args.py", "OptimizerNames")}
    found = {}
    for key, value in _table(tree, "_OPTIMIZER_HANDLERS"):
        if key is not None:
            keys, function = [key], value
        elif isinstance(value, ast.Call) and len(value.args) == 2:
            keys, function = _list(tree, ast.unparse(value.args[0])), value.args[1]
        for each in keys:
            if _attribute(each) in members and ast.unparse(function) in functions:
                found[members[_attribute(each)]] = functions[ast.unparse(function)]
    return found


def _functions(tree: ast.Module | ast.ClassDef | None) -> list[ast.FunctionDef]:
    return [node for node in (tree.body if tree else []) if isinstance(node, ast.FunctionDef)]


def _assigned(tree: ast.Module | None, name: str) -> ast.expr | None:
    """The value of `name = ...` or `name: type = ...`, wherever it is in the file."""
    for node in ast.walk(tree) if tree else []:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if targets and ast.unparse(targets[0]) == name:
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            return node.value
    return None


def _table(tree: ast.Module | None, name: str) -> list[tuple[ast.expr | None, ast.expr]]:
    """Keys and values of a dictionary; the key of a `**` is None."""
    value = _assigned(tree, name)
    return list(zip(value.keys, value.values, strict=True)) if isinstance(value, ast.Dict) else []


def _list(tree: ast.Module | None, name: str) -> list[ast.expr]:
    value = _assigned(tree, name)
    return value.elts if isinstance(value, ast.List) else []


def _attribute(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
