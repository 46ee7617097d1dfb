"""Checks of arguments that name parts of the model: its attention, LoRA's target modules, and patterns of parameters.

For a model whose tensors are known by formula (`toolkit.models`), names are checked before anything starts; for the
others, once the model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from toolkit.errors import ToolkitError, nearest, shown
from toolkit.job.argument_values import check_word
from toolkit.job.job import Job
from toolkit.models.attention import KERNEL, attention_words
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.hub import CONFIG
from toolkit.models.lora import ALL_LINEAR
from toolkit.models.shape import ModelShape

# Model type -> the name of its decoder layers in transformers; all other formulas have `model.layers`.
LAYER_PREFIXES = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers"}


def check_attention(name: str | None) -> None:
    """Raise ToolkitError for an attention function that neither transformers nor the toolkit has."""
    if name is not None and not KERNEL.fullmatch(name):
        check_word("--attn_implementation", name.removeprefix("paged|"), attention_words())


def check_part_names(job: Job, config: Mapping[str, Any]) -> None:
    """Raise ToolkitError for a name of a module or parameter that no part of a model has, by its configuration.

    Names are not checked for an architecture without formulas. In a mixture of experts, peft also takes the names that
    modules had before transformers 5.
    """
    targets = job.lora_target_modules if "lora_target_modules" in job.given else ()
    shape = _shape(dict(config)) if job.freeze or job.train_only or targets else None
    if shape is None:
        return
    names = parameter_names(shape)
    for option in ("freeze", "train_only"):
        check_patterns(job.value(option), names, option)
    if job.is_lora and targets and not shape.num_experts:
        linear = {
            tensor.name.split(".")[-2] for layer in shape.layer_kinds for tensor in layer if tensor.is_linear_weight
        }
        _check_targets(targets, names, sorted(linear))


def parameter_names(shape: ModelShape) -> list[str]:
    """Return the names of all parameters of a model, as `named_parameters` lists them; a tied head included."""
    prefix = LAYER_PREFIXES.get(shape.model_type, "model.layers")
    layers = [f"{prefix}.{index}.{tensor.name}" for index, layer in enumerate(shape.layers) for tensor in layer]
    outer = [tensor.name for tensor in shape.outer]
    return [*outer, *layers, *([] if "lm_head.weight" in outer else ["lm_head.weight"])]


def check_patterns(patterns: Sequence[str], names: Sequence[str], argument: str) -> None:
    """Raise ToolkitError for a shell pattern that matches no parameter, and if none is left to train."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = nearest(pattern[:200], names, cutoff=0.3) or names[0]
            raise ToolkitError(f"--{argument} {shown(pattern)} matches no parameter", hint=f"there is `{close}`")
    frozen = patterns if argument == "freeze" else ()
    if frozen and all(any(fnmatchcase(name, pattern) for pattern in frozen) for name in names):
        raise ToolkitError("--freeze leaves nothing to train", hint="freeze fewer parameters")


def _shape(config: dict[str, Any]) -> ModelShape | None:
    try:
        return shape_from_config(ConfigFields(config, CONFIG))
    except ToolkitError:  # transformers has defaults for fields that a plan needs
        return None


def _check_targets(targets: Sequence[str], names: Sequence[str], linear: list[str]) -> None:
    """peft refuses a list of which none is the end of a module's name."""
    modules = {".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1)}
    if tuple(targets) == ALL_LINEAR or any(f".{module}".endswith(f".{t}") for module in modules for t in targets):
        return
    close = nearest(targets[0][:200], linear)
    raise ToolkitError(
        f"--lora_target_modules {' '.join(targets)[:80]} names no module of the model",
        hint=f"did you mean `{close}`?" if close else f"one of {', '.join(linear)}",
    )
