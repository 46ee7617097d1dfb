"""A checkpoint for another preset or another number of processes, optimizer states included.

>>> convert(Path("out/checkpoint-8"), Path("moved"), load_preset("zero3"), num_processes=4)

For DeepSpeed presets its universal layout is written, for FSDP2 a distributed checkpoint, else `optimizer.pt`: each
is read by any number of ranks. Schedule, step and data position carry over. The random states of the ranks do only
where their number stays: with another, dropout draws other numbers.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from toolkit.checkpoint.dcp_target import write_dcp
from toolkit.checkpoint.description import Description, Skeleton
from toolkit.checkpoint.export import SIDE_BYTES, check_free, check_room, check_whole, written_beside
from toolkit.checkpoint.layout import detect
from toolkit.checkpoint.plain_target import write_plain
from toolkit.checkpoint.source import Source, open_source
from toolkit.checkpoint.universal_target import write_universal
from toolkit.checkpoint.weights import check_names, name_states
from toolkit.errors import ToolkitError
from toolkit.presets import Preset
from toolkit.presets.world import check_trains_in
from toolkit.runs.checkpoints import complete, file_entries, files_of

WRITERS = {"deepspeed": write_universal, "fsdp2": write_dcp, "ddp": write_plain, "none": write_plain}
STATES = 3  # weight and two moments


def convert(
    path: Path, out: Path, preset: Preset, *, num_processes: int, base_model: str | None = None
) -> dict[str, Any]:
    """Write `out`, and return its manifest. Raises ToolkitError for a pair that is impossible, before writing."""
    check_pair(preset, num_processes)
    check_whole(path)
    check_free(out)
    check_source(path)
    description = Description(path, base_model)
    skeleton = Skeleton(description)
    source = open_source(path)
    try:
        name_states(source, skeleton)
        check_names(source, skeleton)
        groups = skeleton.groups(optimized_names(source))
        check_room(out, 4 * STATES * sum(map(math.prod, skeleton.shapes.values())) + SIDE_BYTES)
        with written_beside(out) as temporary:
            WRITERS[preset.engine](temporary, source, skeleton, groups)
            copy_side_files(description, temporary, same_ranks=detect(path).world_size == num_processes)
            manifest = converted_manifest(description, source, preset, num_processes, path)
            files = file_entries(temporary, files_of(temporary))
            complete(temporary, out.absolute(), manifest | {"files": files})
        return manifest
    finally:
        source.close()


def check_pair(preset: Preset, num_processes: int) -> None:
    """Refuse what cannot be resumed from any conversion."""
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        raise ToolkitError(
            f"preset {preset.name!r} swaps to NVMe: DeepSpeed resumes it only from its own swap files",
            hint="`--preset zero3_cpu_offload`",
        )
    check_trains_in(preset, num_processes, given=f"got {num_processes}", option="--num-processes")


def check_source(path: Path) -> None:
    """Refuse states that have no counterpart elsewhere."""
    layout = detect(path)
    if (layout.state_folder / "offloaded_tensors").is_dir():
        raise ToolkitError(
            f"{path} keeps its optimizer states as NVMe swap files, which only its own preset and ranks can read",
            hint="export its weights instead: `toolkit checkpoint export`",
        )
    if layout.engine == "plain" and not (path / "optimizer.pt").exists():
        raise ToolkitError(f"{path} has no optimizer states (optimizer.pt)", hint="it was saved with save_only_model")


def optimized_names(source: Source) -> list[str]:
    """Parameters with optimizer states. Raises ToolkitError for an optimizer that is not Adam."""
    names = source.optimized()
    if not names:
        raise ToolkitError(f"{source.layout.path} has no optimizer states of Adam's kind (exp_avg, exp_avg_sq)")
    try:
        first = source.moment(names[0], "exp_avg")
        source.optimizer_step()
    except KeyError as error:
        raise ToolkitError(
            f"{source.layout.path} holds no {error} for {names[0]}: only Adam and AdamW in fp32 are converted",
            hint="resume it with the preset and the number of processes that it was saved with",
        ) from None
    if str(first.dtype) != "torch.float32":
        raise ToolkitError(f"the moments in {source.layout.path} are {first.dtype}; only fp32 ones are converted")
    return names


def copy_side_files(description: Description, folder: Path, *, same_ranks: bool) -> None:
    """What does not depend on the engine: schedule, Trainer state, tokenizer, configuration, and random states."""
    own = ("scheduler.pt", "trainer_state.json", "training_args.bin")
    wanted: list[Path | None] = [description.path / name for name in own if (description.path / name).exists()]
    wanted += [*description.side_files(), description.find("config.json", base=not description.adapter)]
    wanted += [description.adapter_config if description.adapter else None]
    wanted += sorted(description.path.glob("rng_state*.pth")) if same_ranks else []
    wanted += sorted(description.path.glob("stream_rank*.json"))  # by lane, not by rank
    for file in wanted:
        if file is not None:
            shutil.copyfile(file, folder / file.name)


def converted_manifest(
    description: Description, source: Source, preset: Preset, num_processes: int, path: Path
) -> dict[str, Any]:
    """The source's manifest with the new preset; made from the files where there is none."""
    known = {k: v for k, v in description.manifest.items() if k not in ("files", "sha256", "schema_version")}
    state = json.loads((path / "trainer_state.json").read_text())
    engine = "none" if preset.engine == "ddp" and num_processes == 1 else preset.engine
    return {
        "step": state["global_step"],
        "adapter": description.adapter,
        "model_name_or_path": description.base,
        **known,
        "preset": preset.name,
        "engine": engine,
        "sharding": preset.sharding,
        "world_size": num_processes,
        **rescaled_batch(known, num_processes),
        "universal": preset.engine == "deepspeed",
        "converted_from": {
            "path": str(path.absolute()),
            "preset": known.get("preset"),
            "engine": known.get("engine", source.layout.engine),
            "world_size": known.get("world_size", source.layout.world_size),
        },
    }


def rescaled_batch(known: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """With other ranks the same global batch has other parts, which the run chooses; only the product is kept."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    if any(known.get(name) is None for name in names) or known["world_size"] == num_processes:
        return {}
    product = math.prod(int(known[name]) for name in names)
    return {"per_device_train_batch_size": None, "gradient_accumulation_steps": None, "global_batch_size": product}
