"""The optimizer that `--optim` names: its expected class, and the dtypes of its states on this rank.

What an optimizer should hold is in `toolkit.models.optimizers`; the tensors that it updates are read from the live
objects: parameters, FSDP2's shards, or DeepSpeed's flat partitions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from toolkit.models.optimizers import OptimizerSpec, UpdatedTensor, optimizer_spec
from toolkit.observe.attest.read_deepspeed import master_weights
from toolkit.observe.attest.readings import Difference, Values
from toolkit.observe.attest.tensors import local, uncompiled
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


def state_dtype_differences(ranks: list[Any]) -> list[Difference]:
    """Return the ranks whose optimizer states have other dtypes than the optimizer gives to their tensors."""
    name = "optimizer_dtype"
    return [
        Difference(name=name, rank=reading["rank"], expected=reading[f"expected_{name}"], found=reading[name])
        for reading in ranks
        if reading.get(f"expected_{name}", reading[name]) != reading[name]
    ]
