"""Measure the structure of the source tree: sizes, one-use helpers, import depth, and how far an argument is spread.

    git worktree add /tmp/before 04e63c5
    python benchmarks/structure.py --before /tmp/before          # both trees, side by side
    python benchmarks/structure.py --json                        # this tree alone

Figures are read from the files and syntax trees of a checkout; nothing is imported, so any commit can be measured.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import networkx
from record import ROOT, print_table

from toolkit.hardware.node import git_commit

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Functions that read one argument out of a dictionary of strings; methods of the same names read other things.
ARGUMENT_READERS = {"is_given", "flag", "integer"}
SPREAD_ARGUMENT = "max_seq_length"
TRAINING_SCRIPT = "toolkit.train.script"


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """Figures of one source tree."""

    toolkit_files: int
    toolkit_lines: int  # lines of Python files, with comments and blank lines
    test_lines: int
    benchmark_lines: int
    docs_words: int
    functions: int
    longest_function_lines: int
    private_functions: int
    private_functions_referenced_once: int
    longest_import_chain: int
    """Modules on the longest path in the import graph, each import cycle counted as one module."""
    modules_in_import_cycles: int
    argument_reads: int  # calls in `toolkit/` of the functions that read one argument out of a dictionary of strings
    files_naming_max_seq_length: int
    """Modules of `toolkit/` that mention this argument, which stands for every argument."""
    training_script_files: int  # modules that the training script imports, directly or not, also inside functions
    training_script_lines: int


def measure(root: Path) -> Structure:
    """Measure the tree under `root`, the root of a checkout."""
    texts = {module_name(path, root): path.read_text() for path in sorted((root / "toolkit").rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    graph = import_graph(trees)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    references = [count for tree in trees.values() for count in private_functions(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    cycles = networkx.strongly_connected_components(graph)
    script = {TRAINING_SCRIPT} | networkx.descendants(graph, TRAINING_SCRIPT)
    return Structure(
        toolkit_files=len(texts),
        toolkit_lines=sum(len(text.splitlines()) for text in texts.values()),
        test_lines=count_lines(root / "tests"),
        benchmark_lines=count_lines(root / "benchmarks"),
        docs_words=sum(len(path.read_text().split()) for path in (root / "docs").rglob("*.md")),
        functions=len(functions),
        longest_function_lines=max((node.end_lineno or 0) - node.lineno + 1 for node in functions),
        private_functions=len(references),
        private_functions_referenced_once=references.count(1),
        longest_import_chain=networkx.dag_longest_path_length(networkx.condensation(graph)) + 1,
        modules_in_import_cycles=sum(size for size in map(len, cycles) if size > 1),
        argument_reads=sum(getattr(call.func, "id", None) in ARGUMENT_READERS for call in calls),
        files_naming_max_seq_length=sum(SPREAD_ARGUMENT in text for text in texts.values()),
        training_script_files=len(script),
        training_script_lines=sum(len(texts[name].splitlines()) for name in script),
    )


def count_lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file; a package has the name of its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def private_functions(tree: ast.Module) -> list[int]:
    """Return for each private function of a module how often the module refers to its name."""
    nodes = list(ast.walk(tree))
    references = Counter(getattr(node, "id", None) or getattr(node, "attr", None) for node in nodes)
    names = [node.name for node in nodes if isinstance(node, FUNCTIONS)]
    return [references[name] for name in names if name.startswith("_") and not name.endswith("__")]


def import_graph(trees: Mapping[str, ast.Module]) -> Any:
    """Return the graph of the toolkit's modules, with imports inside functions and for type checking."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(trees)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported = {name if name in trees else name.rpartition(".")[0] for name in names}
            graph.add_edges_from((module, name) for name in imported & trees.keys() - {module})
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Structure of the source tree.")
    parser.add_argument("--before", type=Path, help="root of a checkout of an earlier commit")
    parser.add_argument("--after", type=Path, default=ROOT, help="root of a checkout; default: this one")
    parser.add_argument("--json", action="store_true", help="print JSON, by commit")
    given = parser.parse_args()
    roots = [root for root in (given.before, given.after) if root is not None]
    measured = [(git_commit(root) or str(root), asdict(measure(root))) for root in roots]
    if given.json:
        print(json.dumps([{"commit": commit, **figures} for commit, figures in measured], indent=1))
        return
    rows = [[field.name, *(figures[field.name] for _, figures in measured)] for field in fields(Structure)]
    print_table(["figure", *(commit for commit, _ in measured)], rows)


if __name__ == "__main__":
    main()
