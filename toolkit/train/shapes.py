"""A model's tensors as transformers makes them, on the meta device, and what its forward keeps: no weights, no memory.

$ python -m toolkit.train.shapes config.json

Prints one line of JSON for `toolkit.models.read`, which imports no torch.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

KEPT_SECONDS = 60  # linear attention in Python loops over a row takes longer


def main(argv: list[str]) -> None:
    """Print the shape of the model that the configuration describes, or one line on why it cannot be built."""
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(str(Path(argv[0]).parent), _configuration_file=Path(argv[0]).name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever transformers raises for somebody's file
        lines = str(error).strip().splitlines() or [type(error).__name__]
        sys.exit(f"error: {lines[0]}")
    print(json.dumps(described(model) | kept_by(model)))


def kept_by(model: Any) -> dict[str, Any]:
    """What forwards on fake tensors keep; nothing, and why, for a model that cannot run so."""
    from toolkit.train.kept import RANKS, count_kept

    warnings.simplefilter("ignore")  # for people who train
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(KEPT_SECONDS)
    try:
        return {"kept": count_kept(model), "kept_rank": RANKS[0], "why_not_kept": None}
    except Exception as error:  # whatever somebody's architecture does with values that are not there
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"kept": [], "kept_rank": RANKS[0], "why_not_kept": lines[0]}


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"its forward took more than {KEPT_SECONDS} s on fake tensors")


def described(model: Any) -> dict[str, Any]:
    """Widths out of the configuration, tensors out of the modules."""
    config = model.config.get_text_config()
    layers = decoder_layers(model)
    tensors = [[[name, list(p.shape)] for name, p in layer.named_parameters()] for layer in layers.values()]
    kinds = [kind for index, kind in enumerate(tensors) if kind not in tensors[:index]]
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    outer = [[name, list(p.shape)] for name, p in model.named_parameters() if id(p) not in inside]
    names = {name for layer in tensors for name, _ in layer}
    return {
        "model_type": model.config.model_type,
        **widths(config, num_layers=len(layers)),
        "gated_mlp": any("gate_proj" in name or "gate_up" in name for name in names),
        "tied_embeddings": is_tied(model),
        "num_experts": first(config, "num_experts", "num_local_experts", "n_routed_experts"),
        "experts_per_token": first(config, "num_experts_per_tok", "experts_per_token"),
        "attention": model.config._attn_implementation,
        "activation": str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu"),
        "sliding_window": getattr(config, "sliding_window", None) or None,
        "layers_of_kind": kinds,
        "layer_kinds": [kinds.index(layer) for layer in tensors],
        "outer": outer,
    }


def decoder_layers(model: Any) -> dict[str, Any]:
    """The modules that are never split: what FSDP2 wraps, and what activation checkpointing recomputes."""
    classes = set(model._no_split_modules or ())
    return {name: module for name, module in model.named_modules() if type(module).__name__ in classes}


def widths(config: Any, *, num_layers: int) -> dict[str, int]:
    """0 where the architecture has no such thing."""
    hidden = first(config, "hidden_size", "n_embd", "d_model") or 0
    heads = first(config, "num_attention_heads", "n_head") or 0
    return {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": first(config, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
        or 4 * hidden,
        "num_attention_heads": heads,
        "num_kv_heads": first(config, "num_key_value_heads") or heads,
        "head_dim": first(config, "head_dim") or (hidden // heads if heads else 0),
        "vocab_size": first(config, "vocab_size") or 0,
    }


def is_tied(model: Any) -> bool:
    """Whether the head is the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return embedding is not None and head is not None and embedding.weight is head.weight


def first(config: Any, *names: str) -> int | None:
    """The first of the fields that is an integer."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


if __name__ == "__main__":
    main(sys.argv[1:])
