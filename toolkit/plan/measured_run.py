"""`--measured RUN`: a run on the user's own GPUs, by whose step the plans of other setups are calibrated.

What was trained is read from what its ranks attested, so that runs of `toolkit train`, trials of a comparison and
observed scripts are read alike. Its peaks are shown beside those of its plan and change no other plan: among published
rows of one source, peaks that are calibrated by another row are no closer (docs/evidence/plan-accuracy.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, known_gpu
from toolkit.job.job import BATCH_ARGUMENTS
from toolkit.models.shape import ModelShape
from toolkit.parallel.layout import DEGREES
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.methods import METHODS, SFT
from toolkit.plan.options import JobAndGpuOptions
from toolkit.plan.planned_job import PlannedJob, with_workspaces
from toolkit.plan.step_time import MeasuredStep, step_time
from toolkit.plan.training_setup import TrainingSetup
from toolkit.presets.preset import load_preset
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import Figures, read_steps
from toolkit.record.reading import RankReading
from toolkit.record.run_files import RecordedAttestation, RecordedRun, read_run, read_run_file
from toolkit.record.status import COMPLETED
from toolkit.units import NOT_AVAILABLE, gib, number, seconds

Options = TypeVar("Options", bound=JobAndGpuOptions)
SAME_SIZE = 0.01  # added tokens
SHORT_RUN = "a run of some 20 steps will do: `toolkit train ... --max_steps 20`"
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_driver_bytes")
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A completed run on GPUs, with timed steps."""

    folder: Path
    run: RecordedRun
    rank: RankReading
    figures: Figures
    gpu: str  # its name in the table of GPUs, or the driver's

    @classmethod
    def read(cls, path: Path) -> MeasuredRun:
        """Return the run of a folder. Raises ToolkitError for one that measured no speed of a GPU."""
        folder = RunFolder(path)
        if not folder.run_json.is_file():
            raise ToolkitError(f"--measured {path} is no run folder: it has no run.json", hint=SHORT_RUN)
        run = read_run(folder)
        ranks = read_run_file(folder.attestation_json, RecordedAttestation).ranks or (RankReading(),)
        names = sorted({str(gpu.get("name")) for gpu in (run.hardware or {}).get("gpus") or ()})
        why = None
        if run.status != COMPLETED:
            why = f"ended as {run.status}: a run that failed is no measure of speed"
        elif run.rehearsal is not None:
            why = "is a rehearsal: one rank that waits for no other"
        elif not names or str(ranks[0].device or (run.spec or {}).get("device")).startswith("cpu"):
            why = "trained on a CPU, whose speed says nothing of a GPU"
        elif len(names) > 1:
            why = f"was on a node with {' and '.join(names)}, and does not say which it used"
        elif run.preset is None:
            why = "does not record its preset: start the script with `toolkit train --preset NAME --script FILE`"
        elif run.measured is None or not run.measured.timed_steps or not run.measured.step_seconds_median:
            why = "has no timed steps: the first ones, which compile and allocate, do not count"
        if why is not None:
            raise ToolkitError(f"--measured {path} {why}", hint=SHORT_RUN)
        assert run.measured is not None
        known = known_gpu(names[0])
        name = names[0] if known is None else known.name
        return cls(folder=path, run=run, rank=ranks[0], figures=run.measured, gpu=name)

    def on_its_gpu(self, options: Options) -> Options:
        """Return a command's options with the run's GPU where they name none."""
        named = options.gpu is not None or options.gpu_memory_gib is not None
        return options if named else replace(options, gpu=self.gpu)

    def compared(self, shape: ModelShape, job: PlannedJob, gpu: Gpu) -> ComparedRun:
        """Return the run beside its plan. Raises ToolkitError where it trained something else than is planned.

        Its batch, lengths and degrees are its own; what nothing attests (the loss, attention) is the planned job's.
        """
        self._check_same(shape, job, gpu)
        run, rank, layout = self.run, self.rank, self.rank.layout or {}
        spec, preset = run.spec or {}, load_preset(str(run.preset))
        rows, steps = spec.get("per_device_train_batch_size"), spec.get("gradient_accumulation_steps")
        world_size, figures, tokens = run.world_size, self.figures, self.figures.tokens_per_second
        if not (rows and steps and world_size and tokens and figures.timed_seconds):
            hint = "a Trainer's batches show them, where they have `input_ids`"
            raise ToolkitError(f"--measured {self.folder} does not record its batch and its tokens", hint=hint)
        own = replace(
            job,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            activation_checkpointing=bool(rank.activation_checkpointing),
            accumulate=rank.accumulate,
            pipeline_schedule=(spec.get("model") or {}).get("pipeline_schedule"),
            pipeline_chunks=(spec.get("model") or {}).get("pipeline_chunks"),
            packing=bool((spec.get("data") or {}).get("packing")),
            lengths_differ=None,
            gpus_per_node=world_size // len(run.nodes) if len(run.nodes) > 1 else job.gpus_per_node,
            **{name: layout.get(name) if name in preset.parallel else None for name in DEGREES},  # type: ignore[arg-type]
        )
        setup = TrainingSetup(
            shape=job.method.model(shape),
            preset=preset,
            world_size=world_size,
            job=own,
            mixed_precision=PRECISIONS.get(rank.compute_dtype or "", preset.mixed_precision),
        )
        groups = world_size // (1 if setup.layout is None else setup.layout.ranks_per_batch)
        rows_per_step = groups * own.rows * steps
        length = max(1, round(tokens * figures.timed_seconds / figures.timed_steps / rows_per_step))
        longest = max((row.tokens or 0 for step in read_steps(RunFolder(self.folder)) for row in step), default=0)
        longest = max(length, longest // (own.rows * steps))
        setup = replace(setup, job=replace(own, max_seq_length=length))
        interconnect = Interconnect(gpu=gpu, world_size=world_size, gpus_per_node=own.gpus_per_node)
        planned = step_time(setup, interconnect)
        if planned is None:
            raise ToolkitError(f"no speed of {gpu.name} is planned in {rank.compute_dtype}", hint="add `--gpu-tflops`")
        median = float(figures.step_seconds_median or 0)
        return ComparedRun(
            step=MeasuredStep(
                run=str(self.folder),
                setup=setup,
                planned=planned,
                seconds=median,
                seconds_p90=max(median, figures.step_seconds_p90 or 0),
            ),
            memory=plan_memory(
                shape,
                preset,
                world_size=world_size,
                job=with_workspaces(replace(own, max_seq_length=longest), gpu),
                mixed_precision=setup.mixed_precision,
            ),
            longest_row=longest,
            figures=figures,
        )

    def _check_same(self, shape: ModelShape, job: PlannedJob, gpu: Gpu) -> None:
        """Raise ToolkitError for a run on another GPU, of another model, or of other parts of it."""
        rank, preset, model = self.rank, load_preset(str(self.run.preset)), job.method.model(shape)
        weights = TrainingSetup(shape=model, preset=preset, world_size=1, job=job).weights
        size, trained = model.num_params + (weights.num_trained if weights.adapters else 0), weights.num_trained
        script = Path(self.run.script or (self.run.argv or ("",))[0]).stem
        method = SFT if "model" in (self.run.spec or {}) else script if script in METHODS else job.method.method
        computed = PRECISIONS.get(rank.compute_dtype or "", preset.mixed_precision)
        in_4bit = bool(rank.load_in_4bit)
        differs = None
        if self.gpu != gpu.name.partition(",")[0] and gpu.name != "custom":
            differs = f"trained on {self.gpu}, and the plan is of {gpu.name}: `--gpu {self.gpu}`"
        elif not rank.num_params or abs(rank.num_params / size - 1) > SAME_SIZE:
            differs = f"trained a model of {number(rank.num_params, 0)} parameters, and the planned one has {size:,}"
        elif in_4bit != job.load_in_4bit:
            differs = f"trained {'beside' if in_4bit else 'without'} 4-bit weights, and the plan does not"
        elif abs((rank.num_trainable_params or 0) / trained - 1) > SAME_SIZE:
            differs = f"trained {rank.num_trainable_params:,} parameters, and the plan trains {trained:,}"
        elif job.method.generates:
            differs = f"may be a run of {job.method.method}: its steps generate too, which no plan does"
        elif method != job.method.method:
            differs = f"trained {method}, and the plan is of {job.method.method}"
        elif computed != preset.mixed_precision:
            differs = f"computed in {rank.compute_dtype}, and {preset.name} is planned in {preset.mixed_precision}"
        if differs is not None:
            hint = "presets, world sizes, batches and lengths may differ; model, method and GPU may not"
            raise ToolkitError(f"--measured {self.folder} {differs}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run and its plan."""

    step: MeasuredStep
    memory: MemoryPlan
    longest_row: int  # tokens of a row in the largest step, by which its memory is planned
    figures: Figures

    def as_row(self) -> dict[str, Any]:
        """Return the comparison as `--json` prints it."""
        step, setup, figures = self.step, self.step.setup, self.figures
        return {
            "run": step.run,
            "preset": setup.preset.name,
            "world_size": setup.world_size,
            **{name: setup.job.value(name) for name in BATCH_ARGUMENTS},
            "timed_steps": figures.timed_steps,
            "step_seconds_median": step.seconds,
            "step_seconds_estimate": step.planned.estimate_seconds,
            "ratio": step.ratio,
            "planned_allocated_bytes": self.memory.peak.allocated_bytes,
            "planned_peak_bytes": self.memory.planned_peak_bytes,
            **{name: getattr(figures, name) for name in PEAKS},
        }

    def lines(self) -> Iterator[str]:
        """Yield measured against planned step and peaks, for people."""
        step, setup, job = self.step, self.step.setup, self.step.setup.job
        batch = f"{job.per_device_train_batch_size} x {job.max_seq_length:,} tokens per GPU"
        yield (
            f"Speeds are calibrated by {step.run} ({setup.preset.name}, {setup.world_size} GPUs, {batch}): "
            f"{seconds(step.seconds)} per step measured, {seconds(step.planned.estimate_seconds)} planned."
        )
        low, high = step.planned.step_seconds
        if not low <= step.seconds <= high:
            yield (
                f"That is outside of the planned range, {seconds(low)} to {seconds(high)}: see what else limits the "
                "run (loading of data, clocks, other programs) before you rely on it."
            )
        shown = [NOT_AVAILABLE if (size := getattr(self.figures, name)) is None else gib(size) for name in PEAKS]
        yield (
            f"Its peak, planned for rows of {self.longest_row:,} tokens: {shown[0]} allocated (planned "
            f"{gib(self.memory.peak.allocated_bytes)}); {shown[1]} reserved, {shown[2]} in the driver's count (planned "
            f"{gib(self.memory.planned_peak_bytes)}). It changes no other plan."
        )
