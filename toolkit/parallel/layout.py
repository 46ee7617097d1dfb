"""How a run's ranks are divided among the dimensions of parallelism.

>>> layout = divide_ranks(("dp_shard", "tp"), {"tp": 2}, world_size=8)
>>> layout.dp_shard, layout.data_parallel_size
(4, 4)

A preset's file names the dimensions (`parallel`, from the outermost to the innermost); their degrees are the machine's,
and are given on the command line. The ranks that remain are data parallel.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARALLEL_KEY = "parallel"  # key of an engine's block in a preset's YAML, which accelerate's launcher passes over
DIMENSIONS = ("dp_replicate", "dp_shard", "pp", "cp", "sp", "tp", "ep")
"""From the outermost to the innermost; `ep` divides the ranks of `dp_shard` and `tp` again, for experts only."""
DEGREES = ("pp", "tp", "cp", "sp", "ep", "dp_replicate")  # degrees that a user gives; `dp_shard` is what remains
# Ranks that train on the same rows: each computes some layers, a part of each layer, or a part of the sequence.
SAME_ROWS = ("pp", "cp", "sp", "tp")
NAMES = {
    "pp": "pipeline parallelism",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "sp": "sequence parallelism",
    "ep": "expert parallelism",
    "dp_replicate": "replicas of a sharded model",
}
DEFAULT_REPLICAS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Degrees of parallelism of a run; their product, without `ep`, is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.ranks_per_batch

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that train on different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that train on the same rows; they are neighbours."""
        return self.pp * self.cp * self.sp * self.tp

    @property
    def splits_head(self) -> bool:
        """True where no rank has the whole head and what it reads: its loss is computed from the full logits."""
        return self.pp * self.tp > 1

    @property
    def pieces(self) -> int:
        """What the length of a padded row must be a multiple of: ring attention gives each rank two pieces."""
        return 2 * self.cp if self.cp > 1 else self.sp

    @property
    def expert_shard(self) -> int:
        """Ranks that share the experts of one rank of `ep`."""
        return self.dp_shard * self.tp // self.ep

    def degrees(self) -> dict[str, int]:
        """Return every degree by name, from the outermost dimension to the innermost."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def __str__(self) -> str:
        """The degrees above 1: `dp_shard 4 x tp 2`."""
        return " x ".join(f"{name} {size}" for name, size in self.degrees().items() if size > 1) or "one rank"


def divide_ranks(parallel: Sequence[str], degrees: Mapping[str, int | None], *, world_size: int) -> ParallelLayout:
    """Divide the ranks of a preset with the dimensions `parallel`; degrees that are not given are 1."""
    given = {name: degrees.get(name) or 1 for name in parallel if name in DEGREES}
    rest = world_size // math.prod(given.get(name, 1) for name in SAME_ROWS)
    if "dp_shard" not in parallel:
        return ParallelLayout(**{**given, "dp_replicate": rest})
    if "dp_replicate" in parallel:
        given["dp_replicate"] = degrees.get("dp_replicate") or DEFAULT_REPLICAS
    return ParallelLayout(**given, dp_shard=rest // given.get("dp_replicate", 1))
