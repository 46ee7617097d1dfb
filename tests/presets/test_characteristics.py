"""The characteristics of each preset, and the bytes that one rank may hold of a shard.

`tests/train/test_numerics.py` checks the formulas' bytes in real runs.
"""

from functools import partial
from operator import methodcaller
from pathlib import Path

import pytest
from preset_files import deepspeed_pair

from toolkit.engines.registry import ENGINES
from toolkit.presets import list_presets, load_preset, preset_names, read_preset
from toolkit.presets.characteristics import PARTS, characteristics

REDUCED = "all-reduces of activations in each layer"
DISPATCHED = "all-to-alls of tokens, to their experts and back"


# Those that docs/reference/presets.md, which test_readme.py renders again, has not complete.
@pytest.mark.parametrize(
    ("name", "on_gpu", "on_cpu", "communication"),
    [
        ("zero3_nvme_offload", "0", "6/N", "2 to 3 P per accumulation step"),
        ("cp", "4/N + 4/N + 8/N", "0", "3 P per accumulation step; keys and values in a ring"),
        ("ulysses", "2/N + 2/N + 12/N", "0", "2 to 3 P per accumulation step; all-to-alls of attention heads"),
        ("hsdp_tp", "4/S + 4/S + 8/S", "0", f"3 P/T, and 2 P/S between replicas, per accumulation step; {REDUCED}"),
        ("ep_tp", "4/N + 4/N + 8/N", "0",
         f"3 P/T without experts, 3 P/E of experts, per accumulation step; {REDUCED}; {DISPATCHED}"),
        ("pipeline_1f1b", "4/K + 4/K + 8/K", "0",
         "2 P/K between replicas per step; activations to the next stage and their gradients back, per accumulation"
         " step"),
    ],
)  # fmt: skip
def test_bytes_and_communication_of_each_preset(name: str, on_gpu: str, on_cpu: str, communication: str) -> None:
    found = characteristics(load_preset(name))
    assert (found.bytes_on("gpu"), found.bytes_on("cpu")) == (on_gpu, on_cpu)
    assert found.communication == communication
    assert found.bytes_on("nvme") == ("2/N + 12/N" if name == "zero3_nvme_offload" else "0")


def test_the_names_in_fsdp1() -> None:
    names = {name: characteristics(load_preset(name)).fsdp1_name for name in preset_names()}
    assert (names["ddp"], names["zero1"], names["zero2"]) == ("NO_SHARD", None, "SHARD_GRAD_OP")
    assert {names[preset.name] for preset in list_presets() if preset.degrees} == {None}
    assert (names["fsdp2"], names["zero3"], names["fsdp2_hybrid"]) == ("FULL_SHARD", "FULL_SHARD", "HYBRID_SHARD")


