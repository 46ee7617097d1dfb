"""Where things that are made once are kept: compiled ops, the default model.

    >>> cache_folder().name
    'finetune-toolkit'

`TOOLKIT_CACHE` moves the whole cache; otherwise it follows the XDG base directory rule.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path


def cache_folder() -> Path:
    """The cache's root; not created here."""
    if named := os.environ.get("TOOLKIT_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune-toolkit"


def torch_extensions_folder() -> Path:
    """One folder an environment: two environments that share one rebuild each other's DeepSpeed ops."""
    environment = f"{sys.prefix} {sys.version_info[:2]} torch {version('torch')} deepspeed {version('deepspeed')}"
    return cache_folder() / "torch_extensions" / hashlib.sha256(environment.encode()).hexdigest()[:12]


def use_cached_extensions() -> None:
    """Point torch at the compiled ops, unless the user already chose a folder."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(torch_extensions_folder()))
