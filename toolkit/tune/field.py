"""The settings of a job that `toolkit tune` tries, and those that it does not, each with the reason.

A setting keeps the problem: the sequences of a step, their length, the optimizer, its rate and the dtypes. It changes
the preset, the per-GPU batch (with the accumulation steps that keep the sequences of a step), activation checkpointing,
the loss and `torch.compile`. The user's own setting is always the first.

The plan prunes before anything runs: what is invalid here, what does not fit, and, on a known GPU, what cannot win,
because the best case of its step time is slower than the worst case of the best plan. What a plan calls too close is
tried. Of the rest `--max-settings` are tried: on a GPU those with the shortest planned step, otherwise those that
change the fewest parts of the user's own setting.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.compare.specification import parse_variant
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, common_gpu, find_gpu
from toolkit.hardware.gpus import count_gpus, gpu_names
from toolkit.hardware.node import usable_memory_bytes
from toolkit.job.global_batch import BATCH_ARGUMENT, global_batch_size, with_accumulation
from toolkit.job.job import Job
from toolkit.launch.preflight import check_process_count
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.candidates import RecommendRequest, candidate_of, divided_request, memory_refusal
from toolkit.plan.memory import DOES_NOT_FIT, FITS, plan_memory
from toolkit.plan.planned_job import PlannedJob, check_planned_job, node_memory
from toolkit.presets.compatibility import CPU, Device
from toolkit.presets.preset import list_presets, load_preset
from toolkit.presets.preset_checks import check_arguments
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_supported
from toolkit.tune.options import PARTS, TuneOptions
from toolkit.units import gib, seconds

YOURS = "yours"
ACCUMULATION = "gradient_accumulation_steps"
_CHECKPOINTING, _OFFLOAD = "activation_checkpointing", "activation_checkpointing_offload"
VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "checkpointing": {
        "no_checkpointing": {_CHECKPOINTING: False, _OFFLOAD: False},
        "checkpointing": {_CHECKPOINTING: True, _OFFLOAD: False},
        "checkpointing_offload": {_CHECKPOINTING: True, _OFFLOAD: True},
    },
    "loss": {
        "chunked": {"loss": "auto", "use_liger_kernel": False},
        "full": {"loss": "full", "use_liger_kernel": False},
        "liger": {"loss": "auto", "use_liger_kernel": True},
    },
    "compile": {"eager": {"torch_compile": False}, "compile": {"torch_compile": True}},
}
"""The values of each part beside preset and batch, as training arguments."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a job: what of the user's own it changes, and what the plan says of it."""

    name: str
    preset: str
    """What `load_preset` takes."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Training arguments that are not the user's, by name."""
    words: tuple[str, ...] = ()
    """Training arguments of its trials beside the user's, with the batch."""
    changed: tuple[str, ...] = ()
    """Parts in which it differs from the user's own setting."""
    family: tuple[str, ...] = ()
    """The setting without its batch: a larger batch does not fit where a smaller one did not."""
    batch: int = 0
    verdict: str | None = None
    """The plan's verdict; None where nothing is planned."""
    planned_step_seconds: tuple[float, float] | None = None
    estimate_seconds: float = 0.0
    """The planned step, for the order; 0 where none is planned."""

    @property
    def added_words(self) -> tuple[str, ...]:
        """Training arguments that it adds to the user's."""
        return words_of(self.changes) if self.family else self.words

    @property
    def variant(self) -> str:
        """The setting as `toolkit compare --variant` takes it."""
        return f"{self.name}={shlex.join([self.preset, *self.words])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NotTried:
    """A setting that is not tried, or a preset of which none is."""

    name: str
    kind: str
    """`invalid`, `does not fit`, `cannot win`, or `not among the first`."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Field:
    """Everything that could be tried; the user's own setting is the first of `settings`."""

    settings: tuple[Setting, ...]
    not_tried: tuple[NotTried, ...] = ()


