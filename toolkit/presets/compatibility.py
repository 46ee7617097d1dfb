"""What a compatibility rule is given, and what it answers.

A rule is a function of a `Case` that returns None where it does not object; `toolkit.presets.support` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.models.attention import ModelAttention
from toolkit.models.split import ModelSplit
from toolkit.parallel.layout import DEGREES
from toolkit.parallel.pipeline_schedule import PipelineSettings
from toolkit.presets.optimizers import DEFAULT_OPTIMIZER
from toolkit.presets.spec import PresetSpec

Purpose = Literal["train", "launched", "script", "convert", "plan", "recommend", "rehearse", "trace", "cluster"]
"""What the answer is for: a run of the toolkit, one on several nodes (`cluster`), a rank that is running already
(`launched`), a user's own script under torchrun (`script`), a checkpoint conversion, a plan, a recommendation, a
rehearsal, or a rehearsal on fake tensors (`trace`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How a model is fine-tuned, as far as it decides which presets work. Names are those of the arguments."""

    lora: bool = False
    lora_targets: tuple[str, ...] = ()
    """Modules that have adapters, as they were named; empty where it is not known."""
    lora_config: bool = False
    """Further fields of peft's `LoraConfig` are set."""
    load_in_4bit: bool = False
    optim: str = DEFAULT_OPTIMIZER
    freeze: bool = False
    train_only: bool = False
    packing: bool = False
    attn_implementation: str | None = None
    model_attention: ModelAttention | None = None
    """What the model's attention works with; None where the model is not known."""
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    loss: str = "auto"
    use_liger_kernel: bool = False
    torch_compile: bool = False
    ddp_comm_hook: str | None = None
    accumulate: str | None = None
    """`sharded` or `whole`; None where the preset decides."""
    memory_snapshot: bool = False
    auto_find_batch_size: bool = False
    save_only_model: bool = False
    async_save: bool = False
    streaming: bool = False
    fp16: bool = False
    neftune: bool = False
    label_smoothing: bool = False
    pipeline_schedule: str | None = None
    pipeline_chunks: int | None = None
    micro_batches: int | None = None
    """Accumulation steps of an optimizer step; None where they are not known."""
    pp: int | None = None
    tp: int | None = None
    cp: int | None = None
    sp: int | None = None
    ep: int | None = None
    dp_replicate: int | None = None
    model_split: ModelSplit | None = None
    """How far the model can be split; None where the model is not known."""

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of parallelism that were given."""
        return {name: getattr(self, name) for name in DEGREES if getattr(self, name) is not None}

    @property
    def pipeline(self) -> PipelineSettings | None:
        """The stages of a pipeline and their schedule; None without `--pp`."""
        if self.pp is None:
            return None
        return PipelineSettings.of(ranks=self.pp, schedule=self.pipeline_schedule, chunks=self.pipeline_chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the ranks run on."""

    type: Literal["gpu", "cpu"] = "gpu"
    count: int | None = None
    """GPUs that are visible; None where it does not matter or is not known."""
    name: str = "the GPU"
    has_bf16: bool = True
    has_nvme: bool = True
    """A local NVMe disk can be named."""


CPU = Device(type="cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a combination does not work."""

    rule: str
    """Name of the rule."""
    why: str
    """A clause with the preset or the option as its subject: `needs at least 2 processes`."""
    message: str
    """A sentence that stands alone."""
    hint: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    preset: PresetSpec | None
    method: Method
    world_size: int | None
    device: Device | None
    purpose: Purpose

    def option(self, name: str) -> str:
        """The flag as it is typed: the planner's options are spelled with dashes."""
        return "--" + (name.replace("_", "-") if self.purpose in ("plan", "recommend") else name)

    def degree(self, name: str, degree: int) -> str:
        """A degree of parallelism as it is typed."""
        return f"{name}={degree}" if self.purpose == "script" else f"{self.option(name)} {degree}"


Answer = tuple[str, str, str | None] | None
"""Clause, sentence, hint; None where the rule does not object."""


Rule = Callable[[Case], Answer]


def preset_answer(preset: PresetSpec, why: str, hint: str | None) -> Answer:
    return why, f"preset {preset.name!r} {why}", hint


def method_answer(case: Case, option: str, why: str, hint: str | None) -> Answer:
    assert case.preset is not None
    return why, f"{case.option(option)} does not work under preset {case.preset.name!r}: {why}", hint
