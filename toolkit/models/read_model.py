"""Read a model's shape from a hub id, a folder, or a `config.json`; no weights are fetched or opened.

    $ toolkit plan Qwen/Qwen3-8B --gpu h100-80gb --num-processes 8

Architectures with formulas are read here in milliseconds. transformers builds all others on the meta device, in a child
process whose answer is cached (`toolkit.models.counted_shape`).
"""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import ToolkitError, nearest
from toolkit.files.reading import user_path
from toolkit.files.value_limits import shown
from toolkit.models.config_fields import ConfigFields
from toolkit.models.config_limits import read_config
from toolkit.models.counted_shape import count_shape
from toolkit.models.hub import CONFIG, download_config
from toolkit.models.llama_family import LLAMA_FAMILY, llama_shape
from toolkit.models.other_decoders import OTHER_DECODERS
from toolkit.models.shape import ModelShape
from toolkit.versions import model_types


def read_model(MODEL: str, *, count: bool = True) -> ModelShape:  # noqa: N803
    """Return the shape of MODEL.

    With `count=False`, an architecture without formulas is an error, since counting it takes seconds. Raises
    ToolkitError for a model that is missing, unreadable, incomplete, or not a language model.
    """
    path = config_path(MODEL)
    fields = ConfigFields(read_config(path), str(path))
    _check_type(fields)
    shape = shape_from_config(fields)
    if shape is not None:
        return shape
    if not count:
        raise ToolkitError(f"there are no formulas for model_type {fields.values['model_type']!r}", hint=_known())
    return count_shape(path, fields.values, hint=_known())


def shape_from_config(fields: ConfigFields) -> ModelShape | None:
    """Return the shape by formula, or None for an architecture or option that has none.

    >>> shape_from_config(ConfigFields({"model_type": "bert"}, "config.json")) is None
    True

    Raises ToolkitError for a field that is missing or invalid.
    """
    model_type = str(fields.values.get("model_type"))
    if model_type in LLAMA_FAMILY:
        return llama_shape(model_type, fields)
    other = OTHER_DECODERS.get(model_type)
    return None if other is None else other(fields)


def types_with_formulas() -> list[str]:
    """Return the model types that need no counting."""
    return sorted([*LLAMA_FAMILY, *OTHER_DECODERS])


def check_unquantized(model: str) -> None:
    """Raise ToolkitError for a checkpoint that is already quantized: the size of its weights depends on its method."""
    quantized = read_config(config_path(model)).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ToolkitError(
            f"{model} is already quantized (`quantization_config`, method {str(method)[:40]}), which is not planned",
            hint="plan the model it was made from, with `--lora-r 16 --load-in-4bit` for 4-bit NF4",
        )


def config_path(model: str) -> Path:
    """Return the path of MODEL's configuration; a hub id's is downloaded into the hub's own cache."""
    path = user_path(model)
    if path.is_dir():
        if not (path / CONFIG).exists():
            raise ToolkitError(f"{path} has no {CONFIG}", hint="give a folder that holds a Hugging Face model")
        return path / CONFIG
    if path.exists():
        return path
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith(".json"):
        raise ToolkitError(f"no such file or folder: {model}", hint=f"a hub id, a folder with {CONFIG}, or a {CONFIG}")
    return download_config(model)


def _check_type(fields: ConfigFields) -> None:
    model_type = fields.values.get("model_type")
    if not isinstance(model_type, str):
        raise ToolkitError(f"{fields.source} has no `model_type`", hint=f"for example `llama`; known: {_known()}")
    types = model_types()
    if model_type not in types_with_formulas() and types and model_type not in types:
        close = nearest(model_type[:200], types)
        hint = f"did you mean `{close}`?" if close else f"known: {_known()}, and {len(types)} types of transformers"
        raise ToolkitError(f"{fields.source}: unknown model_type {shown(model_type)}", hint=hint)


def _known() -> str:
    return ", ".join(types_with_formulas())
