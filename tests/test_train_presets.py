"""Each preset for real: two CPU ranks, a tiny Llama, what each rank holds, what is saved, what is computed.

The tiny Llama has 3,219,776 parameters: embedding 49,152 x 64 (tied), and two layers of
q 64x64, k and v 32x64, o 64x64, gate, up and down 128x64 each, two norms of 64; one final norm of 64.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, losses, read

pytestmark = pytest.mark.launch

P = 3_219_776
NORMS = 5 * 64
RUN_FILES = {"run.json", "attestation.json", "train.log", "ranks/rank0.jsonl", "ranks/rank1.jsonl"}
MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

# fp32 on a CPU: 4 bytes a parameter and a gradient, 8 of Adam; DeepSpeed keeps an fp32 master beside, 12 in all.
HELD_BYTES = {
    "ddp": {"parameter": 4 * P, "gradient": 4 * P, "optimizer": 8 * P},
    "zero1": {"parameter": 4 * P, "gradient": 4 * P, "optimizer": 12 * P // 2},
    "zero2": {"parameter": 4 * P, "gradient": 4 * P // 2, "optimizer": 12 * P // 2},
    # norms are below the persistence threshold: gathered whole, beside their shards
    "zero3": {"parameter": 4 * P // 2 + 4 * NORMS, "gradient": 4 * P // 2, "optimizer": 12 * P // 2},
    "zero3_cpu_offload": {"parameter": 4 * P // 2 + 4 * NORMS, "gradient": 4 * P // 2, "optimizer": 12 * P // 2},
    "fsdp2": {"parameter": 4 * P // 2, "gradient": 4 * P // 2, "optimizer": 8 * P // 2},
}
PRESETS = list(HELD_BYTES)
# Observed: equal to 15 digits at the first step, 2e-7 relative after two updates.
LOSS_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """One run folder a preset, from the same command."""
    folder = tmp_path_factory.mktemp("presets")
    for preset in PRESETS:
        words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        words += ["--max_steps", "3", "--per_device_train_batch_size", "2", "--save_strategy", "no"]
        words += ["--learning_rate", "1e-3", "--output_dir", str(folder / preset)]
        config = ROOT / "accelerate_configs" / f"{preset}.yaml"
        ended = accelerate_launch(config, *words, script="train_and_fingerprint.py")
        assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return {preset: folder / preset for preset in PRESETS}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_rank_holds_the_bytes_that_the_preset_promises(runs: dict[str, Path], preset: str) -> None:
    attestation = read(runs[preset] / "attestation.json")
    assert attestation["verdict"] == "attested"
    assert [rank["world_size"] for rank in attestation["ranks"]] == [2, 2]
    for rank in attestation["ranks"]:
        assert {part: rank[f"{part}_bytes"] for part in HELD_BYTES[preset]} == HELD_BYTES[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_run_folder_holds_exactly_its_files_and_the_model(runs: dict[str, Path], preset: str) -> None:
    found = {str(path.relative_to(runs[preset])) for path in runs[preset].rglob("*") if path.is_file()}
    assert found == RUN_FILES | MODEL_FILES | {"live_logits.pt"}


@pytest.mark.parametrize("preset", PRESETS)
def test_run_json_says_what_ran_and_how_it_ended(runs: dict[str, Path], preset: str) -> None:
    run = read(runs[preset] / "run.json")
    assert (run["status"], run["exit_code"], run["preset"], run["world_size"]) == ("completed", 0, preset, 2)
    assert run["preset_files"][f"accelerate_configs/{preset}.yaml"].startswith("# ")
    assert run["versions"]["torch"] is not None
    assert run["measured"]["timed_steps"] == 1
    assert run["data"]["rows"] == 503


@pytest.mark.parametrize("preset", PRESETS)
def test_the_loss_of_every_step_equals_that_of_ddp(runs: dict[str, Path], preset: str) -> None:
    assert losses(runs[preset]) == pytest.approx(losses(runs["ddp"]), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_and_batches_are_those_of_ddp(runs: dict[str, Path], preset: str) -> None:
    def problem(folder: Path) -> tuple[set[str], list[list[str]]]:
        ranks = read(folder / "attestation.json")["ranks"]
        rows = [(folder / "ranks" / f"rank{r}.jsonl").read_text().splitlines() for r in (0, 1)]
        batches = [[line.split('"batch_sha256": "')[1][:16] for line in rank] for rank in rows]
        return {rank["initial_weights_sha256"] for rank in ranks}, batches

    weights, batches = problem(runs[preset])
    assert len(weights) == 1
    assert (weights, batches) == problem(runs["ddp"])
    assert batches[0] != batches[1]  # each rank has its own rows


@pytest.mark.parametrize("preset", PRESETS)
def test_the_saved_folder_loads_and_gives_the_live_model_s_logits(runs: dict[str, Path], preset: str) -> None:
    import torch
    from scripts.train_and_fingerprint import FIXED_TOKENS
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(runs[preset])
    live = torch.load(runs[preset] / "live_logits.pt")
    with torch.no_grad():
        reloaded = model(input_ids=torch.tensor(FIXED_TOKENS)).logits
    torch.testing.assert_close(reloaded, live, rtol=1e-5, atol=1e-5)
    assert model.num_parameters() == P
    assert model.config.use_cache is True
    assert AutoTokenizer.from_pretrained(runs[preset]).decode([4093]) != ""


def test_offload_is_read_back_from_the_optimizer_itself(runs: dict[str, Path]) -> None:
    rank = read(runs["zero3_cpu_offload"] / "attestation.json")["ranks"][0]
    assert (rank["offload_optimizer"], rank["offload_param"]) == ("cpu", "cpu")
    assert rank["optimizer_class"] == "DeepSpeedCPUAdam"
