"""Runs of the toolkit itself whose checkpoints are small: a Llama with a vocabulary of bytes, on two CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from file_mutations.attempts import ROOT

CASES = ("ddp", "zero2", "zero3", "zero3-lora", "fsdp2", "fsdp2-lora")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def small_model(folder: Path) -> Path:
    """Write a random Llama of two layers whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from toolkit.demo.assets import random_llama

    if folder.is_dir():
        return folder
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*special, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    ends = {"bos_token": special[1], "eos_token": special[2], "pad_token": special[0]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **ends)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    temporary = folder.with_name(f"{folder.name}.part")
    random_llama(temporary, fast, **sizes)
    temporary.rename(folder)
    return folder


def small_runs(work: Path, cases: tuple[str, ...] = CASES) -> dict[str, Path]:
    """Return finished run folders by case, training those that are missing; `work/model` is their model."""
    model = small_model(work / "model")
    return {case: _run(work / case, case, model) for case in cases}


def _run(folder: Path, case: str, model: Path) -> Path:
    if (folder / "model.safetensors").exists() or (folder / "adapter_model.safetensors").exists():
        return folder
    preset, _, lora = case.partition("-")
    job = ["--model_name_or_path", str(model), "--dataset", str(ROOT / "examples" / "data.jsonl"), "--seed", "1"]
    job += ["--max_seq_length", "64", "--max_steps", "2", "--per_device_train_batch_size", "2", "--save_steps", "1"]
    job += [*(["--lora_r", "2"] if lora else []), "--output_dir", str(folder)]
    options = ["--preset", preset, "--num-processes", "2", "--cpu"]
    command = [sys.executable, "-m", "toolkit", "train", *options, "--", *job]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{case}:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return folder


def exported(run: Path, out: Path, model: Path) -> Path:
    """Return a run's newest checkpoint exported in several shards."""
    from file_mutations.checkpoint_formats import newest

    from toolkit.checkpoint.hf_export import export

    if not out.is_dir():
        export(newest(run), out, max_shard_bytes=150_000, base_model=str(model))
    return out
