"""A model's configuration from the Hugging Face hub, and what to do when the hub refuses it."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from toolkit.errors import ToolkitError
from toolkit.files.value_limits import MAX_SHOWN_PATH, shown

CONFIG = "config.json"
HUB_SECONDS = 5
UNGATED = "Qwen/Qwen3-8B"
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


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
