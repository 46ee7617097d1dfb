"""The options of `toolkit compare`, in one dataclass from the command line to the work.

>>> options = CompareOptions(preset=("ddp",), num_processes=("1,2", "4"), output_dir=Path("out"))
>>> options.world_sizes
(1, 2, 4)

The command line is made of the annotated fields (`toolkit.cli.options.expand_options`), so a new flag is one field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from toolkit.errors import MAX_SHOWN, ToolkitError, shown
from toolkit.flags import (
    DEFAULT_PROCESSES_HELP,
    PROCESSES_HELP,
    CpuFlag,
    NvmePath,
    PresetNames,
    PricePerGpuHour,
    RanksPerGpu,
    TrainingArguments,
)
from toolkit.hardware.gpus import default_num_processes, trains_on_cpu
from toolkit.hardware.shared_gpu import MOST_RANKS_PER_GPU
from toolkit.job.argument_values import YEAR_MINUTES, Range, check_range
from toolkit.launch.options import ScriptOptions

if TYPE_CHECKING:  # the command line loads the options without pydantic
    from toolkit.compare.ledger import SideRunKind

# Trials of all rows and repeats. More are a typing error: an interval narrows with the square root of the repeats, and
# at one minute per trial a thousand take 17 hours.
MAX_TRIALS = 1000
PRICES = Range(lowest=0, highest=1_000_000)  # "nan" passes the limits of a Typer option


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ScriptOptions):
    """Everything that `toolkit compare` is given. Raises ToolkitError for values that make no comparison."""

    preset: PresetNames = ()
    output_dir: Annotated[Path, Option(help="folder of the comparison: run folders, ledger and report")]
    num_processes: Annotated[
        tuple[str, ...],
        Option(help=f"{PROCESSES_HELP}; `1,2,4` compares several world sizes; {DEFAULT_PROCESSES_HELP}"),
    ] = ()
    ranks_per_gpu: RanksPerGpu = 1
    nproc_per_node: Annotated[
        int | None, Option(help="inside a SLURM job: start trials with srun, this many processes on each node")
    ] = None
    training_arguments: TrainingArguments = ()
    stop_after_steps: Annotated[int | None, Option(help="with --script: stop each trial after this many steps")] = None
    variant: Annotated[
        tuple[str, ...], Option(help='a preset under another name, repeatable: "NAME=PRESET --argument value"')
    ] = ()
    repeats: Annotated[int, Option(help="trials of each row, interleaved; one gives no confidence interval")] = 3
    order_seed: Annotated[int, Option(help="random seed of the order of trials")] = 0
    resume: Annotated[bool, Option("--resume", help="resume the comparison where it stopped")] = False
    retry_failed: Annotated[bool, Option("--retry-failed", help="with --resume: run failed trials again")] = False
    dry_run: Annotated[bool, Option("--dry-run", help="print the command of every trial; start nothing")] = False
    untimed_steps: Annotated[int, Option(help="first steps of each trial that no speed counts")] = 2
    target_interval: Annotated[
        float | None,
        Option(
            help="stop a trial once its median step is known to this fraction; default 0.01 on GPUs, 0.03 on a CPU or"
            " with offload; 0: never"
        ),
    ] = None
    trial_minutes: Annotated[float | None, Option(help="stop training after this long, as completed")] = None
    trial_timeout_minutes: Annotated[float, Option(help="stop a trial as timed_out after this long")] = 120
    baseline: Annotated[str | None, Option(help="preset that ratios refer to; default ddp, or the first")] = None
    scaling: Annotated[
        str | None,
        Option(help="across world sizes: strong (same global batch) or weak (same batch per GPU, the default)"),
    ] = None
    gpu: Annotated[str | None, Option(help="with --dry-run: predict for this GPU, for example h100")] = None
    find_max_batch: Annotated[
        int | None, Option(help="find each row's largest per-GPU batch up to this, and compare rows at theirs")
    ] = None
    profile: Annotated[
        bool, Option("--profile", help="profile each row in one more run: communication, and a timeline")
    ] = False
    measure_save: Annotated[
        bool, Option("--measure-save", help="save a checkpoint of each row in one more run: seconds and bytes")
    ] = False
    price_per_gpu_hour: PricePerGpuHour = None
    cpu: CpuFlag = None
    nvme_path: NvmePath = None

    def __post_init__(self) -> None:
        limits = {
            "nproc-per-node": (self.nproc_per_node, Range(lowest=1, highest=2**10)),
            "ranks-per-gpu": (self.ranks_per_gpu, Range(lowest=1, highest=MOST_RANKS_PER_GPU)),
            "repeats": (self.repeats, Range(lowest=1, highest=MAX_TRIALS)),
            "find-max-batch": (self.find_max_batch, Range(lowest=1, highest=2**20)),
            "stop-after-steps": (self.stop_after_steps, Range(lowest=1, highest=2**31)),
            "untimed-steps": (self.untimed_steps, Range(lowest=0, highest=2**31)),
            "trial-minutes": (self.trial_minutes, Range(above=0, highest=YEAR_MINUTES)),
            "trial-timeout-minutes": (self.trial_timeout_minutes, Range(above=0, highest=YEAR_MINUTES)),
            "price-per-gpu-hour": (self.price_per_gpu_hour, PRICES),
            "target-interval": (self.target_interval, Range(lowest=0, below=1)),
        }
        for name, (value, allowed) in limits.items():
            check_range(f"--{name}", value, allowed)
        self._check_script()
        speeds = {"--profile": self.profile, "--price-per-gpu-hour": self.price_per_gpu_hour is not None}
        for option, given in (speeds | {"--target-interval": bool(self.target_interval)}).items():
            if given and self.ranks_per_gpu > 1:
                hint = f"leave `{option}` or `--ranks-per-gpu` out"
                raise ToolkitError(f"{option} needs speeds, and ranks that share a GPU have none", hint=hint)
        if self.gpu is not None and not self.dry_run:
            raise ToolkitError("--gpu needs --dry-run: trials run on the GPUs of this node", hint="add `--dry-run`")
        if self.scaling not in (None, "strong", "weak"):
            raise ToolkitError(f"--scaling is {self.scaling!r}, expected strong or weak")
        if len(self.world_sizes) == 1 and self.scaling is not None:
            raise ToolkitError("--scaling needs several numbers of processes", hint="`--num-processes 1,2`")
        if self.scaling == "strong" and self.find_max_batch is not None:
            raise ToolkitError(
                "--find-max-batch does not go with --scaling strong: each chooses the per-GPU batches",
                hint="leave one of them out; weak scaling compares each row at its largest per-GPU batch",
            )

    def _check_script(self) -> None:
        if not self.runs_script:
            if self.stop_after_steps is not None:
                instead = f"our script has `-- --max_steps {self.stop_after_steps}`"
                raise ToolkitError("--stop-after-steps is for a script of your own", hint=instead)
            return
        self.check_script()
        needs = {
            **{"--find-max-batch": self.find_max_batch, "--scaling strong": self.scaling == "strong"},
            **{"--profile": self.profile, "--measure-save": self.measure_save, "--gpu": self.gpu},
            **{"--nvme-path": self.nvme_path, "--nproc-per-node": self.nproc_per_node},
        }
        for option, given in needs.items():
            if given:
                raise ToolkitError(
                    f"{option} needs the toolkit's own training script, and --script or --module names another",
                    hint=f"leave `{option}` out",
                )
        check_timed_steps("--stop-after-steps", self.stop_after_steps or 0, untimed_steps=self.untimed_steps)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """`num_processes` as numbers, each once, in the given order; by default all visible GPUs, two on a CPU."""
        if not self.num_processes and self.nproc_per_node is not None:
            hint = f"`--num-processes {self.nproc_per_node},{2 * self.nproc_per_node}` compares one node with two"
            raise ToolkitError("--nproc-per-node needs --num-processes: the processes of all nodes together", hint=hint)
        if not self.num_processes:
            return (self.ranks_per_gpu * default_num_processes(on_cpu=self.on_cpu),)
        words = [word.strip() for word in ",".join(self.num_processes).split(",")]
        for word in words:
            if not re.fullmatch("[0-9]+", word):
                raise ToolkitError(f"--num-processes is {shown(word)}, expected whole numbers: `--num-processes 1,2,4`")
            check_range("--num-processes", word[:MAX_SHOWN], Range(lowest=1, highest=2**20))
        return tuple(dict.fromkeys(map(int, words)))

    @property
    def on_cpu(self) -> bool:
        """True if the trials run on the CPU; never when predicting for a named GPU."""
        return self.gpu is None and trains_on_cpu(self.cpu)

    @property
    def side_runs(self) -> tuple[SideRunKind, ...]:
        """Kinds of the side runs of each row."""
        return (*(("profile",) if self.profile else ()), *(("save",) if self.measure_save else ()))


def check_timed_steps(option: str, steps: int, *, untimed_steps: int) -> None:
    """Raise ToolkitError where all steps of a trial, as an option limits them, are untimed."""
    if 0 < steps <= untimed_steps:
        hint = f"`{option} {untimed_steps + 8}` or more"
        raise ToolkitError(f"{option} {steps} leaves no timed step after {untimed_steps} untimed ones", hint=hint)
