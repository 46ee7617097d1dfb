"""Where the readings of ranks differ from what a preset specifies, and the types of `attestation.json`. No torch.

>>> for difference in differences({"world_size": 2}, [RankReading.of(rank=0, world_size=1)]):
...     print(difference)
world_size on rank 0 is 1, expected 2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.parallel.layout import ParallelLayout
from toolkit.record.kernel_table import DIFFERS
from toolkit.record.reading import RankReading, Values

IN_OPTIMIZER = "trained parameters in the optimizer"
Readings = Sequence[RankReading]  # in rank order


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A value that is not as expected."""

    name: str
    rank: int | None  # None for a value of all ranks together
    expected: Any
    found: Any

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.name}{where} is {self.found}, expected {self.expected}"

    def to_json(self) -> dict[str, Any]:
        return {"fact": self.name, "rank": self.rank, "expected": self.expected, "found": self.found}


def differences(expected: Values, ranks: Readings) -> list[Difference]:
    """Return every expected value that a rank does not read; some optimizers' dtypes follow from the rank's tensors."""
    found: list[Difference] = []
    for reading in ranks:
        values = dict(expected)
        if "expected_optimizer_dtype" in reading.model_fields_set:
            values["optimizer_dtype"] = reading.expected_optimizer_dtype
        found += [
            Difference(name=name, rank=reading.rank, expected=value, found=getattr(reading, name, None))
            for name, value in values.items()
            if getattr(reading, name, None) != value
        ]
    return found


def rank_differences(name: str, ranks: Readings) -> list[Difference]:
    """Return the ranks on which a value, whatever it is, differs from rank 0's."""
    first = getattr(ranks[0], name)
    return [
        Difference(name=f"{name} (equal on all ranks)", rank=reading.rank, expected=first, found=getattr(reading, name))
        for reading in ranks
        if getattr(reading, name) != first
    ]


def optimizer_differences(ranks: Readings) -> list[Difference]:
    """Return the ranks whose optimizer misses parameters: it was made before a module was replaced, or for a part."""
    counts = [(each.rank, each.num_trainable_params, each.num_optimizer_params) for each in ranks]
    return [Difference(name=IN_OPTIMIZER, rank=r, expected=n, found=f) for r, n, f in counts if f not in (None, n)]


def kernel_differences(ranks: Readings) -> list[Difference]:
    """Return the fast paths that were asked for and did not run; a slow path that nobody asked about is none."""
    return [
        Difference(name=row["name"], rank=reading.rank, expected=row["asked"], found=row["ran"])
        for reading in ranks
        for row in reading.kernels or ()
        if row["verdict"] == DIFFERS
    ]


def replica_differences(ranks: Readings) -> list[Difference]:
    """Return ranks whose copies of weights differ; without copies, and but for stages, whose rates or steps differ."""
    found = [
        Difference(name="replicas", rank=reading.rank, expected="equal", found=reading.replicas)
        for reading in ranks
        if reading.replicas not in (None, "equal")
    ]
    first = ranks[0]
    has_copies = first.sharding == "replicate" and (first.replicas or not first.layout)
    if has_copies or (first.layout or {}).get("pp", 1) > 1:
        return found
    return found + [each for name in ("learning_rates", "optimizer_steps") for each in rank_differences(name, ranks)]


def byte_differences(ranks: Readings) -> list[Difference]:
    """Return the parts of the model states whose bytes the preset's sharding does not allow: on a rank, or together.

    The shards of all ranks must add up to the whole: none is lost or empty.
    """
    found, first = byte_limit_differences(ranks), ranks[0]
    replicas = max(1, len(ranks) // (first.dp_shard_size or len(ranks)))
    replicas = first.layout["dp_replicate"] if first.layout else replicas
    for part, whole in first.whole_bytes.items():
        total = sum(getattr(reading, f"{part}_bytes") for reading in ranks)
        if total < whole * replicas:
            expected = f"at least {whole * replicas}"
            found.append(Difference(name=f"{part}_bytes of all ranks", rank=None, expected=expected, found=total))
    return found


def byte_limit_differences(ranks: Readings) -> list[Difference]:
    """Return the parts whose bytes on one rank are outside their limits."""
    found: list[Difference] = []
    for reading in ranks:
        for part, (lowest, highest) in reading.byte_limits.items():
            held = getattr(reading, f"{part}_bytes")
            if not lowest <= held <= highest:
                allowed = lowest if lowest == highest else f"{lowest} to {highest}"
                found.append(Difference(name=f"{part}_bytes", rank=reading.rank, expected=allowed, found=held))
    return found


def pipeline_differences(ranks: Readings, layout: ParallelLayout | None) -> list[Difference]:
    """Return layers that no rank of a pipeline holds, or more than one, and parameters that are on no rank."""
    if layout is None or layout.pp == 1:
        return []
    found = []
    for first in range(0, len(ranks), layout.pp):
        pipeline = ranks[first : first + layout.pp]
        layers = sorted(layer for reading in pipeline for layer in reading.layers or ())
        if layers != list(range(len(layers))):
            found.append(Difference(name="layers of all stages", rank=None, expected="each layer once", found=layers))
        held = sum((reading.parameter_bytes or 0) - (reading.tied_copy_bytes or 0) for reading in pipeline)
        whole = 4 * (ranks[0].num_params or 0)
        if held != whole:
            found.append(Difference(name="parameter_bytes of all stages", rank=None, expected=whole, found=held))
    return found


def layout_differences(ranks: Readings, expected: ParallelLayout | None) -> list[Difference]:
    """Return ranks whose group is not the layout's, or whose rows are not the group's alone."""
    if expected is None:
        return []
    found, owner_of = [], dict[str, int]()
    size = expected.ranks_per_batch
    for reading in ranks:
        rank, rows = reading.rank, reading.first_rows_sha256 or ""
        group = list(range(first := rank - rank % size, first + size))
        if reading.batch_group != group:
            found.append(Difference(name="batch_group", rank=rank, expected=group, found=reading.batch_group))
        theirs = ranks[first].first_rows_sha256
        if rows != theirs:
            name = f"first_rows_sha256 (equal to rank {first}'s)"
            found.append(Difference(name=name, rank=rank, expected=theirs, found=rows))
        elif owner_of.setdefault(rows, first) != first:
            name = f"first_rows_sha256 (other than rank {owner_of[rows]}'s)"
            found.append(Difference(name=name, rank=rank, expected="rows of its own", found=rows))
    return found
