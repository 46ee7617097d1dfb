"""The architecture's two walls, import cost and the process boundary; and no import cycles.

CONTRIBUTING.md explains both walls. Imports are read from the syntax trees, so that those inside functions and those
for type checking count as well.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from cluster_jobs import write_inputs
from launching import ROOT, nightly
from loaded_modules import HEAVY, loaded_after, run_forked_commands
from source_trees import MODULES, nodes_of, tree_of

LLAMA_8B = str(ROOT / "tests" / "fixtures" / "llama-8b")

# Libraries that a light command may load for its work, but not to print its help.
NOT_FOR_HELP = {"jinja2", "numpy"}  # pydantic is not among them: Typer 0.29 imports it itself


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the package or module directly below toolkit/; empty for toolkit itself."""
    return module.split(".")[1] if "." in module else ""


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def module_graph() -> Mapping[str, frozenset[str]]:
    names = {name_of(path) for path in MODULES}

    def module_of(name: str) -> str:
        return name if name in names else name.rpartition(".")[0]

    return {
        name_of(path): frozenset(
            module_of(name) for name in imports(nodes_of(path)) if name == "toolkit" or name.startswith("toolkit.")
        )
        for path in MODULES
    }


def package_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, imported in module_graph().items():
        own = package_of(module)
        graph.setdefault(own, set()).update(package_of(name) for name in imported if package_of(name) != own)
    return graph


