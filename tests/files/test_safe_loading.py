"""Nothing that a checkpoint's pickle names is run: not by export, verify, convert or resuming."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SAVED

from toolkit.errors import ToolkitError
from toolkit.files.checkpoint_pickles import check_pickles, pickles_of
from toolkit.files.safe_loading import check_checkpoint

pytestmark = pytest.mark.launch


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def plant(path: Path, marker: Path) -> None:
    """Put a payload into a pickle, in the format that the file has."""
    if path.name == ".metadata":
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data = {**(metadata.planner_data or {}), "x": Payload(marker)}
        path.write_bytes(pickle.dumps(metadata))
    else:
        state = torch.load(path, weights_only=False)
        torch.save({"state": state, "x": Payload(marker)}, path)


@pytest.mark.parametrize("case", SAVED)
def test_what_the_engines_write_is_accepted(case: str, saved_runs: dict[str, Path]) -> None:
    checkpoint = newest(saved_runs[case])
    assert len(list(pickles_of(checkpoint))) >= 3
    check_checkpoint(checkpoint)


@pytest.mark.parametrize("case", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_planted_payload_is_refused_by_file_and_name_and_never_runs(
    case: str, saved_runs: dict[str, Path], tmp_path: Path
) -> None:
    source, marker = newest(saved_runs[case]), tmp_path / "ran"
    for number, (original, _) in enumerate(pickles_of(source)):
        copy = tmp_path / str(number) / source.name
        shutil.copytree(source, copy)
        planted = copy / original.relative_to(source)
        plant(planted, marker)
        with pytest.raises(ToolkitError, match=r"would run posix\.mkdir") as refused:
            check_pickles(copy)
        assert str(planted) in refused.value.message
        assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists(), "the payload does run where nothing stops it"
