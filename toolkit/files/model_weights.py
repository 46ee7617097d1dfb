"""The weights of a model folder, as its index and the headers of its safetensors files describe them. No torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files.checkpoint_pickles import TENSORS
from toolkit.files.json_files import read_json_object
from toolkit.files.pickle_scan import check_content, pickle_in
from toolkit.files.safetensors_header import TensorEntry, read_header

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
_PICKLED = "pytorch_model*.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor and the file that holds it."""

    path: Path
    entry: TensorEntry


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model or an adapter by name.

    Raises ToolkitError for a folder without safetensors, for a damaged file, and for an index that names files outside
    the folder, missing files, or tensors that are not in them.
    """
    index = folder / INDEX
    if os.path.lexists(index):
        return _indexed(folder, index)
    path = next((folder / name for name in (SINGLE_FILE, ADAPTER_FILE) if os.path.lexists(folder / name)), None)
    if path is None:
        raise no_safetensors(folder)
    return {name: StoredTensor(path=path, entry=entry) for name, entry in read_header(path).items()}


def check_weights(folder: Path) -> None:
    """Check the weights of a model folder before a run loads them: headers of safetensors, names in pickles.

    Raises ToolkitError as `read_weights` does, and for a pickle that names anything but tensors.
    """
    if any(os.path.lexists(folder / name) for name in (SINGLE_FILE, INDEX)):
        read_weights(folder)
        return
    pickles = sorted(folder.glob(_PICKLED))
    if not pickles:
        if any(folder.glob("*.safetensors")):
            return  # weights under names of their own
        raise ToolkitError(f"model folder {folder} has no weights (*.safetensors or *.bin)")
    for path in pickles:
        try:
            check_content(pickle_in(path), TENSORS, name=str(path))
        except ToolkitError as error:
            raise ToolkitError(error.message, hint=no_safetensors(folder).hint) from None


def no_safetensors(folder: Path) -> ToolkitError:
    """Return the error for a folder without safetensors, with what to do about weights in pickles."""
    if not any(folder.glob(_PICKLED)):
        return ToolkitError(
            f"{folder} has no {SINGLE_FILE}, {INDEX} or {ADAPTER_FILE}", hint="copy or download it again"
        )
    script = (
        "import sys; from transformers import AutoModelForCausalLM as A;"
        " A.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
    )
    return ToolkitError(
        f"{folder} has its weights in pickles ({_PICKLED}), expected safetensors: a pickle can run code",
        hint=f"convert them, which needs memory for the model: `python -c '{script}' {shlex.quote(str(folder))}`",
    )


def _indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ToolkitError(f"{index}: weight_map is {str(weight_map)[:80]}, expected a file for each tensor")
    headers: dict[str, dict[str, TensorEntry]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file or len(file) > 255:
            raise ToolkitError(
                f"{index}: weight_map.{name[:80]} is {str(file)[:80]!r}, expected the name of a file in this folder"
            )
        if file not in headers:
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise ToolkitError(f"{index}: {name[:80]} is not in {file}", hint="copy or download the folder again")
    return {
        name: StoredTensor(path=folder / file, entry=entry)
        for file, header in headers.items()
        for name, entry in header.items()
    }
