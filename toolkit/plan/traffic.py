"""What travels between GPUs, as values: one kind of collective in a step, and what decides them all.

>>> Collective(name="all_gather", purpose="parameters", payload_bytes=800, group_size=4).sent_bytes
600
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from toolkit.models.lora import lora_layers
from toolkit.models.shape import Layer, ModelShape
from toolkit.plan.engine import Engine, engine_of
from toolkit.plan.job import Job
from toolkit.presets.preset import Preset


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All collectives of one kind and purpose in an optimizer step, as one rank sees them."""

    name: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `reduce` or `all_to_all`."""
    purpose: str
    """`gradients`, `parameters in the forward`, ..."""
    payload_bytes: int
    """The whole tensors: what a gather ends with, what a reduction starts with; padding included."""
    group_size: int
    group: str = "all"
    """`all` ranks, those of one `replica`, or one rank of each of the `replicas`."""
    calls: int = 1

    @property
    def sent_bytes(self) -> int:
        """What a ring makes each rank send: (N-1)/N of the payload, twice for an all-reduce."""
        ways = 2 if self.name == "all_reduce" else 1
        return self.payload_bytes * ways * (self.group_size - 1) // self.group_size


@dataclass(frozen=True, kw_only=True)
class TrafficJob:
    """What decides the traffic of a step."""

    preset: Preset
    shape: ModelShape
    world_size: int
    gradient_accumulation_steps: int = 1
    adapters: tuple[Layer, ...] = ()
    """LoRA's tensors, by layer: then only they are trained. Empty for a full fine-tune."""
    activation_checkpointing: bool = False
    mixed_precision: str | None = None
    """None: the preset's own; `no` for a run on a CPU."""

    @property
    def element_bytes(self) -> int:
        """Of a parameter or gradient in the compute dtype."""
        return self.engine.element_bytes

    @property
    def engine(self) -> Engine:
        """The preset's engine at this world size, buckets and thresholds in elements."""
        return engine_of(
            self.preset,
            world_size=self.world_size,
            hidden_size=self.shape.hidden_size,
            mixed_precision=self.mixed_precision,
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Each decoder layer's tensors, LoRA's among them."""
        if not self.adapters:
            return self.shape.layers
        return tuple(own + added for own, added in zip(self.shape.layers, self.adapters, strict=True))

    @property
    def trained(self) -> Iterator[Layer]:
        """Groups of tensors whose gradients travel."""
        yield from self.adapters or (*self.shape.layers, self.shape.outer)


def traffic_of(shape: ModelShape, preset: Preset, job: Job, *, world_size: int) -> TrafficJob:
    """A planned job as its traffic sees it."""
    return TrafficJob(
        preset=preset,
        shape=shape,
        world_size=world_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        adapters=() if job.lora_r is None else _adapters(shape, job.lora_r),
        activation_checkpointing=job.activation_checkpointing,
    )


_adapters = cache(lora_layers)


def communication_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes that each GPU sends in a step, over rings."""
    return sum(collective.sent_bytes for collective in collectives)


def elements_of(layers: Iterable[Layer]) -> int:
    """Elements of all tensors of some layers."""
    return sum(tensor.num_elements for layer in layers for tensor in layer)
