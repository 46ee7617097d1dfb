"""Checks of a job under a preset: what the preset decides itself, does not support, or does not read. No torch.

warnings = check_arguments(job, preset, num_processes=2, on_cpu=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.job.job_checks import DDP_ARGUMENTS, check_trackers, check_values, ineffective_arguments, missing_packages
from toolkit.models.attention import read_model_attention
from toolkit.models.split import read_split
from toolkit.presets.compatibility import CPU, Device, ModelLimits, Purpose
from toolkit.presets.spec import STRATEGY_ARGUMENTS, PresetSpec
from toolkit.presets.support import check_degrees_given, check_supported


def check_arguments(
    job: Job,
    preset: PresetSpec | None,
    *,
    num_processes: int | None,
    on_cpu: bool,
    purpose: Purpose = "train",
    here: bool = True,
) -> list[str]:
    """Check a job, and return one warning for each argument that has no effect.

    `preset` and `num_processes` are None where a plain launch does not give them. With `here` false, the job runs on
    another node, and a package that is missing on this one is a warning. Raises ToolkitError for what does not work.
    """
    check_values(job, on_cpu=on_cpu)
    if preset is not None:
        for name in STRATEGY_ARGUMENTS:
            if str(job.value(name) or "none").lower() not in ("none", "false"):
                raise ToolkitError(
                    f"--{name} would override the sharding of preset {preset.name!r}",
                    hint="put it into an accelerate YAML of your own: `--preset FILE`",
                )
        check_degrees_given(preset, job.degrees)
    device = CPU if on_cpu else Device()
    check_supported(preset, job, world_size=num_processes, device=device, purpose=purpose)
    # The Trainer cannot load the best model where a sharded checkpoint holds only the model.
    only_model = job.save_only_model and job.load_best_model_at_end
    if only_model and preset is not None and preset.traits.rejects_best_of_weights:
        raise ToolkitError(
            f"--load_best_model_at_end does not work with --save_only_model under preset {preset.name!r}",
            hint="leave `--save_only_model` out",
        )
    missing = missing_packages(job, on_cpu=on_cpu)
    if missing and here:
        raise missing[0]
    check_trackers(job)
    needed = [f"{error.message}, which is not installed here ({error.hint})" for error in missing]
    return [*needed, *_ineffective_under(preset, job), *ineffective_arguments(job)]


def _ineffective_under(preset: PresetSpec | None, job: Job) -> list[str]:
    if preset is None:
        return []
    lines = [
        f"--{name} has no effect: preset {preset.name!r} does not train with DDP"
        for name in DDP_ARGUMENTS
        if name in job.given and not preset.traits.uses_ddp
    ]
    if preset.traits.uses_fsdp_plugin and job.uses_activation_checkpointing and job.activation_checkpointing_kwargs:
        lines.append("--activation_checkpointing_kwargs has no effect: FSDP2 checkpoints each layer itself")
    return lines


def check_parts(job: Job, config: Mapping[str, Any]) -> None:
    """Check attention and degrees of parallelism against a model's configuration."""
    limits = ModelLimits(attention=read_model_attention(config), split=read_split(config))
    check_supported(None, job, model=limits)
