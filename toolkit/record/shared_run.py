"""`toolkit report --share`: one row of a verified run that others may read, and the check of such rows.

Only the fields of `SharedRun` leave the run folder. A model is named only if it is one that the toolkit ships a count
of, so no path and no private name is shared. A data repository checks rows with `toolkit report --share ROW.json`.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files.documents import explain, read_json_object
from toolkit.hardware.gpu_table import known_gpu
from toolkit.installation import LIBRARIES, PACKAGE
from toolkit.models.read_model import known_models
from toolkit.record.folder import RunFolder, content_sha256
from toolkit.record.measurements import median_interval, read_steps, timed_steps
from toolkit.record.reading import RankReading
from toolkit.record.run_files import RecordedAttestation, RecordedRun, read_run, read_run_file
from toolkit.record.status import COMPLETED

ON_CPU = "cpu"
FLOPS_PER_PARAMETER = 4  # forward and the gradient of activations: what a frozen weight costs at least


class SharedRun(BaseModel):
    """What is shared of a run, and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = 1
    source: str | None = None  # publication of a row that is no run folder's
    model: str | None = None  # hub id, of a model whose count is shipped
    num_params: int = Field(gt=0)
    num_trainable_params: int = Field(gt=0)
    preset: str
    world_size: int = Field(gt=0)
    num_nodes: int = Field(default=1, gt=0)
    gpu: str  # name in the toolkit's table of GPUs
    per_device_train_batch_size: int = Field(gt=0)
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    max_seq_length: int = Field(gt=0)
    packing: bool | None = None
    activation_checkpointing: bool
    lora_r: int | None = None
    load_in_4bit: bool = False
    optim: str | None = None
    compute_dtype: str | None = None
    master_dtype: str | None = None
    versions: dict[str, str] = {}
    verification_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Digest of the run's attestation.json; null for a published row."""
    timed_steps: int | None = None
    step_seconds_median: float | None = Field(default=None, gt=0)
    step_seconds_interval: tuple[float, float] | None = None  # 95 % interval of the median
    tokens_per_second_per_gpu: float | None = Field(default=None, gt=0)
    padding_fraction: float | None = Field(default=None, ge=0, le=1)
    peak_allocated_bytes: int | None = Field(default=None, gt=0)
    peak_reserved_bytes: int | None = Field(default=None, gt=0)
    peak_driver_bytes: int | None = Field(default=None, gt=0)
    peak_host_bytes: int | None = Field(default=None, gt=0)
    planned_peak_bytes: int | None = Field(default=None, gt=0)
    planned_step_seconds: tuple[float, float] | None = None

    @classmethod
    def of_run(cls, path: Path) -> Self:
        """Return the row of a run folder. Raises ToolkitError for a run that is not complete and verified."""
        folder = RunFolder(path)
        if not folder.run_json.is_file():
            raise ToolkitError(f"{path} is no run folder: it has no run.json", hint="the folder of `--output_dir`")
        run, digest = read_run(folder), _digest(folder)
        attestation = read_run_file(folder.attestation_json, RecordedAttestation)
        rank = (attestation.ranks or (RankReading(),))[0]
        spec, figures = run.spec or {}, run.measured
        why = None
        if run.rehearsal is not None:  # which has no figures
            why = "is a rehearsal: one rank of a world that was not there"
        elif run.status != COMPLETED or figures is None:
            why = f"ended as {run.status}"
        elif digest is None:
            why = "is not verified: attestation.json is missing, changed, or not `attested`"
        if why is not None:
            raise ToolkitError(f"{path} {why}: nothing is shared of it", hint="share a completed, verified run")
        assert figures is not None
        versions = run.versions or {}
        model, data, plan = spec.get("model") or {}, spec.get("data") or {}, _plan(folder)
        timed = timed_steps(read_steps(folder), untimed_steps=model.get("untimed_steps") or 0)
        seconds = [max(row.seconds for row in rows) for rows in timed.values()]
        world_size = run.world_size or 1
        speed, name = figures.tokens_per_second, str(model.get("model_name_or_path"))
        fields = {
            "model": name if name in known_models() else None,
            "preset": run.preset,
            "world_size": world_size,
            "num_nodes": max(1, len(run.nodes)),
            "gpu": _gpu(run, rank),
            "max_seq_length": data.get("max_seq_length"),
            "packing": data.get("packing"),
            "activation_checkpointing": bool(rank.activation_checkpointing),
            "lora_r": model.get("lora_r"),
            "load_in_4bit": bool(rank.load_in_4bit),
            **{name: spec.get(name) for name in OF_SPEC},
            **{name: getattr(rank, name) for name in OF_RANK},
            "versions": {name: versions[name] for name in (*LIBRARIES, PACKAGE) if versions.get(name)},
            "verification_sha256": digest,
            "step_seconds_interval": median_interval(seconds),
            "tokens_per_second_per_gpu": None if speed is None else speed / world_size,
            **{name: getattr(figures, name) for name in (*OF_FIGURES, *PEAKS)},
            "planned_peak_bytes": plan.get("planned_peak_bytes"),
            "planned_step_seconds": plan.get("step_seconds"),
        }
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            hint = "share a run of `toolkit train`: one of your own script does not record how long its rows may be"
            raise ToolkitError(f"{path} lacks what is shared: {explain(error)}", hint=hint) from None

    def problems(self) -> list[str]:
        """Return why a row cannot be true, or is of no use to others."""
        found, gpu = [], known_gpu(self.gpu)
        if gpu is None and self.gpu != ON_CPU:
            found.append(f"gpu {self.gpu!r} is not in the table of GPUs")
        if self.verification_sha256 is None and self.source is None:
            found.append("neither verification_sha256 nor source: nobody can tell where it is from")
        peaks = [size for name in PEAKS[:-1] if (size := getattr(self, name)) is not None]
        if gpu is not None and peaks and max(peaks) > gpu.memory_bytes * 1.02:
            found.append(f"a peak of {max(peaks)} bytes is more than a {gpu.name} has, {gpu.memory_bytes}")
        speed, step = self.tokens_per_second_per_gpu, self.step_seconds_median
        tokens = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.max_seq_length
        if speed is not None and step is not None and speed > 2 * tokens / step:
            found.append(f"{speed:.0f} tokens/s per GPU are more than its batch has: {tokens} tokens in {step:g} s")
        peak = None if gpu is None else next(filter(None, gpu.peak_tflops), None)
        if speed is not None and gpu is not None and peak is not None:
            share = FLOPS_PER_PARAMETER * self.num_params * speed / (peak * 1e12)
            if share > 1:
                found.append(f"{speed:.0f} tokens/s per GPU need {share:.1f} times the peak of a {gpu.name}")
        interval = self.step_seconds_interval
        if interval is not None and step is not None and not interval[0] <= step <= interval[1]:
            found.append(f"step_seconds_interval {list(interval)} does not contain the median, {step:g}")
        return found


