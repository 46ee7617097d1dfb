"""The presets and variants that are compared.

A variant is a preset under another name, with training arguments that it alone has:

>>> variant = parse_variant("ddp_int8=ddp --ddp_comm_hook int8")
>>> variant.name, variant.preset.name, variant.extra_arguments
('ddp_int8', 'ddp', ('--ddp_comm_hook', 'int8'))
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.files.value_limits import shown
from toolkit.job.argument_reading import read_arguments
from toolkit.presets import Preset, load_preset

# A trial's folder is named for it, with the number of processes and the repeat.
VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A preset as it is compared; one without extra arguments has the preset's own name."""

    name: str
    preset: Preset
    source: str
    """The preset's name or the absolute path of its file, as `load_preset` takes it."""
    extra_arguments: tuple[str, ...] = ()


def load_variants(presets: Sequence[str], variants: Sequence[str]) -> list[Variant]:
    """Return the presets, then the variants. Raises ToolkitError for none at all and for a repeated name."""
    found = [_load(given) for given in presets] + [parse_variant(text) for text in variants]
    if not found:
        raise ToolkitError("nothing to compare", hint="`--preset NAME`, once for each; see `toolkit presets`")
    repeated = [name for name, times in Counter(variant.name for variant in found).items() if times > 1]
    if repeated:
        raise ToolkitError(
            f"--preset {repeated[0]} is given twice",
            hint=f"name each preset once; `--variant again={repeated[0]}` is the same under another name",
        )
    return found


def parse_variant(text: str) -> Variant:
    """Parse `NAME=PRESET --argument value`, as typed after `--variant`."""
    name, equals, rest = text.partition("=")
    try:
        given, *extra = shlex.split(rest) or [""]
    except ValueError as error:  # an unclosed quotation, or a backslash at the end
        raise ToolkitError(
            f"--variant {shown(text)}: {str(error).lower()}", hint='`--variant "NAME=PRESET --argument value"`'
        ) from None
    if not equals or not given or not VARIANT_NAME.fullmatch(name):
        raise ToolkitError(
            f"--variant {shown(text)}, expected a name of letters, digits and _, `=`, a preset, and training arguments",
            hint='`--variant "ddp_int8=ddp --ddp_comm_hook int8"`',
        )
    read_arguments(extra)
    return _load(given, name=name, extra_arguments=tuple(extra))


def _load(given: str, *, name: str | None = None, extra_arguments: tuple[str, ...] = ()) -> Variant:
    preset = load_preset(given)
    # A comparison is resumed from any directory.
    source = str(preset.accelerate_config_path) if given.endswith((".yaml", ".yml")) else given
    return Variant(name=name or preset.name, preset=preset, source=source, extra_arguments=extra_arguments)
