"""`~` in a path, quoted or in a YAML file, means the home folder in every command and for launcher and ranks alike."""

import shutil
from pathlib import Path

import pytest
from launching import ROOT

from toolkit.__main__ import main
from toolkit.cli.options import expand_words
from toolkit.files.paths import cache_folder
from toolkit.job.argument_reading import PATHS, argument_types, read_arguments

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
