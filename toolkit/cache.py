"""Where things that are made once are kept: compiled ops, the default model.

    >>> cache_folder().name
    'finetune-toolkit'

`TOOLKIT_CACHE` moves the whole cache; otherwise it follows the XDG base directory rule.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Iterable
from importlib.metadata import distribution, version
from pathlib import Path

# What ZeRO-Infinity reads and writes disks with: DeepSpeed's libraries, each the name of its folder too.
ASYNC_IO_OPS = ("pin_memory", "async_io")
INSTALL_LIBAIO = "apt-get install libaio-dev"
COMPILE_ASYNC_IO = "python -m toolkit.doctor.ops --async-io"


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


def ask_processor_once() -> None:
    """py-cpuinfo takes a second and processes of its own each time; DeepSpeed asks it three times to load one op."""
    with contextlib.suppress(ImportError):
        import cpuinfo

        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def extensions_folder() -> Path:
    """Where torch keeps compiled ops: the user's TORCH_EXTENSIONS_DIR, otherwise the cache's."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(named) if named else torch_extensions_folder()


def are_compiled(ops: Iterable[str]) -> bool:
    """Whether each of DeepSpeed's ops is ready to load; looks at files only."""
    folder = extensions_folder()
    return all(_is_fresh(op_library(folder, op)) and not op_lock(folder, op).exists() for op in ops)


def op_library(folder: Path, op: str) -> Path:
    """The compiled library of an op."""
    return folder / op / f"{op}.so"


def op_lock(folder: Path, op: str) -> Path:
    """There while torch compiles the op."""
    return folder / op / "lock"


def _is_fresh(library: Path) -> bool:
    """Installing torch or DeepSpeed anew, even the same version, makes ninja compile again: its sources are younger."""
    sources = [Path(str(distribution(name).locate_file(f"{name}/__init__.py"))) for name in ("torch", "deepspeed")]
    return library.is_file() and library.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def path_with_ninja() -> str:
    """PATH with this environment's programs first: torch looks for ninja there, activated or not."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
