"""What each rank must read under a preset, and where the readings differ from it. Plain values, no torch.

>>> for difference in differences({"world_size": 2}, [{"rank": 0, "world_size": 1}]):
...     print(difference)
world_size on rank 0 is 1, expected 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.observe.attest.readings import Difference, Values
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets import Preset

Readings = Sequence[Mapping[str, Any]]
"""One rank's reading each, in rank order."""


def expected_values(
    preset: Preset | None,
    world_size: int | None,
    *,
    compute_dtype: str,
    settings: Values,
    dp_shard_size: int | None = None,
    on_cpu: bool = False,
    has_frozen_weights: bool = False,
    optimizer: Values | None = None,
    layout: ParallelLayout | None = None,
) -> Values:
    """Return the values that every rank must read.

    `settings` come from the training arguments, `optimizer` from the specification of `--optim`. Without a preset only
    the settings and the world size can be checked.
    """
    expected = dict(settings)
    if world_size is not None:
        expected["world_size"] = world_size
    if preset is None:
        return expected
    if preset.replicas > 1 and dp_shard_size is not None:
        expected["dp_shard_size"] = dp_shard_size
    # accelerate 1.15 wraps a single process in DDP on a CPU only.
    unwrapped = preset.engine == "ddp" and world_size == 1 and not on_cpu
    if layout is not None:
        expected["layout"] = layout.degrees()
        unwrapped = preset.sharded_at_load and layout.data_parallel_size == 1  # nothing is left to shard
    if has_frozen_weights:
        expected["frozen_dtype"] = compute_dtype
    return expected | {
        "engine": "none" if unwrapped else preset.engine,
        "sharding": preset.sharding,
        "offload_optimizer": preset.offload_optimizer,
        "offload_param": preset.offload_param,
        "compute_dtype": compute_dtype,
        "master_dtype": "float32",  # docs/concepts/numerics.md
        **({"optimizer_dtype": "float32"} if optimizer is None else optimizer),
    }


def differences(expected: Values, ranks: Readings) -> list[Difference]:
    """Return every expected value that a rank does not read."""
    return [
        Difference(name=name, rank=reading["rank"], expected=value, found=reading.get(name))
        for reading in ranks
        for name, value in expected.items()
        if reading.get(name) != value
    ]


def rank_differences(name: str, ranks: Readings) -> list[Difference]:
    """Return the ranks on which a value, whatever it is, differs from rank 0's."""
    first = ranks[0].get(name)
    return [
        Difference(name=f"{name} (equal on all ranks)", rank=reading["rank"], expected=first, found=reading.get(name))
        for reading in ranks
        if reading.get(name) != first
    ]


def byte_differences(ranks: Readings) -> list[Difference]:
    """Return the parts of the model states whose bytes the preset's sharding does not allow."""
    return byte_limit_differences(ranks) + _missing_bytes(ranks)


def byte_limit_differences(ranks: Readings) -> list[Difference]:
    """Return the parts whose bytes on one rank are outside their limits."""
    found: list[Difference] = []
    for reading in ranks:
        for part, (lowest, highest) in reading["byte_limits"].items():
            name, held = f"{part}_bytes", reading[f"{part}_bytes"]
            if not lowest <= held <= highest:
                allowed = lowest if lowest == highest else f"{lowest} to {highest}"
                found.append(Difference(name=name, rank=reading["rank"], expected=allowed, found=held))
    return found


def _missing_bytes(ranks: Readings) -> list[Difference]:
    """The shards of all ranks must add up to the whole: none is lost or empty."""
    found: list[Difference] = []
    replicas = max(1, len(ranks) // (ranks[0].get("dp_shard_size") or len(ranks)))
    if ranks[0].get("layout"):
        replicas = ranks[0]["layout"]["dp_replicate"]
    for part, whole in ranks[0]["whole_bytes"].items():
        total = sum(reading[f"{part}_bytes"] for reading in ranks)
        if total < whole * replicas:
            expected = f"at least {whole * replicas}"
            found.append(Difference(name=f"{part}_bytes of all ranks", rank=None, expected=expected, found=total))
    return found


def pipeline_differences(ranks: Readings, layout: ParallelLayout | None) -> list[Difference]:
    """Return layers that no rank of a pipeline holds, or more than one, and parameters that are on no rank."""
    if layout is None or layout.pp == 1:
        return []
    found = []
    for first in range(0, len(ranks), layout.pp):
        pipeline = ranks[first : first + layout.pp]
        layers = sorted(layer for reading in pipeline for layer in reading["layers"])
        if layers != list(range(len(layers))):
            found.append(Difference(name="layers of all stages", rank=None, expected="each layer once", found=layers))
        held = sum(reading["parameter_bytes"] - reading["tied_copy_bytes"] for reading in pipeline)
        whole = 4 * ranks[0]["num_params"]
        if held != whole:
            found.append(Difference(name="parameter_bytes of all stages", rank=None, expected=whole, found=held))
    return found