def import_cycle(graph: Mapping[str, object]) -> list[str]:
    """Return names that import each other in a cycle; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()  # type: ignore[arg-type]
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("graph", [package_graph, module_graph])
def test_there_is_no_import_cycle(graph: Callable[[], Mapping[str, object]]) -> None:
    assert import_cycle(graph()) == []


# Package -> what it knows nothing of: each reads text with a schema that another process wrote.
USERS_OF_A_JOB = {"launch", "compare", "plan", "train", "checkpoint", "cli"}
UNKNOWN_TO = {
    "train": {"compare", "plan", "rehearse", "checkpoint", "cli"},
    "observe": {"train", "launch", "data", "compare", "plan", "rehearse", "cli"},
    "job": {"record", *USERS_OF_A_JOB},
    "record": {"job", *USERS_OF_A_JOB},
    "launch": {"compare", "plan", "train", "checkpoint", "cli"},
    "compare": {"train", "checkpoint", "cli"},
}


@pytest.mark.parametrize("package", UNKNOWN_TO)
def test_a_package_knows_nothing_of_those_on_the_other_side_of_a_process(package: str) -> None:
    assert not package_graph()[package] & UNKNOWN_TO[package]


def test_training_code_is_imported_only_by_the_rehearsal_and_commands_only_by_the_entry_point() -> None:
    assert {package for package, imported in package_graph().items() if "train" in imported} <= {"rehearse"}
    assert {package for package, imported in package_graph().items() if "cli" in imported} <= {"__main__"}


def test_the_observer_knows_two_words_of_the_toolkits_own_jobs() -> None:
    imported = {name for module, names in module_graph().items() if package_of(module) == "observe" for name in names}
    assert {name for name in imported if package_of(name) == "job"} == {"toolkit.job.accumulation"}


ENGINE_WORDS = {"none", "ddp", "deepspeed", "fsdp2", "pipeline", "shard_optimizer", "shard_grad_op", "full_shard"}
ENGINE_WORDS |= {"hybrid_shard", "replicate"}
# Limits that only fall. What ranks read back, which another process wrote, is compared by its words.
BRANCHES = {"observe": 5, "plan": 10, "checkpoint": 1}


def branches_on_engines(path: Path) -> Iterator[str]:
    """Yield comparisons of something called an engine or a sharding with a word for one, and tables by such words."""
    for node in nodes_of(path):
        if isinstance(node, ast.Compare):
            words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if words & ENGINE_WORDS and ("engine" in (text := ast.unparse(node)) or "sharding" in text):
                yield text
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if len(keys & ENGINE_WORDS) > 1:
                yield f"a table by {sorted(keys & ENGINE_WORDS)}"


def test_what_an_engine_does_is_asked_of_it_and_not_of_its_name() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        found.setdefault(package_of(name_of(path)), []).extend(branches_on_engines(path))
    others = {package: texts for package, texts in found.items() if texts and package != "engines"}
    assert {package: texts for package, texts in others.items() if len(texts) > BRANCHES.get(package, 0)} == {}


def test_every_module_has_a_docstring() -> None:
    assert [name_of(path) for path in MODULES if not ast.get_docstring(tree_of(path))] == []


def test_no_module_has_a_name_that_could_hold_anything() -> None:
    parts = {part for path in MODULES for part in name_of(path).split(".")}
    assert not parts & {"utils", "util", "helpers", "helper", "common", "manager", "misc", "runs", "door"}


def test_no_two_public_classes_share_a_name() -> None:
    names = [
        node.name
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


# One command per group of modules; the help and the refusals of the others run in `make test-nightly`.
LIGHT_COMMANDS = [
    ["--help"],
    ["presets"],
    ["train", "--preset", "zero2", "--num-processes", "2", "--", "--model_name_or_path", "no-such-model"],
    ["compare", "--preset", "zero4", "--num-processes", "2", "--output", "out"],
    ["tune", "--preset", "zero4", "--num-processes", "2", "--output", "out"],
    ["plan", LLAMA_8B, "--num-processes", "8", "--gpu", "h100", "--json"],
    ["simulate", "stragglers", "--workers", "4", "--steps", "9", "--model", LLAMA_8B, "--gpu", "h100"],
    ["rehearse", "--help"],
    ["doctor", "--compare", "a.json", "b.json"],
    ["cluster", "slurm", "--preset", "zero2", "--nodes", "2", "--", "--max_stepz", "8"],
    ["lint", str(ROOT / "examples"), str(ROOT / "ds_configs"), "--json"],
]
OTHER_LIGHT_COMMANDS = [
    ["presets", "--json"],
    ["train", "--help"],
    ["train", "--preset", "zero4", "--num-processes", "2"],
    ["train", "--preset", "zero2", "--num-processes", "2", "--", "--max_stepz", "8"],
    ["compare", "--help"],
    ["tune", "--help"],
    ["tune", "--num-processes", "8", "--gpu", "h100", "--dry-run", "--output", "out", "--", "--max_seq_length", "64"],
    ["report", "no-such-folder"],
    ["plan", "--help"],
    ["recommend", LLAMA_8B, "--num-processes", "8", "--gpu", "h100"],
    ["page", "--help"],
    ["simulate", "pipeline", "--help"],
    ["simulate", "pipeline", "--stages", "4", "--micro-batches", "8", "--model", LLAMA_8B, "--gpu", "h100"],
    ["simulate", "failures", "--gpus", "16384"],
    ["simulate", "stragglers", "--help"],
    ["doctor", "--help"],
    ["doctor", "--preset", "zero3_cpu_offload", "--num-processes", "2", LLAMA_8B, "--json"],
    ["env"],
    ["cluster", "slurm", "--help"],
    ["convert-config", str(ROOT / "tests" / "fixtures" / "axolotl.yaml")],
]


@pytest.mark.parametrize("commands", [LIGHT_COMMANDS, *nightly(OTHER_LIGHT_COMMANDS)], ids=["daily", "others"])
def test_a_light_command_does_not_import_torch(commands: list[list[str]], tmp_path: Path) -> None:
    """Each of them in a process of its own."""
    for command, ended in zip(commands, run_forked_commands(commands, tmp_path), strict=True):
        assert b"Traceback" not in ended.err, command
        assert "typer" in ended.modules, command
        assert not ended.modules & HEAVY, command
        assert "--help" not in command or not ended.modules & NOT_FOR_HELP, command
        assert not ended.files, command


def test_refusing_a_data_row_does_not_import_torch(tmp_path: Path) -> None:
    words = ["train", "--preset", "ddp", "--num-processes", "1", "--", *write_inputs(tmp_path)]
    (tmp_path / "rows.jsonl").write_text('{"text": "sound"}\n{"text": 1}\n')
    loaded = loaded_after(f"from toolkit.__main__ import main; main({words!r})")
    assert not {name for name in loaded if name in HEAVY or name.startswith("toolkit.train")}


def test_a_command_imports_the_module_of_no_other_command() -> None:
    loaded = loaded_after("from toolkit.__main__ import main; main(['presets'])")
    own = {f"toolkit.cli.{name}" for name in ("options", "presets", "program")}
    assert {name for name in loaded if name.startswith("toolkit.cli.")} == own
