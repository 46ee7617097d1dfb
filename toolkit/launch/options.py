"""The options of one training run, the same from the command line to the processes.

>>> TrainOptions(preset="zero2", num_processes=2, max_restarts=-1)
Traceback (most recent call last):
toolkit.errors.ToolkitError: --max-restarts is -1, expected 0 or more
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from toolkit.errors import ToolkitError
from toolkit.flags import PRESET_HELP, CpuFlag, NumProcesses, NvmePath, RanksPerGpu, TrainingArguments
from toolkit.hardware.gpus import default_num_processes, trains_on_cpu
from toolkit.hardware.shared_gpu import MOST_RANKS_PER_GPU
from toolkit.job.argument_values import YEAR_MINUTES, Range, check_range

if TYPE_CHECKING:
    from toolkit.presets.spec import PresetSpec

AUTO_PRESET = "auto"
AUTO_HELP = "what `toolkit recommend` takes for the GPUs here, otherwise single for one process and ddp for several"
MAX_RESTARTS = 1000  # more faults than this in one run need a person


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """A script of the user's own, which `toolkit train`, `compare` and `rehearse` run in the place of ours."""

    script: Annotated[
        str | None, Option(help="run your own script, unchanged, and observe it; what follows `--` is for it")
    ] = None
    module: Annotated[str | None, Option(help="like --script, for a module: trl.scripts.dpo")] = None

    @property
    def runs_script(self) -> bool:
        """True if the program is somebody's own script."""
        return self.script is not None or self.module is not None

    def check_script(self, output_dir: Path | None = None) -> None:
        """Raise ToolkitError for two scripts, or for the run folder of none."""
        if self.script is not None and self.module is not None:
            raise ToolkitError("both --script and --module are given", hint="leave one of them out")
        if output_dir is not None and not self.runs_script:
            hint = "our script has `-- --output_dir DIR`, after `--`"
            raise ToolkitError("--output-dir is for a script of your own", hint=hint)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ScriptOptions):
    """The options of `toolkit train`; a comparison makes one for each trial."""

    preset: Annotated[str, Option(help=f"{PRESET_HELP}; auto: {AUTO_HELP}")] = AUTO_PRESET
    num_processes: NumProcesses = None
    ranks_per_gpu: RanksPerGpu = 1
    training_arguments: TrainingArguments = ()
    cpu: CpuFlag = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="run every check, print the plan and the launch command; start nothing")
    ] = False
    gpu: Annotated[
        str | None, Option(help="with --dry-run: check and plan for this GPU, for example h100; it need not be here")
    ] = None
    timeout_minutes: Annotated[float | None, Option(help="stop the run as timed_out after this long")] = None
    nvme_path: NvmePath = None
    hang_timeout_minutes: Annotated[
        float | None, Option(help="stop a run without progress for this long; default 20, 0: never")
    ] = None
    stop_minutes: Annotated[
        float, Option(help="wait this long for the checkpoint after Ctrl-C or SIGTERM; 0: not at all")
    ] = 5.0
    output_dir: Annotated[
        Path | None, Option(help="with --script: the run folder; default: runs/NAME, then runs/NAME-2 and so on")
    ] = None
    require: Annotated[
        tuple[str, ...], Option(help="with --script: end the run unless this is in effect too: attention=flash")
    ] = ()
    allow: Annotated[
        tuple[str, ...], Option(help="with --script: accept this difference from the preset: master_dtype=bfloat16")
    ] = ()
    resume: Annotated[
        bool, Option("--resume", help="with --script: resume the run in --output-dir from its newest checkpoint")
    ] = False
    max_restarts: Annotated[int, Option(help="restarts from the last checkpoint after a rank was killed or hung")] = 0

    def __post_init__(self) -> None:
        limits = {
            "--timeout-minutes": (self.timeout_minutes, Range(above=0, highest=YEAR_MINUTES)),
            "--hang-timeout-minutes": (self.hang_timeout_minutes, Range(lowest=0, highest=YEAR_MINUTES)),
            "--stop-minutes": (self.stop_minutes, Range(lowest=0, highest=YEAR_MINUTES)),
            "--max-restarts": (self.max_restarts, Range(lowest=0, highest=MAX_RESTARTS)),
            "--ranks-per-gpu": (self.ranks_per_gpu, Range(lowest=1, highest=MOST_RANKS_PER_GPU)),
        }
        for name, (value, allowed) in limits.items():
            check_range(name, value, allowed)
        self.check_script(self.output_dir)
        for option in ("--require", "--allow") if not self.runs_script else ():
            if getattr(self, option[2:]):
                raise ToolkitError(f"{option} is for a script of your own", hint=f"leave `{option}` out")
        if self.resume and self.output_dir is None:
            hint = "our script has `-- --resume_from_checkpoint latest`, after `--`"
            raise ToolkitError("--resume needs a script of your own, and the run's --output-dir", hint=hint)
        if self.runs_script and (self.gpu is not None or self.nvme_path is not None):
            option = "--gpu" if self.gpu is not None else "--nvme-path"
            raise ToolkitError(f"{option} with a script of your own has no effect", hint=f"leave `{option}` out")
        if self.gpu is not None and not self.dry_run:
            raise ToolkitError("--gpu needs --dry-run: a run uses the GPUs of this node", hint="add `--dry-run`")

    @property
    def on_cpu(self) -> bool:
        """True if the ranks train on the CPU: as the option says, or because no GPU is visible; not for a named GPU."""
        return self.gpu is None and trains_on_cpu(self.cpu)

    def world_size(self, preset: PresetSpec) -> int:
        """Return the number of processes: as given, or by default all visible GPUs, two on a CPU, one for `single`."""
        if self.num_processes is not None:
            return self.num_processes
        processes = self.ranks_per_gpu * default_num_processes(on_cpu=self.on_cpu)
        return processes if preset.max_world_size is None else min(processes, preset.max_world_size)
