"""The Typer program: every command, and what it refuses itself."""

import itertools
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from toolkit._version import __version__
from toolkit.cli.options import expand_words
from toolkit.entry_point import exit_code_of
from toolkit.errors import EXIT_DONE, EXIT_INVALID_INPUT, ToolkitError
from toolkit.files.secrets import hide_words

# click's UsageError, or that of Typer's own copy of click, which exports only this subclass of it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
TYPER_INTERRUPTED = 130  # what Typer returns for a Ctrl-C
# Another word for an option -> ours. Every command accepts both; `--help` shows ours.
OTHER_WORDS = {"world-size": "num-processes", "output": "output-dir"}


def option_word(given: str) -> str:
    """Return our word for an option's name or an alias of it, with dashes.

    >>> option_word("num_processes"), option_word("world_size")
    ('num-processes', 'num-processes')
    """
    dashed = given.replace("_", "-")
    return OTHER_WORDS.get(dashed, dashed)


class HelpBySection(TyperGroup):
    """A group of commands whose help lists them by section, with complete sentences on a narrow terminal too."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of commands per section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            summary = command.get_short_help_str(limit=formatter.width * 2)
            sections.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, summary))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


SECTIONS = {
    "Before a run": (
        *("plan.recommend", "plan.plan", "page.page", "plan.rehearse", "presets.presets", "presets.preset_app"),
        *("config_files.lint", "config_files.diff", "config_files.convert_config", "simulate.simulate_app"),
    ),
    "Run": ("train.train", "cluster.cluster_app"),
    "Compare": ("train.compare", "train.tune", "train.report"),
    "Repair": ("doctor.doctor", "doctor.env", "checkpoint.checkpoint_app"),
}
"""Modules of `toolkit.cli` with a command, or a group of commands, by the heading of `--help`."""


def toolkit(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit; also after any command.")
    ] = False,
) -> None:
    """Fine-tune on several GPUs with a preset you chose, and compare presets on the same job."""


def app_with(name: str | None = None) -> typer.Typer:
    """Return the app with one command, or with all where none is named so: making these takes as long as a plan."""
    app = typer.Typer(
        cls=HelpBySection,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's tables cut the names of options to fit 100 columns
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            "token_normalize_func": option_word,
        },
    )
    app.callback()(toolkit)
    commands = {
        attribute.removesuffix("_app").replace("_", "-"): (heading, module, attribute)
        for heading, places in SECTIONS.items()
        for module, attribute in (place.split(".") for place in places)
    }
    for each in [name] if name in commands else commands:
        heading, module, attribute = commands[each]
        command = getattr(import_module(f"toolkit.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=each, cls=HelpBySection, rich_help_panel=heading)
        else:
            app.command(rich_help_panel=heading)(command)
    return app


@cache
def program(name: str | None = None) -> Any:
    """Return the group of all commands, or of one, made once: Typer makes them again whenever its app is called."""
    return typer.main.get_command(app_with(name))


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit; errors are printed in two lines, without a traceback."""
    words = sys.argv[1:] if argv is None else argv
    ours = words[: words.index("--") if "--" in words else None]
    as_json = "--json" in ours or "--format=json" in ours or ("--format", "json") in itertools.pairwise(ours)
    sys.exit(exit_code_of(lambda: _run_command(words), as_json=as_json))


def _run_command(argv: list[str]) -> int | None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the hub's client is imported, here or in a rank
    hide_words(argv)  # remembers their secrets, which no message may quote
    dashes = argv.index("--") if "--" in argv else len(argv)
    if "--version" in argv[:dashes]:
        print(f"finetune-toolkit {__version__}")
        return EXIT_DONE
    runs_script = any(word.startswith(("--script", "--module")) for word in argv[:dashes])
    if not runs_script and {"-h", "--help"}.intersection(argv[dashes:]):
        from toolkit.job.argument_reading import help_text

        print(help_text("toolkit train ... --"))
        return EXIT_DONE
    try:
        code: int | None = program(*argv[:1])(args=expand_words(argv), prog_name="toolkit", standalone_mode=False)
    except UsageError as error:
        if refusal := _usage_error(error, argv):
            raise refusal from None
        return EXIT_INVALID_INPUT
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == TYPER_INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _usage_error(error: Any, argv: Sequence[str]) -> ToolkitError | None:
    """Return what Typer refuses like every other invalid input; `toolkit` alone just shows its help."""
    from toolkit.files.documents import read_table
    from toolkit.job.argument_aliases import ALIASES
    from toolkit.job.argument_reading import argument_types

    kind = type(error).__name__
    if kind == "NoArgsIsHelpError":
        error.show()
        return None
    message = " ".join(str(error.format_message()).split())
    command = error.ctx.command_path if error.ctx else "toolkit"  # without a context if a value is missing
    option = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    below = getattr(error.ctx.command, "commands", {}) if error.ctx and error.ctx.parent else {}
    hint = ", ".join(f"`{command} {name} ...`" for name in below) or f"see `{command} --help`"
    parameters = error.ctx.command.params if error.ctx else []
    takes = {name for each in parameters for name in (each.name, *each.opts)}
    table = read_table(__file__, "guesses")
    words = table["options"].get(option.replace("_", "-"), "").split(" | ")
    guesses = [each for each in words if each.split(" ")[0] in takes]
    unknown = re.fullmatch(r"No such command '(\w+)'.*", message)
    if kind == "NoSuchOption" and guesses:
        message, hint = error.message, f"it is `{_with_value_of(guesses[0], option, argv)}`"
    elif kind == "NoSuchOption" and "training_arguments" in takes and (option in ALIASES or option in argument_types()):
        message, hint = error.message, f"training arguments go after `--`: `{command} ... -- --{option} ...`"
    elif unknown and unknown[1] in table["commands"] and command == "toolkit":
        hint = f"it is `{table['commands'][unknown[1]]}`"
    return ToolkitError(f"{message[:1].lower()}{message[1:].rstrip('.')}", hint=hint)


def _with_value_of(guess: str, option: str, argv: Sequence[str]) -> str:
    """Return an option and its example with the value that the command gives in place of the example."""
    name, *examples = guess.split(" ")
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        given, _, value = word.partition("=")
        if given.lstrip("-").replace("-", "_") == option and len(examples) == 1:
            value = value or following
            return f"{name} {value}" if value[:1].isalnum() else guess
    return guess
