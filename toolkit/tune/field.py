"""The settings of a job that `toolkit tune` tries, and those that it does not, each with the reason.

A setting keeps the problem: the sequences of a step, their length, the optimizer, its rate and the dtypes. It changes
the preset, the per-GPU batch (with the accumulation steps that keep the sequences of a step), activation checkpointing,
the attention function, the loss and `torch.compile`. The user's own setting is always the first.

The plan prunes before anything runs: what is invalid here, what does not fit, and, on a known GPU, what cannot win,
because the best case of its step time is slower than the worst case of the best plan. What a plan calls too close is
tried: a rehearsal loads the same model and runs the same first steps on one GPU, and a trial that fits has a speed as
well. Of the rest `--max-settings` are tried: on a GPU those with the shortest planned step, otherwise those that
change the fewest parts of the user's own setting.
"""

import contextlib
import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from toolkit.compare.specification import parse_variant
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu
from toolkit.hardware.node import usable_memory_bytes
from toolkit.job.global_batch import BATCH_ARGUMENT
from toolkit.job.job import Job
from toolkit.launch.preflight import check_process_count, device_of
from toolkit.launch.resume import TrainingRun
from toolkit.models.attention import AUTO, VARLEN, ModelAttention, packed_attention, read_model_attention
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.candidates import RecommendRequest, candidate_of, divided_request, memory_refusal
from toolkit.plan.memory import DOES_NOT_FIT, FITS
from toolkit.plan.planned_job import PlannedJob, check_planned_job, node_memory
from toolkit.plan.training_setup import all_ranks_bytes
from toolkit.presets.compatibility import CPU, Device
from toolkit.presets.preset import list_presets, load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_arguments, check_supported
from toolkit.tune.options import PARTS, TuneOptions
from toolkit.units import gib, seconds

YOURS = "yours"
_ON, _OFFLOAD, _SELECTIVE = (f"activation_checkpointing{kind}" for kind in ("", "_offload", "_selective"))
_ATTENTION = ("sdpa", VARLEN, "flash_attention_2", "flash_attention_3", "eager")
VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "checkpointing": {
        "no_checkpointing": {_ON: False, _OFFLOAD: False, _SELECTIVE: False},
        "checkpointing": {_ON: True, _OFFLOAD: False, _SELECTIVE: False},
        "checkpointing_selective": {_ON: True, _OFFLOAD: False, _SELECTIVE: True},
        "checkpointing_offload": {_ON: True, _OFFLOAD: True, _SELECTIVE: False},
    },
    "attention": {name: {"attn_implementation": name} for name in _ATTENTION},
    "loss": {
        "chunked": {"loss": "auto", "use_liger_kernel": False},
        "full": {"loss": "full", "use_liger_kernel": False},
        "liger": {"loss": "auto", "use_liger_kernel": True},
    },
    "compile": {"no_compile": {"torch_compile": False}, "compile": {"torch_compile": True}},
}
"""The values of each part beside preset and batch, as training arguments."""
ORDER = (*PARTS[1:], PARTS[0])  # settings with as many changes are tried in this order of the parts that they change


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a job: what of the user's own it changes, and what the plan says of it."""

    name: str
    preset: str  # what `load_preset` takes
    changes: Mapping[str, Any] = field(default_factory=dict)  # training arguments that are not the user's
    words: tuple[str, ...] = ()  # training arguments of its trials beside the user's, with the batch
    changed: tuple[str, ...] = ()  # parts in which it differs from the user's own setting
    family: tuple[str, ...] = ()  # the setting without its batch; empty for a script's, and for a variant
    batch: int = 0
    verdict: str | None = None  # the plan's; None where nothing is planned
    planned_step_seconds: tuple[float, float] | None = None
    estimate_seconds: float = 0.0  # the planned step, for the order; 0 where none is planned

    @property
    def added_words(self) -> tuple[str, ...]:
        """Training arguments that it adds to the user's."""
        return words_of(self.changes) if self.family else self.words

    @property
    def variant(self) -> str:
        """The setting as `toolkit compare --variant` takes it."""
        return f"{self.name}={shlex.join([self.preset, *self.words])}"


