"""No mutated file breaks a command: it is accepted, or refused in a few lines, and nothing else is written.

The same examples in every run (`derandomize`). `benchmarks/mutations.py` tries 20,000 others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from file_mutations import attempts
from file_mutations.attempts import Case, Command, attempt, call
from file_mutations.checkpoint_formats import (
    CHECKPOINT_FILES,
    EXPORTED_FILES,
    checkpoint_format,
    exported_formats,
    newest,
    run_format,
)
from file_mutations.formats import LIGHT_SHARE, Format, light_formats
from hypothesis import HealthCheck, Phase, given, settings

from toolkit.errors import ToolkitError

LIGHT = {kind.name: kind for kind in light_formats()}
# Mutations per format: with torch or a report, of pickles, which only three formats contain, and of all others.
SLOW_EXAMPLES, PICKLE_EXAMPLES, EXAMPLES = 3, 7, 10
WITH_PICKLES = ("optimizer.pt", "DeepSpeed states", "DCP metadata")


def try_mutations(kind: Format, folder: Path, examples: int) -> None:
    numbers = itertools.count()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(kind.cases())
    def is_accepted_or_refused(case: Case) -> None:
        outcome = attempt(case, folder / str(next(numbers)))
        assert outcome.kind != "failed", f"{case.command}: {outcome.family}\n{outcome.report}"

    is_accepted_or_refused()


def check_seeds(kind: Format, folder: Path) -> None:
    """Every unchanged seed is accepted by some command, and every command accepts some seed."""
    seeds, commands = list(kind.seeds), list(kind.commands)
    for number, case in enumerate(kind.valid()):
        is_new = case.files in seeds or case.command in commands
        if is_new and attempt(case, folder / f"valid-{number}").kind == "accepted":
            seeds = [files for files in seeds if files != case.files]
            commands = [each for each in commands if each != case.command]
    assert (seeds, commands) == ([], [])


@pytest.mark.parametrize("name", LIGHT)
def test_valid_files_are_accepted(name: str, tmp_path: Path) -> None:
    check_seeds(LIGHT[name], tmp_path)


@pytest.mark.parametrize("name", LIGHT)
def test_a_mutated_file_is_accepted_or_refused(name: str, tmp_path: Path) -> None:
    kind = LIGHT[name]
    try_mutations(kind, tmp_path, EXAMPLES if kind.share >= LIGHT_SHARE else SLOW_EXAMPLES)


@pytest.mark.launch
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_mutated_checkpoint_is_accepted_or_refused(
    name: str, saved_runs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    case = CHECKPOINT_FILES[name][1][0]
    examples = PICKLE_EXAMPLES if name in WITH_PICKLES else SLOW_EXAMPLES
    try_mutations(checkpoint_format(name, case, saved_runs[case], tiny_model), tmp_path, examples)


@pytest.fixture(scope="module")
def exported(saved_runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    from toolkit.checkpoint.hf_export import export

    out = tmp_path_factory.mktemp("exported") / "model"
    export(newest(saved_runs["ddp"]), out, max_shard_bytes=150_000, base_model=str(tiny_model))
    return out


@pytest.mark.launch
@pytest.mark.parametrize("name", EXPORTED_FILES)
def test_a_mutated_model_folder_is_accepted_or_refused(name: str, exported: Path, tmp_path: Path) -> None:
    kinds = {kind.name: kind for kind in exported_formats(exported)}
    assert tuple(kinds) == EXPORTED_FILES
    try_mutations(kinds[name], tmp_path, SLOW_EXAMPLES)


@pytest.mark.launch
def test_a_mutated_run_folder_is_accepted_or_refused(saved_runs: dict[str, Path], tmp_path: Path) -> None:
    try_mutations(run_format(saved_runs["ddp"]), tmp_path, EXAMPLES)


@pytest.mark.launch
def test_valid_checkpoints_and_runs_are_accepted(
    saved_runs: dict[str, Path], tiny_model: Path, exported: Path, tmp_path: Path
) -> None:
    checkpoints = [
        checkpoint_format("checkpoint manifest", case, saved_runs[case], tiny_model) for case in ("ddp", "fsdp2")
    ]
    for kind in (*checkpoints, *exported_formats(exported), run_format(saved_runs["ddp"])):
        check_seeds(kind, tmp_path / kind.name.replace(" ", "-"))


# -- The property itself can fail


def raises() -> None:
    """an exception"""
    int("x")


def writes_elsewhere() -> None:
    """a file beside the output"""
    Path("elsewhere").touch()


def writes_into_its_home() -> None:
    """a file in the home folder"""
    Path("~/escaped").expanduser().touch()


def never_ends() -> None:
    """a loop"""
    while True:
        time.sleep(0.01)


def is_verbose() -> None:
    """a refusal that prints a whole file"""
    raise ToolkitError("x" * 10_000)


def fails_elsewhere() -> int:
    """an exit code that means something else"""
    return 3


@pytest.mark.parametrize(
    ("function", "family"),
    [
        (raises, "ValueError at "),
        (writes_elsewhere, "wrote outside of its output"),
        (writes_into_its_home, "wrote outside of its output"),
        (never_ends, "TakesTooLong at "),
        (is_verbose, "message too long"),
        (fails_elsewhere, "exit code 3"),
    ],
)
def test_an_attempt_fails_if_the_command_does(
    function: Callable[[], int | None], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "WALL_SECONDS", 0.5)
    case = Case(format="any", files={"given.txt": b"x"}, command=call(function))
    outcome = attempt(case, tmp_path / "attempt")
    assert (outcome.kind, outcome.family[: len(family)]) == ("failed", family)
    assert not (tmp_path / "attempt").exists()


def test_an_attempt_may_write_its_output(tmp_path: Path) -> None:
    case = Case(format="any", files={"given.txt": b"x"}, command=Command(("preset", "export", "out", "ddp")))
    assert attempt(case, tmp_path / "attempt").kind == "accepted"
