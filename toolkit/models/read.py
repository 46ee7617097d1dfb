"""A model's shape from a hub id, a folder, or a `config.json`; nothing else of it is fetched or opened.

$ toolkit plan Qwen/Qwen3-8B --gpu h100-80gb --world-size 8

Where arithmetic does not know the architecture, transformers builds it on the meta device in a process of its own.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit.errors import ToolkitError, nearest
from toolkit.installed import model_types
from toolkit.models.architectures import known_types, shape_of
from toolkit.models.fields import Fields
from toolkit.models.kept import counted_of
from toolkit.models.shape import ModelShape, Tensor

CONFIG = "config.json"
COUNTING_SECONDS = 300
HUB_SECONDS = 5


def read_model(MODEL: str, *, count: bool = True) -> ModelShape:  # noqa: N803
    """The shape of MODEL; without `count`, of an architecture that arithmetic knows, since counting takes seconds.

    Raises ToolkitError for what is not there, cannot be read, lacks a field, or is no language model.
    """
    path = config_path(MODEL)
    fields = Fields(_read_json(path), str(path))
    _check_type(fields)
    shape = shape_of(fields)
    if shape is None and not count:
        raise ToolkitError(f"model_type {fields.values['model_type']!r} is not known to arithmetic", hint=_known())
    return shape if shape is not None else _counted_shape(path)


def check_unquantized(model: str) -> None:
    """Raises ToolkitError for a checkpoint that is quantized already: what its weights take depends on its method."""
    quantized = _read_json(config_path(model)).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ToolkitError(
            f"{model} is quantized already (`quantization_config`, method {method}): that is not planned",
            hint="plan the model that it was made of, with `--lora-r 16 --load-in-4bit` for 4-bit NF4",
        )


def config_path(model: str) -> Path:
    """Where MODEL's configuration lies; a hub id's is fetched into the hub's own cache."""
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ToolkitError(f"{path} has no {CONFIG}", hint="give a folder that holds a Hugging Face model")
        return path / CONFIG
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith(".json"):
        raise ToolkitError(f"no such file or folder: {model}", hint=f"a hub id, a folder with {CONFIG}, or a {CONFIG}")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it would tell of every attempt
    folder_way = f"`toolkit plan FOLDER`, with the model's {CONFIG} in it"
    try:
        return Path(hf_hub_download(model, CONFIG, local_files_only=not _hub_answers()))
    except HFValidationError:
        raise ToolkitError(f"{model!r} is no folder and cannot be a hub id", hint=folder_way) from None
    except (LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, HfHubHTTPError):
            reason = f"the hub answers {error.response.status_code}: no such model, or not yours to read"
        else:
            reason = "the hub cannot be reached, and it is not in the hub's cache"
        raise ToolkitError(f"{model!r} is no folder here, and {reason}", hint=folder_way) from None


def _hub_answers() -> bool:
    """Tried once, because the hub's client tries for half a minute. Behind a proxy it is left to the client."""
    if os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((str(address.hostname), address.port or 443), timeout=HUB_SECONDS).close()
    except OSError:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ToolkitError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ToolkitError(f"{path} holds {type(values).__name__}, expected the fields of a model")
    return values


def _check_type(fields: Fields) -> None:
    """A name that transformers does not know has a nearest one."""
    found = fields.values.get("model_type")
    if not isinstance(found, str):
        raise ToolkitError(f"{fields.where} has no `model_type`", hint=f"for example `llama`; known: {_known()}")
    types = model_types()
    if found not in known_types() and types and found not in types:
        close = nearest(found, types)
        hint = f"did you mean `{close}`?" if close else f"arithmetic knows {_known()}; transformers {len(types)} more"
        raise ToolkitError(f"{fields.where}: unknown model_type {found!r}", hint=hint)


def _known() -> str:
    return ", ".join(known_types())


def _counted_shape(path: Path) -> ModelShape:
    """What `toolkit.train.shapes` counts in a child process, which imports torch."""
    command = [sys.executable, "-m", "toolkit.train.shapes", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COUNTING_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ToolkitError(f"{path}: transformers did not build it within {COUNTING_SECONDS} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ToolkitError(
            f"{path}: transformers cannot build a language model from it: {said.removeprefix('error: ')}",
            hint=f"arithmetic knows {_known()}",
        )
    counted = json.loads(done.stdout.splitlines()[-1])
    kinds = {json.dumps(layer): tuple(map(_tensor, layer)) for layer in counted.pop("layers_of_kind")}
    ordered = list(kinds.values())
    layers = tuple(ordered[kind] for kind in counted.pop("layer_kinds"))
    outer = tuple(map(_tensor, counted.pop("outer")))
    kept = counted_of(counted.pop("kept"), counted.pop("kept_rank"))
    reason = counted.pop("why_not_kept")
    return ModelShape(**counted, layers=layers, outer=outer, counted_on="meta device", kept=kept, why_not_kept=reason)


def _tensor(named: list[Any]) -> Tensor:
    name, shape = named
    return Tensor(name=name, shape=tuple(shape))
