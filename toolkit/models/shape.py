"""A model's tensors by layer, and the widths that its activations follow.

    >>> Tensor(name="mlp.up_proj.weight", shape=(48, 32)).num_elements
    1536

Names are relative to the layer, so that layers of one kind are one object: what is added up over layers is added up
over kinds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from toolkit.models.kept import Counted

# transformers 5 names neither norms nor biases in the group that decays (`Trainer.get_decay_parameter_names`);
# `ln_` are GPT-2's, which it knows by their class.
NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_")
EXPERTS = re.compile(r"(?:^|\.)experts\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One trainable tensor, by its name within a layer, or in the model if it is outside the layers."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether the Trainer puts it into the group with weight decay."""
        return NOT_DECAYED.search(self.name.lower()) is None


Layer = tuple[Tensor, ...]


# Not slotted, so that sums over all tensors are made once; equal only to itself, so that what is kept for a shape is
# found without a look at each of its tensors.
@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """What a plan has to know of a causal language model."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of a dense layer's MLP; in a mixture of experts, of one expert."""
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gated_mlp: bool
    tied_embeddings: bool
    num_experts: int | None = None
    experts_per_token: int | None = None
    layers: tuple[Layer, ...]
    """The tensors of each decoder layer."""
    outer: Layer
    """Embeddings, final norm and head, in the model's order; a tied head is there once, as the embedding."""
    attention: str = "sdpa"
    """transformers' default implementation for it: `sdpa`, or `eager`, which keeps the scores."""
    activation: str = "silu"
    """Of the MLP, as the configuration names it."""
    counted_on: str = "arithmetic"
    """`arithmetic`, or `meta device`: built by transformers without memory."""
    kept: Counted | None = None
    """What its forward keeps, where that was counted; None: the plan's formulas."""
    why_not_kept: str | None = None
    """Where neither is known: the formulas are then Llama's."""
    sliding_window: int | None = None
    """Rows of this length and longer need a mask."""
    num_sliding_layers: int = 0
    dropout: bool = False
    """Whether the residual stream is trained with dropout."""

    @property
    def activations_from(self) -> str:
        """`formulas` of this architecture, `saved tensors` of it, or `llama`'s formulas for want of both."""
        if self.counted_on == "arithmetic":
            return "formulas"
        return "saved tensors" if self.kept is not None else "llama"

    @cached_property
    def layer_kinds(self) -> dict[Layer, int]:
        """Each kind of layer with the number of layers of it."""
        return dict(Counter(self.layers))

    @cached_property
    def num_params(self) -> int:
        """Elements of all tensors."""
        return self.num_layer_params + _elements(self.outer)

    @cached_property
    def num_layer_params(self) -> int:
        """Elements of all layers."""
        return sum(_elements(layer) * count for layer, count in self.layer_kinds.items())

    @cached_property
    def num_active_params(self) -> int:
        """Elements that one token passes through: `experts_per_token` of `num_experts` in a mixture of experts."""
        if not self.num_experts or self.experts_per_token is None:
            return self.num_params
        experts = sum(
            tensor.num_elements * count
            for layer, count in self.layer_kinds.items()
            for tensor in layer
            if EXPERTS.search(tensor.name)
        )
        return self.num_params - experts + experts * self.experts_per_token // self.num_experts

    @cached_property
    def num_embedding_params(self) -> int:
        """Elements that tokens and positions are looked up in, a tied head's among them."""
        return sum(tensor.num_elements for tensor in self.outer if is_embedding(tensor))


def is_embedding(tensor: Tensor) -> bool:
    """Whether rows of it are looked up, by the names that transformers gives such tensors."""
    return any(word in tensor.name for word in ("embed", "wte", "wpe"))


def _elements(layer: Layer) -> int:
    return sum(tensor.num_elements for tensor in layer)
