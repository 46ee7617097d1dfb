"""Parameters, gradients and optimizer states that rank 0 holds between steps: to the byte, each engine's padding in it.

    >>> model_states(load_preset("zero2"), weights, world_size=8).optimizer_bytes
    12045398016

The bytes a parameter are the contract's (`toolkit/presets/contract.py`), the padding is `toolkit/presets/sizes.py`'s.
Rank 0 has the largest share under every engine. `tests/test_engine_bytes.py` holds all of it against real engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.models.shape import Tensor
from toolkit.plan.engine import Engine
from toolkit.plan.weights import Weights, total
from toolkit.presets.contract import OFFLOADED_GRADIENT_BYTES
from toolkit.presets.sizes import flat_share, partition_share, rows_share

MASTER_AND_STATES = 12  # fp32 master, momentum, variance: DeepSpeed's
STATES = 8  # momentum and variance beside a parameter that is its own master
FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """What the attestation counts, wherever it lies."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int = 0
    """Of `parameter_bytes`, small parameters that ZeRO-3 keeps whole on the GPU beside their shards."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def model_states(engine: Engine, weights: Weights) -> ModelStates:
    """Of rank 0."""
    if engine.kind == "fsdp2":
        return _fsdp2(engine, weights)
    if engine.kind != "deepspeed":
        return ModelStates(
            parameter_bytes=FP32 * _plain(weights) + weights.quantized_bytes,
            gradient_bytes=FP32 * weights.num_trained,
            optimizer_bytes=STATES * weights.num_trained,
        )
    return _zero3(engine, weights) if engine.shards_parameters else _zero12(engine, weights)


def _plain(weights: Weights) -> int:
    """Elements that are not in 4 bits."""
    return weights.num_trained + weights.num_frozen - weights.num_quantized


def _fsdp2(engine: Engine, weights: Weights) -> ModelStates:
    def share(tensor: Tensor) -> int:
        return rows_share(tensor.shape, ranks=engine.shard_ranks, rank=engine.shard_rank)

    trained, frozen = total(weights.trained, share), total(weights.frozen, share)
    return ModelStates(
        parameter_bytes=FP32 * (trained + frozen), gradient_bytes=FP32 * trained, optimizer_bytes=STATES * trained
    )


def _zero12(engine: Engine, weights: Weights) -> ModelStates:
    held = sum(flat_share(group, ranks=engine.world_size) for group in weights.groups if group)
    gradient = engine.element_bytes * weights.num_trained
    if engine.sharding == "shard_grad_op":
        offloaded = OFFLOADED_GRADIENT_BYTES["shard_grad_op"] if engine.offload_optimizer else engine.element_bytes
        gradient = offloaded * held
    if engine.sharding == "replicate":
        held = weights.num_trained
    return ModelStates(
        parameter_bytes=engine.element_bytes * _plain(weights) + weights.quantized_bytes,
        gradient_bytes=gradient,
        optimizer_bytes=MASTER_AND_STATES * held,
    )


def _zero3(engine: Engine, weights: Weights) -> ModelStates:
    def share(tensor: Tensor) -> int:
        return partition_share(tensor.num_elements, ranks=engine.world_size)

    def gathered(tensor: Tensor) -> int:
        alone = engine.world_size == 1  # the shard is the whole then
        return 0 if alone or tensor.num_elements > engine.persistence_threshold else tensor.num_elements

    trained, frozen = total(weights.trained, share), total(weights.frozen, share)
    whole = engine.element_bytes * (total(weights.trained, gathered) + total(weights.frozen, gathered))
    return ModelStates(
        parameter_bytes=engine.element_bytes * (trained + frozen) + whole,
        gradient_bytes=engine.element_bytes * trained,
        optimizer_bytes=MASTER_AND_STATES * trained,
        gathered_bytes=whole,
    )
