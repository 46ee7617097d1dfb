"""Bytes of one rank by phase and part: a phase is a function of the rank, and yields the moments that can be its peak.

Sizes of a micro-batch, with their sources, are in `micro_batch`, and those of buffers in `toolkit.engines`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from toolkit.engines.engine import EngineSettings
from toolkit.engines.planned import ACTIVATION_BYTES, EngineBuffers, ModelStates
from toolkit.models.job_weights import FP32_BYTES, JobWeights
from toolkit.models.shape import ModelShape
from toolkit.plan.methods import reference_buffer_bytes, reference_bytes
from toolkit.plan.micro_batch import MicroBatch
from toolkit.plan.planned_job import LOG_PROBABILITY_BYTES, PlannedJob
from toolkit.plan.programs import TOOLKIT
from toolkit.plan.training_setup import StageLoad

PARTS = ("parameter", "gradient", "optimizer", "reference", "activation", "logits", "buffer", "generation")
STATES = PARTS[:4]
_STATE_BYTES, _ALL_BYTES = (attrgetter(*(f"{part}_bytes" for part in parts)) for parts in (STATES, PARTS))
PHASES = ("load", "precompute", "generate", "score", "forward", "backward", "step", "evaluate", "save")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """Bytes allocated on the GPU at the peak of one phase."""

    phase: str  # one of `PHASES`
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    reference_bytes: int = 0  # parameters of a second model, which is not trained
    activation_bytes: int = 0
    logits_bytes: int = 0
    buffer_bytes: int = 0  # buckets, gathered layers, copies of weights and gradients
    generation_bytes: int = 0  # vLLM on the same GPU, or the cached keys and values of transformers' own generation

    @property
    def state_bytes(self) -> int:
        """Model states on the GPU."""
        return sum(_STATE_BYTES(self))

    @property
    def allocated_bytes(self) -> int:
        """Sum of all parts."""
        return sum(_ALL_BYTES(self))

    def as_row(self) -> dict[str, int]:
        """Return the parts as `toolkit plan --json` prints them."""
        return {f"{part}_bytes": getattr(self, f"{part}_bytes") for part in (*PARTS, "allocated")}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a job, and its micro-batch. Sizes are bytes on the GPU."""

    shape: ModelShape
    engine: EngineSettings
    job: PlannedJob
    weights: JobWeights
    states: ModelStates
    buffers: EngineBuffers
    batch: MicroBatch
    evaluated: MicroBatch | None = None
    load: StageLoad | None = None  # of a stage of a pipeline

    @property
    def parameters(self) -> int:
        """Parameters between steps; offloaded ones leave only those that ZeRO-3 keeps whole."""
        return self.states.persistent_bytes if self.engine.offload_param else self.states.parameter_bytes

    @property
    def gradients(self) -> int:
        """Gradients after the reduction; they go where the optimizer is."""
        return 0 if self.engine.offload_optimizer else self.states.gradient_bytes

    @property
    def lasting_gradients(self) -> int:
        """Those that are never freed: ZeRO-3's partition, and views of DDP's buckets."""
        never_freed = self.is_zero3 or (self.engine.traits.uses_ddp and self.job.has_bucket_views)
        return self.gradients if never_freed else 0

    @property
    def waiting_gradients(self) -> int:
        """Those of earlier accumulation steps, and what is never freed."""
        return self.gradients if self.job.gradient_accumulation_steps > 1 else self.lasting_gradients

    @property
    def is_zero3(self) -> bool:
        """True if modules are gathered one by one, into flat partitions."""
        return self.engine.traits.has_flat_states and self.engine.shards_parameters

    @property
    def head(self) -> int:
        """Elements of the head."""
        return self.shape.vocab_size * self.shape.hidden_size // self.engine.tp

    @property
    def gathered_embedding(self) -> int:
        """An untied embedding, which is in FSDP1's root unit: that stays whole from its forward to the end of the
        backward (torch 2.13, `_runtime_utils.py:495`). FSDP2's is a unit of its own."""
        is_held = self.job.numerics.fsdp1 and self.engine.traits.gathers_layers and not self.shape.tied_embeddings
        return self.engine.element_bytes * self.weights.embedding if is_held else 0

    @property
    def gathered_outputs(self) -> int:
        """Logits of all replicas, which `DataParallel` gathers beside those of the first, after the losses."""
        element = FP32_BYTES if self.job.loss == "upcast" else self.engine.element_bytes
        each = element * self.job.tokens_per_forward * self.shape.vocab_size
        return (self.job.numerics.data_parallel + 1) * each if self.job.numerics.data_parallel else 0

    @property
    def kept_logits(self) -> int:
        """Logits that an evaluation keeps for its metrics, of all ranks on each; accelerate returns them in fp32, but
        not under DeepSpeed (1.15, `prepare_model`: `convert_outputs_to_fp32`)."""
        in_half = self.engine.traits.has_flat_states and self.job.loss != "upcast"
        element = self.engine.element_bytes if in_half else FP32_BYTES
        return element * self.job.eval_rows * self.job.tokens_per_row * self.shape.vocab_size

    @cached_property
    def prefetched(self) -> int:
        """A layer that FSDP2 holds beside the root while TRL's losses run."""
        gathers = self.engine.traits.gathers_layers and self.engine.sharding != "shard_grad_op"
        is_held = gathers and self.job.method_loss == "log_probs"
        return self.engine.element_bytes * self.weights.largest_layer(self.engine.ranks_sharing) if is_held else 0

    @cached_property
    def reference(self) -> int:
        """The model that scores, where there are no adapters to switch off."""
        is_loaded = self.job.method.scores_reference and self.weights.adapters is None
        is_held = is_loaded and self.engine.offload_param is None
        return reference_bytes(self.engine, self.shape, self.job.method) if is_held else 0

    @property
    def reference_buffers(self) -> int:
        """What its forward allocates."""
        gathered, is_held = self.buffers.forward_bytes, self.weights.adapters is None
        return reference_buffer_bytes(self.engine, self.shape, self.job.method, gathered) if is_held else 0


