"""What a rehearsal can tell of a preset, and what it must refuse."""

from __future__ import annotations

from toolkit.errors import ToolkitError
from toolkit.presets import Preset
from toolkit.presets.world import check_trains_in


def check_rehearsal(preset: Preset, *, world_size: int, rank: int) -> None:
    """Refuse a world that the preset does not train in, a rank that is not in it, and what no rehearsal can tell."""
    if world_size < 1:
        raise ToolkitError(f"--world-size is {world_size}, expected 1 or more")
    check_trains_in(preset, world_size, given=f"--world-size is {world_size}", option="--world-size")
    if not 0 <= rank < world_size:
        raise ToolkitError(
            f"--rank is {rank}, and a world of {world_size} has ranks 0 to {world_size - 1}", hint="`--rank 0`"
        )
    why = cannot_rehearse(preset)
    if why is not None:
        raise ToolkitError(
            f"preset {preset.name!r} cannot be rehearsed: {why}", hint="`toolkit plan` has its arithmetic"
        )


def check_traced(preset: Preset) -> None:
    """Refuse what does not run on fake tensors."""
    why = cannot_trace(preset)
    if why is not None:
        raise ToolkitError(
            f"--fake-tensors does not work with preset {preset.name!r}: {why}",
            hint="leave --fake-tensors out, for exact bytes of the model states; or `--preset fsdp2`",
        )


def cannot_rehearse(preset: Preset) -> str | None:
    """Why the preset's engine does not run with collectives that move nothing, or None where it does."""
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        return "its swap files belong to a real run on a real disk"
    if preset.needs_gpu is not None:
        return f"{preset.needs_gpu}, and its quantised collectives need other ranks"
    return None


def cannot_trace(preset: Preset) -> str | None:
    """Why the preset's engine does not run on fake tensors, or one memory would not tell its parts apart."""
    if preset.engine == "deepspeed":
        return "DeepSpeed looks into its tensors' values and addresses"
    if preset.offload_optimizer or preset.offload_param:
        return "what is offloaded and what is not would lie in one memory"
    return None
