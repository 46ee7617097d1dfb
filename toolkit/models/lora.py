"""Tensors that LoRA adds to each layer with `target_modules="all-linear"`, as peft 0.21 interprets it.

    >>> [tensor.shape for tensor in adapters_of(Tensor(name="mlp.up_proj.weight", shape=(48, 32)), rank=8)]
    [(8, 32), (48, 8)]

The head has no adapter. In `MODELS_WITH_ADAPTED_EXPERTS`, peft adapts the fused experts and the router, with twice the
rank on the fused gate and up projections (two tensors in older checkpoints), and then leaves out dense MLP layers.
"""

from __future__ import annotations

from toolkit.models.shape import ROUTER, Layer, ModelShape, Tensor

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""GPT-2 stores the weights of linear layers as (in, out)."""
MODELS_WITH_ADAPTED_EXPERTS = ("mixtral", "qwen3_moe")


def lora_layers(shape: ModelShape, rank: int) -> tuple[Layer, ...]:
    """Return the adapters of each layer; identical layers share one object."""
    kinds = {kind: lora_layer(shape, kind, rank) for kind in shape.layer_kinds}
    return tuple(kinds[layer] for layer in shape.layers)


def lora_layer(shape: ModelShape, kind: Layer, rank: int) -> Layer:
    """Return the adapters of one kind of layer."""
    experts = shape.model_type in MODELS_WITH_ADAPTED_EXPERTS
    return tuple(part for tensor in kind for part in adapters_of(tensor, rank=rank, experts=experts))


def adapters_of(tensor: Tensor, *, rank: int, experts: bool = False) -> Layer:
    """Return A and B for the weight of a linear layer, and with `experts` for fused experts and their router.

    No adapter is added to any other tensor.
    """
    name = tensor.name.removesuffix(".weight")
    if experts and len(tensor.shape) == 3:
        count, rows, columns = tensor.shape
        return _pair(name, rows, columns, count * rank * (2 if name.endswith("gate_up_proj") else 1))
    dense = experts and tensor.name.startswith("mlp.") and tensor.name != ROUTER
    if dense or not (tensor.is_linear_weight or (experts and tensor.name == ROUTER)):
        return ()
    rows, columns = tensor.shape[::-1] if tensor.name in TRANSPOSED else tensor.shape
    return _pair(name, rows, columns, rank)


def _pair(name: str, rows: int, columns: int, rank: int) -> Layer:
    return (
        Tensor(name=f"{name}.lora_A.default.weight", shape=(rank, columns)),
        Tensor(name=f"{name}.lora_B.default.weight", shape=(rows, rank)),
    )
