"""Read a DeepSpeed engine: sharding, bytes, dtypes, offload, NVMe swap files, and gradients of the first step."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.engines.tensors import device_types, dtype_name, dtype_names, local_bytes, optimizer_state_tensors
from toolkit.engines.torch_live import TorchLive
from toolkit.record.reading import RankReading

MIN_SWAPPED_BYTES = 2**20  # MIN_AIO_BYTES in deepspeed/runtime/swap_tensor/utils.py


def remove_shared_buffer(rank: int) -> None:
    """Remove the file of this rank's all-reduce on a CPU; every rank must have come to its first step.

    deepspeed 0.19.8 leaves 64 MiB per rank of each run in /dev/shm. All ranks have it mapped by then.
    """
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"  # csrc/cpu/comm/shm.cpp
    Path("/dev/shm", name).unlink(missing_ok=True)


def is_zero3(parameter: Any) -> bool:
    """Return True for a parameter of ZeRO-3, which is empty where it is not gathered."""
    return hasattr(parameter, "ds_id")


def gathered(parameter: Any) -> AbstractContextManager[None]:
    """Return a context in which a parameter of ZeRO-3 is whole; all its ranks enter it."""
    import deepspeed

    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters([parameter])
    return context


def compute_device() -> str:
    """Return the name of the device that DeepSpeed computes on."""
    import deepspeed

    return str(deepspeed.accelerator.get_accelerator().current_device_name())


class ZeroLive(TorchLive):
    reduces_itself = True
    holds_copies = True
    is_divided = True

    def optimizer(self, trainer: Any) -> Any:
        return self.wrapped.optimizer

    def read(self, trainer: Any, parameters: list[Any]) -> RankReading:
        """Return what is in effect after the first step, under any ZeRO stage."""
        zero, stage = self.wrapped.optimizer, self.wrapped.zero_optimization_stage()
        sharding = {1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}.get(stage, "replicate")
        masters, states = self.flat_masters(), optimizer_state_tensors(zero.optimizer)
        held, parameter_disk_bytes, offload_param = parameters, 0, None
        offloads = zero.offload_optimizer if stage == 3 else zero.cpu_offload
        offload_optimizer = "cpu" if offloads and device_types([*masters, *states]) == {"cpu"} else None
        if stage == 3:
            held, parameter_disk_bytes = zero3_parameters(parameters), swapped_parameter_bytes(parameters)
            if zero.zero_hpz_partition_size > 1:  # ZeRO++: a second partition within each node
                sharding = "hybrid_shard"
            if getattr(zero, "swap_optimizer", False) and swaps_every_large_group(zero):
                offload_optimizer = "nvme"
            if getattr(zero, "offload_param", False):
                swaps = getattr(zero, "params_in_nvme_and_cpu", False) and swaps_every_large_shard(parameters)
                offload_param = "nvme" if swaps else "cpu" if "cpu" in device_types(held) else None
        optimizer_disk_bytes = swapped_optimizer_bytes(zero)
        reading = RankReading.of(
            engine="deepspeed",
            sharding=sharding,
            parameter_disk_bytes=parameter_disk_bytes,
            optimizer_disk_bytes=optimizer_disk_bytes,
            parameter_bytes=local_bytes(held) + parameter_disk_bytes,
            optimizer_bytes=local_bytes([*masters, *states]) + optimizer_disk_bytes,
            compute_dtype=dtype_names(p for p in parameters if p.requires_grad),
            master_dtype=dtype_names(_in_memory(masters, zero)),
            optimizer_dtype=dtype_names(_in_memory(states, zero)),
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            gradient_clipping=self.wrapped.gradient_clipping(),
        )
        if not hasattr(zero.optimizer, "adam_w_mode"):
            return reading
        return reading | RankReading.of(adam_w_mode=zero.optimizer.adam_w_mode)

    def gradients(self) -> list[Any]:
        """Return the gradients that this rank holds: complete under ZeRO-1, its partition under ZeRO-2 and 3.

        Reduction buckets are not counted.
        """
        zero, stage = self.wrapped.optimizer, self.wrapped.zero_optimization_stage()
        if stage < 2:
            return [p.grad for p in self.wrapped.module.parameters() if p.grad is not None]
        offloaded = [p.grad for p in self.flat_masters() if p.grad is not None]
        if stage == 3:
            flat = zero.grad_partitions_flat_buffer
            return offloaded if flat is None else [flat]
        return offloaded or [g for group in zero.averaged_gradients.values() for g in (group or [])]

    def reduce_dtype(self, held: list[Any]) -> str | None:
        return dtype_name(self.wrapped.communication_data_type)

    def accumulated(self) -> tuple[list[Any], list[Any]]:
        """Return ZeRO-2's and ZeRO-3's partitions, and what parameters hold beside them.

        ZeRO-2 keeps every tensor that its partition has a part of (deepspeed 0.19.8, `get_all_grad_tensors`), and
        offloaded only that part, in host memory.
        """
        zero, stage = self.wrapped.optimizer, self.wrapped.zero_optimization_stage()
        shards = self.gradients() if stage == 3 else []
        if stage == 2 and zero.cpu_offload:
            shards = list(zero.accumulated_grads_in_cpu.values())
        elif stage == 2:
            shards = [gradient for group in zero.all_grad_tensors.values() for gradient in group or []]
        return shards, super().gradients()

    def call_at_gradient_peak(self, callback: Callable[[], None]) -> None:
        """Call it when the engine reduces or steps.

        ZeRO-1 holds complete gradients through backward and drops the other ranks' part when it reduces them; later
        stages hold their partition until the optimizer step frees it.
        """
        target = self.wrapped.optimizer
        method = "reduce_gradients" if self.wrapped.zero_optimization_stage() < 2 else "step"
        original = getattr(target, method)

        def first(*args: Any, **kwargs: Any) -> Any:
            delattr(target, method)  # uncovers the class's own method
            callback()
            return original(*args, **kwargs)

        setattr(target, method, first)

    def flat_masters(self) -> list[torch.Tensor]:
        zero, stage = self.wrapped.optimizer, self.wrapped.zero_optimization_stage()
        return list(zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)

    def clip_synthetic_gradient(self, norm: float) -> float | None:
        """Return the norm after clipping; None under ZeRO-3, which clips only gradients that are freed in the step."""
        zero = self.wrapped.optimizer
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            return None
        gradient = torch.tensor([norm], device=zero.device)
        zero.unscale_and_clip_grads([gradient], gradient.clone())
        return float(gradient)

    def sequence_ranks(self, accelerator: Any) -> tuple[dict[str, int], dist.ProcessGroup]:
        from deepspeed.utils import groups

        group = groups._get_sequence_parallel_group()
        size = dist.get_world_size(group)
        return {"sp": size, "dp_shard": dist.get_world_size() // size}, group

    def leave_out_tied_weights(self) -> None:
        """Leave frozen weights out of adapter checkpoints under every one of their names.

        deepspeed 0.19.8 leaves out the first name of a tied weight only (ZeRO-1 and 2): the head would be saved.
        """
        engine = self.wrapped
        frozen = [name for name, p in engine.module.named_parameters(remove_duplicate=False) if not p.requires_grad]

        def module_state_dict(*args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
            how = kwargs | {"exclude_frozen_parameters": exclude_frozen_parameters}
            state = type(engine).module_state_dict(engine, *args, **how)
            for name in frozen if exclude_frozen_parameters else ():
                state.pop(name, None)
            return state

        engine.module_state_dict = module_state_dict


class UniversalCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Makes DeepSpeed load its universal layout once: that of a checkpoint which `toolkit checkpoint convert` made."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {"load_universal": True}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Give every parameter a step count of its own, of the type and on the device that the optimizer makes.

        DeepSpeed 0.19.8 gives one tensor to all groups of ZeRO-3: torch's Adam would count each step once per group.
        """
        engine = self.trainer.model_wrapped
        engine._config.load_universal_checkpoint = False  # later loads are of DeepSpeed's own layout
        optimizer, groups = engine.optimizer.optimizer, engine.optimizer.optimizer.param_groups
        fused = {id(p): bool(g.get("fused") or g.get("capturable")) for g in groups for p in g["params"]}
        for parameter, state in optimizer.state.items():
            if "step" in state:
                on_device = fused.get(id(parameter), any(group.get("fused") for group in groups))
                device, step = parameter.device if on_device else torch.device("cpu"), float(state["step"])
                in_integers = type(optimizer).__name__ == "DeepSpeedCPUAdam"
                state["step"] = int(step) if in_integers else torch.tensor(step, dtype=torch.float32, device=device)


