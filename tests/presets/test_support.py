"""Each compatibility rule is written once: every part of the toolkit that asks gets the same answer."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_configs import fields_of
from preset_files import deepspeed_pair, write

from toolkit.engines.zero import BF16_MASTERS, BF16_STATES
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.job.job import Job
from toolkit.launch.preflight import check_process_count
from toolkit.launch.resume import TrainingRun
from toolkit.models.attention import read_model_attention
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.optimizers import OPTIMIZERS
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.candidates import RecommendRequest, refusal
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import PlanRequest, make_plans
from toolkit.presets import Preset, list_presets, load_preset, preset_names
from toolkit.presets.compatibility import CPU, Device, ModelLimits
from toolkit.presets.layout_rules import next_world_size
from toolkit.presets.support import check_arguments, limitations, unsupported
from toolkit.rehearse.rehearsal import check_rehearsal

LLAMA_8B = Path(__file__).parent.parent / "fixtures" / "llama-8b"
MIXTURE = shape_from_config(ConfigFields({"model_type": "qwen3_moe", **fields_of("qwen3_moe")[0]}, "config.json"))
WORLD_SIZES = (1, 2, 3, 4, 8, 16)  # on nodes of 8 GPUs, which the planner fills
FSDP2 = {"fsdp2", "fsdp2_cpu_offload", "fsdp2_grad_op", "fsdp2_hybrid"}
QLORA_PRESETS = {*("single", "ddp", "zero1", "zero2", "zero3", "zero3_cpu_offload"), *FSDP2}
# Layers, sequences or experts are divided over GPUs.
SPLIT = {preset.name for preset in list_presets() if preset.parallel}
STAGE_3 = {"zero3", "zero3_cpu_offload", "zero3_nvme_offload", "zeropp"}


def degrees(preset: Preset) -> dict[str, int]:
    return dict.fromkeys(preset.degrees, 2)


def shape_for(preset: Preset) -> ModelShape:
    return MIXTURE if "ep" in preset.degrees else read_model(str(LLAMA_8B))


def works(check: Callable[[], Any]) -> bool:
    try:
        check()
    except ToolkitError:
        return False
    return True


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes and Liger need a GPU to be installed; whether they are is not what is tested."""
    monkeypatch.setattr("toolkit.job.job_checks.is_importable", lambda _: True)


def planned(preset: Preset, world_size: int, job: PlannedJob) -> bool:
    named = {"shape": shape_for(preset), "presets": [preset], "world_sizes": [world_size], "job": job}
    return works(lambda: make_plans(PlanRequest(**named, gpu=find_gpu("h100"))))


def recommended(preset: Preset, size: int, job: PlannedJob) -> str | None:
    sizes = {"world_size": size, "global_batch_size": size, "nvme_bytes_per_second": 2**32}
    return refusal(RecommendRequest(shape=shape_for(preset), gpu=find_gpu("h100"), job=job, **sizes), preset)


@pytest.mark.parametrize("name", preset_names())
def test_launcher_planner_recommendation_and_rehearsal_accept_the_same_world_sizes(name: str) -> None:
    preset = load_preset(name)
    # a pipeline of two stages needs two micro-batches
    job = PlannedJob(max_seq_length=64, gradient_accumulation_steps=2, **degrees(preset))  # type: ignore[arg-type]
    method = Job(**degrees(preset), gradient_accumulation_steps=4)
    for size in WORLD_SIZES:
        expected = unsupported(preset, world_size=size) is None
        run = TrainingRun(preset=preset, job=Job(), num_processes=size, device=Device(count=16))
        assert works(lambda run=run: check_process_count(run)) is expected
        # degrees of 2 do not divide three processes, of which other degrees could be made
        trains = expected and unsupported(preset, method, world_size=size) is None
        assert planned(preset, size, job) is trains
        assert trains or recommended(preset, size, job) is not None
        if unsupported(preset, purpose="rehearse") is None:
            assert works(lambda size=size: check_rehearsal(preset, world_size=size, rank=0)) is expected


