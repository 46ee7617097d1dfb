"""The attestation's judgement on plain facts: what differs from the promise, and how many bytes a rank may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.presets import load_preset, preset_names
from toolkit.presets.sizes import largest_shard, limits
from toolkit.train.attest.check import byte_differences, describe, differences, promised_facts, unequal
from toolkit.train.promise import launcher_options, promise_of_command

ROOT = Path(__file__).parent.parent
Facts = dict[str, Any]

ASKED = {"gradient_clipping": 1.0, "activation_checkpointing": False}
# A layer's matrix of 5 x 2 elements: 10, or 5 on each of two ranks where nothing is padded.
SHAPES = [(5, 2)]
FP32 = 4


def promise(name: str, world_size: int | None = 2, dtype: str = "float32") -> Facts:
    return promised_facts(load_preset(name), world_size, compute_dtype=dtype, asked=ASKED)


def honest_ranks(name: str, world_size: int = 2) -> list[Facts]:
    """What ranks read when the promise is kept."""
    return [{"rank": rank, **promise(name, world_size)} for rank in range(world_size)]


# -- what is promised


def test_a_preset_promises_its_engine_its_sharding_and_fp32_masters() -> None:
    assert promise("zero3_cpu_offload", 4, dtype="bfloat16") == {
        "gradient_clipping": 1.0,
        "activation_checkpointing": False,
        "world_size": 4,
        "engine": "deepspeed",
        "sharding": "full_shard",
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "compute_dtype": "bfloat16",
        "master_dtype": "float32",
        "optimizer_dtype": "float32",
    }


def test_ddp_of_one_process_wraps_nothing() -> None:
    assert promise("ddp", 1)["engine"] == "none"
    assert promise("ddp", 2)["engine"] == "ddp"
    assert promise("zero1", 1)["engine"] == "deepspeed"


def test_a_hybrid_mesh_promises_the_degree_that_was_asked_for() -> None:
    promised = promised_facts(load_preset("fsdp2_hybrid"), 8, compute_dtype="float32", asked=ASKED, dp_shard_size=4)
    assert (promised["sharding"], promised["dp_shard_size"]) == ("hybrid_shard", 4)
    assert "dp_shard_size" not in promise("fsdp2_hybrid", 8)  # nobody said


def test_every_replica_of_a_hybrid_mesh_must_hold_the_whole() -> None:
    facts = {"dp_shard_size": 2, "parameter_bytes": 5, "byte_limits": {}, "whole_bytes": {"parameter": 10}}
    ranks = [{"rank": rank, **facts} for rank in range(4)]
    assert byte_differences(ranks) == []
    ranks[3]["parameter_bytes"] = 4
    assert [describe(difference) for difference in byte_differences(ranks)] == [
        "parameter_bytes of all ranks is 19, promised at least 20"
    ]


def test_the_shard_degree_is_read_from_the_launcher_s_flags() -> None:
    words = ["--config_file", "accelerate_configs/fsdp2_hybrid.yaml", "--num_processes", "8"]
    found = promise_of_command([*words, "--parallelism_config_dp_shard_size=4", "-m", "toolkit.train"], ROOT)
    assert (found.world_size, found.dp_shard_size) == (8, 4)


def test_without_a_preset_only_what_was_asked_is_promised() -> None:
    assert promised_facts(None, None, compute_dtype="float32", asked=ASKED) == ASKED
    assert promised_facts(None, 2, compute_dtype="float32", asked=ASKED) == ASKED | {"world_size": 2}


# -- what differs


@pytest.mark.parametrize("name", preset_names())
def test_a_kept_promise_has_no_differences(name: str) -> None:
    assert differences(promise(name), honest_ranks(name)) == []


@pytest.mark.parametrize(
    ("name", "fact", "found", "sentence"),
    [
        ("ddp", "world_size", 1, "world_size on rank 0 is 1, promised 2"),
        ("fsdp2", "engine", "ddp", "engine on rank 0 is ddp, promised fsdp2"),
        ("fsdp2", "sharding", "replicate", "sharding on rank 0 is replicate, promised full_shard"),
        ("zero2", "sharding", "shard_optimizer", "sharding on rank 0 is shard_optimizer, promised shard_grad_op"),
        ("ddp", "optimizer_dtype", "bfloat16", "optimizer_dtype on rank 0 is bfloat16, promised float32"),
        ("ddp", "master_dtype", "bfloat16+float32", "master_dtype on rank 0 is bfloat16+float32, promised float32"),
        ("zero3_cpu_offload", "offload_optimizer", None, "offload_optimizer on rank 0 is None, promised cpu"),
        ("zero3_cpu_offload", "offload_param", None, "offload_param on rank 0 is None, promised cpu"),
        ("zero3", "offload_param", "cpu", "offload_param on rank 0 is cpu, promised None"),
        ("ddp", "gradient_clipping", 0.0, "gradient_clipping on rank 0 is 0.0, promised 1.0"),
        ("ddp", "activation_checkpointing", True, "activation_checkpointing on rank 0 is True, promised False"),
    ],
)
def test_a_broken_promise_is_told_with_both_values(name: str, fact: str, found: object, sentence: str) -> None:
    ranks = honest_ranks(name)
    ranks[0][fact] = found
    told = differences(promise(name), ranks)
    assert told == [{"fact": fact, "rank": 0, "promised": promise(name)[fact], "found": found}]
    assert describe(told[0]) == sentence


def test_one_process_for_two_is_told_with_the_engine_that_it_lost() -> None:
    alone = [{**honest_ranks("ddp")[0], "world_size": 1, "engine": "none"}]
    assert [(d["fact"], d["promised"], d["found"]) for d in differences(promise("ddp"), alone)] == [
        ("world_size", 2, 1),
        ("engine", "ddp", "none"),
    ]


def test_every_rank_that_differs_is_named() -> None:
    ranks = honest_ranks("fsdp2", 4)
    for rank in (1, 3):
        ranks[rank]["engine"] = "ddp"
    assert [d["rank"] for d in differences(promise("fsdp2", 4), ranks)] == [1, 3]


def test_a_fact_that_a_rank_does_not_tell_differs() -> None:
    ranks = honest_ranks("ddp")
    del ranks[1]["optimizer_dtype"]
    assert [(d["rank"], d["found"]) for d in differences(promise("ddp"), ranks)] == [(1, None)]


def test_initial_weights_must_be_equal_on_all_ranks() -> None:
    ranks = [{"rank": rank, "initial_weights_sha256": digest} for rank, digest in enumerate(("aa", "aa", "bb"))]
    told = unequal("initial_weights_sha256", ranks)
    assert [describe(difference) for difference in told] == [
        "initial_weights_sha256 (equal on all ranks) on rank 2 is bb, promised aa"
    ]
    assert unequal("initial_weights_sha256", ranks[:2]) == []


# -- bytes


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
def test_the_largest_shard_counts_the_engines_padding(
    shapes: list[tuple[int, ...]], engine: str, ranks: int, elements: int
) -> None:
    assert largest_shard(shapes, engine, ranks=ranks) == elements


# Ten fp32 elements on two ranks, 40 bytes whole. Highest of a DeepSpeed shard: (5 + 8 of padding) x 4 = 52, and
# 5 % of 40 = 2 for what ZeRO-3 keeps gathered of parameters. Highest of an FSDP2 shard: 3 rows x 2 x 4 = 24.
@pytest.mark.parametrize(
    ("name", "parameter", "gradient", "optimizer"),
    [
        ("ddp", (40, 40), (40, 40), (40, 40)),
        ("zero1", (40, 40), (40, 40), (0, 52)),
        ("zero2", (40, 40), (0, 52), (0, 52)),
        ("zero3", (0, 54), (0, 52), (0, 52)),
        ("zero3_cpu_offload", (0, 54), (0, 52), (0, 52)),
        ("fsdp2", (0, 24), (0, 24), (0, 24)),
    ],
)
def test_the_limits_of_ten_elements_on_two_ranks(
    name: str, parameter: tuple[int, int], gradient: tuple[int, int], optimizer: tuple[int, int]
) -> None:
    parts = {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    assert {part: limits(load_preset(name), part, SHAPES, FP32, ranks=2) for part in parts} == parts


def test_one_rank_holds_the_whole_under_every_sharding() -> None:
    assert limits(load_preset("zero2"), "optimizer", SHAPES, FP32, ranks=1) == (40, 56)  # padded to 10 + 4 at most
    assert limits(load_preset("fsdp2"), "parameter", SHAPES, FP32, ranks=1) == (40, 40)


def test_fsdp2_that_keeps_parameters_gathered_still_shards_them_between_steps() -> None:
    gathered = replace(load_preset("fsdp2"), sharding="shard_grad_op")
    assert limits(gathered, "parameter", SHAPES, FP32, ranks=2) == (0, 24)


def with_bytes(name: str, shapes: list[tuple[int, ...]], held: list[int], whole: int) -> list[Facts]:
    """Ranks that hold so many bytes of optimizer states, beside what the preset allows them."""
    allowed = limits(load_preset(name), "optimizer", shapes, FP32, ranks=len(held))
    return [
        {
            "rank": rank,
            "optimizer_bytes": own,
            "byte_limits": {"optimizer": allowed},
            "whole_bytes": {"optimizer": whole},
        }
        for rank, own in enumerate(held)
    ]


def test_halves_of_the_optimizer_are_zero1() -> None:
    assert byte_differences(with_bytes("zero1", [(1000,)], [2000, 2000], 4000)) == []


def test_a_whole_optimizer_under_zero1_is_told() -> None:
    told = byte_differences(with_bytes("zero1", [(1000,)], [4000, 4000], 4000))
    assert [describe(difference) for difference in told] == [
        "optimizer_bytes on rank 0 is 4000, promised 0 to 2032",  # (500 + 8 of padding) x 4
        "optimizer_bytes on rank 1 is 4000, promised 0 to 2032",
    ]


def test_half_an_optimizer_under_ddp_is_told() -> None:
    told = byte_differences(with_bytes("ddp", [(1000,)], [4000, 2000], 4000))
    assert [describe(difference) for difference in told] == ["optimizer_bytes on rank 1 is 2000, promised 4000"]


def test_shards_that_do_not_add_up_are_told() -> None:
    told = byte_differences(with_bytes("zero1", [(1000,)], [2000, 1996], 4000))
    assert [describe(difference) for difference in told] == [
        "optimizer_bytes of all ranks is 3996, promised at least 4000"
    ]


def test_shards_may_add_up_to_more_by_their_padding() -> None:
    assert byte_differences(with_bytes("zero1", [(999,)], [2000, 2000], 3996)) == []


# -- what the run was started as

LAUNCHERS: dict[str, Callable[[], list[str]]] = {
    "console script": lambda: ["/usr/bin/python3", "/venv/bin/accelerate", "launch"],
    "console script by name": lambda: ["accelerate", "launch"],
    "accelerate-launch": lambda: ["/usr/bin/python3", "/venv/bin/accelerate-launch"],
    "module": lambda: ["python", "-m", "accelerate.commands.launch"],
    "module unbuffered": lambda: ["python", "-u", "-m", "accelerate.commands.launch"],
}


@pytest.mark.parametrize("spelling", LAUNCHERS)
def test_every_spelling_of_the_launcher_is_known(spelling: str) -> None:
    assert launcher_options([*LAUNCHERS[spelling](), "--num_processes", "2"]) == ["--num_processes", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-m", "toolkit.train", "--dataset", "accelerate"],
        ["/venv/bin/accelerate", "config"],
        ["torchrun", "train.py"],
        ["bash"],
        [],
    ],
    ids=" ".join,
)
def test_another_program_is_no_launcher(words: list[str]) -> None:
    assert launcher_options(words) is None


@pytest.mark.parametrize(
    "options",
    [
        ["--config_file", "accelerate_configs/zero2.yaml", "--num_processes", "2", "-m", "toolkit.train"],
        ["--config_file=accelerate_configs/zero2.yaml", "--num_processes=2", "-m", "toolkit.train"],
        ["--config-file", "accelerate_configs/zero2.yaml", "--num-processes", "2", "--module", "toolkit.train"],
        ["--num-processes=2", "--config-file=accelerate_configs/zero2.yaml", "train.py", "--num_processes", "9"],
        [
            "--num_processes",
            "2",
            "--config_file",
            str(ROOT / "accelerate_configs" / "zero2.yaml"),
            "-m",
            "toolkit.train",
        ],
    ],
    ids=" ".join,
)
def test_the_promise_is_read_from_the_launchers_own_options(options: list[str]) -> None:
    found = promise_of_command(options, ROOT)
    assert found.preset == load_preset("zero2")
    assert found.world_size == 2


def test_the_scripts_arguments_are_not_the_launchers() -> None:
    found = promise_of_command(["--num_processes", "2", "-m", "toolkit.train", "--config_file", "x.yaml"], ROOT)
    assert (found.preset, found.world_size) == (None, 2)


def test_the_files_number_of_processes_holds_where_no_flag_says(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "accelerate_configs" / "ddp.yaml").read_text()) | {"num_processes": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    assert promise_of_command(["--config_file", "mine.yaml", "-m", "toolkit.train"], tmp_path).world_size == 4
    flagged = ["--config_file", "mine.yaml", "--num_processes", "2", "-m", "toolkit.train"]
    assert promise_of_command(flagged, tmp_path).world_size == 2


def test_a_launch_without_a_word_promises_nothing() -> None:
    found = promise_of_command(["-m", "toolkit.train"], ROOT)
    assert (found.preset, found.world_size) == (None, None)