def expect_no_other_ranks() -> None:
    """Let ZeRO-3 start where no rank sends anything: it compares the order of parameters with rank 0's."""
    from deepspeed.runtime.zero import utils

    utils.assert_lst_len_same_as_other_ranks = lambda _: None
    utils.get_lst_from_rank0 = lambda own: own


def zero3_parameters(parameters: list[Any]) -> list[torch.Tensor]:
    """Return what a ZeRO-3 rank holds in memory between steps: its shards, and small parameters that stay gathered."""
    shards = [p.ds_tensor for p in parameters if not is_on_disk(p)]
    gathered = [p.data for p in parameters if p.ds_status.name == "AVAILABLE"]
    return [*shards, *gathered]


# -- NVMe swap files: counted from DeepSpeed's own records, and only as far as a file holds the bytes.
# While a state is swapped out its live tensor is empty.


def is_on_disk(parameter: Any) -> bool:
    """Return True if this rank's shard of a ZeRO-3 parameter is now on disk and not in memory."""
    shard = parameter.ds_tensor
    return getattr(shard, "final_location", None) == "nvme" and shard.status.name == "NOT_AVAILABLE"


def swapped_parameter_bytes(parameters: list[Any]) -> int:
    """Return the bytes of this rank's parameter shards that are on disk only."""
    return sum(
        _bytes_in_file(
            parameter.nvme_swapper.id_to_path.get(parameter.ds_id),
            parameter.ds_tensor.ds_numel * parameter.element_size(),
        )
        for parameter in parameters
        if is_on_disk(parameter)
    )


