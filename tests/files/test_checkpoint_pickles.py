"""Nothing that a pickle of a checkpoint names is run, whatever its file looks like; and no pickle takes forever."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.errors import ToolkitError
from toolkit.files.checkpoint_pickles import PICKLES, allowed_names, check_pickles
from toolkit.files.pickle_scan import check_content, pickle_in
from toolkit.files.safe_loading import load_only_known_classes, read_dcp_metadata, torch_load
from toolkit.versions import is_importable


class Calls:
    """Calls a function with arguments when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def payload(folder: Path) -> Calls:
    return Calls(os.mkdir, str(folder / "ran"))


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def zipped(entries: list[tuple[str, bytes]], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=options.get("compression"))
    return buffer.getvalue()


PLAIN = pickle.dumps({"a": 1}, protocol=2)


def other_case(evil: bytes) -> bytes:
    return zipped([("archive/data.pkl", PLAIN), ("archive/DATA.PKL", evil)])


def only_in_other_case(evil: bytes) -> bytes:
    """torch's reader ignores case: it loads this one."""
    return zipped([("archive/DATA.PKL", evil), ("archive/version", b"3\n"), ("archive/byteorder", b"little")])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def duplicate(evil: bytes) -> bytes:
    return zipped([("archive/data.pkl", evil), ("archive/data.pkl", PLAIN)])


def two_folders(evil: bytes) -> bytes:
    return zipped([("evil/data.pkl", evil), ("archive/data.pkl", PLAIN)])


def other_name(evil: bytes) -> bytes:
    return zipped([("archive/data.bin", evil)])


def compressed(evil: bytes) -> bytes:
    return zipped([("archive/data.pkl", evil)], compression=zipfile.ZIP_DEFLATED)


def encrypted(evil: bytes) -> bytes:
    content = bytearray(zipped([("archive/data.pkl", evil)]))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1
    return bytes(content)


def torchscript(evil: bytes) -> bytes:
    return zipped([("archive/data.pkl", PLAIN), ("archive/constants.pkl", evil)])


def with_a_prefix(evil: bytes) -> bytes:
    return b"PK\x03\x04" + zipped([("archive/data.pkl", evil)])


def followed_by_a_directory(evil: bytes) -> bytes:
    """A zip whose comment is a second zip."""
    outer = bytearray(zipped([("archive/data.pkl", evil)]))
    inner = zipped([("archive/data.pkl", PLAIN)])
    outer[-2:] = struct.pack("<H", len(inner))
    return bytes(outer) + inner


def two_directories(evil: bytes) -> bytes:
    """torch's reader follows the locator's offset, Python's the record before the locator."""
    entries = zipped([("archive/data.pkl", evil), ("archive/x", b"")])
    end = struct.unpack("<4s4H2LH", entries[-22:])
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, end[3], end[3], end[5], end[6])
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(entries) - 22, 1)
    return entries[:-22] + record + record + locator + entries[-22:]


