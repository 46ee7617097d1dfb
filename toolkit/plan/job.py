"""What is to be trained and how: the values that a plan needs beside model, preset and world size.

>>> Job(per_device_train_batch_size=2, max_seq_length=1024).tokens
2048
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.shape import ModelShape

LOSSES = ("full", "chunked", "fused")
OPTIMIZERS = {"fused": "adamw_torch_fused", "foreach": "adamw_torch"}  # and the Trainer's names
BITS_HINT = (
    "`--optimizer fused` is the most it can take; `--optim adamw_bnb_8bit` after `--` of `toolkit train` measures"
)
# More is a slip of the keyboard: a micro-batch, length or world size beyond any cluster.
LARGEST = {
    "per_device_train_batch_size": 2**20,
    "max_seq_length": 2**27,
    "gradient_accumulation_steps": 2**20,
    "lora_r": 2**16,
    "gpus_per_machine": 2**10,
}
LARGEST_WORLD = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The names are those of the training arguments."""

    per_device_train_batch_size: int = 1
    max_seq_length: int = 1024
    gradient_accumulation_steps: int = 1
    activation_checkpointing: bool = False
    lora_r: int | None = None
    load_in_4bit: bool = False
    packing: bool = False
    """Rows joined to full length."""
    loss: str = "full"
    """`full`: transformers' own; `chunked`: upcast in eight chunks; `fused`: Liger's, with the head in it."""
    optimizer: str = "fused"
    """`fused` is the Trainer's default; `foreach` needs a copy of what it updates."""
    gpus_per_machine: int = 8
    rows_differ: bool | None = None
    """Whether rows of one micro-batch have several lengths; None: where there is more than one row."""

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one GPU, every row at full length."""
        return self.per_device_train_batch_size * self.max_seq_length

    @property
    def has_mask(self) -> bool:
        """Rows of several lengths in one batch, or documents of one pack, need a mask: SDPA then repeats keys and
        values for each head."""
        differ = self.per_device_train_batch_size > 1 if self.rows_differ is None else self.rows_differ
        return self.packing or differ


def check_job(job: Job, shape: ModelShape) -> None:
    """Raises ToolkitError for a value that is no size, and for combinations that no run has."""
    for name in (field.name for field in fields(job) if field.name in LARGEST):
        value = getattr(job, name)
        if value is not None:
            check_size(option(name), value, LARGEST[name])
    if "8bit" in job.optimizer.replace("_", "").replace("-", ""):
        raise ToolkitError(f"--optimizer {job.optimizer}: optimizer states of 8 bits are not planned", hint=BITS_HINT)
    for name, known in (("loss", LOSSES), ("optimizer", OPTIMIZERS)):
        if getattr(job, name) not in known:
            raise ToolkitError(f"{option(name)} is {getattr(job, name)!r}, expected one of {', '.join(known)}")
    if job.load_in_4bit and job.lora_r is None:
        raise ToolkitError("--load-in-4bit needs --lora-r: 4-bit weights are not trained", hint="add `--lora-r 16`")
    if job.lora_r is not None and job.lora_r > shape.hidden_size > 0:
        raise ToolkitError(f"--lora-r is {job.lora_r}, expected at most the hidden size {shape.hidden_size}")


def check_world_size(world_size: int) -> None:
    """Raises ToolkitError for what cannot be a number of processes."""
    check_size("--world-size", world_size, LARGEST_WORLD)


def check_size(name: str, value: Any, largest: int) -> None:
    """Raises ToolkitError for zero, negative and absurd values."""
    if value < 1:
        raise ToolkitError(f"{name} is {value}, expected 1 or more")
    if value > largest:
        raise ToolkitError(f"{name} is {value:,}, expected {largest:,} or less")


def option(name: str) -> str:
    """`--max-seq-length` of `max_seq_length`."""
    return "--" + name.replace("_", "-")
