"""What a preset promises beyond its files: bytes, traffic, needs, limits, and its name elsewhere.

>>> contract(load_preset("zero2")).optimizer.formula
'12/N'

The parts come from the files by engine, sharding and offload; nothing here names a preset. Bytes are those of a full
fine-tune with AdamW in bf16, a parameter and rank, between steps: what the attestation counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from toolkit.presets.preset import Preset

# parameter, gradient, optimizer: under DeepSpeed a bf16 parameter beside its fp32 master, momentum and variance (ZeRO
# paper, section 3.1); under DDP and FSDP2 the fp32 parameter is its own master (docs/numerics.md).
STATE_BYTES = {"deepspeed": (2, 2, 12), "fsdp2": (4, 4, 8), "ddp": (4, 4, 8), "none": (4, 4, 8)}
PARTS = ("parameter", "gradient", "optimizer")
# With its optimizer offloaded, ZeRO-2 keeps gradients as the fp32 gradients of its masters, and ZeRO-3 a bf16
# partition and an fp32 copy beside it (deepspeed 0.19.8, `stage_1_and_2.py` line 940, `stage3.py` lines 791 and 1342).
OFFLOADED_GRADIENT_BYTES = {"shard_grad_op": 4, "full_shard": 6, "hybrid_shard": 6}

# Elements that a rank sends and receives, in multiples of the trained model's parameters P, the ring's (N-1)/N left
# out: as the installed engines do it, which docs/communication.md holds against counted runs; ZeRO++ from its paper,
# table 1.
COMMUNICATION = {
    ("none", "replicate"): "0",
    ("ddp", "replicate"): "2 P a step",
    ("deepspeed", "replicate"): "2 P a step",
    ("deepspeed", "shard_optimizer"): "3 P a step",
    ("deepspeed", "shard_grad_op"): "2 P a micro-step, 1 P a step",
    ("deepspeed", "full_shard"): "2 to 3 P a micro-step",
    ("deepspeed", "hybrid_shard"): "0.75 P a micro-step between machines",
    ("fsdp2", "full_shard"): "2 P a micro-step, 1 P a step",
    ("fsdp2", "shard_grad_op"): "1 P a micro-step, 1 P a step",
    ("fsdp2", "hybrid_shard"): "2 P a micro-step, 1 P a step in a replica, 2 P/S a step between",
}
# (FSDP1's sharding strategy, the name in another engine)
OTHER_NAMES = {
    ("none", "replicate"): (None, None),
    ("ddp", "replicate"): ("NO_SHARD", "ZeRO-0"),
    ("deepspeed", "replicate"): ("NO_SHARD", "DDP"),
    ("deepspeed", "shard_optimizer"): (None, None),
    ("deepspeed", "shard_grad_op"): ("SHARD_GRAD_OP", "close to FSDP2 without resharding"),
    ("deepspeed", "full_shard"): ("FULL_SHARD", "FSDP2"),
    ("deepspeed", "hybrid_shard"): ("close to HYBRID_SHARD", "ZeRO++ (hpZ, qwZ, qgZ)"),
    ("fsdp2", "full_shard"): ("FULL_SHARD", "ZeRO-3"),
    ("fsdp2", "shard_grad_op"): ("SHARD_GRAD_OP", "close to ZeRO-2, but parameters are shards between steps"),
    ("fsdp2", "hybrid_shard"): ("HYBRID_SHARD", "close to ZeRO++'s hpZ"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes a parameter of one part of the model states on one rank."""

    whole: int
    shared_by: str
    """`1`, `N` (all ranks), or `S` (the ranks of one replica of a hybrid mesh)."""
    device: str
    """`gpu`, `cpu` or `nvme`: where they are between steps."""

    @property
    def formula(self) -> str:
        """`4`, or `12/N`."""
        return str(self.whole) if self.shared_by == "1" else f"{self.whole}/{self.shared_by}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """Derived, never written down beside a preset's files."""

    parameter: StateBytes
    gradient: StateBytes
    optimizer: StateBytes
    communication: str
    """In multiples of the parameters P."""
    needs: tuple[str, ...]
    not_with: tuple[str, ...]
    """What it does not work with, and the issue that says so."""
    fsdp1_name: str | None
    """FSDP1's sharding strategy of the same idea."""
    other_name: str | None

    def bytes_on(self, device: str) -> str:
        """The formula of all parts that are there: `2 + 2/N + 12/N`, or `0`."""
        found = [part.formula for part in (self.parameter, self.gradient, self.optimizer) if part.device == device]
        return " + ".join(found) or "0"

    def as_row(self) -> dict[str, Any]:
        """As `toolkit presets --json` gives it."""
        formulas = {f"{part}_bytes": getattr(self, part).formula for part in PARTS}
        devices = {f"{part}_device": getattr(self, part).device for part in PARTS}
        words = {key: value for key, value in asdict(self).items() if key not in PARTS}
        return formulas | devices | words


