"""A dataclass of options becomes a command's flags, and `~` in a path means the home folder in every command."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from launching import ROOT
from support.command_line import run_command
from typer.testing import CliRunner

from toolkit.__main__ import main
from toolkit.cli.options import expand_options, expand_words
from toolkit.cli.program import program
from toolkit.files.paths import cache_folder
from toolkit.job.argument_reading import PATHS, argument_types, read_arguments


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


DDP = ROOT / "accelerate_configs" / "ddp.yaml"
JOB = "base_model: gpt2\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that is not the working directory."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["lint", "~/ddp.yaml"], None),
        (["preset", "show", "~/ddp.yaml"], None),
        (["preset", "export", "~/out", "ddp"], "out/ddp.yaml"),
        (["convert-config", "~/job.yaml", "--output", "~/ours.yaml"], "ours.yaml"),
        (["convert-config", "~/job.yaml", "--output=~/ours.yaml"], "ours.yaml"),
        (["plan", "~/llama", "--gpu", "h100", "--preset", "~/ddp.yaml", "--num-processes", "2"], None),
    ],
)
def test_a_quoted_tilde_is_the_home_folder_in_every_command(words: list[str], written: str | None, home: Path) -> None:
    shutil.copy(DDP, home)
    shutil.copytree(ROOT / "tests" / "fixtures" / "llama-8b", home / "llama")
    (home / "job.yaml").write_text(JOB)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    assert written is None or (home / written).is_file()
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("given", [["--output_dir", "~/x"], ["--output_dir=~/x"], ["~/job.yaml"]])
def test_a_path_in_the_arguments_may_be_below_the_home_folder(given: list[str], home: Path) -> None:
    (home / "job.yaml").write_text("output_dir: ~/x\n")
    assert read_arguments(given)["output_dir"] == str(home / "x")
    assert {"output_dir"} <= set(PATHS) <= set(argument_types())


@pytest.mark.parametrize("word", ["~nobody-here/x", "a~b", "./~x", "-x=~/y"])
def test_what_is_no_path_below_a_home_folder_is_unchanged(word: str) -> None:
    assert expand_words([word]) == [word]


def test_a_cache_in_the_environment_may_be_below_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", "~/cache")
    assert cache_folder() == home / "cache"
