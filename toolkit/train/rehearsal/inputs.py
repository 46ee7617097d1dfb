"""A rehearsal's model and rows: real ones where they are given, otherwise of the same shapes.

tokenizer, data = rehearsal_data(model_arguments, data_arguments, training)
model = rehearsal_model(model_arguments)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.runs.arguments import DataArguments, ModelArguments
from toolkit.runs.rehearsals import SYNTHETIC
from toolkit.train.data_preflight import DataStats
from toolkit.train.modelling import from_pretrained, load_model, load_tokenizer, prepare_model
from toolkit.train.reading import Data, read_data
from toolkit.train.rehearsal.stage import fill_shards

WEIGHT_SUFFIXES = (".safetensors", ".bin")


def rehearsal_data(model: ModelArguments, data: DataArguments, training: Any) -> tuple[Any, Data]:
    """The rows of `--dataset`, or synthetic ones, for which no tokenizer is needed."""
    if data.dataset != SYNTHETIC:
        tokenizer = load_tokenizer(model, chat_template=data.chat_template)
        return tokenizer, read_data(tokenizer, data, training)
    config = from_pretrained(AutoConfig, model)
    vocabulary = config.get_text_config().vocab_size
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    rows = SyntheticRows(batch, length=data.max_seq_length, vocabulary=vocabulary)
    return None, Data(train=rows, stats=rows.stats(packed=data.packing))


class SyntheticRows(Dataset[dict[str, Any]]):  # type: ignore[misc]
    """Random tokens, each a target: rows as long as they may be, so that a batch is as large as it can get.

    One global batch of them; the Trainer begins again at its end.
    """

    def __init__(self, count: int, *, length: int, vocabulary: int) -> None:
        self.count, self.length, self.vocabulary = count, length, vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.length,), generator=generator).tolist()
        return {"input_ids": tokens, "labels": tokens, "row": index, "rows": [index], "documents": [self.length]}

    def stats(self, *, packed: bool) -> DataStats:
        """As of rows that were read."""
        return DataStats(
            format=SYNTHETIC,
            rows=self.count,
            dropped_rows=0,
            truncated_rows=0,
            tokens=self.count * self.length,
            supervised_tokens=self.count * (self.length - 1),
            longest_row_tokens=self.length,
            sample="",
            packs=self.count if packed else None,
            pack_fill_fraction=1.0 if packed else None,
        )


def rehearsal_model(arguments: ModelArguments) -> Any:
    """The model of a local folder with weights; without them, the same shapes with random values."""
    model = load_model(arguments) if has_local_weights(arguments) else model_from_config(arguments)
    fill_shards(model)
    return model


def model_from_config(arguments: ModelArguments) -> Any:
    """Random weights, sharded as they are made where the engine does so."""
    config = from_pretrained(AutoConfig, arguments)
    extra = {"attn_implementation": arguments.attn_implementation} if arguments.attn_implementation else {}
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=arguments.trust_remote_code, **extra
    )
    return prepare_model(model, arguments)


def has_local_weights(arguments: ModelArguments) -> bool:
    """A configuration alone, or a hub id, is rehearsed with random weights: memory is the same."""
    folder = Path(str(arguments.model_name_or_path)).expanduser()
    return folder.is_dir() and any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir())
