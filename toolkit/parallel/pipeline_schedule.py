"""How the layers of a model are divided into the stages of a pipeline, and in which order the stages compute. No torch.

>>> settings = PipelineSettings(ranks=2, schedule="interleaved_1f1b", chunks=2)
>>> [settings.rank_of(stage) for stage in range(settings.stages)]
[0, 1, 0, 1]
>>> divide_layers(30, 4)
[range(0, 8), range(8, 16), range(16, 23), range(23, 30)]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved_1f1b"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
DEFAULT_SCHEDULE = ONE_F_ONE_B
INTERLEAVED_CHUNKS = 2  # stages per rank of the interleaved schedule, unless `--pipeline_chunks` says otherwise
# Architectures whose stages compute what the whole model computes: tests/parallel/test_pipeline_stages.py.
PIPELINED_TYPES = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """The stages of a pipeline and their schedule."""

    ranks: int  # ranks of one pipeline: `--pp`
    schedule: str = DEFAULT_SCHEDULE
    chunks: int = 1  # stages on each rank

    @classmethod
    def of(cls, *, ranks: int, schedule: str | None, chunks: int | None) -> PipelineSettings:
        """Return the settings with defaults for what is not given."""
        named = schedule or DEFAULT_SCHEDULE
        default = INTERLEAVED_CHUNKS if named == INTERLEAVED else 1
        return cls(ranks=ranks, schedule=named, chunks=chunks or default)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that computes a stage: the interleaved schedule deals stages out in turn."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages that a rank computes."""
        return range(rank, self.stages, self.ranks)

    def per_round(self, micro_batches: int) -> int:
        """Return the micro-batches that go through one stage of a rank before they go through its next stage."""
        interleaved = self.schedule == INTERLEAVED
        return micro_batches // (interleaved_rounds(micro_batches, ranks=self.ranks) if interleaved else 1)

    def warmup(self, rank: int, micro_batches: int) -> int:
        """Return the forwards of a rank before its forwards and backwards take turns.

        GPipe runs those of all micro-batches; 1F1B one per stage after this one; interleaved 1F1B
        (https://arxiv.org/abs/2104.04473, section 2.2) more, since it has several stages to fill.
        """
        later = self.ranks - 1 - rank
        if self.schedule == INTERLEAVED:
            return (self.chunks - 1) * self.per_round(micro_batches) + 2 * later
        return micro_batches if self.schedule == GPIPE else later

    def in_flight(self, rank: int, micro_batches: int) -> int:
        """Return the most activations of one stage and one micro-batch that a rank holds at once."""
        return min(self.warmup(rank, micro_batches) + 1, self.chunks * micro_batches)

    def bubble_factor(self, micro_batches: int, *, slowest: float = 1.0) -> float:
        """Return how many times longer a step takes than the mean work of a rank.

        All wait for the slowest, whose work is `slowest` times the mean; filling and draining the pipeline takes
        (p - 1) / (v m) of the mean work for p ranks, v stages on each and m micro-batches (section 2.2 of
        https://arxiv.org/abs/2104.04473). `toolkit.simulate` runs the operations instead.

        >>> PipelineSettings(ranks=4).bubble_factor(12)
        1.25
        """
        return slowest + (self.ranks - 1) / (self.chunks * micro_batches)

    def problem(self, *, micro_batches: int, layers: int | None = None) -> tuple[str, str] | None:
        """Return why accumulation steps (`micro_batches`) and layers do not fit, and what to type instead; or None."""
        named = f"--pipeline_schedule {self.schedule}"
        if self.schedule == INTERLEAVED and self.chunks == 1:
            return f"{named} interleaves two stages per GPU or more", f"`--pipeline_chunks {INTERLEAVED_CHUNKS}`"
        if self.schedule != INTERLEAVED and self.chunks > 1:
            return f"{named} has one stage per GPU", "`--pipeline_schedule interleaved_1f1b`"
        if layers is not None and self.stages > layers:
            return f"{self.stages} stages of a model with {layers} layers", f"`--pp {max(1, layers // self.chunks)}`"
        option = "--gradient_accumulation_steps"
        if self.schedule == ONE_F_ONE_B and micro_batches < self.ranks:
            why = f"--pipeline_schedule 1f1b fills {self.ranks} stages with {micro_batches} micro-batches ({option})"
            return f"{why}: too few", f"`{option} {self.ranks}`, or more; or `--pipeline_schedule gpipe`"
        rounds = interleaved_rounds(micro_batches, ranks=self.ranks)
        if self.schedule == INTERLEAVED and micro_batches % rounds:
            why = f"{option} {micro_batches} cannot be dealt out to {self.ranks} GPUs in {rounds} equal rounds"
            return why, f"`{option} {micro_batches - micro_batches % self.ranks}`"
        return None


def interleaved_rounds(micro_batches: int, *, ranks: int) -> int:
    """Return the rounds of the interleaved schedule: in each, every chunk gets the same micro-batches in succession."""
    return max(1, micro_batches // ranks)


def divide_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage; the first have one more, since the last computes the head as well."""
    each, rest = divmod(layers, stages)
    ends = [each * stage + min(stage, rest) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
