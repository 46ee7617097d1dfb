"""The command line of `python -m toolkit.observe`: our options, then the script and its own words. No torch.

>>> Words.read(["--stop-after-steps", "3", "-m", "trl.scripts.dpo", "--beta", "0.1"]).arguments
('--beta', '0.1')
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.secrets import hide_words, restore_secrets
from toolkit.observe.script_file import USAGE, check_script, script_name
from toolkit.presets.preset import load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.record.kernel_table import ATTENTION_PATHS, REQUIRABLE_ROWS
from toolkit.versions import version_numbers

# What `--require NAME=VALUE` may name: readings of every rank.
REQUIRABLE = (
    *("engine", "sharding", "offload_optimizer", "offload_param", "compute_dtype", "master_dtype"),
    *("activation_checkpointing", "attn_implementation", *REQUIRABLE_ROWS),
)
# What `--allow NAME=VALUE` may name as well.
ALLOWABLE = (*REQUIRABLE, "gradient_dtype", "reduce_dtype", "optimizer_dtype", "optimizer_class")
# The oldest whose Trainer was observed, in LLaMA-Factory's environment.
OLDEST_TRANSFORMERS = "5.6.0"
LAUNCHER_WORDS = ("--local_rank", "--local-rank")  # of `deepspeed`, which the script reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """What is run, and how it is observed."""

    target: str  # the script's path, or the module's name
    is_module: bool
    arguments: tuple[str, ...]
    output_dir: Path
    overwrite: bool = False
    resume: bool = False
    require_preset: PresetSpec | None = None
    require_settings: dict[str, Any] = field(default_factory=dict)
    allow: dict[str, Any] = field(default_factory=dict)
    stop_after_steps: int | None = None
    stop_after_minutes: float | None = None
    stop_when_steps_within: float | None = None
    untimed_steps: int = 2
    ranks_per_gpu: int | None = None
    trial: bool = False
    complete_saves: bool = False
    stop_on_signal: bool = False

    @classmethod
    def read(cls, argv: Sequence[str]) -> Self:
        """Read a command line. Raises ToolkitError for an option, a script or a module that does not exist."""
        own, rest = _split(argv)
        given = vars(_parser().parse_args(own))
        launched = [word for word in own if word.startswith(LAUNCHER_WORDS)]
        if not rest or rest == ["-m"]:
            raise ToolkitError("no script is named", hint=f"`{USAGE}`")
        is_module = rest[0] == "-m"
        target, arguments = (rest[1], rest[2:]) if is_module else (rest[0], rest[1:])
        script, module = (None, target) if is_module else (target, None)
        check_script(script, module)
        preset, settings = _required(given.pop("require"))
        allowed = dict(read_setting("--allow", word) for word in given.pop("allow"))
        output_dir = given.pop("output_dir") or Path("runs") / script_name(script, module)
        return cls(
            target=target,
            is_module=is_module,
            arguments=(*launched, *restore_secrets(arguments)),
            output_dir=Path(output_dir),
            require_preset=preset,
            require_settings=settings,
            allow=allowed,
            **{name: value for name, value in given.items() if name in cls.__dataclass_fields__},
        )

    def shown(self) -> list[str]:
        """Return the script and its arguments without secrets."""
        return [*(["-m"] if self.is_module else []), self.target, *hide_words(self.arguments)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ToolkitError(message, hint=f"`{USAGE}`; options are listed by `--help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m toolkit.observe", usage=USAGE, allow_abbrev=False)
    parser.add_argument("--output-dir", help="the run folder; default: runs/ and the script's name")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that is in the folder")
    parser.add_argument(
        "--resume", action="store_true", help="let the first training resume from its newest checkpoint"
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="PRESET or NAME=VALUE",
        help=f"end with exit code 1 after the first step unless this is in effect; names: {', '.join(REQUIRABLE)}",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="train although this is not what the preset specifies; it is recorded",
    )
    parser.add_argument("--stop-after-steps", type=_positive, help="end each training after so many optimizer steps")
    parser.add_argument(
        "--stop-after-minutes", type=_above_zero, help="end each training after so many minutes of steps"
    )
    parser.add_argument(
        "--stop-when-steps-within",
        type=_above_zero,
        metavar="FRACTION",
        help="end each training once its median step time is known to this fraction (95 %% interval)",
    )
    parser.add_argument(
        "--trial",
        action="store_true",
        help="run as a trial of a comparison: the first training alone, which writes below --output-dir and saves,"
        " evaluates and uploads nothing",
    )
    parser.add_argument(
        "--complete-saves", action="store_true", help="make the Trainer's checkpoints complete or absent"
    )
    parser.add_argument(
        "--stop-on-signal", action="store_true", help="on SIGTERM or Ctrl-C, all ranks save after the same step and end"
    )
    parser.add_argument("--untimed-steps", type=int, default=2, help="first steps that are not timed; default: 2")
    parser.add_argument(
        "--ranks-per-gpu",
        type=_positive,
        help="under a launcher that starts N times as many ranks as there are GPUs: put N on each; no speeds are shown",
    )
    for word in LAUNCHER_WORDS:
        parser.add_argument(word, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return number


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the words from the script or `-m` on."""
    flags = {"--overwrite", "--resume", "--complete-saves", "--stop-on-signal", "--trial", "-h", "--help"}
    own, left = [], list(argv)
    while left and left[0].startswith("-") and left[0] != "-m":
        own.append(left.pop(0))
        if "=" not in own[-1] and own[-1] not in flags and left:
            own.append(left.pop(0))
    return own, left


def _required(words: Sequence[str]) -> tuple[PresetSpec | None, dict[str, Any]]:
    presets, settings = [], dict[str, Any]()
    for word in words:
        if "=" not in word:
            presets.append(load_preset(word))
        else:
            settings |= [read_setting("--require", word)]
    if len(presets) > 1:
        raise ToolkitError("--require names two presets", hint="name one")
    return presets[0] if presets else None, settings


def read_setting(option: str, word: str) -> tuple[str, Any]:
    """Return the name and the value of `--require` or `--allow`, `master_dtype=bfloat16`.

    Raises ToolkitError for a name that nothing reads, and a kernel that attention never has.
    """
    name, _, value = word.partition("=")
    names = REQUIRABLE if option == "--require" else ALLOWABLE
    if name not in names:
        hint = did_you_mean(name, names, otherwise=f"one of {', '.join(names)}")
        raise ToolkitError(f"{option} {word[:80]}: no reading is called {name[:80]!r}", hint=hint)
    if name == "attention" and (unknown := sorted({*value.split("+")} - {*ATTENTION_PATHS})):
        hint = did_you_mean(unknown[0], ATTENTION_PATHS, otherwise=f"one of {', '.join(ATTENTION_PATHS)}")
        raise ToolkitError(f"{option} {word[:80]}: attention never runs as {unknown[0][:80]!r}", hint=hint)
    constants = {"true": True, "false": False} | ({} if name == "engine" else {"none": None})
    return name, constants.get(value, value)


def check_transformers(installed: str | None) -> None:
    """Raise ToolkitError unless the installed version has a Trainer that can be observed."""
    if installed is None or version_numbers(installed) < version_numbers(OLDEST_TRANSFORMERS):
        raise ToolkitError(
            f"a Trainer of transformers {OLDEST_TRANSFORMERS} or newer is observed, {installed or 'none'} is installed",
            hint=f"`{sys.executable} -m pip install 'transformers>={OLDEST_TRANSFORMERS}'`",
        )
