"""A run and a row of a comparison as types: their figures, and what else a comparison knows of them.

>>> RowKey(preset="zero2", world_size=2).name
'zero2-n2'

Sizes are integers in bytes and belong to one rank, the largest. An unknown is None.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from toolkit.files.paths import shareable
from toolkit.files.secrets import hide_secrets
from toolkit.record import status
from toolkit.record.columns import (
    Bytes,
    Column,
    Count,
    Fraction,
    Interval,
    Measured,
    Model,
    NonNegativeReal,
    PositiveCount,
    Repeats,
    column_of,
)
from toolkit.record.measurements import Figures, Measurements
from toolkit.units import GIB_UNIT, fixed, interval, number, percent, speed

RowStatus = Literal[status.RunStatus, "not_supported"]
NOT_SUPPORTED: Literal["not_supported"] = "not_supported"  # status of a row that cannot run on this node; no run has it
Parity = Literal["reference", "agrees", "parity failed"]
PARITY_FAILED: Parity = "parity failed"
# Keys of the parts, each of the rank that holds most of it.
MODEL_STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
Difference = Literal["reference", "faster", "slower", "no difference seen"]
Shareable = Annotated[str, AfterValidator(shareable)]  # paths in it are relative to the working directory, or to `~`
Fact = bool | int | float | str | list[Any] | None
"""A value that all ranks share, or the list of theirs where they differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKey:
    """What identifies a row: its preset (or variant) and its number of processes."""

    preset: str
    world_size: int

    @property
    def name(self) -> str:
        return f"{self.preset}-n{self.world_size}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One repeat of a row, in fresh processes."""

    row: RowKey
    repeat: int

    @property
    def id(self) -> str:
        """The trial's name in the ledger, and that of its run folder."""
        return f"{self.row.name}-r{self.repeat}"

    @property
    def label(self) -> str:
        """The trial as a person reads it, with its repeat from 1: `zero2 on 2 processes, repeat 1`."""
        size = self.row.world_size
        return f"{self.row.preset} on {size} process{'es' * (size > 1)}, repeat {self.repeat + 1}"


class Failure(Model):
    """Why a row did not complete, as facts."""

    kind: str
    """The status that the run ended with."""
    phase: str | None = None
    """The rank's phase, as in `failure.json`."""
    step: Count | None = None
    """Optimizer steps completed."""
    rank: int | None = None
    """The rank that failed first."""
    predicted_bytes: Annotated[Bytes, Column(unit="bytes")] = None
    """Planned peak of one rank."""
    measured_bytes: Annotated[Bytes, Column(unit="bytes")] = None
    """Highest peak measured: allocated, or on a CPU resident."""


class Probe(Model):
    """One size that the search for the largest per-GPU batch tried."""

    per_device_train_batch_size: PositiveCount
    """The batch, tried for two steps that begin with the longest rows."""
    status: RowStatus
    """How the probe ended; `completed` if the size runs."""
    message: str | None
    """Why it did not complete."""
    failure: Failure | None
    """The same as facts."""


class FlopsPerToken(Model):
    """FLOPs of one token, by each common way of counting."""

    num_params: Count
    """Parameters that one token passes through."""
    seq_length: Count
    """Length of attention: the mean of the timed sequences, padding included."""
    causal: Count
    """Forward and backward, with half of the attention scores."""
    full_attention: Count
    """With all attention scores."""
    without_embeddings: Count
    """`causal` without embedding tables, but with a tied one."""
    hardware: Count
    """`causal` and the forward pass that activation checkpointing repeats."""


class TimelineRank(Model):
    rank: Count
    """The rank."""
    start_seconds: Annotated[NonNegativeReal, Column(unit="s")]
    """Start after the earliest rank's."""
    seconds: Annotated[NonNegativeReal, Column(unit="s")]
    """Length of its step."""
    lanes: Annotated[dict[str, tuple[Interval, ...]], Column(unit="s")]
    """Intervals of `compute`, `communication` and `data_wait`, from the rank's start."""


