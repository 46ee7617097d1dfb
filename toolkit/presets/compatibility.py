"""What a compatibility rule is given, and what it answers.

A rule is a generator function of a `Case` that yields where it objects; `toolkit.presets.support` lists them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from toolkit.job.job import Job
from toolkit.models.attention import ModelAttention
from toolkit.models.split import ModelSplit
from toolkit.presets.spec import PresetSpec

Purpose = Literal["train", "launched", "script", "convert", "plan", "recommend", "rehearse", "trace", "cluster"]
"""What the answer is for: a run of the toolkit, one on several nodes (`cluster`), a rank that is running already
(`launched`), a user's own script under torchrun (`script`), a checkpoint conversion, a plan, a recommendation, a
rehearsal, or a rehearsal on fake tensors (`trace`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What the attention and the layers of a model allow; None where that is not known."""

    attention: ModelAttention | None = None
    split: ModelSplit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the ranks run on."""

    type: Literal["gpu", "cpu"] = "gpu"
    count: int | None = None  # GPUs that are visible; None where it does not matter or is not known
    ranks_per_gpu: int = 1
    name: str = "the GPU"
    has_bf16: bool = True
    has_nvme: bool = True  # a local NVMe disk can be named


CPU = Device(type="cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a combination does not work."""

    rule: str  # name of the rule
    why: str  # a clause with the preset or the option as its subject: `needs at least 2 processes`
    message: str  # a sentence that stands alone
    hint: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A combination to judge. A rule about something that is None here does not object."""

    preset: PresetSpec | None
    job: Job
    model: ModelLimits = field(default_factory=ModelLimits)
    world_size: int | None = None
    device: Device | None = None
    purpose: Purpose = "train"

    @property
    def on_cpu(self) -> bool:
        return self.device is not None and self.device.type == "cpu"

    def uses(self, name: str) -> bool:
        """True for a switch that is on, and for any other argument with a value."""
        return self.job.compilation is not None if name == "torch_compile" else bool(self.job.value(name))

    def option(self, name: str) -> str:
        """The flag as it is typed: the planner's options are spelled with dashes."""
        flag, *value = name.split(" ", 1)
        return " ".join(["--" + (flag.replace("_", "-") if self.purpose in ("plan", "recommend") else flag), *value])

    def degree(self, name: str, degree: int) -> str:
        """A degree of parallelism as it is typed."""
        return f"{name}={degree}" if self.purpose == "script" else f"{self.option(name)} {degree}"


Answer = tuple[str, str, str | None]  # clause, sentence, hint
Answers = Iterator[Answer]
Rule = Callable[[Case], Answers]


def of_preset(rule: Callable[[Case, PresetSpec], Answers]) -> Rule:
    """Return a rule about the preset as one that does not object where there is none."""
    return lambda case: iter(()) if case.preset is None else rule(case, case.preset)


def job_answer(why: str, hint: str | None) -> Answer:
    return why, why, hint


def preset_answer(preset: PresetSpec, why: str, hint: str | None) -> Answer:
    return why, f"preset {preset.name!r} {why}", hint


def method_answer(case: Case, option: str, why: str, hint: str | None) -> Answer:
    assert case.preset is not None
    return why, f"{case.option(option)} does not work under preset {case.preset.name!r}: {why}", hint