def make_field(options: TuneOptions, preset: str) -> Field:
    """Return the field of a job whose own setting has this preset. Raises ToolkitError where that is invalid."""
    variants = [parse_variant(text, runs_script=options.runs_script) for text in options.variant]
    named = [Setting(name=name, preset=source, words=words, changed=("variant",)) for name, source, words in variants]
    if any(setting.name == YOURS for setting in named):
        raise ToolkitError(f"--variant {YOURS}=... has the name of your own setting", hint="choose another name")
    if options.runs_script:  # whose arguments are not known
        others = [name for name in dict.fromkeys(options.preset) if name != preset and "preset" not in options.keep]
        presets = [Setting(name=load_preset(name).name, preset=name, changed=("preset",)) for name in others]
        return Field(settings=(Setting(name=YOURS, preset=preset), *named, *presets))
    search = Search.of(options, preset)
    tried, not_tried = list[Setting](), list[NotTried]()
    for each in search.others():
        (tried if isinstance(each, Setting) else not_tried).append(each)  # type: ignore[arg-type]
    spans = [each.planned_step_seconds for each in (search.own, *tried) if each.verdict == FITS]
    worst = min((span[1] for span in spans if span is not None), default=None)
    left = []
    for setting in tried:
        best = setting.planned_step_seconds and setting.planned_step_seconds[0]
        if worst is None or best is None or best <= worst:
            left.append(setting)
            continue
        why = f"at best {seconds(best)} per step, and another takes {seconds(worst)} at worst"
        not_tried.append(NotTried(name=setting.name, kind="cannot win", why=why))
    left.sort(key=lambda each: (each.estimate_seconds, len(each.changed), [ORDER.index(part) for part in each.changed]))
    most = max(options.max_settings - 1 - len(named), 0)
    why = f"--max-settings {options.max_settings}: others have "
    why += "fewer changes" if worst is None else "a shorter planned step, or fewer changes"
    not_tried += [NotTried(name=each.name, kind="not among the first", why=why) for each in left[most:]]
    return Field(settings=(search.own, *named, *left[:most]), not_tried=tuple(not_tried))


# Settings with as many changes are tried in this order of the parts that they change.
ORDER = (*PARTS[1:], PARTS[0])


