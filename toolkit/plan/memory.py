"""GPU memory of one rank by phase and part: load, forward, backward, optimizer step; and whether it fits.

The peak is that of the largest phase. Its parts are computed in modules of their own: `model_states`, `engine_buffers`
and `toolkit.models.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from toolkit.engines.planned import EngineSettings, ModelStates
from toolkit.models.activations import Activations
from toolkit.models.job_weights import FP32_BITS, FP32_BYTES, JobWeights, job_weights
from toolkit.models.shape import ModelShape, SavedActivations
from toolkit.models.split import part_of_rank
from toolkit.models.vision_tower import saved_per_token
from toolkit.plan.engine_buffers import HostMemory, driver_bytes, engine_buffers, host_memory, overhead_bytes
from toolkit.plan.logits import logits_bytes
from toolkit.plan.methods import (
    SFT,
    adapter_input_bytes,
    reference_buffer_bytes,
    reference_bytes,
)
from toolkit.plan.model_states import model_states
from toolkit.plan.planned_job import (
    ACTIVATION_BYTES,
    LOG_PROBABILITY_BYTES,
    PlannedJob,
    StageLoad,
    TrainingSetup,
    stage_shape,
)
from toolkit.plan.programs import TOOLKIT
from toolkit.presets.spec import PresetSpec
from toolkit.units import GIB

# Architectures whose loss is computed from the full logits whatever `--loss` is: `UnknownHead` is raised for them. All
# causal models of transformers 5.23 were tried that build from their default configuration.
WITHOUT_CHUNKED_LOSS = frozenset(
    (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "cpmant", "data2vec-text", "electra", "ernie", "git", "inkling2_text", "marian", "mbart"),
        *("megatron-bert", "modernbert-decoder", "mvp", "opt", "pegasus", "plbart", "prophetnet", "rembert", "roberta"),
        *("roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl"),
        *("xlnet", "xmod"),
    )
)
# Architectures that Liger-Kernel 0.8.2 patches (`monkey_patch.py`, `MODEL_TYPE_TO_APPLY_LIGER_FN`): with any other,
# `use_liger_kernel` changes nothing, and the loss is transformers' own.
LIGER_TYPES = frozenset(
    (
        *("deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text"),
        *("glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "internvl"),
        *("llama", "llama4", "llama4_text", "llava", "ministral", "mistral", "mixtral", "mllama"),
        *("mllama_text_model", "nemotron", "olmo2", "olmo3", "paligemma", "phi3", "pixtral", "qwen2", "qwen2_5_vl"),
        *("qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text"),
        *("qwen3_vl_text", "smollm3", "smolvlm"),
    )
)
PARTS = ("parameter", "gradient", "optimizer", "reference", "activation", "logits", "buffer", "generation")
STATES = PARTS[:4]
PHASES = ("load", "precompute", "generate", "score", "forward", "backward", "step")

FITS, DOES_NOT_FIT, TOO_CLOSE = "fits", "does_not_fit", "too_close"
# Share of a plan, apart from the model states, by which the peak may be higher: 30 of 35 published peaks are inside
# (`tests/plan/test_measured_memory.py`). Those of ZeRO-2 and ZeRO-3 are closer. No peak of FSDP2 is published. On one
# H200 (`benchmarks/results/gpu-check.json`, part `peaks`) adapters under FSDP2 needed 101 and 196 MiB more than planned
# (GPT-2 0.4B on 8 ranks, Granite 2.5B on 64, one of them rehearsed, both with activation checkpointing): 2.5 % of what
# is not model states; a full fine-tune reserved 9 % more. FSDP1 with adapters needs up to 54 % more, which is no margin
# for FSDP2: FSDP1 flattens adapters and frozen weights into one tensor.
UNCERTAINTY, UNCERTAINTY_DEEPSPEED = 0.15, 0.10
# The same if Llama's activations stand in for those of an architecture that could not be counted.
UNCERTAINTY_UNKNOWN = 0.5
# Share of the whole plan by which the peak may be higher, by what made public jobs of programs of 2023 to 2026 exceed
# their plans (docs/evidence/plan-accuracy.md, unseen jobs).
OF_ALL_DEEPSPEED_FULL, OF_ALL_OTHER_PROGRAM, OF_ALL_OFFLOAD = 0.10, 0.15, 0.30
OF_ALL_FSDP1 = {"full": 0.15, "adapters": 0.55, "offload": 0.60}
# The least of it: what others report for CUDA's context and a communicator differs by as much.
LEAST_MARGIN_BYTES = 1 * GIB


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
        return sum(getattr(self, f"{part}_bytes") for part in STATES)

    @property
    def allocated_bytes(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, f"{part}_bytes") for part in PARTS)

    def as_row(self) -> dict[str, int]:
        """Return the parts as `toolkit plan --json` prints them."""
        return {f"{part}_bytes": getattr(self, f"{part}_bytes") for part in (*PARTS, "allocated")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """By how much a peak may be higher than planned: the largest of two shares and `LEAST_MARGIN_BYTES`."""

    of_rest: float
    """Share of all but the model states."""
    of_all: float = 0.0
    reason: str = "everything but model states"

    def of(self, planned_peak_bytes: int, exact_bytes: int) -> int:
        """Return the bytes, for a peak of which `exact_bytes` are certain."""
        rest = int(self.of_rest * (planned_peak_bytes - exact_bytes))
        return max(rest, int(self.of_all * planned_peak_bytes), LEAST_MARGIN_BYTES)


DEFAULT_MARGIN = Margin(of_rest=UNCERTAINTY)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Planned memory of rank 0 of one preset at one world size; in a pipeline, of the rank that needs most."""

    states: ModelStates
    """Model states wherever they are, as the attestation counts them."""
    phases: tuple[PhaseMemory, ...]
    overhead_bytes: int
    driver_bytes: int
    """Part of the overhead that is not torch's: CUDA's context and NCCL's communicators."""
    host: HostMemory
    margin: Margin

    @property
    def peak(self) -> PhaseMemory:
        """The phase that allocates most."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    @property
    def planned_peak_bytes(self) -> int:
        """Memory that the GPU reports as used: allocated at the peak, and the overhead."""
        return self.peak.allocated_bytes + self.overhead_bytes

    @property
    def least_peak_bytes(self) -> int:
        """Lower end of the range: nothing is reserved beside tensors and what the driver takes.

        Where memory runs short, torch's allocator gives unused blocks back and tries again.
        """
        return self.peak.allocated_bytes + self.driver_bytes

    @property
    def possible_peak_bytes(self) -> int:
        """Upper end of the range: the planned peak, and the margin by which it may be higher."""
        return self.planned_peak_bytes + self.margin.of(self.planned_peak_bytes, self.peak.state_bytes)


def plan_memory(
    shape: ModelShape, preset: PresetSpec, *, world_size: int, job: PlannedJob, mixed_precision: str | None = None
) -> MemoryPlan:
    """Return the memory of rank 0, or in a pipeline of the rank that needs most.

    `mixed_precision` overrides the preset's own.
    """
    setup = TrainingSetup(shape=shape, preset=preset, world_size=world_size, job=job, mixed_precision=mixed_precision)
    engine, settings = setup.engine, job.pipeline
    if preset.engine != "pipeline" or settings is None:
        return plan_engine_memory(shape, engine, job)
    stages = []
    for rank in range(settings.ranks):
        load = StageLoad.of(settings, rank, micro_batches=job.gradient_accumulation_steps)
        stages.append(plan_engine_memory(stage_shape(shape, settings, rank), engine, job, load=load))
    return max(stages, key=lambda stage: stage.planned_peak_bytes)


def plan_engine_memory(
    shape: ModelShape, engine: EngineSettings, job: PlannedJob, *, load: StageLoad | None = None
) -> MemoryPlan:
    """Return the memory under engine settings that need not come from a preset; `load` is that of a stage."""
    shape = part_of_rank(job.method.model(shape), engine.layout)
    if job.attn_implementation == "eager" and shape.activations_from == "formulas":
        shape = with_eager_attention(shape)
    base = job.quantized_base
    targets, element, frozen_tower = job.lora_target_modules, engine.element_bytes, job.freeze_vision_tower
    weights = job_weights(shape, job.lora_r, job.load_in_4bit, targets, element, base, frozen_tower)
    states = model_states(engine, weights, job.optim)
    phases = _Phases(shape, engine, job, weights, states, load).peaks()
    return MemoryPlan(
        states=states,
        phases=phases,
        # what was reserved in any phase stays reserved
        overhead_bytes=overhead_bytes(
            engine,
            activation_bytes=max(phase.activation_bytes for phase in phases),
            logits_bytes=max(phase.logits_bytes for phase in phases),
            step_bytes=0 if weights.adapters else phases[-1].allocated_bytes,
            expandable_segments=job.numerics.expandable_segments,
        ),
        driver_bytes=driver_bytes(engine),
        host=host_memory(engine, weights, states, job),
        margin=_margin(engine, shape, job),
    )


def _margin(engine: EngineSettings, shape: ModelShape, job: PlannedJob) -> Margin:
    if shape.activations_from == "llama":
        return Margin(of_rest=UNCERTAINTY_UNKNOWN, reason="activations estimated as Llama's")
    full, offload = job.lora_r is None, engine.offload_optimizer is not None or engine.offload_param is not None
    if job.numerics.fsdp1 and engine.traits.gathers_layers:
        what = "offload" if offload else "full" if full else "adapters"
        return Margin(of_rest=UNCERTAINTY, of_all=OF_ALL_FSDP1[what], reason=f"FSDP1, {what}")
    if offload and job.numerics.program != TOOLKIT:
        return Margin(of_rest=UNCERTAINTY, of_all=OF_ALL_OFFLOAD, reason="offload to the host")
    if engine.traits.has_flat_states and full:
        reason = "a full fine-tune under DeepSpeed"
        return Margin(of_rest=UNCERTAINTY_DEEPSPEED, of_all=OF_ALL_DEEPSPEED_FULL, reason=reason)
    if job.numerics.program != TOOLKIT:
        reason = f"{job.numerics.program}, whose jobs were not measured here"
        return Margin(of_rest=UNCERTAINTY, of_all=OF_ALL_OTHER_PROGRAM, reason=reason)
    return Margin(of_rest=UNCERTAINTY_DEEPSPEED) if engine.traits.has_flat_states else DEFAULT_MARGIN


def fit_verdict(
    *,
    planned_peak_bytes: int,
    exact_bytes: int,
    memory_bytes: int,
    margin: Margin = DEFAULT_MARGIN,
    least_peak_bytes: int | None = None,
) -> str:
    """Return the verdict for a peak of which `exact_bytes`, the model states, are certain.

    It does not fit where the lower end of the range, by default the planned peak, is more than the GPU has; and it is
    too close where the upper end is more.
    """
    if (planned_peak_bytes if least_peak_bytes is None else least_peak_bytes) > memory_bytes:
        return DOES_NOT_FIT
    return FITS if planned_peak_bytes + margin.of(planned_peak_bytes, exact_bytes) <= memory_bytes else TOO_CLOSE


def memory_verdict(plan: MemoryPlan, *, memory_bytes: int, host_bytes: int | None = None) -> str:
    """Return the verdict for a GPU of `memory_bytes`, and for a node of `host_bytes` if given."""
    if host_bytes is not None and plan.host.peak_bytes > host_bytes:
        return DOES_NOT_FIT
    return fit_verdict(
        planned_peak_bytes=plan.planned_peak_bytes,
        exact_bytes=plan.peak.state_bytes,
        memory_bytes=memory_bytes,
        margin=plan.margin,
        least_peak_bytes=plan.least_peak_bytes,
    )


@lru_cache(maxsize=64)
def with_eager_attention(shape: ModelShape) -> ModelShape:
    """Return a model whose attention saves its scores; the same object for the same model, as caches need it."""
    return replace(shape, attention="eager")


@lru_cache(maxsize=256)
def _saved(activations: Activations, mask: str) -> SavedActivations:
    """The same for all micro-batches, and for all world sizes of data parallelism."""
    return activations.saved(mask)


class _Phases:
    """Bytes of one rank at each moment that can be the peak of its phase."""

    def __init__(
        self,
        shape: ModelShape,
        engine: EngineSettings,
        job: PlannedJob,
        weights: JobWeights,
        states: ModelStates,
        load: StageLoad | None = None,
    ) -> None:
        self.job, self.engine, self.weights, self.states = job, engine, weights, states
        self.buffers = engine_buffers(engine, weights, states, job)
        # On the GPU between steps; offloaded parameters leave only those that ZeRO-3 keeps whole.
        self.parameters = states.persistent_bytes if engine.offload_param else states.parameter_bytes
        # On the GPU after the reduction; they go where the optimizer is.
        self.gradients = 0 if engine.offload_optimizer else states.gradient_bytes
        # Those of earlier accumulation steps; what is never freed: ZeRO-3's partition, and views of DDP's buckets.
        never_freed = engine.traits.has_flat_states and engine.shards_parameters
        never_freed |= engine.traits.uses_ddp and job.has_bucket_views
        waiting = never_freed or job.gradient_accumulation_steps > 1
        self.gradients_in_forward = self.gradients if waiting else 0
        fp32_factor = 2 if engine.element_bytes == 4 else 1  # fp32 compute saves at most twice the bytes
        self.tokens = -(-job.tokens_per_forward // engine.ranks_per_sequence) * fp32_factor
        self.method = job.method
        self.head = shape.vocab_size * shape.hidden_size // engine.tp
        # TRL's losses run while FSDP2 holds one layer beside the root.
        self.prefetched = 0
        if job.method.spec.loss == "log_probs" and engine.traits.gathers_layers and engine.sharding != "shard_grad_op":
            self.prefetched = engine.element_bytes * weights.largest_layer(engine.ranks_sharing)
        self._set_activations(shape)
        # A tied embedding has two gradients, of the head and of the lookup, which are added up.
        tied = shape.tied_embeddings and not weights.adapters
        self.tied_gradients = 2 * fp32_factor * (4 if engine.autocasts else 2) * self.head if tied else 0
        # What other micro-batches of a pipeline hold while one computes, and buffers for what arrives.
        self.in_flight, self.received = self.tower, 0
        if load is not None:
            batches_at_head = 0 if job.method.spec.loss == "log_probs" else load.logits_in_flight
            logits = LOG_PROBABILITY_BYTES * job.tokens_per_forward * shape.vocab_size * batches_at_head
            self.in_flight += max(0, int(self.saved * (load.micro_batches_in_flight - 1))) + logits
            activation = ACTIVATION_BYTES * job.tokens_per_forward * shape.hidden_size
            self.received = activation * load.buffered_activations

    def _set_activations(self, shape: ModelShape) -> None:
        job, length, frozen = self.job, self.job.tokens_per_row, self.weights.adapters is not None
        layout, autocast = self.engine.layout, self.engine.autocasts
        base = self.weights.base
        in_fp32 = base is not None and base.bits == FP32_BITS
        self.upcast_residual = (job.numerics.kbit_training or in_fp32) and autocast
        activations = Activations(
            shape=shape,
            autocast=autocast,
            lora_r=job.lora_r,
            fp32_residual=self.upcast_residual,
            lora_dropout=job.numerics.lora_dropout > 0,
            liger=job.use_liger_kernel,
            layout=layout,
        )
        # Parts of a row are padded on the right, and causal attention needs no mask for that.
        # Packed rows with a mask too make SDPA repeat keys and values per head.
        varlen = job.packs_without_mask(shape)
        padded = self.engine.ranks_per_sequence == 1 and (job.is_padded or (job.packing and not varlen))
        saved = _saved(activations, activations.mask_at(length, padded=padded, varlen=varlen))
        self.one_layer = self.tokens * saved.largest_layer.token_bytes(length)
        self.layer_backward = self.tokens * max(0, saved.backward.token_bytes(length))
        if job.numerics.tiled_mlp:
            self.layer_backward = min(
                self.layer_backward, self.tokens * 2 * activations.residual_bytes * shape.hidden_size
            )
        self.outer = self.tokens * saved.outer.per_token
        quantized = job.load_in_4bit or job.numerics.load_in_8bit
        dequantized = 2 * self.weights.decoded_at_once if quantized else 0
        # Of a frozen fp32 weight autocast caches no copy, but its linear layer keeps one for the backward pass.
        kinds = shape.layer_kinds if in_fp32 and autocast else {}
        casts = {kind: 2 * sum(t.num_elements for t in kind if t.is_linear_weight) for kind in kinds}
        self.layer_copies = saved.largest_layer.fixed + dequantized + max(casts.values(), default=0)
        all_copies = saved.layers.fixed + dequantized + sum(casts[kind] * count for kind, count in kinds.items())
        if job.activation_checkpointing:  # saves their inputs; layers get the masks again when they are recomputed
            rows = job.rows
            self.masks = activations.mask_bytes(rows=rows, seq_length=length, padded=padded, varlen=varlen)
            on_gpu = 1 if job.activation_checkpointing_offload else shape.num_layers
            self.saved = self.tokens * activations.residual_bytes * shape.hidden_size * on_gpu + self.masks
            self.saved_copies = dequantized
        else:
            self.masks, self.saved_copies = 0, all_copies
            self.saved = self.tokens * saved.layers.token_bytes(length)
        self.forward_copies = all_copies if activations.casts_weights else self.saved_copies
        if job.activation_checkpointing and frozen and self.engine.autocasts:
            self.forward_copies += 2 * self.weights.num_trained  # autocast caches its copies of the adapters
        self._set_method(shape, activations, length)
        self.tower = 0  # a frozen encoder of images has no backward
        if job.image_tokens and self.weights.trains_tower:
            recomputes = job.activation_checkpointing
            per_token = saved_per_token(shape, autocast=autocast, lora_r=job.lora_r, recomputes=recomputes)
            self.tower = job.rows * job.image_tokens * per_token
        self.head_copy = activations.head_copy_bytes
        # Attention exchanges before its layer's MLP has saved anything, and in the backward after that is gone.
        of_attention, of_mlp = (self.tokens * each for each in activations.exchanged_bytes_per_token)
        of_attention -= self.tokens * activations.mlp_bytes_per_token
        self.exchanged = of_mlp + max(0, of_attention)
        self.exchanged_in_backward = of_mlp + max(0, of_attention - self.layer_backward)
        splits_head = layout is not None and layout.splits_head
        needs_full = splits_head or shape.model_type in WITHOUT_CHUNKED_LOSS
        loss = "full" if job.loss == "chunked" and needs_full else job.loss
        if loss == "fused" and job.use_liger_kernel and shape.model_type not in LIGER_TYPES:
            loss = "full"
        method = job.method
        if method.method != SFT:
            loss = method.spec.loss
        if loss == "log_probs":  # the head's input and its copy of the weights are in the loss
            self.head_copy = 0
            self.outer -= 0 if frozen else 2 * self.tokens * shape.hidden_size
        own_tokens = -(-job.tokens_per_micro_batch // self.engine.ranks_per_sequence)
        self.logits = logits_bytes(
            loss=loss,
            tokens=own_tokens if loss == "chunked" else self.tokens,
            scored=method.scored_tokens(job.rows, length),
            row_bytes=activations.residual_bytes,
            output_bytes=4 if self.engine.autocasts else self.engine.element_bytes,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            saved_bytes=saved.logit_bytes,
            # Under autocast the head's gradient has the dtype of its fp32 weights.
            head_bytes=0 if frozen else 4 if self.engine.autocasts else self.engine.element_bytes,
            element_bytes=self.engine.element_bytes,
            chunk_tokens=job.loss_chunk_tokens,
        )

    def _set_method(self, shape: ModelShape, activations: Activations, length: int) -> None:
        """What a method adds to supervised fine-tuning: a reference model, peft's casts, generation."""
        job, method, engine, frozen = self.job, self.method, self.engine, self.weights.adapters is not None
        residual, width = activations.residual_bytes, shape.intermediate_size * (shape.experts_per_token or 1)
        one_forward = 2 * residual * shape.hidden_size + 6 * width  # per token, what a layer makes at once
        self.one_forward = self.tokens * one_forward
        self.kept_rows = residual * method.scored_tokens(job.rows, length) * shape.hidden_size
        self.num_params = shape.num_params
        # Autocast casts the inputs of peft's adapters, unless TRL made those bf16, as it does beside 4-bit weights.
        of_trl = method.method != SFT and job.numerics.program == TOOLKIT and not job.load_in_4bit
        if frozen and engine.autocasts and (of_trl or job.numerics.peft_input_cast):
            copies = self.tokens * adapter_input_bytes(shape)
            self.one_layer += copies // shape.num_layers
            self.saved += 0 if job.activation_checkpointing else copies
            # Their gradients are fp32 too: of the last projection's input, and of its output.
            self.layer_backward += self.tokens * FP32_BYTES * (width + shape.hidden_size)
        reference, buffers = 0, 0
        if method.scores_reference and not frozen:
            reference = reference_bytes(engine, shape, method) if engine.offload_param is None else 0
            buffers = reference_buffer_bytes(engine, activations, method, self.buffers.forward_bytes)
        self.scoring_reference, self.scoring_buffers = reference, buffers
        self.reference = reference if method.has_reference(lora=frozen) else 0
        # Keys are in the dtype of the cosines, values in bf16; the cache of a layer is copied when it grows.
        rows = job.per_device_train_batch_size * job.gradient_accumulation_steps
        per_token = (residual + 2) * shape.num_kv_heads * shape.head_dim
        self.cache = per_token * (shape.num_layers + 1) * rows * length
        self.prefill = one_forward * rows * (length - method.completion_tokens(length))

    def peaks(self) -> tuple[PhaseMemory, ...]:
        """Return the moment of each phase that allocates most."""
        # Parameters, complete or sharded, and what the engine needs to put them in place.
        load = PhaseMemory(phase="load", parameter_bytes=self.parameters, buffer_bytes=self.buffers.load_bytes)
        # Activations are gone and gradients reduced: ZeRO-1 has freed all but its partition of them.
        ranks = self.engine.world_size if self.engine.sharding == "shard_optimizer" else 1
        step = self._phase("step", buffers=self.buffers.step_bytes, gradients=self.gradients // ranks)
        # The forward in the last layer, or at its end, when the logits exist in two dtypes.
        last_layer = self._phase(
            "forward",
            activations=self.saved,
            buffers=self.buffers.forward_layer_bytes + self.exchanged + self.saved_copies,
            gradients=self.gradients_in_forward,
        )
        end = self._phase(
            "forward",
            activations=self.saved + self.outer,
            logits=self.logits[0],
            buffers=self.buffers.forward_bytes + self.forward_copies + self.head_copy + self.prefetched,
            gradients=self.gradients_in_forward,
        )
        forward = (*self._without_graph(), last_layer, end, *self._scoring())
        moments = [load, *forward, *self._backward(), *self._midway(), step]
        found = {moment.phase: moment for moment in sorted(moments, key=lambda moment: moment.allocated_bytes)}
        return tuple(found[phase] for phase in PHASES if phase in found)

    def _scoring(self) -> list[PhaseMemory]:
        """The forward of a reference model, or of the policy without its adapters, which keeps nothing."""
        if not self.method.scores_reference or self.method.precompute_ref_log_probs:
            return []
        has_graph = not self.method.generates
        kept, graph_buffers = 0, 0
        if has_graph:
            kept = self.saved + self.outer + self.kept_rows
            graph_buffers = self.saved_copies + self.buffers.loss_bytes
        in_layer = at_head = graph_buffers + self.scoring_buffers
        if self.engine.traits.gathers_layers and self.weights.adapters:
            in_layer += 2 * self.prefetched
            at_head += self.prefetched
            if not self.weights.shape.tied_embeddings:  # gathered apart from its unit, through a second copy
                whole = self.engine.element_bytes * self.head
                at_head += whole + max(0, whole - self.logits[0])
        gradients = self.gradients_in_forward
        return [
            self._phase("score", activations=kept + self.one_forward, buffers=in_layer, gradients=gradients),
            self._phase("score", activations=kept, logits=self.logits[0], buffers=at_head, gradients=gradients),
        ]

    def _without_graph(self) -> list[PhaseMemory]:
        """The reference's log-probabilities of the entire data set, before the optimizer exists; and generation."""
        method, forward = self.method, max(0, self.one_forward - self.logits[0])
        moments = []
        if method.precompute_ref_log_probs:
            # Under FSDP2 TRL loads a reference for it, since the policy is sharded only when training starts.
            loads = self.engine.traits.gathers_layers and not self.weights.adapters
            precompute = PhaseMemory(
                phase="precompute",
                parameter_bytes=0 if loads else self.parameters,
                reference_bytes=self.scoring_reference if loads else 0,
                activation_bytes=forward,
                logits_bytes=self.logits[0],
                buffer_bytes=self.scoring_buffers,
            )
            moments.append(precompute)
        if not method.generates:
            return moments
        zero3 = self.engine.traits.has_flat_states and self.engine.shards_parameters
        gathered = self.engine.element_bytes * self.num_params if zero3 else self.buffers.forward_bytes
        values = {"activations": self.prefill, "buffers": gathered, "generation": self.cache}
        if method.vllm not in (None, "none"):
            values = {"generation": method.vllm_bytes}
        return [*moments, self._phase("generate", gradients=self.gradients_in_forward, **values)]

    def _backward(self) -> list[PhaseMemory]:
        """At the loss, in the last layer (the first to run backward), in the first layer, or at a tied embedding."""
        trained, in_forward = self.weights.num_trained, self.gradients_in_forward
        # The head's gradient is the first of the backward.
        head_gradient = int(self.gradients * (self.head / trained)) if trained and not self.weights.adapters else 0
        loss = self._phase(
            "backward",
            activations=self.saved + self.outer,
            logits=self.logits[1],
            buffers=self.buffers.loss_bytes + self.saved_copies + self.head_copy + self.prefetched,
            gradients=in_forward,
        )
        last_layer = self._layer_in_backward(
            saved=self.saved, gathered=0, gradients=max(in_forward, min(self.gradients, head_gradient))
        )
        first_layer = self._phase(
            "backward",
            activations=self.one_layer + self.layer_backward + self.masks,
            buffers=self.buffers.first_layer_bytes + self.exchanged_in_backward + self.layer_copies,
            gradients=self._gradients_at_first_layer,
        )
        tied = self.buffers.end_bytes + self.tied_gradients
        return [loss, last_layer, first_layer, self._phase("backward", buffers=tied, gradients=self.gradients)]

    def _midway(self) -> list[PhaseMemory]:
        """While ZeRO-3 prefetches the head (forward) or the embedding (backward), as many layers ahead as it may."""
        buffers, weights = self.buffers, self.weights
        if not buffers.midway_bytes:
            return []
        outer = weights.embedding + (0 if weights.shape.tied_embeddings else self.head)
        in_layers = weights.num_trained + weights.num_frozen - outer
        ahead = min(1.0, self.engine.live_parameters / max(1, in_layers))
        forward = self._phase(
            "forward",
            activations=int(self.saved * (1 - ahead)),
            buffers=buffers.forward_bytes + buffers.midway_bytes + self.exchanged + self.saved_copies,
            gradients=self.gradients_in_forward,
        )
        saved, gradients = int(self.saved * ahead), self.gradients_in_forward
        return [forward, self._layer_in_backward(saved=saved, gathered=buffers.midway_bytes, gradients=gradients)]

    def _layer_in_backward(self, *, saved: int, gathered: int, gradients: int) -> PhaseMemory:
        """A layer's backward, beside what is saved of it and of earlier layers; `gathered` is in addition."""
        recomputes = self.job.activation_checkpointing
        copies = self.layer_copies if recomputes else self.saved_copies
        return self._phase(
            "backward",
            activations=saved + (self.one_layer if recomputes else 0) + self.layer_backward,
            buffers=self.buffers.backward_bytes + gathered + self.exchanged_in_backward + copies,
            gradients=gradients,
        )

    def _phase(
        self,
        name: str,
        *,
        activations: int = 0,
        logits: int = 0,
        buffers: int = 0,
        gradients: int,
        generation: int = 0,
    ) -> PhaseMemory:
        resident = name != "generate" and not self.method.vllm_enable_sleep_mode
        accumulated, waiting = self.buffers.accumulated_bytes, self.buffers.waiting_bytes
        if name == "step":
            accumulated = waiting = 0
        if accumulated:  # they are freed layer by layer as the last backward makes the shards, which are no larger
            gradients = 0
        return PhaseMemory(
            phase=name,
            parameter_bytes=self.parameters,
            gradient_bytes=gradients,
            optimizer_bytes=0 if self.engine.offload_optimizer else self.states.optimizer_bytes,
            reference_bytes=self.reference,
            generation_bytes=generation + (self.method.vllm_bytes if resident else 0),
            activation_bytes=activations + (self.in_flight if name != "step" else 0),
            logits_bytes=logits,
            buffer_bytes=self.buffers.lasting_bytes
            + self.job.workspace_bytes
            + self.received
            + buffers
            + accumulated
            + waiting,
        )

    @property
    def _gradients_at_first_layer(self) -> int:
        """Gradients of all later layers: the first layer's appear as its activations go, an untied embedding's last."""
        weights, trained = self.weights, self.weights.num_trained
        if self.engine.traits.has_flat_states or not trained:
            return self.gradients
        if weights.adapters:
            return self.gradients - self.gradients // weights.shape.num_layers
        missing = weights.largest_layer() + (0 if weights.shape.tied_embeddings else self.head)
        share = 1 - min(missing, trained) / trained
        return max(self.gradients_in_forward, int(self.gradients * share))
