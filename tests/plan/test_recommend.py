"""Recommendations for GPUs of different sizes, their reasons, commands and scaling, and requests that are refused.

PYTHONPATH=tests/support:tests/warm_starts:. python tests/plan/test_recommend.py    # rewrites the docs' table
"""

import importlib.util
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG
from model_configs import llama_8b

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import custom_gpu, find_gpu
from toolkit.plan import recommendation
from toolkit.plan.candidates import RecommendRequest, best_candidates
from toolkit.plan.finish import ANY_GPU, Cost
from toolkit.plan.methods import METHODS, SFT
from toolkit.plan.options import RecommendOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.recommend import Recommendation, recommend, recommend_request
from toolkit.plan.recommendation import failure_loss, recommendation_json, scaling_curve
from toolkit.plan.recommended_commands import compare_command, train_command
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB

H100 = find_gpu("h100-sxm")
DOCS = Path(__file__).parents[2] / "benchmarks" / "results" / "preset_by_memory.md"
MEMORIES = (400, 200, 180, 150, 100, 70, 60, 50, 45, 40, 36, 28, 24, 20, 10)
BLOCK = ("<!-- generated: by memory -->\n", "<!-- /generated -->")
MODEL = str(LLAMA_8B_CONFIG)


def request(*, memory_gib: float = 79.14, **changes: Any) -> RecommendRequest:
    gpu, job = custom_gpu(H100, memory_gib=memory_gib), PlannedJob(max_seq_length=2048)
    asked = RecommendRequest(shape=llama_8b(), gpu=gpu, world_size=8, global_batch_size=64, job=job)
    return replace(asked, **changes)


def found(asked: RecommendRequest, objective: str = "fastest") -> Recommendation:
    return recommend(asked, list_presets(), objective=objective)


def by_memory() -> str:
    """The table in the docs: the recommendation, the rule of thumb, and what the rule would cost."""
    lines = ["| GiB per GPU | recommended | rule of thumb | cost of the rule |", "| ---: | :--- | :--- | :--- |"]
    for memory_gib in MEMORIES:
        answer = found(request(memory_gib=memory_gib))
        job, rule = answer.choice.job, answer.rule_of_thumb
        recomputes = ", checkpointing" if job.activation_checkpointing else ""
        cost = "" if rule == answer.choice.preset.name else answer.why_not[rule]
        chosen = f"`{answer.choice.preset.name}`, per-GPU batch {job.per_device_train_batch_size}{recomputes}"
        lines.append(f"| {memory_gib} | {chosen} | `{rule}` | {cost} |")
    return "\n".join(lines) + "\n"


def test_the_table_in_the_docs_is_up_to_date() -> None:
    block = DOCS.read_text().split(BLOCK[0])[1].split(BLOCK[1])[0]
    assert block == by_memory(), "rewrite it: the command is at the top of this file"


def test_whole_gradients_are_recommended_only_where_a_slow_network_makes_them_clearly_faster() -> None:
    def choice(gigabytes_per_second: int, **job: Any) -> PlannedJob:
        asked = request(world_size=32, global_batch_size=32 * 64, job=PlannedJob(max_seq_length=4096, **job))
        asked = replace(asked, network_bytes_per_second=10**9 * gigabytes_per_second)
        (best,) = best_candidates(asked, [load_preset("fsdp2")])
        assert best.fits
        assert best.job.gradient_accumulation_steps > 1
        assert ("--accumulate whole" in train_command(best, asked, "model")) == (best.job.accumulate == "whole")
        return best.job

    assert choice(2).accumulate == "whole"
    assert choice(400).accumulate is None
    assert choice(2, accumulate="sharded").accumulate == "sharded"


def test_every_other_preset_has_a_reason_against_it() -> None:
    why_not = found(request()).why_not
    assert why_not["single"] == "trains in one process"
    assert why_not["zero3_nvme_offload"].startswith("needs a local NVMe disk")
    assert "changes the training problem" in why_not["zeropp"]
    assert why_not["ddp"].startswith("does not fit: ")
    assert "GiB of 79.1 (per-GPU batch 1" in why_not["ddp"]
    names = {preset.name for preset in list_presets()}
    assert names - why_not.keys() == {found(request()).choice.preset.name}


