"""What a script adds to the observer of its Trainer: what should be read, more readers, its own way to count a batch.

Every field has a default that fits any Trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from toolkit.observe.batches import CountBatch
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets.spec import PresetSpec
from toolkit.record.reading import RankReading, Values


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedRun:
    """What the live objects are verified against; without a preset, only `settings` and the world size are."""

    preset: PresetSpec | None = None
    world_size: int | None = None
    dp_shard_size: int | None = None  # ranks that share one copy of the model in a hybrid mesh
    layout: ParallelLayout | None = None  # degrees of parallelism; None for data parallelism alone
    layout_at_load: ParallelLayout | None = None
    """The layout in which transformers shards the model while it loads it; None for any other model."""
    own_optimizer: bool = False  # the script makes its optimizer itself, whatever `--optim` names
    made_optimizer: str | None = None
    """Class of an optimizer that the script has given to its Trainer: transformers drops it under DeepSpeed."""
    of_script: bool = False
    """True for somebody's script, which may do more than the preset specifies: checkpointing of its own, an optimizer
    over a part of the parameters, gradients that it changes. That is recorded, and no deviation."""
    settings: Values = field(default_factory=dict)  # more readings, by name, that the script's arguments determine
    allowed: Values = field(default_factory=dict)  # readings that the user has allowed, by name

    @classmethod
    def of_preset(cls, preset: PresetSpec | None, world_size: int) -> Self:
        """Return what a preset specifies for a script that is not ours; nothing without one."""
        if preset is None:
            return cls()
        return cls(preset=preset, world_size=world_size, dp_shard_size=preset.dp_shard_size(world_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserverParts:
    """Extension points of the observer; `trainer` is the observed Trainer, `plain` its model without wrappers."""

    expected: ExpectedRun = ExpectedRun()
    read: Sequence[Callable[[Any, Any], RankReading]] = ()
    """Readers after the first step, called with `trainer` and `plain`."""
    read_before_training: Callable[[Any], RankReading] = lambda _: RankReading()
    """A reader that needs forwards of its own, called with `trainer`; it may raise AttestationFailed."""
    reduce_dtype: Callable[[Any], str | None] = lambda _: None
    """The dtype in which the wrapped model's ranks exchange gradients, where the script itself sends them."""
    batch_facts: CountBatch | None = None
    """Counts in the collator, which has the rows; None counts what the batches of any script show, beside them."""
    counts_tokens: bool = True  # False on a rank that trains on the rows of another one: their tokens are counted there
    compiles: bool = False  # True if layers are compiled: rows count what the compiler does
    manifest: Callable[[], Values] = dict  # more entries of a checkpoint's manifest
    save_states: Callable[[Path], None] = lambda _: None
    """Writes this rank's further states into the folder of a checkpoint."""