@pytest.mark.parametrize("name", preset_names())
def test_launcher_planner_recommendation_and_docs_agree_on_qlora(name: str) -> None:
    preset = load_preset(name)
    world_size, expected = next_world_size(preset, 2), name in QLORA_PRESETS
    job = PlannedJob(max_seq_length=64, lora_r=8, load_in_4bit=True, **degrees(preset))  # type: ignore[arg-type]
    method = Job.from_values({"lora_r": "8", "load_in_4bit": "true"} | degrees(preset))
    assert (unsupported(preset, Job(lora_r=8, load_in_4bit=True)) is None) is expected
    assert works(lambda: check_arguments(method, preset, num_processes=world_size, on_cpu=False)) is expected
    assert planned(preset, world_size, job) is expected
    assert any(line.startswith("QLoRA") for line in limitations(preset)) is not expected
    if not expected:
        reason = unsupported(preset, job.as_trained, model=job.limits_on(shape_for(preset)), purpose="recommend")
        assert recommended(preset, world_size, job) == reason.why


@pytest.mark.parametrize(
    ("stage", "bf16", "more", "refused"),
    [
        (2, {BF16_MASTERS: True, BF16_STATES: True}, {}, None),
        (2, {BF16_STATES: True}, {}, f"needs {BF16_MASTERS}"),
        (0, {BF16_MASTERS: True, BF16_STATES: True}, {}, "needs ZeRO stage"),
        (3, {BF16_MASTERS: True}, {}, f"needs {BF16_STATES}, or offload_optimizer"),
        (3, {BF16_MASTERS: True}, {"offload_optimizer": {"device": "cpu"}}, None),
        (2, {BF16_MASTERS: True, BF16_STATES: True}, {"offload_optimizer": {"device": "cpu"}}, "`optimizer` block"),
    ],
)
def test_bf16_states_that_deepspeed_refuses_are_refused_by_name(
    stage: int, bf16: dict[str, bool], more: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    path = deepspeed_pair(tmp_path, {"bf16": {"enabled": "auto"} | bf16, "zero_optimization": {"stage": stage} | more})
    reason = unsupported(load_preset(str(path)), Job())
    assert reason is None if refused is None else refused in reason.message  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("job", "accepted"),
    [
        (Job(ddp_comm_hook="bf16"), {"ddp"}),
        (Job(save_only_model=True), {*preset_names()} - FSDP2 - SPLIT | {"ulysses"}),
        (Job(async_save=True), FSDP2 | SPLIT - {"ulysses", "pipeline_1f1b"}),
        (Job(auto_find_batch_size=True), {*preset_names()} - STAGE_3 - SPLIT),
    ],
    ids=["comm hook", "save only model", "async save", "batch size search"],
)
def test_a_method_is_accepted_where_it_works(job: Job, accepted: set[str]) -> None:
    presets = list_presets()
    assert {p.name for p in presets if unsupported(p, job, world_size=next_world_size(p, 2)) is None} == accepted


def test_a_state_dict_that_rank_0_writes_alone_decides_about_saves(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_state_dict_type: FULL_STATE_DICT}\n"
    preset = load_preset(str(write(tmp_path / "full.yaml", text)))
    assert unsupported(preset, Job(save_only_model=True)) is None
    reason = unsupported(preset, Job(async_save=True))
    assert reason.why == "its fsdp_state_dict_type is FULL_STATE_DICT, which rank 0 writes alone"


def test_sequence_parallelism_needs_stage_3(tmp_path: Path) -> None:
    path = deepspeed_pair(tmp_path, {"zero_optimization": {"stage": 2}})
    path.write_text(path.read_text() + "  parallel: [dp_shard, sp]\n")
    reason = unsupported(load_preset(str(path)), Job(sp=2), world_size=2)
    assert reason.message.startswith("preset 'mine' makes gradients sp times too large: below stage 3 ZeRO sums")
    assert unsupported(load_preset("ulysses"), Job(sp=2), world_size=2) is None


def test_options_are_spelled_as_they_are_typed() -> None:
    preset, method = load_preset("zero2_cpu_offload"), Job(lora_r=8, load_in_4bit=True)
    launched, planned_ = unsupported(preset, method), unsupported(preset, method, purpose="plan")
    assert launched.message.startswith("--load_in_4bit does not work under preset 'zero2_cpu_offload'")
    assert planned_.message.startswith("--load-in-4bit does not work under preset 'zero2_cpu_offload'")


