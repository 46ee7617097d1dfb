"""ZeRO-Infinity on two CPU ranks: parameters and optimizer on a disk, with the losses of offload to memory.

The model is a Llama with 2 layers, hidden 768, intermediate 1024, 1,000 tokens and an untied head: all shards but those
of norms are of 1.2 MB and more. Below 1 MiB DeepSpeed leaves a tensor in memory.
"""

import ctypes.util
import json
import os
from pathlib import Path

import pytest
import torch
from launching import ROOT, accelerate_launch, attested_ranks, losses, read, succeeded
from random_models import random_llama
from scripts.train_and_fingerprint import FIXED_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from toolkit.engines.compiled_ops import ASYNC_IO_OPS, COMPILE_ASYNC_IO, INSTALL_LIBAIO, are_compiled

HAS_LIBAIO = ctypes.util.find_library("aio") is not None

pytestmark = [
    pytest.mark.launch,
    pytest.mark.nightly,
    pytest.mark.skipif(not HAS_LIBAIO, reason=f"libaio is not installed: {INSTALL_LIBAIO}"),
    pytest.mark.skipif(not are_compiled(ASYNC_IO_OPS), reason=f"async_io is not compiled: {COMPILE_ASYNC_IO}"),
]

ON_DISK = 2 * 1000 * 768 + 2 * (4 * 768 * 768 + 3 * 768 * 1024)
NORMS = 5 * 768
P = ON_DISK + NORMS
LOSS_TOLERANCE = 1e-6  # observed: equal in every recorded digit
STEPS = ["--max_seq_length", "48", "--max_steps", "2", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, faq_alpaca: Path) -> Path:
    """64 rows as prompt and completion: the small tokenizer has no chat template."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    found = [json.loads(line) for line in faq_alpaca.read_text().splitlines()[:64]]
    lines = [json.dumps({"prompt": row["instruction"], "completion": row["output"]}) for row in found]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """Few tokens and wide layers, so that most shards are large enough to be swapped."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    words = {"special_tokens": ["<s>", "</s>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=1000, show_progress=False, **words)
    tokenizer.train_from_iterator(rows.read_text().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    sizes = {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 8, "max_position_embeddings": 256, "tie_word_embeddings": False}
    return random_llama(tmp_path_factory.mktemp("models") / "wide-llama", fast, **sizes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, wide_model: Path, rows: Path) -> dict[str, Path]:
    """The same job in memory and on the disk, each by a plain `accelerate launch`; and the folder for swap files."""
    folder, swap = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("nvme")
    job = ["--model_name_or_path", str(wide_model), "--dataset", str(rows), *STEPS, "--save_strategy", "no"]
    for preset in ("zero3", "zero3_nvme_offload"):
        words = [*job, "--output_dir", str(folder / preset)]
        variables = {"TOOLKIT_NVME_PATH": str(swap)}
        succeeded(accelerate_launch(preset, *words, script="train_and_fingerprint.py", variables=variables))
    return {"memory": folder / "zero3", "disk": folder / "zero3_nvme_offload", "swap": swap}


def test_the_run_on_the_disk_is_that_of_offload_to_memory(runs: dict[str, Path]) -> None:
    assert len(losses(runs["disk"])) == 2
    assert losses(runs["disk"]) == pytest.approx(losses(runs["memory"]), rel=LOSS_TOLERANCE)
    model = AutoModelForCausalLM.from_pretrained(runs["disk"])
    live = torch.load(runs["disk"] / "live_logits.pt")
    torch.testing.assert_close(live, torch.load(runs["memory"] / "live_logits.pt"), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        reloaded = model(input_ids=torch.tensor(FIXED_TOKENS) % model.config.vocab_size).logits
    torch.testing.assert_close(reloaded, live, rtol=1e-5, atol=1e-5)


def test_each_rank_holds_half_and_reads_its_bytes_back_from_the_swap_files(runs: dict[str, Path]) -> None:
    for rank in attested_ranks(runs["disk"]):
        assert (rank["offload_optimizer"], rank["offload_param"]) == ("nvme", "nvme")
        assert (rank["compute_dtype"], rank["master_dtype"], rank["optimizer_dtype"]) == ("float32",) * 3
        assert rank["parameter_disk_bytes"] == 4 * ON_DISK // 2
        assert rank["parameter_bytes"] == 4 * P // 2 + 4 * NORMS  # norms are gathered in addition to their shards
        assert rank["optimizer_disk_bytes"] == 12 * ON_DISK // 2
        assert rank["optimizer_bytes"] == 12 * P // 2
        assert rank["gradient_bytes"] == 4 * P // 2
    for rank in attested_ranks(runs["memory"]):
        assert (rank["parameter_disk_bytes"], rank["optimizer_disk_bytes"]) == (0, 0)
    # Buffers follow the model, and swap files are gone.
    facts = read(runs["disk"] / "run.json")["nvme"]
    assert facts["buffer_size"] == 768 * 1024 // 2  # gate, up and down
    assert facts["buffer_count"] == 4  # q, k, v and o
    assert facts["swap_bytes"] >= 20 * ON_DISK  # parameters, master weights, momentum, variance and gradients
    assert not Path(facts["swap_folder"]).exists()
    assert list(runs["swap"].iterdir()) == []
    assert "nvme" not in read(runs["memory"] / "run.json")


def test_a_plain_launch_without_a_disk_is_refused(wide_model: Path, rows: Path, tmp_path: Path) -> None:
    assert "TOOLKIT_NVME_PATH" not in os.environ
    words = ["--model_name_or_path", str(wide_model), "--dataset", str(rows), "--output_dir", str(tmp_path / "out")]
    ended = accelerate_launch("zero3_nvme_offload", *words)
    assert ended.returncode == 1
    failure = read(tmp_path / "out" / "failure.json")
    assert failure["message"] == "offload_optimizer is on NVMe, and no disk is named"
    assert failure["invalid_input"] is True
    assert not (ROOT / "none").exists()  # accelerate's word for no path would become a folder