NEEDS = {
    "ddp": {"1+ processes"},
    "zeropp": {"8+, by 8 processes", "deepspeed", "a GPU and nvcc, for DeepSpeed's CUDA quantiser"},
    "fsdp2_hybrid": {"4+, by 2 processes", "the launcher's `--parallelism_config_dp_shard_size` S = N/2"},
    "ulysses": {"2+ processes", "`--sp`, the number of GPUs that split each sequence", "deepspeed"},
    "hsdp_tp": {
        *("8+ processes", "`--tp`, the number of GPUs that split each layer"),
        *("`--dp_replicate`, if it is not 2: S = N/replicas", "a model that transformers has a plan for (tp)"),
    },
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_preset_needs(name: str) -> None:
    assert set(characteristics(load_preset(name)).needs) == NEEDS[name]


def test_what_does_not_work_is_listed() -> None:
    def listed(name: str) -> set[str]:
        limits = characteristics(load_preset(name)).not_with
        return {line.split("`")[1] if line.startswith("`") else line.split(":")[0] for line in limits}

    both = {"QLoRA", "auto_find_batch_size", "streaming", "torch_compile", "use_liger_kernel"}
    assert listed("fsdp2_tp") == both | {"save_only_model", "freeze"}
    assert listed("ulysses") >= both | {"packing", "async_save"}
    without_qlora = {preset.name for preset in list_presets() if "QLoRA" in listed(preset.name)}
    split = {preset.name for preset in list_presets() if preset.parallel}
    assert without_qlora == {"zero2_cpu_offload", "zero3_nvme_offload", "zeropp"} | split


def test_a_users_own_file_has_characteristics_too(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
    found = characteristics(read_preset(deepspeed_pair(tmp_path, {"zero_optimization": zero})))
    assert (found.optimizer.device, found.gradient.device, found.parameter.device) == ("nvme", "cpu", "gpu")
    assert "a local NVMe disk, and libaio" in found.needs


# -- bytes that one rank may hold, with the engine's padding


@pytest.mark.parametrize(
    ("shapes", "engine", "ranks", "elements"),
    [
        ([(5, 2)], "fsdp2", 2, 6),  # 3 of 5 rows
        ([(4, 2)], "fsdp2", 2, 4),
        ([(5, 2), (1,)], "fsdp2", 2, 7),  # the first rank holds the only element of the bias
        ([()], "fsdp2", 2, 1),  # a scalar cannot be cut
        ([(5, 2)], "deepspeed", 2, 13),  # 5, and padding of two groups to a multiple of 2 x 2
        ([(1,)] * 100, "deepspeed", 2, 100),  # ZeRO-3 pads each of 100 single elements to 2
        ([(100, 100)], "deepspeed", 4, 2516),  # 2,500 and 2 groups x 2 x 4
    ],
)
def test_the_largest_shard_includes_the_engines_padding(
    shapes: list[tuple[int, ...]], engine: str, ranks: int, elements: int
) -> None:
    assert ENGINES[engine].largest_shard(shapes, ranks=ranks) == elements


# Ten fp32 elements on two ranks, 40 bytes unsharded. Highest of a DeepSpeed shard: (5 + 8 of padding) x 4 = 52, and all
# 40 bytes again where ZeRO-3 keeps them gathered: up to 10 x the hidden size. Of an FSDP2 shard: 3 rows x 2 x 4 = 24.
@pytest.mark.parametrize(
    ("name", "ranks", "parameter", "gradient", "optimizer"),
    [
        ("ddp", 2, (40, 40), (40, 40), (40, 40)),
        ("zero1", 2, (40, 40), (40, 40), (0, 52)),
        ("zero2", 2, (40, 40), (0, 52), (0, 52)),
        ("zero3_cpu_offload", 2, (0, 92), (0, 52), (0, 52)),
        ("fsdp2", 2, (0, 24), (0, 24), (0, 24)),
        ("fsdp2_grad_op", 2, (0, 24), (0, 24), (0, 24)),  # gathered parameters are shards again between steps
        ("zero2", 1, (40, 40), (40, 56), (40, 56)),  # 10 + 4 elements at most
        ("fsdp2", 1, (40, 40), (40, 40), (40, 40)),
    ],
)
def test_the_limits_of_ten_elements(
    name: str, ranks: int, parameter: tuple[int, int], gradient: tuple[int, int], optimizer: tuple[int, int]
) -> None:
    limit = partial(load_preset(name).shard_byte_limits, shapes=[(5, 2)], element_bytes=4, ranks=ranks, hidden_size=1)
    assert [limit(part=part) for part in PARTS] == [parameter, gradient, optimizer]


def test_zero3_may_keep_only_parameters_up_to_the_persistence_threshold_gathered(tmp_path: Path) -> None:
    zero3, size = load_preset("zero3"), methodcaller("persistence_threshold", hidden_size=4096)
    own = {"stage": 3, "stage3_param_persistence_threshold": 7}
    assert [size(load_preset(name)) for name in ("ddp", "zero2", "zero3")] == [0, 0, 40_960]
    assert size(read_preset(deepspeed_pair(tmp_path, {"zero_optimization": own}))) == 7
    assert zero3.shard_byte_limits("parameter", [(5, 2), (11, 1)], 4, ranks=1, hidden_size=1)[1] == 4 * (10 + 21 + 4)