def peaks(rank: Rank) -> tuple[PhaseMemory, ...]:
    """Return the moment of each phase that allocates most."""
    phases = (load, precompute, generate, score, forward, backward, step, evaluate, save)
    moments = sorted((moment for phase in phases for moment in phase(rank)), key=lambda each: each.allocated_bytes)
    largest = {moment.phase: moment for moment in moments}
    return tuple(largest[phase] for phase in PHASES if phase in largest)


def load(rank: Rank) -> Iterator[PhaseMemory]:
    """Parameters, complete or sharded, and what the engine needs to put them in place."""
    whole, numerics = 0, rank.job.numerics
    others = numerics.program != TOOLKIT and rank.engine.traits.uses_fsdp_plugin
    if rank.job.load_in_4bit and others and not (numerics.fsdp1 and rank.engine.offload_param):
        # accelerate 1.15 keeps the loaded weights until all are sharded, on the GPU if they are bitsandbytes' 4 bits
        # (`fsdp2_prepare_model`: `original_sd`, line 872); the toolkit sends each rank its shards. FSDP1 frees those of
        # a layer as it shards them, and with offload has none there: 70B trains on two GPUs of 24 GB (peft's guide).
        whole = rank.weights.held_bytes(rank.engine.element_bytes) - rank.weights.constant_bytes  # nobody copies these
        whole -= rank.parameters - rank.weights.constant_bytes if numerics.fsdp1 else 0
    yield PhaseMemory(phase="load", parameter_bytes=rank.parameters, buffer_bytes=max(rank.buffers.load_bytes, whole))
    if rank.is_zero3 and not numerics.zero3_init:
        element = rank.engine.element_bytes
        yield PhaseMemory(phase="load", parameter_bytes=rank.weights.held_bytes(element, element))


