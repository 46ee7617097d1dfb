"""Stand-ins of a rehearsal: a world whose other ranks do not exist, and rows and weights where none are given.

The environment of rank r of N comes from accelerate's own launcher, so that the preset's file is read as in a run.
torch's `fake` process group has any size and any rank, and its collectives move nothing.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.job.argument_fields import ModelArguments
from toolkit.launch.command import launcher_environment, rank_environment
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.sharded_at_load import distributed_config
from toolkit.presets.spec import PresetSpec
from toolkit.rehearse.rehearsal import SYNTHETIC, RehearsedRank, has_local_weights
from toolkit.train.arguments import Arguments
from toolkit.train.data.data_report import DataStats
from toolkit.train.data.dataset import Data, load_data
from toolkit.train.model.loading import (
    from_pretrained,
    load_model,
    load_tokenizer,
    loaded_dtype,
    model_without_weights,
    prepare_model,
)

SHARD_VALUE = 0.01


def join_fake_world(rehearsed: RehearsedRank, preset: PresetSpec) -> None:
    """Make this process rank r of N. Call it before anything asks for a process group."""
    os.environ.update(launcher_environment(preset, world_size=rehearsed.world_size))
    if rehearsed.fake_tensors:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, which fake tensors take for another device
        if preset.engine == "ddp":
            return  # its reducer takes no fake tensors: the model is traced without it
    if preset.engine != "none":
        from accelerate.utils.other import get_free_port

        place = {"world_size": rehearsed.world_size, "rank": rehearsed.rank}
        # the one device that is here
        os.environ.update(rank_environment(**place, local_rank=0, local_world_size=1, master_port=get_free_port()))
    if rehearsed.world_size > 1:  # a group that accelerate and every engine use; a single rank's engine starts its own
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rehearsed.rank, world_size=rehearsed.world_size)
    if preset.engine == "deepspeed":  # ZeRO-3 compares the order of parameters with rank 0's, which nobody sends
        from deepspeed.runtime.zero import utils

        utils.assert_lst_len_same_as_other_ranks = lambda _: None
        utils.get_lst_from_rank0 = lambda own: own


def fill_shards(model: Any) -> None:
    """Fill this rank's shards with a constant, in place of what rank 0 would have sent.

    Uninitialised memory holds NaN at times, and ZeRO skips such a step. A ZeRO-3 model is sharded as soon as it is
    loaded, an FSDP2 model once the Trainer has prepared it.
    """
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        shard = parameter.to_local() if shard is None and hasattr(parameter, "to_local") else shard
        if shard is not None and shard.is_floating_point():
            shard.data.fill_(SHARD_VALUE)


def register_local_reduction(wrapped: Any) -> None:
    """Make DDP use its own buckets as the result of the reduction.

    DDP reads the result from the future of the all-reduce, which is empty under the fake backend.
    """
    if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        wrapped.register_comm_hook(None, _own_bucket)


def _own_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
    del state
    buffer = bucket.buffer()
    future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def rehearsal_data(args: Arguments) -> tuple[Any, Data]:
    """Return the tokenizer and the rows of `--dataset`; or None and synthetic rows, which need no tokenizer."""
    if args.job.dataset != (SYNTHETIC,):
        tokenizer = load_tokenizer(args.job, chat_template=args.job.chat_template)
        return tokenizer, load_data(tokenizer, args.job, args.training, data_parallel_size=args.data_parallel_size)
    vocabulary = from_pretrained(AutoConfig, args.job).get_text_config().vocab_size
    rows = SyntheticRows(args.global_batch_size, length=args.job.max_seq_length, vocabulary=vocabulary)
    return None, Data(train=rows, stats=rows.stats(packed=args.job.packing))


class SyntheticRows(Dataset[dict[str, Any]]):  # type: ignore[misc]
    """Random tokens, all supervised: rows of the maximum length, so that a batch is as large as it can get.

    `count` is one global batch; the Trainer starts over at its end.
    """

    def __init__(self, count: int, *, length: int, vocabulary: int) -> None:
        self.count, self.length, self.vocabulary = count, length, vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.length,), generator=generator).tolist()
        return {"input_ids": tokens, "labels": tokens, "rows": [index], "documents": [self.length]}

    def stats(self, *, packed: bool) -> DataStats:
        """Return the statistics that rows of a file would have."""
        return DataStats(
            format=SYNTHETIC,
            rows=self.count,
            dropped_rows=0,
            epoch_rows=self.count,
            truncated_rows=0,
            tokens=self.count * self.length,
            supervised_tokens=self.count * (self.length - 1),
            longest_row_tokens=self.length,
            sample="",
            packs=self.count if packed else None,
            pack_fill_fraction=1.0 if packed else None,
        )


def rehearsal_model(
    arguments: ModelArguments, *, compute_dtype: torch.dtype, layout_at_load: ParallelLayout | None
) -> Any:
    """Return the model of a local folder with weights; without weights, the same shapes with random values.

    With a `layout_at_load`, transformers shards it while it makes it.
    """
    make = load_model if has_local_weights(str(arguments.model_name_or_path)) else model_from_config
    model = make(arguments, compute_dtype=compute_dtype, layout=layout_at_load)
    fill_shards(model)
    return model


def model_from_config(
    arguments: ModelArguments, *, compute_dtype: torch.dtype, layout: ParallelLayout | None = None
) -> Any:
    """Return the model with random weights, sharded as they are made where the engine or the `layout` does so."""
    dtype = loaded_dtype(arguments, compute_dtype)
    extra = {"attn_implementation": arguments.attn_implementation} if arguments.attn_implementation else {}
    if layout is None:
        model = AutoModelForCausalLM.from_config(
            from_pretrained(AutoConfig, arguments),
            dtype=dtype,
            trust_remote_code=arguments.trust_remote_code,
            **extra,
        )
    else:
        extra["distributed_config"] = distributed_config(layout, half=compute_dtype == torch.bfloat16)
        model = _sharded_from_config(arguments, dtype=dtype, **extra)
    return prepare_model(model, arguments, compute_dtype=compute_dtype)


def _sharded_from_config(arguments: ModelArguments, **extra: Any) -> Any:
    """Load an empty checkpoint: transformers shards a model only there, and makes what a checkpoint lacks at random."""
    plain = model_without_weights(arguments)
    reports = logging.getLogger("transformers.modeling_utils")
    level = reports.level
    reports.setLevel(logging.ERROR)  # it would list every weight as missing
    try:
        return type(plain).from_pretrained(None, config=plain.config, state_dict={}, **extra)
    finally:
        reports.setLevel(level)
