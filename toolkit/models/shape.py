"""The tensors of a model, layer by layer, the dimensions that decide its activations, and bytes that these take.

Tensor names are relative to their layer, so identical layers are one object: sums over layers become sums over the
few distinct layers (`ModelShape.layer_kinds`), and planning 80 layers costs the same as planning 2.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# transformers 5 leaves norms and biases out of the weight-decay group (`Trainer.get_decay_parameter_names`). It finds
# GPT-2's norms by their class; here they are found by their name, `ln_`.
NO_WEIGHT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_")
EXPERTS = re.compile(r"(?:^|\.)experts\.")
ROUTER = "mlp.gate.weight"
# Modules beside the language model: encoders of images and sound, and what projects their outputs.
TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|video\w*|audio\w*|embed_vision|embed_audio|image\w*|connector|img_processor"
    r"|multi_modal_projector)(?:\.|$)"
)


# Without slots, so that what a name says is found once per tensor, and not in each of thousands of sums.
@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter tensor, named relative to its layer, or to the model if it is outside the layers."""

    name: str
    shape: tuple[int, ...]
    in_linear: bool | None = None  # belongs to a linear layer, as counting found; None: to be told by its name

    @cached_property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def has_weight_decay(self) -> bool:
        """True if the Trainer puts this tensor into the parameter group with weight decay."""
        return NO_WEIGHT_DECAY.search(self.name.lower()) is None

    @cached_property
    def is_expert(self) -> bool:
        """True for the fused weights of a mixture's experts."""
        return EXPERTS.search(self.name) is not None

    @cached_property
    def is_linear_weight(self) -> bool:
        """True for the weight of a linear layer; fused experts and their router are not linear layers."""
        is_weight = len(self.shape) == 2 and self.name.endswith(".weight")
        return is_weight and (self.name != ROUTER if self.in_linear is None else self.in_linear)

    @cached_property
    def is_fused_experts(self) -> bool:
        """True for one weight of all experts of a layer; their biases have two dimensions."""
        return self.is_expert and len(self.shape) == 3

    @cached_property
    def is_quantized(self) -> bool:
        """True for what QLoRA holds in 4 bits."""
        return self.is_linear_weight or self.is_fused_experts

    @cached_property
    def is_embedding(self) -> bool:
        """True for token and position embeddings, by the names that transformers gives them."""
        return any(word in self.name for word in ("embed", "wte", "wpe")) and not self.in_tower

    @cached_property
    def in_tower(self) -> bool:
        """True for an encoder of images or sound, and for its projector."""
        return TOWER.search(self.name) is not None


Layer = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Place of one LoRA adapter: the weight that peft adds a pair of matrices, A and B, to."""

    target: str  # name of the module, or for fused experts and their router of the parameter, relative to the layer
    rows: int
    columns: int
    rank_multiple: int = 1
    """Rank of the pair over LoRA's: the number of experts, twice that for gate and up projections in one tensor."""

    def tensors(self, rank: int) -> Layer:
        """Return A and B for LoRA of this rank."""
        name, width = self.target.removesuffix(".weight"), rank * self.rank_multiple
        return (
            Tensor(name=f"{name}.lora_A.default.weight", shape=(width, self.columns)),
            Tensor(name=f"{name}.lora_B.default.weight", shape=(self.rows, width)),
        )


Adapters = tuple[Adapter, ...]


