"""Recommendations for GPUs of different sizes, their reasons, commands and scaling, and requests that are refused.

PYTHONPATH=tests:. python tests/plan/test_recommend.py    # rewrites the table in docs/how-to/choose-a-preset.md
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, toolkit
from model_configs import llama_8b

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import custom_gpu, find_gpu
from toolkit.models.shape import ModelShape
from toolkit.plan.candidates import RecommendRequest, best_candidates
from toolkit.plan.options import RecommendOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.recommend import EQUAL_WITHIN, Recommendation, recommend, recommend_request, train_command
from toolkit.plan.recommendation import (
    compare_command,
    failure_loss,
    recommendation_json,
    recommendation_lines,
    scaling_curve,
)
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB

H100 = find_gpu("h100-sxm")
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "choose-a-preset.md"
MEMORIES = (400, 200, 180, 150, 100, 70, 60, 50, 45, 40, 36, 28, 24, 20, 10)
BLOCK = ("<!-- generated: by memory -->\n", "<!-- /generated -->")


MODEL = str(LLAMA_8B_CONFIG)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return llama_8b()


def request(shape: ModelShape, *, memory_gib: float = 79.14, **changes: Any) -> RecommendRequest:
    gpu = custom_gpu(H100, memory_gib=memory_gib)
    asked = RecommendRequest(
        shape=shape, gpu=gpu, world_size=8, global_batch_size=64, job=PlannedJob(max_seq_length=2048)
    )
    return replace(asked, **changes)


def found(asked: RecommendRequest, objective: str = "fastest") -> Recommendation:
    return recommend(asked, list_presets(), objective=objective)


def by_memory(shape: ModelShape) -> str:
    """The table in the docs: the recommendation, the rule of thumb, and what the rule would cost."""
    lines = ["| GiB per GPU | recommended | rule of thumb | cost of the rule |", "| ---: | :--- | :--- | :--- |"]
    for memory_gib in MEMORIES:
        answer = found(request(shape, memory_gib=memory_gib))
        job, rule = answer.choice.job, answer.rule_of_thumb
        recomputes = ", checkpointing" if job.activation_checkpointing else ""
        cost = "" if rule == answer.choice.preset.name else answer.why_not[rule]
        chosen = f"`{answer.choice.preset.name}`, micro-batch {job.per_device_train_batch_size}{recomputes}"
        lines.append(f"| {memory_gib} | {chosen} | `{rule}` | {cost} |")
    return "\n".join(lines) + "\n"


def test_the_table_in_the_docs_is_up_to_date(shape: ModelShape) -> None:
    block = DOCS.read_text().split(BLOCK[0])[1].split(BLOCK[1])[0]
    assert block == by_memory(shape), "rewrite it: PYTHONPATH=tests:. python tests/plan/test_recommend.py"


@pytest.mark.parametrize(
    ("memory_gib", "expected"),
    [(400, {"ddp"}), (200, {"ddp"}), (120, {"zero1"}), (36, {"zero3", "fsdp2"}), (16, {"zero3_cpu_offload"})],
)
def test_the_rule_of_thumb_is_recommended_where_it_is_right(
    shape: ModelShape, memory_gib: float, expected: set[str]
) -> None:
    """All fits: replicate. The optimizer does not: shard it. Nothing does: shard all. Not even that: offload."""
    answer = found(request(shape, memory_gib=memory_gib))
    assert answer.choice.preset.name in expected
    assert answer.rule_of_thumb in expected


def test_a_choice_against_the_rule_of_thumb_says_by_how_much_it_is_better(shape: ModelShape) -> None:
    differing = 0
    for memory_gib in (200, 79, 60, 50, 45, 40, 16):
        answer = found(request(shape, memory_gib=memory_gib))
        if answer.choice.preset.name == answer.rule_of_thumb:
            continue
        differing += 1
        (said,) = [reason for reason in answer.reasons if "rule of thumb" in reason]
        assert answer.rule_of_thumb in said
        assert "as long" in said
        (rule,) = best_candidates(request(shape, memory_gib=memory_gib), [load_preset(answer.rule_of_thumb)])
        assert max(rule.time_ratios(answer.choice)) > EQUAL_WITHIN
    assert 0 < differing < 6


def test_whole_gradients_are_recommended_only_where_a_slow_network_makes_them_clearly_faster(shape: ModelShape) -> None:
    def choice(gigabytes_per_second: int, **job: Any) -> PlannedJob:
        asked = request(shape, world_size=32, global_batch_size=32 * 64, job=PlannedJob(max_seq_length=4096, **job))
        asked = replace(asked, network_bytes_per_second=10**9 * gigabytes_per_second)
        (best,) = best_candidates(asked, [load_preset("fsdp2")])
        assert best.fits
        assert best.job.gradient_accumulation_steps > 1
        assert ("--accumulate whole" in train_command(best, asked, "model")) == (best.job.accumulate == "whole")
        return best.job

    assert choice(2).accumulate == "whole"
    assert choice(400).accumulate is None
    assert choice(2, accumulate="sharded").accumulate == "sharded"


def test_every_other_preset_has_a_reason_against_it(shape: ModelShape) -> None:
    why_not = found(request(shape)).why_not
    assert why_not["single"] == "trains in one process"
    assert why_not["zero3_nvme_offload"].startswith("needs a local NVMe disk")
    assert "changes the training problem" in why_not["zeropp"]
    assert why_not["ddp"].startswith("does not fit: ")
    assert "GiB of 79.14 GiB (micro-batch 1" in why_not["ddp"]
    names = {preset.name for preset in list_presets()}
    assert names - why_not.keys() == {found(request(shape)).choice.preset.name}


def test_least_memory_is_another_objective(shape: ModelShape) -> None:
    answer = found(request(shape), objective="least-memory")
    peaks = [one.memory.planned_peak_bytes for one in best_candidates(request(shape), list_presets()) if one.fits]
    assert answer.choice.memory.planned_peak_bytes == min(peaks)


@pytest.mark.parametrize(
    ("changes", "preset"),
    [
        ({"memory_gib": 200, "world_size": 1}, "single"),
        ({"job": PlannedJob(max_seq_length=2048, lora_r=16)}, "ddp"),  # the frozen weights fit on each GPU
        ({"gpu": custom_gpu(None, memory_gib=80)}, "zero1"),  # without a known peak, the least sharding that fits
    ],
)
def test_the_least_sharding_is_chosen_where_nothing_is_gained_by_more(
    shape: ModelShape, changes: dict[str, Any], preset: str
) -> None:
    assert found(request(shape, **changes)).choice.preset.name == preset


def test_4_bit_weights_that_fit_are_replicated(shape: ModelShape) -> None:
    asked = request(shape, memory_gib=24, job=PlannedJob(max_seq_length=1024, lora_r=16, load_in_4bit=True))
    answer = found(asked)
    assert answer.choice.preset.sharded_parts in ((), ("optimizer",), ("gradient", "optimizer"))
    assert answer.choice.preset.offload_param is None
    assert answer.why_not["zero2_cpu_offload"] == "the adapters' optimizer states are too small to offload"


def test_an_error_that_nothing_fits_names_the_smallest_plan_and_what_would_fit(shape: ModelShape) -> None:
    presets = [load_preset("fsdp2"), load_preset("zero3")]
    with pytest.raises(
        ToolkitError, match=r"nothing fits on 8 × h100-sxm.*does not fit: .* GiB of 20.00 GiB"
    ) as refused:
        recommend(request(shape, memory_gib=20), presets)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("`--num-processes ")
    with pytest.raises(ToolkitError, match="nothing fits") as refused:
        recommend(request(shape, memory_gib=2), presets)
    assert refused.value.hint == "`--lora-r 16`, a shorter `--max-seq-length`, or a larger GPU"


def test_a_node_with_too_little_host_memory_rules_out_offload(shape: ModelShape) -> None:
    asked = request(shape, memory_gib=24, host_memory_bytes=64 * GIB)
    with pytest.raises(ToolkitError, match="nothing fits"):
        recommend(asked, [load_preset("zero3_cpu_offload")])
    assert (
        "of host memory per node, which has 64.00 GiB" in found(replace(asked, gpu=H100)).why_not["zero3_cpu_offload"]
    )


def test_a_gpu_without_bf16_has_no_preset(shape: ModelShape) -> None:
    with pytest.raises(ToolkitError, match=r"no preset is for 8 × v100-32gb: .*has no hardware"):
        recommend(request(shape, gpu=find_gpu("v100-32gb")), [load_preset("ddp")])


def test_without_a_known_peak_no_speed_is_shown(shape: ModelShape) -> None:
    answer = found(request(shape, gpu=custom_gpu(None, memory_gib=80)))
    assert answer.choice.speed is None
    assert answer.why_not["zero2"].startswith("fits too, and shards or offloads more: ")
    assert any("--gpu-tflops" in line for line in recommendation_lines(answer, request(shape), model="m"))


def test_the_global_batch_is_divisible_and_options_are_in_range(shape: ModelShape) -> None:
    with pytest.raises(ToolkitError, match="--global-batch-size 30 is not divisible by 8 GPUs") as refused:
        request(shape, global_batch_size=30)
    assert refused.value.hint == "`--global-batch-size 32`"
    options = RecommendOptions(gpu="h100", num_processes=8)
    with pytest.raises(ToolkitError, match="--global-batch-size is 0, expected 1 or more"):
        recommend_request(MODEL, replace(options, global_batch_size=0))
    with pytest.raises(ToolkitError, match="--network-gb-per-second is -1, expected more than 0"):
        recommend_request(MODEL, replace(options, network_gb_per_second=-1))
    with pytest.raises(ToolkitError, match="--objective is 'cheapest', expected fastest or least-memory"):
        recommend_request(MODEL, replace(options, objective="cheapest"))
    assert (
        recommend_request(MODEL, replace(options, num_processes=24)).global_batch_size == 48
    )  # 32 or the next multiple


def test_the_commands_have_the_planned_settings(shape: ModelShape) -> None:
    asked = request(shape, memory_gib=45)
    answer = found(asked)
    words = shlex.split(train_command(answer.choice, asked, MODEL))
    job = answer.choice.job
    assert words[:6] == ["toolkit", "train", "--preset", answer.choice.preset.name, "--num-processes", "8"]
    assert words[words.index("--model_name_or_path") + 1] == str(LLAMA_8B_CONFIG.parent)
    assert words[words.index("--per_device_train_batch_size") + 1] == str(job.per_device_train_batch_size)
    assert ("--activation_checkpointing" in words) == job.activation_checkpointing
    compared = compare_command([answer.choice, *answer.others], asked, MODEL)
    assert compared is not None
    assert compared.count("--preset ") == 3


def test_several_nodes_are_launched_by_accelerate_and_deepspeed_without_pdsh(shape: ModelShape) -> None:
    asked = request(shape, world_size=32, network_bytes_per_second=50 * 10**9)
    hybrid, zero3 = best_candidates(asked, [load_preset("fsdp2_hybrid"), load_preset("zero3")])
    command = train_command(hybrid, asked, "org/model")
    assert "--num_machines 4 " in command
    assert "--parallelism_config_dp_shard_size 16 " in command
    assert compare_command([hybrid], asked, "org/model") is None
    assert "--deepspeed_multinode_launcher standard " in train_command(zero3, asked, "org/model")


def test_the_json_has_numbers_and_a_reason_for_each_preset(shape: ModelShape) -> None:
    asked = request(shape)
    answer = json.loads(json.dumps(recommendation_json(found(asked), asked, model="m", objective="fastest", price=2.0)))
    assert answer["choice"]["planned_peak_bytes"] + answer["choice"]["headroom_bytes"] == asked.gpu.memory_bytes
    assert len(answer["choice"]["step_seconds"]) == 2
    assert [other["preset"] for other in answer["others"]] == list(dict.fromkeys(o["preset"] for o in answer["others"]))
    assert all(other["why_not"] for other in answer["others"])
    slow, fast = answer["choice"]["tokens_per_second_per_gpu"]
    assert answer["choice"]["dollars_per_million_tokens"] == pytest.approx([2e6 / 3600 / fast, 2e6 / 3600 / slow])
    assert len(answer["scaling"]) == 8


def test_the_printed_command_is_accepted_except_for_its_placeholder_dataset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA_8B_CONFIG.read_text())
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    asked = toolkit("recommend", str(tmp_path), "--gpu", "h100", "--num-processes", "2", "--lora-r", "8", "--json")
    assert asked.returncode == 0, asked.stderr
    words = shlex.split(json.loads(asked.stdout)["command"])
    refused = toolkit(*words[1:4], "--cpu", *words[4:])
    assert refused.returncode == 2
    assert "DATASET" in refused.stderr


def test_scaling_efficiency_is_relative_to_the_smallest_world_size(shape: ModelShape) -> None:
    asked = request(shape)
    choice = found(asked).choice
    points = scaling_curve(choice, asked)
    assert [point.world_size for point in points] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert choice.speed is not None
    assert points[0].tokens_per_second == pytest.approx([8 * rate for rate in choice.speed.tokens_per_second_per_gpu])
    assert points[0].scaling_efficiency == (1.0, 1.0)
    slow = [point.tokens_per_second[0] / point.world_size for point in points]
    assert [point.scaling_efficiency[0] for point in points] == pytest.approx([rate / slow[0] for rate in slow])
    assert points[-1].failure_loss > points[0].failure_loss > 0


def test_failures_cost_saves_half_an_interval_and_a_restart() -> None:
    """On 1,024 GPUs: one failure every 49.5 hours, so a save every √(2·60·178,164) = 4,624 s."""
    mean = 54 * 24 * 16_384 / 419 / 1024 * 3600
    interval = (2 * 60 * mean) ** 0.5
    first_order = 60 / interval + (interval / 2 + 600) / mean
    assert failure_loss(1024, save_seconds=60) == pytest.approx(first_order, rel=0.02)


if __name__ == "__main__":
    head, _, rest = DOCS.read_text().partition(BLOCK[0])
    table = by_memory(llama_8b())
    DOCS.write_text(head + BLOCK[0] + table + BLOCK[1] + rest.partition(BLOCK[1])[2])