def precompute(rank: Rank) -> Iterator[PhaseMemory]:
    """The reference's log-probabilities of the entire data set, before the optimizer exists.

    Under FSDP2 TRL loads a reference for it, since the policy is sharded only when training starts.
    """
    if rank.job.method.precompute_ref_log_probs:
        loads = rank.engine.traits.gathers_layers and rank.weights.adapters is None
        yield PhaseMemory(
            phase="precompute",
            parameter_bytes=0 if loads else rank.parameters,
            reference_bytes=rank.reference if loads else 0,
            activation_bytes=max(0, rank.batch.one_forward - rank.batch.logits[0]),
            logits_bytes=rank.batch.logits[0],
            buffer_bytes=rank.reference_buffers,
        )


def generate(rank: Rank) -> Iterator[PhaseMemory]:
    """Generation by vLLM, or by transformers, with the cached keys and values of all rows of a step."""
    job, shape, batch, length = rank.job, rank.shape, rank.batch, rank.job.tokens_per_row
    if job.method.vllm not in (None, "none"):
        # ZeRO-3's weights are gathered at once to merge adapters (TRL 1.16, `generation/vllm_generation.py:447`).
        merges = rank.is_zero3 and rank.weights.adapters is not None
        whole = rank.engine.element_bytes * shape.num_params if merges else 0
        yield _moment(rank, "generate", rank.waiting_gradients, buffers=whole, generation=job.method.vllm_bytes)
    elif job.method.generates:
        # Keys are in the dtype of the cosines, values in bf16; the cache of a layer is copied when it grows.
        rows = job.per_device_train_batch_size * job.gradient_accumulation_steps
        cache = (
            (batch.residual_bytes + 2) * shape.num_kv_heads * shape.head_dim * (shape.num_layers + 1) * rows * length
        )
        prompts = batch.forward_token_bytes * rows * (length - job.method.completion_tokens(length))
        gathered = rank.engine.element_bytes * shape.num_params if rank.is_zero3 else rank.buffers.forward_bytes
        yield _moment(rank, "generate", rank.waiting_gradients, prompts, buffers=gathered, generation=cache)


def score(rank: Rank) -> Iterator[PhaseMemory]:
    """The forward of a reference model, or of the policy without its adapters, which keeps nothing."""
    method, batch, shape, logits = rank.job.method, rank.batch, rank.shape, rank.batch.logits[0]
    if not method.scores_reference or method.precompute_ref_log_probs:
        return
    kept, of_policy, in_layer = 0, 0, rank.reference_buffers
    if not method.generates:  # beside the policy's graph, and the rows of its hidden states that are scored
        scored = method.scored_tokens(rank.job.rows, rank.job.tokens_per_row)
        kept = batch.saved + batch.outer + batch.residual_bytes * scored * shape.hidden_size
        of_policy = 0 if rank.job.method_loss == "log_probs" else logits
        in_layer += batch.copies.saved + rank.buffers.loss_bytes
    at_head = in_layer
    if rank.engine.traits.gathers_layers and rank.weights.adapters:
        in_layer += 2 * rank.prefetched
        at_head += rank.prefetched
        if not shape.tied_embeddings:  # gathered apart from its unit, through a second copy
            whole = rank.engine.element_bytes * rank.head
            at_head += whole + max(0, whole - logits)
    yield _moment(rank, "score", rank.waiting_gradients, kept + batch.one_forward, logits=of_policy, buffers=in_layer)
    yield _moment(rank, "score", rank.waiting_gradients, kept, logits=of_policy + logits, buffers=at_head)


