"""The lines of a run's progress."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.observe.step_lines import StepLines
from toolkit.record.folder import RunFolder

FIGURES = {"seconds": 2.0, "cpu_seconds": 1.0, "loss": 3.0, "grad_norm": 1.5, "peak_host_bytes": 2**30}
NAMES = ("tokens", "non_padding_tokens", "supervised_tokens", "peak_allocated_bytes", "peak_reserved_bytes")


def row(step: int, step_of_process: int) -> str:
    counted = {"rank": 0, "batch_sha256": "a", "step": step, "step_of_process": step_of_process}
    return json.dumps(FIGURES | dict.fromkeys(NAMES) | counted) + "\n"


def test_a_script_that_resumed_has_lines_up_to_where_it_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(tmp_path, row(5, 1) + row(6, 2), last_step=6)
    lines.max_steps, lines.stop_after_steps = 100, 4
    lines.start(4)  # the step of the checkpoint, which only its Trainer knows
    lines.end()
    assert capsys.readouterr().out.startswith("step 6/8  loss 3.0000")


def lines_of(path: Path, rows: str, *, last_step: int) -> StepLines:
    folder = RunFolder(path)
    folder.make()
    folder.rank_rows(0).write_text(rows)
    progress = SimpleNamespace(step=last_step)
    run = SimpleNamespace(resumed_step=0, folder=folder, world_size=1, writes=True, single_process=False)
    return StepLines(SimpleNamespace(**vars(run), progress=progress))  # type: ignore[arg-type]


@pytest.mark.parametrize(("logging_steps", "shown"), [(1, ["step 1", "step 2", "step 3"]), (2, ["step 3"])])
def test_every_step_has_one_line_where_every_step_is_logged(
    logging_steps: int, shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(tmp_path, "".join(row(step, step) for step in (1, 2, 3)), last_step=3)
    lines.every_step = logging_steps == 1
    lines.start(0)
    lines.end()
    assert [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()] == shown