class Timeline(Model):
    """One profiled step on every rank."""

    step: Count
    """The optimizer step."""
    ranks: tuple[TimelineRank, ...]
    """One object per rank: `rank`, `start_seconds`, `seconds` and `lanes`."""


def without_speeds(model: type[Model]) -> dict[str, Any]:
    """Return the values of a run or row whose speeds say nothing."""
    return dict.fromkeys(key for key in model.model_fields if column_of(model, key).is_speed) | {"step_seconds": ()}


class TrainedProblem(BaseModel):
    """What a trial trained: what its ranks attested and what the training script understood. Parity compares these."""

    model_config = ConfigDict(frozen=True)

    world_size: Fact = None
    engine: Fact = None
    sharding: Fact = None
    layout: Fact = None
    compute_dtype: Fact = None
    master_dtype: Fact = None
    frozen_dtype: Fact = None
    optimizer_dtype: Fact = None
    reduce_dtype: Fact = None
    gradient_clipping: Fact = None
    activation_checkpointing: Fact = None
    activation_checkpointing_selective: Fact = None
    num_trainable_params: Fact = None
    initial_weights_sha256: Fact = None
    ddp_comm_hook: Fact = None
    packing: Fact = None
    global_batch_size: Fact = None
    per_device_train_batch_size: Fact = None
    gradient_accumulation_steps: Fact = None
    learning_rate: Fact = None
    seed: Fact = None
    max_steps: Fact = None
    ranks: Count = 0  # ranks that attested
    expected_masters: str | None = None
    """Dtype of the master weights that the preset specifies, where it departs from the numerics contract."""


