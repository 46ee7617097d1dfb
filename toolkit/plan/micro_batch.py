"""Bytes that come and go with one micro-batch on one rank: activations, copies of weights, exchanges, logits.

What layers save is in `toolkit.models.activations`, and the bytes of each loss are in `logits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from toolkit.engines.engine import EngineSettings
from toolkit.models.activations import Activations
from toolkit.models.attention import needs_no_mask
from toolkit.models.job_weights import FP32_BITS, FP32_BYTES, JobWeights
from toolkit.models.shape import ModelShape, SavedActivations
from toolkit.models.vision_tower import saved_per_token
from toolkit.plan.logits import LOSSES, LossSizes, loss_that_computes
from toolkit.plan.methods import SFT, adapter_input_bytes
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.programs import TOOLKIT

# What a layer's backward allocates is the larger of two lines. The one of few tokens is mostly the gradients of its
# weights, which are planned beside it; the other goes through the two longest counts, of 2,048 and 3,072 tokens. Of the
# parabola through the three it is the chord, with this position.
CHORD_OF_COUNTS = 2048 + 3072


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Bytes of one micro-batch on one rank, by what holds them."""

    saved: int  # by all layers, for their backward
    outer: int  # by what is outside of the layers
    one_layer: int  # by the largest layer
    layer_backward: int  # made by the backward of a layer
    masks: int  # of attention, which checkpointed layers get again when they are recomputed
    tower: int  # saved by the encoder of images
    copies: WeightCopies
    exchanged: int  # between ranks, in a layer's forward
    exchanged_in_backward: int
    logits: tuple[int, int]  # at the end of the forward, and at the start of the backward
    one_forward: int  # made by a layer at once, where no graph keeps it
    forward_token_bytes: int  # the same per token
    residual_bytes: int  # of an element of the residual stream


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCopies:
    """Bytes of copies of weights in another dtype."""

    saved: int  # beside what layers save
    layer: int  # of the layer that is recomputed
    forward: int  # until the forward ends
    head: int


@lru_cache(maxsize=256)
def _saved(activations: Activations, mask: str) -> SavedActivations:
    """The same for all micro-batches, and for all world sizes of data parallelism."""
    return activations.saved(mask)


