"""The optimizer that `--optim` names: its expected class, and the bytes and dtypes of its states on this rank.

What an optimizer should hold is in `toolkit.presets.optimizers`; the tensors that it updates are read from the live
objects: parameters, FSDP2's shards, or DeepSpeed's flat partitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from toolkit.observe.attest.read_deepspeed import master_weights
from toolkit.observe.attest.readings import Difference, Values
from toolkit.observe.attest.tensors import full_shape, local, uncompiled
from toolkit.presets.optimizers import FP32_BYTES, OptimizerSpec, UpdatedTensor, optimizer_spec
from toolkit.presets.shard_bytes import largest_shard
from toolkit.presets.spec import PresetSpec


def named_optimizer(args: Any) -> OptimizerSpec | None:
    """Return what the optimizer of some `TrainingArguments` keeps; None if that is not known."""
    return optimizer_spec(str(getattr(args.optim, "value", args.optim)), args.optim_args)


def expected_optimizer(spec: OptimizerSpec | None, preset: PresetSpec) -> Values:
    """Return the values that every rank must read of its optimizer.

    The dtypes of AdamW's states are the numerics contract's; those of others follow from each rank's tensors.
    """
    contract = {"optimizer_dtype": "float32"}
    if spec is None:
        return contract
    if preset.engine == "deepspeed" and preset.offload_optimizer:
        return contract | {"optimizer_class": "deepspeed.DeepSpeedCPUAdam", "adam_w_mode": True}
    named = {"optimizer_class": spec.class_name, "optimizer_paged": spec.paged}
    return contract | named if spec.is_fp32_adamw else named


def updated_tensors(trainer: Any) -> list[UpdatedTensor]:
    """Return the tensors that this rank's optimizer updates."""
    wrapped = uncompiled(trainer.model_wrapped)
    if hasattr(wrapped, "zero_optimization_stage"):
        return [UpdatedTensor(shape=(master.numel(),)) for master in master_weights(wrapped)]
    embeddings = {id(m.weight) for m in wrapped.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = hidden_matrices(trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False))
    return [
        UpdatedTensor(shape=tuple(local(p).shape), is_embedding=id(p) in embeddings, is_hidden_matrix=id(p) in matrices)
        for p in wrapped.parameters()
        if p.requires_grad
    ]


def hidden_matrices(model: Any) -> set[int]:
    """Return the ids of the weights that Muon trains: those of linear layers, but not the head."""
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return {id(weight) for weight in linear if weight.ndim == 2 and weight.requires_grad} - embeddings


def optimizer_byte_limits(
    spec: OptimizerSpec, preset: PresetSpec, trainer: Any, trained: list[Any], *, ranks: int
) -> tuple[int, int]:
    """Return the bytes, lowest and highest, that an optimizer other than fp32 AdamW holds on this rank.

    DeepSpeed's master weights are among them, no more than the preset's sharding allows.
    """
    tensors = updated_tensors(trainer)
    if preset.engine != "deepspeed":
        exact = spec.state_bytes(tensors)
        return exact, exact
    shapes = [full_shape(p) for p in trained]
    whole = sum(map(math.prod, shapes))
    most = largest_shard(shapes, preset.engine, ranks=ranks) if "optimizer" in preset.sharded_parts else whole
    if sum(tensor.num_elements for tensor in tensors) > most:
        tensors = [UpdatedTensor(shape=(most,))]
    exact = FP32_BYTES * sum(tensor.num_elements for tensor in tensors) + spec.state_bytes(tensors)
    return exact, exact


def state_dtype_differences(ranks: list[Any]) -> list[Difference]:
    """Return the ranks whose optimizer states have other dtypes than the optimizer gives to their tensors."""
    return [_dtype_difference(reading) for reading in ranks if not _has_expected_dtype(reading)]


def _has_expected_dtype(reading: Mapping[str, Any]) -> bool:
    expected = reading.get("expected_optimizer_dtype", reading["optimizer_dtype"])
    return bool(expected == reading["optimizer_dtype"])


def _dtype_difference(reading: Mapping[str, Any]) -> Difference:
    return Difference(
        name="optimizer_dtype",
        rank=reading["rank"],
        expected=reading["expected_optimizer_dtype"],
        found=reading["optimizer_dtype"],
    )