@dataclass(frozen=True, kw_only=True)
class Search:
    """One job, and what decides which of its settings can be tried."""

    options: TuneOptions
    job: Job
    """The user's, with the accumulation steps of `--global_batch_size`."""
    preset: PresetSpec
    source: str
    """What `load_preset` takes for it."""
    sequences: int
    """Of one optimizer step, in every setting."""
    own: Setting
    gpu: Gpu | None
    shape: ModelShape | None

    @classmethod
    def of(cls, options: TuneOptions, source: str) -> Search:
        """Read the job, and its model if it can be planned. Raises ToolkitError for an invalid job."""
        preset, job = load_preset(source), Job.from_argv(options.training_arguments)
        if preset.uses_nvme:
            hint = "`toolkit compare --nvme-path DIR` compares it with others"
            raise ToolkitError(f"preset {preset.name!r} offloads to a disk, which tune does not search", hint=hint)
        _check(options, preset, job)
        gpu, groups = None, _groups(options, preset, job)
        if not options.on_cpu:
            gpu = common_gpu(gpu_names()) if options.gpu is None else find_gpu(options.gpu)
        job = with_accumulation(job, data_parallel_size=groups, ranks_per_batch=options.world_size // groups)
        shape = None
        if job.model_name_or_path is not None:
            try:
                shape = read_model(str(job.model_name_or_path), count=False)
                check_planned_job(PlannedJob.of(job), shape)
            except ToolkitError:  # what cannot be planned is tried without a plan
                shape = None
        own = Setting(name=YOURS, preset=source, batch=job.per_device_train_batch_size)
        known = {"gpu": gpu, "shape": shape, "sequences": global_batch_size(job, groups)}
        made = cls(options=options, job=job, preset=preset, source=source, own=own, **known)  # type: ignore[arg-type]
        batch = {BATCH_ARGUMENT: own.batch, ACCUMULATION: job.gradient_accumulation_steps}
        own = replace(own, words=words_of(batch), family=made.family(preset, made.parts_of_own))
        return replace(made, own=made.planned(own, preset, job)[0])

    @property
    def parts_of_own(self) -> dict[str, str]:
        """The user's own value of each part beside preset and batch."""
        job = self.job
        offload = "_offload" if job.activation_checkpointing_offload else ""
        loss = "liger" if job.use_liger_kernel else "full" if job.loss == "full" else "chunked"
        return {
            "checkpointing": f"checkpointing{offload}" if job.uses_activation_checkpointing else "no_checkpointing",
            "loss": loss,
            "compile": "eager" if job.compilation is None else "compile",
        }

    def family(self, preset: PresetSpec, parts: Mapping[str, str]) -> tuple[str, ...]:
        """Return what two settings share that differ in the batch alone."""
        return (preset.name, *parts.values())

    def others(self) -> Iterator[Setting | NotTried]:
        """Yield every other setting, or why it is not tried; one that no plan and no rule refuses."""
        keep, own = self.options.keep, self.parts_of_own
        if self.job.torch_compile_backend or self.job.torch_compile_mode:
            keep = (*keep, "compile")
        axes: list[list[str]] = []
        for part, values in VALUES.items():
            axes.append([own[part]])
            for name in (name for name in values if name != own[part] and part not in keep):
                try:
                    _check(self.options, None, self.job.with_values(**values[name]))
                    axes[-1].append(name)
                except ToolkitError as error:  # under any preset
                    yield NotTried(name=name, kind="invalid", why=error.message)
        for source, preset in self.presets():
            try:
                if source != self.source:
                    _check(self.options, preset, self.job, recommended=True)
                groups = _groups(self.options, preset, self.job)
                batches = self.batches(groups)
            except ToolkitError as error:
                yield NotTried(name=preset.name, kind="invalid", why=error.message)
                continue
            for batch, chosen in itertools.product(batches, itertools.product(*axes)):
                parts = dict(zip(VALUES, chosen, strict=True))
                setting = self.setting(source, preset, batch, parts, groups=groups)
                if setting.changed:
                    yield self.judged(setting, preset)

    def presets(self) -> list[tuple[str, PresetSpec]]:
        """Return the presets to search, the user's own first."""
        named = () if "preset" in self.options.keep else self.options.preset
        every = [] if named or "preset" in self.options.keep else [preset.name for preset in list_presets()]
        loaded = [(source, load_preset(source)) for source in dict.fromkeys((self.source, *named, *every))]
        return [(source, each) for source, each in loaded if source == self.source or each.name != self.preset.name]

    def batches(self, groups: int) -> list[int]:
        """Return the per-GPU batches that make the sequences of a step. Raises ToolkitError where none does."""
        share, rest = divmod(self.sequences, groups)
        if rest:
            raise ToolkitError(f"{self.sequences} sequences per step are not divisible by {groups} groups of ranks")
        every = [size for size in range(1, share + 1) if share % size == 0]
        kept = self.job.per_device_train_batch_size
        return [size for size in every if size == kept] if "batch" in self.options.keep else every

    def setting(self, source: str, preset: PresetSpec, batch: int, parts: Mapping[str, str], *, groups: int) -> Setting:
        """Return one combination as a setting, with what of the user's own it changes."""
        own, steps = self.parts_of_own, self.sequences // groups // batch
        sizes = {BATCH_ARGUMENT: batch, ACCUMULATION: steps}
        changed = [part for part in VALUES if parts[part] != own[part]]
        wanted = {name: value for part in changed for name, value in VALUES[part][parts[part]].items()}
        changes = {name: value for name, value in wanted.items() if (self.job.value(name) or False) != value}
        new_batch = {name: value for name, value in sizes.items() if self.job.value(name) != value}
        name = "_".join([preset.name, f"b{batch}x{steps}", *(parts[part] for part in changed)])
        differs = {"preset": source != self.source, "batch": bool(new_batch)}
        return Setting(
            name=name,
            preset=source,
            changes=new_batch | changes,
            words=words_of(sizes | changes),
            changed=(*(part for part, is_other in differs.items() if is_other), *changed),
            family=self.family(preset, parts),
            batch=batch,
        )

    def judged(self, setting: Setting, preset: PresetSpec) -> Setting | NotTried:
        """Return the setting with its plan; or that it is invalid here, or does not fit."""
        job = self.job.with_values(**setting.changes)
        try:
            _check(self.options, preset, job)
        except ToolkitError as error:
            return NotTried(name=setting.name, kind="invalid", why=error.message)
        planned, why = self.planned(setting, preset, job)
        return planned if why is None else NotTried(name=setting.name, kind="does not fit", why=why)

    def planned(self, setting: Setting, preset: PresetSpec, job: Job) -> tuple[Setting, str | None]:
        """Return the setting with the plan's verdict and step time, and why it does not fit."""
        size = self.options.world_size
        if self.shape is None or not (self.options.on_cpu or self.gpu):
            return setting, None
        try:
            planned_job = PlannedJob.of(job)
            if self.gpu is None:  # on a CPU: the model states of all ranks alone, in fp32
                memory = plan_memory(self.shape, preset, world_size=size, job=planned_job, mixed_precision="no")
                needed, usable = size * memory.states.total_bytes, usable_memory_bytes()
                why = f"model states take {gib(needed)} of host memory, which has {gib(usable)}"
                return setting, why if needed > usable else None
            planned_job = replace(planned_job, gpus_per_node=max(PlannedJob.gpus_per_node, size))
            rows = size * job.per_device_train_batch_size * job.gradient_accumulation_steps
            request = RecommendRequest(
                shape=self.shape,
                gpu=self.gpu,
                job=planned_job,
                world_size=size,
                global_batch_size=rows,
                host_memory_bytes=node_memory(gpu=self.options.gpu),
            )
            candidate = candidate_of(divided_request(request, preset, job.degrees), preset, planned_job)
        except ToolkitError:
            return setting, None
        speed, verdict = candidate.speed, candidate.verdict
        span, estimate = (None, 0.0) if speed is None else (speed.step_seconds, speed.estimate_seconds)
        setting = replace(setting, verdict=verdict, planned_step_seconds=span, estimate_seconds=estimate)
        return setting, memory_refusal(candidate) if verdict == DOES_NOT_FIT else None


def words_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return training arguments as words of a command line.

    >>> words_of({"torch_compile": True, "per_device_train_batch_size": 2})
    ('--torch_compile', 'true', '--per_device_train_batch_size', '2')
    """
    return tuple(Job.from_values(values).to_argv())


def _groups(options: TuneOptions, preset: PresetSpec, job: Job) -> int:
    layout = preset.layout(options.world_size, job.degrees)
    return options.world_size if layout is None else layout.data_parallel_size


def _check(options: TuneOptions, preset: PresetSpec | None, job: Job, *, recommended: bool = False) -> None:
    """Raise ToolkitError for a job that does not run here; `recommended` also for presets to be chosen by hand."""
    size, on_cpu, here = options.world_size, options.on_cpu, options.gpu is None
    if preset is not None:
        check_process_count(size, gpus=None if on_cpu else count_gpus() if here else size, preset=preset)
    check_arguments(job, preset, num_processes=size, on_cpu=on_cpu, here=here)
    if recommended:
        device = replace(CPU if on_cpu else Device(), has_nvme=False)
        check_supported(preset, job, world_size=size, device=device, purpose="recommend")
