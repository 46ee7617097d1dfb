"""What a checkpoint's `manifest.json` holds, as every reader gets it: checked values of one type."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, TypeAdapter, field_validator

from toolkit.errors import ToolkitError
from toolkit.files.json_files import as_mapping, read_json_object
from toolkit.files.value_limits import Limits, validate
from toolkit.parallel.layout import DIMENSIONS

# A DeepSpeed checkpoint of 10,000 parameters for any number of ranks has 40,000 files.
_LIMITS = Limits(values=1_000_000, depth=16)
_LARGEST = 2**53

Count = Annotated[StrictInt, Field(ge=0, le=_LARGEST)]
Positive = Annotated[StrictInt, Field(ge=1, le=_LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class FileEntry(_Record):
    """One file of a checkpoint."""

    path: StrictStr
    """Relative to the checkpoint, and inside of it."""
    bytes: Count
    sha256: StrictStr

    @field_validator("path")
    @classmethod
    def _is_inside(cls, path: str) -> str:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path or max(map(len, parts)) > 255:
            raise ValueError("the name of a file inside the checkpoint")
        return path


class Fingerprint(_Record):
    """The live model's logits for fixed tokens."""

    input_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=4096)]
    logits: Annotated[tuple[Number, ...], Field(min_length=1, max_length=4096)]
    compute_dtype: StrictStr | None = None
    load_in_4bit: StrictBool = False
    four_bit_matmul: StrictStr | None = None
    """How 4-bit layers computed: `dequantized` or `packed_bf16`; None without them."""
    """True if the base model of an adapter was in 4 bits."""


class ConvertedFrom(_Record):
    """The checkpoint that a converted one was made from."""

    path: StrictStr
    preset: StrictStr | None = None
    engine: StrictStr | None = None
    world_size: Positive | None = None


class Manifest(_Record):
    """The content of `manifest.json`; keys that are not known here are kept."""

    schema_version: Count = 1
    step: Count
    """Completed optimizer steps."""
    preset: StrictStr | None = None
    engine: StrictStr | None = None
    sharding: StrictStr | None = None
    world_size: Positive | None = None
    layout: dict[str, Positive] | None = None
    """Degrees of parallelism; None for data parallelism alone."""
    pipeline_chunks: Positive | None = None
    """Stages on each rank of a pipeline; None without one."""
    data_parallel_size: Positive | None = None
    sharded_at_load: StrictBool = False
    compute_dtype: StrictStr | None = None
    num_params: Count | None = None
    num_trainable_params: Count | None = None
    adapter: StrictBool | None = None
    model_name_or_path: StrictStr | None = None
    per_device_train_batch_size: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    global_batch_size: Positive | None = None
    optim: StrictStr | None = None
    seed: StrictInt | None = None
    streaming_buffer_size: Count | None = None
    dataset_weights: tuple[Number, ...] | None = None
    fingerprint: Fingerprint | None = None
    universal: StrictBool = False
    """In DeepSpeed's layout for any number of ranks."""
    converted_from: ConvertedFrom | None = None
    files: tuple[FileEntry, ...]
    sha256: StrictStr | None = None

    @field_validator("layout")
    @classmethod
    def _has_known_dimensions(cls, layout: dict[str, int] | None) -> dict[str, int] | None:
        if not set(layout or ()) <= set(DIMENSIONS):
            raise ValueError(f"degrees of {', '.join(DIMENSIONS)}")
        return layout and {name: layout.get(name, 1) for name in DIMENSIONS}  # an older one knows fewer

    @property
    def sequences_per_step(self) -> int | None:
        """Sequences of an optimizer step over all ranks; None where they are not recorded."""
        ranks = self.data_parallel_size or self.world_size
        sizes = [self.per_device_train_batch_size, self.gradient_accumulation_steps, ranks]
        known = [size for size in sizes if size is not None]
        return self.global_batch_size or (math.prod(known) if len(known) == len(sizes) else None)


_MANIFEST, _FINGERPRINT = TypeAdapter(Manifest), TypeAdapter(Fingerprint)


def read_manifest(path: Path) -> tuple[Manifest, dict[str, Any]]:
    """Return a manifest, and the same as it was written. Raises ToolkitError, also for a wrong checksum."""
    content = read_json_object(path, limits=_LIMITS)
    manifest = validate(_MANIFEST, content, str(path))
    if manifest.sha256 is not None and manifest.sha256 != manifest_sha256(content):
        raise ToolkitError(f"{path} is damaged (checksum)")
    return manifest, content


def read_fingerprint(path: Path) -> Fingerprint:
    """Return what was recorded beside a model. Raises ToolkitError."""
    return validate(_FINGERPRINT, read_json_object(path, limits=_LIMITS), str(path))


def read_step(trainer_state: Path) -> int:
    """Return the step in the Trainer's own state. Raises ToolkitError."""
    state = as_mapping(read_json_object(trainer_state, allow_nan=True), str(trainer_state))
    return validate(TypeAdapter(Count), state.get("global_step"), f"{trainer_state}: global_step")


def manifest_sha256(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own checksum."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