def test_a_rank_that_is_running_is_not_refused_for_its_world_size() -> None:
    """`toolkit train` would refuse it; a plain `accelerate launch` may run FSDP2 in one process."""
    assert unsupported(load_preset("fsdp2"), world_size=1) is not None
    assert unsupported(load_preset("fsdp2"), world_size=1, purpose="launched") is None


@pytest.mark.parametrize(
    ("name", "optim", "why"),
    [
        ("zero2_cpu_offload", "adamw_bnb_8bit", "accelerate replaces an offloaded optimizer"),
        ("zero3_nvme_offload", "paged_adamw_32bit", "accelerate replaces an offloaded optimizer"),
        ("zero1", "adafactor", "DeepSpeed flattens parameters"),
        ("zero3", "adamw_torch_8bit", "DeepSpeed's flat partitions"),
        ("fsdp2", "adamw_8bit", "bitsandbytes' kernels take no DTensors"),
        ("fsdp2_hybrid", "adafactor", "plain tensors beside DTensors"),
        ("fsdp2", "adamw_torch_4bit", "torchao's flat 4-bit states"),
        ("fsdp2_grad_op", "adagrad", "every rank keeps them whole"),
    ],
)
def test_an_optimizer_is_refused_where_it_would_be_another_one_or_fail(name: str, optim: str, why: str) -> None:
    reason = unsupported(load_preset(name), Job(optim=optim))
    assert (reason.rule, why in reason.why) == ("optim", True)


def test_the_hint_for_a_refused_optimizer_names_one_or_a_preset_that_works() -> None:
    for preset in list_presets():
        for optim in OPTIMIZERS:
            reason = unsupported(preset, Job(optim=optim))
            words = re.findall(r"`(?:--\w+ )?(\w+)`", "" if reason is None else str(reason.hint))
            for word in words:
                other = load_preset(word) if word in preset_names() else preset
                works_there = unsupported(other, Job(optim=optim if word in preset_names() else word)) is None
                assert works_there, (preset.name, optim, word)
            assert words or reason is None
        for optim in ("adamw_torch", "adamw_torch_fused"):  # which offload keeps
            assert unsupported(preset, Job(optim=optim)) is None


SDPA_OR_VARLEN = "`--attn_implementation sdpa_varlen` or `--attn_implementation sdpa`"


@pytest.mark.parametrize(
    ("method", "device", "message", "hint"),
    [
        ({"attn_implementation": "flash_attention_2", "packing": True}, CPU,
         "--attn_implementation flash_attention_2 needs a GPU: its kernels are built for GPUs", SDPA_OR_VARLEN),
        ({"attn_implementation": "flex_attention", "packing": True}, CPU,
         "--attn_implementation flex_attention needs a GPU: FlexAttention has no backward on a CPU (torch 2.13)",
         SDPA_OR_VARLEN),
        ({"attn_implementation": "sdpa_varlen"}, Device(),
         "--attn_implementation sdpa_varlen without --packing: padded rows need a mask",
         "add `--packing true`, or `--attn_implementation sdpa`"),
        ({"attn_implementation": "sdpa_varlen", "packing": True, "model": {"model_type": "gpt_oss"}}, Device(),
         "--attn_implementation sdpa_varlen does not run this model: transformers does not support SDPA for gpt_oss",
         "`--attn_implementation eager`"),
    ],
)  # fmt: skip
def test_an_attention_function_that_cannot_run_is_refused_with_one_that_can(
    method: dict[str, Any], device: Device, message: str, hint: str
) -> None:
    model = method.pop("model", None)
    limits = ModelLimits(attention=read_model_attention(model) if model else None)
    reason = unsupported(None, Job(**method), model=limits, device=device)
    assert (reason.message, reason.hint) == (message, hint)


def test_packed_rows_of_llama_run_on_a_cpu_with_these() -> None:
    llama = ModelLimits(attention=read_model_attention({"model_type": "llama"}))
    for name in ("auto", "sdpa", "eager", "sdpa_varlen"):
        job = Job(attn_implementation=name, packing=True)
        assert unsupported(None, job, model=llama, device=CPU) is None, name
