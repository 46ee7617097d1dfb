"""The presets that ship: found by name, wherever the toolkit is installed.

>>> "ddp" in preset_names()
True
"""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import ToolkitError, nearest
from toolkit.presets.preset import Preset, read_preset


def presets_root() -> Path:
    """The folder that holds `accelerate_configs/` and `ds_configs/`: inside a wheel, or the checkout."""
    package = Path(__file__).resolve().parent.parent
    packed = package / "_presets"
    return packed if packed.is_dir() else package.parent


def preset_names() -> list[str]:
    """All names, sorted."""
    return sorted(path.stem for path in (presets_root() / "accelerate_configs").glob("*.yaml"))


def list_presets() -> list[Preset]:
    """All presets that ship, sorted by name."""
    return [load_preset(name) for name in preset_names()]


def load_preset(name: str) -> Preset:
    """A preset by name, or from the path of an accelerate YAML.

    Raises ToolkitError for an unknown name, with the list and the nearest one.
    """
    if name.endswith((".yaml", ".yml")):
        return read_preset(Path(name))
    names = preset_names()
    if name not in names:
        close = nearest(name, names)
        raise ToolkitError(
            f"unknown preset {name!r}; available: {', '.join(names)}",
            hint=f"did you mean `{close}`?" if close else "see `toolkit presets`",
        )
    return read_preset(presets_root() / "accelerate_configs" / f"{name}.yaml")
