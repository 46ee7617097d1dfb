"""Configurations that others wrote, given to transformers and peft: checked first, with a limit on their time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json_object
from toolkit.files.value_limits import CONFIGURATION

# Building a model of 2,000 layers without weights takes about half of that.
BUILD_CPU_SECONDS = 30
# Fields of peft's configurations with which it imports a module that the file names.
_IMPORTS = ("megatron_core", "megatron_config")
_MAX_RANK = 2**20


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Return an adapter's configuration.

    Raises ToolkitError for a file that is not one, for a rank that no adapter has, and for a module that it would
    import.
    """
    config = read_json_object(path, limits=CONFIGURATION, allow_nan=True)
    if not isinstance(config.get("peft_type"), str):
        raise ToolkitError(f"{path} has no peft_type, expected the kind of the adapter, for example `LORA`")
    for name in _IMPORTS:
        # peft writes "megatron.core" into every LoRA configuration, and imports it only with megatron_config.
        if config.get(name) not in (None, "megatron.core"):
            raise ToolkitError(f"{path}: {name} is {str(config[name])[:80]!r}, which names a module to import")
    ranks = [("r", config.get("r")), *as_section(config, "rank_pattern").items()]
    for name, rank in ranks:
        if rank is not None and (type(rank) is not int or not 1 <= rank <= _MAX_RANK):
            raise ToolkitError(f"{path}: {name[:80]} is {repr(rank)[:80]}, expected an integer from 1 to {_MAX_RANK:,}")
    return config


def as_section(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key; empty where there is none."""
    value = content.get(key)
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def built_by_a_library(source: Path, *, cpu_seconds: int = BUILD_CPU_SECONDS) -> Iterator[None]:
    """Turn what a library raises for someone's configuration into a ToolkitError, and stop it if it takes too long.

    `cpu_seconds` 0 is no limit.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise ToolkitError(
            f"the model of {source} takes more than {cpu_seconds} CPU seconds to build without weights",
            hint="use the configuration that is stored with the weights",
        )

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        yield
    except (ToolkitError, MemoryError):
        raise
    except Exception as error:  # each wrong value of a configuration has its own exception, in its own place
        why = " ".join(str(error).split())[:200] or "no reason given"
        raise ToolkitError(
            f"no model can be built from the configuration in {source}: {type(error).__name__}: {why}",
            hint="use the configuration that is stored with the weights",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
