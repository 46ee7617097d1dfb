"""Read a model's shape from a hub id, a folder, or a `config.json`; no weights are fetched or opened.

    $ toolkit plan Qwen/Qwen3-8B --gpu h100-80gb --num-processes 8

Architectures with formulas are read here in milliseconds. transformers builds all others on the meta device, in a child
process whose answer is cached (`toolkit.models.counted_shape`).
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from toolkit.errors import ToolkitError, nearest
from toolkit.files.reading import user_path
from toolkit.files.value_limits import MAX_SHOWN_PATH, shown
from toolkit.models.config_fields import ConfigFields, read_config
from toolkit.models.counted_shape import count_shape
from toolkit.models.llama_family import LLAMA_FAMILY, llama_shape
from toolkit.models.other_decoders import OTHER_DECODERS
from toolkit.models.shape import ModelShape
from toolkit.versions import model_types

CONFIG = "config.json"
HUB_SECONDS = 5
UNGATED = "Qwen/Qwen3-8B"
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


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


def download_config(model: str, *, revision: str | None = None) -> Path:
    """Return the path of a hub model's config.json in the hub's own cache; downloads no weights.

    Raises ToolkitError for an id that does not exist, is private or gated, and for a hub that cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it would log every attempt
    disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    local = f"name a local folder that holds the model's {CONFIG}"
    try:
        return Path(hf_hub_download(model, CONFIG, revision=revision, local_files_only=not _is_reachable(endpoint)))
    except HFValidationError:
        raise no_such_model(model) from None
    except GatedRepoError:
        raise ToolkitError(
            f"model {model!r} is gated: its owner grants access to each account",
            hint=f"accept its terms on {endpoint}/{model}, then {LOGIN}; or use an ungated model such as {UNGATED}",
        ) from None
    except RevisionNotFoundError:
        raise ToolkitError(f"model {model!r} has no revision {revision!r}", hint=f"see {endpoint}/{model}") from None
    except RemoteEntryNotFoundError:
        raise ToolkitError(f"model {model!r} has no {CONFIG}", hint=f"see {endpoint}/{model}") from None
    except LocalEntryNotFoundError:
        raise ToolkitError(
            f"{model!r} is not a folder here, the hub cannot be reached, and the model is not in the hub's cache",
            hint=local,
        ) from None
    except HfHubHTTPError as error:
        if not isinstance(error, RepositoryNotFoundError) and error.response.status_code not in (401, 403):
            raise ToolkitError(f"model {model!r}: the hub answers {error.response.status_code}", hint=local) from None
        raise ToolkitError(
            f"model {model!r} is not on the hub, or it is private",
            hint=f"check the spelling; for a private or gated model, {LOGIN}",
        ) from None
    except Exception as error:  # whatever it is, the ranks could not load the model either
        words = str(error).strip().splitlines()
        why = words[0] if words else type(error).__name__
        raise ToolkitError(f"model {model!r} cannot be loaded from the hub: {why}", hint=local) from None


def no_such_model(name: str) -> ToolkitError:
    """Return the error for a name that can be neither a folder nor a hub id."""
    return ToolkitError(
        f"model {shown(name, limit=MAX_SHOWN_PATH)} is neither a folder nor a hub id",
        hint="a hub id looks like `owner/name`; a folder must exist",
    )


def _is_reachable(endpoint: str) -> bool:
    """Tried once, because the hub's client retries for half a minute; behind a proxy it is left to the client."""
    if os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"):
        return True
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((str(address.hostname), port), timeout=HUB_SECONDS).close()
    except OSError:
        return False
    return True
