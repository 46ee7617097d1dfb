"""Checks of a job in under a second, before any rank starts: names, files, rows, batch arithmetic, disk space.

Nothing here imports torch. What only a rank can know (a hub model's weights, GPU memory) is checked there.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from toolkit.data.data_files import check_columns, check_file, is_hub_id, resolve_sources, rows_per_epoch
from toolkit.engines.compiled_ops import check_architectures
from toolkit.engines.engine import Engine
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_text
from toolkit.files.model_weights import check_weights
from toolkit.files.paths import user_path
from toolkit.hardware.disks import check_free_space
from toolkit.hardware.gpus import count_gpus
from toolkit.installation import TRAIN, require, require_versions
from toolkit.job.argument_values import as_list
from toolkit.job.dataset_checks import check_rows_fill_a_step, check_val_size
from toolkit.job.job import Job
from toolkit.launch.resume import TrainingRun
from toolkit.models.config_fields import read_config
from toolkit.models.hub import download_config, no_such_model
from toolkit.models.read_model import config_path
from toolkit.presets.compatibility import Device
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_arguments, check_parts, check_supported
from toolkit.record.attempts import Reuse, check_start, reuse_of
from toolkit.record.checkpoints import LATEST_WORDS, list_checkpoints
from toolkit.record.folder import RunFolder, read_json

# Processes on one node; a GPU node has 16 at most, and on a CPU each needs half a GiB before it loads anything.
LARGEST_NODE = 1024
# Marks the text that the model generates; transformers adds this tag to Jinja.
GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
INPUTS = ("model_name_or_path", "dataset", "eval_dataset", "chat_template")
# What a run writes into its folder: its records, and the model with its tokenizer; and what it moves away.
WRITTEN = (
    *("run.json", "attestation.json", "failure.json", "fingerprint.json", "train.log", "run.lock"),
    *("config.json", "generation_config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "README.md"),
    *("ranks", "profile", "checkpoint-*"),
)
WEIGHT_SUFFIXES = (".safetensors", ".bin")


def check_run(run: TrainingRun) -> TrainingRun:
    """Check all but the output folder; return the run with warnings and steps. Raises ToolkitError for a problem."""
    job = run.job
    check_process_count(run)
    check_required(job, ("model_name_or_path", "dataset"))
    warnings = check_arguments_of(run)
    revision = job.revision if "revision" in job.given else None
    config = check_model(str(job.model_name_or_path), revision=revision, starts=run.starts)
    check_parts(job, config)
    rows, names = check_dataset(job), ", ".join(job.dataset)
    if job.val_size is not None and rows is not None and not job.dataset_weights:
        held_out = check_val_size(job.val_size, rows=rows)
        rows, names = rows - held_out, f"without the {held_out} of --val_size, {names}"
    if job.eval_dataset is not None:
        _rows_of(job, "eval_dataset")
    check_columns(job.column or {}, [*job.dataset, *as_list(job.eval_dataset)])
    check_chat_template(job)
    run = replace(run.accumulated(), warnings=tuple(warnings))
    check_rows_fill_a_step(rows, run.global_batch_size, names, packing=job.packing)
    return run


def check_arguments_of(run: TrainingRun) -> list[str]:
    """Check the arguments under the preset, and return one warning for each that has no effect."""
    on_cpu = run.device.type == "cpu"
    return check_arguments(run.job, run.preset, num_processes=run.num_processes, on_cpu=on_cpu, here=run.is_here)


def device_of(*, on_cpu: bool, ranks_per_gpu: int = 1, gpus: int | None = None) -> Device:
    """Return what ranks run on: the CPU, or GPUs, as many as are visible here unless their number is given."""
    if on_cpu:
        return Device(type="cpu", ranks_per_gpu=ranks_per_gpu)
    return Device(count=count_gpus() if gpus is None else gpus, ranks_per_gpu=ranks_per_gpu)


def check_libraries(preset: PresetSpec, *, runs_script: bool) -> None:
    """Raise ToolkitError for a missing or old library of the ranks, and GPUs that its ops are not compiled for."""
    engine = preset.traits.libraries
    if runs_script:  # which may need other versions than our own script
        require(*TRAIN[:3], *engine)
    else:
        require_versions(*TRAIN, *engine)
    if preset.traits.compiles_ops and preset.offloads and count_gpus():
        check_architectures()


def check_process_count(run: TrainingRun) -> None:
    """Raise ToolkitError for more processes than GPUs, or a world size that the preset rejects."""
    if run.num_processes < 1:
        raise ToolkitError(f"--num-processes is {run.num_processes}, expected 1 or more")
    if run.num_processes > LARGEST_NODE * run.nodes:
        raise ToolkitError(f"--num-processes is {run.num_processes:,}, expected {LARGEST_NODE:,} or less on one node")
    if run.device.ranks_per_gpu > 1 and not run.device.count:
        hint = "leave it out: on a CPU any number of ranks runs"
        raise ToolkitError("--ranks-per-gpu needs a GPU, and this run has none", hint=hint)
    check_supported(run.preset, world_size=run.num_processes, device=run.device)


def check_required(job: Job, names: Sequence[str]) -> None:
    """Raise ToolkitError for a required argument that is missing."""
    for name in names:
        if name not in job.given or not "".join(map(str, as_list(job.value(name)))).strip():
            hint = f"add `--{name} ...` behind the `--` that ends the toolkit's own options"
            raise ToolkitError(f"--{name} is missing", hint=hint)


def check_model(name: str, *, revision: str | None = None, starts: bool = True) -> dict[str, Any]:
    """Check a model's folder, or its id on the hub; return its configuration (if nothing `starts`, the plan's)."""
    folder = Path(name)
    if os.path.isdir(folder):  # noqa: PTH112  (`Path.is_dir` raises for a name that is too long)
        if not (folder / "config.json").is_file():
            hint = "name the folder that `save_pretrained` wrote"
            raise ToolkitError(f"model folder {name} has no config.json", hint=hint)
        config = read_config(folder / "config.json")
        check_weights(folder)
        return config
    if os.path.exists(folder) or not is_hub_id(name):  # noqa: PTH110
        raise no_such_model(name)
    # it is small, and a wrong id is found before ranks start
    return read_config(download_config(name, revision=revision) if starts or revision else config_path(name))


def check_dataset(job: Job) -> int | None:
    """Check each row of the local files of `--dataset`, and return the rows of an epoch; None if not known."""
    rows = _rows_of(job, "dataset")
    known = [count for count in rows if count is not None]
    return sum(rows_per_epoch(known, job.dataset_weights or None)) if len(known) == len(rows) else None


def check_chat_template(job: Job) -> None:
    """Raise ToolkitError for a file of `--chat_template` that cannot be read, or is not a template."""
    if job.chat_template is None:
        return
    from jinja2 import Environment, TemplateSyntaxError

    text = GENERATION_TAG.sub("", read_text(user_path(job.chat_template)))
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(text)
    except TemplateSyntaxError as error:
        why = f"{job.chat_template}: line {error.lineno}: {error.message}"
        raise ToolkitError(why, hint="fix it, or leave out `--chat_template`: the model has its own") from None


def _rows_of(job: Job, option: str) -> list[int | None]:
    sources = resolve_sources(as_list(job.value(option)), config=job.value(f"{option}_config"), option=option)
    checked = [None if each.path is None else check_file(each.path, columns=job.column or {}) for each in sources]
    return [each.rows if each is not None and each.complete else None for each in checked]


def check_output(job: Job, engine: Engine) -> Path:
    """Return the output folder, which must be unused and writable, with disk space for checkpoints and the model."""
    check_required(job, ("output_dir",))
    folder = RunFolder(user_path(str(job.output_dir)))
    check_inputs_stay(folder, job)
    folder.check_free()
    check_start(folder, reuse_folder(job))
    folder.check_writable()
    hint = "name a folder on another disk: `--output_dir DIR`; `--save_strategy no` writes no checkpoint"
    check_free_space(folder.path, saved_bytes(job, engine), user="the run", hint=hint)
    return folder.path


def check_inputs_stay(folder: RunFolder, job: Job) -> None:
    """Raise ToolkitError where the run's files would mix with the user's, or replace the model or the data."""
    path = Path(os.path.realpath(folder.path))
    places = {Path(path.anchor): "the root of the file system", user_path("~").resolve(): "the home folder"}
    if path in places:
        hint = f"name a folder of its own: `--output_dir {folder.path / 'out'}`"
        raise ToolkitError(f"output_dir {folder.path} is {places[path]}", hint=hint)
    for name in INPUTS:
        for given in as_list(job.value(name)):
            source = Path(os.path.realpath(str(given)))
            inside = source.relative_to(path).parts if source.is_relative_to(path) else ()
            replaced = source == path or (inside and any(fnmatch(inside[0], pattern) for pattern in WRITTEN))
            if os.path.exists(str(given)) and replaced:  # noqa: PTH110
                raise ToolkitError(
                    f"--{name} {given} is in output_dir {folder.path}, where the run would replace it",
                    hint="name another folder: `--output_dir DIR`",
                )
    if not folder.run_json.exists() and any(path.glob("*.safetensors")):
        raise ToolkitError(
            f"output_dir {folder.path} holds a model that no run has written there (*.safetensors)",
            hint="name another folder, `--output_dir DIR`: the trained model would replace it",
        )


def reuse_folder(job: Job) -> Reuse:
    """Return what the job may do with a run that is in its output folder."""
    return reuse_of(continues=continues(job), resumes=job.resumes, overwrite=job.overwrite_output_dir)


def continues(job: Job) -> bool:
    """Return True if the run resumes and there is something to resume from: `latest` may find no checkpoint."""
    if not job.resumes or str(job.resume_from_checkpoint).lower() not in LATEST_WORDS:
        return job.resumes
    return any(checkpoint.problem() is None for checkpoint in list_checkpoints(Path(str(job.output_dir))))


def saved_bytes(job: Job, engine: Engine) -> int:
    """Return the bytes of the trained model and its checkpoints; 0 for adapters, which are small, and a hub id."""
    folder = Path(str(job.model_name_or_path))
    if job.is_lora or not folder.is_dir():
        return 0
    config = read_json(folder / "config.json") or {}
    is_half = str(config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")
    stored = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    weights = stored * 2 if is_half else stored  # in fp32
    return weights * (int(job.save_model) + checkpoints_on_disk(job) * engine.checkpoint_weights)


def checkpoints_on_disk(job: Job) -> int:
    """Return the most checkpoints on disk at once; without --max_steps `save_total_limit` + 1, or one."""
    if not job.saves_checkpoints:
        return 0
    limit, steps, every = job.save_total_limit or 0, job.max_steps, job.save_steps
    every = every * steps if 0 < every < 1 else every  # a fraction of all steps
    saves = -(-steps // max(1, int(every))) if steps > 0 and job.save_strategy == "steps" else max(1, limit + 1)
    return min(saves, limit + 1) if limit > 0 else saves
