"""4-bit weights (NF4 with double quantisation) as bitsandbytes 0.50.2 stores them: packed tensors and their constants.

QLoRA, Dettmers et al., https://arxiv.org/abs/2305.14314, section 3.

The packed tensors are sharded and gathered like others; the constants are whole on every rank.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.models.shape import Layer, Tensor

# Half a byte per element, 8 bits per block of 64, 32 bits per block of 64 · 256. With each weight, bitsandbytes also
# stores two tables of 16 and 256 fp32 numbers and the mean of the constants (`functional.py`, `quantize_4bit`,
# `quantize_blockwise`).
NF4_BLOCK, NF4_SECOND_BLOCK = 64, 256
NF4_TABLE, NF4_SECOND_TABLE = 16, 256
NF4_TABLES_BYTES = 4 * (NF4_TABLE + NF4_SECOND_TABLE + 1)
QUANT_TYPE = "nf4"
# How a 4-bit layer computes: its weight is decoded into the compute dtype, as in training; or, in evaluation on a CPU
# with AVX512-BF16, it is repacked and multiplied in bf16, whatever the compute dtype is.
DEQUANTIZED, PACKED_BF16 = "dequantized", "packed_bf16"


def quantization_config(compute_dtype: Any) -> Any:
    """Return transformers' configuration of a 4-bit base, packed into numbers of the compute dtype (torch's)."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=QUANT_TYPE,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype,
    )


def keep_packing(model: Any) -> None:
    """Keep bitsandbytes 0.50.2 from repacking weights at an evaluation on a CPU with AVX512-BF16.

    That layout has no backward, and the constants change with it (`Linear4bit.forward`).
    """
    for module in _4bit_modules(model):
        module.support_avx512bf16_for_cpu = False


@contextlib.contextmanager
def as_in_training(model: Any) -> Iterator[str | None]:
    """Let 4-bit layers compute in evaluation as they do in training, on every CPU; yield how they compute.

    Yields `dequantized`, or `packed_bf16` where an earlier evaluation has repacked the weights of a model that the
    toolkit did not load; None for a model without 4-bit layers.
    """
    modules = _4bit_modules(model)
    states = [getattr(module.weight, "quant_state", module.quant_state) for module in modules]
    packed = [getattr(state, "packing_format_for_cpu", False) for state in states]
    supported = [module.support_avx512bf16_for_cpu for module in modules]
    if not any(packed):
        keep_packing(model)
    try:
        yield None if not modules else PACKED_BF16 if any(packed) else DEQUANTIZED
    finally:
        for module, support in zip(modules, supported, strict=True):
            module.support_avx512bf16_for_cpu = support


def packed_layer(layer: Layer, *, element_bytes: int, experts: bool = True) -> Layer:
    """Return a decoder layer's tensors as they are stored: 4-bit ones in one column of elements of the compute dtype.

    Those are the weights of linear layers and, with `experts`, of fused experts: no norms, and no router.
    """

    def packed(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=(-(-tensor.num_elements // (2 * element_bytes)), 1), in_linear=False)

    return tuple(
        packed(tensor) if (tensor.is_quantized if experts else tensor.is_linear_weight) else tensor for tensor in layer
    )


def packed_layer_8bit(layer: Layer, *, element_bytes: int) -> Layer:
    """Return the same for 8 bits (`Linear8bitLt`), whose constants are one fp32 number per row.

    Fused experts are no linear layers, so that they stay as they are.
    """

    def packed(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=(-(-tensor.num_elements // element_bytes), 1), in_linear=False)

    return tuple(packed(tensor) if tensor.is_linear_weight else tensor for tensor in layer)


def constant_bytes(tensor: Tensor, *, double_quantization: bool = True) -> int:
    """Return the bytes of the constants that decode a 4-bit weight; `tensor` is the weight before it is packed."""
    blocks = -(-tensor.num_elements // NF4_BLOCK)
    if not double_quantization:
        return 4 * (blocks + NF4_TABLE)
    return blocks + 4 * -(-blocks // NF4_SECOND_BLOCK) + NF4_TABLES_BYTES


def _4bit_modules(model: Any) -> list[Any]:
    """bitsandbytes' `Linear4bit` layers, recognised without importing it."""
    return [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
