"""What an engine decides of a plan: the bytes that one rank holds and sends, and what of a job decides them."""

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from toolkit.parallel.pipeline_schedule import PipelineSettings

ADAM_STATES = 2  # momentum and variance
ACTIVATION_BYTES = 4  # the residual stream between layers, also under autocast
# Groups whose collectives computation waits for: the next operation reads their result.
BLOCKING = ("tp", "sp", "ep")
DIMENSION_OF_GROUP = {"all": "dp_shard", "replica": "dp_shard", "replicas": "dp_replicate"}


class PlannedBatch(Protocol):
    """What of a job decides buffers and collectives."""

    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def optim(self) -> str: ...
    @property
    def has_bucket_views(self) -> bool: ...
    @property
    def keeps_whole_gradients(self) -> bool: ...
    @property
    def activation_checkpointing(self) -> bool: ...
    @property
    def tokens_per_micro_batch(self) -> int: ...
    @property
    def pipeline(self) -> PipelineSettings | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Bytes of one rank, on the GPU, in host memory or on disk: what the attestation counts."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    persistent_bytes: int = 0
    """Part of `parameter_bytes` that stays on the GPU with offload: small parameters that ZeRO-3 keeps whole, in
    addition to their shards, and the constants of 4-bit weights."""

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBuffers:
    """Bytes on the GPU, by the time at which they are allocated."""

    lasting_bytes: int = 0  # during the entire run
    waiting_bytes: int = 0  # until the last accumulation step is reduced: buckets beside the gradients that wait
    load_bytes: int = 0  # while the engine is built, in addition to the parameters
    start_bytes: int = 0  # before the first layer's forward
    forward_layer_bytes: int = 0  # while one layer runs forward
    forward_bytes: int = 0  # at the end of the forward
    loss_bytes: int = 0  # between forward and backward
    backward_bytes: int = 0  # while the last layer runs backward, which is the first to do so
    midway_bytes: int = 0  # in addition, while ZeRO-3 prefetches head (forward) or embedding (backward) beside layers
    first_layer_bytes: int = 0  # while the first layer runs backward
    end_bytes: int = 0  # after the backward of the layers, while an embedding's gradient is computed
    accumulated_bytes: int = 0  # FSDP2's unsharded gradients (`--accumulate whole`), up to the last accumulation step
    step_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind and purpose in an optimizer step, as one rank sees them."""

    name: str  # `all_reduce`, `all_gather`, `reduce_scatter`, `reduce`, `all_to_all`, or `permute`: to the next
    purpose: str
    payload_bytes: int
    """Complete tensors, padding included: the output of a gather, the input of a reduction; what a rank permutes."""
    calls: int = 1
    _: KW_ONLY
    group_size: int
    group: str = "all"
    """`all` ranks, the ranks of one `replica`, one rank of each of the `replicas`, or a dimension of parallelism."""
    stride: int = 1  # distance between neighbours of a group, in ranks, which are numbered node by node

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
        return self.payload_bytes * self.passes * (self.group_size - 1) // self.group_size

    @property
    def passes(self) -> int:
        """Times that a ring goes round: an all-reduce reduces, then gathers."""
        return 2 if self.name == "all_reduce" else 1


def round_up(size: int, multiple: int) -> int:
    """Return the size, padded to a multiple.

    >>> round_up(5, 4)
    8
    """
    return -(-size // multiple) * multiple