class NotTried(NamedTuple):
    """A setting that is not tried; or a preset, or a value of a part, of which none is."""

    name: str
    kind: str  # `invalid`, `does not fit`, `cannot win`, or `not among the first`
    why: str


class Field(NamedTuple):
    """Everything that could be tried; the user's own setting is the first of `settings`."""

    settings: tuple[Setting, ...]
    not_tried: tuple[NotTried, ...] = ()


def make_field(options: TuneOptions, preset: str) -> Field:
    """Return the field of a job whose own setting has this preset. Raises ToolkitError where that is invalid."""
    variants = [parse_variant(text, runs_script=options.runs_script) for text in options.variant]
    named = [Setting(name=name, preset=source, words=words) for name, source, words in variants]
    if any(setting.name == YOURS for setting in named):
        raise ToolkitError(f"--variant {YOURS}=... has the name of your own setting", hint="choose another name")
    if options.runs_script:  # whose arguments are not known
        others = [name for name in dict.fromkeys(options.preset) if name != preset and "preset" not in options.keep]
        presets = [Setting(name=load_preset(name).name, preset=name) for name in others]
        return Field((Setting(name=YOURS, preset=preset), *named, *presets))
    search = Search.of(options, preset)
    own, judged = search.own(), list(search.others())
    not_tried = [each for each in judged if isinstance(each, NotTried)]
    tried = [each for each in judged if isinstance(each, Setting)]
    spans = [each.planned_step_seconds for each in (own, *tried) if each.verdict == FITS]
    worst, left = min((span[1] for span in spans if span is not None), default=None), list[Setting]()
    for setting in tried:
        best = setting.planned_step_seconds and setting.planned_step_seconds[0]
        if worst is None or best is None or best <= worst:
            left.append(setting)
        else:
            why = f"at best {seconds(best)} per step, and another takes {seconds(worst)} at worst"
            not_tried.append(NotTried(setting.name, "cannot win", why))
    left.sort(key=lambda each: (each.estimate_seconds, len(each.changed), [ORDER.index(part) for part in each.changed]))
    most = max(options.max_settings - 1 - len(named), 0)
    first = "fewer changes" if worst is None else "a shorter planned step, or fewer changes"
    why = f"--max-settings {options.max_settings}: others have {first}"
    not_tried += [NotTried(each.name, "not among the first", why) for each in left[most:]]
    return Field((own, *named, *left[:most]), tuple(not_tried))


