"""Training methods on two CPU ranks: each is read back from the live objects, and its effect is checked."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, attested_ranks, losses, nightly, rank_rows, read
from safetensors.torch import load_file

from toolkit.versions import is_importable

pytestmark = pytest.mark.launch
needs_bitsandbytes = pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed")

P, NORMS = 336_192, 5 * 64
NOT_SAVED = ("--save_model", "false")
Start = Callable[..., Path]


HOOKS = [("bf16", "bfloat16"), pytest.param(("power_sgd", "float32"), marks=pytest.mark.nightly)]


@pytest.mark.parametrize("hook", HOOKS)
def test_the_live_model_calls_the_communication_hook(start: Start, hook: tuple[str, str]) -> None:
    folder = start("ddp", "--ddp_comm_hook", hook[0], *NOT_SAVED)
    for rank in attested_ranks(folder):
        assert (rank["ddp_comm_hook"], rank["reduce_dtype"]) == hook


@pytest.mark.parametrize("preset", nightly("ddp", "fsdp2"))
def test_compiled_layers_neither_break_nor_differ(start: Start, preset: str, preset_runs: dict[str, Path]) -> None:
    compiled = ("--torch_compile", "true", "--torch_compile_backend", "aot_eager")  # without inductor's C++
    shorter = ("--max_seq_length", "56")  # than every row: another length would compile again
    folder = start(preset, *compiled, *shorter, "--untimed_steps", "1")
    for rank in attested_ranks(folder):
        assert (rank["torch_compile"], rank["engine"]) == (True, preset)
        assert (rank["compiled_modules"], rank["graph_breaks"]) == (2, 0)
    measured = read(folder / "run.json")["measured"]
    assert (measured["recompilations_after_first_steps"], measured["graph_breaks_after_first_steps"]) == (0, 0)
    assert losses(folder) == pytest.approx(losses(start("ddp", *shorter, *NOT_SAVED)), rel=1e-6)
    saved = (load_file(path / "model.safetensors").keys() for path in (folder, preset_runs[preset]))
    assert len(set(map(frozenset, saved))) == 1


SELECTED = [("ddp", "--bf16 true"), ("ddp", "--packing true"), ("zero2", "--gradient_accumulation_steps 2")]
SELECTED += [("fsdp2", "--lora_r 4 --lora_dropout 0.1"), ("tp", "--tp 2"), ("cp", "--cp 2")]


@pytest.mark.parametrize(
    ("preset", "words"), [SELECTED[0], *(pytest.param(*case, marks=pytest.mark.nightly) for case in SELECTED[1:])]
)
def test_selective_checkpointing_trains_bit_for_bit_as_full_checkpointing(
    start: Start, preset: str, words: str
) -> None:
    job = (*NOT_SAVED, "--activation_checkpointing", "true", *words.split())
    full, selective = start(preset, *job), start(preset, *job, *("--activation_checkpointing_selective", "true"))
    for number in range(2):
        own, expected = (
            [(row["loss"], row["grad_norm"]) for row in rank_rows(run, number)] for run in (selective, full)
        )
        assert own == expected
    for run, kept in ((full, False), (selective, True)):
        for rank in attested_ranks(run):
            assert (rank["activation_checkpointing"], rank["activation_checkpointing_selective"]) == (True, kept)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["zero3", "fsdp2"])
def test_the_chunked_loss_is_the_full_one_where_checkpointed_layers_are_sharded(start: Start, preset: str) -> None:
    sizes = (*NOT_SAVED, "--gradient_accumulation_steps", "2", "--max_steps", "2")
    full = start("ddp", "--loss", "full", *sizes)
    how = ("--loss", "chunked", "--loss_chunk_tokens", "16", "--activation_checkpointing", "true")
    chunked = start(preset, *how, *sizes)
    assert losses(chunked) == pytest.approx(losses(full), rel=1e-6)
    # Each engine computes the norm in its own way: theirs are 1.8e-4 from DDP's with full logits too.
    norms = [[row["grad_norm"] for row in rank_rows(folder)] for folder in (chunked, full)]
    assert norms[0] == pytest.approx(norms[1], rel=3e-4)
    for folder, expected in ((chunked, ("chunked", 16, True)), (full, ("full", None, False))):
        for rank in attested_ranks(folder):
            assert (rank["loss"], rank["loss_chunk_tokens"], rank["activation_checkpointing"]) == expected


@pytest.mark.nightly
def test_dora_trains_and_saves_under_zero3_with_a_scaled_rate(start: Start) -> None:
    scaling = ["--lr_scaling", "linear", "--lr_reference_batch_size", "2"]
    folder = start("zero3", "--lora_r", "4", "--lora_config", "use_dora=true", "use_rslora=true", *scaling)
    config = read(folder / "adapter_config.json")
    assert (config["use_dora"], config["use_rslora"], config["r"]) == (True, True, 4)
    card = (folder / "README.md").read_text()
    assert "\nlibrary_name: peft\n" in card
    assert config["base_model_name_or_path"] not in card  # a path of this machine
    spec = read(folder / "run.json")["spec"]
    assert (spec["learning_rate"], spec["lr_scaling"]["base_learning_rate"]) == (2e-3, 1e-3)
    assert "learning rate 0.001 × 4/2 (linear) = 0.002, after a warm-up of 5%" in (folder / "train.log").read_text()


@pytest.mark.gpu
@needs_bitsandbytes
def test_qlora_computes_in_bf16_on_a_gpu(start: Start) -> None:
    folder = start("single", "--lora_r", "4", "--load_in_4bit", "true", gpu=True)
    (rank,) = attested_ranks(folder)
    assert rank["device"].startswith("cuda")
    assert (rank["load_in_4bit"], rank["compute_dtype"], rank["master_dtype"]) == (True, "bfloat16", "float32")
    assert rank["parameter_bytes"] < 4 * rank["num_params"]
    assert all(math.isfinite(row["loss"]) for row in rank_rows(folder))


@pytest.mark.nightly
@needs_bitsandbytes
@pytest.mark.parametrize(
    ("preset", "optim", "expected"),
    [
        ("zero3", "adamw_bnb_8bit", ("bitsandbytes.AdamW", "float32+uint8")),
        ("ddp", "adafactor", ("transformers.Adafactor", "float32")),
    ],
)
def test_an_optimizers_states_resume(start: Start, preset: str, optim: str, expected: tuple[str, str]) -> None:
    whole = start(preset, "--optim", optim, *NOT_SAVED, "--save_strategy", "steps", "--save_steps", "2")
    for rank in attested_ranks(whole):
        assert (rank["optimizer_class"], rank["optimizer_dtype"]) == expected
    checkpoint = str(whole / "checkpoint-2")
    resumed = start(preset, "--optim", optim, *NOT_SAVED, "--resume_from_checkpoint", checkpoint)
    assert losses(resumed) == losses(whole)[2:]


@needs_bitsandbytes
@pytest.mark.nightly
def test_without_the_rule_an_optimizer_that_accelerate_replaces_fails_its_verification(
    tmp_path: Path, tiny_job: list[str]
) -> None:
    config, out = ROOT / "accelerate_configs" / "zero3_cpu_offload.yaml", tmp_path / "out"
    words = [*tiny_job, "--max_steps", "4", "--optim", "adamw_bnb_8bit", "--output_dir", str(out)]
    ended = accelerate_launch(config, *words, script="unsupported_optimizer")
    assert ended.returncode != 0
    assert "adam_w_mode on rank 0 is False, expected True" in ended.stderr
    ranks = read(out / "attestation.json")["ranks"]
    assert {rank["optimizer_class"] for rank in ranks} == {"deepspeed.DeepSpeedCPUAdam"}


@pytest.mark.nightly
def test_muon_orthogonalises_whole_matrices_where_fsdp2_shards_them(start: Start) -> None:
    found = {}
    for preset in ("ddp", "fsdp2"):
        folder = start(preset, "--optim", "muon", *NOT_SAVED, script="muon_in_fp32")
        found[preset], ranks = losses(folder), attested_ranks(folder)
        assert {rank["optimizer_class"] for rank in ranks} == {"toolkit.MuonWithAdamW"}
        hidden = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
        assert sum(rank["optimizer_bytes"] for rank in ranks) == 4 * (2 * P - hidden) * (2 if preset == "ddp" else 1)
    assert found["fsdp2"] == pytest.approx(found["ddp"], rel=1e-6)
