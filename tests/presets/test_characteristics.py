"""The characteristics of each preset, checked against the same integers as real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_model_bytes import BF16_BYTES, NORM_PARAMS, NUM_PARAMS

from toolkit.presets import list_presets, load_preset, preset_names, read_preset
from toolkit.presets.characteristics import PARTS, characteristics

REDUCED = "all-reduces of activations in each layer"
DISPATCHED = "all-to-alls of tokens, to their experts and back"


def bytes_of(name: str, part: str, ranks: int) -> int:
    """The formula, worked out for the tiny Llama."""
    state: Any = getattr(characteristics(load_preset(name)), part)
    shards = {"1": 1, "N": ranks, "S": ranks // load_preset(name).replicas}[state.shards]
    return int(state.unsharded_bytes * NUM_PARAMS // shards)


@pytest.mark.parametrize("name", BF16_BYTES)
@pytest.mark.parametrize("part", PARTS)
def test_the_formulas_give_the_bytes_that_two_ranks_hold_in_bf16(name: str, part: str) -> None:
    gathered = 2 * NORM_PARAMS if (name, part) == ("zero3", "parameter") else 0  # kept whole beside their shards
    assert bytes_of(name, part, ranks=2) + gathered == BF16_BYTES[name][part]


@pytest.mark.parametrize(
    ("name", "on_gpu", "on_cpu", "communication"),
    [
        ("single", "4 + 4 + 8", "0", "0"),
        ("ddp", "4 + 4 + 8", "0", "2 P per step"),
        ("zero1", "2 + 2 + 12/N", "0", "3 P per step"),
        ("zero2", "2 + 2/N + 12/N", "0", "2 P per accumulation step, 1 P per step"),
        ("zero2_cpu_offload", "2", "4/N + 12/N", "2 P per accumulation step, 1 P per step"),
        ("zero3", "2/N + 2/N + 12/N", "0", "2 to 3 P per accumulation step"),
        ("zero3_cpu_offload", "0", "2/N + 6/N + 12/N", "2 to 3 P per accumulation step"),
        ("zeropp", "2/N + 2/N + 12/N", "0", "0.75 P per accumulation step between nodes"),
        ("fsdp2", "4/N + 4/N + 8/N", "0", "3 P per accumulation step"),
        ("fsdp2_grad_op", "4/N + 4/N + 8/N", "0", "2 P per accumulation step"),
        ("fsdp2_cpu_offload", "0", "4/N + 4/N + 8/N", "3 P per accumulation step"),
        (
            "fsdp2_hybrid",
            "4/S + 4/S + 8/S",
            "0",
            "3 P, and 2 P/S between replicas, per accumulation step",
        ),
        ("cp", "4/N + 4/N + 8/N", "0", "3 P per accumulation step; keys and values in a ring"),
        ("ulysses", "2/N + 2/N + 12/N", "0", "2 to 3 P per accumulation step; all-to-alls of attention heads"),
        ("tp", "4/T + 4/T + 8/T", "0", f"2 P/T between replicas per accumulation step; {REDUCED}"),
        ("fsdp2_tp", "4/N + 4/N + 8/N", "0", f"3 P/T per accumulation step; {REDUCED}"),
        ("hsdp_tp", "4/S + 4/S + 8/S", "0", f"3 P/T, and 2 P/S between replicas, per accumulation step; {REDUCED}"),
        ("ep", "4/N + 4/N + 8/N", "0", f"3 P without experts, 3 P/E of experts, per accumulation step; {DISPATCHED}"),
        (
            "ep_tp",
            "4/N + 4/N + 8/N",
            "0",
            f"3 P/T without experts, 3 P/E of experts, per accumulation step; {REDUCED}; {DISPATCHED}",
        ),
    ],
)
def test_bytes_and_communication_of_each_preset(name: str, on_gpu: str, on_cpu: str, communication: str) -> None:
    found = characteristics(load_preset(name))
    assert (found.bytes_on("gpu"), found.bytes_on("cpu")) == (on_gpu, on_cpu)
    assert found.communication == communication


def test_every_preset_holds_sixteen_bytes_per_parameter_over_all_devices() -> None:
    # Offloaded ZeRO gradients are wider: an fp32 one at stage 2, a bf16 and an fp32 one at stage 3.
    wider = {"zero2_cpu_offload": 2, "zero3_cpu_offload": 4, "zero3_nvme_offload": 4}
    for preset in list_presets():
        whole = sum(getattr(characteristics(preset), part).unsharded_bytes for part in PARTS)
        assert whole == 16 + wider.get(preset.name, 0), preset.name


def test_qlora_is_listed_where_it_does_not_work() -> None:
    warned = {
        name
        for name in preset_names()
        if any("QLoRA" in limit for limit in characteristics(load_preset(name)).not_with)
    }
    split = {preset.name for preset in list_presets() if preset.parallel}
    assert warned == {"zero2_cpu_offload", "zero3_nvme_offload", "zeropp"} | split


def test_the_names_in_fsdp1() -> None:
    names = {name: characteristics(load_preset(name)).fsdp1_name for name in preset_names()}
    assert (names["ddp"], names["zero1"], names["zero2"]) == ("NO_SHARD", None, "SHARD_GRAD_OP")
    assert {names[name] for name in ("cp", "ep", "ep_tp", "fsdp2_tp", "hsdp_tp", "tp", "ulysses")} == {None}
    assert (names["fsdp2"], names["zero3"], names["fsdp2_hybrid"]) == ("FULL_SHARD", "FULL_SHARD", "HYBRID_SHARD")


def test_what_a_preset_needs() -> None:
    assert characteristics(load_preset("ddp")).needs == ("1+ processes",)
    assert characteristics(load_preset("zeropp")).needs == (
        "8+, by 8 processes", "deepspeed", "a GPU and nvcc, for DeepSpeed's CUDA quantiser",
    )  # fmt: skip
    assert (
        "the launcher's `--parallelism_config_dp_shard_size` S = N/2"
        in characteristics(load_preset("fsdp2_hybrid")).needs
    )


def test_a_preset_that_splits_layers_needs_degrees_and_a_plan() -> None:
    assert characteristics(load_preset("ulysses")).needs == (
        "2+ processes", "`--sp`, the number of GPUs that split each sequence", "deepspeed",
    )  # fmt: skip
    assert characteristics(load_preset("ep_tp")).needs == (
        "4+ processes",
        "`--tp`, the number of GPUs that split each layer",
        "`--ep`, the number of GPUs with different experts",
        "a model that transformers has a plan for (tp, ep)",
    )
    assert "`--dp_replicate`, if it is not 2: S = N/replicas" in characteristics(load_preset("hsdp_tp")).needs


def test_what_does_not_work_with_a_split_model_is_listed() -> None:
    def listed(name: str) -> set[str]:
        return {line.split("`")[1] for line in characteristics(load_preset(name)).not_with if line.startswith("`")}

    both = {"auto_find_batch_size", "streaming", "torch_compile", "use_liger_kernel"}
    assert listed("fsdp2_tp") == both | {"save_only_model", "freeze"}
    assert listed("ulysses") == both | {"packing", "async_save"}


def test_a_users_own_file_has_characteristics_too(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}'
    )
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n")
    found = characteristics(read_preset(path))
    assert (found.optimizer.device, found.gradient.device, found.parameter.device) == ("nvme", "cpu", "gpu")
    assert "a local NVMe disk, and libaio" in found.needs
