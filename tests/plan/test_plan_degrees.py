"""`toolkit plan` and `toolkit recommend` with degrees of parallelism: options, refusals, proposals."""

from dataclasses import replace
from typing import Any

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG
from model_configs import llama_8b, small_shape

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import custom_gpu, find_gpu
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan.candidates import NOT_NEEDED, RecommendRequest
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import PlanRequest, make_plans
from toolkit.plan.recommend import recommend
from toolkit.plan.recommended_commands import compare_command, train_command
from toolkit.presets import list_presets, load_preset

H100, MODEL = find_gpu("h100-sxm"), str(LLAMA_8B_CONFIG)


def request(*presets: str, world_size: int = 8, **job: Any) -> PlanRequest:
    return PlanRequest(
        shape=llama_8b(),
        presets=[load_preset(name) for name in presets] or list_presets(),
        world_sizes=(world_size,),
        job=PlannedJob(**{"per_device_train_batch_size": 1, "max_seq_length": 2048, **job}),
        gpu=H100,
        strict=bool(presets),
    )


def test_the_command_plans_a_layout_and_its_traffic_by_dimension(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", MODEL, *["--num-processes", "16", "--gpu", "h100", "--preset", "fsdp2_tp", "--tp", "4"]]
    code, out, _ = run_command([*words, "--per-device-train-batch-size", "1", "--parts"], capsys)
    assert code == 0
    assert "\ndp_shard 4 x tp 4; each GPU sends per step, without overlap:\n" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert "between nodes" in lines["dp_shard"]
    assert "within a node" in lines["tp"]
    [row] = json_of(words, capsys)["plans"]
    assert (row["layout"]["tp"], row["layout"]["dp_shard"]) == (4, 4)
    assert [each["dimension"] for each in row["communication"]] == ["dp_shard", "tp"]
    assert sum(each["sent_bytes"] for each in row["communication"]) == row["communication_bytes_per_step"]


def test_a_degree_is_given_to_the_presets_that_have_its_dimension() -> None:
    layouts = {plan.preset.name: plan.setup.layout for plan in make_plans(request("fsdp2", "tp", "cp", tp=4, cp=2))}
    tp, cp = ParallelLayout(dp_replicate=2, tp=4), ParallelLayout(dp_shard=4, cp=2)
    assert layouts == {"fsdp2": None, "tp": tp, "cp": cp}


def test_without_named_presets_those_of_the_given_degrees_are_planned_beside_data_parallelism() -> None:
    alone, tp, cp = ({plan.preset.name for plan in make_plans(request(**how))} for how in ({}, {"tp": 2}, {"cp": 2}))
    assert {"ddp", "fsdp2"} <= alone
    assert (tp - alone, cp - alone) == ({"tp", "fsdp2_tp", "hsdp_tp"}, {"cp"})


@pytest.mark.parametrize(
    ("degrees", "why"),
    [({"cp": 3}, "a multiple of 3 processes"), ({"ep": 4}, "has no experts"), ({"tp": 3}, "does not divide its 32")],
)
def test_a_degree_that_no_preset_can_have_is_refused_though_others_train(degrees: dict[str, int], why: str) -> None:
    with pytest.raises(ToolkitError, match=why):
        make_plans(request(**degrees))


def test_what_has_no_figures_is_refused_rather_than_planned() -> None:
    counted = replace(llama_8b(), counted_on="meta device")
    with pytest.raises(ToolkitError, match="--tp is not planned for llama: there are no formulas"):
        make_plans(replace(request("fsdp2_tp", tp=2), shape=counted))
    mixture = replace(request("ep", ep=2, lora_r=8), shape=small_shape("qwen3_moe"))
    with pytest.raises(ToolkitError, match="LoRA on qwen3_moe is not planned under preset 'ep'"):
        make_plans(mixture)


def asked(*, length: int, memory_gib: float = 79.14, **changes: Any) -> RecommendRequest:
    job, gpu = PlannedJob(max_seq_length=length), custom_gpu(H100, memory_gib=memory_gib)
    made = RecommendRequest(shape=llama_8b(), gpu=gpu, world_size=8, global_batch_size=8, job=job)
    return replace(made, **changes)


def test_where_data_parallelism_fits_split_presets_are_not_considered() -> None:
    found = recommend(asked(length=2048), list_presets())
    assert found.choice.preset.degrees == ()
    assert {found.why_not[name] for name in ("tp", "fsdp2_tp", "cp", "ulysses")} == {NOT_NEEDED}
    assert found.why_not["ep"].endswith("llama has no experts")


def test_a_sequence_too_long_for_one_gpu_is_divided_and_the_command_has_the_degree() -> None:
    presets = [preset for preset in list_presets() if preset.offload_optimizer is None]
    long = asked(length=131_072, memory_gib=64)
    choice = recommend(long, presets).choice
    assert choice.preset.name in ("cp", "ulysses")
    ((name, degree),) = choice.job.degrees.items()
    assert train_command(choice, long, "model").split(" -- ")[1].count(f"--{name} {degree}") == 1
    rows, steps = choice.job.per_device_train_batch_size, choice.job.gradient_accumulation_steps
    assert rows * steps * 8 // degree == long.global_batch_size
    assert rows < degree  # a comparison would give the group a sequence per rank
    assert compare_command([choice], long, "model") is None


def test_a_comparison_divides_the_batch_of_a_group_by_its_ranks() -> None:
    short = asked(length=1024)
    split, simple = (recommend(short, [load_preset(name)]).choice for name in ("fsdp2_tp", "fsdp2"))
    command = compare_command([split, simple], short, "model")
    degree = split.job.tp
    assert "--preset fsdp2_tp --preset fsdp2 --num-processes 8 " in command
    assert f"--per_device_train_batch_size 1 --gradient_accumulation_steps 1 --tp {degree}" in command
