"""A split run resumes in the middle of an epoch or in a later one, on the mesh that wrote the checkpoint or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import read
from split_runs import RUNS, losses_and_norms, split_runs

from toolkit.checkpoint.convert import convert
from toolkit.errors import ToolkitError
from toolkit.presets import load_preset

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("name", split_runs(resumed=True))
def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one(name: str, run_folder: Callable[[str], Path]) -> None:
    run = RUNS[name]
    assert run.resumes is not None
    source, step = run.resumes
    losses, norms = losses_and_norms(run_folder(name))
    expected_losses, expected_norms = losses_and_norms(run_folder(source))
    assert len(losses) == run.steps - step
    if run.layout == RUNS[source].layout:
        assert (losses, norms) == (expected_losses[step:], expected_norms[step:])
    assert losses == pytest.approx(expected_losses[step:], rel=1e-6)
    assert norms == pytest.approx(expected_norms[step:], rel=1e-5)
    assert read(run_folder(name) / "attestation.json")["verdict"] == "attested"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_pipelines_checkpoint_is_a_model_folder_whose_states_are_not_converted(
    run_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = run_folder("pipeline") / "checkpoint-1"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert len(list(checkpoint.glob("model-*.safetensors"))) == 2
    with pytest.raises(ToolkitError, match="optimizer states of a pipeline's stages") as refused:
        convert(checkpoint, tmp_path / "out", load_preset("ddp"), num_processes=2)
    assert str(refused.value.hint).endswith(f"start from its weights: `--model_name_or_path {checkpoint}`")
