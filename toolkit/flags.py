"""Command-line parameters that several commands share, as annotated types for their options dataclasses."""

from typing import Annotated

import typer

PRESET_HELP = "a preset (see `toolkit presets`), or an accelerate YAML file"
PROCESSES_HELP = "processes on this node, one per GPU"
DEFAULT_PROCESSES_HELP = "by default all visible GPUs, or two on a CPU"

PresetName = Annotated[str, typer.Option(help=PRESET_HELP)]
PresetNames = Annotated[tuple[str, ...], typer.Option(help=f"{PRESET_HELP}; repeatable")]
NumProcesses = Annotated[int | None, typer.Option(help=f"{PROCESSES_HELP}; {DEFAULT_PROCESSES_HELP}")]
TrainingArguments = Annotated[
    tuple[str, ...], typer.Argument(help="after `--`: arguments of the training script, passed on unchanged")
]
CpuFlag = Annotated[
    bool | None, typer.Option("--cpu/--no-cpu", help="train on the CPU; the default where no GPU is visible")
]
RanksPerGpu = Annotated[
    int,
    typer.Option(
        help="real ranks on each GPU, without speeds; or TOOLKIT_RANKS_PER_GPU",
        envvar="TOOLKIT_RANKS_PER_GPU",
        show_envvar=False,
    ),
]
NvmePath = Annotated[
    str | None,
    typer.Option(
        help="folder on a local NVMe disk, for offload; or TOOLKIT_NVME_PATH",
        envvar="TOOLKIT_NVME_PATH",
        show_envvar=False,
    ),
]
PricePerGpuHour = Annotated[
    float | None,
    typer.Option(
        help="dollars per GPU and hour, for the cost of a million tokens",
        min=0,
        max=1_000_000,
    ),
]
MODEL_HELP = "a hub id, a folder, or a config.json"
ModelName = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
OptionalModelName = Annotated[
    str | None, typer.Argument(help=f"{MODEL_HELP}; by default that of --config", metavar="MODEL")
]
JsonOutput = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
