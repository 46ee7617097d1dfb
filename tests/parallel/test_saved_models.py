"""What a split run saves loads in one process, with the logits of the model that was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import read
from split_runs import RUNS, split_runs

from toolkit.checkpoint.verify import verify

pytestmark = [
    pytest.mark.launch,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


@pytest.mark.parametrize("name", split_runs())
def test_the_saved_model_has_the_live_models_logits_and_the_evaluation_that_of_one_process(
    name: str, run_folder: Callable[[str], Path]
) -> None:
    folder = run_folder(name)
    result = verify(folder)
    assert result.problems == []
    assert result.max_difference is not None
    assert result.max_difference < (1e-1 if "bf16" in name else 1e-5)
    assert (folder / "adapter_config.json").is_file() is ("lora" in name)
    # The evaluation is that of one process over every token once.
    (row,), (expected,) = (read(run_folder(run) / "run.json")["evaluations"] for run in (name, RUNS[name].baseline))
    assert row["supervised_tokens"] == expected["supervised_tokens"]
    assert row["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-3 if "bf16" in name else 1e-6)
