"""A dataclass of options becomes a command's flags, and the command receives it back."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from support.command_line import run_command
from typer.testing import CliRunner

from toolkit.cli.options import expand_options
from toolkit.cli.program import program


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a made-up command."""

    preset: Annotated[tuple[str, ...], typer.Option(help="repeatable")] = ()
    world_size: Annotated[tuple[int, ...], typer.Option(help="repeatable, required")]
    gpu: Annotated[str | None, typer.Option(help="optional")] = None
    fast: Annotated[bool, typer.Option("--fast", help="a flag")] = False
    internal: int = 7


@pytest.fixture
def run() -> Any:
    app, received = typer.Typer(), []

    @app.command()
    @expand_options
    def command(model: Annotated[str, typer.Argument()], options: Options) -> None:
        """Do something."""
        received.append((model, options))

    def invoke(*words: str) -> Any:
        result = CliRunner().invoke(app, words)
        return received.pop() if received else (result.exit_code, result.output)

    return invoke


def test_flags_arrive_as_the_dataclass_with_tuples(run: Any) -> None:
    received = run("llama", "--world-size", "2", "--world-size", "4", "--preset", "ddp", "--fast")
    assert received == ("llama", Options(world_size=(2, 4), preset=("ddp",), fast=True))


def test_a_field_without_a_default_is_required_and_one_without_an_annotation_is_no_flag(run: Any) -> None:
    code, output = run("llama")
    assert (code, "--world-size" in output) == (2, True)
    assert run("llama", "--world-size", "2", "--internal", "3")[0] == 2


def test_a_word_that_an_option_does_not_take_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "Qwen/Qwen3-0.6B", "--gpu", "h100", "--num-processes", "1"]
    named = [each for each in program().commands["plan"].params if each.opts[0].startswith("--")]
    options = [each.opts[0] for each in named if "str" in str(each.type_descriptor.annotation)]
    assert "--method" in options
    texts = {option: run_command([*base, option, "no-such-word"], capsys)[2] for option in options}
    assert [option for option, text in texts.items() if "mistake in the toolkit" in text] == []
    assert "`--lora-r 16`" in run_command([*base, "--method", "lora"], capsys)[2]
