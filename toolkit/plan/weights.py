"""The tensors of a job by what happens to them: trained or frozen, and in which unit they are gathered.

>>> weights_of(shape, Job(lora_r=8)).num_trained
1703936

Sums are over kinds of layers, so that a plan costs the same for 2 layers and for 200.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from toolkit.models.lora import is_linear, lora_layer
from toolkit.models.shape import Layer, ModelShape, Tensor, is_embedding
from toolkit.plan.job import Job
from toolkit.presets.sizes import rows_share

# NF4 with its constants quantised again: half a byte, 8 bits a block of 64, 32 bits a block of 64 · 256
# (QLoRA, https://arxiv.org/abs/2305.14314, section 3). bitsandbytes 0.50.2 keeps with each weight its two tables, of 16
# and 256 fp32 numbers, and the constants' mean (`functional.py`, `quantize_4bit`, `quantize_blockwise`).
NF4_BLOCK, NF4_SECOND_BLOCK = 64, 256
NF4_TABLES_BYTES = 4 * (16 + 256 + 1)
Counted = tuple[tuple[Tensor, int], ...]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Every tensor with the number of times that the model has it."""

    shape: ModelShape
    trained: Counted
    frozen: Counted
    quantized: bool

    @cached_property
    def num_trained(self) -> int:
        """Elements that are trained."""
        return total(self.trained, _elements)

    @cached_property
    def num_frozen(self) -> int:
        """Elements that are not."""
        return total(self.frozen, _elements)

    @cached_property
    def in_4bit(self) -> Counted:
        """Weights that bitsandbytes packs: of linear layers, but neither the head nor a mixture's fused experts."""
        kinds = self.shape.layer_kinds.items() if self.quantized else ()
        return tuple((tensor, count) for kind, count in kinds for tensor in kind if is_linear(tensor))

    @cached_property
    def num_quantized(self) -> int:
        """Frozen elements that are kept in 4 bits."""
        return total(self.in_4bit, _elements)

    @cached_property
    def quantized_bytes(self) -> int:
        """Of the 4-bit weights and their constants."""
        return total(self.in_4bit, _nf4_bytes)

    @cached_property
    def groups(self) -> tuple[int, int]:
        """Trained elements with and without weight decay: the Trainer's two parameter groups."""
        decayed = total(self.trained, lambda tensor: tensor.num_elements if tensor.decays else 0)
        return decayed, self.num_trained - decayed

    @cached_property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(tensor.num_elements for tensor, _ in (*self.trained, *self.frozen))

    @cached_property
    def largest_linear(self) -> int:
        """Elements of the largest weight of a linear layer."""
        return max(tensor.num_elements for kind in self.shape.layer_kinds for tensor in kind if is_linear(tensor))

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest tensor that is trained."""
        return max(tensor.num_elements for tensor, _ in self.trained)

    @cached_property
    def largest_layer(self) -> int:
        """Elements of the largest layer, adapters included: what FSDP2 gathers at once."""
        adapters = self.num_adapters // max(self.shape.num_layers, 1)
        return max(sum(map(_elements, kind)) for kind in self.shape.layer_kinds) + adapters

    def gathered_layer(self, ranks: int) -> int:
        """The same as it is gathered over so many ranks: each tensor's rows padded to a multiple of them, which makes
        8 experts on 64 ranks eight times as large."""
        padded = (
            sum(ranks * rows_share(tensor.shape, ranks=ranks, rank=0) for tensor in kind)
            for kind in self.shape.layer_kinds
        )
        return max(padded) + self.num_adapters // max(self.shape.num_layers, 1)

    @cached_property
    def num_adapters(self) -> int:
        """Elements of LoRA's tensors."""
        return self.num_trained if self.frozen else 0

    @cached_property
    def embedding(self) -> int:
        """Elements of the tokens' embedding."""
        return next((tensor.num_elements for tensor in self.shape.outer if is_embedding(tensor)), 0)

    @cached_property
    def tail(self) -> int:
        """Elements that accelerate's FSDP2 keeps gathered from forward to backward: final norm and head."""
        embeddings = [tensor for tensor in self.shape.outer if is_embedding(tensor)]
        own_unit = 0 if self.shape.tied_embeddings or not embeddings else embeddings[0].num_elements
        return sum(map(_elements, self.shape.outer)) - own_unit


@lru_cache(maxsize=64)
def weights_of(shape: ModelShape, lora_r: int | None, quantized: bool) -> Weights:
    """All tensors are trained, or only the adapters of `lora_r`."""
    base = _counted(shape.layer_kinds, shape.outer)
    if lora_r is None:
        return Weights(shape=shape, trained=base, frozen=(), quantized=False)
    adapters: Counter[Layer] = Counter()
    for kind, count in shape.layer_kinds.items():
        adapters[lora_layer(shape, kind, lora_r)] += count
    return Weights(shape=shape, trained=_counted(adapters, ()), frozen=base, quantized=quantized)


def job_weights(shape: ModelShape, job: Job) -> Weights:
    """The tensors of a job."""
    return weights_of(shape, job.lora_r, job.load_in_4bit)


def total(tensors: Counted, size: Callable[[Tensor], int]) -> int:
    """The sum of a size over tensors, each as often as it is there."""
    return sum(size(tensor) * count for tensor, count in tensors)


def _counted(kinds: dict[Layer, int], outer: Layer) -> Counted:
    return (*((tensor, count) for kind, count in kinds.items() for tensor in kind), *((tensor, 1) for tensor in outer))


def _elements(tensor: Tensor) -> int:
    return tensor.num_elements


def _nf4_bytes(tensor: Tensor) -> int:
    blocks = -(-tensor.num_elements // NF4_BLOCK)
    return -(-tensor.num_elements // 2) + blocks + 4 * -(-blocks // NF4_SECOND_BLOCK) + NF4_TABLES_BYTES