class _Outcome(Model):
    """What a run and a row have in common: which it is, how it ended, and what the ranks attested."""

    trial: str
    """Name of the row, `zero2-n2`, or of its repeat, `zero2-n2-r0`."""
    preset: str
    """Preset, or name of a variant."""
    world_size: Annotated[PositiveCount, Column("processes", fixed(0))]
    """Processes (ranks), one per GPU."""
    status: RowStatus
    """How the trial ended, or `not_supported` on this node. A row is `completed` if all its repeats are."""
    message: str | None = None
    """Why it did not complete, or what suggests that it diverged."""
    phase: Annotated[str | None, Column(in_csv=False)] = None
    """Phase in which it failed."""
    failure: Annotated[Failure | None, Column(in_csv=False)] = None
    """Why it did not complete, as facts."""
    parity: Parity | None = None
    """`reference` (the baseline), `agrees` or `parity failed`. Null if unchecked, or different by design."""
    parity_message: str | None = None
    """Both values and the tolerance, or what differs by design."""
    tokens_per_second_per_gpu: Annotated[
        Measured, Column("tokens/s\nper {process}", speed, unit="tokens/s", repeats=Repeats.COMMON_STEPS, is_speed=True)
    ] = None
    """`tokens_per_second` over `world_size`."""
    ratio_to_reference: Annotated[Measured, Column("ratio to\n{baseline}", fixed(3), is_speed=True)] = None
    """Tokens per second without padding over the baseline's with the same `world_size`."""
    num_params: Count | None = None
    """Parameters of the whole model."""
    num_trainable_params: Count | None = None
    """Parameters that are trained."""
    parameter_bytes: Annotated[Bytes, Column("param.\n{unit}", unit="bytes", repeats=Repeats.MIDDLE)] = None
    """Weights of one rank between steps, offloaded ones included."""
    gradient_bytes: Annotated[Bytes, Column("grad.\n{unit}", unit="bytes", repeats=Repeats.MIDDLE)] = None
    """Gradients of one rank before the optimizer step."""
    optimizer_bytes: Annotated[Bytes, Column("optim.\n{unit}", unit="bytes", repeats=Repeats.MIDDLE)] = None
    """Optimizer states and fp32 master weights of one rank."""
    accumulated_gradient_bytes: Annotated[Bytes, Column(unit="bytes", repeats=Repeats.MIDDLE)] = None
    """Gradients of one rank between accumulation steps."""
    accumulate: Annotated[str | None, Column(repeats=Repeats.MIDDLE)] = None
    """These are `sharded` or `whole`."""
    compute_dtype: Annotated[str | None, Column(repeats=Repeats.MIDDLE, in_csv=False)] = None
    """Dtype of forward and backward."""
    layout: Annotated[str | None, Column("layout", repeats=Repeats.MIDDLE, only_if_known="layout")] = None
    """Degrees of parallelism above 1: `dp_shard 2 x tp 2`."""
    kernels: Annotated[str | None, Column("kernels", repeats=Repeats.MIDDLE)] = None
    """Fast paths of the first step, unexpected ones first: `attention eager for flash_attention_2`."""
    num_nodes: Annotated[PositiveCount | None, Column("nodes", fixed(0), repeats=Repeats.LARGEST_OF_ALL)] = None
    """Nodes of its ranks."""
    attestation_sha256: Annotated[str | None, Column(repeats=Repeats.MIDDLE)] = None
    """Digest of the run's attestation.json."""
    startup_seconds: Annotated[Measured, Column("start-up s", fixed(1), unit="s", repeats=Repeats.MEDIAN_OF_ALL)] = None
    """From launch to the first step."""
    wall_seconds: Annotated[Measured, Column("wall s", fixed(1), unit="s", repeats=Repeats.MEDIAN)] = None
    """From launch to exit."""
    goodput_fraction: Annotated[Fraction, Column("goodput", percent, repeats=Repeats.MEDIAN_OF_ALL)] = None
    """Time of kept steps, without waiting, over the time of the processes (0 to 1)."""
    checkpoint_seconds: Annotated[Measured, Column(unit="s", repeats=Repeats.MEDIAN_OF_ALL)] = None
    """Training stood still for saves."""
    evaluation_seconds: Annotated[Measured, Column(unit="s", repeats=Repeats.MEDIAN_OF_ALL)] = None
    """Evaluations."""
    restart_seconds: Annotated[Measured, Column(unit="s", repeats=Repeats.MEDIAN_OF_ALL)] = None
    """From each fault to the first step after it."""
    lost_seconds: Annotated[Measured, Column(unit="s", repeats=Repeats.MEDIAN_OF_ALL)] = None
    """Steps that were trained again, and the time until the fault."""
    waiting_seconds: Annotated[Measured, Column(unit="s", repeats=Repeats.MEDIAN_OF_ALL)] = None
    """In kept steps: until every rank had its batch, and for the slowest rank."""
    run_folder: Annotated[str, Column(repeats=Repeats.MIDDLE)] = ""
    """The trial's run folder, relative to `results.json`."""
    command: Annotated[Shareable, AfterValidator(hide_secrets)] = ""
    """Command that runs the trial again; secrets are `***`."""

    @model_validator(mode="before")
    @classmethod
    def _withhold_unsupported_claims(cls, values: Any) -> Any:
        """Drop, of a file that was edited, speeds of another problem, and the ratio of a run that did not complete."""
        if not isinstance(values, dict):
            return values
        if values.get("parity") == PARITY_FAILED:
            values = values | without_speeds(cls)
        if values.get("status") != status.COMPLETED:
            values = values | {"ratio_to_reference": None}
        return values

    def without_speeds(self) -> Self:
        return self.updated(**without_speeds(type(self)))

    def with_parity(self, parity: Parity | None, message: str | None) -> Self:
        """Return the same with its parity; one that failed has no speeds."""
        checked = self.updated(parity=parity, parity_message=message)
        return checked.without_speeds() if parity == PARITY_FAILED else checked

    @property
    def key(self) -> RowKey:
        return RowKey(preset=self.preset, world_size=self.world_size)

    @property
    def completed(self) -> bool:
        """All steps ran: only then are there figures to compare."""
        return self.status == status.COMPLETED

    @property
    def unsupported(self) -> bool:
        return self.status == NOT_SUPPORTED

    @property
    def out_of_memory(self) -> bool:
        """It did not fit, on a GPU or on the host."""
        return self.status in (status.OUT_OF_MEMORY, status.HOST_OUT_OF_MEMORY)

    @property
    def failed_parity(self) -> bool:
        """It completed, and trained another problem than the baseline."""
        return self.completed and self.parity == PARITY_FAILED

    @property
    def comparable(self) -> bool:
        """It completed, and is known to have trained the baseline's problem."""
        return self.completed and self.parity in ("reference", "agrees")

    @property
    def status_text(self) -> str:
        warned = self.completed and self.message is not None
        return PARITY_FAILED if self.failed_parity else "may have diverged" if warned else self.status

    @property
    def model_state_bytes(self) -> int | None:
        """Parameters, gradients and optimizer states of one rank; None where one of them is unknown."""
        return self._sum_of_states("")

    def _sum_of_states(self, prefix: str) -> int | None:
        parts = [getattr(self, prefix + part) for part in MODEL_STATES]
        return None if None in parts else sum(parts)


