"""The cost and the requirements of a preset: bytes of model states, communication volume, needs, limitations.

>>> from toolkit.presets import load_preset
>>> characteristics(load_preset("zero2")).optimizer.formula
'12/N'

Nothing here names a preset. Bytes are those of a full fine-tune with AdamW in bf16, per parameter and rank, between
steps: what the run-time verification counts. With N ranks, each engine pads its own way (deepspeed 0.19.8, torch 2.13):

- ZeRO-1 and ZeRO-2 flatten each parameter group and pad it to a multiple of 2·N elements.
- ZeRO-3 pads every parameter to a multiple of N, and keeps small ones gathered beside their shards.
- FSDP2 cuts the first dimension into N parts, so the first ranks hold ceil(d/N) of its d rows.
"""

from dataclasses import asdict, dataclass
from typing import Any

from toolkit.engines.engine import PARTS
from toolkit.presets.layout_rules import RULES
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import limitations


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes per parameter of one part of the model states on one rank."""

    unsharded_bytes: int
    shards: str  # `1`, `N` (all ranks), `S` (the ranks of one replica of a hybrid mesh), `T` (`--tp`), or `K` (`--pp`)
    device: str  # `gpu`, `cpu` or `nvme`: where the part is kept between steps

    @property
    def formula(self) -> str:
        """Bytes per parameter as text: `4`, or `12/N`."""
        return str(self.unsharded_bytes) if self.shards == "1" else f"{self.unsharded_bytes}/{self.shards}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Characteristics:
    """The cost and the requirements of one preset, derived from its files."""

    parameter: StateBytes
    gradient: StateBytes
    optimizer: StateBytes
    communication: str  # communication volume of a rank, in multiples of the number of parameters P
    needs: tuple[str, ...]
    not_with: tuple[str, ...]  # what the preset does not work with, and the upstream issue
    fsdp1_name: str | None
    other_name: str | None  # the equivalents: a sharding strategy of FSDP1, and another engine's name

    def bytes_on(self, device: str) -> str:
        """Return the formula of all parts kept on a device: `2 + 2/N + 12/N`, or `0`."""
        found = [part.formula for part in (self.parameter, self.gradient, self.optimizer) if part.device == device]
        return " + ".join(found) or "0"

    def as_row(self) -> dict[str, Any]:
        """Return the values under `contract` in `toolkit presets --json`."""
        formulas = {f"{part}_bytes": getattr(self, part).formula for part in PARTS}
        devices = {f"{part}_device": getattr(self, part).device for part in PARTS}
        words = {key: value for key, value in asdict(self).items() if key not in PARTS}
        return formulas | devices | words


def characteristics(preset: PresetSpec) -> Characteristics:
    """Derive the characteristics of a preset, shipped or a user's own."""
    volume, fsdp1_name, other_name = preset.traits.shardings[preset.sharding]
    if "tp" in preset.parallel:  # gathered are the parameters of one rank of T, or of E
        volume = volume.replace("3 P", "3 P/T")
    if "ep" in preset.parallel:
        volume = volume.replace(" per", " without experts, 3 P/E of experts, per")
    if preset.degrees:
        fsdp1_name, other_name = None, RULES["other_dimension"].get(preset.degrees[0])
    parameter, gradient, optimizer = (_state_bytes(preset, part) for part in PARTS)
    return Characteristics(
        parameter=parameter,
        gradient=gradient,
        optimizer=optimizer,
        communication="; ".join([volume, *(RULES["communication"][name] for name in preset.degrees)]),
        needs=_needs(preset),
        not_with=limitations(preset),
        fsdp1_name=fsdp1_name,
        other_name=other_name,
    )


def _state_bytes(preset: PresetSpec, part: str) -> StateBytes:
    unsharded = dict(zip(PARTS, preset.traits.state_bytes, strict=True))[part]
    # Under `tp` alone every rank also holds the norms, and under `pp` stages differ in size: both are left out.
    shards = "K" if "pp" in preset.parallel else "T" if "tp" in preset.parallel else "1"
    if part in preset.sharded_parts:
        shards = "S" if preset.replicas > 1 or "dp_replicate" in preset.parallel else "N"
    # Gradients are reduced to the device of the optimizer.
    device = preset.offload_param if part == "parameter" else preset.offload_optimizer
    if part == "gradient" and device:
        unsharded = preset.traits.offloaded_gradient_bytes.get(preset.sharding, unsharded)
    if part == "gradient" and device == "nvme":
        device = "cpu"
    return StateBytes(unsharded_bytes=unsharded, shards=shards, device=device or "gpu")


def _needs(preset: PresetSpec) -> tuple[str, ...]:
    needs = [f"{preset.processes} processes"]
    if preset.replicas > 1:
        needs.append(f"the launcher's `--parallelism_config_dp_shard_size` S = N/{preset.replicas}")
    needs += [f"`--{name}`, the number of {RULES['gpus_of_degree'][name]}" for name in preset.degrees]
    if {"dp_replicate", "dp_shard"} <= set(preset.parallel):
        needs.append("`--dp_replicate`, if it is not 2: S = N/replicas")
    if preset.sharded_at_load:
        needs.append(f"a model that transformers has a plan for ({', '.join(preset.degrees)})")
    needs += preset.traits.needs
    if preset.offload_optimizer:
        needs += preset.traits.needs_to_offload
    if preset.needs_gpu is not None:
        needs += preset.traits.needs_for_kernels
    if "cpu" in (preset.offload_optimizer, preset.offload_param):
        needs.append("host memory for the offloaded states of all ranks on a node")
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        needs.append("a local NVMe disk, and libaio")
    return tuple(needs)
