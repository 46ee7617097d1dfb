"""The toolkit's modules and their syntax trees, parsed and walked once in a process."""

import ast
from functools import cache
from pathlib import Path

from launching import ROOT

MODULES = sorted((ROOT / "toolkit").rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))
