"""Read back what is in force on this rank: engine, sharding, bytes, dtypes, offload.

One function an engine; each looks at the objects that train, never at the configuration that made them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.train.attest.recomputation import recomputes_activations
from toolkit.train.attest.swapped import (
    is_on_disk,
    optimizer_disk_bytes,
    parameter_disk_bytes,
    swap_buffers,
    swaps_every_large_group,
    swaps_every_large_shard,
)
from toolkit.train.attest.tensors import device_types, dtype_names, full_size, local_bytes, uncompiled
from toolkit.train.switches import read_switches

Facts = dict[str, Any]


def read_rank(trainer: Any, gradients: Facts, *, recomputed: bool | None) -> Facts:
    """Everything that one rank can say of itself after its first optimizer step, in which activations were or were
    not seen to be recomputed."""
    wrapped = uncompiled(trainer.model_wrapped)
    plain = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    parameters = list(plain.parameters())
    return {
        "rank": trainer.args.process_index,
        "world_size": trainer.args.world_size,
        "device": str(trainer.args.device),
        "wrapper": type(wrapped).__name__,
        **engine_reader(wrapped)(trainer, wrapped, parameters),
        **gradients,
        "num_params": sum(map(full_size, parameters)),
        "num_trainable_params": sum(full_size(p) for p in parameters if p.requires_grad),
        "activation_checkpointing": recomputes_activations(plain, recomputed),
        "seed": torch.initial_seed(),
        **read_switches(trainer, plain),
        "attn_implementation": getattr(plain.config, "_attn_implementation", None),
    }


def engine_reader(wrapped: Any) -> Any:
    """The reader for what the model is wrapped in."""
    if hasattr(wrapped, "zero_optimization_stage"):
        return read_deepspeed
    return read_fsdp2 if is_fsdp2(wrapped) else read_torch


def is_fsdp2(wrapped: Any) -> bool:
    """Whether torch's fully_shard manages this module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(wrapped, FSDPModule)


def torch_optimizer_states(optimizer: Any) -> list[torch.Tensor]:
    """Tensors that an optimizer keeps for each parameter, step counters left out."""
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in inner.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor) and value.dim() > 0]


def read_torch(trainer: Any, wrapped: Any, parameters: list[Any]) -> Facts:
    """DDP, or one process without any wrapper: the parameter is its own master weight."""
    states = torch_optimizer_states(trainer.optimizer)
    trained = [p for p in parameters if p.requires_grad]
    engines = {torch.nn.parallel.DistributedDataParallel: "ddp", torch.nn.DataParallel: "data_parallel"}
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision)
    return {
        "engine": next((engine for kind, engine in engines.items() if isinstance(wrapped, kind)), "none"),
        "sharding": "replicate",
        "parameter_bytes": local_bytes(parameters),
        "optimizer_bytes": local_bytes(states),
        "compute_dtype": precision or dtype_names(trained),
        "master_dtype": dtype_names(trained),
        "optimizer_dtype": dtype_names(states),
        "offload_optimizer": None,
        "offload_param": None,
        "gradient_clipping": trainer.args.max_grad_norm,
    }


