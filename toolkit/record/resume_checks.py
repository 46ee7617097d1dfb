"""Whether a run may resume from a checkpoint: its shards fit, and data and optimizer continue where they stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from toolkit.errors import ToolkitError
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, same_states
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import DEFAULT_SCHEDULE, INTERLEAVED
from toolkit.presets.spec import PresetSpec
from toolkit.record.checkpoints import Checkpoint, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout:
    """How the run that resumes holds model and optimizer states."""

    engine: str
    sharding: str
    world_size: int
    layout: ParallelLayout | None = None
    sharded_at_load: bool = False

    @classmethod
    def of(cls, preset: PresetSpec, *, num_processes: int, degrees: Mapping[str, int]) -> Self:
        """Return the layout of a preset with these degrees of parallelism."""
        return cls(
            engine=preset.engine,
            sharding=preset.sharding,
            world_size=num_processes,
            layout=preset.layout(num_processes, degrees),
            sharded_at_load=preset.sharded_at_load,
        )

    def differences(self, found: Manifest) -> dict[str, tuple[Any, Any]]:
        """Return what makes a checkpoint not fit, with the values then and now; empty for one that is loaded as it is.

        One of a model that was sharded at load fits every other such layout.
        """
        if found.sharded_at_load and self.sharded_at_load:
            return {}
        holds = {True: "sharded at load", False: "sharded by its engine"}
        then, now = found.layout, None if self.layout is None else self.layout.degrees()
        values: dict[str, tuple[Any, Any]] = {
            "engine": (found.engine, self.engine),
            "sharding": (found.sharding, self.sharding),
            "world_size": (found.world_size, self.world_size),
            "model": (holds[found.sharded_at_load], holds[self.sharded_at_load]),
            "layout": (_degrees(then), _degrees(now)),
        }
        every_rank_loads_the_same = {self.engine, found.engine} <= {"none", "ddp"}
        if every_rank_loads_the_same:
            del values["engine"]
        if then == now and (every_rank_loads_the_same or _fits_any_world_size(found)):
            del values["world_size"]
        return {name: both for name, both in values.items() if both[0] != both[1]}


def _fits_any_world_size(found: Manifest) -> bool:
    """True where each rank finds its shard by itself: in DeepSpeed's universal layout, or in a distributed checkpoint
    of states that have one fp32 number per element of a parameter."""
    if found.engine == "deepspeed":
        return found.universal
    optimizer = OPTIMIZERS.get(found.optim or "")
    return found.sharding != "hybrid_shard" and optimizer is not None and optimizer.is_fp32_adamw


def _degrees(degrees: Mapping[str, int] | None) -> str:
    return "data parallelism" if degrees is None else str(ParallelLayout(**degrees))


def check_same_layout(checkpoint: Checkpoint, target: TargetLayout) -> None:
    """Raise ToolkitError for a checkpoint whose shards do not fit the run."""
    found = _manifest(checkpoint)
    differing = [f"{name} {then}, not {now}" for name, (then, now) in target.differences(found).items()]
    if differing:
        raise ToolkitError(
            f"{checkpoint.path} was written with {'; '.join(differing)}: its shards do not fit this run",
            hint=f"resume with `--preset {found.preset}` and `--num-processes {found.world_size}`; or convert it:"
            " `toolkit checkpoint convert`",
        )


def check_resume_settings(
    checkpoint: Checkpoint,
    *,
    global_batch_size: int,
    seed: int,
    max_steps: int,
    data_parallel_size: int,
    optim: str = DEFAULT_OPTIMIZER,
    streaming_buffer_size: int = 0,
    dataset_weights: Sequence[float] = (),
    order_of_ranks: str | None = None,
    pipeline_chunks: int | None = None,
) -> None:
    """Raise ToolkitError for a job that would not resume with the same data or optimizer, or has no steps left.

    `max_steps` of 0 or less means that the run is counted in epochs; `streaming_buffer_size` 0 means not streamed.
    `order_of_ranks` is the argument by which the rows of a step depend on the number of ranks, if there is one;
    `pipeline_chunks` are the stages on each rank of a pipeline.
    """
    found = _manifest(checkpoint)
    # GPipe and 1F1B give each rank the same stages
    if None not in (found.pipeline_chunks, pipeline_chunks) and found.pipeline_chunks != pipeline_chunks:
        stages = found.pipeline_chunks
        same = DEFAULT_SCHEDULE if stages == 1 else f"{INTERLEAVED} --pipeline_chunks {stages}"
        raise ToolkitError(
            f"{checkpoint.path} has the optimizer states of {stages} stage{'s' * (stages != 1)} per GPU, not of"
            f" {pipeline_chunks}: each GPU would hold other layers",
            hint=f"`--pipeline_schedule {same}`, or start from its weights: `--model_name_or_path {checkpoint.path}`",
        )
    check_same_batch(checkpoint, global_batch_size)
    groups = found.data_parallel_size or found.world_size
    if order_of_ranks is not None and groups not in (None, data_parallel_size):
        raise ToolkitError(
            f"{checkpoint.path} was trained on {groups} data-parallel ranks, now it is {data_parallel_size}, and with"
            f" {order_of_ranks} the rows of a step depend on them: the data would not resume where they stopped",
            hint=f"resume on {groups}, or leave `{order_of_ranks}` out",
        )
    for name, then, now in (
        ("seed", found.seed, seed),
        ("streaming_buffer_size", found.streaming_buffer_size, streaming_buffer_size),
        ("dataset_weights", found.dataset_weights, tuple(dataset_weights)),
    ):
        if then not in (None, now):
            raise ToolkitError(
                f"{checkpoint.path} was trained with --{name} {_words(then)}, now it is {_words(now)}: the data would"
                " not resume where they stopped",
                hint=_same_setting(name, then),
            )
    if found.optim is not None and not same_states(found.optim, optim):
        raise ToolkitError(
            f"{checkpoint.path} has the states of --optim {found.optim}, with which --optim {optim} cannot continue",
            hint=f"`--optim {found.optim}`",
        )
    if 0 < max_steps <= checkpoint.step:
        raise ToolkitError(
            f"{checkpoint.path} has {checkpoint.step} steps already, --max_steps is {max_steps}",
            hint=f"`--max_steps {2 * checkpoint.step}`, or another number above {checkpoint.step}, continues",
        )


def check_same_batch(checkpoint: Checkpoint, global_batch_size: int) -> None:
    """Raise ToolkitError for another number of sequences per step: the data resume at the same row only if it stays."""
    then = _manifest(checkpoint).sequences_per_step
    if then not in (None, global_batch_size):
        raise ToolkitError(
            f"{checkpoint.path} was trained with {then} sequences per step over all ranks, now it is"
            f" {global_batch_size}: the data would not resume where they stopped",
            hint=f"`--global_batch_size {then}`, without `--gradient_accumulation_steps`",
        )


def _manifest(checkpoint: Checkpoint) -> Manifest:
    assert checkpoint.manifest is not None, "only complete checkpoints are resumed"
    return checkpoint.manifest


def _words(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _same_setting(name: str, then: Any) -> str:
    if name == "streaming_buffer_size":
        return f"`--streaming true --streaming_buffer_size {then}`" if then else "leave `--streaming` out"
    return f"`--{name} {_words(then)}`" if then != () else f"leave `--{name}` out"
