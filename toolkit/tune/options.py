"""The options of `toolkit tune`, in one dataclass from the command line to the work.

>>> TuneOptions(output_dir=Path("out"), keep=("colour",))
Traceback (most recent call last):
toolkit.errors.ToolkitError: --keep is 'colour', expected preset, batch, checkpointing, attention, loss or compile
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from toolkit.compare.options import MAX_TRIALS, check_timed_steps
from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.flags import PRESET_HELP, CpuFlag, NumProcesses, PresetNames
from toolkit.hardware.gpu_table import Gpu, common_gpu, find_gpu
from toolkit.hardware.gpus import default_num_processes, gpu_names, trains_on_cpu
from toolkit.job.argument_reading import has_config_file
from toolkit.job.argument_values import YEAR_MINUTES, Range, check_range
from toolkit.launch.options import ScriptOptions

PARTS = ("preset", "batch", "checkpointing", "attention", "loss", "compile")  # parts of a setting that are searched
MOST_SETTINGS, MOST_ROUNDS = 100, 50


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ScriptOptions):
    """Everything that `toolkit tune` is given. Raises ToolkitError for values that make no search."""

    preset: PresetNames = ()
    output_dir: Annotated[Path, Option(help="folder of the search: run folders, ledger and tune.json")]
    baseline: Annotated[
        str | None,
        Option(help=f"preset of your own setting: {PRESET_HELP}; default: the first --preset, or as in train"),
    ] = None
    num_processes: NumProcesses = None
    training_arguments: Annotated[
        tuple[str, ...],
        Argument(metavar="MODEL -- JOB", help="a model, and after `--` the rest of the job, as for train"),
    ] = ()
    config: Annotated[str | None, Option(help="YAML file of the job, as it may go first after `--`")] = None
    variant: Annotated[
        tuple[str, ...], Option(help='one more setting to try, repeatable: "NAME=PRESET --argument value"')
    ] = ()
    keep: Annotated[tuple[str, ...], Option(help=f"part of your setting to keep, repeatable: {', '.join(PARTS)}")] = ()
    budget_minutes: Annotated[float, Option(help="end with the best so far after this long")] = 30
    max_settings: Annotated[int, Option(help="settings to try at most, yours included")] = 12
    rounds: Annotated[int, Option(help="trials of a setting at most, one per round")] = 8
    trial_steps: Annotated[int, Option(help="optimizer steps of a trial at most; fewer if --max_steps is")] = 30
    untimed_steps: Annotated[int, Option(help="first steps of each trial to leave out of the measured speed")] = 2
    target_interval: Annotated[
        float | None,
        Option(help="stop a trial once its median step time is known to this fraction; as in toolkit compare"),
    ] = None
    trial_timeout_minutes: Annotated[float, Option(help="stop a trial as timed_out after this long")] = 120
    order_seed: Annotated[int, Option(help="random seed of the order of trials")] = 0
    resume: Annotated[bool, Option("--resume", help="resume the search where it stopped")] = False
    dry_run: Annotated[
        bool, Option("--dry-run", help="print the settings, what is not tried, and the time; start nothing")
    ] = False
    gpu: Annotated[str | None, Option(help="with --dry-run: plan for this GPU, for example h100")] = None
    cpu: CpuFlag = None

    def __post_init__(self) -> None:
        limits = {
            "budget-minutes": (self.budget_minutes, Range(above=0, highest=YEAR_MINUTES)),
            "max-settings": (self.max_settings, Range(lowest=2, highest=MOST_SETTINGS)),
            "rounds": (self.rounds, Range(lowest=2, highest=MOST_ROUNDS)),
            "trial-steps": (self.trial_steps, Range(lowest=1, highest=2**31)),
            "untimed-steps": (self.untimed_steps, Range(lowest=0, highest=2**31)),
            "trial-timeout-minutes": (self.trial_timeout_minutes, Range(above=0, highest=YEAR_MINUTES)),
            "target-interval": (self.target_interval, Range(lowest=0, below=1)),
        }
        for name, (value, allowed) in limits.items():
            check_range(f"--{name}", value, allowed)
        if (trials := self.max_settings * self.rounds) > MAX_TRIALS:
            hint = "fewer `--rounds`, or fewer settings"
            raise ToolkitError(
                f"--max-settings x --rounds is {trials:,} trials, expected {MAX_TRIALS:,} or fewer", hint=hint
            )
        check_timed_steps("--trial-steps", self.trial_steps, untimed_steps=self.untimed_steps)
        for part in self.keep:
            if part not in PARTS:
                expected = f"expected {', '.join(PARTS[:-1])} or {PARTS[-1]}"
                raise ToolkitError(f"--keep is {shown(part)}, {expected}", hint=did_you_mean(part, PARTS))
        if self.runs_script:
            self.check_script()
            if self.config is not None:
                raise ToolkitError("--config is for the toolkit's own script", hint="leave it or the script out")
        if self.gpu is not None and (not self.dry_run or self.runs_script):
            why = "a script cannot be planned" if self.runs_script else "trials run on the GPUs of this node"
            raise ToolkitError(f"--gpu needs --dry-run and the toolkit's own script: {why}", hint="leave `--gpu` out")

    @property
    def job_words(self) -> tuple[str, ...]:
        """The training arguments, with --config and a model that stands alone as words of them."""
        words = self.training_arguments
        if self.runs_script:
            return words
        if words and not words[0].startswith("--") and not has_config_file(words):
            words = ("--model_name_or_path", *words)
        return words if self.config is None else (self.config, *words)

    @property
    def on_cpu(self) -> bool:
        """True if the trials run on the CPU; never when planning for a named GPU."""
        return self.gpu is None and trains_on_cpu(self.cpu)

    @property
    def planned_gpu(self) -> Gpu | None:
        """The GPU that plans are for: as named, or this node's; None on a CPU, and for GPUs that are not alike."""
        if self.on_cpu:
            return None
        return common_gpu(gpu_names()) if self.gpu is None else find_gpu(self.gpu)

    @property
    def world_size(self) -> int:
        """Number of processes: as given, or by default all visible GPUs, two on a CPU."""
        return default_num_processes(on_cpu=self.on_cpu) if self.num_processes is None else self.num_processes