def read_fsdp2(trainer: Any, wrapped: Any, parameters: list[Any]) -> Facts:
    """FSDP2: the sharded parameter is the master weight, and the policy says what it is computed in."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    modules = [m for m in wrapped.modules() if isinstance(m, FSDPModule)]
    groups = [group for m in modules for group in fsdp_groups(m)]
    states = torch_optimizer_states(trainer.optimizer)
    trained = [p for p in parameters if p.requires_grad]
    offload = "cpu" if all(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups) else None
    policies = {g.mp_policy for g in groups}
    compute = {str(p.param_dtype or trained[0].dtype).removeprefix("torch.") for p in policies}
    return {
        "engine": "fsdp2",
        "sharding": fsdp2_sharding(groups, parameters),
        "dp_shard_size": fsdp2_shard_size(parameters),
        "parameter_bytes": local_bytes(parameters),
        "optimizer_bytes": local_bytes(states),
        "compute_dtype": "+".join(sorted(compute)),
        "master_dtype": dtype_names(trained),
        "optimizer_dtype": dtype_names(states),
        "offload_optimizer": offload,
        "offload_param": offload,
        "gradient_clipping": trainer.args.max_grad_norm,
    }


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups that a module gathers and reshards together."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    single = getattr(state, "_fsdp_param_group", None)
    return list(groups) if groups else ([single] if single is not None else [])


def fsdp2_sharding(groups: list[Any], parameters: list[Any]) -> str:
    """From the parameters' placements and whether any group reshards after forward.

    Embedding, final norm and root are kept gathered by design, so one group that reshards is what tells.
    """
    placements = {type(placement).__name__ for p in parameters for placement in getattr(p, "placements", ())}
    if not placements & {"Shard", "_StridedShard"}:
        return "replicate"
    if "Replicate" in placements:
        return "hybrid_shard"
    return "full_shard" if any(g.post_forward_mesh_info is not None for g in groups) else "shard_grad_op"


def fsdp2_shard_size(parameters: list[Any]) -> int | None:
    """Ranks that share one copy of the model, from the mesh of the live parameters."""
    for parameter in parameters:
        placements = getattr(parameter, "placements", ())
        if any(placement.is_shard() for placement in placements):
            sizes = zip(placements, parameter.device_mesh.shape, strict=True)
            return math.prod(int(size) for placement, size in sizes if placement.is_shard())
    return None


def read_deepspeed(_: Any, wrapped: Any, parameters: list[Any]) -> Facts:
    """A DeepSpeed engine of any stage."""
    zero = wrapped.optimizer
    stage = wrapped.zero_optimization_stage()
    masters = list(zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)
    states = torch_optimizer_states(zero.optimizer)
    held = zero3_parameters(parameters) if stage == 3 else parameters
    swapped = {
        "parameter_disk_bytes": parameter_disk_bytes(parameters) if stage == 3 else 0,
        "optimizer_disk_bytes": optimizer_disk_bytes(zero),
    }
    trained = [p for p in parameters if p.requires_grad]
    return {
        "engine": "deepspeed",
        "sharding": deepspeed_sharding(zero, stage),
        **swapped,
        "parameter_bytes": local_bytes(held) + swapped["parameter_disk_bytes"],
        "optimizer_bytes": local_bytes([*masters, *states]) + swapped["optimizer_disk_bytes"],
        "compute_dtype": dtype_names(trained),
        "master_dtype": dtype_names(filled(masters, swap_buffers(zero))),
        "optimizer_dtype": dtype_names(filled(states, swap_buffers(zero))),
        "offload_optimizer": offloaded_optimizer(zero, [*masters, *states], stage),
        "offload_param": offloaded_parameters(zero, held, parameters, stage),
        "gradient_clipping": wrapped.gradient_clipping(),
        "optimizer_class": type(zero.optimizer).__name__,
    }


def deepspeed_sharding(zero: Any, stage: int) -> str:
    """From the stage, and at stage 3 whether parameters have a second partition within a machine (ZeRO++)."""
    if stage == 3 and zero.zero_hpz_partition_size > 1:
        return "hybrid_shard"
    return {1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}.get(stage, "replicate")


def filled(tensors: list[torch.Tensor], buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that hold something; for those that are on a disk, what they are read into."""
    return [*(tensor for tensor in tensors if tensor.numel()), *buffers] if buffers else tensors


def zero3_parameters(parameters: list[Any]) -> list[torch.Tensor]:
    """What a rank holds between steps under ZeRO-3: its shards, and the small parameters that stay gathered."""
    shards = [p.ds_tensor for p in parameters if not is_on_disk(p)]
    gathered = [p.data for p in parameters if p.ds_status.name == "AVAILABLE"]
    return [*shards, *gathered]


def offloaded_optimizer(zero: Any, tensors: list[torch.Tensor], stage: int) -> str | None:
    """Where masters and optimizer states are, if not on the device that computes."""
    if stage == 3 and getattr(zero, "swap_optimizer", False) and swaps_every_large_group(zero):
        return "nvme"
    meant = zero.offload_optimizer if stage == 3 else zero.cpu_offload
    return "cpu" if meant and device_types(tensors) == {"cpu"} else None


def offloaded_parameters(zero: Any, held: list[torch.Tensor], parameters: list[Any], stage: int) -> str | None:
    """Where parameter shards are between steps, if not on the device that computes."""
    if stage != 3 or not getattr(zero, "offload_param", False):
        return None
    if getattr(zero, "params_in_nvme_and_cpu", False) and swaps_every_large_shard(parameters):
        return "nvme"
    return "cpu" if "cpu" in device_types(held) else None
