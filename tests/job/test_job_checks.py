"""Training arguments checked against each other, the preset and the installed packages."""

from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.job.job_checks import BACKENDS, MODES, check_values
from toolkit.presets import load_preset
from toolkit.presets.support import check_arguments


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
