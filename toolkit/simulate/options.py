"""Options of the subcommands of `toolkit simulate`, one dataclass each, by the names of their flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from toolkit.errors import ToolkitError
from toolkit.job.argument_values import MAX_SEQ_LENGTH
from toolkit.parallel.pipeline_schedule import INTERLEAVED_CHUNKS, SCHEDULES
from toolkit.plan import options as plan

DEFAULT_CHECKPOINT_SECONDS = 60.0
DISTRIBUTIONS = ("constant", "lognormal", "exponential", "pareto")
DEFAULT_DISTRIBUTION, DEFAULT_STEP_SECONDS, DEFAULT_SPREAD = "lognormal", 1.0, 0.2
LEAST = 1e-9  # the low end of what must be more than nothing


def check_ranges(options: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise ToolkitError for the first option that is out of its range, by its flag; None is not given."""
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            expected = f"more than 0, at most {high:,}" if low == LEAST else f"{low:,} to {high:,}"
            raise ToolkitError(f"{_flag(name)} is {value}, expected {expected}")


def refuse_given(options: object, names: Sequence[str], what: str, hint: str) -> None:
    """Raise ToolkitError for the first of these options that was given; `{flag}` in both texts is its flag."""
    for name in names:
        if getattr(options, name) != getattr(type(options), name):
            raise ToolkitError(what.format(flag=_flag(name)), hint=hint.format(flag=_flag(name)))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


OutputFolder = Annotated[Path | None, Option(help="folder for a report: simulation.json and simulation.html")]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of `toolkit simulate pipeline`."""

    stages: Annotated[int, Option(help="stages of the pipeline: GPUs, or groups of GPUs with --tp")]
    micro_batches: Annotated[int, Option(help="micro-batches per step and pipeline")]
    schedule: Annotated[
        tuple[str, ...], Option(help=f"{', '.join(SCHEDULES)}; repeatable; by default all possible", metavar="NAME")
    ] = ()
    chunks: Annotated[int | None, Option(help=f"per stage of interleaved_1f1b; by default {INTERLEAVED_CHUNKS}")] = None
    forward_ms: Annotated[float | None, Option(help="forward of one micro-batch on one stage")] = None
    backward_ms: Annotated[float | None, Option(help="its backward")] = None
    transfer_ms: Annotated[float | None, Option(help="transfer from one stage to the next; by default 0")] = None
    num_layers: Annotated[int | None, Option(help="layers to divide among the stages; with --model its own")] = None
    model: Annotated[str | None, Option(help="its times and memory: a hub id, a folder or a config.json")] = None
    gpu: plan.GpuName = None
    gpu_memory_gib: plan.GpuMemory = None
    gpu_tflops: plan.GpuTflops = None
    gpus_per_node: plan.GpusPerNode = 8
    tp: Annotated[int, Option(help="with --model: GPUs that split each layer of a stage")] = 1
    max_seq_length: plan.SeqLength = MAX_SEQ_LENGTH
    per_device_train_batch_size: Annotated[int, Option(help="with --model: sequences per micro-batch")] = 1
    activation_checkpointing: Annotated[
        bool,
        plan.switch("activation-checkpointing", "with --model: recompute activations; off by default"),
    ] = False
    method: plan.MethodName = "sft"
    precompute_ref_log_probs: plan.PrecomputeFlag = False
    timeline: Annotated[bool, Option("--timeline/--no-timeline", help="print timelines")] = True
    output_dir: OutputFolder = None


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """Options of `toolkit simulate failures`."""

    gpus: Annotated[int, Option(help="GPUs of the job, without spares")]
    gpus_per_node: plan.GpusPerNode = 8
    failures_per_1000_node_days: Annotated[
        float, Option(help="failures of 1,000 nodes in a day; default: Meta's RSC-1 (arXiv 2410.21680)")
    ] = 6.5
    checkpoint_seconds: Annotated[
        float | None,
        Option(help=f"training that one save costs; by default {DEFAULT_CHECKPOINT_SECONDS:g}", show_default=False),
    ] = None
    run_folder: Annotated[
        Path | None, Option(help="run of yours that saved: the median of its stalls is --checkpoint-seconds")
    ] = None
    checkpoint_interval_minutes: Annotated[float | None, Option(help="between two saves; by default the best")] = None
    restart_minutes: Annotated[float, Option(help="from the replacement of a node to the first new step")] = 5.0
    detection_minutes: Annotated[float, Option(help="from a failure until the job is stopped")] = 0.0
    spare_nodes: Annotated[int | None, Option(help="nodes that wait for a failure; by default always one")] = None
    repair_hours: Annotated[float | None, Option(help="with --spare-nodes: from failure until spare again")] = None
    days: Annotated[float, Option(help="length of the job")] = 365.0
    runs: Annotated[int | None, Option(help="simulated runs; by default 10, fewer where failures are many")] = None
    seed: Annotated[int, Option(help="seed of the simulation")] = 0
    output_dir: OutputFolder = None


@dataclass(frozen=True, kw_only=True)
class StragglerOptions:
    """Options of `toolkit simulate stragglers`."""

    workers: Annotated[int, Option(help="data-parallel workers, backup workers included")] = 16
    backup_workers: Annotated[int, Option(help="workers whose gradient an update does not wait for")] = 1
    distribution: Annotated[
        str | None,
        Option(help=f"of compute times: {', '.join(DISTRIBUTIONS)}; by default {DEFAULT_DISTRIBUTION}", metavar="NAME"),
    ] = None
    step_seconds: Annotated[
        float | None, Option(help=f"mean compute time of a worker's batch; by default {DEFAULT_STEP_SECONDS:g}")
    ] = None
    spread: Annotated[float | None, Option(help=f"standard deviation over mean; by default {DEFAULT_SPREAD:g}")] = None
    run_folder: Annotated[Path | None, Option(help="draw compute times from this run's measured steps")] = None
    untimed_steps: Annotated[int, Option(help="with --run-folder: first steps to leave out")] = 2
    slow_workers: Annotated[int, Option(help="workers that are slower in every step")] = 0
    slow_factor: Annotated[float, Option(help="their compute time over that of the others")] = 2.0
    steps: Annotated[int, Option(help="global batches to apply")] = 200
    seed: Annotated[int, Option(help="seed of the compute times")] = 0
    model: Annotated[str | None, Option(help="communicate its gradients: hub id, folder or config.json")] = None
    gpu: plan.GpuName = None
    gpus_per_node: Annotated[
        int | None, Option(help="GPUs per node, one per worker; default: the largest divisor of the workers up to 8")
    ] = None
    network_gb_per_second: Annotated[float | None, Option(help="of a node: all cards, one direction")] = None
    output_dir: OutputFolder = None
