"""The specification of a comparison: its rows, its trials and their order, and the job that all of them train.

>>> Trial(row=RowKey(preset="zero2", world_size=2), repeat=0).id
'zero2-n2-r0'

It is `comparison.json` in the comparison's folder. A comparison is resumed only with an equal specification.

A variant is a preset under another name, with training arguments that it alone has:

>>> parse_variant("ddp_bf16=ddp --ddp_comm_hook bf16")
('ddp_bf16', 'ddp', ('--ddp_comm_hook', 'bf16'))
"""

import hashlib
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict

from toolkit.cluster.allocation import Allocation
from toolkit.compare.ledger import LedgerRecord, completed_sizes, probes_of
from toolkit.compare.options import MAX_TRIALS, CompareOptions
from toolkit.compare.results import Scaling
from toolkit.compare.rows import RowKey, Trial
from toolkit.engines.registry import engine_named
from toolkit.engines.zero import QUANTIZED_KEYS
from toolkit.errors import ToolkitError, shown
from toolkit.files.documents import read_json_object
from toolkit.files.secrets import hide_secrets, hide_words
from toolkit.job.argument_reading import read_arguments, without_degrees
from toolkit.job.global_batch import BATCH_ARGUMENT, strong_scaling_batches, with_accumulation
from toolkit.job.job import Job
from toolkit.launch.command import LaunchCommand, command_of
from toolkit.launch.options import TrainOptions
from toolkit.observe.script_file import check_script
from toolkit.parallel.layout import ParallelLayout, divide_ranks
from toolkit.presets.preset import load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.record.columns import Count, NonNegativeReal, PositiveCount
from toolkit.record.folder import write_json

SPEC_FILE = "comparison.json"
# A trial's folder is named for it, with the number of processes and the repeat.
VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,99}")
# Half the 95 % CI of a trial's median step, over the median. Offloading waits for host memory, and a CPU for its
# neighbors: both vary more from step to step.
TARGET_INTERVAL_ON_GPU, TARGET_INTERVAL_ON_CPU = 0.01, 0.03


class ExpectedStrategy(BaseModel):
    """What the trials of a preset must report to be in effect, and what sets the preset apart by design."""

    model_config = ConfigDict(frozen=True)

    engine: str
    sharding: str
    quantises: bool  # True if the preset quantizes what it communicates
    parallel: tuple[str, ...] = ()  # dimensions of parallelism; empty for data parallelism alone
    sharded_at_load: bool = False

    @classmethod
    def of(cls, preset: PresetSpec) -> Self:
        """Return what the trials of a preset must report."""
        zero = preset.zero_block
        same = {key: getattr(preset, key) for key in ("engine", "sharding", "parallel", "sharded_at_load")}
        return cls(**same, quantises=any(zero.get(key) for key in QUANTIZED_KEYS))


