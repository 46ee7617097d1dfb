"""One job: read, written back, checked, and the same for `plan`, `train` and others."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_command
from launching import LLAMA_8B_CONFIG

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.job import argument_values as defaults
from toolkit.job.argument_fields import ARGUMENTS, DataArguments
from toolkit.job.job import Job
from toolkit.job.job_checks import BACKENDS, MODES, check_values
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import make_plans, plan_request, plan_run
from toolkit.presets import load_preset
from toolkit.presets.support import check_arguments

# One of each type: text, numbers, switches, lists, `key=value`, JSON, and arguments that the toolkit does not read.
VALUES = {
    "model_name_or_path": "owner/name",
    "dataset": ["a.jsonl", "b.jsonl"],
    "dataset_weights": [0.7, 0.3],
    "column": {"instruction": "question", "output": "answers.text.0"},
    "system_prompt": "--answer in one word",
    "max_seq_length": 512,
    "learning_rate": 2e-5,
    "bf16": False,
    "lora_r": 8,
    "lora_config": {"use_dora": True, "layers_to_transform": [0, 1]},
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "liger_kernel_config": {"rope": True},
    "label_names": ["labels", "weights"],
    "logging_first_step": True,
    "data_seed": 7,
    "run_name": "a b",
}
OTHER = ("label_names", "logging_first_step", "data_seed", "run_name")


def test_a_job_is_read_back_from_the_words_that_it_is_written_as() -> None:
    job = Job.from_values(VALUES)
    assert Job.from_argv(job.to_argv()) == job
    assert job.given == tuple(VALUES)
    assert job.other == {name: VALUES[name] for name in OTHER}


def test_words_a_file_and_values_make_the_same_job(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(VALUES, sort_keys=False))
    assert Job.from_argv([str(file)]) == Job.from_values(VALUES)


def test_a_job_without_arguments_has_every_default_and_writes_no_words() -> None:
    assert Job.from_argv([]) == Job()
    assert (Job().to_argv(), Job().given) == ([], ())
    assert {name: getattr(Job(), name) for name in ARGUMENTS} == {n: field.default for n, field in ARGUMENTS.items()}


def test_other_values_replace_those_of_a_job_and_count_as_given() -> None:
    job = Job.from_argv(["--max_steps", "8", "--data_seed", "7"])
    assert " ".join(job.with_values(max_steps=9, tp=2, data_seed=8).to_argv()) == "--max_steps 9 --data_seed 8 --tp 2"
    assert job.without("max_steps", "data_seed") == Job()


def test_both_names_of_activation_checkpointing_switch_it_on() -> None:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        assert Job.from_argv([f"--{name}"]).uses_activation_checkpointing
    assert not Job().uses_activation_checkpointing


# -- where no flag is given


def test_planner_and_training_script_have_the_same_defaults() -> None:
    """The batch is transformers' own, so that a plain `accelerate launch` is the job that was planned."""
    from transformers import TrainingArguments

    expected = {
        "per_device_train_batch_size": defaults.PER_DEVICE_TRAIN_BATCH_SIZE,
        "gradient_accumulation_steps": defaults.GRADIENT_ACCUMULATION_STEPS,
        "max_seq_length": defaults.MAX_SEQ_LENGTH,
    }

    def defaults_of(options: type[Any]) -> dict[str, Any]:
        return {field.name: field.default for field in fields(options) if field.name in expected}

    assert defaults_of(PlannedJob) == expected
    assert defaults_of(PlanOptions) == {**dict.fromkeys(expected), "max_seq_length": expected["max_seq_length"]}
    assert defaults_of(TrainingArguments) | defaults_of(DataArguments) == expected
    assert PlannedJob.of(Job()) == PlannedJob()


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_plan_of_the_default_batch_is_the_plan_of_the_run_without_a_flag(preset: str) -> None:
    """`plan` once assumed a micro-batch of 1 and said "fits" (45 GiB) where `train` needs 161 GiB with 8."""
    batch = defaults.PER_DEVICE_TRAIN_BATCH_SIZE
    options = PlanOptions(num_processes=(8,), preset=(preset,), gpu="h100", per_device_train_batch_size=batch)
    (plan,) = make_plans(plan_request(str(LLAMA_8B_CONFIG), options))
    job = Job(model_name_or_path=str(LLAMA_8B_CONFIG))
    assert plan.as_row() == plan_run(load_preset(preset), job, world_size=8, gpu=find_gpu("h100")).as_row()


