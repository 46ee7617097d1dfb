"""Refuse in under a second what can be known before any rank starts: names, files, rows, arithmetic, disk.

Nothing here imports torch. What only a rank can find out (a hub model's weights, GPU memory) is found there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.files import check_file, is_hub_id, resolve_source
from toolkit.errors import ToolkitError
from toolkit.hardware.gpus import count_gpus
from toolkit.launch.restarts import Limits
from toolkit.presets import Preset
from toolkit.presets.world import check_trains_in
from toolkit.runs.argv import DEFAULT_BATCH, flag, integer, read_arguments, resumes
from toolkit.runs.checkpoints import (
    LATEST_WORDS,
    Checkpoint,
    check_goes_on,
    check_named,
    check_same_layout,
    list_checkpoints,
)
from toolkit.runs.folder import RunFolder, read_json
from toolkit.runs.rows import check_rows_fill_a_step, streaming_buffer_size
from toolkit.runs.switches import check_switches
from toolkit.units import gib

POSITIVE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_seq_length",
    "lora_r",
    "lora_alpha",
    "preprocessing_num_workers",
    "streaming_buffer_size",
)
DEFAULT_SEED = 42  # transformers' seed
# Bytes of one checkpoint over those of the fp32 weights: weights, momentum and variance; DeepSpeed keeps an fp32 master
# too, and writes the weights once as its own and (ZeRO-1, 2) once as safetensors. Tied embeddings may be written twice.
CHECKPOINT_WEIGHTS = {"none": 3, "ddp": 3, "fsdp2": 3, "deepspeed": 5}
DEFAULT_SAVE_STEPS = 500  # transformers' save_steps
WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Training arguments that passed every check that needs no torch."""

    arguments: dict[str, Any]
    global_batch_size: int
    """Sequences an optimizer step, over all ranks."""


def check_job(
    preset: Preset, *, num_processes: int, training_argv: Sequence[str], cpu: bool, gpus: int | None = None
) -> Job:
    """Every check; the caller checks the output folder, which a comparison chooses itself.

    `gpus` is how many there are where it is not this machine that trains.

    Raises ToolkitError for the first thing that is wrong.
    """
    if gpus is None and not cpu:
        gpus = count_gpus()
    check_process_count(num_processes, gpus=gpus, preset=preset)
    arguments = read_arguments(training_argv)
    check_required(arguments, ("model_name_or_path", "dataset"))
    check_positive(arguments)
    check_switches(arguments, preset, num_processes=num_processes, on_cpu=cpu)
    check_model(str(arguments["model_name_or_path"]))
    rows = check_dataset(str(arguments["dataset"]))
    if arguments.get("eval_dataset") is not None:
        check_dataset(str(arguments["eval_dataset"]))
    batch = global_batch_size(arguments, num_processes)
    check_rows_fill_a_step(rows, batch, str(arguments["dataset"]), packing=flag(arguments.get("packing", False)))
    return Job(arguments=arguments, global_batch_size=batch)


def check_limits(limits: Limits) -> None:
    """Minutes and counts that mean something."""
    given = {
        "--hang-timeout-minutes": limits.hang_timeout_minutes,
        "--stop-minutes": limits.stop_minutes,
        "--max-restarts": limits.max_restarts,
    }
    for name, value in given.items():
        if value is not None and not value >= 0:
            raise ToolkitError(f"{name} is {value:g}, expected 0 or more")


def check_process_count(num_processes: int, *, gpus: int | None, preset: Preset) -> None:
    """At least what the preset needs, and no more than the GPUs (None: training on the CPU)."""
    if num_processes < 1:
        raise ToolkitError(f"--num-processes is {num_processes}, expected 1 or more")
    if gpus is None:
        check_runs_on_cpu(preset)
    check_trains_in(preset, num_processes, given=f"got {num_processes}", option="--num-processes")
    if gpus is not None and num_processes > gpus:
        raise ToolkitError(
            f"{num_processes} processes, but {gpus} GPUs are visible here",
            hint=f"`--num-processes {gpus}`" if gpus else "`--cpu` trains on the CPU",
        )


def check_runs_on_cpu(preset: Preset) -> None:
    """Refuse a preset whose kernels a CPU does not have."""
    if preset.needs_gpu is not None:
        raise ToolkitError(f"preset {preset.name!r} does not run on a CPU: {preset.needs_gpu}", hint="`--preset zero3`")


def check_required(arguments: dict[str, Any], names: Sequence[str]) -> None:
    """Arguments without which no run makes sense."""
    for name in names:
        if arguments.get(name) in (None, True, ""):
            raise ToolkitError(f"--{name} is missing", hint=f"add `-- --{name} ...` after the toolkit's own options")


def check_positive(arguments: dict[str, Any]) -> None:
    """Counts that must be at least one."""
    for name in POSITIVE:
        if name in arguments and arguments[name] is not None and integer(arguments, name, 1) < 1:
            raise ToolkitError(f"--{name} is {arguments[name]}, expected 1 or more")
    for name in ("stop_when_steps_within", "stop_after_minutes"):
        if arguments.get(name) is not None and not float(arguments[name]) > 0:
            raise ToolkitError(f"--{name} is {arguments[name]}, expected more than 0")


