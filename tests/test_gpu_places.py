"""Everything in toolkit/ that only CUDA reaches is listed in benchmarks/gpu/places.md, with what runs it."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from launching import ROOT
from source_trees import MODULES, tree_of

sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]

import check  # noqa: E402

PAGE = ROOT / "benchmarks" / "gpu" / "places.md"
ROW = re.compile(r"^\| `(toolkit/[\w/]+\.py)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
# Attributes, names and texts that stand for a GPU: `torch.cuda.Event`, `tensor.is_cuda`, `self.cuda`, `Nvml`,
# "nvmlDeviceGetName", "nccl", "nvidia-smi", `varlen_attn` (torch's flash attention), `find_nvcc`.
OF_A_GPU = re.compile(r"cuda|is_cuda|on_gpu|\w*nvml\w*|\w*nccl|nvidia-smi|varlen_attn|find_nvcc", re.IGNORECASE)
# Its functions read files and names, on any node.
NO_GPU_NEEDED = {
    "toolkit/compare/build_results.py": {"unfinished_results"},
    "toolkit/versions.py": {"torch_cuda_version"},
    "toolkit/plan/which_gpus.py": {"gpus_for.fewest"},
    "toolkit/plan/planner.py": {"plan_request"},
    "toolkit/plan/recommend.py": {"recommend_request"},
    "toolkit/plan/step_time.py": {"step_time"},
    "toolkit/job/job_checks.py": {"_check_on_cpu"},
}


def places(tree: ast.Module) -> set[str]:
    """Return the functions, as `Class.method`, whose code (not docstrings, not annotations) names a GPU."""
    found = set[str]()

    def visit(node: ast.AST, name: tuple[str, ...]) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = (*name, node.name)
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef):
            parts = [*node.body[ast.get_docstring(node) is not None :], *node.args.defaults, *node.decorator_list]
        if isinstance(node, ast.AnnAssign):
            parts = [node.value] if node.value else []
        text = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
        if isinstance(node, ast.Attribute | ast.Name | ast.Constant) and OF_A_GPU.fullmatch(str(text)):
            found.add(".".join(name))
        for part in parts:
            visit(part, name)

    visit(tree, ())
    return found - {""}  # a module's constants are names in tables


def listed() -> dict[str, dict[str, str]]:
    """Return file -> function -> what runs it, of the page's table."""
    rows: dict[str, dict[str, str]] = {}
    for path, names, runs in ROW.findall(PAGE.read_text()):
        for name in re.findall(r"`([\w.]+)`", names):
            assert name not in rows.setdefault(path, {}), f"{path}: {name} is listed twice"
            rows[path][name] = runs
    return rows


def test_the_scan_finds_code_and_no_texts_about_it() -> None:
    source = '''
"""About torch.cuda."""
TABLE = ["nccl"]
class Timer:
    nvml: Nvml | None = None
    def now(self):
        """Of CUDA."""
        return torch.cuda.Event() if self.cuda else 0
    def later(self, gpu: Nvml) -> Nvml:
        return gpu
def move(tensor):
    return tensor if tensor.is_cuda else tensor.to("cuda")
def read(gpu):
    return gpu.read("nvmlDeviceGetName")
'''
    assert places(ast.parse(source)) == {"Timer.now", "move", "read"}


def test_every_place_that_only_cuda_reaches_is_in_the_table_and_nothing_else_is() -> None:
    named = [path for path in MODULES if OF_A_GPU.search(path.read_text())]
    found = {str(path.relative_to(ROOT)): places(tree_of(path)) for path in named}
    found = {path: names - NO_GPU_NEEDED.get(path, set()) for path, names in found.items()}
    assert {path: set(names) for path, names in listed().items()} == {
        path: names for path, names in found.items() if names
    }


def test_every_place_has_a_part_of_the_check_or_a_test_that_exists() -> None:
    for path, names in listed().items():
        for name, runs in names.items():
            parts, tests = re.findall(r"part `(\w+)`", runs), re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", runs)
            assert parts or tests, f"{path}: nothing runs {name}"
            assert set(parts) <= set(check.PARTS), f"{path}: {name}"
            assert [test for test in tests if not is_a_test(*test)] == [], f"{path}: {name}"


@functools.cache
def is_a_test(path: str, name: str) -> bool:
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_every_test_marked_gpu_is_in_the_table() -> None:
    """A test that needs a GPU and says of nothing what it runs would be forgotten."""
    assert sorted(f"{path}::{name}" for path, name in gpu_tests() if f"::{name}`" not in PAGE.read_text()) == []


def gpu_tests() -> Iterator[tuple[str, str]]:
    for path in Path(ROOT / "tests").rglob("test_*.py"):
        source = path.read_text()
        for node in ast.parse(source).body if "pytest.mark.gpu" in source else ():
            marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            if any(ast.unparse(mark) == "pytest.mark.gpu" for mark in marks) and isinstance(node, ast.FunctionDef):
                yield str(path.relative_to(ROOT)), node.name