PLANNED = [f"{command} {LLAMA_8B_CONFIG} --gpu h100" for command in ("plan", "recommend")]
PLANNED += [f"rehearse --preset ddp -- --model_name_or_path {LLAMA_8B_CONFIG}"]


@pytest.mark.parametrize("words", PLANNED, ids=lambda words: words.split()[0])
def test_without_a_gpu_the_number_of_processes_is_asked_for(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = run_command(words.split(), capsys)
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first == "error: --num-processes is missing, and no GPU is visible on this node"
    assert second == "  hint: the number of GPUs of the job, for example `--num-processes 8`"


def check(preset: str = "ddp", num_processes: int = 2, **arguments: Any) -> list[str]:
    return check_arguments(Job.from_values(arguments), load_preset(preset), num_processes=num_processes, on_cpu=True)


STREAM = {"streaming": "true", "max_steps": "5"}
SELECTIVE = {"activation_checkpointing": "true", "activation_checkpointing_selective": "true"}
TWO_STEPS = {"gradient_accumulation_steps": "2"}


@pytest.mark.parametrize(
    ("preset", "arguments", "words"),
    [
        ("zero2", {"ddp_comm_hook": "bf16"}, "does not work under preset 'zero2': DeepSpeed reduces"),
        ("fsdp2", {"ddp_comm_hook": "bf16"}, "does not work under preset 'fsdp2': FSDP2 reduce-scatters"),
        ("ddp", {"ddp_comm_hook": "top_k"}, "is 'top_k', expected bf16, fp16"),
        ("ddp", {"ddp_comm_hook": "power_sgd", "ddp_comm_hook_power_sgd_start": "1"}, "is 1, expected 2 or more"),
        ("zero3_nvme_offload", {"lora_r": "4", "load_in_4bit": "true"}, "have not been run"),
        ("zero2_cpu_offload", {"lora_r": "4", "load_in_4bit": "true"}, "too small to offload"),
        ("ddp", {"load_in_4bit": "true"}, "--load_in_4bit needs --lora_r"),
        ("ddp", {"lora_config": ["use_dora=true"]}, "--lora_config needs --lora_r"),
        ("ddp", {"lora_r": "4", "freeze": ["*"]}, "only the adapters are trained"),
        ("ddp", {"freeze": ["*"], "train_only": ["*"]}, "--freeze and --train_only together"),
        ("ddp", {"lr_scaling": "linear"}, "needs the global batch"),
        ("ddp", {"lr_reference_batch_size": "4"}, "without --lr_scaling"),
        ("ddp", {"use_liger_kernel": "true"}, "needs a GPU"),
        ("ddp", {"loss": "chunked", "use_liger_kernel": "true"}, "Liger computes the loss without the full logits"),
        ("ddp", {"loss_chunk_tokens": "0"}, "--loss_chunk_tokens is 0, expected 1 or more"),
        ("ddp", {"memory_snapshot": "true"}, "needs a GPU"),
        ("fsdp2", {"activation_checkpointing": "true", "activation_checkpointing_offload": "true"}, "needs a GPU"),
        ("ddp", {"activation_checkpointing_offload": "true"}, "without --activation_checkpointing"),
        ("ddp", {"activation_checkpointing_selective": "true"}, "nothing is recomputed"),
        ("ddp", SELECTIVE | {"activation_checkpointing_offload": "true"}, "would stay on the GPU"),
        ("ddp", SELECTIVE | {"attn_implementation": "eager"}, "with attention eager: it has no kernel"),
        ("ddp", SELECTIVE | {"activation_checkpointing_kwargs": '{"use_reentrant": true}'}, "all is recomputed then"),
        ("zero3", SELECTIVE, "gathers weights in hooks"),
        ("ep", SELECTIVE | {"ep": "2"}, "never run on stages, nor beside experts"),
        ("ddp", {"profile_steps": "5:3"}, "expected A:B"),
        ("ddp", {"report_to": "wandbb"}, "no tracker 'wandbb'"),
        ("ddp", {"report_to": "dvclive"}, "needs a package that is not installed"),
        ("ddp", {"streaming": "true"}, "--streaming needs --max_steps"),
        ("ddp", STREAM | {"val_size": "0.1"}, "--val_size with --streaming"),
        ("ddp", STREAM | {"train_sampling_strategy": "group_by_length"}, "group_by_length with --streaming"),
        ("ddp", STREAM | {"dataloader_num_workers": "3"}, "is 3, and a stream is divided among 0, 1, 2, 4 or 8"),
        ("ddp", {"dataset": ["a.csv", "b.csv"], "dataset_weights": "0.7"}, "has length 1, expected 2: a weight for"),
        ("ddp", {"dataset": ["a.csv", "b.csv"], "dataset_weights": ["0.7", "0"]}, "has 0, expected numbers above 0"),
        ("ddp", {"deepspeed": "ds.json"}, "would override the sharding of preset 'ddp'"),
        ("ddp", {"torch_compile_backend": "inductr"}, "--torch_compile_backend is 'inductr', expected inductor"),
        ("ddp", {"torch_compile_mode": "max-autotun"}, "hint: did you mean `max-autotune`?"),
        ("ddp", {"torch_compile_backend": "aot_eager", "torch_compile_mode": "default"}, "is inductor's"),
        ("ddp", {"torch_compile_backend": "cudagraphs"}, "needs a GPU\n  hint: leave it out on a CPU"),
        ("zero3", {"torch_compile": "true", "torch_compile_backend": "eager"}, "graph ends at each linear layer"),
        ("ddp", {"accumulate": "sharded", **TWO_STEPS}, "under preset 'ddp': every GPU holds all gradients"),
        ("zero1", {"accumulate": "sharded", **TWO_STEPS}, "below ZeRO-2, gradients are reduced in the last"),
        ("zero3", {"accumulate": "whole", **TWO_STEPS}, "in every accumulation step\n  hint: leave it out, or `--"),
    ],
)
def test_an_unsupported_combination_is_refused(preset: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        check(preset, **arguments)
    assert words in str(refused.value)
    assert refused.value.hint or "expected" in str(refused.value)


def test_a_communication_hook_needs_two_processes() -> None:
    with pytest.raises(ToolkitError, match="with one process: there is nothing to communicate"):
        check("ddp", 1, ddp_comm_hook="bf16")


@pytest.mark.parametrize(
    ("preset", "arguments", "line"),
    [
        ("zero2", {"ddp_bucket_cap_mb": "5"}, "has no effect: preset 'zero2' does not train with DDP"),
        ("fsdp2", {"async_save": "true", "save_strategy": "no"}, "--async_save has no effect with --save_strategy no"),
        ("ddp", {"streaming_buffer_size": "5"}, "--streaming_buffer_size has no effect without --streaming"),
        ("ddp", STREAM | {"preprocessing_num_workers": 2}, "with --streaming: `--dataloader_num_workers` has"),
        ("ddp", {"lora_alpha": "8"}, "--lora_alpha has no effect without --lora_r"),
        ("ddp", {"ddp_comm_hook": "bf16", "ddp_comm_hook_power_sgd_rank": "2"}, "has no effect: the hook is bf16"),
        ("ddp", {"gradient_checkpointing": "true"}, "here it is called --activation_checkpointing"),
    ],
)
def test_an_argument_without_effect_gives_a_warning(preset: str, arguments: dict[str, Any], line: str) -> None:
    (said,) = check(preset, **arguments)
    assert line in said


def test_just_in_time_checkpoints_of_transformers_are_refused() -> None:
    with pytest.raises(ToolkitError, match="--enable_jit_checkpoint lets each rank save") as refused:
        check(enable_jit_checkpoint="true")
    assert "SIGTERM" in str(refused.value.hint)
    assert check(enable_jit_checkpoint="false") == []


# -- compilation


def test_inductor_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolkitError, match="--torch_compile needs the C\\+\\+ compiler 'no-such-compiler'"):
        check(torch_compile="true")
    assert check(torch_compile="true", torch_compile_backend="aot_eager") == []
    assert check("zero2", torch_compile="true", torch_compile_backend="eager") == []


def test_the_backends_and_modes_are_torchs() -> None:
    import torch._dynamo
    import torch._inductor

    assert set(BACKENDS) <= set(torch._dynamo.list_backends(exclude_tags=()))
    assert set(MODES) <= set(torch._inductor.list_mode_options())


def test_an_attention_function_is_one_that_transformers_has() -> None:
    for name in ("sdpa", "eager", "flex_attention", "paged|eager", "kernels-community/flash-attn2@main:attend"):
        check_values(Job(attn_implementation=name), on_cpu=True)
    with pytest.raises(ToolkitError, match="is 'sdpaa', expected auto, sdpa_varlen, eager") as caught:
        check_values(Job(attn_implementation="sdpaa"), on_cpu=True)
    assert caught.value.hint == "did you mean `sdpa`?"
