"""The tensors that LoRA adds to each layer: `all-linear`, as peft reads it.

    >>> [tensor.shape for tensor in adapters_of(Tensor(name="mlp.up_proj.weight", shape=(48, 32)), rank=8)]
    [(8, 32), (48, 8)]

The head gets none. Of a mixture, peft 0.21 adapts the fused experts and the router where it knows how a checkpoint of
old was fused: twice the rank on gate and up, which were two tensors, and then nothing on dense layers of those names.
"""

from __future__ import annotations

from toolkit.models.shape import Layer, ModelShape, Tensor

# GPT-2's layers keep their weight as (in, out).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
ROUTER = "mlp.gate.weight"
EXPERTS_ADAPTED = ("mixtral", "qwen3_moe")


def lora_layers(shape: ModelShape, rank: int) -> tuple[Layer, ...]:
    """Each layer's adapters, one object a kind of layer."""
    kinds = {kind: lora_layer(shape, kind, rank) for kind in shape.layer_kinds}
    return tuple(kinds[layer] for layer in shape.layers)


def lora_layer(shape: ModelShape, kind: Layer, rank: int) -> Layer:
    """The adapters of one layer."""
    experts = shape.model_type in EXPERTS_ADAPTED
    return tuple(part for tensor in kind for part in adapters_of(tensor, rank=rank, experts=experts))


def adapters_of(tensor: Tensor, *, rank: int, experts: bool = False) -> Layer:
    """A and B of a linear layer's weight, and of fused experts and their router if so; nothing for any other tensor."""
    name = tensor.name.removesuffix(".weight")
    if experts and len(tensor.shape) == 3:
        count, rows, columns = tensor.shape
        return _pair(name, rows, columns, count * rank * (2 if name.endswith("gate_up_proj") else 1))
    dense = experts and tensor.name.startswith("mlp.") and tensor.name != ROUTER
    if dense or not (is_linear(tensor) or (experts and tensor.name == ROUTER)):
        return ()
    rows, columns = tensor.shape[::-1] if tensor.name in TRANSPOSED else tensor.shape
    return _pair(name, rows, columns, rank)


def _pair(name: str, rows: int, columns: int, rank: int) -> Layer:
    return (
        Tensor(name=f"{name}.lora_A.default.weight", shape=(rank, columns)),
        Tensor(name=f"{name}.lora_B.default.weight", shape=(rows, rank)),
    )


def is_linear(tensor: Tensor) -> bool:
    """Whether a layer's tensor is the weight of a linear layer."""
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight") and tensor.name != ROUTER
