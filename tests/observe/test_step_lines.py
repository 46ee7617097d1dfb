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
    folder = RunFolder(tmp_path)
    folder.make()
    folder.rank_rows(0).write_text(row(5, 1) + row(6, 2))
    progress = SimpleNamespace(step=6)
    run = SimpleNamespace(resumed_step=0, folder=folder, world_size=1, writes=True, single_process=False)
    lines = StepLines(SimpleNamespace(**vars(run), progress=progress))  # type: ignore[arg-type]
    lines.max_steps, lines.stop_after_steps = 100, 4
    lines.start(4)  # the step of the checkpoint, which only its Trainer knows
    lines.end()
    assert capsys.readouterr().out.startswith("step 6/8  loss 3.0000")