def forward(rank: Rank) -> Iterator[PhaseMemory]:
    """In the last layer; at the end, when the logits exist in two dtypes; while ZeRO-3 prefetches the head."""
    batch, buffers, gradients = rank.batch, rank.buffers, rank.waiting_gradients
    in_layer = batch.exchanged + batch.copies.saved
    yield _moment(rank, "forward", gradients, buffers=buffers.start_bytes)
    yield _moment(rank, "forward", gradients, batch.saved, buffers=buffers.forward_layer_bytes + in_layer)
    at_end = buffers.forward_bytes + batch.copies.forward + batch.copies.head + rank.prefetched
    yield _moment(rank, "forward", gradients, batch.saved + batch.outer, logits=batch.logits[0], buffers=at_end)
    if rank.gathered_outputs:
        saved = batch.saved + batch.outer
        log_probabilities = LOG_PROBABILITY_BYTES * rank.job.tokens_per_forward * rank.shape.vocab_size
        yield _moment(rank, "forward", gradients, saved, logits=log_probabilities + rank.gathered_outputs)
    if buffers.midway_bytes:
        saved = int(batch.saved * (1 - _layers_ahead(rank)))
        midway = buffers.forward_bytes + buffers.midway_bytes + in_layer
        yield _moment(rank, "forward", gradients, saved, buffers=midway)


def backward(rank: Rank) -> Iterator[PhaseMemory]:
    """At the loss, in the last layer (the first to run backward), in the first layer, at a tied embedding; in the last
    layer before which ZeRO-3 prefetches the embedding."""
    batch, buffers, trained, waiting = rank.batch, rank.buffers, rank.weights.num_trained, rank.waiting_gradients
    at_loss = buffers.loss_bytes + batch.copies.saved + batch.copies.head + rank.prefetched
    yield _moment(rank, "backward", waiting, batch.saved + batch.outer, logits=batch.logits[1], buffers=at_loss)
    # The head's gradient is the first of the backward.
    of_head = int(rank.gradients * (rank.head / trained)) if trained and not rank.weights.adapters else 0
    yield _layer_in_backward(rank, max(waiting, min(rank.gradients, of_head)), batch.saved)
    in_first = buffers.first_layer_bytes + batch.exchanged_in_backward + batch.copies.layer
    of_layer = batch.one_layer + batch.layer_backward + batch.masks
    yield _moment(rank, "backward", _gradients_at_first_layer(rank), of_layer, buffers=in_first)
    # A tied embedding has two gradients, of the head and of the lookup, which are added up.
    is_tied = rank.shape.tied_embeddings and rank.weights.adapters is None
    element = (4 if rank.engine.autocasts else 2) * (2 if rank.engine.element_bytes == 4 else 1)
    tied = 2 * element * rank.head if is_tied else 0
    summed = rank.gradients if rank.gathered_outputs else 0  # of all replicas, beside the first one's own
    yield _moment(rank, "backward", rank.gradients, buffers=buffers.end_bytes + tied + summed)
    if buffers.midway_bytes:
        yield _layer_in_backward(rank, waiting, int(batch.saved * _layers_ahead(rank)), buffers.midway_bytes)