@dataclass(frozen=True, kw_only=True)
class Search:
    """One job, and what decides which of its settings can be tried."""

    options: TuneOptions
    job: Job  # the user's, with the accumulation steps of `--global_batch_size`
    preset: PresetSpec
    source: str  # what `load_preset` takes for it
    sequences: int  # of one optimizer step, in every setting
    gpu: Gpu | None
    shape: ModelShape | None  # None where the job cannot be planned

    @classmethod
    def of(cls, options: TuneOptions, source: str) -> Self:
        """Read the job, and its model if it can be planned. Raises ToolkitError for an invalid job."""
        preset, job = load_preset(source), Job.from_argv(options.training_arguments)
        if preset.uses_nvme:
            hint = "`toolkit compare --nvme-path DIR` compares it with others"
            raise ToolkitError(f"preset {preset.name!r} offloads to a disk, which tune does not search", hint=hint)
        _check(options, preset, job)
        run = _run(options, preset, job).accumulated()
        gpu, shape, job, rows = options.planned_gpu, None, run.job, run.global_batch_size
        with contextlib.suppress(ToolkitError):
            read = read_model(str(job.model_name_or_path), count=not options.on_cpu)
            if gpu is not None or options.on_cpu:
                check_planned_job(PlannedJob.of(job), read)
                shape = read
        return cls(options=options, job=job, preset=preset, source=source, sequences=rows, gpu=gpu, shape=shape)

    @cached_property
    def own_parts(self) -> dict[str, str]:
        """The user's own value of each part beside preset and batch."""
        job = self.job
        kind = next((kind for kind in ("_offload", "_selective") if job.value(_ON + kind)), "")
        return {
            "checkpointing": f"checkpointing{kind}" if job.uses_activation_checkpointing else "no_checkpointing",
            "attention": self._own_attention,
            "loss": "liger" if job.use_liger_kernel else "full" if job.loss == "full" else "chunked",
            "compile": "no_compile" if job.compilation is None else "compile",
        }

    @property
    def _attention(self) -> ModelAttention | None:
        return None if self.shape is None else read_model_attention({"model_type": self.shape.model_type})

    @property
    def _own_attention(self) -> str:
        """As named, or what the job gets without a name."""
        model, name = self._attention, self.job.attn_implementation
        if name in (None, AUTO) and self.job.packing:
            capability = None if self.options.on_cpu else (9 if self._on_hopper else 8, 0)
            name = packed_attention(model, capability=capability, half_precision=True)
        default = "eager" if model is not None and not model.sdpa else "sdpa"
        return default if name in (None, AUTO) else str(name)

    @property
    def _on_hopper(self) -> bool:
        return self.gpu is not None and self.gpu.name.startswith(("h100", "h200", "gh200"))

    def _refused(self, part: str, name: str) -> tuple[str, str] | None:
        """Why no preset runs this value of a part, and what kind of reason it is."""
        try:
            _check(self.options, None, self.job.with_values(**VALUES[part][name]))
        except ToolkitError as error:
            return "invalid", error.message
        if part != "attention":
            return None
        if self._attention and (why := self._attention.why_not(name)):
            return "invalid", why
        if self.options.on_cpu:
            return None
        if name == "eager":
            return "cannot win", "it writes all scores to memory, and other functions compute the same without"
        built = self._on_hopper if name == "flash_attention_3" else self.gpu is None or self.gpu.peak_flops("bf16")
        return ("invalid", f"{name} has no kernels for this GPU") if "flash" in name and not built else None

    def own(self) -> Setting:
        """Return the user's own setting, which is tried whatever the plan says."""
        groups = _run(self.options, self.preset, self.job).data_parallel_size
        made = self.setting(self.source, self.preset, self.job.per_device_train_batch_size, self.own_parts, groups)
        return self.planned(replace(made, name=YOURS, changes={}, changed=()), self.preset, self.job)[0]

    def others(self) -> Iterator[Setting | NotTried]:
        """Yield every other setting that no rule and no plan refuses, and why others are refused."""
        keep, own, axes = self.options.keep, self.own_parts, list[list[str]]()
        keep += ("compile",) * bool(self.job.torch_compile_backend or self.job.torch_compile_mode)
        for part, values in VALUES.items():
            axes.append([own[part]])
            for name in (name for name in values if name != own[part] and part not in keep):
                if (refused := self._refused(part, name)) is None:
                    axes[-1].append(name)
                else:
                    yield NotTried(name, *refused)
        named = () if "preset" in keep else self.options.preset or tuple(each.name for each in list_presets())
        for source in dict.fromkeys((self.source, *(name for name in named if name != self.preset.name))):
            preset = load_preset(source)
            try:
                _check(self.options, preset, self.job, recommended=source != self.source)
                groups = _run(self.options, preset, self.job).data_parallel_size
                batches = self.batches(groups)
            except ToolkitError as error:
                yield NotTried(preset.name, "invalid", error.message)
                continue
            for batch, chosen in itertools.product(batches, itertools.product(*axes)):
                setting = self.setting(source, preset, batch, dict(zip(VALUES, chosen, strict=True)), groups)
                if setting.changed:
                    yield self.judged(setting, preset)

    def batches(self, groups: int) -> list[int]:
        """Return the per-GPU batches that make the sequences of a step. Raises ToolkitError where none does."""
        share, rest = divmod(self.sequences, groups)
        if rest:
            raise ToolkitError(f"{self.sequences} sequences per step are not divisible by {groups} groups of ranks")
        kept = {self.job.per_device_train_batch_size} if "batch" in self.options.keep else range(1, share + 1)
        return [size for size in kept if share % size == 0]

    def setting(self, source: str, preset: PresetSpec, batch: int, parts: Mapping[str, str], groups: int) -> Setting:
        """Return one combination as a setting, with what of the user's own it changes."""
        steps, own = self.sequences // groups // batch, self.own_parts
        sizes = {BATCH_ARGUMENT: batch, "gradient_accumulation_steps": steps}
        changed = [part for part in VALUES if parts[part] != own[part]]
        wanted = {name: value for part in changed for name, value in VALUES[part][parts[part]].items()}
        values = {name: value for name, value in wanted.items() if (self.job.value(name) or False) != value}
        new_sizes = {name: value for name, value in sizes.items() if self.job.value(name) != value}
        return Setting(
            name="_".join([preset.name, f"b{batch}x{steps}", *(parts[part] for part in changed)]),
            preset=source,
            changes=new_sizes | values,
            words=words_of(sizes | values),
            changed=("preset",) * (source != self.source) + ("batch",) * bool(new_sizes) + tuple(changed),
            family=(preset.name, *parts.values()),
            batch=batch,
        )

    def judged(self, setting: Setting, preset: PresetSpec) -> Setting | NotTried:
        """Return the setting with its plan; or that it is invalid here, or does not fit."""
        job = self.job.with_values(**setting.changes)
        try:
            _check(self.options, preset, job)
        except ToolkitError as error:
            return NotTried(setting.name, "invalid", error.message)
        planned, why = self.planned(setting, preset, job)
        return planned if why is None else NotTried(setting.name, "does not fit", why)

    def planned(self, setting: Setting, preset: PresetSpec, job: Job) -> tuple[Setting, str | None]:
        """Return the setting with the plan's verdict and step time, and why it does not fit."""
        size, why = self.options.world_size, None
        with contextlib.suppress(ToolkitError):
            if self.shape is not None and self.gpu is None:  # on a CPU: the model states of all ranks alone, in fp32
                needed = all_ranks_bytes(self.shape, preset, world_size=size, job=PlannedJob.of(job))
                usable = usable_memory_bytes()
                why = f"model states take {gib(needed)} of host memory, which has {gib(usable)}"
                return setting, why if needed > usable else None
            if self.shape is not None and self.gpu is not None:
                job = replace(PlannedJob.of(job), gpus_per_node=max(PlannedJob.gpus_per_node, size))
                request = RecommendRequest(
                    shape=self.shape,
                    gpu=self.gpu,
                    job=job,
                    world_size=size,
                    global_batch_size=size * job.per_device_train_batch_size * job.gradient_accumulation_steps,
                    host_memory_bytes=node_memory(gpu=self.options.gpu),
                )
                plan = candidate_of(divided_request(request, preset, job.degrees), preset, job)
                why = memory_refusal(plan).removeprefix("it does not fit: ") if plan.verdict == DOES_NOT_FIT else None
                span, estimate = plan.speed and plan.speed.step_seconds, plan.speed and plan.speed.estimate_seconds
                known = {"planned_step_seconds": span, "estimate_seconds": estimate or 0.0}
                return replace(setting, verdict=plan.verdict, **known), why  # type: ignore[arg-type]
        return setting, None


def words_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return training arguments as words of a command line.

    >>> words_of({"torch_compile": True, "per_device_train_batch_size": 2})
    ('--torch_compile', 'true', '--per_device_train_batch_size', '2')
    """
    return tuple(Job.from_values(values).to_argv())


def _run(options: TuneOptions, preset: PresetSpec, job: Job) -> TrainingRun:
    device = device_of(on_cpu=options.on_cpu, gpus=None if options.gpu is None else options.world_size)
    return TrainingRun(preset=preset, job=job, num_processes=options.world_size, device=device)


def _check(options: TuneOptions, preset: PresetSpec | None, job: Job, *, recommended: bool = False) -> None:
    size, on_cpu = options.world_size, options.on_cpu
    if preset is not None:
        check_process_count(_run(options, preset, job))
    check_arguments(job, preset, num_processes=size, on_cpu=on_cpu, here=options.gpu is None)
    if recommended:
        device = replace(CPU if on_cpu else Device(), has_nvme=False)
        check_supported(preset, job, world_size=size, device=device, purpose="recommend")
