"""Nothing that a checkpoint's pickle names is run: not by export, verify, convert or resuming."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import nightly_launch, toolkit

from toolkit.engines.safe_loading import (
    DCP_METADATA,
    NEVER_LOADED,
    PICKLE_SUFFIXES,
    check_checkpoint,
    load_only_known_classes,
    read_dcp_metadata,
    torch_load,
)
from toolkit.errors import ToolkitError
from toolkit.record.checkpoints import checkpoint_files, commit_checkpoint, file_entries, list_checkpoints


class Calls:
    """Calls a function with arguments when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def payload(folder: Path) -> Calls:
    return Calls(os.mkdir, str(folder / "ran"))


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def zipped(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def refusal(folder: Path) -> str:
    with pytest.raises(ToolkitError) as refused:
        check_checkpoint(folder)
    assert not (folder / "ran").exists()
    return refused.value.message


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "rng_state_1.pth", "pytorch_model.bin", "custom_0.pkl", "step1/mp_rank_00_model_states.pt"]
)
def test_a_payload_in_any_file_that_a_library_unpickles_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, saved({"x": payload(tmp_path)}))
    expected = f"{path} would run posix.mkdir, which no checkpoint of ours contains"
    assert refusal(tmp_path) == expected
    with pytest.raises(ToolkitError) as refused:
        torch_load(path)
    assert (refused.value.message, "--trust-pickle" in str(refused.value.hint)) == (expected, True)


FORMS = {
    "in another letter case, which torch's reader ignores": lambda evil: zipped(
        {"archive/DATA.PKL": evil, "archive/version": b"3\n", "archive/byteorder": b"little"}
    ),
    "two folders": lambda evil: zipped({"evil/data.pkl": evil, "archive/data.pkl": pickle.dumps(1, protocol=2)}),
    "TorchScript": lambda evil: zipped({"archive/data.pkl": evil, "archive/constants.pkl": evil}),
    "torch's format of before 2020": lambda evil: saved({}, _use_new_zipfile_serialization=False) + evil,
    "a bare pickle": lambda evil: evil,
    "newer opcodes": lambda evil: zipped({"archive/data.pkl": pickle.dumps(pickle.loads(PLAIN), protocol=5) + evil}),
}
PLAIN = pickle.dumps({"a": 1}, protocol=2)


@pytest.mark.parametrize("form", FORMS)
def test_a_payload_is_refused_in_every_form_of_file(form: str, tmp_path: Path) -> None:
    path = write(tmp_path / "optimizer.pt", FORMS[form](pickle.dumps({"x": payload(tmp_path)}, protocol=2)))
    assert str(path) in refusal(tmp_path)
    with pytest.raises(ToolkitError, match=str(path)):
        torch_load(path)
    assert not (tmp_path / "ran").exists()


def test_distributed_metadata_admits_only_its_own_classes(tmp_path: Path) -> None:
    for content in (payload(tmp_path), Calls(torch.UntypedStorage, 10**12)):
        write(tmp_path / "optimizer_0" / DCP_METADATA, pickle.dumps({"x": content}))
        assert "would run" in refusal(tmp_path)
        with pytest.raises(ToolkitError, match="would run"):
            read_dcp_metadata(tmp_path / "optimizer_0" / DCP_METADATA)


def test_only_regular_files_and_folders_inside_are_read(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    for kind, make in {"a named pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero")}.items():
        make(path)
        assert refusal(tmp_path) == f"{path} is {kind}, expected a file"
        path.unlink()
    for name in ("../elsewhere", str(tmp_path), "..", "", "x" * 300, "\0", "missing"):
        (tmp_path / "latest").write_text(name)
        assert "latest" in refusal(tmp_path)


