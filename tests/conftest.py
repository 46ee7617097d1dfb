"""What all tests share: no network, the real model and data, and a tiny model that speaks the real tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before any test module imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A shell starts a background job with SIGINT ignored, and every process below would inherit that: Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Libraries speak through the environment (`TrainingArguments(deepspeed=...)` sets `ACCELERATE_USE_DEEPSPEED`):
    what one test leaves there, the processes that the next one starts would inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@cache
def _has_gpu() -> bool:
    from toolkit.hardware.gpus import count_gpus

    return count_gpus() > 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct, a folder of fp32 safetensors."""
    from toolkit.demo.assets import prepare_default_model

    return prepare_default_model()


@pytest.fixture(scope="session")
def faq_alpaca() -> Path:
    """503 rows of instruction, input and output."""
    from toolkit.demo.assets import default_data_file

    return default_data_file("faq-en-alpaca.jsonl")


@pytest.fixture(scope="session")
def faq_sharegpt() -> Path:
    """The same 503 rows as conversations."""
    from toolkit.demo.assets import default_data_file

    return default_data_file("faq-en-sharegpt.jsonl")


@pytest.fixture(scope="session")
def tokenizer(real_model: Path) -> Any:
    """The real tokenizer: pad equals eos, and its chat template has no generation block."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A random Llama of 3.2 M parameters with the real tokenizer; fp32, tied embeddings, seed 0."""
    from toolkit.demo.random_model import random_llama

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    return random_llama(tmp_path_factory.mktemp("models") / "tiny-llama", tokenizer, **sizes)


@pytest.fixture(scope="session")
def preset_runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """One run folder a preset that a CPU can run, all started by `accelerate launch --config_file` on the same job."""
    from launching import CPU_PRESETS, GLOBAL_BATCH, ROOT, accelerate_launch

    folder = tmp_path_factory.mktemp("presets")
    for preset, ranks in CPU_PRESETS.items():
        words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        words += ["--max_steps", "3", "--per_device_train_batch_size", str(GLOBAL_BATCH // ranks)]
        words += ["--learning_rate", "1e-3", "--save_strategy", "no", "--output_dir", str(folder / preset)]
        mesh = ["--parallelism_config_dp_shard_size", "2"] if preset == "fsdp2_hybrid" else []
        config = ROOT / "accelerate_configs" / f"{preset}.yaml"
        script = "train_and_fingerprint.py"
        ended = accelerate_launch(config, *words, script=script, num_processes=ranks, options=mesh)
        assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return {preset: folder / preset for preset in CPU_PRESETS}


@pytest.fixture(scope="session")
def saved_runs(tmp_path_factory: pytest.TempPathFactory, saved_job: list[str]) -> dict[str, Path]:
    """One uninterrupted run a case of `launching.SAVED`, with its checkpoints: to resume, export, verify, convert."""
    from launching import LORA, ROOT, SAVED, accelerate_launch

    folder = tmp_path_factory.mktemp("saved")
    for case, save_steps in SAVED.items():
        preset, _, lora = case.partition("-")
        words = [*saved_job, *(LORA if lora else []), "--save_steps", str(save_steps), "--output_dir"]
        ended = accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *words, str(folder / case))
        assert ended.returncode == 0, f"{case}:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return {case: folder / case for case in SAVED}


@pytest.fixture(scope="session")
def saved_job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> list[str]:
    """20 rows in micro-batches of 2 on two ranks, two of them a step: an epoch has 5 micro-batches a rank, so 3 steps,
    the last of them short. Step 2 is in the middle of the first epoch, 3 its end, 4 and 5 are in the second."""
    from launching import SAVED_STEPS

    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("\n".join(faq_alpaca.read_text().splitlines()[:20]) + "\n")
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--max_seq_length", "64"]
    words += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3"]
    return [*words, "--weight_decay", "0.1", "--max_steps", str(SAVED_STEPS)]