COUNTED_PARTS, COEFFICIENTS = ("layers", "largest_layer", "backward", "outer"), ("fixed", "per_token", "per_position")
# Attention masks: none; of padding or packed documents; of a sliding window. Counted too: a kernel, as `flash`.
MASKS = ("none", "padding", "window")
MATH = "math"  # attention: SDPA without a fused kernel, which no option names


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBytes:
    """Bytes as a function of the batch: constant, plus per token, plus per token and position of its row."""

    fixed: int = 0  # independent of the batch: mostly bf16 copies of weights
    per_token: int = 0
    per_position: float = 0.0  # per token and position of its row: masks, and the scores of attention that saves them

    def token_bytes(self, seq_length: int) -> int:
        """Return the bytes of one token in rows of this length, without the constant part."""
        return self.per_token + round(self.per_position * seq_length)

    def plus(self, other: SavedBytes, times: float = 1) -> SavedBytes:
        """Return this plus `times` the other."""
        return SavedBytes(
            fixed=self.fixed + round(times * other.fixed),
            per_token=self.per_token + round(times * other.per_token),
            per_position=self.per_position + times * other.per_position,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedActivations:
    """Activations of one model under one compute dtype, training method and attention mask."""

    layers: SavedBytes  # all decoder layers together
    largest_layer: SavedBytes  # the layer that saves most
    backward: SavedBytes  # what that layer allocates in addition during its own backward pass
    outer: SavedBytes  # outside the layers, without logits: the final norm and the input of the head
    logit_bytes: int  # bytes saved per logit before the loss, for example by a soft cap

    def plus(self, other: SavedActivations, times: float) -> SavedActivations:
        """Return this plus `times` the other; bytes per logit are this one's."""
        parts = {name: getattr(self, name).plus(getattr(other, name), times) for name in COUNTED_PARTS}
        return SavedActivations(**parts, logit_bytes=self.logit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedActivations:
    """Everything that `toolkit.models.count_from_transformers` counted for one model."""

    saved: Mapping[tuple[bool, bool, str], SavedActivations]
    """By autocast (against bf16 weights), LoRA (against full fine-tuning) and mask, one of `MASKS`."""
    per_rank: Mapping[bool, SavedActivations]  # what one more rank of all LoRA adapters adds, by autocast
    counted_rank: int  # LoRA rank of the entries in `saved`

    @classmethod
    def read(cls, rows: Sequence[Mapping[str, Any]], rank: int) -> CountedActivations | None:
        """Return the activations in the JSON rows of `count_from_transformers`; None if there are none."""
        saved = {(row["autocast"], row["lora"], row["mask"]): _saved(row) for row in rows if not row["per_rank"]}
        per_rank = {row["autocast"]: _saved(row) for row in rows if row["per_rank"]}
        return cls(saved=saved, per_rank=per_rank, counted_rank=rank) if rows else None

    def at(self, *, autocast: bool, lora_r: int | None, mask: str) -> SavedActivations:
        """Return the activations for any LoRA rank: what adapters save is linear in it."""
        mask = mask if (autocast, False, mask) in self.saved else "none"
        found = self.saved[autocast, lora_r is not None, mask]
        return found if lora_r is None else found.plus(self.per_rank[autocast], lora_r - self.counted_rank)


def _saved(row: Mapping[str, Any]) -> SavedActivations:
    parts = (SavedBytes(**dict(zip(COEFFICIENTS, row[name], strict=True))) for name in COUNTED_PARTS)
    return SavedActivations(**dict(zip(COUNTED_PARTS, parts, strict=True)), logit_bytes=row["logit_bytes"])


# Without slots, so that sums are cached on the instance; compared by identity, so that caches keyed by a shape need not
# hash thousands of tensors.
@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """Everything the planner knows about a causal language model."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # width of a dense layer's MLP; in a mixture of experts, width of one expert
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gated_mlp: bool
    tied_embeddings: bool
    num_experts: int | None = None
    experts_per_token: int | None = None
    layers: tuple[Layer, ...]  # tensors of each decoder layer
    outer: Layer  # embeddings, final norm and head, in the model's order; a tied head appears once, as the embedding
    attention: str = "sdpa"  # default in transformers: `sdpa`, or `eager`, which saves the scores; or `MATH`
    activation: str = "silu"  # activation function of the MLP, as the configuration names it
    counted_on: str = "arithmetic"  # `arithmetic`, or `meta device` if transformers built the model without memory
    counted_activations: CountedActivations | None = None
    """Activations counted on fake tensors; None where the formulas of `toolkit.models.activations` apply."""
    scaled_from: str | None = None  # the size of the same family whose counted activations are scaled to this one
    why_not_counted: str | None = None
    """Reason for which the activations of an unknown architecture could not be counted; Llama's formulas apply."""
    counted_adapters: Mapping[Layer, Adapters] | None = None
    """Adapters that peft puts on each kind of layer with `all-linear`; None where `toolkit.models.lora` lists them."""
    outer_adapters: Adapters = ()  # that peft puts on linear layers outside the decoder layers with `all-linear`
    renamed_targets: Mapping[str, str] = field(default_factory=dict)
    """Module names of transformers 4 that peft turns into parameters of fused experts, with these parameters."""
    why_no_adapters: str | None = None  # reason for which peft cannot adapt the model's linear layers; None if it can
    patches_per_token: int = 1  # patches of an image that become one token, where the model has an encoder of images
    sliding_window: int | None = None  # rows of at least this many tokens need an attention mask
    num_sliding_layers: int = 0
    dropout: bool = False  # true if the residual stream is trained with dropout

    @property
    def activations_from(self) -> str:
        """Source of the activation sizes: `formulas`, `saved tensors`, `family` (another size's), or else `llama`."""
        if self.counted_on == "arithmetic":
            return "formulas"
        if self.scaled_from is not None:
            return "family"
        return "llama" if self.counted_activations is None else "saved tensors"

    @cached_property
    def layer_kinds(self) -> dict[Layer, int]:
        """Each distinct layer with the number of times the model has it."""
        return dict(Counter(self.layers))

    @cached_property
    def num_params(self) -> int:
        """Elements of all tensors."""
        return sum(_elements(layer) * count for layer, count in self.layer_kinds.items()) + _elements(self.outer)

    @cached_property
    def num_tower_params(self) -> int:
        """Elements of encoders of images and sound and of their projectors, which no token of text passes through."""
        return _elements(tuple(tensor for tensor in self.outer if tensor.in_tower))

    @cached_property
    def num_active_params(self) -> int:
        """Elements that one token passes through: `experts_per_token` of `num_experts` in a mixture of experts."""
        if not self.num_experts or self.experts_per_token is None:
            return self.num_params
        experts = sum(tensor.num_elements for layer in self.layers for tensor in layer if tensor.is_expert)
        return self.num_params - experts + experts * self.experts_per_token // self.num_experts


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Layer:
    """Return the tensors of a linear layer."""
    weight = Tensor(name=f"{name}.weight", shape=(rows, columns))
    return (weight, Tensor(name=f"{name}.bias", shape=(rows,))) if bias else (weight,)


def _elements(layer: Layer) -> int:
    return sum(tensor.num_elements for tensor in layer)
