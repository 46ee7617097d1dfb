"""One training job: what is trained, on which data, how, and in which batches; one typed value from argv to argv.

>>> job = Job.from_argv(["--max_seq_length", "512", "--lora_r", "8", "--packing"])
>>> job.max_seq_length, job.packing, job.learning_rate
(512, True, 5e-05)
>>> job.to_argv()
['--max_seq_length', '512', '--lora_r', '8', '--packing', 'true']

The fields, with their limits and help texts, are declared in `toolkit.job.argument_fields`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from toolkit.job.accumulation import chosen_accumulate
from toolkit.job.argument_aliases import canonical_values
from toolkit.job.argument_fields import ARGUMENTS, OWN_ARGUMENTS, DataArguments, ModelArguments, TrainerArguments
from toolkit.job.argument_reading import read_arguments, typed_values
from toolkit.job.argument_values import is_true
from toolkit.parallel.layout import DEGREES, SAME_ROWS
from toolkit.parallel.pipeline_schedule import PipelineSettings

BATCH_ARGUMENTS = ("max_seq_length", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Tokens of a row, rows of a micro-batch, micro-batches of a step: what a GPU trains on."""


class Compilation(NamedTuple):
    """How the decoder layers are compiled."""

    backend: str
    mode: str | None


@dataclass(frozen=True, kw_only=True)
class Job(ModelArguments, DataArguments, TrainerArguments):
    """A training job, apart from preset and number of processes; fields have the names of the arguments."""

    other: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The `TrainingArguments` that the toolkit does not read, typed."""
    given: tuple[str, ...] = field(default=(), compare=False)
    """The arguments that were given, in their order; without any, those that differ from their defaults."""

    def __post_init__(self) -> None:
        if not self.given:
            changed = [name for name, declared in ARGUMENTS.items() if getattr(self, name) != declared.default]
            object.__setattr__(self, "given", (*changed, *self.other))

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """Read an optional leading YAML or JSON file, and flags; flags win. Raises ToolkitError for invalid ones."""
        return cls._of(read_arguments(argv))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Make a job of a file's keys and values. Raises ToolkitError for an unknown name or a wrong type."""
        return cls._of(typed_values(canonical_values(values)))

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        declared = {name: value for name, value in values.items() if name in ARGUMENTS}
        other = {name: value for name, value in values.items() if name not in ARGUMENTS}
        return cls(**declared, other=other, given=tuple(values))

    def to_argv(self) -> list[str]:
        """Return the arguments that were given as words of a command line, which `from_argv` reads back."""
        return [word for name in self.given for word in _flag(name, self.value(name))]

    def value(self, name: str) -> Any:
        """Return an argument by its name; None for one that the toolkit does not read and that was not given."""
        return getattr(self, name) if name in ARGUMENTS else self.other.get(name)

    def with_values(self, **values: Any) -> Self:
        """Return the job with other values of some arguments, which then count as given."""
        declared = {name: value for name, value in values.items() if name in ARGUMENTS}
        other = {name: value for name, value in values.items() if name not in ARGUMENTS}
        given = (*self.given, *(name for name in values if name not in self.given))
        return dataclasses.replace(self, **declared, other={**self.other, **other}, given=given)

    def without(self, *names: str) -> Self:
        """Return the job with the defaults of some arguments."""
        defaults: dict[str, Any] = {name: ARGUMENTS[name].default for name in names if name in ARGUMENTS}
        other = {name: value for name, value in self.other.items() if name not in names}
        given = tuple(name for name in self.given if name not in names)
        return dataclasses.replace(self, **defaults, other=other, given=given)

    @property
    def given_values(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return {name: self.value(name) for name in self.given}

    @property
    def trainer_values(self) -> dict[str, Any]:
        """The given arguments of `TrainingArguments`."""
        return {name: self.value(name) for name in self.given if name not in OWN_ARGUMENTS}

    @property
    def is_lora(self) -> bool:
        """True if adapters are trained instead of all weights."""
        return self.lora_r is not None

    @property
    def uses_activation_checkpointing(self) -> bool:
        """True if activation checkpointing is on, by its present name or its old one."""
        return bool(self.activation_checkpointing or self.gradient_checkpointing)

    @property
    def compilation(self) -> Compilation | None:
        """How the decoder layers are compiled; None where they are not. A backend or a mode alone switches it on."""
        backend, mode = self.torch_compile_backend, self.torch_compile_mode
        return Compilation(backend or "inductor", mode) if self.torch_compile or backend or mode else None

    @property
    def chosen_accumulate(self) -> str | None:
        """`--accumulate`, or the choice in `--accelerator_config`. Raises ToolkitError where they contradict."""
        return chosen_accumulate(self.accumulate, self.accelerator_config or {})

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of parallelism that were given."""
        return {name: getattr(self, name) for name in DEGREES if getattr(self, name) is not None}

    @property
    def gpus_per_batch(self) -> int:
        """GPUs that train on the same rows."""
        return math.prod(self.degrees.get(name, 1) for name in SAME_ROWS)

    @property
    def pipeline(self) -> PipelineSettings | None:
        """The stages of a pipeline and their schedule; None without `--pp`."""
        if self.pp is None:
            return None
        return PipelineSettings.of(ranks=self.pp, schedule=self.pipeline_schedule, chunks=self.pipeline_chunks)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens in one micro-batch of a GPU, or of the GPUs that train on the same rows; all rows at full length."""
        return self.per_device_train_batch_size * self.max_seq_length

    @property
    def evaluates(self) -> bool:
        """True if the run evaluates during training or before it."""
        return self.eval_strategy != "no" or self.eval_on_start

    @property
    def saves_checkpoints(self) -> bool:
        """True if the run saves checkpoints."""
        return self.save_strategy != "no"

    @property
    def shuffle_buffer_size(self) -> int:
        """Rows in the shuffle buffer, on which a stream's order depends; 0 without streaming."""
        return self.streaming_buffer_size if self.streaming else 0

    @property
    def resumes(self) -> bool:
        """True if the run resumes from a checkpoint."""
        return (self.resume_from_checkpoint or "false").lower() not in ("false", "none")

    @property
    def order_of_ranks(self) -> str | None:
        """The argument by which the rows of a step depend on the number of ranks; None where they do not."""
        configured = self.accelerator_config or {}
        named = {
            "--train_sampling_strategy batch_rebalance": self.train_sampling_strategy == "batch_rebalance",
            "--auto_find_batch_size": self.auto_find_batch_size,
            "--ignore_data_skip": self.ignore_data_skip,
            "--accelerator_config split_batches": is_true(configured.get("split_batches")),
            "--accelerator_config use_seedable_sampler false": not is_true(
                configured.get("use_seedable_sampler", True)
            ),
        }
        return next((name for name, is_set in named.items() if is_set), None)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        words = [str(value).lower()]
    elif name in ("lora_config", "column"):
        words = [f"{key}={each if name == 'column' else json.dumps(each)}" for key, each in value.items()]
    elif isinstance(value, Mapping):
        words = [json.dumps(value)]
    elif isinstance(value, list | tuple):
        words = [str(each) for each in value]
    else:
        words = [str(value)]
    if len(words) == 1 and words[0].startswith("--"):
        return [f"--{name}={words[0]}"]
    return [f"--{name}", *words] if words else []
