"""The shape of results.json, the one dict that a comparison hands to its report.

>>> withheld({"preset": "zero2", "tokens_per_second": 9.0})["tokens_per_second"] is None
True

The keys are documented in docs/results.md and checked by results.schema.json beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"
NOT_SUPPORTED = "not_supported"
"""Status of a row that cannot run here; no run has it."""

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
Parity = Literal["reference", "agrees", "parity failed"]
Difference = Literal["reference", "faster", "slower", "no difference seen"]
Scaling = Literal["strong", "weak"]
Interval = list[float]
"""`[low, high]`."""


class Gpu(TypedDict):
    """One GPU of the machine, as the driver names it."""

    name: str
    memory_bytes: int | None
    driver: NotRequired[str | None]
    power_limit_watts: NotRequired[float | None]
    max_sm_clock_mhz: NotRequired[int | None]
    max_memory_clock_mhz: NotRequired[int | None]


class Disk(TypedDict):
    """The disk that the comparison wrote to."""

    filesystem: str | None
    total_bytes: int | None
    free_bytes: int | None


class Environment(TypedDict):
    """The machine and the versions that every row ran on."""

    device: str
    gpus: list[Gpu]
    cpu: str | None
    cpu_count: int | None
    host_memory_bytes: int | None
    versions: dict[str, str]
    python: str
    git_commit: str | None
    disk: Disk | None
    links: str | None
    memory_limit_bytes: int | None
    cpu_limit: float | None


class Job(TypedDict):
    """The one fine-tuning job that every row trains."""

    model: str
    dataset: str
    training_arguments: list[str]
    untimed_steps: int
    seed: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    compute_dtype: str


class Failure(TypedDict):
    """Why a row did not complete, as facts."""

    kind: str
    phase: str | None
    step: int | None
    rank: int | None
    predicted_bytes: int | None
    measured_bytes: int | None


class Probe(TypedDict):
    """One size that the search for the largest micro-batch tried."""

    per_device_train_batch_size: int
    status: RowStatus
    message: str | None
    failure: Failure | None


class Ladder(TypedDict):
    """Bytes of the largest rank at four moments of its first step."""

    bytes_of: str
    load: int | None
    forward: int | None
    backward: int | None
    step: int | None


class FlopsPerToken(TypedDict):
    """Operations of one token, counted in each way that is in use."""

    num_params: int
    seq_length: int
    causal: int
    full_attention: int
    without_embeddings: int
    hardware: int


class Timeline(TypedDict):
    """One profiled step on every rank."""

    step: int
    ranks: list[dict[str, Any]]


class Figures(TypedDict):
    """What a trial and a row both have. A figure that was not measured is None; bytes are of the largest rank."""

    trial: str
    preset: str
    world_size: int
    status: RowStatus
    message: str | None
    parity: Parity | None
    parity_message: str | None
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    tokens_per_cpu_second: float | None
    supervised_tokens_per_second: float | None
    padding_fraction: float | None
    timed_steps: int
    step_seconds_median: float | None
    step_seconds_p90: float | None
    num_params: int | None
    num_trainable_params: int | None
    parameter_bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_host_bytes: int | None
    peak_rank: int | None
    first_loss: float | None
    last_loss: float | None
    ratio_to_reference: float | None
    wall_seconds: float | None
    timed_seconds: float | None
    losses: list[float | None]
    step_seconds: list[float | None]
    grad_norms: list[float | None]
    run_folder: str
    command: str


class TrialRow(Figures):
    """One trial: one repeat of a row in fresh processes."""

    repeat: int
    position: int
    startup_seconds: float | None
    step_tokens: list[int]
    timed_step_numbers: list[int]
    non_padding_tokens_per_second: float | None
    peak_driver_bytes: int | None
    allocator_retries: int | None
    memory_ladder: Ladder | None
    energy_joules: float | None
    throttle_reasons: list[str] | None
    attestation_sha256: str | None


class Row(Figures):
    """One preset with one number of processes, over all its repeats."""

    group: str | None
    repeats: int
    step_seconds_interval: Interval | None
    tokens_per_second_interval: Interval | None
    ratio_interval: Interval | None
    difference: Difference | None
    rank: int | None
    rank_skew: float | None
    failure: Failure | None
    speed_up: float | None
    scaling_efficiency: float | None
    non_padding_tokens_per_second: float | None
    peak_driver_bytes: int | None
    allocator_retries: int | None
    memory_ladder: Ladder | None
    energy_joules: float | None
    throttle_reasons: list[str] | None
    attestation_sha256: str | None
    startup_seconds: float | None
    planned_peak_bytes: int | None
    planned_allocated_bytes: int | None
    flops_per_token: FlopsPerToken | None
    mfu: float | None
    mfu_full_attention: float | None
    hfu: float | None
    cost_per_million_tokens: float | None
    communication_fraction: float | None
    exposed_communication_fraction: float | None
    save_seconds: float | None
    save_bytes: int | None
    timeline: Timeline | None
    per_device_train_batch_size: int | None
    probes: list[Probe] | None


SPEEDS = (
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "tokens_per_cpu_second",
    "supervised_tokens_per_second",
    "step_seconds_median",
    "step_seconds_p90",
    "step_seconds_interval",
    "tokens_per_second_interval",
    "ratio_to_reference",
    "ratio_interval",
    "difference",
    "rank",
    "speed_up",
    "scaling_efficiency",
    "non_padding_tokens_per_second",
    "mfu",
    "mfu_full_attention",
    "hfu",
    "cost_per_million_tokens",
)
"""What is withheld from a row that trained another problem: its `step_seconds` too, which are then empty."""


def withheld(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row or a trial without its speeds."""
    return {key: None if key in SPEEDS else value for key, value in row.items()} | {"step_seconds": []}


class Method(TypedDict):
    """How the rows were measured and compared."""

    repeats: int
    order_seed: int
    interval: str
    ratio_confidence: float
    target_interval: float | None
    scaling: Scaling | None


class Results(TypedDict):
    """A comparison: one job under several presets, on one machine."""

    schema_version: int
    created: str
    reference: str
    environment: Environment
    job: Job
    rows: list[Row]
    trials: list[TrialRow]
    method: Method
    price_per_gpu_hour: float | None
