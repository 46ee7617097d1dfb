"""Every layout trains the problem of one process, resumed runs too, and saves a model that loads in one process."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from launching import read
from split_runs import RUNS, launch, losses_and_norms, split_runs

from toolkit.checkpoint.convert import convert
from toolkit.checkpoint.hf_export import verify
from toolkit.errors import ToolkitError
from toolkit.presets import load_preset

pytestmark = [
    pytest.mark.launch,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

SPLIT = split_runs()


@pytest.mark.parametrize("name", [run for run in SPLIT if "bf16" not in str(run)])
def test_losses_and_gradient_norms_are_those_of_one_process(name: str, run_folder: Callable[[str], Path]) -> None:
    losses, norms = losses_and_norms(run_folder(name))
    expected_losses, expected_norms = losses_and_norms(run_folder(RUNS[name].baseline))
    assert len(losses) == RUNS[name].steps
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)


@pytest.mark.parametrize("name", SPLIT)
def test_every_rank_reads_its_layout_back_and_holds_a_part_of_the_model_states(
    name: str, run_folder: Callable[[str], Path]
) -> None:
    """`tests/plan/test_split_memory.py` has the exact bytes."""
    attestation, run = read(run_folder(name) / "attestation.json"), RUNS[name]
    baseline = read(run_folder(run.baseline) / "attestation.json")
    assert (attestation["verdict"], attestation.get("differences")) == ("attested", [])
    assert len(attestation["ranks"]) == run.num_ranks
    for rank in attestation["ranks"]:
        assert {dimension: size for dimension, size in rank["layout"].items() if size > 1} == run.layout
        assert rank["initial_weights_sha256"] == baseline["ranks"][0]["initial_weights_sha256"]
        assert set(rank["byte_limits"]) == {"parameter", "gradient", "optimizer"}
        for part, (_, most) in rank["byte_limits"].items():
            assert 0 < rank[f"{part}_bytes"] <= most
            divides_rows = run.preset in ("cp", "ulysses")
            assert rank["loss"] == ("chunked" if divides_rows else rank["loss"])
            shares = divides_rows or run.words[:1] == ("--lora_r",)
            assert most < rank["whole_bytes"][part] or shares


@pytest.mark.parametrize("name", SPLIT)
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


@pytest.mark.nightly
def test_ranks_that_save_the_final_model_at_different_times_lose_no_file(
    split_models: Path, split_rows: Path, tmp_path: Path
) -> None:
    """Replicas of split layers wait for each other nowhere between the last step and the save."""
    folder, run = tmp_path / "run", RUNS["tp-2x2"]
    launch(run, models=split_models, rows=split_rows, folder=folder, change="uneven_final_save")
    assert verify(folder).problems == []


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


def test_each_fix_that_a_run_leaves_out_is_there() -> None:
    fixes = [run.without_fix.split(":") for run in RUNS.values() if run.without_fix]
    assert len(fixes) == 2
    assert all(callable(getattr(import_module(module), name)) for module, name in fixes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "baseline"), [("tp-without-norm-fix", "qwen3"), ("ulysses-without-token-weights", "llama")]
)
def test_without_its_fix_a_library_trains_another_problem(
    name: str, baseline: str, run_folder: Callable[[str], Path]
) -> None:
    """A fix goes when this fails. Every rank reads the same layout back: only the gradient shows the difference."""
    _, norms = losses_and_norms(run_folder(name))
    _, expected = losses_and_norms(run_folder(baseline))
    assert norms != pytest.approx(expected, rel=1e-5)