def swapped_optimizer_bytes(zero: Any) -> int:
    """Return the bytes of this rank's fp32 master weights and optimizer states that are on disk only."""
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return 0
    return sum(
        _bytes_in_file(context.swap_path, info.numel() * swapper.swap_element_size)
        for info in swapper.swap_params_info.values()
        for context in info.tensors
        if not context.compute_tensor.numel()
    )


def swaps_every_large_group(zero: Any) -> bool:
    """Return True if every sub-group that DeepSpeed may swap (1 MiB and more) is out of memory."""
    masters = zero.fp32_partitioned_groups_flat
    return not any(master.numel() for index, master in enumerate(masters) if zero._swappable_optimizer_subgroup(index))


def swaps_every_large_shard(parameters: list[Any]) -> bool:
    """Return True if every parameter shard that DeepSpeed may swap is out of memory."""
    return all(
        is_on_disk(p)
        or p.ds_tensor.ds_numel * p.element_size()
        < getattr(getattr(p, "nvme_swapper", None), "min_aio_bytes", MIN_SWAPPED_BYTES)
        for p in parameters
    )


def _bytes_in_file(path: str | None, expected: int) -> int:
    """Swap files are padded, so a longer file holds no more than expected."""
    file = Path(path or "")
    return min(expected, file.stat().st_size) if path and file.is_file() else 0


def _in_memory(tensors: list[torch.Tensor], zero: Any) -> list[torch.Tensor]:
    """Tensors whose dtype can be read; swapped ones are represented by the buffers that they are read into."""
    swapper = getattr(zero, "optimizer_swapper", None)
    buffers = [] if swapper is None else list(swapper.swap_buffer_manager.all_buffers)
    return [*(tensor for tensor in tensors if tensor.numel()), *buffers] if buffers else tensors
