"""What all tests share: no network, the real model and data, and a tiny model that speaks the real tokens."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before any test module imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


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
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