class Run(Measurements, _Outcome):
    """One run: a repeat of a row, in processes of its own."""

    repeat: Count
    """The repeat of its row, from 0."""
    position: Count
    """Place in the running order, from 0."""
    problem: TrainedProblem | None = None
    """What was trained, as the ranks read it. Parity compares these values."""

    @property
    def label(self) -> str:
        """The trial as a person reads it; of a probe or a side run its name."""
        trial = Trial(row=self.key, repeat=self.repeat)
        return trial.label if self.trial == trial.id else self.trial


class SideRunFigures(Model):
    """What a run that no speed counts adds to a row."""

    communication_fraction: Annotated[Measured, Column("communication", percent)] = None
    """Share of the profiled steps spent in collectives (0 to 1)."""
    exposed_communication_fraction: Annotated[Measured, Column("of it exposed", percent)] = None
    """The part during which nothing is computed."""
    save_seconds: Annotated[Measured, Column("save s", fixed(1), unit="s")] = None
    """Time of one complete checkpoint."""
    save_bytes: Annotated[Bytes, Column("checkpoint GiB", GIB_UNIT.text, unit="bytes")] = None
    """Its size, all ranks."""
    timeline: Annotated[Timeline | None, Column(in_csv=False)] = None
    """One profiled step on every rank."""


_tenths_of_percent = functools.partial(percent, digits=1)