# Fields that are shared as they were recorded: of the run's settings, its first rank, and its figures.
OF_SPEC = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim")
OF_RANK = ("num_params", "num_trainable_params", "compute_dtype", "master_dtype")
OF_FIGURES = ("timed_steps", "step_seconds_median", "padding_fraction")
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_driver_bytes", "peak_host_bytes")


def check_shared_rows(path: Path) -> list[str]:
    """Return what is wrong with the row of a file; nothing for a good one."""
    try:
        return [f"{path}: {problem}" for problem in SharedRun.model_validate(read_json_object(path)).problems()]
    except ValidationError as error:
        return [f"{path}: {explain(error)}"]


def _gpu(run: RecordedRun, rank: RankReading) -> str:
    names = {str(gpu.get("name")) for gpu in (run.hardware or {}).get("gpus") or ()}
    if not names or str(rank.device).startswith("cpu"):
        return ON_CPU
    known = known_gpu(min(names))
    return min(names) if known is None or len(names) > 1 else known.name


def _plan(folder: RunFolder) -> dict[str, Any]:
    return read_json_object(folder.run_json, allow_nan=True).get("plan") or {}


def _digest(folder: RunFolder) -> str | None:
    """Return the digest of attestation.json; None where it is not of its text, or the run differs from its preset."""
    if not folder.attestation_json.is_file():
        return None
    body = read_json_object(folder.attestation_json, allow_nan=True)
    computed = content_sha256(body)
    return computed if body.get("sha256") == computed and body.get("verdict") == "attested" else None
