"""Hold what every rank read against what the preset promises. Plain values in, differences out.

>>> differences({"world_size": 2}, [{"rank": 0, "world_size": 1}])
[{'fact': 'world_size', 'rank': 0, 'promised': 2, 'found': 1}]
"""

from __future__ import annotations

from typing import Any

from toolkit.presets import Preset

Facts = dict[str, Any]


def promised_facts(
    preset: Preset | None,
    world_size: int | None,
    *,
    compute_dtype: str,
    asked: Facts,
    dp_shard_size: int | None = None,
    on_cpu: bool = False,
) -> Facts:
    """Facts that must hold on every rank. `asked` is what the training arguments ask for."""
    promised = dict(asked)
    if world_size is not None:
        promised["world_size"] = world_size
    if preset is None:
        return promised
    if preset.replicas > 1 and dp_shard_size is not None:
        promised["dp_shard_size"] = dp_shard_size
    # accelerate 1.15 wraps a process alone in DDP on a CPU only; with a GPU there is nobody to reduce with.
    alone = preset.engine == "ddp" and world_size == 1 and not on_cpu
    return promised | {
        "engine": "none" if alone else preset.engine,
        "sharding": preset.sharding,
        "offload_optimizer": preset.offload_optimizer,
        "offload_param": preset.offload_param,
        "compute_dtype": compute_dtype,
        "master_dtype": "float32",  # the numerics contract
        "optimizer_dtype": "float32",
    }


def differences(promised: Facts, ranks: list[Facts]) -> list[Facts]:
    """Each promised fact that a rank does not show."""
    return [
        {"fact": fact, "rank": facts["rank"], "promised": value, "found": facts.get(fact)}
        for facts in ranks
        for fact, value in promised.items()
        if facts.get(fact) != value
    ]


def byte_differences(ranks: list[Facts]) -> list[Facts]:
    """Parts of the model states whose bytes are outside the limits, or whose shards do not add up to the whole."""
    return limit_differences(ranks) + _missing_bytes(ranks)


def limit_differences(ranks: list[Facts]) -> list[Facts]:
    """Parts whose bytes on a rank are outside the limits of its sharding."""
    found: list[Facts] = []
    for facts in ranks:
        for part, (lowest, highest) in facts["byte_limits"].items():
            held = facts[f"{part}_bytes"]
            if not lowest <= held <= highest:
                promised = lowest if lowest == highest else f"{lowest} to {highest}"
                found.append({"fact": f"{part}_bytes", "rank": facts["rank"], "promised": promised, "found": held})
    return found


def _missing_bytes(ranks: list[Facts]) -> list[Facts]:
    """Shards of all ranks must add up to the whole: none lost, none empty."""
    found: list[Facts] = []
    for part, whole in ranks[0]["whole_bytes"].items():
        total = sum(facts[f"{part}_bytes"] for facts in ranks)
        whole *= max(1, len(ranks) // (ranks[0].get("dp_shard_size") or len(ranks)))  # each replica has all of it
        if total < whole:
            promised = f"at least {whole}"
            found.append({"fact": f"{part}_bytes of all ranks", "rank": None, "promised": promised, "found": total})
    return found


def unequal(fact: str, ranks: list[Facts]) -> list[Facts]:
    """A fact that must be the same on every rank, whatever it is."""
    first = ranks[0].get(fact)
    return [
        {"fact": f"{fact} (equal on all ranks)", "rank": facts["rank"], "promised": first, "found": facts.get(fact)}
        for facts in ranks
        if facts.get(fact) != first
    ]


def describe(difference: Facts) -> str:
    """One difference as a sentence."""
    where = "" if difference["rank"] is None else f" on rank {difference['rank']}"
    return f"{difference['fact']}{where} is {difference['found']}, promised {difference['promised']}"