@pytest.mark.parametrize(
    ("changes", "objective", "preset"),
    [
        ({"memory_gib": 200, "world_size": 1}, "fastest", "single"),
        ({"job": PlannedJob(max_seq_length=2048, lora_r=16)}, "fastest", "ddp"),  # the frozen weights fit on each GPU
        ({"gpu": custom_gpu(None, memory_gib=80)}, "fastest", "zero1"),  # no known peak: the least sharding that fits
        ({}, "least-memory", "zero2_cpu_offload"),
    ],
)
def test_the_choice_depends_on_job_gpu_and_objective(changes: dict[str, Any], objective: str, preset: str) -> None:
    answer = found(request(**changes), objective=objective)
    assert answer.choice.preset.name == preset
    assert (answer.reasons[0] == "it needs the least memory per GPU") == (objective == "least-memory")


def test_less_sharding_wins_where_the_ends_of_the_range_disagree_on_the_fastest() -> None:
    options = RecommendOptions(gpu="rtx-3090", num_processes=2, lora_r=16)
    answer = found(recommend_request("meta-llama/Llama-3.1-8B", options))
    fastest = next(each for each in answer.others if each.preset.name == "fsdp2")
    best, worst = fastest.time_ratios(answer.choice)  # FSDP2 depends on PCIe
    assert (answer.choice.preset.name, best < 0.87, worst > 1.15) == ("ddp", True, True)
    assert answer.reasons[0] == "it may be faster than the fastest by estimate (`fsdp2`), and shards least"


def test_offload_loses_where_its_slow_end_is_clearly_slower() -> None:
    options = RecommendOptions(gpu="rtx-3090", num_processes=2, lora_r=16, max_seq_length=2048)
    presets = [load_preset(name) for name in ("fsdp2", "zero2_cpu_offload")]
    answer = recommend(recommend_request("Qwen/Qwen3-4B", options), presets)
    (offload,) = answer.others
    assert min(answer.choice.time_ratios(offload)) > 1  # by the estimate, offload is faster at both ends
    assert answer.choice.preset.name == "fsdp2"


def test_4_bit_weights_that_fit_are_replicated() -> None:
    asked = request(memory_gib=24, job=PlannedJob(max_seq_length=1024, lora_r=16, load_in_4bit=True))
    answer = found(asked)
    assert answer.choice.preset.sharded_parts in ((), ("optimizer",), ("gradient", "optimizer"))
    assert answer.choice.preset.offload_param is None
    assert answer.why_not["zero2_cpu_offload"] == "the adapters' optimizer states are too small to offload"


@pytest.mark.parametrize(
    ("changes", "presets", "message", "hint"),
    [
        ({"memory_gib": 20}, ["fsdp2", "zero3"], r"on 8 x h100-sxm.*fit: .* GiB of 20.0 ", "LoRA fits here, "),
        ({"memory_gib": 2}, ["fsdp2"], "nothing fits", "a shorter `--max-seq-length`, or a larger GPU"),
        ({"gpu": find_gpu("v100-32gb")}, ["ddp"], r"no preset is for 8 x v100-32gb: .*has no hardware", "see `toolkit"),
        ({"host_memory_bytes": 64 * GIB}, ["zero3_cpu_offload"], "of host memory per node, which has 64.0", ""),
    ],
)
def test_an_error_names_the_smallest_plan(changes: dict[str, Any], presets: list[str], message: str, hint: str) -> None:
    with pytest.raises(ToolkitError, match=message) as refused:
        recommend(request(**changes), list(map(load_preset, presets)))
    assert (refused.value.hint or "").startswith(hint)


def test_where_nothing_fits_the_hint_has_what_fits_here_before_more_gpus() -> None:
    options = RecommendOptions(gpu="4090", num_processes=2, host_memory_gib=64)
    with pytest.raises(ToolkitError, match="nothing fits on 2 x rtx-4090") as refused:
        recommend(recommend_request(MODEL, options), list_presets())
    ways = [way.rpartition(": ")[2] for way in (refused.value.hint or "").split("; ")]
    assert ways == ["`--lora-r 16`", "`--lora-r 16 --load-in-4bit`", "`--host-memory-gib 127`", "`--num-processes 8`"]
    for changes in ({"lora_r": 16}, {"lora_r": 16, "load_in_4bit": True}, {"host_memory_gib": 127}):
        assert recommend(recommend_request(MODEL, replace(options, **changes)), list_presets()).choice.fits


def test_the_first_line_of_an_offload_has_the_host_memory_it_needs() -> None:
    asked = recommend_request(MODEL, RecommendOptions(gpu="rtx-4090", num_processes=2))
    lines = recommendation.recommendation_lines(found(asked), asked, model="m")
    assert lines[2].startswith("use       fsdp2_cpu_offload: ")
    assert lines[2].endswith(" GiB of host memory per node")
    assert any(line.startswith("host      128 GiB per node assumed, 64 per GPU (") for line in lines)


