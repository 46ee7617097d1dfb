"""The tensors of a job: what is trained, what is frozen, and how it is stored."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from toolkit.models.lora import ALL_LINEAR, lora_layer, magnitudes, outer_lora, rotations
from toolkit.models.nf4 import constant_bytes, packed_layer, packed_layer_8bit
from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.models.vision_tower import is_of_images

FP32_BYTES = 4
FP32_BITS = 32
TensorCounts = tuple[tuple[Tensor, int], ...]  # tensors with the number of times that the model has each


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedBase:
    """How a frozen base is quantized, where it is not NF4 as the toolkit stores it; 32 bits: held in fp32."""

    bits: int = 4
    double_quantization: bool = True
    upcast_rest: bool = False  # what is not quantized is held in fp32
    experts: bool = True  # fused experts are quantized like linear layers
    shards: bool = True
    """4-bit weights are stored in a floating dtype; accelerate leaves those in uint8 out of FSDP2's sharding."""


@dataclass(frozen=True, kw_only=True, eq=False)  # `job_weights` returns the same object for the same job
class JobWeights:
    """The tensors of a job, trained and frozen. Sums run over kinds of layers, not over layers."""

    shape: ModelShape
    stored: Mapping[Layer, Layer]
    """Each kind of layer of the base model as it is stored: 4-bit weights packed into numbers of the compute dtype."""
    adapters: Mapping[Layer, Layer] | None = None  # LoRA tensors of each kind of layer; None for a full fine-tune
    outer_adapters: Layer = ()
    in_4bit: TensorCounts = ()  # weights that bitsandbytes quantizes, before they are packed; also those of 8 bits
    base: QuantizedBase | None = None
    frozen_tower: bool = False  # the encoder of images and its projector are not trained

    @cached_property
    def trained(self) -> TensorCounts:
        """Tensors that have gradients."""
        if self.adapters is None:
            return self._counted(self.stored, self.trained_outer)
        return self._counted(self.adapters, self.outer_adapters)

    @cached_property
    def frozen(self) -> TensorCounts:
        """Tensors without gradients, as they are stored."""
        if self.adapters is not None:
            return self._counted(self.stored, self.shape.outer)
        return tuple((tensor, 1) for tensor in self.shape.outer if self.frozen_tower and is_of_images(tensor))

    @cached_property
    def trained_outer(self) -> Layer:
        """Tensors outside the decoder layers that a full fine-tune trains."""
        return tuple(tensor for tensor in self.shape.outer if not (self.frozen_tower and is_of_images(tensor)))

    @cached_property
    def trains_tower(self) -> bool:
        """True if the encoder of images has gradients, its own or those of its adapters."""
        return any(is_of_images(tensor) for tensor, _ in self.trained)

    def _counted(self, kinds: Mapping[Layer, Layer], outer: Layer) -> TensorCounts:
        counted = ((tensor, count) for kind, count in self.shape.layer_kinds.items() for tensor in kinds[kind])
        return (*counted, *((tensor, 1) for tensor in outer))

    @cached_property
    def adapter_units(self) -> tuple[Layer, ...]:
        """LoRA tensors of each decoder layer, and then those outside of them; empty for a full fine-tune."""
        if self.adapters is None:
            return ()
        return (*(self.adapters[layer] for layer in self.shape.layers), self.outer_adapters)

    @cached_property
    def units(self) -> tuple[Layer, ...]:
        """Tensors of each decoder layer, and then those outside of them, as they are stored, LoRA's included."""
        base = (*(self.stored[layer] for layer in self.shape.layers), self.shape.outer)
        added = self.adapter_units or ((),) * len(base)
        return tuple(own + lora for own, lora in zip(base, added, strict=True))

    @cached_property
    def num_trained(self) -> int:
        """Elements that are trained."""
        return total(self.trained, elements_of)

    @cached_property
    def num_frozen(self) -> int:
        """Elements that are frozen, as they are stored."""
        return total(self.frozen, elements_of)

    @cached_property
    def constant_bytes(self) -> int:
        """Bytes that no engine shards: constants that decode quantized weights, and 4-bit weights stored as uint8."""
        if self.base is not None and self.base.bits == 8:
            return total(self.in_4bit, lambda tensor: FP32_BYTES * tensor.shape[0])
        base = self.base or QuantizedBase()
        whole = 0 if base.shards else total(self.in_4bit, lambda tensor: -(-tensor.num_elements // 2))
        return whole + total(
            self.in_4bit, lambda tensor: constant_bytes(tensor, double_quantization=base.double_quantization)
        )

    @cached_property
    def num_upcast(self) -> int:
        """Elements that are frozen, not quantized, and held in fp32: all, or `prepare_model_for_kbit_training`'s."""
        if self.base is not None and self.base.bits == FP32_BITS:
            return self.num_frozen
        if self.base is None or not self.base.upcast_rest:
            return 0
        packed = {tensor.name for tensor, _ in self.in_4bit}
        kinds = self.shape.layer_kinds.items()
        in_layers = sum(t.num_elements * n for kind, n in kinds for t in kind if t.name not in packed)
        return in_layers + sum(tensor.num_elements for tensor in self.shape.outer)

    def held_bytes(self, element_bytes: int, trained_bytes: int = FP32_BYTES) -> int:
        """Return the bytes of a whole copy: trained weights in fp32, frozen ones in the compute dtype or quantized."""
        upcast = (FP32_BYTES - element_bytes) * self.num_upcast
        return trained_bytes * self.num_trained + element_bytes * self.num_frozen + self.constant_bytes + upcast

    def groups(self, share: Callable[[Tensor], int]) -> tuple[int, int]:
        """Return the elements that a rank holds of each parameter group of the Trainer, with and without weight decay.

        It holds `share` of each tensor.
        """
        decayed = total(self.trained, lambda tensor: share(tensor) if tensor.has_weight_decay else 0)
        return decayed, total(self.trained, share) - decayed

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest trained tensor."""
        return max((tensor.num_elements for tensor, _ in self.trained), default=0)  # 0: of targets that no layer has

    @cached_property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max([self.largest_trained, *(tensor.num_elements for tensor, _ in self.frozen)])

    @cached_property
    def largest_in_layer(self) -> int:
        """Elements of the largest tensor of a layer, without adapters."""
        return max(tensor.num_elements for kind in self.stored.values() for tensor in kind)

    @cached_property
    def largest_linear(self) -> int:
        """Elements of the largest weight of a linear layer."""
        return max(tensor.num_elements for kind in self.shape.layer_kinds for tensor in kind if tensor.is_linear_weight)

    @cached_property
    def decoded_at_once(self) -> int:
        """Elements of 4-bit weights that are decoded at a time: one linear layer's, or those of a layer's experts."""
        kinds = self.shape.layer_kinds
        experts = (sum(tensor.num_elements for tensor in kind if tensor.is_fused_experts) for kind in kinds)
        return max(self.largest_linear, *experts)

    def largest_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the largest tensor as it is loaded."""
        frozen = [element_bytes * tensor.num_elements for tensor, _ in (*self.frozen, *self.in_4bit)]
        return max([*frozen, FP32_BYTES * self.largest_trained])

    def largest_layer(self, ranks_sharing: Callable[[Tensor], int] = lambda _: 1) -> int:
        """Return the elements of the largest layer, adapters included, as gathered from the ranks that share it.

        FSDP2 pads the rows of each tensor to a multiple of the ranks: 8 experts on 64 ranks take eight times the space.
        """

        def gathered(tensor: Tensor) -> int:
            return (ranks := ranks_sharing(tensor)) * rows_share(tensor.shape, ranks=ranks)

        adapters = (self.num_trained if self.adapters else 0) // max(self.shape.num_layers, 1)
        return max(sum(map(gathered, kind)) for kind in self.stored.values()) + adapters

    @cached_property
    def embedding(self) -> int:
        """Elements of the token embedding."""
        return next((tensor.num_elements for tensor in self.shape.outer if tensor.is_embedding), 0)


@lru_cache(maxsize=64)
def job_weights(
    shape: ModelShape,
    lora_r: int | None = None,
    load_in_4bit: bool = False,
    lora_target_modules: tuple[str, ...] = ALL_LINEAR,
    element_bytes: int = 2,
    base: QuantizedBase | None = None,
    frozen_tower: bool = False,
    dora: bool = False,
    oft_block_size: int = 0,
) -> JobWeights:
    """Return all tensors: trained, or frozen with trained adapters of rank `lora_r`; `base` says how it is quantized.

    `element_bytes` are those of the compute dtype, as which 4-bit weights are stored.
    """
    kinds = shape.layer_kinds
    if lora_r is None:
        return JobWeights(shape=shape, stored={kind: kind for kind in kinds}, frozen_tower=frozen_tower)
    in_8bit, form = base is not None and base.bits == 8, base or QuantizedBase()
    outer = outer_lora(shape, lora_r, lora_target_modules)
    tensors = [(tensor, count) for kind, count in kinds.items() for tensor in kind]
    linear_alone = in_8bit or not form.experts
    quantized = [(t, n) for t, n in tensors if (t.is_linear_weight if linear_alone else t.is_quantized)]

    def packed(kind: Layer) -> Layer:
        if in_8bit:
            return packed_layer_8bit(kind, element_bytes=element_bytes)
        if not form.shards:
            kind = tuple(t for t in kind if not (t.is_linear_weight if linear_alone else t.is_quantized))
        return packed_layer(kind, element_bytes=element_bytes, experts=form.experts)

    def adapters(of_lora: Layer) -> Layer:
        if oft_block_size:
            return rotations(of_lora, oft_block_size)
        return of_lora + magnitudes(of_lora) if dora else of_lora

    load_in_4bit |= in_8bit
    return JobWeights(
        shape=shape,
        base=base,
        stored={kind: packed(kind) if load_in_4bit else kind for kind in kinds},
        adapters={kind: adapters(lora_layer(shape, kind, lora_r, lora_target_modules)) for kind in kinds},
        outer_adapters=tuple(tensor for tensor in adapters(outer) if not (frozen_tower and is_of_images(tensor))),
        in_4bit=tuple(quantized) if load_in_4bit else (),
    )


def rows_share(shape: tuple[int, ...], *, ranks: int, rank: int = 0) -> int:
    """Return the elements of a tensor that a rank holds under FSDP2: ceil(d/N) rows on the first ranks, then fewer."""
    rows = shape[0] if shape else 1
    each = -(-rows // ranks)
    return min(each, max(0, rows - rank * each)) * (math.prod(shape) // max(rows, 1))


def total(tensors: TensorCounts, size: Callable[[Tensor], int]) -> int:
    """Return the sum of a size over all tensors."""
    return sum(size(tensor) * count for tensor, count in tensors)


def elements_of(tensor: Tensor) -> int:
    return tensor.num_elements
