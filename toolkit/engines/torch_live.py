"""Read a model that DDP wraps, or nothing: what it holds and what ranks send, from its live objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.engines import tensors
from toolkit.record.reading import RankReading

_WRAPPERS = {torch.nn.parallel.DistributedDataParallel: "ddp", torch.nn.DataParallel: "data_parallel"}


class TorchLive:
    """What wraps the model of a run. Subclasses are of engines that divide it."""

    reduces_itself = False  # true for DeepSpeed: it has an optimizer, flat gradients and a norm of its own

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    @property
    def holds_copies(self) -> bool:
        """True if it is known which ranks hold the same weights."""
        return isinstance(self.wrapped, torch.nn.parallel.DistributedDataParallel)

    @property
    def is_divided(self) -> bool:
        """True if ranks gather weights in a forward, so that all must take part in it."""
        return False

    def optimizer(self, trainer: Any) -> Any:
        """Return the optimizer whose step updates the weights."""
        return trainer.optimizer

    def read(self, trainer: Any, parameters: list[Any]) -> RankReading:
        """Return what is in effect after the first step: the parameter is its own fp32 master weight."""
        states = tensors.optimizer_state_tensors(trainer.optimizer)
        trained = [p for p in parameters if p.requires_grad]
        precision = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision)
        return RankReading.of(
            engine=next((engine for kind, engine in _WRAPPERS.items() if isinstance(self.wrapped, kind)), "none"),
            sharding="replicate",
            parameter_bytes=tensors.local_bytes(parameters),
            optimizer_bytes=tensors.local_bytes(states),
            compute_dtype=precision or tensors.dtype_names(trained),
            master_dtype=tensors.dtype_names(trained),
            optimizer_dtype=tensors.dtype_names(states),
            offload_optimizer=None,
            offload_param=None,
            gradient_clipping=trainer.args.max_grad_norm,
        )

    def gradients(self) -> list[Any]:
        """Return the gradients that this rank holds before the optimizer step."""
        return [p.grad for p in self.wrapped.parameters() if p.grad is not None]

    def reduce_dtype(self, held: list[Any]) -> str | None:
        """Return the dtype that ranks exchange gradients in."""
        return tensors.dtype_names(held)

    def accumulated(self) -> tuple[list[Any], list[Any]]:
        """Return the gradients that wait for the next accumulation step, sharded and whole ones."""
        return [], self.gradients()

    def call_at_gradient_peak(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the first step's gradients take the most memory; here the Trainer's hook does."""

    def flat_masters(self) -> list[torch.Tensor] | None:
        """Return the flat partitions that the optimizer updates; None where it updates parameters or their shards."""
        return None

    def clip_synthetic_gradient(self, norm: float) -> float | None:
        """Return the norm after clipping of a gradient of this norm, where the engine clips itself; else None."""
        raise NotImplementedError

    def sequence_ranks(self, accelerator: Any) -> tuple[dict[str, int], dist.ProcessGroup]:
        """Return the sizes of the mesh on which ranks divide each sequence, and the group that shares one."""
        mesh = accelerator.torch_device_mesh
        return mesh_sizes(mesh), mesh["cp"].get_group()

    def leave_out_tied_weights(self) -> None:
        """Keep a save from writing a tied weight twice."""


# transformers calls the ranks that share a copy of the model `fsdp`, accelerate `dp_shard`, as here.
DIMENSION_OF_MESH = {"fsdp": "dp_shard", "efsdp": "expert_shard"}


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Return the size of each dimension of a mesh, by the toolkit's names."""
    names = [DIMENSION_OF_MESH.get(name, name) for name in mesh.mesh_dim_names]
    return dict(zip(names, map(int, mesh.shape), strict=True))
