"""Tensors that LoRA adds to a model, as peft 0.21 chooses them under transformers 5.

With `all-linear`, all linear layers but the head have adapters. transformers 5 fuses the experts of a mixture into one
parameter, and for some architectures (`renamed_targets`) peft adapts that parameter and the router: each expert has its
own A and B, of twice the rank on gate and up projections (two tensors in older checkpoints), and dense MLP layers have
none. For architectures with formulas, the adapters are worked out here; for all others peft itself lists them
(`toolkit.models.count_from_transformers`). Other target modules choose among the adapters of `all-linear`.

`tests/models/test_lora.py` compares all of it with the adapters that peft makes.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.shape import ROUTER, Adapter, Adapters, Layer, ModelShape, Tensor

ALL_LINEAR = ("all-linear",)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""GPT-2 stores the weights of linear layers as (in, out)."""
# peft 0.21, `utils/transformers_weight_conversion.py`, `_MOE_TARGET_MODULE_MAPPING`: it has no entry for Qwen2-MoE.
RENAMED_TARGETS: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen3_moe": dict(gate="gate.weight", gate_proj="gate_up_proj", up_proj="gate_up_proj", down_proj="down_proj"),
}


def adapts_experts(shape: ModelShape) -> bool:
    """Return True if peft adapts fused experts and their router, and leaves out dense MLP layers."""
    return bool(_renamed_targets(shape))


