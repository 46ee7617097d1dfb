"""No mutated file breaks a command: it is accepted, or refused in a few lines, and nothing else is written.

The same examples in every run (`derandomize`); 20,000 others were tried once (docs/evidence/trust.md).
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_mutations import attempts
from file_mutations.attempts import Case, attempt, call, command
from file_mutations.checkpoint_formats import CHECKPOINT_FILES, checkpoint_format, exported_formats, run_format
from file_mutations.formats import LIGHT_SHARE, Format, light_formats, mutated_cases
from hypothesis import HealthCheck, Phase, given, settings

from toolkit.errors import ToolkitError
from toolkit.record.checkpoints import list_checkpoints

LIGHT = {kind.name: kind for kind in light_formats()}
# Mutations per format: with torch or a report, of pickles, which only three formats contain, and of all others.
SLOW_EXAMPLES, PICKLE_EXAMPLES, EXAMPLES = 2, 3, 4
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
    @given(mutated_cases(kind))
    def is_accepted_or_refused(case: Case) -> None:
        outcome = attempt(case, folder / str(next(numbers)))
        assert outcome.kind != "failed", f"{case.command}: {outcome.family}\n{outcome.message}"

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


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.launch
def test_mutated_run_and_model_folders_are_accepted_or_refused_and_valid_ones_accepted(
    saved_runs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    from toolkit.checkpoint.hf_export import export

    exported = tmp_path / "model"
    export(list_checkpoints(saved_runs["ddp"])[0].path, exported, max_shard_bytes=150_000, base_model=str(tiny_model))
    folders = [run_format(saved_runs["ddp"]), *exported_formats(exported)]
    for kind in folders:
        try_mutations(kind, tmp_path, EXAMPLES if kind.name == "run folder" else SLOW_EXAMPLES)
    of_checkpoints = [checkpoint_format("latest", case, saved_runs[case], tiny_model) for case in ("ddp", "fsdp2")]
    for kind in (*of_checkpoints, *folders):
        check_seeds(kind, tmp_path / kind.name.replace(" ", "-"))


def refuse_verbosely() -> None:
    raise ToolkitError("x" * 10_000)


@pytest.mark.parametrize(
    ("function", "family"),
    [
        (lambda: int("x"), "ValueError at no line of the toolkit"),
        (lambda: Path("elsewhere").touch(), "wrote outside of its output"),
        (lambda: Path("~/escaped").expanduser().touch(), "wrote outside of its output"),
        (lambda: time.sleep(600), "TakesTooLong at no line of the toolkit"),
        (refuse_verbosely, "message too long"),
        (lambda: 3, "exit code 3"),
    ],
)
def test_the_property_fails_if_the_command_does(
    function: Callable[[], Any], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "WALL_SECONDS", 0.5)
    outcome = attempt(Case(format="any", files={"given.txt": b"x"}, command=call(function)), tmp_path / "attempt")
    assert (outcome.kind, outcome.family) == ("failed", family)
    assert not (tmp_path / "attempt").exists()


def test_an_attempt_may_write_its_output(tmp_path: Path) -> None:
    case = Case(format="any", files={"given.txt": b"x"}, command=command("preset", "export", "out", "ddp"))
    assert attempt(case, tmp_path / "attempt").kind == "accepted"
