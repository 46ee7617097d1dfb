"""Every private name of a library that the toolkit uses is a row of `seams.yaml`; the installed versions have it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import ROOT
from source_trees import MODULES, nodes_of

from toolkit.engines import seams
from toolkit.errors import ToolkitError

# Documented although they begin with an underscore, or put there by the toolkit itself.
PUBLIC = {"_exit", "_replace", "_schema", "_local_scalar_dense", "_input_metadata", "_averaged"}
PUBLIC |= {"_saved_attn_mask", "_saved_attn_bias", "_saved_other", "_saved_reduction"}
NAMED_IN_CALLS = {"getattr", "hasattr", "setattr", "replaced", "delattr"}
# Texts that look like private names: ends of words, keys of other tools' files, and names of the toolkit's classes.
NO_NAMES = {"_per_second", "_model_name_or_path", "_full_eval", "_nvme_path", "_parallel_size", "_of_rank_0"}
NO_NAMES |= {"_component_", "_target_", "_LAYER", "_ChunkedCrossEntropy"}
PRIVATE_TEXT = re.compile(r"_[A-Za-z]+_\w+|_[A-Z]\w+")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes_of_the_toolkit() -> set[str]:
    names = set()
    for node in (node for path in MODULES for node in nodes_of(path)):
        if isinstance(node, ast.ClassDef):
            names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def private_names(path: Path, own: set[str]) -> Iterator[str]:
    """Yield the private names of others that a module uses: attributes, imports, words given to `getattr`, texts."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("toolkit", "__future__")):
            from_private = any(map(is_private, (node.module or "").split(".")))
            yield from (alias.name for alias in node.names if from_private or is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMED_IN_CALLS:
            words = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            yield from (word for word in words if isinstance(word, str) and is_private(word) and word not in own)
        elif isinstance(node, ast.Constant) and PRIVATE_TEXT.fullmatch(str(node.value)) and node.value not in own:
            yield node.value


def test_the_installed_versions_have_every_private_name_that_is_used() -> None:
    assert [seam.name for seam in seams.missing()] == []


def test_a_name_that_is_gone_is_found() -> None:
    gone = ("torch:no_such_name", "torch.no_such_module:name", "transformers.trainer::_no_such_attribute")
    assert not any(seams.Seam(name, "").is_there() for name in gone)


def test_every_private_name_of_a_library_has_a_row() -> None:
    known, own = {seam.attribute for seam in seams.SEAMS} | PUBLIC, attributes_of_the_toolkit() | NO_NAMES
    found = {name: path for path in MODULES for name in private_names(path, own)}
    assert {name: str(path) for name, path in found.items() if name not in known} == {}


def test_every_row_is_used() -> None:
    text = "".join(path.read_text() for path in MODULES if path.name != "seams.py")
    words = set(re.findall(r"\w+", text))
    unused = [seam.name for seam in seams.SEAMS if seam.attribute not in words]
    assert [name for name in unused if name.rpartition(".")[2] not in seams.OBSERVED_METHODS] == []


def test_rows_are_known_in_the_versions_that_are_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: pins[name] for name in seams.KNOWN_IN} == seams.KNOWN_IN
    assert {seam.library for seam in seams.SEAMS} <= {*seams.KNOWN_IN, "threading", "atexit", "sys"}


def test_a_trainer_without_an_observed_method_is_refused_with_the_version_to_install() -> None:
    methods = dict.fromkeys(seams.OBSERVED_METHODS)
    seams.check_methods(SimpleNamespace(**methods))
    del methods["_finalize_training"]
    with pytest.raises(ToolkitError, match="has no `_finalize_training`") as refused:
        seams.check_methods(SimpleNamespace(**methods))
    assert 'transformers==5.23.0"' in str(refused.value.hint)