class ComparisonSpec(BaseModel):
    """What is compared; two comparisons with equal specifications may share a folder."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    presets: Annotated[tuple[str, ...], MinLen(1)]  # names of the presets, then of the variants
    preset_files: dict[str, dict[str, str]]  # name to the text of each file of its preset
    expected: dict[str, ExpectedStrategy]  # name to what its trials must report
    preset_sources: dict[str, str]  # name to what `load_preset` takes
    extra_arguments: dict[str, tuple[str, ...]]  # name of a variant to the training arguments that it alone has
    world_sizes: Annotated[tuple[PositiveCount, ...], MinLen(1)]
    training_arguments: tuple[str, ...]
    untimed_steps: Count
    reference: str  # name of the baseline
    cpu: bool
    ranks_per_gpu: PositiveCount = 1
    processes_per_node: PositiveCount | None = None
    """Ranks on each node of a SLURM job; None where all trials run on one node, without it."""
    repeats: PositiveCount = 1
    order_seed: int = 0
    target_interval: NonNegativeReal | None = None  # None runs all steps
    trial_minutes: NonNegativeReal | None = None
    scaling: Scaling | None = None
    find_max_batch: PositiveCount | None = None  # upper bound of the search for each row's largest per-GPU batch
    script: str | None = None  # the script that is trained with; None for a module, and for the toolkit's own
    module: str | None = None
    script_sha256: str | None = None  # digest of the script's own file, so that a changed one is not resumed
    stop_after_steps: PositiveCount | None = None
    batches: dict[str, dict[str, PositiveCount]] = {}
    """Row name to the batch arguments that it alone has: from strong scaling, from a batch search, or because several
    of its ranks train on the same rows."""

    def allocation(self) -> Allocation | None:
        per_node = self.processes_per_node
        return None if per_node is None else Allocation.current(processes_per_node=per_node)

    def rows(self) -> list[RowKey]:
        """Return the rows in the order of the options: by world size, then by preset."""
        return [RowKey(preset=preset, world_size=size) for size in self.world_sizes for preset in self.presets]

    def trials(self) -> list[Trial]:
        """Return the trials in running order: one round per repeat, each shuffled by `order_seed`."""
        rows, shuffle = self.rows(), random.Random(self.order_seed)
        ordered = []
        for repeat in range(self.repeats):
            round_of_rows = shuffle.sample(rows, len(rows)) if self.repeats > 1 else rows
            ordered += [Trial(row=row, repeat=repeat) for row in round_of_rows]
        return ordered

    def preset(self, name: str) -> PresetSpec:
        return load_preset(self.preset_sources[name])

    @property
    def script_or_module(self) -> str | None:
        """Somebody's own script, or None where all trials train with the toolkit's."""
        return self.script or self.module

    @property
    def own_job(self) -> Job | None:
        """The job of all trials, without what a variant adds; None where a script of somebody's own trains."""
        return None if self.script_or_module else Job.from_argv(self.training_arguments)

    def baseline(self, world_size: int) -> RowKey:
        return RowKey(preset=self.reference, world_size=world_size)

    def job(self, row: RowKey) -> Job:
        """Return a row's job, without the arguments that the comparison adds; of somebody's own script, nothing."""
        return Job() if self.script_or_module else Job.from_argv(self.own_argv(row))

    def own_argv(self, row: RowKey) -> list[str]:
        """Return the user's arguments for a row, with the degrees that its preset has, and then its batch."""
        if self.script_or_module:
            return [*self.training_arguments, *self.extra_arguments.get(row.preset, ())]
        known = {name for expected in self.expected.values() for name in expected.parallel}
        words = without_degrees(self.training_arguments, known - set(self.expected[row.preset].parallel))
        batch = [word for name, value in self.batches.get(row.name, {}).items() for word in (f"--{name}", str(value))]
        return [*words, *self.extra_arguments.get(row.preset, ()), *batch]

    def layout(self, row: RowKey) -> ParallelLayout | None:
        parallel, degrees = self.expected[row.preset].parallel, self.job(row).degrees
        return divide_ranks(parallel, degrees, world_size=row.world_size) if parallel else None

    def data_parallel_size(self, row: RowKey) -> int:
        """Return how many ranks, or groups of ranks, train on different rows of the data."""
        layout = self.layout(row)
        return row.world_size if layout is None else layout.data_parallel_size

    def sequences_per_accumulation_step(self, row: RowKey) -> int:
        """Return the sequences of one accumulation step, over all ranks."""
        return self.job(row).per_device_train_batch_size * self.data_parallel_size(row)

    def training_argv(self, row: RowKey, output_dir: Path) -> list[str]:
        """Return the row's own arguments, then the comparison's, which somebody's own script does not have."""
        if self.script_or_module:
            return self.own_argv(row)
        added = {
            "output_dir": output_dir,
            "save_model": "false",
            "save_strategy": "no",
            "untimed_steps": self.untimed_steps,
            "stop_when_steps_within": self.target_interval,
            "stop_after_minutes": self.trial_minutes,
        }
        flags = [(f"--{name}", str(value)) for name, value in added.items() if value is not None]
        return [*self.own_argv(row), *(word for flag in flags for word in flag)]

    def train_options(self, row: RowKey, run_folder: Path, extra_arguments: Sequence[str] = ()) -> TrainOptions:
        return TrainOptions(
            preset=self.preset_sources[row.preset],
            num_processes=row.world_size,
            training_arguments=(*self.training_argv(row, run_folder), *extra_arguments),
            cpu=self.cpu,
            ranks_per_gpu=self.ranks_per_gpu,
            script=self.script,
            module=self.module,
            output_dir=run_folder if self.script_or_module else None,
            stop_minutes=0,  # an interrupted trial is repeated from its beginning: no checkpoint
        )

    def command(self, options: TrainOptions, *, nvme_path: Path | None = None) -> LaunchCommand:
        """Return the command of one run; somebody's own script gets what the comparison adds from the observer."""
        added = {
            "untimed-steps": self.untimed_steps,
            "stop-after-steps": self.stop_after_steps,
            "stop-when-steps-within": self.target_interval,
            "stop-after-minutes": self.trial_minutes,
        }
        words = [word for name, value in added.items() if value is not None for word in (f"--{name}", str(value))]
        preset = load_preset(options.preset)
        return command_of(options, preset, nvme_path=nvme_path, observer_words=["--trial", *words])

    def expected_facts(self, row: RowKey) -> dict[str, Any]:
        """Return the engine, the sharding and the layout that a row's trials must report.

        On one GPU accelerate wraps nothing for `ddp`: there is no other rank to reduce with. Nor is a model wrapped
        whose layers all ranks share.
        """
        expected, layout = self.expected[row.preset], self.layout(row)
        engine = expected.engine if self.cpu else engine_named(expected.engine).in_effect(row.world_size)
        if layout is not None and expected.sharded_at_load and layout.data_parallel_size == 1:
            engine = "none"
        return {"engine": engine, "sharding": expected.sharding, "layout": None if layout is None else str(layout)}

    def with_batches(self, batches: Mapping[str, dict[str, int]]) -> Self:
        """Return the same comparison with other batch arguments by row name."""
        return self.model_copy(update={"batches": dict(batches)})

    def as_json(self) -> dict[str, Any]:
        """Return the content of comparison.json, in which each secret is `***`."""
        content = self.model_dump(mode="json")
        content["training_arguments"] = hide_words(self.training_arguments)
        content["extra_arguments"] = {name: hide_words(words) for name, words in self.extra_arguments.items()}
        return dict(hide_secrets(content))


