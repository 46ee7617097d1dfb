"""One kind of collective of an optimizer step, and what each rank sends in it.

>>> Collective(name="all_gather", purpose="parameters", payload_bytes=800, group_size=4).sent_bytes
600
"""

from __future__ import annotations

from dataclasses import dataclass

# Groups whose collectives computation waits for: the next operation reads their result.
BLOCKING = ("tp", "sp", "ep")
DIMENSION_OF_GROUP = {"all": "dp_shard", "replica": "dp_shard", "replicas": "dp_replicate"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All collectives of one kind and purpose in an optimizer step, as one rank sees them."""

    name: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `reduce`, `all_to_all`, or `permute`: each sends to the next."""
    purpose: str
    """`gradients`, `parameters in the forward`, ..."""
    payload_bytes: int
    """Complete tensors, padding included: the output of a gather, the input of a reduction; what a rank permutes."""
    group_size: int
    group: str = "all"
    """`all` ranks, the ranks of one `replica`, one rank of each of the `replicas`, or a dimension of parallelism."""
    stride: int = 1
    """Distance between two neighbours of a group, in ranks; ranks of a node are numbered one after the other."""
    calls: int = 1

    @property
    def dimension(self) -> str:
        """The dimension of the mesh that communicates: `dp_replicate`, `dp_shard`, `cp`, `sp`, `tp` or `ep`."""
        return DIMENSION_OF_GROUP.get(self.group, self.group)

    @property
    def blocks(self) -> bool:
        """True if computation waits for it, so that nothing overlaps."""
        return self.group in BLOCKING

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank of a ring sends: (N-1)/N of the payload, twice for an all-reduce; all it permutes."""
        if self.name == "permute":
            return self.payload_bytes
        passes = 2 if self.name == "all_reduce" else 1
        return self.payload_bytes * passes * (self.group_size - 1) // self.group_size
