"""Count a model's tensors and activations as transformers builds it, without weights or memory.

    $ python -m toolkit.models.count_from_transformers config.json

Prints one line of JSON for `toolkit.models.read_model`, which imports no torch.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils import transformers_weight_conversion as conversion
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from toolkit.models.count_activations import RANKS, count_activations, decoder_layers

# Of processor time, so that the answer, which is cached, does not depend on how busy the node is. Linear attention in
# Python, which loops over a row, takes longer.
ACTIVATION_SECONDS = 60
LINEAR = (torch.nn.Linear, Conv1D)  # what peft means by `all-linear`, and what bitsandbytes quantizes


def main(argv: list[str]) -> None:
    """Print the shape of the model that the configuration describes, or one line that says why it cannot be built."""
    logging.set_verbosity_error()
    folder, name = str(Path(argv[0]).parent), Path(argv[0]).name
    try:
        config = AutoConfig.from_pretrained(folder, _configuration_file=name, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever transformers raises for an arbitrary configuration
        sys.exit(f"error: {_first_line(error)}")
    described = describe_tensors(model) | describe_activations(model)
    print(json.dumps(described | describe_adapters(model)))  # last: peft changes the model


def describe_activations(model: Any) -> dict[str, Any]:
    """Return what forward passes on fake tensors save; no rows, and the reason, for a model that cannot run so."""
    warnings.simplefilter("ignore")  # they address people who train

    def stop(*_: Any) -> None:
        raise TimeoutError(f"its forward takes more than {ACTIVATION_SECONDS} s on fake tensors")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, ACTIVATION_SECONDS)
    rows, reason = [], None
    try:
        rows = count_activations(model)
    except Exception as error:  # whatever an arbitrary architecture does with values that are not there
        reason = _first_line(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"activations": rows, "counted_rank": RANKS[0], "why_not_counted": reason}


def describe_adapters(model: Any) -> dict[str, Any]:
    """Return the adapters that peft makes with `all-linear`, by the field names of `ModelShape`; replaces the modules.

    `adapters_of_layer` has one list per layer. Without adapters, and with the reason, if peft refuses the model.
    """
    names = list(decoder_layers(model))
    renamed = _renamed_targets(model.config.model_type)
    warnings.simplefilter("ignore")
    try:
        adapted = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
    except ValueError as error:
        none = {"adapters_of_layer": [[]] * len(names), "outer_adapters": [], "renamed_targets": renamed}
        return none | {"why_no_adapters": _first_line(error)}
    of_layer: dict[str, list[Any]] = {name: [] for name in names}
    outer: list[Any] = []
    for name, module in adapted.base_model.model.named_modules():
        if not isinstance(module, LoraLayer) or not module.lora_A:
            continue
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        target = name.replace(".base_layer", "")
        if isinstance(module, ParamWrapper):  # parameters of one module have wrappers inside each other
            target += f".{module.parameter_name}"
        layer = next((name for name in names if target.startswith(f"{name}.")), None)
        if layer is not None:
            target = target.removeprefix(f"{layer}.")
        adapters = outer if layer is None else of_layer[layer]
        adapters.append([target, b.shape[0], a.shape[1], a.shape[0]])
    return {"adapters_of_layer": list(of_layer.values()), "outer_adapters": outer, "renamed_targets": renamed}


def _renamed_targets(model_type: str) -> dict[str, str]:
    """What peft renames for a mixture whose experts transformers 5 fuses; nothing for any other model."""
    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    if get_checkpoint_conversion_mapping(model_type) is None:
        return {}
    return dict(conversion._MOE_TARGET_MODULE_MAPPING.get(family, {}))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def describe_tensors(model: Any) -> dict[str, Any]:
    """Return dimensions from the configuration and tensors from the modules, by the field names of `ModelShape`.

    Layers are stored once per kind: `kind_of_layer` has the index into `layers_of_kind` for each layer. A
    dimension that the architecture does not have is 0.
    """
    config = model.config.get_text_config()
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's heads differ between layers
    layers = decoder_layers(model)
    linear = {id(module.weight) for module in model.modules() if isinstance(module, LINEAR)}
    tensors = [
        [[name, list(p.shape), id(p) in linear] for name, p in layer.named_parameters()] for layer in layers.values()
    ]
    kinds = [kind for index, kind in enumerate(tensors) if kind not in tensors[:index]]
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    outer = [[name, list(p.shape), id(p) in linear] for name, p in model.named_parameters() if id(p) not in inside]
    names = {name for layer in tensors for name, _, _ in layer}
    hidden = _first_integer(config, "hidden_size", "n_embd", "d_model") or 0
    heads = _first_integer(config, "num_attention_heads", "n_head") or 0
    mlp = _first_integer(config, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        "model_type": model.config.model_type,
        "num_layers": len(layers),
        "hidden_size": hidden,
        "intermediate_size": mlp or 4 * hidden,
        "num_attention_heads": heads,
        "num_kv_heads": _first_integer(config, "num_key_value_heads") or heads,
        "head_dim": _first_integer(config, "head_dim") or (hidden // heads if heads else 0),
        "vocab_size": _first_integer(config, "vocab_size") or 0,
        "gated_mlp": any("gate_proj" in name or "gate_up" in name for name in names),
        "tied_embeddings": head is not None and embedding is not None and embedding.weight is head.weight,
        "num_experts": _first_integer(config, "num_experts", "num_local_experts", "n_routed_experts"),
        "experts_per_token": _first_integer(config, "num_experts_per_tok", "experts_per_token"),
        "attention": model.config._attn_implementation,
        "activation": str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu"),
        "sliding_window": getattr(config, "sliding_window", None) or None,
        "layers_of_kind": kinds,
        "kind_of_layer": [kinds.index(layer) for layer in tensors],
        "outer": outer,
    }


def _first_integer(config: Any, *names: str) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


if __name__ == "__main__":
    main(sys.argv[1:])