def parse_variant(text: str, *, runs_script: bool = False) -> tuple[str, str, tuple[str, ...]]:
    """Return name, preset and arguments of `NAME=PRESET --argument value`; a script's arguments are not checked."""
    name, equals, rest = text.partition("=")
    try:
        source, *extra = shlex.split(rest) or [""]
    except ValueError as error:  # an unclosed quotation, or a backslash at the end
        hint = '`--variant "NAME=PRESET --argument value"`'
        raise ToolkitError(f"--variant {shown(text)}: {str(error).lower()}", hint=hint) from None
    if not equals or not source or not VARIANT_NAME.fullmatch(name):
        raise ToolkitError(
            f"--variant {shown(text)}, expected a name of letters, digits and _, `=`, a preset, and training arguments",
            hint='`--variant "ddp_bf16=ddp --ddp_comm_hook bf16"`',
        )
    if not runs_script:
        read_arguments(extra)
    return name, source, tuple(extra)


def _load_presets(options: CompareOptions) -> dict[str, tuple[PresetSpec, str, tuple[str, ...]]]:
    loaded: dict[str, tuple[PresetSpec, str, tuple[str, ...]]] = {}
    variants = [parse_variant(text, runs_script=options.runs_script) for text in options.variant]
    for name, source, words in [*(("", name, ()) for name in options.preset), *variants]:
        preset = load_preset(source)
        if source.endswith((".yaml", ".yml")):  # a comparison is resumed from any directory
            source = str(preset.accelerate_config_path)
        name = name or preset.name
        if name in loaded:
            hint = f"name each preset once; `--variant again={name}` is the same under another name"
            raise ToolkitError(f"--preset {name} is given twice", hint=hint)
        loaded[name] = preset, source, words
    if not loaded:
        raise ToolkitError("nothing to compare", hint="`--preset NAME`, once for each; see `toolkit presets`")
    return loaded


def make_specification(options: CompareOptions) -> ComparisonSpec:
    """Return the comparison that the options describe. Raises ToolkitError for options that make none."""
    trials = (len(options.preset) + len(options.variant)) * len(options.world_sizes) * options.repeats
    if trials > MAX_TRIALS:
        raise ToolkitError(
            f"the rows and --repeats make {trials:,} trials, expected {MAX_TRIALS:,} or fewer",
            hint="`--repeats 3` shows a difference of a few per cent; name fewer presets or numbers of processes",
        )
    file = check_script(options.script, options.module) if options.runs_script else None
    loaded = _load_presets(options)
    presets = {name: preset for name, (preset, _, _) in loaded.items()}
    baseline = options.baseline or ("ddp" if "ddp" in presets else next(iter(presets)))
    if baseline not in presets:
        raise ToolkitError(f"--baseline {baseline} is not among the presets compared: {', '.join(presets)}")
    target_interval = options.target_interval
    if options.ranks_per_gpu > 1:
        target_interval = None  # there is no speed to be known
    elif target_interval is None:
        offloads = any(preset.offloads for preset in presets.values())
        target_interval = TARGET_INTERVAL_ON_CPU if options.on_cpu or offloads else TARGET_INTERVAL_ON_GPU
    job, batches = Job() if options.runs_script else Job.from_argv(options.training_arguments), {}
    scaling = _scaling(options, job)
    if scaling == "strong":
        by_size = strong_scaling_batches(job, options.world_sizes)
        batches = {RowKey(preset=name, world_size=size).name: by_size[size] for size in by_size for name in presets}
    same = {key: getattr(options, key) for key in ComparisonSpec.model_fields if hasattr(options, key)}
    determined = {
        "presets": tuple(presets),
        "preset_files": {name: preset.texts() for name, preset in presets.items()},
        "expected": {name: ExpectedStrategy.of(preset) for name, preset in presets.items()},
        "preset_sources": {name: source for name, (_, source, _) in loaded.items()},
        "extra_arguments": {name: words for name, (_, _, words) in loaded.items() if words},
        "reference": baseline,
        "cpu": options.on_cpu,
        "processes_per_node": options.nproc_per_node,
        "target_interval": target_interval or None,
        "scaling": scaling,
        "script_sha256": None if file is None else hashlib.sha256(file.read_bytes()).hexdigest(),
        "batches": batches,
    }
    spec = ComparisonSpec.model_validate(same | determined)
    return spec if options.runs_script else with_own_batches(spec)


