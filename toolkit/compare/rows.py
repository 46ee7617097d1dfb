"""The rows of `results.json`: what repeats, the baseline, the planner and side runs add to the figures of a trial."""

from __future__ import annotations

from typing import Annotated

from annotated_types import MaxLen
from pydantic import ConfigDict

from toolkit.compare.columns import (
    Column,
    Display,
    Repeats,
    fixed,
    interval,
    percent,
    price,
    speed,
    tenths_of_percent,
)
from toolkit.compare.result_values import (
    Bytes,
    Count,
    Difference,
    FlopsPerToken,
    Interval,
    Measured,
    PositiveCount,
    Probe,
)
from toolkit.compare.trial_figures import (
    Accumulate,
    AccumulatedGradientBytes,
    CheckpointSeconds,
    CommunicationFraction,
    EvaluationSeconds,
    ExposedCommunicationFraction,
    FailureFacts,
    Figures,
    GoodputFraction,
    LostSeconds,
    NumNodes,
    RankSkew,
    Readings,
    RestartSeconds,
    RowLayout,
    SaveBytes,
    SaveSeconds,
    TimelineOrNone,
    WaitingSeconds,
)
from toolkit.units import number


class _Claims(Figures):
    """What repeats and the baseline add to a row."""

    group: Annotated[
        str | None,
        Column(
            "What sets the row apart by design, such as `ddp_comm_hook int8`: its losses are not compared with the"
            " baseline's, and it is ranked only within its group. Null: it trains the baseline's problem."
        ),
    ]
    repeats: Annotated[Count, Column("Repeats that completed.")]
    step_seconds_interval: Annotated[
        Interval | None,
        Column(
            "95 % confidence interval `[low, high]` of `step_seconds_median` over repeats; null with fewer than two.",
            unit="s",
            is_speed=True,
            in_csv=False,
        ),
    ]
    tokens_per_second_interval: Annotated[
        Interval | None,
        Column(
            "95 % confidence interval `[low, high]` of `tokens_per_second` over repeats; null with fewer than two.",
            unit="tokens/s",
            is_speed=True,
            in_csv=False,
            display=Display(
                heading="95 %\ninterval", format=interval(speed), only_if_known="tokens_per_second_interval"
            ),
        ),
    ]
    ratio_interval: Annotated[
        Interval | None,
        Column(
            "Confidence interval `[low, high]` of `ratio_to_reference`, at `method.ratio_confidence`; null with fewer"
            " than two repeats of either.",
            is_speed=True,
            in_csv=False,
            display=Display(
                heading="its\ninterval", format=interval(lambda bound: number(bound, 3 if bound < 100 else 0))
            ),
        ),
    ]
    difference: Annotated[
        Difference | None,
        Column(
            "`faster` or `slower` than the baseline where `ratio_interval` excludes 1, else `no difference seen`;"
            " `reference` for the baseline itself; null without an interval.",
            is_speed=True,
        ),
    ]
    rank: Annotated[
        PositiveCount | None,
        Column(
            "Place by speed among the rows of its `world_size` and `group`, 1 the fastest; null unless intervals"
            " separate it from every other.",
            is_speed=True,
            display=Display(heading="place\nby speed", format=fixed(0)),
        ),
    ]
    rank_skew: RankSkew
    failure: FailureFacts
    speed_up: Annotated[
        Measured,
        Column(
            "`tokens_per_second` over that of the same preset with the fewest processes; null where it ran with a"
            " single number of processes.",
            is_speed=True,
            display=Display(heading="speed-up", format=fixed(2)),
        ),
    ]
    scaling_efficiency: Annotated[
        Measured,
        Column(
            "`speed_up` over the ratio of the numbers of processes; 1 is ideal.",
            is_speed=True,
            display=Display(heading="of ideal", format=percent),
        ),
    ]


