"""A preset's files in the form that a program reads, valid from any working directory.

>>> from toolkit.presets import load_preset
>>> print(preset_text(load_preset("ddp"), "accelerate"), end="")
# Model states fit on one GPU: replicate them, and average the gradients.
distributed_type: MULTI_GPU
mixed_precision: bf16
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.documents import read_text
from toolkit.presets.preset import Preset
from toolkit.presets.support import unsupported
from toolkit.presets.training_arguments import strategy_variables, trainer_arguments

FORMS = ("accelerate", "deepspeed", "trainer")


def preset_text(preset: Preset, form: str) -> str:
    """Return the preset as accelerate's YAML, as DeepSpeed's JSON, or as a YAML of training arguments.

    Raises ToolkitError for an unknown form, and for `deepspeed` where the preset has no JSON.
    """
    if form == "accelerate":
        return accelerate_text(preset, preset.deepspeed_config_path)
    if form == "trainer":
        return trainer_text(preset)
    if form != "deepspeed":
        raise ToolkitError(f"--as {form} is not one of {', '.join(FORMS)}")
    settings = preset.deepspeed_config()
    if settings is None:
        what = f"preset {preset.name!r} has no DeepSpeed JSON: its engine is {preset.engine}"
        raise ToolkitError(what, hint=f"`toolkit preset show {preset.name}`")
    json_path = preset.deepspeed_config_path
    return json.dumps(settings, indent=2) + "\n" if json_path is None else read_text(json_path)


def accelerate_text(preset: Preset, json_path: Path | None) -> str:
    """Return the YAML with its comments; one that names a JSON is written again, with that as an absolute path.

    accelerate resolves a relative path against the working directory.
    """
    if json_path is None or preset.deepspeed_text is not None:
        return read_text(preset.accelerate_config_path)
    wanted = preset.accelerate_config()
    wanted["deepspeed_config"]["deepspeed_config_file"] = str(json_path.absolute())
    return f"# {preset.summary}\n" * bool(preset.summary) + yaml.safe_dump(wanted, sort_keys=False)


def trainer_text(preset: Preset) -> str:
    """Return training arguments as YAML, with comments for what only environment variables can set."""
    arguments: dict[str, Any] = trainer_arguments(preset, precision=preset.mixed_precision)
    if preset.deepspeed_config_path is not None:
        arguments["deepspeed"] = str(preset.deepspeed_config_path)
    lines = [f"# {preset.summary}"] if preset.summary else []
    environment = strategy_variables(preset, precision=preset.mixed_precision)
    if preset.replicas > 1:
        environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = f"...  (processes / {preset.replicas})"
    reason = unsupported(preset, purpose="script") if preset.degrees else None
    if reason is not None:
        lines.append(f"# {reason.message}: {reason.hint}.")
    elif preset.degrees:  # meshes and configurations are Python objects, which YAML cannot carry
        given = [f"{name}=2" for name in preset.degrees] + ['save_strategy="no"'] * preset.sharded_at_load
        lines += [
            f"# These arguments alone divide nothing by {', '.join(preset.degrees)}. In a script of your own:",
            f'#   preset = load_preset("{preset.name}")',
            f'#   args = preset.training_arguments(output_dir="out", {", ".join(given)})',
        ]
    if preset.sharded_at_load:
        lines.append("#   model = AutoModelForCausalLM.from_pretrained(..., **preset.from_pretrained_arguments())")
    if preset.traits.uses_fsdp_plugin:
        lines.append("# These must be in the environment before the model is loaded:")
        lines += [f"#   export {name}={value}" for name, value in environment.items()]
    return "\n".join([*lines, yaml.safe_dump(arguments, sort_keys=False)])


def export_presets(presets: Sequence[Preset], folder: Path, *, force: bool) -> list[Path]:
    """Copy presets into one folder, each JSON beside its YAML, and return the paths written, YAML first.

    Raises ToolkitError, before anything is written, if a file exists and `force` is False.
    """
    texts: dict[Path, str] = {}
    for preset in presets:
        json_path = None if preset.deepspeed_config() is None else folder / f"{preset.name}.json"
        texts[folder / f"{preset.name}.yaml"] = accelerate_text(preset, json_path)
        if json_path is not None:
            texts[json_path] = preset_text(preset, "deepspeed")
    present = [path for path in texts if path.exists()]
    if present and not force:
        raise ToolkitError(f"{present[0]} exists already; nothing was written", hint="`--force` overwrites it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(texts, key=lambda path: path.suffix):  # a YAML never names a JSON that does not exist yet
            write_text(path, texts[path])
    except OSError as error:
        raise ToolkitError(f"{folder} cannot be written: {error.strerror}", hint="name another folder") from None
    return list(texts)
