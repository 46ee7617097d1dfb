"""Checkpoints of models that are sharded at load: a Hugging Face folder, and the optimizer by parameter name.

One run of a small mixture of experts, whose files store one tensor per expert where the model holds one per layer.
"""

from pathlib import Path

import pytest
import torch
from conftest import BuildOnce
from launching import ROOT, accelerate_launch, losses, read, toolkit
from safetensors.torch import load_file, save_file

from toolkit.checkpoint.convert import convert
from toolkit.checkpoint.hf_checkpoint import MOMENTS
from toolkit.checkpoint.hf_export import export, open_checkpoint, verify
from toolkit.checkpoint.inspect import inspect_checkpoint
from toolkit.checkpoint.model_definition import MetaModel, ModelFiles
from toolkit.presets import load_preset

pytestmark = pytest.mark.launch

SAVED_STEP = 2
LOSS_TOLERANCE = 1e-6  # relative; observed: 1e-7
LAYOUT = {"dp_replicate": 1, "dp_shard": 2, "pp": 1, "cp": 1, "sp": 1, "tp": 1, "ep": 2}


@pytest.fixture(scope="session")
def tiny_experts(build_once: BuildOnce, tiny_model: Path) -> Path:
    """A random Qwen3 of 4 experts in each of 2 layers, with the tiny Llama's tokenizer; fp32."""

    def build(folder: Path) -> None:
        from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": []}
        sizes |= {"vocab_size": len(tokenizer), "dtype": "float32", "tie_word_embeddings": True}
        config = Qwen3MoeConfig(**sizes, **experts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")

    return build_once("tiny_experts", build) / "model"


@pytest.fixture(scope="session")
def expert_job(saved_job: list[str], tiny_experts: Path) -> list[str]:
    return [*saved_job, "--model_name_or_path", str(tiny_experts), "--max_steps", "4", "--save_model", "false"]


@pytest.fixture(scope="session")
def expert_run(build_once: BuildOnce, expert_job: list[str]) -> Path:
    """Four steps on two ranks, each with half of the experts and half of everything else."""

    def run(folder: Path) -> None:
        words = [*expert_job, "--ep", "2", "--save_steps", str(SAVED_STEP), "--output_dir", str(folder / "run")]
        ended = accelerate_launch(ROOT / "accelerate_configs" / "ep.yaml", *words)
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"

    return build_once("expert_run", run) / "run"


@pytest.fixture
def checkpoint(expert_run: Path) -> Path:
    return expert_run / f"checkpoint-{SAVED_STEP}"


def test_inspect_shows_how_the_ranks_were_divided(checkpoint: Path) -> None:
    summary = inspect_checkpoint(checkpoint)
    assert (summary.state, summary.engine, summary.world_size) == ("complete", "fsdp2", 2)
    assert (summary.layout, summary.sharded_at_load) == (LAYOUT, True)
    assert "2 ranks: dp_shard 2 x ep 2, sharded at load" in summary.lines()[2]
    assert summary.num_params is not None
    assert summary.model_bytes >= 4 * summary.num_params
    assert summary.optimizer_bytes >= 8 * summary.num_params


def test_it_verifies_and_its_export_has_the_models_names(checkpoint: Path, tiny_experts: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "out")
    for folder in (checkpoint, tmp_path / "out"):
        found = verify(folder)
        assert found.problems == []
        assert found.max_difference is not None
        assert found.max_difference < 1e-6  # observed: 1e-7
    weights, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tiny_experts))
    assert set(weights) == set(own)
    # An expert that is missing is reported.
    del weights["model.layers.1.mlp.experts.3.down_proj.weight"]
    save_file(weights, tmp_path / "out" / "model.safetensors")
    assert verify(tmp_path / "out").problems == [
        "model.layers.1.mlp.experts.down_proj has shape [3, 32, 32], expected [4, 32, 32]"
    ]


def test_a_conversion_there_and_back_keeps_weights_and_moments(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "fsdp2", load_preset("fsdp2"), num_processes=2)
    convert(tmp_path / "fsdp2", tmp_path / "ep", load_preset("ep"), num_processes=4, degrees={"ep": 4})
    manifest = read(tmp_path / "ep" / "manifest.json")
    assert manifest["layout"] == {**LAYOUT, "dp_shard": 4, "ep": 4}
    assert (manifest["sharded_at_load"], manifest["global_batch_size"]) == (True, 8)
    model = MetaModel(ModelFiles(checkpoint))
    readers = [open_checkpoint(folder, model) for folder in (checkpoint, tmp_path / "fsdp2", tmp_path / "ep")]
    names = readers[0].optimized()
    assert len(names) == 24  # 11 in each layer, the tied embedding and the last norm
    for name in names:
        for reader in readers[1:]:
            assert torch.equal(reader.weight(name), readers[0].weight(name))
            assert all(torch.equal(reader.moment(name, m), readers[0].moment(name, m)) for m in MOMENTS)
    assert {reader.optimizer_step() for reader in readers} == {SAVED_STEP}
    assert [group["weight_decay"] for group in readers[2].hyperparameters] == [0.1, 0.0]


@pytest.mark.nightly
def test_sharded_runs_resume_as_ddp(expert_run: Path, checkpoint: Path, expert_job: list[str], tmp_path: Path) -> None:
    """DDP's checkpoint has a tensor per expert, which the Trainer alone would pass over."""
    words = [*expert_job, "--save_strategy", "no", "--output_dir", str(tmp_path / "out")]
    command = ["train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--", *words]
    ended = toolkit(*command, "--resume_from_checkpoint", str(checkpoint))
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
    assert "converting it for ddp on 2" in ended.stderr
    assert losses(tmp_path / "out") == pytest.approx(losses(expert_run)[SAVED_STEP:], rel=LOSS_TOLERANCE)
