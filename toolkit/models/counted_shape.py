"""Shape and activations of an architecture without formulas: counted by transformers in a child process, and cached.

The child (`python -m toolkit.models.count_from_transformers`) imports torch and takes 10 to 30 s. Its answer depends on
the configuration, on the counting code and on the installed libraries only, so it is stored under a hash of these in
`cache_folder() / "counted-models"` and read in a millisecond from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from toolkit.cache import cache_folder
from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.json_files import parse_json, read_json
from toolkit.models.saved_activations import read_counted
from toolkit.models.shape import Adapter, ModelShape, Tensor
from toolkit.versions import installed_version

COUNTING_SECONDS = 300
COUNTING_MODULES = ("count_from_transformers", "count_activations", "fake_tensors")
COUNTING_LIBRARIES = ("transformers", "torch", "peft")
MAX_REASON = 300  # characters of what transformers says


Saved = tuple[int, int, float]
"""Constant bytes, bytes per token, and bytes per token and position."""


class CountedRow(TypedDict):
    """Activations under one compute dtype, method and mask."""

    autocast: bool
    lora: bool
    mask: str
    per_rank: bool
    layers: Saved
    largest_layer: Saved
    backward: Saved
    outer: Saved
    logit_bytes: int


class Counted(TypedDict):
    """The answer of the child process: fields of `ModelShape`, with its layers by kind."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gated_mlp: bool
    tied_embeddings: bool
    num_experts: int | None
    experts_per_token: int | None
    attention: str | None
    activation: str
    sliding_window: int | None
    layers_of_kind: list[list[tuple[str, list[int], bool]]]
    kind_of_layer: list[int]
    outer: list[tuple[str, list[int], bool]]
    activations: list[CountedRow]
    counted_rank: int
    why_not_counted: str | None
    adapters_of_layer: list[list[tuple[str, int, int, int]]]
    outer_adapters: list[tuple[str, int, int, int]]
    renamed_targets: dict[str, str]
    why_no_adapters: NotRequired[str | None]


def count_shape(config: Path, values: Mapping[str, Any], *, hint: str | None = None) -> ModelShape:
    """Return the shape of the model that `config` describes; `values` are its fields.

    Raises ToolkitError, with the hint, if transformers cannot build a language model from it.
    """
    path = cached_count(values)
    with contextlib.suppress(ToolkitError):  # missing, or damaged: count again
        return shape_from_counted(read_json(path))
    counted = _run_child(config, hint)
    shape = shape_from_counted(counted)
    with contextlib.suppress(OSError):  # a read-only cache is no error
        write_text(path, json.dumps(counted))
    return shape


def cached_count(values: Mapping[str, Any]) -> Path:
    """Return the path of the cache entry of a configuration, whether or not it exists.

    The name is a hash of everything that decides the answer, so an upgrade of a library counts again.
    """
    versions = {library: installed_version(library) for library in COUNTING_LIBRARIES}
    digest = hashlib.sha256(json.dumps([values, versions], sort_keys=True).encode())
    for module in COUNTING_MODULES:
        digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return cache_folder() / "counted-models" / f"{digest.hexdigest()}.json"


def _run_child(config: Path, hint: str | None) -> Any:
    command = [sys.executable, "-m", "toolkit.models.count_from_transformers", str(config)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,  # a library that would ask a question gets no answer
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=COUNTING_SECONDS,
            check=False,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        raise ToolkitError(f"{config}: transformers did not build the model within {COUNTING_SECONDS} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
        raise ToolkitError(
            f"{config}: transformers cannot build a language model from it: {reason[:MAX_REASON]}",
            hint=None if hint is None else f"architectures that need no transformers: {hint}",
        )
    lines = done.stdout.splitlines()
    return parse_json(lines[-1] if lines else "", f"{config}: what transformers counted")


def shape_from_counted(counted: Any) -> ModelShape:
    """Return the shape that the child process describes. Raises ToolkitError for anything else."""
    from pydantic import TypeAdapter, ValidationError

    try:
        fields: dict[str, Any] = dict(TypeAdapter(Counted).validate_python(counted))
        return _shape(fields)
    except (ValidationError, LookupError, ValueError) as error:
        raise ToolkitError(f"counted tensors are damaged: {' '.join(str(error).split())[:MAX_REASON]}") from None


def _shape(fields: dict[str, Any]) -> ModelShape:
    kinds = [tuple(map(_tensor, layer)) for layer in fields.pop("layers_of_kind")]
    layers = tuple(kinds[number] for number in fields.pop("kind_of_layer"))
    outer = tuple(map(_tensor, fields.pop("outer")))
    activations = read_counted(fields.pop("activations"), fields.pop("counted_rank"))
    adapters = [tuple(map(_adapter, layer)) for layer in fields.pop("adapters_of_layer")]
    outer_adapters = tuple(map(_adapter, fields.pop("outer_adapters")))
    return ModelShape(
        **fields,
        layers=layers,
        outer=outer,
        counted_on="meta device",
        counted_activations=activations,
        counted_adapters=dict(zip(layers, adapters, strict=True)),  # layers with equal tensors have equal adapters
        outer_adapters=outer_adapters,
    )


def _tensor(named: tuple[str, list[int], bool]) -> Tensor:
    name, shape, in_linear = named
    return Tensor(name=name, shape=tuple(shape), in_linear=in_linear)


def _adapter(sizes: tuple[str, int, int, int]) -> Adapter:
    target, rows, columns, rank = sizes
    return Adapter(target=target, rows=rows, columns=columns, rank_multiple=rank)
