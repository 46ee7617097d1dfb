"""Methods and switches without a launch: names, refused combinations, arithmetic, freezing, a profile's parts."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.presets import load_preset
from toolkit.runs.learning_rate import scaled_rate
from toolkit.runs.lora import lora_fields
from toolkit.runs.steps import measure
from toolkit.runs.switches import check_switches, profiled_steps
from toolkit.train.freezing import freeze
from toolkit.train.intervals import step_parts, union, without
from toolkit.train.profiling import Spans, step_tables, timeline


def check(preset: str = "ddp", num_processes: int = 2, **arguments: Any) -> list[str]:
    return check_switches(arguments, load_preset(preset), num_processes=num_processes, on_cpu=True)


# -- refused before the start


@pytest.mark.parametrize(
    ("preset", "arguments", "words"),
    [
        ("zero2", {"ddp_comm_hook": "bf16"}, "does not work under preset 'zero2': DeepSpeed reduces"),
        ("fsdp2", {"ddp_comm_hook": "bf16"}, "does not work under preset 'fsdp2': FSDP2 reduce-scatters"),
        ("ddp", {"ddp_comm_hook": "topk"}, "is 'topk', expected allreduce, bf16"),
        ("ddp", {"ddp_comm_hook": "top_k", "ddp_comm_hook_top_k_fraction": "2"}, "is 2.0, expected more than 0"),
        ("ddp", {"ddp_comm_hook": "power_sgd", "ddp_comm_hook_power_sgd_start": "1"}, "is 1, expected 2 or more"),
        ("zero3", {"lora_r": "4", "load_in_4bit": "true"}, "peft#2016"),
        ("fsdp2", {"lora_r": "4", "load_in_4bit": "true"}, "accelerate#3983"),
        ("zero2_cpu_offload", {"lora_r": "4", "load_in_4bit": "true"}, "fit on the GPU"),
        ("ddp", {"load_in_4bit": "true"}, "--load_in_4bit needs --lora_r"),
        ("ddp", {"lora_config": ["use_dora=true"]}, "--lora_config needs --lora_r"),
        ("ddp", {"lora_r": "4", "freeze": ["*"]}, "only the adapters are trained"),
        ("ddp", {"freeze": ["*"], "train_only": ["*"]}, "--freeze and --train_only together"),
        ("ddp", {"lr_scaling": "linear"}, "needs the global batch"),
        ("ddp", {"lr_reference_batch_size": "4"}, "without --lr_scaling"),
        ("ddp", {"use_liger_kernel": "true"}, "needs a GPU"),
        ("ddp", {"memory_snapshot": "true"}, "needs a GPU"),
        ("fsdp2", {"activation_checkpointing": "true", "activation_checkpointing_offload": "true"}, "needs a GPU"),
        ("ddp", {"activation_checkpointing_offload": "true"}, "without --activation_checkpointing"),
        ("ddp", {"profile_steps": "5:3"}, "expected A:B"),
        ("ddp", {"report_to": "wandbb"}, "no tracker 'wandbb'"),
        ("ddp", {"report_to": "dvclive"}, "needs a package that is not installed"),
        ("ddp", {"deepspeed": "ds.json"}, "shard in another way than preset 'ddp'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(preset: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        check(preset, **arguments)
    assert words in str(refused.value)
    assert refused.value.hint or "expected" in str(refused.value)


def test_a_hook_needs_somebody_to_send_to() -> None:
    with pytest.raises(ToolkitError, match="with one process nothing travels"):
        check("ddp", 1, ddp_comm_hook="bf16")


@pytest.mark.parametrize(
    ("preset", "arguments", "line"),
    [
        (
            "zero2",
            {"ddp_bucket_cap_mb": "5"},
            "--ddp_bucket_cap_mb has no effect: preset 'zero2' does not train with DDP",
        ),
        ("ddp", {"lora_alpha": "8"}, "--lora_alpha has no effect without --lora_r"),
        ("ddp", {"ddp_comm_hook": "bf16", "ddp_comm_hook_top_k_fraction": "0.1"}, "has no effect: the hook is bf16"),
        ("ddp", {"gradient_checkpointing": "true"}, "is an old name: write --activation_checkpointing"),
    ],
)
def test_what_has_no_effect_gives_one_line(preset: str, arguments: dict[str, Any], line: str) -> None:
    (said,) = check(preset, **arguments)
    assert line in said


def test_a_sound_job_is_quiet() -> None:
    assert check("ddp", lora_r="4", ddp_comm_hook="top_k", report_to="none", ddp_bucket_cap_mb="5") == []
    assert check("zero2", activation_checkpointing="true", max_grad_norm="1", neftune_noise_alpha="5") == []


# -- LoRA's fields


def test_any_field_of_lora_config_passes_as_flag_or_mapping() -> None:
    assert lora_fields(["use_rslora=true", "layers_to_transform=[0, 1]", "bias=none"]) == {
        "use_rslora": True,
        "layers_to_transform": [0, 1],
        "bias": "none",
    }
    assert lora_fields({"use_dora": True}) == lora_fields("use_dora=true")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("use_dorra=true", "did you mean `use_dora`"),
        ("use_dora=flase", "expected true or false"),
        ("r=8", "`--lora_r VALUE`"),
        ("use_dora", "is not key=value"),
    ],
)
def test_a_wrong_field_is_named(word: str, words: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        lora_fields([word])
    assert words in str(refused.value)


# -- learning rate


def test_the_rate_is_scaled_and_its_arithmetic_said() -> None:
    linear = scaled_rate(2e-5, rule="linear", global_batch_size=64, reference_batch_size=16)
    assert linear.learning_rate == pytest.approx(8e-5)
    assert linear.sentence == "learning rate 2e-05 × 64/16 (linear) = 8e-05"
    root = scaled_rate(2e-5, rule="sqrt", global_batch_size=64, reference_batch_size=16)
    assert root.learning_rate == pytest.approx(4e-5)
    assert root.sentence == "learning rate 2e-05 × √(64/16) (sqrt) = 4e-05"


# -- freezing


def tied_model() -> Any:
    import torch

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "layer": torch.nn.Linear(2, 2)})
    model["head"] = torch.nn.Linear(2, 4, bias=False)
    model["head"].weight = model["embed"].weight
    return model


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_patterns_freeze_what_they_name() -> None:
    model = tied_model()
    assert freeze(model, frozen=["layer.b*"], trained=None) == []
    assert trained(model) == {"embed.weight", "layer.weight"}


def test_a_tied_weight_goes_one_way_and_is_said() -> None:
    model = tied_model()
    assert freeze(model, frozen=None, trained=["head.*"]) == [
        "head.weight and embed.weight are one tensor, tied: both are meant"
    ]
    assert trained(model) == {"embed.weight"}


def test_a_pattern_that_matches_nothing_is_named_with_the_nearest() -> None:
    with pytest.raises(ToolkitError, match=r"'layer.weigth' matches no parameter") as refused:
        freeze(tied_model(), frozen=["layer.weigth"], trained=None)
    assert refused.value.hint == "there is `layer.weight`"
    with pytest.raises(ToolkitError, match="leaves nothing to train"):
        freeze(tied_model(), frozen=["*"], trained=None)


# -- a profile


def test_every_moment_of_a_step_is_in_one_part() -> None:
    parts = step_parts((0, 20), compute=[(1, 5), (4, 6), (18, 25)], communication=[(5, 9)], data_wait=[(0, 2), (8, 10)])
    assert parts == {
        "step": 20,
        "compute": 7,  # 1 to 6, 18 to 20
        "communication": 4,
        "exposed_communication": 3,  # 6 to 9
        "data_wait": 2,  # 0 to 1, 9 to 10
        "idle": 8,  # 10 to 18
    }
    assert sum(parts[part] for part in ("compute", "exposed_communication", "data_wait", "idle")) == parts["step"]


def test_intervals_join_and_are_cut() -> None:
    assert union([(3, 4), (0, 2), (1, 3), (5, 5)]) == [(0, 4)]
    assert without([(0, 10)], [(2, 3), (9, 12)]) == [(0, 2), (3, 9)]
    assert without([(2, 3)], [(0, 10)]) == []


def event(name: str, start: int, end: int, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, "cat": cat, "tid": tid}


def test_a_cpu_s_collation_is_waiting_for_data_and_a_gpu_s_kernels_are_what_computes() -> None:
    steps = [event("ProfilerStep#0", 0, 100, "user_annotation")]
    fetch = event("toolkit.data_wait", 0, 10, "user_annotation")
    on_cpu = [
        *steps,
        fetch,
        event("aten::stack", 2, 4),
        event("aten::mm", 20, 60),
        event("gloo:all_reduce", 50, 80, tid=2),
    ]
    (row,) = step_tables(Spans.of(on_cpu), first=3, last=3)
    assert row["step"] == 3
    assert [round(row[f"{part}_seconds"] * 1e6) for part in ("compute", "exposed_communication", "data_wait")] == [
        40,
        20,
        10,
    ]
    kernels = [event("gemm", 30, 40, "kernel", 7), event("ncclDevKernel_AllReduce", 35, 55, "kernel", 8)]
    (row,) = step_tables(Spans.of([*on_cpu, *kernels]), first=3, last=3)
    assert [round(row[f"{part}_seconds"] * 1e6) for part in ("compute", "exposed_communication", "data_wait")] == [
        10,
        15,
        10,
    ]


def test_a_timeline_counts_from_the_step_and_leaves_out_what_no_page_shows() -> None:
    trace = [
        event("ProfilerStep#0", 0, 500, "user_annotation"),
        event("ProfilerStep#1", 1000, 2000, "user_annotation"),
        event("aten::mm", 900, 1100),  # begun before the step
        event("aten::mm", 1300, 1301),  # half a 500th of it
        event("gloo:all_reduce", 1400, 1500, tid=2),
        event("gloo:all_reduce", 1501, 1600, tid=2),  # drawn as one with the first
    ]
    drawn = timeline({"baseTimeNanoseconds": 5 * 10**9}, Spans.of(trace), number=1)
    assert drawn == {
        "start_unix": pytest.approx(5.001),
        "seconds": 0.001,
        "lanes": {"compute": [[0.0, 0.0001]], "communication": [[0.0004, 0.0006]], "data_wait": []},
    }
    assert timeline({}, Spans.of([]), number=0) is None


def test_profiled_steps_are_a_range_from_one() -> None:
    assert profiled_steps("3:5") == (3, 5)
    with pytest.raises(ToolkitError, match="expected A:B"):
        profiled_steps("0:2")


def test_profiled_steps_are_not_timed() -> None:
    row = {"rank": 0, "seconds": 1.0, "cpu_seconds": 1.0, "tokens": 10, "non_padding_tokens": 5, "supervised_tokens": 1}
    row |= {"loss": 1.0, "grad_norm": 1.0, "batch_sha256": "a"}
    row |= dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), None) | {"peak_host_bytes": 1}
    steps = [[row], [row | {"seconds": 99.0, "profiled": True}], [row]]
    measured = measure(steps, untimed_steps=1)
    assert (measured.steps, measured.timed_steps, measured.tokens_per_second) == (3, 1, 10)
