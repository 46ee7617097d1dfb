"""Convert a checkpoint to another preset or number of processes, with its optimizer states.

DeepSpeed presets get its universal layout, FSDP2 a distributed checkpoint, presets that are sharded at load a Hugging
Face folder with the optimizer's distributed checkpoint in it, the others `optimizer.pt`: any number of ranks reads each
of them. Schedule, step and data position are carried over. The ranks' random states are only if the number of ranks
stays: with another number dropout draws differ.
"""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint import hf_export
from toolkit.checkpoint.hf_checkpoint import CheckpointReader, write_plain
from toolkit.checkpoint.inspect import detect
from toolkit.checkpoint.model_definition import MetaModel, ModelFiles
from toolkit.checkpoint.sharded_checkpoints import write_at_load, write_dcp, write_universal
from toolkit.engines.ddp import Ddp, Single
from toolkit.engines.fsdp2 import Fsdp2
from toolkit.engines.safe_loading import torch_load
from toolkit.engines.zero import Zero
from toolkit.errors import ToolkitError
from toolkit.hardware.disks import check_free_space
from toolkit.job.job import Job
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_degrees_given, check_supported
from toolkit.record.checkpoints import add_checksums, checkpoint_files, commit_checkpoint, file_entries, read_step

BYTES_PER_PARAMETER = 3 * 4  # fp32 weight and Adam's two moments
# By engine of the preset that resumes: write weights and optimizer states, given the names in each parameter group.
WRITERS = {Zero.name: write_universal, Fsdp2.name: write_dcp, Ddp.name: write_plain, Single.name: write_plain}
RATES = ("base_lrs", "_last_lr", "lr_lambdas")  # entries of torch's schedules with one value per parameter group


def convert(
    path: Path,
    out: Path,
    preset: PresetSpec,
    *,
    num_processes: int,
    degrees: Mapping[str, int] | None = None,
    base_model: str | None = None,
    trust_pickle: bool = False,
) -> dict[str, Any]:
    """Write `out` and return its manifest; `degrees` are as in `{"tp": 2}`. Raises ToolkitError before it writes."""
    given = dict(degrees or {})
    check_degrees_given(preset, given, purpose="convert")
    check_supported(preset, Job().with_values(**given), world_size=num_processes, purpose="convert")
    hf_export.check_output(out, source=path)
    hf_export.check_complete(path)
    _check_source(path)
    files = ModelFiles(path, base_model)
    model = MetaModel(files)
    with contextlib.closing(hf_export.open_checkpoint(path, model, trust_pickle=trust_pickle)) as reader:
        groups = model.groups(_optimized_names(reader, model))
        needed = BYTES_PER_PARAMETER * sum(map(math.prod, model.shapes.values())) + hf_export.SIDE_FILE_BYTES
        check_free_space(out, needed, user=str(out))
        with hf_export.temporary_beside(out) as temporary:
            write = write_at_load if preset.sharded_at_load else WRITERS[preset.engine]
            write(temporary, reader, model, groups)
            _copy_side_files(files, temporary, same_ranks=reader.layout.world_size == num_processes)
            _convert_schedule(temporary / "scheduler.pt", groups, preset)
            layout = preset.layout(num_processes, given)
            manifest = _converted_manifest(files, reader, preset, num_processes, layout)
            entries = file_entries(temporary, checkpoint_files(temporary))
            commit_checkpoint(temporary, out.absolute(), manifest | {"files": entries})
            add_checksums(out.absolute())
        return manifest


def _check_source(path: Path) -> None:
    layout = detect(path)
    if (layout.state_folder / "offloaded_tensors").is_dir():
        raise ToolkitError(
            f"{path} keeps its optimizer states as NVMe swap files, which only its own preset and ranks can read",
            hint="export its weights instead: `toolkit checkpoint export`",
        )
    if layout.engine == "pipeline":
        raise ToolkitError(
            f"{path} has the optimizer states of a pipeline's stages, which only the same stages can read",
            hint=f"resume with the same `--pp`, or start from its weights: `--model_name_or_path {path}`",
        )
    if layout.engine == "plain" and not (path / "optimizer.pt").exists():
        raise ToolkitError(f"{path} has no optimizer states (optimizer.pt)", hint="it was saved with save_only_model")


