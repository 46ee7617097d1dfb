"""Every benchmark can be imported, and its records name no machine."""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deviating_runs import DEVIATIONS
from launching import ROOT
from source_trees import nodes_of

FOLDERS = (ROOT / "benchmarks", ROOT / "benchmarks" / "gpu")
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `record`; the benchmarks can be imported by name."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    yield __import__("record")
    for path in SCRIPTS:
        sys.modules.pop(path.stem, None)


def test_a_recorded_command_names_no_folder_of_the_machine_it_ran_on(record: Any) -> None:
    words = ["benchmarks/overhead.py", "--work", "/scratch/user/runs", "--steps", "8"]
    assert record.repeatable_command(words) == "python benchmarks/overhead.py --work DIR --steps 8"
    for path in record.RESULTS.glob("*.jsonl"):
        facts, rows = record.read_result(path.stem)
        assert facts["command"].startswith("python benchmarks/"), path.name
        assert " /" not in facts["command"], path.name
        assert rows, path.name


def test_a_record_has_no_path_of_the_machine(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    message = f"{record.ROOT}/.venv/lib/x.py failed, see {Path.home()}/runs"
    written = record.write_result("seen", {}, [{"messages": [message]}])
    assert record.read_result("seen")[1] == [{"messages": [".venv/lib/x.py failed, see ~/runs"]}]
    assert str(record.ROOT) not in written.read_text()


# -- what verification compares

VERIFY = ROOT / "toolkit" / "observe" / "verify"
LARGE_NORM = "norm of a large gradient, clipped"
# Keys of other dicts in the functions that say what is expected: entries of a checkpoint's manifest.
NOT_COMPARED = {
    "pipeline_chunks",
    "data_parallel_size",
    "global_batch_size",
    "streaming_buffer_size",
    "dataset_weights",
}
NOT_INJECTED = {
    "layers of all stages": "the toolkit's own loop divides the layers: no library's setting does",
    "parameter_bytes of all stages": "the same",
    "pipeline_stages": "the same",
    "micro_batches": "the same",
    "activation_dtype": "the same",
    "kernels": "`tests/observe/kernels/test_read_kernels.py` injects 21 faults",
    "trained parameters in the optimizer": "`tests/observe/cases/optimizer_partial.py` is the script's own",
}
"""Field -> why no deviation is injected from outside."""

EXPECTED, BYTES = "every expected value", "bytes of each part"
EQUAL_ON_ALL_RANKS = "values of all ranks"
OF_ALL_RANKS = {"initial_weights_sha256", "learning_rates", "optimizer_steps"}
CHECKS = {
    "differences": (EXPECTED,),
    "rank_differences": (EQUAL_ON_ALL_RANKS,),
    "replica_differences": ("replicas",),
    "kernel_differences": ("kernels",),
    "optimizer_differences": ("trained parameters in the optimizer",),
    "byte_differences": (BYTES,),
    "byte_limit_differences": (BYTES,),
    "pipeline_differences": ("layers of all stages", "parameter_bytes of all stages"),
    "layout_differences": ("batch_group", "first_rows_sha256", "first_rows_sha256"),
    "unclipped": ("gradient norm at the optimizer",),
}
"""Function of `toolkit/observe/verify` -> the fields of the differences that it makes, one per place."""


def compared_fields() -> set[str]:
    """Return every value that verification compares: those that it expects by name, and those of `CHECKS`."""
    expecting = {
        "observe/verify/expected.py": ("expected_values", "_expected_optimizer"),
        "observe/verify/verification.py": ("expected_values",),
        "train/trainer.py": ("expected_readings", "observer_parts"),
        "engines/engine.py": ("gradient_facts", "held_dtypes"),
    }
    keys: set[str] = set()
    for name, functions in expecting.items():
        for node in functions_of(ROOT / "toolkit" / name):
            if node.name in functions:
                keys |= {key for inner in ast.walk(node) for key in string_keys(inner)}
    mixed = {field for fields in CHECKS.values() for field in fields} - {EXPECTED, BYTES, EQUAL_ON_ALL_RANKS}
    parts = {f"{part}_bytes" for part in ("parameter", "gradient", "optimizer")}
    return (keys - NOT_COMPARED) | mixed | OF_ALL_RANKS | parts | {LARGE_NORM, "packing"}


def string_keys(node: ast.AST) -> list[str]:
    """Return the keys of a dict display, or that of `values["key"] = ...`."""
    keys = node.keys if isinstance(node, ast.Dict) else []
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        keys = [node.slice]
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def places_that_report() -> dict[str, int]:
    """Return how many differences each function of the verification can make, by name."""
    places: Counter[str] = Counter()
    for path in sorted(VERIFY.glob("*.py")):
        for node in functions_of(path):
            if not any(isinstance(inner, ast.FunctionDef) for inner in ast.walk(node) if inner is not node):
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                places[node.name] += sum(ast.unparse(call.func) == "Difference" for call in calls)
    return {name: count for name, count in places.items() if count}


def functions_of(path: Path) -> Iterator[ast.FunctionDef]:
    yield from (node for node in nodes_of(path) if isinstance(node, ast.FunctionDef))


def test_every_field_that_verification_compares_has_a_deviation_or_the_reason_why_it_has_none(record: Any) -> None:
    injected = {deviation.field for deviation in DEVIATIONS}
    assert not injected & NOT_INJECTED.keys()
    assert injected | NOT_INJECTED.keys() == compared_fields()
    _, rows = record.read_result("verification")
    assert {row["field"] for row in rows if row["field"]} <= injected
    assert places_that_report() == {name: len(fields) for name, fields in CHECKS.items()}


@pytest.mark.usefixtures("record")
def test_a_deviation_counts_as_found_only_if_its_field_is_named_with_both_values(tmp_path: Path) -> None:
    benchmark = __import__("verification")
    run = benchmark.Run("toolkit train", "zero2", "", field="sharding", fault="stage_1")
    names = ("engine", "sharding (equal on all ranks)")
    differences = [{"fact": name, "rank": 1, "expected": "a", "found": "b"} for name in names]
    attestation = {"verdict": "attestation_failed", "differences": differences}
    (tmp_path / "attestation.json").write_text(json.dumps(attestation))
    message = "the run does not match its preset and arguments: engine on rank 1 is b, expected a"
    assert benchmark.found(run, tmp_path, message) == "sharding (equal on all ranks) on rank 1 is b, expected a"
    assert benchmark.found(run._replace(field="seed"), tmp_path, message) is None
    assert benchmark.found(run, tmp_path, "another error") is None
    assert benchmark.found(run, tmp_path / "none", message) is None


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path) -> None:
    assert __import__(path.stem).__doc__
