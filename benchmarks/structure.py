"""Measure the structure of the source tree: sizes, fan-in, import depth, and how far a results column is spread.

    git worktree add /tmp/before de901c2
    python benchmarks/structure.py --before /tmp/before --after .

Every figure is read from the syntax trees of `toolkit/`; nothing is imported, so that any commit can be measured.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from record import print_table, write_result

# Keys that identify a row; other parts of the toolkit use the same words for their own purposes.
IDENTITY_KEYS = {"preset", "world_size", "status"}


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Figures of one source tree."""

    files: int
    lines: int
    """Lines of the Python files in `toolkit/`, with comments and blank lines."""
    test_lines: int
    functions: int
    longest_function_lines: int
    private_functions: int
    private_functions_called_once: int
    modules_with_one_importer: int
    """Modules that exactly one other module imports, without `__init__` and `__main__`."""
    longest_import_chain: int
    """Modules on the longest path in the import graph, each import cycle counted as one module."""
    modules_in_import_cycles: int
    mean_files_per_results_key: float
    """Files that name a column of results.json, as a string, an attribute or a keyword; mean over columns."""


def measure(root: Path) -> Structure:
    """Measure the tree under `root`, the root of a checkout."""
    trees = {module_name(path, root): ast.parse(path.read_text()) for path in python_files(root / "toolkit")}
    graph = import_graph(trees)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    private = [node.name for node in functions if node.name.startswith("_") and not node.name.endswith("__")]
    references = Counter(name for tree in trees.values() for name in names_used(tree))
    importers = Counter(name for imported in graph.values() for name in imported)
    files_per_key = list(files_naming_results_keys(root, trees).values())
    groups = strongly_connected(graph)
    return Structure(
        files=len(trees),
        lines=count_lines(root / "toolkit"),
        test_lines=count_lines(root / "tests"),
        functions=len(functions),
        longest_function_lines=max((node.end_lineno or 0) - node.lineno + 1 for node in functions),
        private_functions=len(private),
        private_functions_called_once=sum(references[name] == 1 for name in private),
        modules_with_one_importer=sum(
            importers[name] == 1 for name in graph if not name.endswith("__main__") and not is_package(root, name)
        ),
        longest_import_chain=longest_chain(graph, groups),
        modules_in_import_cycles=sum(len(group) for group in set(groups.values()) if len(group) > 1),
        mean_files_per_results_key=round(sum(files_per_key) / len(files_per_key), 1),
    )


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder, in order."""
    return sorted(folder.rglob("*.py"))


def count_lines(folder: Path) -> int:
    """Return the lines of all Python files below a folder."""
    return sum(len(path.read_text().splitlines()) for path in python_files(folder))


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file; a package has the name of its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(root: Path, name: str) -> bool:
    """Return True for a module that is a folder's `__init__`."""
    return (root / Path(*name.split("."))).is_dir()


def import_graph(trees: Mapping[str, ast.Module]) -> dict[str, frozenset[str]]:
    """Return the modules of the toolkit that each module imports, also inside functions and for type checking."""

    def module_of(name: str) -> str:
        return name if name in trees else name.rpartition(".")[0]

    return {
        module: frozenset(module_of(name) for name in imported_names(tree) if name.partition(".")[0] == "toolkit")
        - {module}
        for module, tree in trees.items()
    }


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the absolute name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_used(tree: ast.AST) -> Iterator[str]:
    """Yield every use of a name: as a variable, an attribute or an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def strongly_connected(graph: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return each module's import cycle, which is itself alone where it is in none."""

    @cache
    def reachable(start: str) -> frozenset[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph.get(waiting.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return frozenset(seen)

    return {
        module: frozenset({module} | {other for other in reachable(module) if module in reachable(other)})
        for module in graph
    }


def longest_chain(graph: Mapping[str, frozenset[str]], groups: Mapping[str, frozenset[str]]) -> int:
    """Return the number of modules, cycles counted once, on the longest path of imports."""

    @cache
    def depth(group: frozenset[str]) -> int:
        imported = {groups[name] for module in group for name in graph[module] if name in groups} - {group}
        return 1 + max((depth(other) for other in imported), default=0)

    return max(depth(group) for group in groups.values())


def files_naming_results_keys(root: Path, trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """Return for each column of results.json in how many modules it is named.

    The columns are those of `tests/fixtures/results_small.json`, a comparison's results.
    """
    rows = json.loads((root / "tests" / "fixtures" / "results_small.json").read_text())["rows"]
    keys = {key for row in rows for key in row} - IDENTITY_KEYS
    named = {module: set(words(tree)) & keys for module, tree in trees.items()}
    return {key: sum(key in found for found in named.values()) for key in sorted(keys)}


def words(tree: ast.AST) -> Iterator[str]:
    """Yield every string, name, attribute and keyword of a module."""
    yield from names_used(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            yield node.arg


def commit_of(root: Path) -> str:
    """Return the commit that is checked out in a folder."""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Structure of the source tree, before and after a change.")
    parser.add_argument("--before", type=Path, required=True, help="root of a checkout of the earlier commit")
    parser.add_argument("--after", type=Path, default=Path(), help="root of a checkout of the later commit")
    given = parser.parse_args()
    trees = {"before": given.before, "after": given.after}
    measured = {name: asdict(measure(root)) for name, root in trees.items()}
    rows = [[figure, *(measured[name][figure] for name in trees)] for figure in measured["before"]]
    print_table(["figure", *(f"{name} ({commit_of(root)})" for name, root in trees.items())], rows)
    commits = {f"{name}_commit": commit_of(root) for name, root in trees.items()}
    print(write_result("structure", commits | measured))


if __name__ == "__main__":
    main()
