"""Read what is in effect on this rank from the objects that train, never from the configuration that made them."""

from __future__ import annotations

from typing import Any, cast

import torch

from toolkit.train.attest.activation_checkpointing import uses_activation_checkpointing
from toolkit.train.attest.read_deepspeed import deepspeed_gradients, read_deepspeed, zero3_parameters
from toolkit.train.attest.read_fsdp2 import fsdp2_reduce_dtype, is_fsdp2, read_fsdp2
from toolkit.train.attest.read_layout import first_rows_sha256, read_layout
from toolkit.train.attest.read_pipeline import read_pipeline
from toolkit.train.attest.readings import EngineReading, GradientReading, RankReading, Values
from toolkit.train.attest.tensors import (
    class_name,
    constant_bytes,
    dtype_names,
    frozen_weights,
    full_size,
    is_paged,
    local_bytes,
    num_params,
    optimizer_state_tensors,
    uncompiled,
)
from toolkit.train.attest.training_methods import read_methods
from toolkit.train.engine.comm_hooks import registered_hook
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel
from toolkit.train.model.four_bit import quantized_modules

_WRAPPERS = {
    **{torch.nn.parallel.DistributedDataParallel: "ddp", torch.nn.DataParallel: "data_parallel"},
    PipelineModel: "pipeline",
}


def read_rank(trainer: Any, gradients: GradientReading, *, recompute_detected: bool | None) -> RankReading:
    """Read one rank after its first optimizer step, except for packing, byte limits and the initial weights."""
    wrapped = uncompiled(trainer.model_wrapped)
    plain = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    parameters = list(plain.parameters())
    engine = read_engine(trainer, wrapped, parameters)
    total = num_params(plain)
    pipeline = isinstance(plain, PipelineModel)  # its stages are all trained
    reading = {
        "rank": trainer.args.process_index,
        "world_size": trainer.args.world_size,
        "device": str(trainer.args.device),
        "wrapper": type(wrapped).__name__,
        **engine,
        **gradients,
        **read_4bit(plain),
        "parameter_bytes": engine["parameter_bytes"] + constant_bytes(plain),
        "num_params": total,
        "num_trainable_params": total if pipeline else sum(full_size(p) for p in parameters if p.requires_grad),
        "activation_checkpointing": uses_activation_checkpointing(plain, recompute_detected),
        "seed": torch.initial_seed(),
        **read_methods(trainer, plain),
        **read_layout(trainer, plain),
        **(read_pipeline(trainer, plain) if pipeline else {}),
        "first_rows_sha256": first_rows_sha256(trainer.first_batches),
        "attn_implementation": getattr(plain.config, "_attn_implementation", None),
    }
    return cast("RankReading", reading)


def read_4bit(plain: Any) -> Values:
    """Read the 4-bit weights: the bytes that this rank holds of them and of their constants, and their storage."""
    weights = [module.weight for module in quantized_modules(plain)]
    held = zero3_parameters(weights) if weights and hasattr(weights[0], "ds_id") else weights
    return {
        "quantized_bytes": local_bytes(held) if weights else None,
        "quantization_constant_bytes": constant_bytes(plain) if weights else None,
        "quantized_storage_dtype": dtype_names(weights),
    }


def read_engine(trainer: Any, wrapped: Any, parameters: list[Any]) -> EngineReading:
    """Read the engine that wraps the model."""
    if hasattr(wrapped, "zero_optimization_stage"):
        reading = read_deepspeed(wrapped, parameters)
    else:
        read = read_fsdp2 if is_fsdp2(wrapped) else read_torch
        reading = read(trainer, wrapped, parameters)
    reading["frozen_dtype"] = dtype_names(frozen_weights(wrapped))
    return reading


def read_torch(trainer: Any, wrapped: Any, parameters: list[Any]) -> EngineReading:
    """Read DDP, the stages of a pipeline, or a single process: the parameter is its own fp32 master weight."""
    states = optimizer_state_tensors(trainer.optimizer)
    trained = [p for p in parameters if p.requires_grad]
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision)
    return {
        "engine": next((engine for kind, engine in _WRAPPERS.items() if isinstance(wrapped, kind)), "none"),
        "sharding": "replicate",
        "parameter_bytes": local_bytes(parameters),
        "optimizer_bytes": local_bytes(states),
        "compute_dtype": precision or dtype_names(trained),
        "master_dtype": dtype_names(trained),
        "optimizer_dtype": dtype_names(states),
        "offload_optimizer": None,
        "offload_param": None,
        "gradient_clipping": trainer.args.max_grad_norm,
        "optimizer_class": class_name(trainer.optimizer),
        "optimizer_paged": is_paged(trainer.optimizer),
    }


def read_gradients(trainer: Any) -> GradientReading:
    """Read the reduced gradients that this rank holds before the optimizer step."""
    wrapped = uncompiled(trainer.model_wrapped)
    reduce_dtype: str | None
    if hasattr(wrapped, "zero_optimization_stage"):
        tensors = deepspeed_gradients(wrapped)
        reduce_dtype = str(wrapped.communication_data_type).removeprefix("torch.")
    else:
        tensors = [p.grad for p in wrapped.parameters() if p.grad is not None]
        hook = registered_hook(wrapped)
        sent = None if hook is None else "+".join(sorted(hook.counter.dtypes))
        reduce_dtype = sent or (fsdp2_reduce_dtype(wrapped) if is_fsdp2(wrapped) else dtype_names(tensors))
    return {
        "gradient_bytes": local_bytes(tensors),
        "gradient_dtype": dtype_names(tensors),
        "reduce_dtype": reduce_dtype,
    }