class Row(Readings, _Claims):
    """One preset with one number of processes, over all its repeats.

    Results from before a key was recorded lack it: those keys have a default.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {
                    "if": {
                        "anyOf": [
                            {"properties": {"status": {"not": {"const": "completed"}}}},
                            {"properties": {"parity": {"const": "parity failed"}}},
                        ]
                    },
                    "then": {"properties": {"ratio_to_reference": {"type": "null"}}},
                },
                {
                    "if": {"properties": {"parity": {"const": "parity failed"}}, "required": ["parity"]},
                    "then": {"properties": {"tokens_per_second": {"type": "null"}, "rank": {"type": "null"}}},
                },
            ]
        }
    )

    planned_peak_bytes: Annotated[
        Bytes,
        Column(
            "Peak of one rank that the planner predicts, as the GPU reports it: with CUDA context and fragmentation;"
            " null on a CPU or without a plan.",
            unit="bytes",
            display=Display(heading="peak\nplanned\n{unit}"),
        ),
    ] = None
    planned_allocated_bytes: Annotated[
        Bytes,
        Column(
            "The part of it that the allocator holds at the peak: compare with `peak_allocated_bytes`; null without a"
            " plan.",
            unit="bytes",
        ),
    ] = None
    flops_per_token: Annotated[
        FlopsPerToken | None,
        Column("FLOPs of one token; null where the model's shape is unknown.", in_csv=False),
    ] = None
    mfu: Annotated[
        Measured,
        Column(
            "Model FLOPs utilisation: `flops_per_token.causal` times `tokens_per_second_per_gpu`, padding included,"
            " over the GPU's dense peak in the compute dtype (0 to 1); null on a CPU or an unlisted GPU.",
            is_speed=True,
            display=Display(heading="MFU", format=tenths_of_percent, only_if_known="mfu"),
        ),
    ] = None
    mfu_full_attention: Annotated[
        Measured,
        Column(
            "The same with `flops_per_token.full_attention`, as most published figures count.",
            is_speed=True,
            display=Display(heading="MFU, full\nattention", format=tenths_of_percent),
        ),
    ] = None
    hfu: Annotated[
        Measured,
        Column(
            "Hardware FLOPs utilisation: the same with `flops_per_token.hardware`.",
            is_speed=True,
            display=Display(heading="HFU", format=tenths_of_percent),
        ),
    ] = None
    cost_per_million_tokens: Annotated[
        Measured,
        Column(
            "Price of a million non-padding tokens, in the currency of `price_per_gpu_hour`; null on a CPU or without a"
            " price.",
            is_speed=True,
            display=Display(heading="cost per\n10⁶ tokens", format=price, only_if_known="cost_per_million_tokens"),
        ),
    ] = None
    communication_fraction: CommunicationFraction = None
    exposed_communication_fraction: ExposedCommunicationFraction = None
    save_seconds: SaveSeconds = None
    save_bytes: SaveBytes = None
    timeline: TimelineOrNone = None
    per_device_train_batch_size: Annotated[
        PositiveCount | None,
        Column(
            "Sequences per accumulation step and rank in this row; null in results from before it was recorded.",
            display=Display(heading="micro-\nbatch", format=fixed(0), only_if_known="own_batch"),
        ),
    ] = None
    probes: Annotated[
        Annotated[tuple[Probe, ...], MaxLen(1000)] | None,
        Column(
            "Sizes that the search for the largest micro-batch tried, by size; null without `--find-max-batch`.",
            in_csv=False,
        ),
    ] = None
    phase: Annotated[str | None, Column("The phase in which it failed.", in_csv=False)] = None
    compute_dtype: Annotated[
        str | None, Column("Dtype of the forward and backward passes.", repeats=Repeats.MIDDLE, in_csv=False)
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

    @property
    def own_batch(self) -> int | None:
        """The micro-batch of a row that may have another one than the baseline: it was searched, or ranks share it."""
        return self.per_device_train_batch_size if self.probes or self.layout else None

    @property
    def several_nodes(self) -> int | None:
        """The nodes of a row that ran on more than one."""
        return self.num_nodes if self.num_nodes != 1 else None

    @property
    def useful_speed(self) -> float:
        """Tokens per second without padding, by which rows are compared; with it where padding was not counted."""
        return self.non_padding_tokens_per_second or self.tokens_per_second or 0.0

    @property
    def repeated(self) -> bool:
        """True if its speed has a confidence interval: without one, no difference from another row is claimed."""
        return self.tokens_per_second_interval is not None

    def separated_from(self, other: Row) -> bool:
        """Return True where the comparison claims that the speeds of two rows of one `world_size` differ.

        A row with a rank is separated from every other; a difference is one from the baseline.
        """
        if self.rank is not None or other.rank is not None:
            return True
        claimed = [row.difference for row, base in ((self, other), (other, self)) if base.difference == "reference"]
        return any(difference in ("faster", "slower") for difference in claimed)
