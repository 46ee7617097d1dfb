"""Options of the subcommands of `toolkit simulate`, one dataclass each, by the names of their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from toolkit.defaults import MAX_SEQ_LENGTH
from toolkit.plan.options import CHECKPOINTING_FLAG, GpuMemory, GpuName, GpusPerNode, GpuTflops, SeqLength
from toolkit.simulate.pipeline_schedules import DEFAULT_CHUNKS, SCHEDULES

OutputFolder = Annotated[Path | None, Option(help="folder for a report: simulation.json and simulation.html")]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of `toolkit simulate pipeline`."""

    stages: Annotated[int, Option(help="stages of the pipeline: GPUs, or groups of GPUs with --tp")]
    micro_batches: Annotated[int, Option(help="micro-batches per step and pipeline")]
    schedule: Annotated[
        tuple[str, ...],
        Option(help=f"{', '.join(SCHEDULES)}; repeatable; by default all that are possible", metavar="NAME"),
    ] = ()
    chunks: Annotated[int | None, Option(help=f"chunks per stage of interleaved_1f1b; by default {DEFAULT_CHUNKS}")] = (
        None
    )
    forward_ms: Annotated[float | None, Option(help="forward of one micro-batch on one stage")] = None
    backward_ms: Annotated[
        float | None, Option(help="backward: gradient of the input, or all of it without --weight-ms")
    ] = None
    weight_ms: Annotated[float | None, Option(help="backward: gradient of the weights")] = None
    transfer_ms: Annotated[float | None, Option(help="transfer from one stage to the next; by default 0")] = None
    num_layers: Annotated[int | None, Option(help="layers to divide among the stages; with --model its own")] = None
    model: Annotated[
        str | None,
        Option(help="times and memory of this model: a hub id, a folder or a config.json, as `toolkit plan` reads it"),
    ] = None
    gpu: GpuName = None
    gpu_memory_gib: GpuMemory = None
    gpu_tflops: GpuTflops = None
    gpus_per_node: GpusPerNode = 8
    tp: Annotated[int, Option(help="with --model: GPUs that split each layer of a stage")] = 1
    max_seq_length: SeqLength = MAX_SEQ_LENGTH
    per_device_train_batch_size: Annotated[int, Option(help="with --model: sequences per micro-batch")] = 1
    activation_checkpointing: Annotated[
        bool, Option(CHECKPOINTING_FLAG, help="with --model: recompute activations; off by default", show_default=False)
    ] = False
    timeline: Annotated[
        bool, Option("--timeline/--no-timeline", help="print timelines; of many schedules, that of the shortest step")
    ] = True
    output_dir: OutputFolder = None
