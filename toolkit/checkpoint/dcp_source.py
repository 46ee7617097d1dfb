"""Read a FSDP2 checkpoint (torch's distributed checkpoints) in one process, one parameter at a time."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from toolkit.checkpoint.layout import FSDP_MODEL, FSDP_OPTIMIZER, Layout
from toolkit.checkpoint.names import without_adapter_name

STATE_PREFIX = ("optimizer", "state")


class DcpSource:
    """`pytorch_model_fsdp_0/` and `optimizer_0/`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.model = _Folder(layout.path / FSDP_MODEL)
        self.optimizer = _Folder(layout.path / FSDP_OPTIMIZER)
        self.hyperparameters = self._hyperparameters()

    @cached_property
    def keys(self) -> dict[str, str]:
        """Parameter name to key; adapters are saved without their name, which optimizer states keep."""
        saved = {key.removeprefix("model."): key for key in self.model.keys}
        optimized = {without_adapter_name(name): name for name in self.optimized() or []}
        return {optimized.get(name, name): key for name, key in saved.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.model.shape(key) for name, key in self.keys.items()}

    def optimized(self) -> list[str] | None:
        paths = self.optimizer.paths.values()
        return [str(path[2]) for path in paths if path[:2] == STATE_PREFIX and path[3] == "exp_avg"]

    def weight(self, name: str) -> torch.Tensor:
        return self.model.read(self.keys[name])

    def moment(self, name: str, state: str) -> torch.Tensor:
        return self.optimizer.read(f"optimizer.state.{name}.{state}")

    def optimizer_step(self) -> float:
        first = (self.optimized() or [""])[0]
        return float(self.optimizer.read(f"optimizer.state.{first}.step"))

    def close(self) -> None:
        """Nothing stays open."""

    def _hyperparameters(self) -> list[dict[str, Any]]:
        groups: dict[int, dict[str, Any]] = {}
        for key, path in self.optimizer.paths.items():
            if path[:2] == ("optimizer", "param_groups") and path[3] != "params":
                groups.setdefault(int(path[2]), {})[str(path[3])] = self.optimizer.read(key)
        return [groups[number] for number in sorted(groups)]


class _Folder:
    """One distributed checkpoint, its metadata read once."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.metadata = dcp.FileSystemReader(path).read_metadata() if path.is_dir() else None

    @property
    def keys(self) -> list[str]:
        return [] if self.metadata is None else list(self.metadata.state_dict_metadata)

    @property
    def paths(self) -> dict[str, Any]:
        return {} if self.metadata is None else dict(self.metadata.planner_data or {})

    def shape(self, key: str) -> tuple[int, ...]:
        assert self.metadata is not None
        return tuple(self.metadata.state_dict_metadata[key].size)

    def read(self, key: str) -> Any:
        assert self.metadata is not None
        entry = self.metadata.state_dict_metadata[key]
        plain = isinstance(entry, BytesStorageMetadata)
        wanted: dict[str, Any] = {key: None if plain else torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there, which is meant
            dcp.load(wanted, storage_reader=_Reader(self.path, self.metadata), no_dist=True)
        return wanted[key]


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader, told the metadata instead of reading it for every tensor."""

    def __init__(self, path: Any, metadata: Any) -> None:
        super().__init__(path)
        self.known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self.known
