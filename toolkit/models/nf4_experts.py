"""Fused experts of a mixture in 4 bits: transformers 5 holds them in one parameter, which bitsandbytes leaves as it is.

    model = load_with_experts_in_4_bits(lambda: AutoModelForCausalLM.from_pretrained(name, quantization_config=...))
    model = get_peft_model(model, ...)
    decode_experts_when_used(model)

Each is quantized as it is loaded, like the weight of a linear layer, and decoded while its layer runs. Until adapters
are added a stand-in of the weight's shape and one element takes its place, since peft looks at shapes; then there is no
parameter of that name between forwards. It is no parametrization of torch: peft 0.21 passes over parametrized weights
without a word. Autograd would keep the decoded weights of all layers until the backward: what it saves here is the
place in the packed weight, which the backward decodes again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from toolkit.models.nf4 import NF4_BLOCK
from toolkit.models.shape import EXPERTS


def load_with_experts_in_4_bits(load: Callable[[], Any]) -> Any:
    """Return what `load` loads under bitsandbytes' configuration, with its fused experts in 4 bits too."""
    needs, convert = Bnb4BitHfQuantizer.param_needs_quantization, Bnb4bitQuantize.convert

    def param_needs_quantization(self: Any, model: Any, param_name: str, **kwargs: Any) -> bool:
        return needs(self, model, param_name, **kwargs) or _is_fused(model, param_name)

    def convert_experts(self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        config, model = self.hf_quantizer.quantization_config, kwargs["model"]
        fused = {name: values for name, values in input_dict.items() if _is_fused(model, name)}
        rest = {name: values for name, values in input_dict.items() if name not in fused}
        return (convert(self, rest, *args, **kwargs) if rest else {}) | {
            name: _quantized(values[0] if isinstance(values, list) else values, config)
            for name, values in fused.items()
        }

    with (
        patch.object(Bnb4BitHfQuantizer, "param_needs_quantization", param_needs_quantization),
        patch.object(Bnb4bitQuantize, "convert", convert_experts),
    ):
        model = load()
    return model


def fused_experts(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield each module of fused experts with the name of a weight that is not decoded when it is used yet."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3 and EXPERTS.search(f"{path}.{name}"):
                yield module, name


def _is_fused(model: Any, name: str) -> bool:
    return EXPERTS.search(name) is not None and model.get_parameter_or_buffer(name).dim() == 3


def _quantized(weight: torch.Tensor, config: Any) -> torch.nn.Parameter:
    packed, state = quantize_4bit(
        weight.contiguous(),
        blocksize=NF4_BLOCK,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=config.bnb_4bit_quant_storage,
    )
    return stand_in(packed, state)


def stand_in(packed: torch.Tensor, state: QuantState) -> torch.nn.Parameter:
    """Return a parameter of the decoded weight's shape, which carries the packed weight and takes no memory itself."""
    empty = torch.empty(1, dtype=state.dtype, device=packed.device).expand(state.shape)
    parameter = torch.nn.Parameter(empty, requires_grad=False)
    parameter.packed, parameter.quant_state = packed, state
    return parameter


class PackedExperts(torch.nn.Module):  # type: ignore[misc]
    """One packed weight, as a module that engines gather; `weight` and `quant_state` as on bitsandbytes' layers."""

    only_decodes = True  # its forward in the backward is no activation checkpointing

    def __init__(self, packed: torch.Tensor, state: QuantState) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.weight.quant_state = self.quant_state = state

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def forward(self) -> torch.Tensor:
        weight: torch.Tensor = dequantize_4bit(self.weight, self.quant_state)
        return weight


def decode_experts_when_used(model: Any) -> None:
    """Put packed experts in the place of their stand-ins; adapters, if any, have been added."""
    packed: dict[Any, dict[str, PackedExperts]] = {}
    for module, name in list(fused_experts(model)):
        whole = module._parameters[name]
        if hasattr(whole, "packed"):
            del module._parameters[name]
            added = PackedExperts(whole.packed, whole.quant_state)
            module.add_module(f"packed_{name}", added)
            packed.setdefault(module, {})[name] = added
    for module in model.modules():  # a wrapper comes before what it wraps: peft's run before the layer itself
        layer = module
        while hasattr(layer, "base_layer"):
            layer = layer.base_layer
        if layer in packed:
            module.forward = _decoding(module.forward, layer, packed.pop(layer))


def _decoding(forward: Callable[..., Any], layer: Any, packed: dict[str, PackedExperts]) -> Callable[..., Any]:
    """A forward in which the layer has its decoded weights, none of which are saved for the backward."""

    @functools.wraps(forward)
    def decoding(*args: Any, **kwargs: Any) -> Any:
        weights = {name: each() for name, each in packed.items()}
        addresses = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}

        def pack(tensor: torch.Tensor) -> Any:
            name = addresses.get(tensor.untyped_storage().data_ptr())
            return tensor if name is None else (name, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            name, *view = saved
            return packed[name]().as_strided(*view)

        # Activation checkpointing saves nothing already, and only the innermost of two such hooks is called.
        is_free = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        saves = torch.autograd.graph.saved_tensors_hooks(pack, unpack) if is_free else contextlib.nullcontext()
        for name, weight in weights.items():
            layer._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
        del weights
        try:
            with saves:
                return forward(*args, **kwargs)
        finally:
            addresses.clear()
            for name in packed:
                del layer._parameters[name]

    return decoding
