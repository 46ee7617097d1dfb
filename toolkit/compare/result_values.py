"""The values that rows and trials of `results.json` are made of, and the objects nested in them.

>>> RowKey(preset="zero2", world_size=2).name
'zero2-n2'

An unknown is None. NaN and infinity cannot be written as JSON, so they become None when a value is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import AfterValidator, AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Strict, WithJsonSchema

from toolkit.compare.columns import Column

RowStatus = Literal[
    "completed",
    "out_of_memory",
    "host_out_of_memory",
    "timed_out",
    "diverged",
    "attestation_failed",
    "failed",
    "interrupted",
    "not_supported",
]
NOT_SUPPORTED: Literal["not_supported"] = "not_supported"
"""Status of a row that cannot run on this node; no run has it."""
Parity = Literal["reference", "agrees", "parity failed"]
PARITY_FAILED: Literal["parity failed"] = "parity failed"
Difference = Literal["reference", "faster", "slower", "no difference seen"]


def _none_if_not_finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _none_if_no_fraction(value: object) -> object:
    """A fraction outside 0 to 1 comes from miscounted tokens; parity reports the counts themselves."""
    return None if isinstance(value, float | int) and not 0 <= value <= 1 else value


# Far beyond every figure, and small enough that no sum or ratio of figures overflows.
LARGEST = 1e100
# Of one lane of one rank in a profiled step: one per kernel, and neighbors are merged.
MAX_INTERVALS = 100_000


Scalar = bool | int | float | str | None


def _scalar_or_list(value: object) -> object:
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, Scalar) or (isinstance(item, float) and not math.isfinite(item)):
            raise ValueError("expected a text, a finite number, or a list of them")
    return value


def _not_too_many(intervals: object) -> object:
    """Refuse a list that is too long before each of its intervals is validated."""
    if isinstance(intervals, list) and len(intervals) > MAX_INTERVALS:
        raise ValueError(f"expected at most {MAX_INTERVALS:,}")
    return intervals


def _in_order(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("expected the low end first")
    return interval


# A text or a boolean is no number: pydantic would convert "12" and true.
Integer = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Ge(0)]
PositiveCount = Annotated[int, Strict(), Gt(0)]
Real = Annotated[float, Strict(), AllowInfNan(False), Ge(-LARGEST), Le(LARGEST), WithJsonSchema({"type": "number"})]
NonNegativeReal = Annotated[
    float, Strict(), AllowInfNan(False), Ge(0), Le(LARGEST), WithJsonSchema({"type": "number", "minimum": 0})
]
Share = Annotated[float, Strict(), Ge(0), Le(1)]
Name = Annotated[str, MinLen(1), MaxLen(300)]
"""Of a preset, a row or a trial; a preset's is that of a file."""
Number = Annotated[Real | None, BeforeValidator(_none_if_not_finite)]
Fraction = Annotated[Share | None, BeforeValidator(_none_if_no_fraction)]
Measured = Annotated[NonNegativeReal | None, BeforeValidator(_none_if_not_finite)]
Interval = Annotated[tuple[NonNegativeReal, NonNegativeReal], AfterValidator(_in_order)]
"""Low and high end."""
Bytes = Count | None
PerStep = tuple[Number, ...]
Fact = Annotated[Scalar | list[Any], BeforeValidator(_scalar_or_list)]
"""A value that all ranks share, or the list of theirs where they differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKey:
    """What identifies a row: its preset (or variant) and its number of processes."""

    preset: str
    world_size: int

    @property
    def name(self) -> str:
        """The row's name in files and tables."""
        return f"{self.preset}-n{self.world_size}"


