"""GPU memory of one rank by part and by phase: load, forward, backward, optimizer step. The peak is the worst of them.

    >>> plan = plan_memory(shape, load_preset("zero2"), world_size=8, job=Job(max_seq_length=2048))
    >>> plan.peak.phase, plan.planned_peak_bytes

Every part stands in a module of its own with its formula: states, activations, buffers, overhead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from toolkit.models.shape import ModelShape
from toolkit.plan.activations import Activations
from toolkit.plan.buffers import Buffers, buffers
from toolkit.plan.engine import Engine, engine_of
from toolkit.plan.host import HostMemory, host_memory
from toolkit.plan.job import Job
from toolkit.plan.logits import logits_bytes
from toolkit.plan.overhead import overhead_bytes
from toolkit.plan.states import ModelStates, model_states
from toolkit.plan.weights import Weights, job_weights
from toolkit.presets.preset import Preset


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What is allocated on the GPU at the worst moment of a phase."""

    phase: str
    """`load`, `forward`, `backward` or `step`."""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    logits_bytes: int = 0
    buffer_bytes: int = 0
    """Buckets, gathered layers, copies of weights and gradients."""

    @property
    def allocated_bytes(self) -> int:
        """All parts."""
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.activation_bytes + self.logits_bytes + self.buffer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """One rank of one preset at one world size."""

    states: ModelStates
    """Wherever they lie, as the attestation counts them."""
    phases: tuple[Phase, ...]
    overhead_bytes: int
    host: HostMemory
    knows_activations: bool = True
    """Whether they are this architecture's own, and not Llama's in their stead."""

    @property
    def peak(self) -> Phase:
        """The worst phase."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    @property
    def planned_peak_bytes(self) -> int:
        """What the GPU shows as used: allocated at the peak, and the overhead."""
        return self.peak.allocated_bytes + self.overhead_bytes


def plan_memory(
    shape: ModelShape, preset: Preset, *, world_size: int, job: Job, mixed_precision: str | None = None
) -> MemoryPlan:
    """The plan of rank 0."""
    engine = engine_of(preset, world_size=world_size, hidden_size=shape.hidden_size, mixed_precision=mixed_precision)
    return plan_engine(shape, engine, job)


def plan_engine(shape: ModelShape, engine: Engine, job: Job) -> MemoryPlan:
    """The same of an engine that no preset describes."""
    weights = job_weights(shape, job)
    states = model_states(engine, weights)
    moments = _Moments(shape, engine, job, weights, states)
    phases = (moments.load(), moments.forward(), moments.backward(), moments.step())
    allocated = max(phase.allocated_bytes for phase in phases)
    return MemoryPlan(
        states=states,
        phases=phases,
        overhead_bytes=overhead_bytes(engine, allocated_bytes=allocated),
        host=host_memory(engine, weights, states, job),
        knows_activations=shape.activations_from != "llama",
    )


@lru_cache(maxsize=64)
def _activations(shape: ModelShape, autocast: bool, lora_r: int | None, quantized: bool) -> Activations:
    """One for all micro-batches and world sizes: what it has summed up is kept in it."""
    return Activations(shape=shape, autocast=autocast, lora_r=lora_r, quantized=quantized)


@lru_cache(maxsize=1024)
def _layer_bytes(activations: Activations, seq_length: int, padded: bool) -> tuple[int, int, int]:
    """A token's in the largest layer, in all, and what the largest needs beside while it goes backward."""
    how: Any = {"seq_length": seq_length, "padded": padded}
    return (
        activations.layer_bytes_per_token(**how),
        activations.all_layers_bytes_per_token(**how),
        activations.backward_bytes_per_token(**how),
    )


