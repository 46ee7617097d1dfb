"""The MCP server returns what the command line prints; the real client of the `mcp` package asks it over stdio."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from launching import ROOT

from toolkit import mcp_server
from toolkit.errors import ToolkitError
from toolkit.versions import is_importable

needs_mcp = pytest.mark.skipif(not is_importable("mcp"), reason="needs the extra mcp: `pip install -e .[mcp]`")
ARGUMENTS = ["--gpu", "h100", "--num-processes", "8", "--preset", "zero3"]


def ask(*calls: tuple[str, dict[str, Any]]) -> tuple[set[str], list[Any]]:
    """Start the server, and return the names of its tools and its answers."""
    from mcp import Client, StdioServerParameters

    async def session() -> tuple[set[str], list[Any]]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        server = StdioServerParameters(command=sys.executable, args=["-m", "toolkit.mcp_server"], env=environment)
        async with Client(server) as client:
            tools = await client.list_tools()
            return {tool.name for tool in tools.tools}, [await client.call_tool(*call) for call in calls]

    return asyncio.run(session())


@needs_mcp
def test_each_tool_returns_what_its_command_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "no_such_key": 1}))
    names, answers = ask(
        ("presets", {}),
        ("plan", {"model": "Qwen/Qwen3-8B", "arguments": ARGUMENTS}),
        ("lint", {"paths": [str(tmp_path)]}),
        ("report", {"folder": str(tmp_path)}),
        ("plan", {"model": "Qwen/Qwen3-8B", "gpu": "h100"}),
    )
    assert names == {tool.__name__ for tool in mcp_server.TOOLS}
    *good, no_report, not_an_argument = answers
    commands = (["presets"], ["plan", "Qwen/Qwen3-8B", *ARGUMENTS], ["lint", tmp_path])
    presets, *others = (json.loads(run_command([*words, "--json"], capfd)[1]) for words in commands)
    expected = [{"presets": presets}, *others]
    assert [each.structured_content for each in good] == expected
    assert expected[-1]["findings"]  # the exit code is 1, and the answer is whole
    assert no_report.is_error
    assert str(tmp_path) in no_report.content[0].text
    assert not_an_argument.is_error
    assert "gpu\n  Extra inputs are not permitted" in not_an_argument.content[0].text


def test_a_plan_of_a_file_has_its_model_from_either() -> None:
    file = str(ROOT / "tests" / "fixtures" / "axolotl.yaml")
    with_model = mcp_server.plan("Qwen/Qwen3-8B", ["--config", file, "--gpu h100", "--num-processes 8"])
    assert with_model == mcp_server.plan(arguments=["--config", file, "--gpu", "h100", "--num-processes", "8"])
    assert with_model["plans"][0]["preset"] == "ddp"  # the file's


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("no-such/model.json", ARGUMENTS, r"exit code 2: .*no-such/model"),
        (None, ARGUMENTS, r"MODEL is missing"),
        ("Qwen/Qwen3-8B", ["--help"], r"exit code 0: .*--num-processes"),
    ],
)
def test_a_command_without_an_answer_returns_its_message(model: str | None, words: list[str], message: str) -> None:
    with pytest.raises(ToolkitError, match=f"(?s){message}"):
        mcp_server.plan(model, words)


WRITE_OR_RUN = ["--level note --in-place", "--in_place", "--trust-remote-code", "--script", "--verify", "--output=x"]


@pytest.mark.parametrize("word", WRITE_OR_RUN)
def test_an_option_that_writes_or_runs_code_is_refused(word: str) -> None:
    with pytest.raises(ToolkitError, match="a person types it"):
        mcp_server.lint(["configs"], [word])


@pytest.mark.skipif(is_importable("mcp"), reason="the extra mcp is installed")
def test_without_the_extra_the_line_to_install_it_is_printed() -> None:
    command = [sys.executable, "-m", "toolkit.mcp_server"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert "mcp is not installed" in done.stderr
    assert "[mcp]" in done.stderr