class Model(BaseModel):
    """A part of the results: immutable; keys of a newer version are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def updated(self, **changes: Any) -> Self:
        """Return a validated copy with other values of some fields."""
        assert set(changes) <= set(type(self).model_fields), f"unknown: {set(changes) - set(type(self).model_fields)}"
        return type(self).model_validate({**dict(self), **changes})


class Failure(Model):
    """Why a row did not complete, as facts."""

    kind: Annotated[str, Column("The status that the run ended with.")]
    phase: Annotated[
        str | None,
        Column(
            "What the rank was doing: `load`, `forward`, `backward`, `step`, or another phase of "
            "docs/reference/run-folder.md; null where no rank could report it."
        ),
    ]
    step: Annotated[Count | None, Column("Optimizer steps completed before the failure.")]
    rank: Annotated[Integer | None, Column("The rank that failed first.")]
    predicted_bytes: Annotated[
        Bytes, Column("Peak of one rank that the planner predicted; null without a plan.", unit="bytes")
    ]
    measured_bytes: Annotated[
        Bytes,
        Column("Highest peak measured before the failure: allocated, or on a CPU resident.", unit="bytes"),
    ]


class Probe(Model):
    """One size that the search for the largest micro-batch tried."""

    per_device_train_batch_size: Annotated[
        PositiveCount, Column("The micro-batch, tried for two steps that begin with the longest rows.")
    ]
    status: Annotated[RowStatus, Column("How the probe ended; a size runs only if it is `completed`.")]
    message: Annotated[str | None, Column("Why it did not complete, as the failing rank reported it.")]
    failure: Annotated[Failure | None, Column("The same as facts, as in a row; null where it completed.")]


class MemoryByPhase(Model):
    """Bytes of one rank after each phase of its first step, each the maximum over ranks and repeats."""

    bytes_of: Annotated[
        str,
        Column("`allocated`: in tensors of the CUDA allocator; `rss`: resident memory of the process, on a CPU."),
    ]
    load: Annotated[Bytes, Column("When the engine is ready, before the first step.", unit="bytes")]
    forward: Annotated[Bytes, Column("After the forward pass of the first accumulation step.", unit="bytes")]
    backward: Annotated[Bytes, Column("After its backward pass.", unit="bytes")]
    step: Annotated[Bytes, Column("After the first optimizer step, gradients released.", unit="bytes")]


class FlopsPerToken(Model):
    """FLOPs of one token, by each common way of counting."""

    num_params: Annotated[
        Count,
        Column(
            "Parameters that are counted: all, embeddings included; of a mixture of experts, those that one token"
            " passes through."
        ),
    ]
    seq_length: Annotated[
        Count,
        Column("Length that attention is counted for: the mean of the timed steps' sequences, padding included."),
    ]
    causal: Annotated[
        Count, Column("Forward and backward, with the half of the attention scores that a causal mask keeps.")
    ]
    full_attention: Annotated[Count, Column("The same with all attention scores.")]
    without_embeddings: Annotated[
        Count,
        Column("Like `causal`, without embedding tables; a tied table is also the output layer, and counts."),
    ]
    hardware: Annotated[Count, Column("Like `causal`, with the forward pass that activation checkpointing repeats.")]


class TimelineRank(Model):
    """One rank of a timeline."""

    rank: Annotated[Count, Column("The rank.")]
    start_seconds: Annotated[NonNegativeReal, Column("Its start after the earliest rank's.", unit="s")]
    seconds: Annotated[NonNegativeReal, Column("Length of its step.", unit="s")]
    lanes: Annotated[
        dict[str, Annotated[tuple[Interval, ...], BeforeValidator(_not_too_many), MaxLen(MAX_INTERVALS)]],
        MaxLen(10),
        Column("Intervals of `compute`, `communication` and `data_wait`, from the rank's start.", unit="s"),
    ]


class Timeline(Model):
    """One profiled step on every rank."""

    step: Annotated[Count, Column("The optimizer step.")]
    ranks: Annotated[
        tuple[TimelineRank, ...],
        MinLen(1),
        MaxLen(1024),
        Column("One object per rank: `rank`, `start_seconds`, `seconds` and `lanes`."),
    ]


class TrainedProblem(Model):
    """What a trial trained: what its ranks attested and what the training script understood. Parity compares these."""

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
    num_trainable_params: Fact = None
    initial_weights_sha256: Fact = None
    ddp_comm_hook: Fact = None
    packing: Fact = None
    global_batch_size: Fact = None
    learning_rate: Fact = None
    seed: Fact = None
    max_steps: Fact = None
    ranks: Count = 0
    """Ranks that attested."""
    promised_masters: str | None = None
    """Dtype of the master weights that the preset specifies, where it departs from the numerics contract."""