def micro_batch(shape: ModelShape, engine: EngineSettings, job: PlannedJob, weights: JobWeights) -> MicroBatch:
    """Return the bytes of one micro-batch."""
    length, hidden = job.tokens_per_row, shape.hidden_size
    # fp32 compute saves at most twice the bytes.
    tokens = -(-job.tokens_per_forward // engine.ranks_per_sequence) * (2 if engine.element_bytes == 4 else 1)
    activations = Activations(
        shape=shape,
        autocast=engine.autocasts,
        lora_r=job.lora_r,
        fp32_residual=(job.numerics.kbit_training or _is_fp32(weights)) and engine.autocasts,
        fp32_linears=job.numerics.load_in_8bit and job.numerics.kbit_training and engine.autocasts,
        lora_dropout=job.numerics.lora_dropout > 0,
        dora_targets=job.lora_target_modules if job.numerics.dora else (),
        oft_targets=job.lora_target_modules if job.numerics.oft_block_size else (),
        oft_block_size=job.numerics.oft_block_size,
        liger=job.use_liger_kernel,
        layout=engine.layout,
    )
    # Parts of a row are padded on the right, and causal attention needs no mask for that.
    # Packed rows with a mask too make SDPA repeat keys and values per head.
    of_kernel = shape.attention == "eager" and needs_no_mask(job.attn_implementation)  # which saves no scores
    varlen = of_kernel or job.packs_without_mask(shape)
    padded = engine.ranks_per_sequence == 1 and (job.is_padded or (job.packing and not varlen))
    saved = _saved(activations, activations.mask_at(length, padded=padded, varlen=varlen))
    residual = tokens * activations.residual_bytes * hidden
    width = shape.intermediate_size * (shape.experts_per_token or 1)  # of the MLP
    has_scores = saved.largest_layer.per_position > 2  # these grow with the square, unlike a mask of 2 bytes
    position = length if has_scores else CHORD_OF_COUNTS
    layer_backward = tokens * max(0, saved.backward.token_bytes(position))
    if job.numerics.tiled_mlp and not has_scores:
        layer_backward = min(layer_backward, 2 * residual)
    # Autocast casts the inputs of peft's adapters, unless TRL made those bf16, as it does beside 4-bit weights. Their
    # gradients are fp32 too: of the last projection's input, and of its output.
    of_trl = job.method.method != SFT and job.numerics.program == TOOLKIT and not job.load_in_4bit
    casts = 0
    has_fp32_inputs = of_trl or job.numerics.peft_input_cast or job.numerics.oft_block_size
    if weights.adapters is not None and engine.autocasts and has_fp32_inputs:
        casts = tokens * adapter_input_bytes(shape)
        layer_backward += tokens * FP32_BYTES * (width + hidden)
    by_layers = tokens * saved.layers.token_bytes(length) + casts
    masks, selective = 0, job.activation_checkpointing_selective
    if job.activation_checkpointing:  # saves the inputs of layers, all but one in host memory if they are offloaded
        masks = activations.mask_bytes(rows=job.rows, seq_length=length, padded=padded, varlen=varlen)
        by_layers = residual * (1 if job.activation_checkpointing_offload else shape.num_layers) + masks
        by_layers += tokens * activations.attention_output_bytes * (shape.num_layers if selective else 0)
    # Attention exchanges before its layer's MLP has saved anything, and in the backward after that is gone.
    of_attention, of_mlp = (tokens * each for each in activations.exchanged_bytes_per_token)
    of_attention -= tokens * activations.mlp_bytes_per_token
    loss = job.method_loss
    if job.method.method == SFT:
        splits_head = engine.layout is not None and engine.layout.splits_head
        loss = loss_that_computes(job.loss, shape.model_type, splits_head=splits_head, has_liger=job.use_liger_kernel)
    in_loss = 2 if loss == "log_probs" and weights.adapters is None else 0  # the loss has the head's input
    forward_token_bytes = 2 * activations.residual_bytes * hidden + 6 * width
    return MicroBatch(
        saved=by_layers,
        outer=tokens * (saved.outer.per_token - in_loss * hidden),
        one_layer=tokens * saved.largest_layer.token_bytes(length) + casts // shape.num_layers,
        layer_backward=layer_backward,
        masks=masks,
        tower=_tower(shape, engine, job, weights),
        copies=_weight_copies(activations, saved, job, weights, loss),
        exchanged=of_mlp + max(0, of_attention),
        exchanged_in_backward=of_mlp + max(0, of_attention - layer_backward),
        logits=_logits(tokens, activations, saved, engine, job, loss),
        one_forward=tokens * forward_token_bytes,
        forward_token_bytes=forward_token_bytes,
        residual_bytes=activations.residual_bytes,
    )


def _tower(shape: ModelShape, engine: EngineSettings, job: PlannedJob, weights: JobWeights) -> int:
    """The encoder of images; a frozen one has no backward."""
    if not (job.image_tokens and weights.trains_tower):
        return 0
    options = {"autocast": engine.autocasts, "recomputes": job.activation_checkpointing}
    return job.rows * job.image_tokens * saved_per_token(shape, lora_r=job.lora_r, **options)


def _is_fp32(weights: JobWeights) -> bool:
    return weights.base is not None and weights.base.bits == FP32_BITS


def _weight_copies(
    activations: Activations, saved: SavedActivations, job: PlannedJob, weights: JobWeights, loss: str
) -> WeightCopies:
    """Of decoded 4-bit or 8-bit weights, and of those that autocast casts.

    8-bit ones are decoded in the dtype of their input, which autocast leaves (bitsandbytes 0.50, `MatMul8bitLt`).
    """
    shape, recomputes = activations.shape, job.activation_checkpointing
    element = FP32_BYTES if activations.fp32_linears else 2
    dequantized = element * weights.decoded_at_once if job.load_in_4bit or job.numerics.load_in_8bit else 0
    # Of a frozen fp32 weight autocast caches no copy, but its linear layer keeps one for the backward pass.
    kinds = shape.layer_kinds if _is_fp32(weights) and activations.autocast else {}
    casts = {kind: 2 * sum(tensor.num_elements for tensor in kind if tensor.is_linear_weight) for kind in kinds}
    in_all_layers = saved.layers.fixed + dequantized + sum(casts[kind] * count for kind, count in kinds.items())
    beside_saved = dequantized if recomputes else in_all_layers
    # Autocast caches its copies of adapters too.
    of_adapters = recomputes and weights.adapters is not None and activations.autocast
    return WeightCopies(
        saved=beside_saved,
        layer=saved.largest_layer.fixed + dequantized + max(casts.values(), default=0),
        forward=(in_all_layers if activations.casts_weights else beside_saved)
        + (2 * weights.num_trained if of_adapters else 0),
        head=0 if loss == "log_probs" else activations.head_copy_bytes,  # in that loss
    )


def _logits(
    tokens: int, activations: Activations, saved: SavedActivations, engine: EngineSettings, job: PlannedJob, loss: str
) -> tuple[int, int]:
    element = FP32_BYTES if engine.autocasts else engine.element_bytes  # of the head's weights, and so its gradient
    in_micro_batch = -(-job.tokens_per_micro_batch // engine.ranks_per_sequence)
    sizes = LossSizes(
        tokens=in_micro_batch if loss == "chunked" else tokens,
        scored=job.method.scored_tokens(job.rows, job.tokens_per_row),
        rows=job.rows,
        row_bytes=activations.residual_bytes,
        output_bytes=element,
        vocab_size=activations.shape.vocab_size,
        hidden_size=activations.shape.hidden_size,
        saved_bytes=saved.logit_bytes,
        head_bytes=element if job.lora_r is None else 0,
        element_bytes=engine.element_bytes,
        chunk_tokens=job.loss_chunk_tokens,
    )
    return LOSSES[loss](sizes)
