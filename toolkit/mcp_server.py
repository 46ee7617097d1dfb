"""`python -m toolkit.mcp_server`: the commands that answer, as tools of the Model Context Protocol over stdio.

Each tool runs `toolkit COMMAND ... --json` and returns its JSON, so that an agent gets what a person gets. Commands
that train or run code of others are not offered, nor are options that write files or trust.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toolkit._version import __version__
from toolkit.entry_point import exit_code_of
from toolkit.errors import ToolkitError
from toolkit.installation import require

if TYPE_CHECKING:
    from mcp.server import MCPServer

SECONDS = 600
# They write files, rehearse, or run what somebody wrote.
REFUSED = ("--in-place", "--verify", "--output", "--trust", "--script", "--module")
INSTRUCTIONS = "Plan before a run, and start none that `does_not_fit`. `arguments` are words of the command line."


def answer(command: str, *words: str) -> Any:
    """Run a command and return its JSON. Raises ToolkitError with the command's message where it has none."""
    given = [part for word in words for part in (word.split() if word.startswith("--") else [word])]  # "--gpu h100"
    for word in given:
        if word.replace("_", "-").startswith(REFUSED):  # the command line takes both
            raise ToolkitError(f"{word} is not for agents: a person types it on the command line")
    argv = [sys.executable, "-m", "toolkit", command, "--json", *given]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS)
    with contextlib.suppress(ValueError):
        if "failure" not in (found := json.loads(done.stdout)):
            return found
    raise ToolkitError(f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")


def presets() -> dict[str, Any]:
    """List the presets: engine, sharding, offload, precision, and when to choose each."""
    return {"presets": answer("presets")}


def plan(model: str | None = None, arguments: list[str] | None = None) -> dict[str, Any]:
    """Plan memory, communication, speed and cost of a job: `--gpu h100 --num-processes 8 --preset zero3`.

    `--config FILE` plans a file of axolotl, TRL, LLaMA-Factory or ms-swift, with or without a model. `plans[].verdict`
    is fits, too_close or does_not_fit.
    """
    found: dict[str, Any] = answer("plan", *filter(None, [model]), *(arguments or ()))
    return found


def recommend(model: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """Recommend a preset and its settings: `--gpu h100 --num-processes 8`. See `choice`, `reasons`, `command`."""
    found: dict[str, Any] = answer("recommend", model, *(arguments or ()))
    return found


def lint(paths: list[str], arguments: list[str] | None = None) -> dict[str, Any]:
    """Find settings in configuration files or folders that do not do what they say."""
    found: dict[str, Any] = answer("lint", *paths, *(arguments or ()))
    return found


def report(folder: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """Return the results of a comparison's folder: rows with speed, peaks, losses, parity and intervals."""
    found: dict[str, Any] = answer("report", folder, *(arguments or ()))
    return found


TOOLS = (presets, plan, recommend, lint, report)


def make_server() -> MCPServer:
    """Return the server. Raises ToolkitError where `mcp` is not installed."""
    require("mcp")
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool

    def with_message(tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(tool)
        def run(*given: Any, **named: Any) -> dict[str, Any]:
            try:
                return tool(*given, **named)
            except ToolkitError as error:  # of any other error the client is told no more than that there was one
                raise ToolError(error.message) from None

        return run

    tools = [Tool.from_function(with_message(tool)) for tool in TOOLS]
    for tool in tools:  # mcp drops what a tool does not have: `gpu="h100"` beside `arguments` was no error
        arguments = tool.fn_metadata.arg_model
        arguments.model_config["extra"] = "forbid"
        arguments.model_rebuild(force=True)
        tool.parameters = arguments.model_json_schema()
    return MCPServer("finetune-toolkit", version=__version__, instructions=INSTRUCTIONS, tools=tools)


def main() -> None:
    """Serve over stdio until the client leaves."""
    sys.exit(exit_code_of(lambda: make_server().run("stdio")))


if __name__ == "__main__":
    main()
