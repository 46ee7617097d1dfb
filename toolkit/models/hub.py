"""A hub model's config.json, by the standard library alone: planning a model needs no client of the hub."""

import os
import re
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from toolkit.errors import ToolkitError, shown
from toolkit.files import write_text
from toolkit.files.documents import MAX_SHOWN_PATH, MAX_TEXT_BYTES
from toolkit.files.paths import cache_folder, home_folder, user_path
from toolkit.hardware.system_text import text_of
from toolkit.models.config_fields import CONFIG

HUB_SECONDS = 10
UNGATED = "Qwen/Qwen3-8B"
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
# As the hub's client checks an id.
MODEL_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]{0,95}/)?\w([\w.-]{0,94}\w)?", re.ASCII)
TRUE = {"1", "ON", "YES", "TRUE"}


def hub_home() -> Path:
    """Return the folder of the Hugging Face hub: its cache and its token."""
    cache = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return user_path(os.environ.get("HF_HOME") or Path(cache) / "huggingface")


def token_file() -> Path:
    """Return the path of the hub's token, which may not exist."""
    return Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")


def no_such_model(name: str) -> ToolkitError:
    """Return the error for a name that can be neither a folder nor a hub id."""
    what = f"model {shown(name, limit=MAX_SHOWN_PATH)} is neither a folder nor a hub id"
    return ToolkitError(what, hint="a hub id looks like `owner/name`; a folder must exist")


def download_config(model: str, *, revision: str | None = None) -> Path:
    """Return the path of a hub model's config.json, in the hub's cache where it is the same; downloads no weights.

    Where the hub cannot be reached, it is the file of the hub's cache, or of an earlier call. Raises ToolkitError for
    an id that does not exist, is private or gated, and for a model that neither the hub nor a cache gives.
    """
    if not MODEL_ID.fullmatch(model):
        raise no_such_model(model)
    revision, folder = revision or "main", f"models--{model.replace('/', '--')}"
    hub = user_path(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub") / folder
    snapshot = hub / "snapshots" / (text_of(hub / "refs" / revision) or revision) / CONFIG
    own = cache_folder() / "hub-configs" / folder / quote(revision, safe="") / CONFIG
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE:
            raise OSError
        text = _get(f"{endpoint}/{model}/resolve/{quote(revision, safe='')}/{CONFIG}")
    except urllib.error.HTTPError as error:
        error.close()
        reason = error.headers.get("X-Error-Code")
        raise hub_refusal(model, reason, error.code, address=f"{endpoint}/{model}", revision=revision) from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: HF_ENDPOINT is no address
        if found := next((path for path in (snapshot, own) if path.is_file()), None):
            return found
        why = getattr(error, "reason", error)  # of a URLError: what the system said
        raise hub_unreachable(model, f" ({why})" if str(why) else "") from None
    if text_of(snapshot) == text.strip():
        return snapshot
    write_text(own, text)
    return own


class _TokenForOneHost(urllib.request.HTTPRedirectHandler):
    """The hub redirects to hosts that serve files; its token is for the hub alone."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            request.remove_header("Authorization")
        return request


def _get(address: str) -> str:
    request = urllib.request.Request(address, headers={"User-Agent": "finetune-toolkit"})
    token = os.environ.get("HF_TOKEN") or text_of(token_file())
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.build_opener(_TokenForOneHost).open(request, timeout=HUB_SECONDS) as answer:
        return str(answer.read(MAX_TEXT_BYTES).decode())


def hub_unreachable(model: str, why: str = "") -> ToolkitError:
    """Return the error for a model that neither the hub nor a cache gives."""
    what = f"{model!r} is not a folder here, the hub cannot be reached{why}, and the model is not in the hub's cache"
    return ToolkitError(what, hint=f"name a local folder that holds the model's {CONFIG}")


def hub_refusal(model: str, reason: str | None, status: int, *, address: str, revision: str = "main") -> ToolkitError:
    """Return the error for an answer of the hub, which names its reason in the header `X-Error-Code`.

    An id that does not exist looks like a private one.
    """
    reason = reason or ("RepoNotFound" if status in (401, 403, 404) else "")
    reasons = {
        "GatedRepo": (
            f"model {model!r} is gated: its owner grants access to each account",
            f"accept its terms on {address}, then {LOGIN}; or use an ungated model such as {UNGATED}",
        ),
        "RevisionNotFound": (f"model {model!r} has no revision {revision!r}", f"see {address}"),
        "EntryNotFound": (f"model {model!r} has no {CONFIG}", f"see {address}"),
        "RepoNotFound": (
            f"model {model!r} is not on the hub, or it is private",
            f"check the spelling; for a private or gated model, {LOGIN}",
        ),
    }
    other = f"model {model!r}: the hub answers {status}", f"name a local folder that holds the model's {CONFIG}"
    message, hint = reasons.get(reason, other)
    return ToolkitError(message, hint=hint)
