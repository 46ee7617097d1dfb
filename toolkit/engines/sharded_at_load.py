"""Models that transformers shards while it loads them (`DistributedConfig`): tensor and expert parallelism, with FSDP2.

transformers 5.23, accelerate 1.15 and peft 0.21 are wrong in five places, each put right by a function here.
docs/concepts/parallelism.md shows the figures without them.
"""

import functools
from typing import Any

from toolkit.parallel.layout import ParallelLayout


def distributed_config(layout: ParallelLayout, *, half: bool) -> Any:
    """Return transformers' `DistributedConfig` of a layout. With `half`, FSDP2 gathers bf16 and reduces fp32."""
    from transformers.distributed import DistributedConfig

    return DistributedConfig(
        tp_size=layout.tp,
        fsdp_size=layout.dp_shard,
        dp_replicate_size=layout.dp_replicate,
        ep_size=layout.ep,
        fsdp_mixed_precision=half,
    )


def apply_fixes(*, on_cpu: bool) -> None:
    """Put the libraries right in this process, before the model is loaded."""
    _load_empty_shards()
    _reduce_replicated_gradients_once()
    _size_adapters_globally()
    _average_split_adapters()
    if on_cpu:
        _allow_cpu_ranks()


@functools.cache
def _load_empty_shards() -> None:
    """Load nothing where a weight that is split twice has fewer rows than ranks; transformers expects one at least."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    original = DtensorShardOperation._slice_and_cat

    def slice_and_cat(self: Any, source: Any, intervals: Any, *args: Any) -> Any:
        return original(self, source, [found or [(0, 0)] for found in intervals], *args)

    DtensorShardOperation._slice_and_cat = slice_and_cat


@functools.cache
def _reduce_replicated_gradients_once() -> None:
    """All-reduce each micro-batch's own gradient of a parameter that tensor parallelism replicates.

    transformers' `replicated_with_grad_allreduce` (the query and key norms of Qwen3) reduces `param.grad` after every
    micro-batch: with gradient accumulation, earlier micro-batches are summed over the ranks again and again.
    """
    import torch
    import torch.distributed as dist
    from transformers.distributed import tensor_parallel

    def install_forward(_self: Any, module: Any, mesh: Any) -> Any:
        original = module.forward
        hooked: dict[str, Any] = {}

        def reduced(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=mesh.get_group())
            return gradient

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in module.named_parameters(recurse=False) if torch.is_grad_enabled() else ():
                if parameter.requires_grad and hooked.get(name) is not parameter:  # FSDP2 makes new ones
                    parameter.register_hook(reduced)
                    hooked[name] = parameter
            return original(*args, **kwargs)

        module.forward = forward
        return module

    tensor_parallel.ReplicatedWithGradAllReduce.install_forward = install_forward


@functools.cache
def _size_adapters_globally() -> None:
    """Give adapters the sizes of the whole layer: peft reads the local shard, transformers then shards them again."""
    import torch
    from peft.tuners import tuners_utils
    from peft.tuners.lora import layer

    original = tuners_utils._get_in_out_features

    def sizes(module: Any) -> Any:
        return (module.in_features, module.out_features) if isinstance(module, torch.nn.Linear) else original(module)

    tuners_utils._get_in_out_features = layer._get_in_out_features = sizes


@functools.cache
def _average_split_adapters() -> None:
    """Average the adapters that tensor parallelism splits over data parallelism too.

    The Trainer averages plain adapters over all ranks and leaves DTensors alone, as if FSDP2 reduced them; but adapters
    are attached after `fully_shard`, so each data-parallel rank would train a copy of its own.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import Trainer
    from transformers.trainer_utils import unwrap_peft_model

    original = Trainer._sync_replicated_trainable_parameters

    @functools.wraps(original)
    def sync(self: Any, model: Any) -> Any:
        result, plain = original(self, model), unwrap_peft_model(self.model)
        config = getattr(plain.config, "distributed_config", None)
        if config is None or config.dp_size == 1:
            return result
        mesh = plain._mesh_manager.get_mesh(("dp_replicate", "fsdp"))
        groups = [mesh.get_group(name) for name in mesh.mesh_dim_names if mesh[name].size() > 1]

        def average(parameter: Any) -> None:
            for group in groups if self.accelerator.sync_gradients else ():
                local = parameter.grad.to_local()
                dist.all_reduce(local, group=group)
                local.div_(dist.get_world_size(group))

        for parameter in model.parameters():
            over = set((getattr(parameter, "device_mesh", None) and parameter.device_mesh.mesh_dim_names) or ())
            split = isinstance(parameter.data, DTensor) and not over & {"fsdp", "dp_replicate", "efsdp"}
            if not parameter.requires_grad or not split or hasattr(parameter, "_averaged"):
                continue
            with torch.no_grad():
                for group in groups:
                    dist.broadcast(parameter.data.to_local(), src=dist.get_global_rank(group, 0), group=group)
            parameter.register_post_accumulate_grad_hook(average)
            parameter._averaged = True
        return result

    Trainer._sync_replicated_trainable_parameters = sync


@functools.cache
def _allow_cpu_ranks() -> None:
    """accelerate's `ParallelismConfig` refuses CPU ranks, only because `multi_device` does not list them."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    original = Accelerator.multi_device.fget

    def multi_device(self: Any) -> bool:
        on_cpu = self.use_distributed and self.distributed_type == DistributedType.MULTI_CPU
        return bool(original(self) or on_cpu)

    Accelerator.multi_device = property(multi_device)