class _Moments:
    """The moments in which memory may be fullest."""

    def __init__(self, shape: ModelShape, engine: Engine, job: Job, weights: Weights, states: ModelStates) -> None:
        self.job, self.engine, self.weights, self.states = job, engine, weights, states
        self.buffers: Buffers = buffers(engine, weights, states, job)
        activations = _activations(shape, engine.autocasts, job.lora_r, job.load_in_4bit)
        wider = 2 if engine.element_bytes == 4 else 1  # fp32 compute keeps at most twice the bytes
        self.tokens = job.tokens * wider
        length, masked = job.max_seq_length, job.has_mask
        one_layer, all_layers, working = _layer_bytes(activations, length, masked)
        self.one_layer = self.tokens * one_layer
        self.masks = 0
        self.kept = self.tokens * all_layers
        if job.activation_checkpointing:  # layers are handed the masks again
            micro_batch = job.per_device_train_batch_size
            self.masks = activations.mask_bytes(rows=micro_batch, seq_length=length, padded=masked)
            self.kept = self.tokens * activations.checkpoint_bytes_per_token * shape.num_layers + self.masks
        self.outer = self.tokens * activations.outer_bytes_per_token
        self.working = self.tokens * working
        unpacked = 2 * weights.largest_linear if job.load_in_4bit else 0
        self.layer_copies = activations.layer_fixed_bytes + unpacked
        self.head_copy = activations.head_copy_bytes
        self.kept_copies = unpacked if job.activation_checkpointing else activations.fixed_bytes + unpacked
        self.cached_copies = activations.fixed_bytes + unpacked if activations.caches_copies else self.kept_copies
        self.logits = logits_bytes(
            loss=job.loss,
            tokens=self.tokens,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            kept_bytes=activations.logit_bytes,
        )
        self.head = shape.vocab_size * shape.hidden_size
        # A tied embedding's gradient comes in two: the head's waits, the lookup's is made, and they are added up.
        tied = shape.tied_embeddings and not weights.frozen
        self.tied_gradients = 2 * wider * activations.stream_bytes * self.head if tied else 0

    def load(self) -> Phase:
        """Whole or sharded parameters arrive, and what the engine needs to put them in place."""
        return Phase(phase="load", parameter_bytes=self._parameters, buffer_bytes=self.buffers.load_bytes)

    def forward(self) -> Phase:
        """The last layer, or the end: everything is kept, and the logits are there in two dtypes."""
        last = self._phase(
            "forward",
            activations=self.kept,
            buffers=self.buffers.forward_layer_bytes,
            copies=self.kept_copies,
            gradients=self._gradients_before,
        )
        end = self._phase(
            "forward",
            activations=self.kept + self.outer,
            logits=self.logits[0],
            buffers=self.buffers.forward_bytes,
            copies=self.cached_copies + self.head_copy,
            gradients=self._gradients_before,
        )
        return max(last, end, key=lambda phase: phase.allocated_bytes)

    def backward(self) -> Phase:
        """The worst of four moments: the loss, the last layer (it comes first), the first layer, a tied embedding."""
        recomputes = self.job.activation_checkpointing
        again = self.one_layer if recomputes else 0
        loss = self._phase(
            "backward",
            activations=self.kept + self.outer,
            logits=self.logits[1],
            buffers=self.buffers.loss_bytes,
            copies=self.kept_copies + self.head_copy,
            gradients=self._gradients_before,
        )
        first = self._phase(
            "backward",
            activations=self.kept + again + self.working,
            buffers=self.buffers.backward_bytes,
            copies=self.layer_copies if recomputes else self.kept_copies,
            gradients=max(self._gradients_before, min(self._gradients, self._head_gradient)),
        )
        last = self._phase(
            "backward",
            activations=self.one_layer + self.working + self.masks,
            buffers=self.buffers.first_layer_bytes,
            copies=self.layer_copies,
            gradients=self._gradients_at_first_layer,
        )
        tied = self._phase("backward", buffers=self.buffers.end_bytes + self.tied_gradients, gradients=self._gradients)
        return max(loss, first, last, tied, key=lambda phase: phase.allocated_bytes)

    def step(self) -> Phase:
        """Gradients are reduced, activations gone. ZeRO-1 keeps only its partition of the gradients by now."""
        gradients = self._gradients
        if self.engine.sharding == "shard_optimizer":
            gradients //= self.engine.world_size
        return self._phase("step", buffers=self.buffers.step_bytes, gradients=gradients)

    def _phase(
        self, name: str, *, activations: int = 0, logits: int = 0, buffers: int = 0, copies: int = 0, gradients: int
    ) -> Phase:
        waiting = self.buffers.accumulated_bytes if name != "step" else 0
        return Phase(
            phase=name,
            parameter_bytes=self._parameters,
            gradient_bytes=gradients,
            optimizer_bytes=0 if self.engine.offload_optimizer else self.states.optimizer_bytes,
            activation_bytes=activations,
            logits_bytes=logits,
            buffer_bytes=self.buffers.lasting_bytes + buffers + copies + waiting,
        )

    @property
    def _parameters(self) -> int:
        """On the GPU between steps: of what is offloaded only what ZeRO-3 keeps whole."""
        return self.states.gathered_bytes if self.engine.offload_param else self.states.parameter_bytes

    @property
    def _gradients(self) -> int:
        """Reduced to where their optimizer is."""
        return 0 if self.engine.offload_optimizer else self.states.gradient_bytes

    @property
    def _gradients_before(self) -> int:
        """There in the forward already: those of earlier micro-steps, and ZeRO-3's partition, which is never freed.
        FSDP2's wait whole (`accumulated_bytes`), and are sharded in the last micro-step."""
        if self.engine.kind == "fsdp2":
            return 0
        lasting = self.engine.kind == "deepspeed" and self.engine.shards_parameters
        return self._gradients if lasting or self.job.gradient_accumulation_steps > 1 else 0

    @property
    def _gradients_at_first_layer(self) -> int:
        """Of all above it: its own come as its activations go, and an embedding's of its own comes last."""
        if self.engine.kind == "deepspeed" or not self.weights.num_trained:
            return self._gradients
        if self.weights.frozen:
            return self._gradients - self._gradients // self.weights.shape.num_layers
        later = self.weights.largest_layer + (0 if self.weights.shape.tied_embeddings else self.head)
        share = 1 - min(later, self.weights.num_trained) / self.weights.num_trained
        return max(self._gradients_before, int(self._gradients * share))

    @property
    def _head_gradient(self) -> int:
        """The first gradient that the backward makes."""
        if self.weights.frozen or not self.weights.num_trained:
            return 0
        return int(self._gradients * (self.head / self.weights.num_trained))
