"""The floors of the house: imports point down, rooms on a floor stay apart, and light commands leave torch alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "toolkit"

# DESIGN.md, "Floors". A room is a folder or a module directly under toolkit/.
FLOORS = (
    {"errors", "units", "cache", "keys", "installed"},
    {"presets", "lint", "models", "hardware", "runs", "data"},
    {"plan", "launch", "train", "checkpoint", "doctor", "demo"},
    {"compare"},
    {"cli", "__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "peft", "datasets"}
# `presets` gives a user's own script its TrainingArguments (`presets/door.py`): the heavy libraries are there already.
MAY_IMPORT_HEAVY = {"train", "checkpoint", "doctor", "demo", "presets"}
HEAVY_INSIDE_FUNCTIONS_ONLY = {"doctor", "demo", "presets"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute names of everything imported, inside functions too; type-checking blocks count as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_when_loaded(tree: ast.AST, package: str) -> Iterator[str]:
    """Like `imports`, but only what runs when the module itself is imported; a type-checking block does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(ast.Module(body=[node], type_ignores=[]), package)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports_when_loaded(node, package)


def package_of(path: Path) -> str:
    return name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def test_the_glob_found_the_house() -> None:
    names = {name_of(path) for path in MODULES}
    assert len(names) > 50
    assert {"toolkit.errors", "toolkit.presets.preset", "toolkit.train.attest.check", "toolkit.cli"} <= names


def test_every_room_stands_on_a_floor() -> None:
    rooms = {room_of(name_of(path)) for path in MODULES} - {""}
    assert rooms <= set(FLOOR_OF), f"rooms without a floor: {rooms - set(FLOOR_OF)}"


def test_imports_inside_functions_and_relative_ones_are_seen() -> None:
    text = "from . import cell\ndef f():\n    from toolkit.train import script\n    import torch.nn\n"
    tree = ast.parse(f"{text}if TYPE_CHECKING:\n    import peft\n")
    found = set(imports(tree, "toolkit.compare.report"))
    assert found == {"toolkit.compare.report.cell", "toolkit.train.script", "torch.nn", "peft"}
    assert set(imports_when_loaded(tree, "toolkit.compare.report")) == {"toolkit.compare.report.cell"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_lower_floors_or_its_own_room(path: Path) -> None:
    own = room_of(name_of(path))
    # The root is imported by everything, so it may only reach down to the nouns that it offers.
    reach = {"presets"} if not own else {room for room in FLOOR_OF if FLOOR_OF[room] < FLOOR_OF[own]} | {own}
    reach |= {"cli"} if own == "__main__" else set()
    found = {room_of(name) for name in imports(parsed(path), package_of(path)) if name.startswith("toolkit.")}
    assert found <= reach, f"{name_of(path)} imports {sorted(found - reach)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_rooms_that_train_import_the_heavy_libraries(path: Path) -> None:
    room, tree = room_of(name_of(path)), parsed(path)
    anywhere = {name.split(".")[0] for name in imports(tree, package_of(path))} & HEAVY
    loaded = {name.split(".")[0] for name in imports_when_loaded(tree, package_of(path))} & HEAVY
    assert not anywhere or room in MAY_IMPORT_HEAVY
    assert not loaded or room not in HEAVY_INSIDE_FUNCTIONS_ONLY


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(parsed(path)), f"{path} has no docstring"


def test_no_module_is_a_drawer_for_everything() -> None:
    parts = {part for path in MODULES for part in name_of(path).split(".")}
    assert not parts & {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def loaded_after(code: str, cwd: Path = ROOT) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after `code`, whatever exit it takes."""
    tail = "finally:\n    print('\\nLOADED', *sorted({n.split('.')[0] for n in sys.modules}), flush=True)"
    program = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n{tail}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Traceback" not in done.stderr
    return set(done.stdout.rpartition("\nLOADED ")[2].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["presets"],
        ["presets", "--json"],
        ["train", "--help"],
        ["train", "--preset", "zero4", "--num-processes", "2"],
        ["train", "--preset", "zero2", "--num-processes", "2", "--", "--max_stepz", "8"],
        ["train", "--preset", "zero2", "--num-processes", "2", "--", "--model_name_or_path", "no-such-model"],
        ["compare", "--preset", "zero4", "--num-processes", "2", "--output", "out"],
        ["report", "no-such-folder"],
        ["plan", "--help"],
        ["plan", str(ROOT / "tests" / "fixtures" / "llama-8b"), "--world-size", "8", "--gpu", "h100", "--json"],
        ["recommend", str(ROOT / "tests" / "fixtures" / "llama-8b"), "--world-size", "8", "--gpu", "h100"],
        ["lint", str(ROOT / "examples"), str(ROOT / "ds_configs"), "--json"],
    ],
    ids=" ".join,
)
def test_a_light_command_leaves_torch_out(arguments: list[str], tmp_path: Path) -> None:
    loaded = loaded_after(f"import toolkit.cli; toolkit.cli.main({arguments!r})", cwd=tmp_path)
    assert "typer" in loaded
    assert not loaded & HEAVY
    assert not list(tmp_path.iterdir())


def test_a_refused_data_row_leaves_torch_out(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text('{"text": "sound"}\n{"text": 1}\n')
    argv = ["train", "--preset", "ddp", "--num-processes", "1", "--", "--model_name_or_path", "model"]
    loaded = loaded_after(f"import toolkit.cli; toolkit.cli.main({[*argv, '--dataset', 'rows.jsonl']!r})", cwd=tmp_path)
    assert not loaded & HEAVY


@pytest.mark.parametrize("module", ["toolkit", "toolkit.cli", "toolkit.compare.door", "toolkit.launch.run"])
def test_importing_a_light_module_leaves_torch_out(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert "toolkit" in loaded
    assert not loaded & HEAVY
