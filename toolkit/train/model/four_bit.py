"""The 4-bit base model of QLoRA, held so that FSDP2 and ZeRO-3 shard it like any other weight.

bitsandbytes packs a weight into a tensor of one column and keeps the constants that decode it beside it, on its module.
Packed as uint8 neither engine shards it; packed as the compute dtype both do, and the constants stay whole on each
rank (a 32nd of the weights' bytes). The libraries leave three things to do here:

- transformers 5.23 loads a quantized model on every rank's GPU (peft#2016). Here rank 0 reads and quantizes it, weight
  by weight on its GPU, into host memory; both engines broadcast from rank 0 when they shard.
- FSDP2 makes plain parameters, and accelerate 1.15 does not broadcast bitsandbytes' own class (accelerate#3983,
  bitsandbytes#1945): 4-bit weights are plain from the start, and `Linear4bit.forward` finds the constants.
- DeepSpeed 0.19.8 moves a model that is not sharded yet to the GPU as a whole; `zero.Init` shards it before.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState
from bitsandbytes.functional import QuantState
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from transformers import PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils import logging

from toolkit.engines.fsdp2 import uses_fsdp
from toolkit.engines.tensors import constants, quantized_modules
from toolkit.engines.zero_process import shard_loaded, shards_while_loading
from toolkit.models.nf4 import NF4_BLOCK, NF4_SECOND_BLOCK, NF4_SECOND_TABLE, NF4_TABLE, QUANT_TYPE
from toolkit.models.nf4_experts import fused_experts, stand_in


def load_for_shards(load: Callable[[], Any]) -> Any:
    """Return what `load` loads, in host memory: quantized weights on rank 0, elsewhere memory that nobody touches."""
    # Rank 0 reads, and where FSDP2 was told not to broadcast (`fsdp_cpu_ram_efficient_loading: false`) every rank.
    alone = not dist.is_initialized() or dist.get_rank() == 0
    broadcasts = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() in ("true", "1")
    reads = alone or (uses_fsdp() and not broadcasts)
    verbosity = logging.get_verbosity()
    with patch.object(Bnb4BitHfQuantizer, "update_device_map", lambda *_: {"": "cpu"}):
        if reads:
            with patch.object(Bnb4bitQuantize, "convert", _convert_on_device()):
                return load()
        logging.set_verbosity_error()  # no report on weights that are missing on purpose
        with patch.multiple(PreTrainedModel, **_without_weights()):
            model = load()
    logging.set_verbosity(verbosity)
    for module in _linear_4bit_modules(model):
        packed, state = _expected_from_rank_0(module.weight, module.quant_storage)
        given = {"quant_state": state, "quant_storage": packed.dtype, "module": module, "bnb_quantized": True}
        module.weight = Params4bit(packed, blocksize=NF4_BLOCK, quant_type=QUANT_TYPE, **given)
    for module, name in list(fused_experts(model)):
        storage = model.hf_quantizer.quantization_config.bnb_4bit_quant_storage
        setattr(module, name, stand_in(*_expected_from_rank_0(getattr(module, name), storage)))
    return model


def _convert_on_device() -> Callable[..., dict[str, Any]]:
    """Quantize each weight on this rank's GPU, and put the result into host memory."""
    convert, device = Bnb4bitQuantize.convert, PartialState().device

    def convert_on_device(self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        moved = {
            name: [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
            for name, value in input_dict.items()
        }
        return {name: _on_cpu(value) for name, value in convert(self, moved, *args, **kwargs).items()}

    return convert_on_device


def _on_cpu(value: Any) -> Any:
    if not hasattr(value, "packed"):
        return value.to("cpu")
    return stand_in(value.packed.to("cpu"), value.quant_state)


def _without_weights() -> dict[str, Any]:
    """Read and initialize no weights, as transformers does under FSDP without quantization; buffers are computed."""
    load = PreTrainedModel._load_pretrained_model

    def load_none(model: Any, _state_dict: Any, _checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        return load(model, {}, None, *args, **kwargs)

    def initialize_buffers(self: Any, *_: Any, **__: Any) -> None:
        for parameter in self.parameters():
            parameter._is_hf_initialized = True
        self.initialize_weights()

    return {"_load_pretrained_model": staticmethod(load_none), "_initialize_missing_keys": initialize_buffers}


def make_shardable(model: Any) -> None:
    """Give 4-bit weights, adapters already added, the form that the engine shards; every rank must call it."""
    linear = _linear_4bit_modules(model)
    for module in linear:
        module.quant_state = module.weight.quant_state
    for module in quantized_modules(model):
        module.quant_state.to(PartialState().device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for tensor in constants(module.quant_state):
                dist.broadcast(tensor, 0)
    if uses_fsdp():
        for module in linear:
            packed = module.weight.data.as_subclass(torch.Tensor)
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
    if shards_while_loading():
        shard_loaded(model)


def _expected_from_rank_0(weight: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, QuantState]:
    """An empty weight of the packed size in place of one that was not read, with constants of zero."""
    size = weight.numel()
    blocks = -(-size // NF4_BLOCK)
    absmax, code = torch.zeros(-(-blocks // NF4_SECOND_BLOCK)), torch.zeros(NF4_SECOND_TABLE)
    second = QuantState(absmax=absmax, code=code, blocksize=NF4_SECOND_BLOCK, dtype=torch.float32)
    kind = {"blocksize": NF4_BLOCK, "quant_type": QUANT_TYPE}
    absmax, code, offset = torch.zeros(blocks, dtype=torch.uint8), torch.zeros(NF4_TABLE), torch.zeros(())
    state = QuantState(
        absmax=absmax, shape=weight.shape, code=code, dtype=weight.dtype, offset=offset, state2=second, **kind
    )
    return torch.empty(-(-size // (2 * storage.itemsize)), 1, dtype=storage), state


def _linear_4bit_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Linear4bit)]
