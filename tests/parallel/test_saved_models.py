"""What a split run saves loads in one process, with the logits of the model that was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import read
from split_runs import RUNS

from toolkit.checkpoint.verify import verify

pytestmark = [
    pytest.mark.launch,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
SPLIT = [name for name, run in RUNS.items() if run.baseline and run.resumes is None]


@pytest.mark.parametrize("name", SPLIT)
def test_the_saved_model_has_the_live_models_logits(name: str, run_folder: Callable[[str], Path]) -> None:
    folder = run_folder(name)
    result = verify(folder)
    assert result.problems == []
    assert result.max_difference is not None
    assert result.max_difference < (1e-1 if "bf16" in name else 1e-5)
    assert (folder / "adapter_config.json").is_file() is ("lora" in name)
    assert not (folder / ".saving").exists()


@pytest.mark.parametrize("name", SPLIT)
def test_the_evaluation_loss_is_that_of_one_process_over_every_token_once(
    name: str, run_folder: Callable[[str], Path]
) -> None:
    (row,), (expected,) = (read(run_folder(run) / "run.json")["evaluations"] for run in (name, RUNS[name].baseline))
    assert row["supervised_tokens"] == expected["supervised_tokens"]
    assert row["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-3 if "bf16" in name else 1e-6)
