"""The tensors that LoRA adds to each layer: `all-linear`, as peft reads it.

    >>> [tensor.shape for tensor in adapters_of(Tensor(name="mlp.up_proj.weight", shape=(48, 32)), rank=8)]
    [(8, 32), (48, 8)]

The head gets none, nor what is no linear layer: routers and the fused experts of a mixture (peft 0.21, transformers 5).
"""

from __future__ import annotations

from toolkit.models.shape import Layer, ModelShape, Tensor

# GPT-2's layers keep their weight as (in, out).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
ROUTER = "mlp.gate.weight"


def lora_layers(shape: ModelShape, rank: int) -> tuple[Layer, ...]:
    """Each layer's adapters, one object a kind of layer."""
    kinds = {
        kind: tuple(part for tensor in kind for part in adapters_of(tensor, rank=rank)) for kind in shape.layer_kinds
    }
    return tuple(kinds[layer] for layer in shape.layers)


def adapters_of(tensor: Tensor, *, rank: int) -> Layer:
    """A and B of a linear layer's weight; nothing for any other tensor."""
    if not is_linear(tensor):
        return ()
    rows, columns = tensor.shape[::-1] if tensor.name in TRANSPOSED else tensor.shape
    name = tensor.name.removesuffix(".weight")
    return (
        Tensor(name=f"{name}.lora_A.default.weight", shape=(rank, columns)),
        Tensor(name=f"{name}.lora_B.default.weight", shape=(rows, rank)),
    )


def is_linear(tensor: Tensor) -> bool:
    """Whether a layer's tensor is the weight of a linear layer."""
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight") and tensor.name != ROUTER
