"""Options of `toolkit simulate stragglers`, by the names of their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from toolkit.plan.options import GpuName
from toolkit.simulate.gradient_compression import METHODS
from toolkit.simulate.options import OutputFolder
from toolkit.simulate.step_time_distributions import DISTRIBUTIONS
from toolkit.simulate.synchronization import POLICIES

DEFAULT_DISTRIBUTION, DEFAULT_STEP_SECONDS, DEFAULT_SPREAD = "lognormal", 1.0, 0.2
DEFAULT_COMPRESSION = ("none", "top_k:0.01", "random_k:0.01", "quantize:1", "quantize:4", "quantize:8", "power_sgd:2")


@dataclass(frozen=True, kw_only=True)
class StragglerOptions:
    """Options of `toolkit simulate stragglers`."""

    workers: Annotated[int, Option(help="data-parallel workers, backup workers included")] = 16
    policy: Annotated[
        tuple[str, ...], Option(help=f"{', '.join(POLICIES)}; repeatable; by default all", metavar="NAME")
    ] = ()
    backup_workers: Annotated[int, Option(help="workers whose gradient backup_workers does not wait for")] = 1
    staleness: Annotated[int, Option(help="batches that a worker of bounded_staleness may be ahead of the slowest")] = 4
    distribution: Annotated[
        str | None,
        Option(help=f"of compute times: {', '.join(DISTRIBUTIONS)}; by default {DEFAULT_DISTRIBUTION}", metavar="NAME"),
    ] = None
    step_seconds: Annotated[
        float | None, Option(help=f"mean compute time of a worker's batch; by default {DEFAULT_STEP_SECONDS:g}")
    ] = None
    spread: Annotated[
        float | None, Option(help=f"standard deviation over mean of compute times; by default {DEFAULT_SPREAD:g}")
    ] = None
    run_folder: Annotated[
        Path | None, Option(help="draw compute times from the measured steps of this run instead")
    ] = None
    untimed_steps: Annotated[int, Option(help="with --run-folder: first steps to leave out")] = 2
    slow_workers: Annotated[int, Option(help="workers that are slower in every step")] = 0
    slow_factor: Annotated[float, Option(help="their compute time over that of the others")] = 2.0
    steps: Annotated[int, Option(help="global batches to apply")] = 200
    seed: Annotated[int, Option(help="of the compute times, the small network and its data")] = 0
    learning_rate: Annotated[
        float | None, Option(help="of the small network, for one global batch; by default it grows with the workers")
    ] = None
    compression: Annotated[
        tuple[str, ...],
        Option(help=f"{', '.join(METHODS)}, as in top_k:0.01; repeatable; by default seven", metavar="METHOD"),
    ] = DEFAULT_COMPRESSION
    model: Annotated[
        str | None,
        Option(help="a model (hub id, folder or config.json) whose gradients are communicated; by default none"),
    ] = None
    gpu: GpuName = None
    gpus_per_node: Annotated[
        int | None, Option(help="GPUs per node; by default the largest divisor of the workers up to 8")
    ] = None
    network_gb_per_second: Annotated[
        float | None, Option(help="network bandwidth of a node, all cards, one direction")
    ] = None
    parameter_servers: Annotated[int | None, Option(help="parameter servers; by default one per node")] = None
    output_dir: OutputFolder = None