def with_own_batches(spec: ComparisonSpec) -> ComparisonSpec:
    """Return the comparison with the batch arguments that give every row the same sequences per step.

    Where several ranks train on the same sequences, each is given as many as all of them would have. The accumulation
    steps follow from `--global_batch_size`.
    """
    batches = dict(spec.batches)
    for row in spec.rows():
        batch, layout = dict(spec.batches.get(row.name, {})), spec.layout(row)
        variant, groups = Job.from_argv(spec.extra_arguments.get(row.preset, ())), spec.data_parallel_size(row)
        if layout is not None and layout.ranks_per_batch > 1 and BATCH_ARGUMENT not in variant.given:
            batch[BATCH_ARGUMENT] = spec.job(row).per_device_train_batch_size * layout.ranks_per_batch
        job = spec.job(row).with_values(**batch)
        if job.global_batch_size is not None:
            kept = with_accumulation(job, data_parallel_size=groups, ranks_per_batch=row.world_size // groups)
            batch["gradient_accumulation_steps"] = kept.gradient_accumulation_steps
        if batch:
            batches[row.name] = batch
    return spec.with_batches(batches)


def _scaling(options: CompareOptions, job: Job) -> Scaling | None:
    """Strong where `--global_batch_size` gives every row the same batch; otherwise weak unless given."""
    fixed = job.global_batch_size is not None
    for option, is_set in {"find-max-batch": options.find_max_batch, "scaling weak": options.scaling == "weak"}.items():
        if fixed and is_set:
            hint = "leave one of them out"
            raise ToolkitError(f"--{option} does not go with --global_batch_size, which every row keeps", hint=hint)
    if len(options.world_sizes) == 1:
        return None
    return "strong" if fixed or options.scaling == "strong" else "weak"


def open_comparison(folder: Path, spec: ComparisonSpec, *, resume: bool) -> None:
    """Write a new specification, or check the one that is resumed. Raises ToolkitError for any other folder."""
    wanted, file = spec.as_json(), folder / SPEC_FILE
    present = read_json_object(file) if file.exists() else None
    if present is None:
        try:
            write_json(file, wanted)
        except OSError as error:
            why = f"--output-dir {folder} cannot be written: {error.strerror}"
            raise ToolkitError(why, hint="name a folder that you can write to") from None
    elif not resume:
        raise ToolkitError(f"{folder} already holds a comparison", hint="add `--resume`, or name another folder")
    else:
        for key, now in wanted.items():
            then = present.get(key)
            if then == now or (key == "repeats" and isinstance(then, int)):
                continue
            option, before, now = key.replace("_", "-"), *(shown(value, limit=120) for value in (then, now))
            is_option = key in CompareOptions.__dataclass_fields__ and isinstance(then, int | float | str)
            hint = f"`--{option} {then}` resumes it; or " * is_option + "name another folder: `--output-dir DIR`"
            raise ToolkitError(f"{folder} holds another comparison: its {key} is {before}, now {now}", hint=hint)
        write_json(file, wanted)


def with_largest_batches(spec: ComparisonSpec, records: Mapping[str, LedgerRecord]) -> ComparisonSpec:
    """Return the comparison with each row at the largest per-GPU batch that ran, or at the smallest if none did."""
    batches = dict(spec.batches)
    for row in spec.rows():
        if probes := probes_of(records, row):
            batches[row.name] = {BATCH_ARGUMENT: max(completed_sizes(probes), default=min(probes))}
    return spec.with_batches(batches)