def check_model(name: str) -> None:
    """A local folder with its configuration and weights, or something that can be a hub id."""
    folder = local_folder(name)
    if os.path.isdir(folder):  # noqa: PTH112  (`Path.is_dir` raises for a name that is too long)
        if not (folder / "config.json").is_file():
            raise ToolkitError(
                f"model folder {name} has no config.json", hint="name the folder that `save_pretrained` wrote"
            )
        if read_json(folder / "config.json") is None:
            raise ToolkitError(f"{folder / 'config.json'} is not a JSON object", hint="download the model again")
        if not any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir()):
            raise ToolkitError(f"model folder {name} has no weights (*.safetensors or *.bin)")
        return
    if os.path.exists(folder) or not is_hub_id(name):  # noqa: PTH110
        raise ToolkitError(
            f"model {name!r} is neither a folder nor a hub id",
            hint="a hub id looks like `owner/name`; a folder must exist",
        )
    check_hub_model(name)


def local_folder(name: str) -> Path:
    """Where a model would be if its name is a folder's."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  (`Path.expanduser` raises for an unknown user)


def check_hub_model(name: str) -> None:
    """Fetch a hub model's config.json, which is small, so that a wrong id is refused before ranks start."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        hf_hub_download(name, "config.json")
    except Exception as error:  # many kinds, of which all mean that the ranks could not load it either
        words = str(error).strip().splitlines()
        raise ToolkitError(
            f"model {name!r} cannot be loaded from the hub: {words[0] if words else type(error).__name__}",
            hint="check the id and the network, or name a local folder",
        ) from None


def check_dataset(source: str) -> int | None:
    """Rows of a local file, each checked; None where a hub id or a very long file leaves the number open."""
    resolved = resolve_source(source)
    if resolved.path is None:
        return None
    checked = check_file(resolved.path)
    return checked.rows if checked.complete else None


def global_batch_size(arguments: dict[str, Any], num_processes: int) -> int:
    """Sequences an optimizer step: micro-batch x accumulation steps x ranks."""
    micro = integer(arguments, "per_device_train_batch_size", DEFAULT_BATCH)
    return micro * integer(arguments, "gradient_accumulation_steps", 1) * num_processes


def check_output(arguments: dict[str, Any], *, engine: str = "deepspeed") -> Path:
    """The output folder: named, free, writable, on a disk with room for the checkpoints and the trained model."""
    check_required(arguments, ("output_dir",))
    folder = RunFolder(Path(str(arguments["output_dir"])))
    folder.check_unused(resume=resumes(arguments))
    folder.check_writable()
    check_disk(folder.path, needed=saved_bytes(arguments, engine=engine))
    return folder.path


def check_resume(preset: Preset, *, num_processes: int, arguments: dict[str, Any]) -> None:
    """Hold the checkpoint that the run is to go on from against the run, before any rank starts.

    One that is named is read to its last byte. `latest` is found, and read, by rank 0; here its manifest is enough.
    """
    if not resumes(arguments):
        return
    asked = str(arguments["resume_from_checkpoint"])
    if asked.lower() not in LATEST_WORDS:
        checkpoint: Checkpoint | None = check_named(Path(asked))
    else:
        there = list_checkpoints(Path(str(arguments["output_dir"])))
        checkpoint = next((found for found in there if found.problem() is None), None)
    if checkpoint is None:
        return
    check_same_layout(checkpoint, engine=preset.engine, sharding=preset.sharding, world_size=num_processes)
    check_goes_on(
        checkpoint,
        per_device_train_batch_size=integer(arguments, "per_device_train_batch_size", DEFAULT_BATCH),
        gradient_accumulation_steps=integer(arguments, "gradient_accumulation_steps", 1),
        seed=integer(arguments, "seed", DEFAULT_SEED),
        max_steps=integer(arguments, "max_steps", -1),
        streaming_buffer_size=streaming_buffer_size(arguments),
    )


def saved_bytes(arguments: dict[str, Any], *, engine: str) -> int:
    """Bytes of the trained model and of the checkpoints beside it; adapters are small beside their base."""
    if arguments.get("lora_r") is not None:
        return 0
    weights = weight_bytes(local_folder(str(arguments["model_name_or_path"])))
    model = weights if flag(arguments.get("save_model", True)) else 0
    return model + checkpoints_on_disk(arguments) * CHECKPOINT_WEIGHTS[engine] * weights


def checkpoints_on_disk(arguments: dict[str, Any]) -> int:
    """The most that lie there at once: an old one is removed only when the new one is complete.

    Where the number of saves is not known before the data are read, as many as are kept, or one.
    """
    strategy = str(arguments.get("save_strategy", "steps"))
    if strategy == "no":
        return 0
    limit = integer(arguments, "save_total_limit", 0)
    steps, every = integer(arguments, "max_steps", -1), float(arguments.get("save_steps") or DEFAULT_SAVE_STEPS)
    every = every * steps if 0 < every < 1 else every  # a share of all steps
    saves = -(-steps // max(1, int(every))) if steps > 0 and strategy == "steps" else max(1, limit + 1)
    return min(saves, limit + 1) if limit > 0 else saves


def weight_bytes(model: Path) -> int:
    """Bytes that a local model takes when its weights are saved in fp32; 0 for a hub id."""
    if not model.is_dir():
        return 0
    config = read_json(model / "config.json") or {}
    halves = str(config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")
    stored = sum(path.stat().st_size for path in model.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    return stored * 2 if halves else stored


def check_disk(folder: Path, *, needed: int) -> None:
    """Refuse a disk without room for what will be saved."""
    existing = next((path for path in [folder, *folder.absolute().parents] if path.is_dir()), Path("/"))
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ToolkitError(
            f"{existing} has {gib(free)} free, what the run saves needs about {gib(needed)}",
            hint="name a folder on another disk: `--output_dir DIR`; `--save_strategy no` writes no checkpoint",
        )
