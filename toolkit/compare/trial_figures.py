"""The figures of one trial as a type, each column declared with its meaning; a row has the same columns.

Sizes are integers in bytes and belong to one rank, the largest.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from annotated_types import MaxLen
from pydantic import AfterValidator, model_validator

from toolkit.compare.columns import (
    GIB_UNIT,
    Column,
    Display,
    Repeats,
    columns_of,
    fixed,
    percent,
    speed,
)
from toolkit.compare.result_values import (
    PARITY_FAILED,
    Bytes,
    Count,
    Failure,
    Fraction,
    Measured,
    MemoryByPhase,
    Model,
    Name,
    Number,
    Parity,
    PerStep,
    PositiveCount,
    RowKey,
    RowStatus,
    Timeline,
    TrainedProblem,
)
from toolkit.files.secrets import hide_secrets
from toolkit.record import status
from toolkit.units import NOT_AVAILABLE, number

PER_STEP = (
    "losses",
    "step_seconds",
    "grad_norms",
    "step_tokens",
    "step_non_padding_tokens",
    "step_supervised_tokens",
    "batch_sha256",
)
"""Keys of a trial, or of its record in the ledger, with one value per optimizer step."""

# Columns that rows and trials share in different places.
FailureFacts = Annotated[
    Failure | None, Column("Why it did not complete, as facts; null where it completed.", in_csv=False)
]
RankSkew = Annotated[
    Measured,
    Column(
        "Time that the slowest rank works on its own (data loading, first forward, optimizer) over that of the median"
        " rank, median over the timed steps; 1 where no rank delays the others.",
        repeats=Repeats.GEOMETRIC_MEAN,
        display=Display(heading="rank\nskew", format=fixed(2)),
    ),
]
CommunicationFraction = Annotated[
    Measured,
    Column(
        "Time in collectives over the time of the profiled steps, mean over ranks (0 to 1); from a run that no speed"
        " counts; null without `--profile`.",
        display=Display(heading="communication", format=percent),
    ),
]
ExposedCommunicationFraction = Annotated[
    Measured,
    Column(
        "The part of `communication_fraction` during which nothing is computed.",
        display=Display(heading="of it exposed", format=percent),
    ),
]
TimelineOrNone = Annotated[
    Timeline | None, Column("One profiled step on every rank; null without `--profile`.", in_csv=False)
]
SaveSeconds = Annotated[
    Measured,
    Column(
        "One complete checkpoint, to its last checksum, in a run that no speed counts; null without `--measure-save`.",
        unit="s",
        display=Display(heading="save s", format=fixed(1)),
    ),
]
SaveBytes = Annotated[
    Bytes,
    Column(
        "Size of that checkpoint, files of all ranks.",
        unit="bytes",
        display=Display(heading="checkpoint GiB", format=GIB_UNIT.text),
    ),
]
Accumulate = Annotated[
    str | None,
    Column(
        "Gradients between accumulation steps, as the ranks attested them: `sharded` or `whole`; null where the first"
        " step has one accumulation step.",
        repeats=Repeats.MIDDLE,
        display=Display(heading="accu-\nmulates", only_if_known="accumulate"),
    ),
]
AccumulatedGradientBytes = Annotated[
    Bytes,
    Column(
        "Gradients of one rank between the accumulation steps of the first step, the maximum over ranks.",
        unit="bytes",
        repeats=Repeats.MIDDLE,
    ),
]
RowLayout = Annotated[
    str | None,
    Column(
        "Degrees of parallelism above 1, as the ranks read them back: `dp_shard 2 x tp 2`; null for data parallelism"
        " alone.",
        repeats=Repeats.MIDDLE,
        display=Display(heading="layout", format=lambda layout: str(layout or NOT_AVAILABLE), only_if_known="layout"),
    ),
]

GoodputFraction = Annotated[
    Fraction,
    Column(
        "Time of steps that were kept, without waiting, over the time while processes of the run existed (0 to 1); a"
        " short trial is start-up for the most part.",
        repeats=Repeats.MEDIAN_OF_ALL,
        display=Display(heading="goodput", format=percent),
    ),
]
CheckpointSeconds = Annotated[
    Measured, Column("Training stood still for saves.", unit="s", repeats=Repeats.MEDIAN_OF_ALL)
]
EvaluationSeconds = Annotated[Measured, Column("Evaluations.", unit="s", repeats=Repeats.MEDIAN_OF_ALL)]
RestartSeconds = Annotated[
    Measured, Column("From each fault to the first step after it.", unit="s", repeats=Repeats.MEDIAN_OF_ALL)
]
LostSeconds = Annotated[
    Measured,
    Column(
        "Steps that were trained again, and the time until a fault ended the processes.",
        unit="s",
        repeats=Repeats.MEDIAN_OF_ALL,
    ),
]
WaitingSeconds = Annotated[
    Measured,
    Column(
        "In kept steps: until every rank had its batch, and for the slowest rank.",
        unit="s",
        repeats=Repeats.MEDIAN_OF_ALL,
    ),
]

NumNodes = Annotated[
    PositiveCount | None,
    Column(
        "Nodes that its ranks ran on, by their host names; null in results from before it was recorded.",
        repeats=Repeats.LARGEST_OF_ALL,
        display=Display(heading="nodes", format=fixed(0), only_if_known="several_nodes"),
    ),
]


class Figures(Model):
    """What a trial and a row have in common. A figure that was not measured is None."""

    trial: Annotated[
        Name,
        Column("Name of the row, such as `zero2-n2`, or of the trial: the row's name and the repeat, `zero2-n2-r0`."),
    ]
    preset: Annotated[Name, Column("Stem of the preset's file, or the name of a variant.")]
    world_size: Annotated[
        PositiveCount, Column("Processes (ranks), one per GPU.", display=Display(heading="processes", format=fixed(0)))
    ]
    status: Annotated[
        RowStatus,
        Column(
            "How the trial ended, or `not_supported`: it cannot run on this node. Only `completed` rows have comparable"
            " figures. A row is `completed` if all its repeats are."
        ),
    ]
    message: Annotated[
        str | None,
        Column("Why it did not complete, as the failing rank reported it, or why it is not supported."),
    ]
    parity: Annotated[
        Parity | None,
        Column(
            "Comparison with the baseline's training problem: `reference` (it is the baseline), `agrees` or `parity"
            " failed`; null where it could not be checked, or where the row differs by design."
        ),
    ]
    parity_message: Annotated[
        str | None,
        Column("Both values and the tolerance where parity failed; what differs where it does so by design."),
    ]
    tokens_per_second: Annotated[
        Measured,
        Column(
            "Tokens of the timed steps, padding included, over their wall time; all ranks together. Null where parity"
            " failed.",
            unit="tokens/s",
            repeats=Repeats.COMMON_STEPS,
            is_speed=True,
            display=Display(heading="tokens/s", format=speed),
            display_in={"comparison": Display(heading="tokens\n/s", format=speed)},
        ),
    ]
    tokens_per_second_per_gpu: Annotated[
        Measured,
        Column(
            "`tokens_per_second` over `world_size`.",
            unit="tokens/s",
            repeats=Repeats.COMMON_STEPS,
            is_speed=True,
            display=Display(heading="tokens/s\nper {process}", format=speed),
        ),
    ]
    tokens_per_cpu_second: Annotated[
        Measured,
        Column(
            "Tokens of the timed steps over the CPU time that all ranks spent in them; steadier than wall time on a"
            " shared node.",
            unit="tokens/s",
            repeats=Repeats.GEOMETRIC_MEAN,
            is_speed=True,
            display=Display(heading="tokens per\nCPU-second", format=speed),
        ),
    ]
    supervised_tokens_per_second: Annotated[
        Measured,
        Column(
            "Like `tokens_per_second`, counting only tokens that the loss counts.",
            unit="tokens/s",
            repeats=Repeats.GEOMETRIC_MEAN,
            is_speed=True,
            display=Display(heading="supervised\ntokens/s", format=speed),
        ),
    ]
    padding_fraction: Annotated[
        Fraction,
        Column(
            "Padding tokens over all tokens of the timed steps (0 to 1).",
            repeats=Repeats.MIDDLE,
            display=Display(heading="padding", format=percent),
        ),
    ]
    timed_steps: Annotated[
        Count,
        Column(
            "Optimizer steps that the speeds count; of a row, in each repeat. 0 where none was reached.",
            display=Display(heading="timed\nsteps", format=fixed(0)),
        ),
    ]
    step_seconds_median: Annotated[
        Measured,
        Column(
            "Median of the timed steps, data loading included.",
            unit="s",
            repeats=Repeats.COMMON_STEPS,
            is_speed=True,
            display=Display(heading="step\nmedian s", format=fixed(3)),
            display_in={"comparison": Display(heading="step\ns", format=fixed(3))},
        ),
    ]
    step_seconds_p90: Annotated[
        Measured,
        Column(
            "90th percentile of the timed steps.",
            unit="s",
            repeats=Repeats.COMMON_STEPS,
            is_speed=True,
            display=Display(heading="step\np90 s", format=fixed(3)),
        ),
    ]
    num_params: Annotated[Count | None, Column("Parameters of the whole model.")]
    num_trainable_params: Annotated[Count | None, Column("Parameters that are trained.")]
    parameter_bytes: Annotated[
        Bytes,
        Column(
            "Weights of one rank between steps, the maximum over ranks, offloaded ones included.",
            unit="bytes",
            repeats=Repeats.MIDDLE,
            display=Display(heading="param.\n{unit}"),
        ),
    ]
    gradient_bytes: Annotated[
        Bytes,
        Column(
            "Gradients of one rank before the optimizer step, the maximum over ranks.",
            unit="bytes",
            repeats=Repeats.MIDDLE,
            display=Display(heading="grad.\n{unit}"),
        ),
    ]
    optimizer_bytes: Annotated[
        Bytes,
        Column(
            "Optimizer states and fp32 master weights of one rank, the maximum over ranks.",
            unit="bytes",
            repeats=Repeats.MIDDLE,
            display=Display(heading="optim.\n{unit}"),
        ),
    ]
    peak_allocated_bytes: Annotated[
        Bytes,
        Column(
            "Peak of the CUDA allocator on the largest rank; null on a CPU.",
            unit="bytes",
            repeats=Repeats.LARGEST,
            display=Display(heading="peak\nallocated\n{unit}"),
            display_in={"comparison": Display(heading="peak\nalloc.\n{unit}")},
        ),
    ]
    peak_reserved_bytes: Annotated[
        Bytes,
        Column(
            "Peak that the CUDA allocator reserved on the largest rank; null on a CPU.",
            unit="bytes",
            repeats=Repeats.LARGEST,
            display=Display(heading="peak\nreserved\n{unit}"),
        ),
    ]
    peak_host_bytes: Annotated[
        Bytes,
        Column(
            "Peak resident host memory (RSS) of the largest rank, libraries included.",
            unit="bytes",
            repeats=Repeats.LARGEST,
            display=Display(heading="peak\nRSS\n{unit}"),
        ),
    ]
    peak_rank: Annotated[
        Count | None,
        Column(
            "The rank with the highest allocated peak, on a CPU with the highest resident memory.",
            display=Display(heading="on\nrank", format=fixed(0)),
        ),
    ]
    first_loss: Annotated[Number, Column("Loss of the first step.", repeats=Repeats.MIDDLE)]
    last_loss: Annotated[
        Number,
        Column(
            "Loss of the last step.",
            repeats=Repeats.MIDDLE,
            display=Display(heading="last\nloss", format=fixed(4)),
        ),
    ]
    ratio_to_reference: Annotated[
        Measured,
        Column(
            "Tokens per second without padding over the baseline's with the same `world_size`: rows with other batches"
            " pad the same sequences otherwise. Null without a baseline, or where the row did not complete or failed"
            " parity.",
            is_speed=True,
            display=Display(heading="ratio to\n{baseline}", format=fixed(3)),
            display_in={"comparison": Display(heading="ratio\nto {short_baseline}", format=fixed(2))},
        ),
    ]
    wall_seconds: Annotated[
        Measured,
        Column(
            "From launch to exit: start-up, untimed steps and saving included.",
            unit="s",
            repeats=Repeats.MEDIAN,
            display=Display(heading="wall s", format=fixed(1)),
        ),
    ]
    timed_seconds: Annotated[
        Measured,
        Column(
            "Wall time of the timed steps.",
            unit="s",
            repeats=Repeats.MEDIAN,
            display=Display(heading="timed\ns", format=fixed(1)),
        ),
    ]
    losses: Annotated[PerStep, Column("Loss of each step, mean over ranks.", repeats=Repeats.MIDDLE, in_csv=False)]
    step_seconds: Annotated[
        PerStep,
        Column(
            "Seconds of each step on the slowest rank, untimed steps included; empty where parity failed.",
            repeats=Repeats.MIDDLE,
            in_csv=False,
        ),
    ]
    grad_norms: Annotated[
        PerStep, Column("Gradient norm of each step before clipping.", repeats=Repeats.MIDDLE, in_csv=False)
    ]
    run_folder: Annotated[str, Column("The trial's run folder, relative to `results.json`.", repeats=Repeats.MIDDLE)]
    command: Annotated[
        str, AfterValidator(hide_secrets), Column("The command that runs the trial again; each secret is `***`.")
    ]

    @model_validator(mode="before")
    @classmethod
    def _withhold_unsupported_claims(cls, values: Any) -> Any:
        """Drop the speeds of a row that trained another problem, and the ratio of one that did not complete."""
        if not isinstance(values, dict):
            return values
        if values.get("parity") == PARITY_FAILED:
            speeds = [key for key, column in columns_of(cls).items() if column.is_speed]
            values = values | dict.fromkeys(speeds) | {"step_seconds": ()}
        if values.get("status") != status.COMPLETED:
            values = values | {"ratio_to_reference": None}
        return values

    @property
    def key(self) -> RowKey:
        """The row that it is, or that it is a repeat of."""
        return RowKey(preset=self.preset, world_size=self.world_size)

    @property
    def completed(self) -> bool:
        """All steps ran: only then are there figures to compare."""
        return self.status == status.COMPLETED

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
        """The status as tables show it."""
        return PARITY_FAILED if self.failed_parity else self.status

    @property
    def model_state_bytes(self) -> int | None:
        """Parameters, gradients and optimizer states of one rank; None where one of them is unknown."""
        parts = (self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


class Readings(Model):
    """What was read beside speed and losses. Results from before these were recorded lack them."""

    non_padding_tokens_per_second: Annotated[
        Measured,
        Column(
            "`tokens_per_second` without padding: times 1 - `padding_fraction`.",
            unit="tokens/s",
            is_speed=True,
            display=Display(heading="non-padding\ntokens/s", format=speed),
        ),
    ] = None
    peak_driver_bytes: Annotated[
        Bytes,
        Column(
            "Highest memory of one rank's process that the driver reported, context and libraries included (NVML,"
            " sampled once per second); null where NVML cannot tell.",
            unit="bytes",
            repeats=Repeats.LARGEST_OF_ALL,
            display=Display(heading="peak\ndriver\n{unit}"),
        ),
    ] = None
    allocator_retries: Annotated[
        Count | None,
        Column(
            "Times that the CUDA allocator of one rank had to free its cache and retry, the maximum over ranks; null on"
            " a CPU.",
            repeats=Repeats.LARGEST_OF_ALL,
            display=Display(heading="re-\ntries", format=fixed(0)),
        ),
    ] = None
    memory_by_phase: Annotated[
        MemoryByPhase | None,
        Column(
            "Memory by phase: bytes of one rank after each phase of its first step.",
            repeats=Repeats.LARGEST_OF_ALL,
            in_csv=False,
        ),
    ] = None
    energy_joules: Annotated[
        Measured,
        Column(
            "Energy of all ranks' GPUs over the timed steps, as NVML reports it; null where it cannot.",
            unit="J",
            repeats=Repeats.MEDIAN_OF_ALL,
            display=Display(heading="energy\nkJ", format=lambda joules: number(joules and joules / 1000, 1)),
        ),
    ] = None
    throttle_reasons: Annotated[
        Annotated[tuple[str, ...], MaxLen(100)] | None,
        Column(
            "Why GPU clocks were reduced in a timed step; empty where they were not, null where NVML cannot tell.",
            repeats=Repeats.UNION_OF_ALL,
            in_csv=False,
        ),
    ] = None
    attestation_sha256: Annotated[
        str | None, Column("Digest of the run's attestation.json.", repeats=Repeats.MIDDLE)
    ] = None
    startup_seconds: Annotated[
        Measured,
        Column(
            "From launch to the first step: processes, imports (not of a warm start on a CPU), data, model and engine.",
            unit="s",
            repeats=Repeats.MEDIAN_OF_ALL,
            display=Display(heading="start-up s", format=fixed(1)),
        ),
    ] = None
    recompilations_after_first_steps: Annotated[
        Count | None,
        Column(
            "Graphs that one rank compiled in its timed steps, the maximum over ranks; null without `--torch_compile`.",
            repeats=Repeats.LARGEST_OF_ALL,
            in_csv=False,
        ),
    ] = None
    graph_breaks_after_first_steps: Annotated[
        Count | None,
        Column(
            "Graph breaks that one rank counted in its timed steps, the maximum over ranks; null without"
            " `--torch_compile`.",
            repeats=Repeats.LARGEST_OF_ALL,
            in_csv=False,
        ),
    ] = None


class TrialResult(Readings, Figures):
    """One trial in `results.json`: one repeat of a row in processes of its own."""

    repeat: Annotated[Count, Column("The repeat of its row, from 0.")]
    position: Annotated[Count, Column("Place in the running order, from 0.")]
    step_tokens: Annotated[tuple[Count, ...], Column("Tokens of each step, padding included, all ranks.")]
    timed_step_numbers: Annotated[
        tuple[PositiveCount, ...], Column("Numbers, from 1, of the steps that the speeds count.")
    ]
    rank_skew: RankSkew = None
    failure: FailureFacts = None
    phase: Annotated[str | None, Column("The phase in which it failed.")] = None
    compute_dtype: Annotated[str | None, Column("Dtype of the forward and backward passes.")] = None
    problem: Annotated[
        TrainedProblem | None, Column("What was trained, as the ranks attested it; parity compares these values.")
    ] = None
    accumulate: Accumulate = None
    accumulated_gradient_bytes: AccumulatedGradientBytes = None
    layout: RowLayout = None
    goodput_fraction: GoodputFraction = None
    checkpoint_seconds: CheckpointSeconds = None
    evaluation_seconds: EvaluationSeconds = None
    restart_seconds: RestartSeconds = None
    lost_seconds: LostSeconds = None
    waiting_seconds: WaitingSeconds = None
    num_nodes: NumNodes = None


def contradiction(trial: TrialResult) -> str | None:
    """Return what is wrong with the lists of a trial that was read: another length than the others, an unknown step.

    Each may be empty: step times where parity failed, the others in results from before they were recorded.
    """
    lengths = {key: len(getattr(trial, key)) for key in PER_STEP if getattr(trial, key, ())}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} has {length:,}" for key, length in lengths.items())
        return f"{listed} values, expected one per step in each"
    numbers, steps = trial.timed_step_numbers, min(lengths.values(), default=0)
    if lengths and numbers and max(numbers) > steps:
        return f"timed_step_numbers has step {max(numbers)}, expected at most {steps}"
    if any(before >= after for before, after in pairwise(numbers)):
        return "timed_step_numbers is not ascending"
    return None