@pytest.mark.nightly
def test_a_library_that_loads_everything_is_held_to_the_lists_too(tmp_path: Path) -> None:
    """DeepSpeed and torch's distributed checkpoints load with `weights_only=False`."""
    path = write(tmp_path / "model_states.pt", saved({"x": payload(tmp_path)}))
    write(tmp_path / DCP_METADATA, pickle.dumps({"x": payload(tmp_path)}))
    code = (
        "import sys, types, torch; from pathlib import Path; import torch.distributed.checkpoint as dcp;"
        f"from {load_only_known_classes.__module__} import load_only_known_classes;"
        "load_only_known_classes(types.SimpleNamespace(deepspeed_plugin=None))\n"
        "for load in (lambda: torch.load(sys.argv[1], weights_only=False),"
        " lambda: dcp.FileSystemReader(sys.argv[2]).read_metadata()):\n"
        "  try: load()\n"
        "  except Exception as error: print(type(error).__name__)\n"
        "  else: print('loaded')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, path, tmp_path], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["UnpicklingError", "ToolkitError"]
    assert not (tmp_path / "ran").exists()


def test_what_libraries_write_is_accepted(tmp_path: Path) -> None:
    numpy_state: Any = np.random.RandomState(0).get_state()
    states = {"python": (3, (1, 2), None), "numpy": numpy_state, "cpu": torch.get_rng_state()}
    optimizer = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, dtype=torch.bfloat16)}}}
    write(tmp_path / "rng_state_0.pth", saved(states))
    write(tmp_path / "optimizer.pt", saved(optimizer))
    write(tmp_path / "pytorch_model.bin", saved(OrderedDict(torch.nn.Linear(2, 2).state_dict())))
    check_checkpoint(tmp_path)
    assert torch_load(tmp_path / "optimizer.pt")["state"][0]["exp_avg"].tolist() == [1, 1]


# -- What runs of every engine have written


def plant(path: Path, content: Calls) -> None:
    """Put a payload into a pickle, in the format that the file has."""
    if path.name == DCP_METADATA:
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data = {**(metadata.planner_data or {}), "x": content}
        path.write_bytes(pickle.dumps(metadata))
    else:
        torch.save({"state": torch.load(path, weights_only=False), "x": content}, path)


@pytest.mark.launch
@pytest.mark.parametrize("case", ["ddp", "zero2", "zero3-lora", "fsdp2"])
def test_a_planted_payload_is_refused_by_file_and_name_and_never_runs(
    case: str, saved_runs: dict[str, Path], tmp_path: Path
) -> None:
    source = list_checkpoints(saved_runs[case])[0].path
    pickles = [path for path in source.rglob("*") if path.suffix in PICKLE_SUFFIXES or path.name == DCP_METADATA]
    for number, original in enumerate(sorted(path for path in pickles if path.name not in NEVER_LOADED)):
        copy = tmp_path / str(number) / source.name
        shutil.copytree(source, copy)
        planted = copy / original.relative_to(source)
        plant(planted, payload(tmp_path))
        assert refusal(copy) == f"{planted} would run posix.mkdir, which no checkpoint of ours contains"
        assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(payload(tmp_path)))
    assert (tmp_path / "ran").exists(), "the payload does run where nothing stops it"


@nightly_launch
def test_a_run_does_not_resume_from_a_checkpoint_with_a_payload(
    saved_runs: dict[str, Path], saved_job: list[str], tmp_path: Path
) -> None:
    planted, checkpoint = tmp_path / "planted", tmp_path / "checkpoint-1"
    shutil.copytree(saved_runs["ddp"] / "checkpoint-1", planted)
    plant(planted / "optimizer.pt", payload(tmp_path))
    facts = json.loads((planted / "manifest.json").read_text())
    (planted / "manifest.json").unlink()
    facts = {name: value for name, value in facts.items() if name not in ("files", "sha256")}
    commit_checkpoint(planted, checkpoint, facts | {"files": file_entries(planted, checkpoint_files(planted))})
    words = [*saved_job, "--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint", str(checkpoint)]
    ended = toolkit("train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--", *words)
    assert ended.returncode == 2, ended.stderr
    error, hint = ended.stderr.splitlines()[-2:]
    assert error.endswith(f"{checkpoint}/optimizer.pt would run posix.mkdir, which no checkpoint of ours contains")
    assert "--trust-pickle" in hint
    assert not (tmp_path / "ran").exists()
