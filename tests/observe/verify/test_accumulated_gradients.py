"""Gradients between accumulation steps on two real ranks: their bytes, what is sent for them, and the losses."""

from pathlib import Path

import pytest
from counted_collectives import assert_planned
from launching import ROOT, accelerate_launch, losses, nightly_launch, read

from toolkit.models.job_weights import job_weights
from toolkit.models.read_model import read_model
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import TrainingSetup, model_states
from toolkit.presets import load_preset

FSDP2 = ROOT / "accelerate_configs" / "fsdp2.yaml"
ACCUMULATION = 3
CHOICES = {"sharded": [], "whole": ["--accumulate", "whole"]}  # sharded is the default


def words(folder: Path, model: Path, data: Path) -> list[str]:
    job = ["--max_steps", "3", "--per_device_train_batch_size", "1", "--max_seq_length", "64"]
    job += ["--gradient_accumulation_steps", str(ACCUMULATION), "--save_strategy", "no", "--save_model", "false"]
    return [*job, "--model_name_or_path", str(model), "--dataset", str(data), "--output_dir", str(folder)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("accumulate") / name for name in CHOICES}
    for name, folder in found.items():
        given = [*words(folder, tiny_model, faq_alpaca), *CHOICES[name]]
        ended = accelerate_launch(FSDP2, *given, script="count_collectives.py")
        assert ended.returncode == 0, ended.stderr[-2000:]
    return found


@nightly_launch
def test_each_rank_holds_and_sends_the_planned_accumulated_gradients(runs: dict[str, Path], tiny_model: Path) -> None:
    """fp32 on a CPU: half of them as shards, and twice as many bytes whole."""
    planned = {}
    for name, folder in runs.items():
        planned_job = PlannedJob(gradient_accumulation_steps=ACCUMULATION, accumulate=name)
        how = {"preset": load_preset("fsdp2"), "shape": read_model(str(tiny_model)), "mixed_precision": "no"}
        job = TrainingSetup(**how, world_size=2, job=planned_job)
        weights = job_weights(job.shape, None, False)
        states = model_states(job.engine, weights)
        whole = job.engine.traits.buffers(job.engine, weights, states, job.job).accumulated_bytes
        planned[name] = whole or states.gradient_bytes
        for reading in read(folder / "attestation.json")["ranks"]:
            assert reading["accumulate"] == name
            assert reading["accumulated_gradient_bytes"] == planned[name]
        assert read(folder / "run.json")["spec"]["model"]["accumulate"] == name
        assert_planned(job, folder)
    assert planned["whole"] == 2 * planned["sharded"]
    assert losses(runs["sharded"]) == pytest.approx(losses(runs["whole"]), rel=1e-5)


@nightly_launch
def test_a_reduction_that_is_wrongly_deferred_is_detected(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> None:
    ended = accelerate_launch(FSDP2, *words(tmp_path / "run", tiny_model, faq_alpaca), script="defer_reduction")
    assert ended.returncode != 0
    assert "accumulate on rank 0 is whole, expected sharded" in ended.stderr
    assert read(tmp_path / "run" / "run.json")["status"] == "attestation_failed"