def test_beside_an_offload_is_what_fits_on_the_gpus_instead() -> None:
    options = RecommendOptions(gpu="rtx-4090", num_processes=1)
    asked = recommend_request("Qwen/Qwen3-1.7B", options)
    answer = found(asked)
    assert answer.choice.preset.offloads
    ways = dict(re.findall(r"^(.*) fits here, .* with `\w+`: `(.*)`$", "\n".join(answer.instead), re.MULTILINE))
    assert ways == {"LoRA": "--lora-r 16", "QLoRA": "--lora-r 16 --load-in-4bit"}
    for changes in ({"lora_r": 16}, {"lora_r": 16, "load_in_4bit": True}):
        choice = recommend(recommend_request("Qwen/Qwen3-1.7B", replace(options, **changes)), list_presets()).choice
        assert not choice.preset.offloads
    lines = recommendation.recommendation_lines(answer, asked, model="m")
    assert "instead   bf16 weights without fp32 master weights, as other tools train, are not planned" in lines
    assert recommendation_json(answer, asked, model="m", objective="fastest")["instead"] == list(answer.instead)
    assert found(request()).instead == ()


def test_an_optimizer_that_excludes_the_offload_that_would_fit_says_so() -> None:
    options = RecommendOptions(gpu="rtx-4090", num_processes=1, optim="adamw_8bit")
    with pytest.raises(ToolkitError, match="nothing fits on 1 x rtx-4090") as refused:
        recommend(recommend_request("Qwen/Qwen3-1.7B", options), list_presets())
    assert re.match(
        r"AdamW fits here, .*_cpu_offload`, which adamw_8bit excludes: `--optim adamw_torch_fused`",
        str(refused.value.hint),
    )


def test_the_measuring_command_measures_the_recommended_setting() -> None:
    for model, options in (
        ("Qwen/Qwen3-8B", RecommendOptions(gpu="h100", num_processes=8, max_seq_length=2048)),
        (
            "meta-llama/Llama-3.3-70B-Instruct",
            RecommendOptions(gpu="a100-80gb", num_processes=2, lora_r=16, load_in_4bit=True),
        ),
    ):
        asked = recommend_request(model, options)
        answer = found(asked)
        command, measuring = (
            train_command(answer.choice, asked, model),
            compare_command([answer.choice, *answer.others[:2]], asked, model),
        )
        words, measured = (text.split(" -- ")[1].split(" --") for text in (command, measuring))
        assert set(measured) - set(words) == {"max_steps 20"}
        assert {word.split()[0] for word in set(words) - set(measured)} == {"output_dir"}


@pytest.mark.parametrize("method", [name for name in METHODS if name != SFT])
def test_a_method_has_trls_own_script_or_says_that_there_is_none(method: str) -> None:
    options = RecommendOptions(gpu="h100", num_processes=8, method=method, lora_r=16)
    asked = recommend_request("Qwen/Qwen3-1.7B", options)
    answer = found(asked)
    command = train_command(answer.choice, asked, "m")
    trl = Path(str(importlib.util.find_spec("trl").origin)).parent  # type: ignore[union-attr]
    exists = (trl / "scripts" / f"{method}.py").exists()
    assert (f" --module trl.scripts.{method} -- " in command) == exists
    assert (f" --script {method}.py -- " in command) != exists
    said = [line for line in recommendation.recommendation_lines(answer, asked, model="m") if line.startswith("run it")]
    assert ("run it, in a script around trl.experimental." in said[0]) != exists
    trainer = METHODS[method].trainer
    if trainer is not None:
        folder, name = trainer.split()[0].split(".")[2:]
        assert f"class {name}" in (trl / "experimental" / folder / f"{folder}_trainer.py").read_text()
    assert ("--learning_rate 5e-6" in command) == (method == "dpo")


def test_adapters_have_a_learning_rate_in_the_command() -> None:
    asked = request(job=PlannedJob(max_seq_length=2048, lora_r=16))
    assert "--learning_rate 0.0002 " in train_command(found(asked).choice, asked, "m")
    asked = request()
    assert "learning_rate" not in train_command(found(asked).choice, asked, "m")