def _optimized_names(reader: CheckpointReader, model: MetaModel) -> list[str]:
    names = reader.optimized()
    if not names:
        raise ToolkitError(f"{reader.layout.path} has no Adam optimizer states (exp_avg, exp_avg_sq)")
    unknown = [name for name in names if name not in model.shapes]
    if unknown:
        raise ToolkitError(f"{reader.layout.path} has optimizer states of {unknown[0][:80]}, which the model lacks")
    first = reader.moment(names[0], "exp_avg")
    quantized = hasattr(first, "__tensor_flatten__")  # torchao's, which say that they are fp32
    held = type(first).__name__ if quantized else str(first.dtype)
    if held != "torch.float32":
        raise ToolkitError(f"the moments in {reader.layout.path} are {held}; only fp32 ones are converted")
    return names


def _copy_side_files(files: ModelFiles, folder: Path, *, same_ranks: bool) -> None:
    names = ("scheduler.pt", "trainer_state.json", "training_args.bin", "stream_rank*.json")
    patterns = [*names, "rng_state*.pth"] if same_ranks else names
    copied: list[Path | None] = [file for pattern in patterns for file in sorted(files.path.glob(pattern))]
    copied += [*files.tokenizer_files(), files.find("config.json", base=not files.adapter)]
    copied += [files.adapter_config if files.adapter else None]
    for file in filter(None, copied):
        hf_export.copy_file(file, folder / file.name)


def _convert_schedule(path: Path, groups: list[list[str]], preset: PresetSpec) -> None:
    """Give the schedule a rate for each group of the new optimizer.

    DeepSpeed, and a model that is sharded at load, have no groups without parameters, such as LoRA's without weight
    decay. A model that is sharded at load may have had more groups, one per mesh.
    """
    if not path.exists():
        return
    state = torch_load(path)
    if not isinstance(state, dict):
        raise ToolkitError(f"scheduler.pt is {type(state).__name__}, expected keys and values")
    every, with_parameters = list(range(len(groups))), [position for position, names in enumerate(groups) if names]
    wanted = every if preset.traits.keeps_empty_groups else with_parameters
    for name in RATES:
        values = state.get(name)
        if not isinstance(values, list):
            continue
        saved = with_parameters if len(values) == len(with_parameters) else every
        if len(values) != len(saved) and any(value != values[0] for value in values):
            raise ToolkitError(
                f"scheduler.pt has {len(values)} parameter groups with different learning rates, expected {len(saved)}",
                hint="resume it with the preset and the number of processes that it was saved with",
            )
        known = dict(zip(saved, values, strict=False))
        state[name] = [known.get(position, values[0]) for position in wanted] if values else []
    torch.save(state, path)


def _converted_manifest(
    files: ModelFiles, reader: CheckpointReader, preset: PresetSpec, num_processes: int, layout: ParallelLayout | None
) -> dict[str, Any]:
    manifest, recorded, batch = files.manifest, {}, {}
    if manifest is not None:
        recorded = manifest.model_dump(exclude_unset=True, exclude={"files", "sha256", "schema_version"})
        data_parallel_size = num_processes if layout is None else layout.data_parallel_size
        different_batches = (manifest.data_parallel_size or manifest.world_size) != data_parallel_size
        if manifest.sequences_per_step is not None and different_batches:
            # Only the global batch is recorded; the run chooses its factors.
            factors = ("per_device_train_batch_size", "gradient_accumulation_steps", "data_parallel_size")
            batch = dict.fromkeys(factors) | {"global_batch_size": manifest.sequences_per_step}
    return {
        "step": read_step(files.path / "trainer_state.json"),
        "adapter": files.adapter,
        "model_name_or_path": files.base,
        **recorded,
        "preset": preset.name,
        "engine": preset.traits.in_effect(num_processes),
        "sharding": preset.sharding,
        "world_size": num_processes,
        "layout": None if layout is None else layout.degrees(),
        "sharded_at_load": preset.sharded_at_load,
        **batch,
        "universal": preset.traits.writes_universal,
        "converted_from": {
            "path": str(files.path.absolute()),
            "preset": recorded.get("preset"),
            "engine": recorded.get("engine", reader.layout.engine),
            "world_size": recorded.get("world_size", reader.layout.world_size),
        },
    }