def before_2020(evil: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save({}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue() + evil


def tar_that_is_also_five_pickles(evil: bytes) -> bytes:
    """torch loads the pickles inside of a tar file, whose first bytes are the name of its first entry."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in {"N.N.N.N.N.": b"", "storages": PLAIN + evil, "tensors": PLAIN, "pickle": evil}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def bare_pickle(evil: bytes) -> bytes:
    return evil


FORMS: list[Callable[[bytes], bytes]] = [
    *(other_case, only_in_other_case, duplicate, two_folders, other_name, compressed, encrypted, torchscript),
    *(with_a_prefix, followed_by_a_directory, two_directories, before_2020, tar_that_is_also_five_pickles),
    bare_pickle,
]
NAMES = [
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_1.pth", "optimizer.bin"),
    *("pytorch_model.bin", "adapter_model.bin", "pytorch_model_fsdp.bin", "random_states_0.pkl"),
    *("custom_checkpoint_0.pkl", "global_step1/mp_rank_00_model_states.pt"),
    *("global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step1_universal/zero/w/fp32.pt"),
    *("global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step1/expert_0_model_states.pt"),
]


def scan(path: Path) -> None:
    """Scan one file in this process."""
    check_content(pickle_in(path), allowed_names(path) or (), name=str(path))


def refusal(folder: Path) -> str:
    with pytest.raises(ToolkitError) as refused:
        check_pickles(folder)
    assert not (folder / "ran").exists()
    return refused.value.message


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_in_any_file_that_a_library_unpickles_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, saved({"x": payload(tmp_path)}))
    with pytest.raises(ToolkitError) as refused:
        scan(path)
    assert refused.value.message == f"{path} would run posix.mkdir, which no checkpoint of ours contains"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("form", FORMS)
def test_a_payload_is_refused_in_every_form_that_a_reader_could_take_differently(
    form: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = write(tmp_path / "optimizer.pt", form(pickle.dumps({"x": payload(tmp_path)}, protocol=2)))
    with pytest.raises(ToolkitError, match=str(path)):
        scan(path)
    with contextlib.suppress(ToolkitError):
        torch_load(path)
    assert not (tmp_path / "ran").exists()


def test_distributed_metadata_admits_only_its_own_classes(tmp_path: Path) -> None:
    write(tmp_path / "optimizer_0" / ".metadata", pickle.dumps({"x": payload(tmp_path)}))
    assert "would run posix.mkdir" in refusal(tmp_path)
    with pytest.raises(ToolkitError, match=r"would run posix\.mkdir"):
        read_dcp_metadata(tmp_path / "optimizer_0")
    write(tmp_path / "optimizer_0" / ".metadata", pickle.dumps({"x": Calls(torch.UntypedStorage, 10**12)}))
    assert "would run" in refusal(tmp_path)


def nested_key_pickle() -> bytes:
    """A key whose hash takes 2**60 steps: a tuple does not remember its hash."""
    steps = b"".join(b"2\x86" for _ in range(60))  # DUP, TUPLE2
    return b"\x80\x02}(" + b")" + steps + b"K\x01u."


def equal_hash_pickle() -> bytes:
    """200,000 keys of the same hash: each is compared with all before it."""
    modulus = 2**61 - 1
    keys = b"".join(b"\x8a\x0c" + (modulus * number).to_bytes(12, "little") + b"N" for number in range(1, 200_000))
    return b"\x80\x02}(" + keys + b"u."


@pytest.mark.parametrize("bomb", [nested_key_pickle, equal_hash_pickle])
def test_a_pickle_that_never_ends_is_stopped(bomb: Callable[[], bytes], tmp_path: Path) -> None:
    path = write(tmp_path / "optimizer.pt", zipped([("archive/data.pkl", bomb())]))
    assert refusal(tmp_path).startswith(f"{path} is damaged: reading its pickle takes more time")


@pytest.mark.parametrize(
    "call",
    [
        Calls(__import__("_codecs").encode, "x" * 10, "idna"),
        Calls(np.zeros(1).__reduce__()[0], np.ndarray, (10**13,), b"b"),
    ],
)
def test_allowed_functions_are_not_called_with_other_arguments(call: Calls, tmp_path: Path) -> None:
    write(tmp_path / "rng_state_0.pth", saved({"x": call}))
    assert "with other arguments than any library" in refusal(tmp_path)


def test_links_are_followed_and_a_folder_elsewhere_is_not_named(tmp_path: Path) -> None:
    elsewhere, checkpoint = tmp_path / "elsewhere", tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    path = write(elsewhere / "mp_rank_00_model_states.pt", saved({"x": payload(tmp_path)}))
    (checkpoint / "global_step1").symlink_to(elsewhere)
    (checkpoint / "loop").symlink_to(checkpoint)
    assert "would run posix.mkdir" in refusal(checkpoint)
    (checkpoint / "global_step1").unlink()
    for name in ("../elsewhere", str(elsewhere), "..", "", "x" * 300, "\0", "missing"):
        (checkpoint / "latest").write_text(name)
        assert "latest" in refusal(checkpoint)
    (checkpoint / "latest").unlink()
    path.rename(checkpoint / "optimizer.pt")
    assert "would run" in refusal(checkpoint)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "optimizer.pt")
    assert refusal(tmp_path) == f"{tmp_path / 'optimizer.pt'} is a named pipe, expected a file"
    (tmp_path / "optimizer.pt").unlink()
    (tmp_path / "optimizer.pt").symlink_to("/dev/zero")
    assert refusal(tmp_path) == f"{tmp_path / 'optimizer.pt'} is a device, expected a file"


def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded checkpoint is a likely working directory."""
    write(tmp_path / "scheduler.pt", saved({"a": 1}))
    for name in ("zipfile", "json", "resource"):
        (tmp_path / f"{name}.py").write_text("import os; os.mkdir('ran')")
    monkeypatch.chdir(tmp_path)
    check_pickles(Path())
    assert not (tmp_path / "ran").exists()


def test_a_library_that_loads_everything_is_held_to_the_lists_too(tmp_path: Path) -> None:
    """DeepSpeed loads with `weights_only=False`, possibly a file that changed after the check."""
    path = write(tmp_path / "model_states.pt", saved({"x": payload(tmp_path)}))
    code = (
        "import sys, torch; from pathlib import Path; import torch.distributed.checkpoint as dcp;"
        f"from {load_only_known_classes.__module__} import load_only_known_classes;"
        "load_only_known_classes(deepspeed=False)\n"
        "for load in (lambda: torch.load(sys.argv[1], weights_only=False),"
        " lambda: dcp.FileSystemReader(sys.argv[2]).read_metadata()):\n"
        "  try: load()\n"
        "  except Exception as error: print(type(error).__name__)\n"
        "  else: print('loaded')\n"
    )
    write(tmp_path / ".metadata", pickle.dumps({"x": payload(tmp_path)}))
    ended = subprocess.run([sys.executable, "-c", code, path, tmp_path], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["UnpicklingError", "ToolkitError"]
    assert not (tmp_path / "ran").exists()


def test_what_libraries_write_is_accepted(tmp_path: Path) -> None:
    tensor = torch.nn.Linear(2, 2).state_dict()
    optimizer = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, dtype=torch.bfloat16)}}}
    numpy_state: Any = np.random.RandomState(0).get_state()
    states = {"python": (3, (1, 2), None), "numpy": numpy_state, "cpu": torch.get_rng_state()}
    contents = {"rng_state_0.pth": states, "optimizer.pt": optimizer, "pytorch_model.bin": OrderedDict(tensor)}
    for name, content in contents.items():
        write(tmp_path / name, saved(content))
    check_pickles(tmp_path)
    assert all(any(Path(name).match(pattern) for pattern in PICKLES) for name in contents)


@pytest.mark.skipif(not is_importable("torchao"), reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_torchaos_quantized_states_are_loaded_and_nothing_else_of_torchao(tmp_path: Path) -> None:
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    states = {"state": {0: {"exp_avg": OptimState8bit.zeros((16, 256))}, 1: {"exp_avg": OptimState4bit.zeros((4096,))}}}
    torch.save(states, tmp_path / "optimizer.pt")
    check_pickles(tmp_path)
    loaded = torch_load(tmp_path / "optimizer.pt")["state"]
    assert [type(loaded[number]["exp_avg"]) for number in (0, 1)] == [OptimState8bit, OptimState4bit]
    assert loaded[0]["exp_avg"].codes.shape == (16, 256)
    (tmp_path / "optimizer.pt").rename(tmp_path / "scheduler.pt")
    with pytest.raises(ToolkitError, match="_rebuild_wrapper_subclass, which no checkpoint of ours contains"):
        check_pickles(tmp_path)