class Row(SideRunFigures, Figures, _Outcome):
    """One preset with one number of processes, over all its repeats."""

    repeats: Count = 0
    """Repeats that completed."""
    group: str | None = None
    """What sets the row apart by design, such as `ddp_comm_hook bf16`: it is ranked only within its group."""
    per_device_train_batch_size: Annotated[
        PositiveCount | None, Column("per-GPU\nbatch", fixed(0), only_if_known="own_batch")
    ] = None
    """Sequences per accumulation step and rank."""
    step_seconds_interval: Annotated[Interval | None, Column(unit="s", is_speed=True, in_csv=False)] = None
    """95 % confidence interval `[low, high]` of the median."""
    tokens_per_second_interval: Annotated[
        Interval | None,
        Column(
            *("95 %\ninterval", interval(speed), "tokens/s"),
            is_speed=True,
            in_csv=False,
            only_if_known="tokens_per_second_interval",
        ),
    ] = None
    """The same of `tokens_per_second`."""
    ratio_interval: Annotated[
        Interval | None,
        Column("its\ninterval", interval(lambda end: number(end, 3 if end < 100 else 0)), is_speed=True, in_csv=False),
    ] = None
    """Confidence interval of `ratio_to_reference` at `method.ratio_confidence`."""
    difference: Annotated[Difference | None, Column(is_speed=True)] = None
    """`faster` or `slower` where `ratio_interval` excludes 1, else `no difference seen`, or `reference`."""
    rank: Annotated[PositiveCount | None, Column("place\nby speed", fixed(0), is_speed=True)] = None
    """Place by speed within `world_size` and `group`; null unless intervals separate it from every other row."""
    speed_up: Annotated[Measured, Column("speed-up", fixed(2), is_speed=True)] = None
    """`tokens_per_second` over the same preset's with the fewest processes."""
    scaling_efficiency: Annotated[Measured, Column("of ideal", percent, is_speed=True)] = None
    """`speed_up` over the ratio of the numbers of processes. 1 is ideal."""
    planned_peak_bytes: Annotated[Bytes, Column("peak\nplanned\n{unit}", unit="bytes")] = None
    """Planned peak as the GPU reports it, with CUDA context and fragmentation."""
    planned_allocated_bytes: Annotated[Bytes, Column(unit="bytes")] = None
    """The allocator's part of it."""
    planned_gpu_parameter_bytes: Annotated[Bytes, Column("param. on\na GPU, plan\n{unit}", unit="bytes")] = None
    """Planned `parameter_bytes` on GPUs, in the preset's mixed precision."""
    planned_gpu_gradient_bytes: Annotated[Bytes, Column("grad. on\na GPU, plan\n{unit}", unit="bytes")] = None
    """Planned `gradient_bytes`."""
    planned_gpu_optimizer_bytes: Annotated[Bytes, Column("optim. on\na GPU, plan\n{unit}", unit="bytes")] = None
    """Planned `optimizer_bytes`."""
    flops_per_token: Annotated[FlopsPerToken | None, Column(in_csv=False)] = None
    """FLOPs of one token."""
    mfu: Annotated[Measured, Column("MFU", _tenths_of_percent, is_speed=True, only_if_known="mfu")] = None
    """Model FLOPs utilisation (0 to 1): `flops_per_token.causal` times `tokens_per_second_per_gpu` over the GPU's dense
    peak."""
    mfu_full_attention: Annotated[Measured, Column("MFU, full\nattention", _tenths_of_percent, is_speed=True)] = None
    """The same with `full_attention`, as most published figures count."""
    hfu: Annotated[Measured, Column("HFU", _tenths_of_percent, is_speed=True)] = None
    """Hardware FLOPs utilisation: the same with `hardware`."""
    cost_per_million_tokens: Annotated[
        Measured,
        Column("cost per\n10⁶ tokens", "{:.3g}".format, is_speed=True, only_if_known="cost_per_million_tokens"),
    ] = None
    """Price of a million non-padding tokens."""
    probes: Annotated[tuple[Probe, ...] | None, Column(in_csv=False)] = None
    """Sizes that `--find-max-batch` tried."""

    @property
    def own_batch(self) -> int | None:
        """The per-GPU batch of a row that may have another one than the baseline: searched, or shared by ranks."""
        return self.per_device_train_batch_size if self.probes or self.layout else None

    @property
    def planned_gpu_state_bytes(self) -> int | None:
        """Model states of one rank that the planner gives for GPUs."""
        return self._sum_of_states("planned_gpu_")

    @property
    def useful_speed(self) -> float:
        """Tokens per second without padding, by which rows are compared; with it where padding was not counted."""
        return self.non_padding_tokens_per_second or self.tokens_per_second or 0.0

    @property
    def has_speed(self) -> bool:
        """It completed, and its speed is not withheld."""
        return self.completed and self.tokens_per_second is not None

    @property
    def unchecked(self) -> bool:
        """It completed, and could not be compared with the baseline's training problem."""
        return self.completed and self.parity is None and self.group is None

    @property
    def repeated(self) -> bool:
        """True if its speed has a confidence interval: without one, no difference from another row is claimed."""
        return self.tokens_per_second_interval is not None
