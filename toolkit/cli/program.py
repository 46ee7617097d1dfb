"""The Typer program: every command, and how errors become two lines and an exit code."""

from __future__ import annotations

import sys
from typing import Any

import typer

from toolkit.cli.checkpoint import checkpoint_app
from toolkit.cli.compare import compare
from toolkit.cli.lint import lint
from toolkit.cli.output import print_message
from toolkit.cli.plan import plan
from toolkit.cli.presets import preset_app, presets
from toolkit.cli.recommend import recommend
from toolkit.cli.rehearse import rehearse
from toolkit.cli.report import report
from toolkit.cli.train import train
from toolkit.errors import EXIT_INVALID_INPUT, EXIT_RUN_FAILED, ToolkitError

# click's UsageError, or that of Typer's own copy of click, which exports only this subclass of it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune on several GPUs with a preset you chose, and compare presets on the same job.",
)
app.command()(presets)
app.command()(plan)
app.command()(recommend)
app.command()(train)
app.command()(rehearse)
app.command()(compare)
app.command()(report)
app.command()(lint)
app.add_typer(preset_app, name="preset")
app.add_typer(checkpoint_app, name="checkpoint")


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit; an error that the user can fix is printed in two lines, without a traceback."""
    try:
        sys.exit(app(args=argv, prog_name="toolkit", standalone_mode=False))
    except ToolkitError as error:
        print_message(f"error: {error}")
        sys.exit(error.exit_code)
    except UsageError as error:
        _print_usage_error(error)
        sys.exit(EXIT_INVALID_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        print_message("stopped")
        sys.exit(EXIT_RUN_FAILED)


def _print_usage_error(error: Any) -> None:
    """Print what Typer refuses like every other invalid input; `toolkit` alone just shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    message = " ".join(str(error.format_message()).split())
    # The toolkit's own options have dashes, training arguments have underscores.
    misplaced = "no such option" in message.lower() and "_" in message
    hint = "training arguments go after `--`" if misplaced else f"see `{error.ctx.command_path} --help`"
    print_message(f"error: {message[:1].lower()}{message[1:].rstrip('.')}\n  hint: {hint}")
