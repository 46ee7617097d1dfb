"""The folder of compiled ops: what is in it runs, so nobody else may write it."""

import functools
import os
from pathlib import Path

import pytest
from command_line import run_command

from toolkit.engines.compiled_ops import check_extensions_folder, instruction_sets, torch_extensions_folder
from toolkit.errors import ToolkitError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one compiled op."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    op = torch_extensions_folder() / "cpu_adam"
    op.mkdir(parents=True)
    (op / "cpu_adam.so").touch()
    return tmp_path / "cache"


# Levels of the cache above the library, each of which another user could replace.
LEVELS = {"the library": 0, "the op's": 1, "this environment's": 2, "the extensions": 3, "the cache": 4}


@pytest.mark.parametrize("levels_up", LEVELS.values(), ids=LEVELS)
def test_ops_that_another_user_can_replace_are_refused(cache: Path, levels_up: int) -> None:
    check_extensions_folder()
    library = next(cache.glob("*/*/*/*.so"))
    place = [library, *library.parents][levels_up]
    mode = place.stat().st_mode
    place.chmod(0o777)
    with pytest.raises(ToolkitError, match=r"may be written by every user") as refused:
        check_extensions_folder()
    assert refused.value.message.startswith(f"{place} ")
    if os.geteuid() == 0:  # only root can give a file to another user
        place.chmod(mode)
        os.chown(place, 54321, 0)
        with pytest.raises(ToolkitError, match=r"belongs to another user \(uid 54321\)"):
            check_extensions_folder()


def test_it_is_refused_before_a_rank_starts(
    cache: Path, tmp_path: Path, tiny_model: Path, faq_alpaca: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.chmod(0o777)
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--output_dir", str(tmp_path / "out")]
    code, _, printed = run_command(["train", "--preset", "zero2", "--cpu", "--num-processes", "2", "--", *job], capsys)
    assert (code, "export TOOLKIT_CACHE=DIR" in printed, (tmp_path / "out").exists()) == (2, True, False)


def test_compiled_ops_are_kept_apart_for_cpus_with_other_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zen4, zen2 = tmp_path / "zen4", tmp_path / "zen2"
    zen4.write_text("processor\t: 0\nflags\t\t: fpu sse4_2 avx2 avx512_bf16 ht\n")
    zen2.write_text("processor\t: 0\nflags\t\t: fpu sse4_2 avx2 ht\n")
    assert instruction_sets(zen4) == ("avx2", "avx512_bf16", "sse4_2")
    folders = {torch_extensions_folder()}
    for cpu in (zen4, zen2):
        monkeypatch.setattr("toolkit.engines.compiled_ops.instruction_sets", functools.partial(instruction_sets, cpu))
        folders.add(torch_extensions_folder())
    assert len(folders) == 3