def contract(preset: Preset) -> Contract:
    """The contract of a preset that ships, or of a user's own."""
    kind = (preset.engine, preset.sharding)
    fsdp1_name, other_name = OTHER_NAMES[kind]
    parameter, gradient, optimizer = (_state_bytes(preset, part) for part in PARTS)
    return Contract(
        parameter=parameter,
        gradient=gradient,
        optimizer=optimizer,
        communication=COMMUNICATION[kind],
        needs=_needs(preset),
        not_with=_not_with(preset),
        fsdp1_name=fsdp1_name,
        other_name=other_name,
    )


def _state_bytes(preset: Preset, part: str) -> StateBytes:
    whole = dict(zip(PARTS, STATE_BYTES[preset.engine], strict=True))[part]
    shared_by = "1" if part not in preset.sharded_parts else "S" if preset.replicas > 1 else "N"
    # Gradients are reduced to where their optimizer is.
    device = preset.offload_param if part == "parameter" else preset.offload_optimizer
    if part == "gradient" and device and preset.engine == "deepspeed":
        whole = OFFLOADED_GRADIENT_BYTES.get(preset.sharding, whole)
    if part == "gradient" and device == "nvme":
        device = "cpu"
    return StateBytes(whole=whole, shared_by=shared_by, device=device or "gpu")


def _needs(preset: Preset) -> tuple[str, ...]:
    needs = [f"{preset.processes} processes"]
    if preset.replicas > 1:
        needs.append(f"the launcher's `--parallelism_config_dp_shard_size` S = N/{preset.replicas}")
    if preset.engine == "deepspeed":
        needs.append("deepspeed")
    if preset.engine == "deepspeed" and preset.offload_optimizer:
        needs.append("a C++ compiler, for DeepSpeed's CPU Adam")
    if preset.needs_gpu is not None:
        needs.append("a GPU and nvcc, for DeepSpeed's CUDA quantiser")
    if "cpu" in (preset.offload_optimizer, preset.offload_param):
        needs.append("host memory for what is offloaded, all ranks of a machine together")
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        needs.append("a local NVMe disk, and libaio")
    return tuple(needs)


def _not_with(preset: Preset) -> tuple[str, ...]:
    """Limits that were tried or are reported, by engine and sharding."""
    if preset.engine == "fsdp2":
        return (
            "QLoRA (accelerate#3983, bitsandbytes#1945)",
            "`save_only_model`, since the state dict is sharded",
            "the Trainer's activation checkpointing together with FSDP's own",
        )
    if preset.engine == "deepspeed" and "parameter" in preset.sharded_parts:
        return (
            "QLoRA: every GPU loads the whole model (peft#2016)",
            "`auto_find_batch_size`",
            "a Trainer's own save of LoRA adapters, which has been empty (trl#4416, peft#2892, DeepSpeed#7900)",
        )
    if preset.engine == "deepspeed" and preset.sharding == "shard_grad_op":
        return ("`overlap_comm`, which has given wrong gradients (DeepSpeed#7188, #5294, #8061)",)
    return ()
