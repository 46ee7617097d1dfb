"""`toolkit plan`: phases and parts, verdicts, limits, the command's table and JSON, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, toolkit

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu, gpu_by_hand
from toolkit.models.architectures import shape_of
from toolkit.models.fields import Fields
from toolkit.models.shape import ModelShape
from toolkit.plan.buffers import buffers
from toolkit.plan.engine import engine_of
from toolkit.plan.host import PROCESS_BYTES
from toolkit.plan.job import Job, check_job
from toolkit.plan.memory import plan_memory
from toolkit.plan.planner import Plan, Request, make_plans
from toolkit.plan.states import model_states
from toolkit.plan.verdict import largest_micro_batch, memory_verdict, verdict
from toolkit.plan.weights import weights_of
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB

LLAMA_8B = json.loads(LLAMA_8B_CONFIG.read_text())
P = 8_030_261_248
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def shape(fields: dict[str, Any] | None = None) -> ModelShape:
    found = shape_of(Fields(fields or LLAMA_8B, "config.json"))
    assert found is not None
    return found


def request(*presets: str, world_sizes: tuple[int, ...] = (8,), **how: Any) -> Request:
    chosen = [load_preset(name) for name in presets] or list_presets()
    job = Job(max_seq_length=2048, **how)
    return Request(
        shape=shape(), presets=chosen, world_sizes=world_sizes, job=job, gpu=find_gpu("h100-sxm"), strict=bool(presets)
    )


def test_the_states_of_8b_by_hand() -> None:
    held = {
        name: model_states(
            engine_of(load_preset(name), world_size=8, hidden_size=4096), weights_of(shape(), None, False)
        )
        for name in ("ddp", "zero1", "zero2", "fsdp2")
    }
    assert (held["ddp"].parameter_bytes, held["ddp"].gradient_bytes, held["ddp"].optimizer_bytes) == (
        4 * P,
        4 * P,
        8 * P,
    )
    assert (held["zero1"].parameter_bytes, held["zero1"].gradient_bytes) == (2 * P, 2 * P)
    assert held["zero2"].gradient_bytes == 2 * P // 8
    assert held["zero2"].optimizer_bytes == 12 * P // 8
    assert held["fsdp2"].total_bytes == 16 * P // 8


def test_parts_of_a_phase_add_up_and_the_peak_is_the_worst_phase() -> None:
    for preset in list_presets():
        size = preset.min_world_size
        plan = plan_memory(shape(), preset, world_size=size, job=Job())
        parts = ("parameter", "gradient", "optimizer", "activation", "logits", "buffer")
        for phase in plan.phases:
            assert phase.allocated_bytes == sum(getattr(phase, f"{part}_bytes") for part in parts)
        assert plan.planned_peak_bytes - plan.overhead_bytes == max(phase.allocated_bytes for phase in plan.phases)
        assert [phase.phase for phase in plan.phases] == ["load", "forward", "backward", "step"]


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2}),
        ({"max_seq_length": 8192}, {"max_seq_length": 4096}),
        ({}, {"activation_checkpointing": True}),
        ({"gradient_accumulation_steps": 4}, {}),
        ({"lora_r": 64}, {"lora_r": 8}),
        ({"lora_r": 8}, {"lora_r": 8, "load_in_4bit": True}),
        ({}, {"lora_r": 8}),
        ({"optimizer": "foreach", "max_seq_length": 128}, {"max_seq_length": 128}),
    ],
)
def test_each_lever_moves_memory_the_right_way(more: dict[str, Any], less: dict[str, Any]) -> None:
    def peak(how: dict[str, Any]) -> int:
        return plan_memory(
            shape(), load_preset("ddp"), world_size=2, job=Job(**{"max_seq_length": 8192} | how)
        ).planned_peak_bytes

    assert peak(more) > peak(less)


def test_ddp_holds_its_gradients_twice_and_one_process_does_not() -> None:
    weights = weights_of(shape(), None, False)

    def lasting(ranks: int) -> int:
        engine = engine_of(load_preset("ddp"), world_size=ranks, hidden_size=4096)
        return buffers(engine, weights, model_states(engine, weights), Job()).lasting_bytes

    assert (lasting(2), lasting(1)) == (4 * P, 0)


def test_fsdp2_waits_with_whole_gradients_when_it_accumulates() -> None:
    engine = engine_of(load_preset("fsdp2"), world_size=8, hidden_size=4096)
    weights = weights_of(shape(), None, False)
    states = model_states(engine, weights)
    waiting = [
        buffers(engine, weights, states, Job(gradient_accumulation_steps=steps)).accumulated_bytes for steps in (1, 2)
    ]
    assert waiting == [0, 2 * P]


def test_auto_in_a_deepspeed_file_follows_the_hidden_size() -> None:
    engine = engine_of(load_preset("zero3"), world_size=8, hidden_size=4096)
    assert (engine.reduce_bucket, engine.prefetch_bucket) == (4096**2, int(0.9 * 4096**2))
    assert engine.persistence_threshold == 40_960


def test_offload_moves_states_from_the_gpu_to_the_host() -> None:
    on_gpu = plan_memory(shape(), load_preset("zero3"), world_size=8, job=Job())
    offloaded = plan_memory(shape(), load_preset("zero3_cpu_offload"), world_size=8, job=Job())
    on_disk = plan_memory(shape(), load_preset("zero3_nvme_offload"), world_size=8, job=Job())
    assert offloaded.peak.optimizer_bytes == offloaded.peak.gradient_bytes == 0
    assert offloaded.host.training_bytes > 8 * PROCESS_BYTES + 16 * P > on_gpu.host.training_bytes
    assert on_disk.host.disk_bytes == pytest.approx(18 * P, rel=0.01)  # docs/nvme.md
    assert on_disk.host.training_bytes < offloaded.host.training_bytes


def test_host_memory_is_that_of_one_machine() -> None:
    job = Job(gpus_per_machine=4)
    plan = plan_memory(shape(), load_preset("ddp"), world_size=16, job=job)
    assert plan.host.loading_bytes == 4 * (PROCESS_BYTES + 4 * P)  # each rank loads a copy


def test_verdicts_leave_room_for_what_is_not_exact() -> None:
    sizes = {"planned_peak_bytes": 100, "exact_bytes": 40}  # 60 may be off by 9
    words = [verdict(memory_bytes=memory, **sizes) for memory in (109, 108, 91, 90)]
    assert words == ["fits", "too_close", "too_close", "does_not_fit"]


def test_an_architecture_whose_activations_nobody_knows_is_too_close_to_call_sooner() -> None:
    known, unknown = shape(), replace(shape(), counted_on="meta device", why_not_kept="it looks into values")
    plans = [
        plan_memory(one, load_preset("zero2"), world_size=8, job=Job(max_seq_length=2048)) for one in (known, unknown)
    ]
    assert plans[0].peak == plans[1].peak  # the same numbers, less believed
    memory = round(1.2 * plans[0].planned_peak_bytes)
    assert [memory_verdict(plan, memory_bytes=memory) for plan in plans] == ["fits", "too_close"]


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    for limit in (1, 2, 3, 7, 8, 1000, 4096):
        assert largest_micro_batch(lambda size, limit=limit: size <= limit) == limit
    assert largest_micro_batch(lambda _: False) is None


def test_the_largest_micro_batch_and_the_smallest_world_fit_and_the_next_do_not() -> None:
    [plan] = make_plans(request("zero3", activation_checkpointing=True))
    assert plan.largest_micro_batch is not None
    job = Job(max_seq_length=2048, activation_checkpointing=True)
    fits = []
    for size in (plan.largest_micro_batch, plan.largest_micro_batch + 1):
        larger = replace(job, per_device_train_batch_size=size)
        memory = plan_memory(shape(), load_preset("zero3"), world_size=8, job=larger)
        fits.append(memory_verdict(memory, memory_bytes=plan.memory_bytes))
    assert fits[0] == "fits" != fits[1]
    assert plan.smallest_world_size == 2


def test_all_presets_and_eight_world_sizes_are_planned_in_one_call() -> None:
    plans = make_plans(request(world_sizes=SIZES))  # benchmarks/planner.py has the seconds
    made = {(plan.preset, plan.world_size) for plan in plans}
    assert len(made) == len(plans) > 80
    assert {size for _, size in made} == set(SIZES)


def test_a_preset_is_left_out_where_it_cannot_be_unless_it_is_named() -> None:
    names = {plan.preset for plan in make_plans(request(world_sizes=(1,)))}
    assert "single" in names
    assert not names & {"fsdp2", "zeropp", "fsdp2_hybrid"}
    with pytest.raises(ToolkitError, match="'zeropp' needs at least 8 processes"):
        make_plans(request("zeropp", world_sizes=(2,)))
    with pytest.raises(ToolkitError, match="'zeropp' needs a multiple of 8"):
        make_plans(replace(request("zeropp"), world_sizes=(12,), job=Job(gpus_per_machine=4)))


def test_qlora_is_planned_where_it_trains() -> None:
    names = {plan.preset for plan in make_plans(request(world_sizes=(2,), lora_r=8, load_in_4bit=True))}
    assert names == {"ddp", "zero1", "zero2"}
    with pytest.raises(ToolkitError, match="--load-in-4bit does not work under preset 'zero3'"):
        make_plans(request("zero3", lora_r=8, load_in_4bit=True))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"per_device_train_batch_size": 0}, "--per-device-train-batch-size is 0, expected 1 or more"),
        ({"max_seq_length": -5}, "--max-seq-length is -5, expected 1 or more"),
        ({"max_seq_length": 10**12}, "expected 134,217,728 or less"),
        ({"gradient_accumulation_steps": 0}, "--gradient-accumulation-steps is 0"),
        ({"lora_r": 0}, "--lora-r is 0"),
        ({"lora_r": 9000}, "--lora-r is 9000, expected at most the hidden size 4096"),
        ({"load_in_4bit": True}, "--load-in-4bit needs --lora-r"),
        ({"loss": "fast"}, "--loss is 'fast', expected one of full, chunked, fused"),
    ],
)
def test_values_that_are_no_job_are_refused_by_name(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolkitError, match=said):
        check_job(Job(**how), shape())


def test_a_gpu_that_is_not_listed_has_no_speed_unless_its_peak_is_given() -> None:
    unlisted = replace(request("zero2"), gpu=gpu_by_hand(None, memory_gib=48))
    [plan] = make_plans(unlisted)
    assert (plan.speed, plan.as_row()["mfu"], plan.as_row()["step_seconds"]) == (None, None, None)
    assert plan.communication_bytes_per_step > 0
    [known] = make_plans(replace(unlisted, gpu=gpu_by_hand(None, memory_gib=48, tflops=300)))
    assert known.as_row()["mfu"][0] < known.as_row()["mfu"][1] < 1


def test_the_json_has_the_promised_keys() -> None:
    done = toolkit("plan", str(LLAMA_8B_CONFIG), "--world-size", "8", "--world-size", "16", "--gpu", "h100", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["counted_on"], answer["activations_from"]) == ("arithmetic", "formulas")
    assert {row["world_size"] for row in answer["plans"]} == {8, 16}
    promised = """preset world_size gpu verdict planned_peak_bytes headroom_bytes num_params parameter_bytes
        gradient_bytes optimizer_bytes activation_bytes logits_bytes buffer_bytes overhead_bytes host_bytes
        communication_bytes_per_step step_seconds tokens_per_second_per_gpu mfu"""
    for row in answer["plans"]:
        assert set(promised.split()) <= set(row)
        assert row["verdict"] in ("fits", "does_not_fit", "too_close")
        assert row["num_params"] == P
        assert row["headroom_bytes"] + row["planned_peak_bytes"] == find_gpu("h100").memory_bytes
        assert len(row["step_seconds"]) == len(row["mfu"]) == 2


def test_every_key_of_the_json_is_in_the_docs() -> None:
    documented = (Path(__file__).parent.parent / "docs" / "plan.md").read_text()
    [plan] = make_plans(request("zero2"))
    assert [key for key in plan.as_row() if f"`{key}`" not in documented] == []


def test_the_table_says_what_it_is_of_and_how_far_to_trust_it() -> None:
    done = toolkit(
        "plan", str(LLAMA_8B_CONFIG), "--world-size", "8", "--gpu", "h100", "--preset", "zero3", "--preset", "ddp"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "llama, 8,030,261,248 parameters; full fine-tune" in done.stdout
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert "does not fit" in lines["ddp"]
    assert " fits " in lines["zero3"]
    assert "held against a GPU" in done.stdout
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h1000"], "unknown GPU 'h1000'"),
        ([], "which GPU? none is named"),
        (["--gpu-memory-gib", "0"], "--gpu-memory-gib is 0.0"),
        (["--gpu", "h100", "--preset", "zero4"], "did you mean `zero3`?"),
        (["--gpu", "h100", "--world-size", "0"], "--world-size is 0, expected 1 or more"),
        (["--gpu", "h100", "--world-size", "9999999999"], "--world-size is 9,999,999,999"),
        (["--gpu", "h100", "--world-size", "12"], "12 GPUs do not fill machines of 8"),
    ],
)
def test_wrong_input_is_two_lines_and_exit_code_2(words: list[str], said: str) -> None:
    done = toolkit(
        "plan", str(LLAMA_8B_CONFIG), *(["--world-size", "8"] if "--world-size" not in words else []), *words
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_rows_are_plain_values() -> None:
    assert all(isinstance(plan, Plan) and json.dumps(plan.as_row()) for plan in make_plans(request()))
    assert GIB == 2**30
