"""What a comparison was asked for: presets and variants by name, and which of them cannot run here.

    parse_variant("ddp_int8=ddp --ddp_comm_hook int8").name         # 'ddp_int8'

A variant is a preset under a name of its own, with training arguments that it alone has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.compare.results import Scaling
from toolkit.compare.trials import Comparison, row_name
from toolkit.errors import ToolkitError
from toolkit.hardware.gpus import count_gpus
from toolkit.launch.preflight import check_process_count
from toolkit.presets import Preset, load_preset
from toolkit.runs.argv import DEFAULT_BATCH, integer, read_arguments
from toolkit.runs.switches import check_switches

VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One thing that is compared."""

    name: str
    given: str
    """What `load_preset` takes."""
    preset: Preset
    extra_arguments: list[str]


def entries(presets: Sequence[str], variants: Sequence[str]) -> list[Entry]:
    """Presets, then variants. Raises ToolkitError for a name that stands twice."""
    found = [_preset_entry(given) for given in presets] + [parse_variant(words) for words in variants]
    if not found:
        raise ToolkitError("nothing to compare", hint="`--preset NAME`, once for each; see `toolkit presets`")
    names = [entry.name for entry in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ToolkitError(
            f"--preset {repeated[0]} is given twice",
            hint=f"name each preset once; `--variant again={repeated[0]}` is the same under another name",
        )
    return found


def _preset_entry(given: str) -> Entry:
    preset = load_preset(given)
    return Entry(name=preset.name, given=_absolute(preset, given), preset=preset, extra_arguments=[])


def parse_variant(words: str) -> Entry:
    """`NAME=PRESET --argument value`, as typed after `--variant`."""
    name, equals, rest = words.partition("=")
    given, *extra = shlex.split(rest) or [""]
    if not equals or not given or not VARIANT_NAME.fullmatch(name):
        raise ToolkitError(
            f"--variant {words!r}, expected a name of letters, digits and _, `=`, a preset, and training arguments",
            hint='`--variant "ddp_int8=ddp --ddp_comm_hook int8"`',
        )
    read_arguments(extra)
    preset = load_preset(given)
    return Entry(name=name, given=_absolute(preset, given), preset=preset, extra_arguments=extra)


def _absolute(preset: Preset, given: str) -> str:
    """A file is named so that it is found from any directory."""
    return str(preset.accelerate_config_path) if given.endswith((".yaml", ".yml")) else given


def numbers_of_processes(words: Sequence[str]) -> list[int]:
    """`1,2,4`, or the option repeated, or both."""
    numbers = []
    for word in ",".join(words).split(","):
        if not word.strip().isdigit():
            raise ToolkitError(f"--num-processes is {word!r}, expected whole numbers: `--num-processes 1,2,4`")
        numbers.append(int(word))
    return list(dict.fromkeys(numbers))


def strong_batches(
    entries: Sequence[Entry], arguments: dict[str, Any], num_processes: Sequence[int]
) -> dict[str, dict[str, int]]:
    """Batch arguments of each row that keep the global batch of the fewest processes.

    The micro-batch stays where it can; gradients are accumulated over fewer micro-steps first.
    """
    micro = integer(arguments, "per_device_train_batch_size", DEFAULT_BATCH)
    whole = micro * integer(arguments, "gradient_accumulation_steps", 1) * min(num_processes)
    found: dict[str, dict[str, int]] = {}
    for n in num_processes:
        if whole % n:
            raise ToolkitError(
                f"--scaling strong: a global batch of {whole} sequences cannot be shared by {n} processes",
                hint=f"`--gradient_accumulation_steps` so that it is a multiple of {n}, or `--scaling weak`",
            )
        own = max(size for size in range(1, min(micro, whole // n) + 1) if whole // n % size == 0)
        batch = {"per_device_train_batch_size": own, "gradient_accumulation_steps": whole // n // own}
        found |= {row_name(entry.name, n): batch for entry in entries}
    return found


def scaling_of(asked: str | None, num_processes: Sequence[int]) -> Scaling | None:
    """Weak unless asked for, and only where there are several numbers of processes."""
    if asked not in (None, "strong", "weak"):
        raise ToolkitError(f"--scaling is {asked!r}, expected strong or weak")
    if len(num_processes) == 1:
        if asked is not None:
            raise ToolkitError("--scaling needs several numbers of processes", hint="`--num-processes 1,2`")
        return None
    return "strong" if asked == "strong" else "weak"


def unsupported_rows(found: Sequence[Entry], comparison: Comparison, *, gpus: int | None = None) -> dict[str, str]:
    """Rows that cannot run here, with the reason. Raises the first reason where it holds for all of them.

    `gpus` is how many there are where it is not this machine that trains.
    """
    if gpus is None and not comparison.cpu:
        gpus = count_gpus()
    reasons: dict[str, ToolkitError] = {}
    for entry, n in _pairs(found, comparison.num_processes):
        try:
            check_process_count(n, gpus=gpus, preset=entry.preset)
            check_switches(comparison.arguments(entry.name, n), entry.preset, num_processes=n, on_cpu=comparison.cpu)
        except ToolkitError as error:
            reasons[row_name(entry.name, n)] = error
    if len(reasons) == len(comparison.rows()):
        raise next(iter(reasons.values()))
    return {name: error.message for name, error in reasons.items()}


def _pairs(found: Sequence[Entry], num_processes: Sequence[int]) -> Iterator[tuple[Entry, int]]:
    return ((entry, n) for n in num_processes for entry in found)