def test_three_alternatives_and_what_does_not_fit_are_shown_without_all() -> None:
    asked = request()
    shown, everything = (
        [line.split()[0] for line in lines if line]
        for lines in (
            recommendation.recommendation_lines(found(asked), asked, model="m", show_all=show_all)
            for show_all in (False, True)
        )
    )
    assert (shown.count("or"), shown.count("rejected")) == (3, 1)  # ddp
    assert everything.count("or") + everything.count("rejected") == len(list_presets()) - 1


def test_without_a_known_peak_no_speed_is_shown() -> None:
    answer = found(request(gpu=custom_gpu(None, memory_gib=80)))
    assert answer.choice.speed is None
    assert answer.why_not["zero2"].startswith("fits too, and shards or offloads more: ")
    assert any("--gpu-tflops" in line for line in recommendation.recommendation_lines(answer, request(), model="m"))


def test_the_global_batch_is_divisible() -> None:
    with pytest.raises(ToolkitError, match="--global-batch-size 30 is not divisible by 8 GPUs") as refused:
        request(global_batch_size=30)
    assert refused.value.hint == "`--global-batch-size 32`"
    options = RecommendOptions(gpu="h100", num_processes=24)
    assert recommend_request(MODEL, options).global_batch_size == 48  # 32 or the next multiple


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("global_batch_size", 0, "--global-batch-size is 0, expected 1 or more"),
        ("network_gb_per_second", -1, "--network-gb-per-second is -1, expected more than 0"),
        ("objective", "cheapest", "--objective is 'cheapest', expected fastest or least-memory"),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        recommend_request(MODEL, RecommendOptions(gpu="h100", num_processes=8, **{option: value}))


def test_several_nodes_are_launched_by_accelerate_and_deepspeed_without_pdsh() -> None:
    asked = request(world_size=32, network_bytes_per_second=50 * 10**9)
    hybrid, zero3 = best_candidates(asked, [load_preset("fsdp2_hybrid"), load_preset("zero3")])
    command = train_command(hybrid, asked, "org/model")
    assert "--num_machines 4 " in command
    assert "--parallelism_config_dp_shard_size 16 " in command
    assert compare_command([hybrid], asked, "org/model") is None
    assert "--deepspeed_multinode_launcher standard " in train_command(zero3, asked, "org/model")


def test_the_json_has_numbers_and_a_reason_for_each_preset() -> None:
    asked = request()
    answer = json.loads(
        json.dumps(
            recommendation_json(found(asked), asked, model="m", objective="fastest", cost=Cost(prices={ANY_GPU: 2.0}))
        )
    )
    choice = answer["choice"]
    assert choice["planned_peak_bytes"] + choice["headroom_bytes"] == asked.gpu.memory_bytes
    assert len(choice["step_seconds"]) == 2
    assert all(other["why_not"] for other in answer["others"])
    slow, fast = choice["tokens_per_second_per_gpu"]
    assert choice["dollars_per_million_tokens"] == pytest.approx([2e6 / 3600 / fast, 2e6 / 3600 / slow])
    assert len(answer["scaling"]) == 8


def test_the_printed_command_is_accepted_except_for_its_placeholder_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(LLAMA_8B_CONFIG.read_text())
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    asked = json_of(["recommend", str(tmp_path), "--gpu", "h100", "--num-processes", "2", "--lora-r", "8"], capsys)
    words = shlex.split(asked["command"])
    code, _, err = run_command([*words[1:4], "--cpu", *words[4:]], capsys)
    assert (code, "DATASET" in err) == (2, True)


def test_scaling_efficiency_is_relative_to_the_smallest_world_size() -> None:
    asked = request()
    points = scaling_curve(found(asked).choice, asked)
    assert [point.world_size for point in points] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert points[0].scaling_efficiency == (1.0, 1.0)
    slow = [point.tokens_per_second[0] / point.world_size for point in points]
    assert [point.scaling_efficiency[0] for point in points] == pytest.approx([rate / slow[0] for rate in slow])
    assert points[-1].failure_loss > points[0].failure_loss > 0
    # On 1,024 GPUs: one failure every 49.5 hours, so a save every √(2·60·178,164) = 4,624 s.
    mean = 54 * 24 * 16_384 / 419 / 1024 * 3600
    interval = (2 * 60 * mean) ** 0.5
    assert failure_loss(1024) == pytest.approx(60 / interval + (interval / 2 + 600) / mean, rel=0.02)


if __name__ == "__main__":
    head, _, rest = DOCS.read_text().partition(BLOCK[0])
    table = by_memory()
    DOCS.write_text(head + BLOCK[0] + table + BLOCK[1] + rest.partition(BLOCK[1])[2])
