"""The `>>>` examples of every module are true."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
from launching import ROOT
from source_trees import MODULES

EXAMPLES = [path for path in MODULES if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_examples_of_a_module_are_true(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(import_module(name))
    assert result.attempted == path.read_text().count(">>> ")
    assert result.failed == 0