def lora_layer(shape: ModelShape, kind: Layer, rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> Layer:
    """Return the adapters of one kind of layer."""
    if shape.counted_adapters is not None:
        return _chosen(shape, shape.counted_adapters[kind], rank, targets)
    experts = adapts_experts(shape)
    return _chosen(shape, [adapter for each in kind for adapter in adapters_of(each, experts=experts)], rank, targets)


def magnitudes(adapters: Layer) -> Layer:
    """Return DoRA's magnitudes of these adapters: one number per output (peft 0.21, `DoraLinearLayer`)."""
    of_b = (tensor for tensor in adapters if ".lora_B." in tensor.name)
    return tuple(
        Tensor(name=tensor.name.replace("lora_B", "lora_magnitude_vector"), shape=tensor.shape[:1]) for tensor in of_b
    )


def dora_bytes(adapters: Layer) -> tuple[int, int]:
    """Return what DoRA saves of each token, and the most that it holds for the norms of one weight, in bf16.

    Saved are the output of the weight and that of the adapter, which its magnitude scales. For the norms each forward
    pass makes a unit matrix as wide as the input, the product of the adapter, this product scaled, and the sum with the
    weight: nothing of it is saved (peft 0.21, `DoraLinearLayer.forward`).
    """
    pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
    norms = (2 * a.shape[1] ** 2 + 6 * a.shape[1] * b.shape[0] for a, b in pairs)
    return 4 * sum(b.shape[0] for _, b in pairs), max(norms, default=0)


def rotations(adapters: Layer, block_size: int) -> Layer:
    """Return OFT's rotations at the places of these adapters: blocks of a skew-symmetric matrix (peft 0.21, `oft`).

    A block is adjusted to the nearest size that divides the layer's input (`OFTLayer.adjust_oft_parameters`).
    """
    found = []
    for tensor in (each for each in adapters if ".lora_A." in each.name):
        block = _nearest_divisor(tensor.shape[1], block_size)
        shape = (tensor.shape[1] // block, block * (block - 1) // 2)
        found.append(Tensor(name=tensor.name.replace("lora_A.default", "oft_R.default"), shape=shape))
    return tuple(found)


def _nearest_divisor(size: int, wanted: int) -> int:
    if wanted >= size:
        return size
    below = next(each for each in range(wanted, 0, -1) if size % each == 0)
    above = next(each for each in range(wanted, size + 1) if size % each == 0)
    return below if wanted - below <= above - wanted else above


def oft_fixed_bytes(rotations_of_layer: Layer, element_bytes: int) -> int:
    """Return what OFT saves of its rotations, whatever the batch.

    Of each block the skew-symmetric matrix, its square and cube, and their sum (five terms of a Neumann series), and
    the indices of its triangle in 64 bits. Autocast casts the first of them once for each of its four products.
    """
    total = 0
    for tensor in rotations_of_layer:
        count, triangle = tensor.shape
        block = (1 + math.isqrt(1 + 8 * triangle)) // 2
        total += count * block**2 * element_bytes + 16 * triangle
    return total


def check_adapted_modules(shape: ModelShape, targets: tuple[str, ...], *, method: str) -> None:
    """Raise ToolkitError for what peft adapts with LoRA alone: fused experts, and for OFT `Conv1D`."""
    if any(tensor.is_expert for kind in shape.layer_kinds for tensor in lora_layer(shape, kind, 1, targets)):
        what = f"{method} does not adapt the experts of {shape.model_type}: peft refuses parameters without a module"
        hint = "name the linear layers of attention: `--lora-target-modules q_proj --lora-target-modules v_proj`"
        raise ToolkitError(what, hint=hint)
    if method == "OFT" and any(tensor.name in TRANSPOSED for kind in shape.layer_kinds for tensor in kind):
        message = f"OFT does not adapt {shape.model_type}: peft rotates inputs of `nn.Linear`, and not of `Conv1D`"
        raise ToolkitError(message, hint="`--lora-r 16`")


def outer_lora(shape: ModelShape, rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> Layer:
    """Return the adapters outside the decoder layers."""
    return _chosen(shape, shape.outer_adapters, rank, targets)


def adapters_of(tensor: Tensor, *, experts: bool = False) -> Adapters:
    """Return the adapter of a linear layer's weight, and with `experts` of fused experts and their router.

    No other tensor has one.
    """
    if experts and len(tensor.shape) == 3:
        count, rows, columns = tensor.shape
        fused = 2 if tensor.name.endswith("gate_up_proj") else 1
        return (Adapter(target=tensor.name, rows=rows, columns=columns, rank_multiple=count * fused),)
    if experts and tensor.name == ROUTER:
        return (Adapter(target=tensor.name, rows=tensor.shape[0], columns=tensor.shape[1]),)
    if not tensor.is_linear_weight or (experts and tensor.name.startswith("mlp.")):
        return ()
    rows, columns = tensor.shape[::-1] if tensor.name in TRANSPOSED else tensor.shape
    return (Adapter(target=tensor.name.removesuffix(".weight"), rows=rows, columns=columns),)


def check_lora_targets(shape: ModelShape, targets: tuple[str, ...]) -> None:
    """Raise ToolkitError if peft cannot adapt the model, or not these modules, or modules that are not planned."""
    chosen = [tensor for kind in shape.layer_kinds for tensor in lora_layer(shape, kind, 1, targets)]
    if shape.why_no_adapters is not None and (targets == ALL_LINEAR or not chosen):
        others = {tensor.name.removesuffix(".lora_A.default.weight").rpartition(".")[2] for tensor in chosen[::2]}
        hint = " ".join(f"--lora-target-modules {name}" for name in sorted(others))
        message = f"peft cannot adapt the linear layers of {shape.model_type}: {shape.why_no_adapters}"
        raise ToolkitError(message, hint=f"it adapts the others: `{hint}`" if hint else None)
    if targets == ALL_LINEAR:
        return
    names = _parameter_names(shape, targets)
    modules = [tensor.name.removesuffix(".weight") for tensor in shape.outer] + ["lm_head"]
    adapted = {adapter.target for adapter in shape.outer_adapters}
    outside = [name for name in modules if _matches(name, targets) and name not in adapted]
    if outside:
        raise ToolkitError(f"LoRA on {outside[0]} is not planned: only linear layers of decoder layers are")
    if not chosen:
        linear = (tensor.name for kind in shape.layer_kinds for tensor in kind if tensor.is_linear_weight)
        known = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in linear})
        what = f"no linear layer of {shape.model_type} is named {', '.join(names)}"
        raise ToolkitError(what, hint=f"one of {', '.join(known)}")


def _chosen(shape: ModelShape, adapters: Iterable[Adapter], rank: int, targets: tuple[str, ...]) -> Layer:
    names = None if targets == ALL_LINEAR else _parameter_names(shape, targets)
    chosen = (adapter for adapter in adapters if names is None or _matches(adapter.target, names))
    return tuple(tensor for adapter in chosen for tensor in adapter.tensors(rank))


def _matches(name: str, targets: Collection[str]) -> bool:
    """True if a target is the end of a name, in complete words between dots, as peft matches."""
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _parameter_names(shape: ModelShape, targets: tuple[str, ...]) -> list[str]:
    renamed = _renamed_targets(shape)
    old_names = {target: next((old for old in renamed if _matches(target, (old,))), None) for target in targets}
    given = {old for old in old_names.values() if old is not None}
    for old in sorted(given):
        missing = {other for other in renamed if renamed[other] == renamed[old]} - given
        if missing:
            raise ToolkitError(
                f"LoRA on {old} needs {' and '.join(sorted(missing))} too: {shape.model_type} has both in one tensor"
            )
    return sorted({target if old is None else renamed[old] for target, old in old_names.items()})


def _renamed_targets(shape: ModelShape) -> Mapping[str, str]:
    return RENAMED_TARGETS.get(shape.model_type, {}) if shape.counted_adapters is None else shape.renamed_targets


def share_inputs(model: Any) -> None:
    """Let adapters read a layer's input as it is, for training under autocast.

    peft casts each input to the adapter's fp32 first, and autocast casts it back: every adapted layer would save its
    own copy of an input that several layers share. The value is the same.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