def step(rank: Rank) -> Iterator[PhaseMemory]:
    """Activations are gone and gradients reduced: ZeRO-1 has freed all but its partition of them."""
    ranks = rank.engine.world_size if rank.engine.sharding == "shard_optimizer" else 1
    yield _moment(rank, "step", rank.gradients // ranks, buffers=rank.buffers.step_bytes)


def evaluate(rank: Rank) -> Iterator[PhaseMemory]:
    """The Trainer's evaluation, between two steps: a batch without a graph, in a layer and at its loss, beside the kept
    logits of earlier ones; these twice while the last are appended (transformers 5.23, `EvalLoopContainer`)."""
    batch, gradients, buffers, kept = rank.evaluated, rank.lasting_gradients, rank.buffers, rank.kept_logits
    if batch is not None:
        in_layer = buffers.forward_layer_bytes + batch.exchanged + batch.copies.layer
        yield _moment(rank, "evaluate", gradients, batch.one_forward, logits=kept, buffers=in_layer)
        at_end = buffers.forward_bytes + batch.copies.head
        yield _moment(rank, "evaluate", gradients, logits=kept + batch.logits[0], buffers=at_end)
        yield _moment(rank, "evaluate", gradients, logits=2 * kept)


def save(rank: Rank) -> Iterator[PhaseMemory]:
    """FSDP's full state dict, where it stays on the GPUs: a clone of each tensor (torch 2.13, `_state_dict_utils.py`:
    `_full_post_state_dict_hook`), in fp32, beside the root unit, which is gathered meanwhile."""
    if rank.job.numerics.save_on_gpu and rank.engine.traits.gathers_layers:
        weights = rank.weights
        root = weights.embedding + (0 if rank.shape.tied_embeddings else rank.head)
        cloned = weights.held_bytes(rank.engine.element_bytes) + FP32_BYTES * root
        yield _moment(rank, "save", 0, buffers=cloned)


def _layers_ahead(rank: Rank) -> float:
    """Share of the layers that ZeRO-3 may prefetch before it is at the head or the embedding."""
    weights = rank.weights
    outer = weights.embedding + (0 if rank.shape.tied_embeddings else rank.head)
    return min(1.0, rank.engine.live_parameters / max(1, weights.num_trained + weights.num_frozen - outer))


def _layer_in_backward(rank: Rank, gradients: int, saved: int, gathered: int = 0) -> PhaseMemory:
    """A layer's backward, beside what is saved of it and of earlier layers; `gathered` is in addition."""
    batch, recomputes = rank.batch, rank.job.activation_checkpointing
    activations = saved + (batch.one_layer if recomputes else 0) + batch.layer_backward
    copies = batch.copies.layer if recomputes else batch.copies.saved
    buffers = rank.buffers.backward_bytes + gathered + batch.exchanged_in_backward + copies
    return _moment(rank, "backward", gradients, activations, buffers=buffers)


def _gradients_at_first_layer(rank: Rank) -> int:
    """Gradients of all later layers: the first layer's appear as its activations go, an untied embedding's last."""
    weights, trained = rank.weights, rank.weights.num_trained
    if rank.engine.traits.has_flat_states or not trained:
        return rank.gradients
    if weights.adapters:
        return rank.gradients - rank.gradients // rank.shape.num_layers
    missing = weights.largest_layer() + (0 if rank.shape.tied_embeddings else rank.head)
    return max(rank.waiting_gradients, int(rank.gradients * (1 - min(missing, trained) / trained)))


def _moment(
    rank: Rank,
    phase: str,
    gradients: int,
    activations: int = 0,
    *,
    buffers: int = 0,
    logits: int = 0,
    generation: int = 0,
) -> PhaseMemory:
    """One moment of a phase, with what lasts, and what other micro-batches of a pipeline hold while one computes."""
    job, method, batch, stage = rank.job, rank.job.method, rank.batch, rank.load
    lasting = rank.buffers.lasting_bytes + job.workspace_bytes
    in_flight = batch.tower
    lasting += rank.gathered_embedding if phase in ("score", "forward", "backward", "evaluate") else 0
    if stage is not None:
        lasting += ACTIVATION_BYTES * job.tokens_per_forward * rank.shape.hidden_size * stage.buffered_activations
        at_head = 0 if job.method_loss == "log_probs" else stage.logits_in_flight
        in_flight += max(0, int(batch.saved * (stage.micro_batches_in_flight - 1)))
        in_flight += LOG_PROBABILITY_BYTES * job.tokens_per_forward * rank.shape.vocab_size * at_head
    if phase not in ("step", "evaluate", "save"):
        activations += in_flight
        lasting += rank.buffers.accumulated_bytes + rank.buffers.waiting_bytes
        if rank.buffers.accumulated_bytes:  # freed layer by layer as the last backward makes the shards, no larger ones
            gradients = 0
    if phase != "generate" and not method.vllm_enable_sleep_mode:
        generation += method.vllm_bytes
    return PhaseMemory(
        phase=phase,
        parameter_bytes=rank.parameters,
        gradient_bytes=gradients,
        optimizer_bytes=0 if rank.engine.offload_optimizer else rank.states.optimizer_bytes,
        reference_bytes=rank.reference if method.has_reference(lora=rank.weights.adapters is not None) else 0,
        activation_bytes=activations,
        logits_bytes=logits,
        buffer_bytes=lasting + buffers,
        generation_bytes=generation,
    )
