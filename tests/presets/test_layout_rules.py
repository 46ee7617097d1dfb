"""Each rule about layers, experts and sequences that are split: what is refused, and the next thing to type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.models.split import read_split
from toolkit.presets import list_presets, load_preset
from toolkit.presets.compatibility import ModelLimits
from toolkit.presets.preset_checks import check_arguments
from toolkit.presets.support import unsupported

LLAMA = {
    **{"model_type": "llama", "vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
QWEN3_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
DEGREES = {
    **{"tp": {"tp": 2}, "fsdp2_tp": {"tp": 2}, "hsdp_tp": {"tp": 2}, "ep": {"ep": 2}, "ep_tp": {"tp": 2, "ep": 2}},
    **{"cp": {"cp": 2}, "ulysses": {"sp": 2}},
    "pipeline_1f1b": {"pp": 2, "gradient_accumulation_steps": 4},
}
AT_LOAD = ("tp", "fsdp2_tp", "hsdp_tp", "ep", "ep_tp")


def refusal(preset: str, *, ranks: int = 8, **arguments: Any) -> tuple[str, str | None] | None:
    """The message and the hint of the launcher's check, with 2 for each degree that is not given."""
    given = {name: str(value) for name, value in {**DEGREES.get(preset, {}), **arguments}.items()}
    try:
        check_arguments(Job.from_values(given), load_preset(preset), num_processes=ranks, on_cpu=False)
    except ToolkitError as error:
        return error.message, error.hint
    return None


def test_every_layout_has_a_case_here() -> None:
    assert set(DEGREES) == {preset.name for preset in list_presets() if preset.parallel}


@pytest.mark.parametrize("preset", DEGREES)
def test_a_full_fine_tune_with_two_ranks_of_each_degree_is_accepted(preset: str) -> None:
    assert refusal(preset) is None
    assert (refusal(preset, lora_r=8) is None) is (preset != "pipeline_1f1b")


# -- degrees


@pytest.mark.parametrize(
    ("preset", "missing"), [("fsdp2_tp", "tp"), ("ep", "ep"), ("cp", "cp"), ("ulysses", "sp"), ("pipeline_1f1b", "pp")]
)
def test_a_preset_without_its_degree_is_refused(preset: str, missing: str) -> None:
    with pytest.raises(ToolkitError, match=f"preset '{preset}' needs --{missing}") as refused:
        check_arguments(Job.from_values({}), load_preset(preset), num_processes=8, on_cpu=False)
    assert refused.value.hint == f"add `--{missing} 2`"


@pytest.mark.parametrize(
    ("preset", "given", "message", "hint"),
    [
        ("fsdp2", {"tp": 2}, "--tp 2 does not work under preset 'fsdp2': it has no tensor parallelism",
         "`--preset fsdp2_tp`, or `tp` without sharding"),
        ("fsdp2_tp", {"cp": 2}, "--cp 2 does not work under preset 'fsdp2_tp': it has no context parallelism",
         "`--preset cp`"),
        ("zero3", {"sp": 4}, "--sp 4 does not work under preset 'zero3': it has no sequence parallelism",
         "`--preset ulysses`"),
        ("tp", {"ep": 2}, "--ep 2 does not work under preset 'tp': it has no expert parallelism",
         "`--preset ep`, or `ep_tp` with tensor parallelism"),
        ("fsdp2_tp", {"dp_replicate": 2},
         "--dp_replicate 2 does not work under preset 'fsdp2_tp': it has no replicas of a sharded model",
         "`--preset hsdp_tp`"),
        ("cp", {"cp": 0}, "--cp is 0, expected 1 or more", None),
    ],
)  # fmt: skip
def test_a_degree_that_the_preset_does_not_have_is_refused(
    preset: str, given: dict[str, int], message: str, hint: str | None
) -> None:
    assert refusal(preset, **given) == (message, hint)


@pytest.mark.parametrize(
    ("preset", "ranks", "given", "message", "hint"),
    [
        ("fsdp2_tp", 4, {"tp": 4}, "preset 'fsdp2_tp' with tp 4 needs a multiple of 4 processes, 8 or more, got 4",
         "`--num-processes 8`"),
        ("fsdp2_tp", 6, {"tp": 4}, "preset 'fsdp2_tp' with tp 4 needs a multiple of 4 processes, 8 or more, got 6",
         "`--num-processes 8`"),
        ("cp", 6, {"cp": 4}, "preset 'cp' with cp 4 needs a multiple of 4 processes, 4 or more, got 6",
         "`--num-processes 4`"),
        ("hsdp_tp", 12, {"tp": 2, "dp_replicate": 4},
         "preset 'hsdp_tp' with dp_replicate 4 x tp 2 needs a multiple of 8 processes, 16 or more, got 12",
         "`--num-processes 16`"),
        ("ep_tp", 8, {"tp": 4, "ep": 2}, "--ep 2 is no multiple of --tp 4", "`--ep 4`"),
        ("ep", 8, {"ep": 3}, "--ep 3 does not divide the 8 processes", "`--ep 2`"),
        ("ep", 8, {"ep": 16}, "--ep 16 does not divide the 8 processes", "`--ep 8`"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_divide_are_refused_with_a_number_that_does(
    preset: str, ranks: int, given: dict[str, int], message: str, hint: str
) -> None:
    assert refusal(preset, ranks=ranks, **given) == (message, hint)
    number = int(hint.strip("`").split()[-1])
    fixed = {"ranks": number} if "num-processes" in hint else {"ranks": ranks, "ep": number}
    assert refusal(preset, **{**given, **fixed}) is None


@pytest.mark.parametrize(
    ("config", "given", "message", "hint"),
    [
        (LLAMA, {"tp": 4}, "--tp 4 does not work for this model: 4 does not divide its 2 key-value heads", "`--tp 2`"),
        (LLAMA, {"sp": 8}, "--sp 8 does not work for this model: 8 does not divide its 4 attention heads", "`--sp 4`"),
        (LLAMA, {"ep": 2}, "--ep 2 does not work for this model: llama has no experts", "transformers has plans for "),
        (QWEN3_MOE, {"ep": 3}, "--ep 3 does not work for this model: 3 does not divide its 8 experts", "`--ep 2`"),
        ({**LLAMA, "model_type": "gpt2"}, {"tp": 2},
         "--tp 2 does not work for this model: transformers has no plan for gpt2", "transformers has plans for "),
    ],
)  # fmt: skip
def test_a_degree_that_the_model_cannot_have_is_refused(
    config: dict[str, Any], given: dict[str, int], message: str, hint: str
) -> None:
    reason = unsupported(None, Job(**given), model=ModelLimits(split=read_split(config)))
    assert reason is not None
    assert reason.message == message
    assert str(reason.hint).startswith(hint)


# -- methods


@pytest.mark.parametrize("preset", DEGREES)
@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"lora_r": 8, "load_in_4bit": "true"}, "--load_in_4bit"),
        ({"torch_compile": "true"}, "--torch_compile"),
        ({"use_liger_kernel": "true"}, "--use_liger_kernel"),
        ({"auto_find_batch_size": "true"}, "--auto_find_batch_size"),
        ({"streaming": "true", "streaming_buffer_size": 8}, "--streaming"),
        ({"fp16": "true"}, "--fp16"),
    ],
)
def test_methods_that_were_never_run_with_split_layers_or_sequences_are_refused(
    preset: str, arguments: dict[str, Any], option: str
) -> None:
    reason = unsupported(load_preset(preset), Job.from_values({**DEGREES[preset], **arguments}), world_size=8)
    assert reason is not None
    assert reason.message.startswith(f"{option} does not work under preset '{preset}': ")
    assert reason.hint


@pytest.mark.parametrize("preset", DEGREES)
@pytest.mark.parametrize(
    ("method", "option"),
    [
        (Job(freeze=("*",)), "--freeze"),
        (Job(train_only=("*",)), "--train_only"),
        (Job(activation_checkpointing=True, activation_checkpointing_offload=True),
         "--activation_checkpointing_offload"),
        (Job(save_only_model=True), "--save_only_model"),
        (Job(lora_r=8, lora_config={"use_dora": True}), "--lora_config"),
        (Job(optim="adafactor"), "--optim adafactor"),
        (Job(optim="adamw_bnb_8bit"), "--optim adamw_bnb_8bit"),
        (Job(optim="muon"), "--optim muon"),
    ],
)  # fmt: skip
def test_what_a_model_that_is_sharded_at_load_does_not_train_with_is_refused(
    preset: str, method: Job, option: str
) -> None:
    found = unsupported(load_preset(preset), method)
    if preset in AT_LOAD:
        assert found is not None
        assert found.message.startswith(f"{option} does not work under preset '{preset}': ")
        assert found.hint
    elif preset != "pipeline_1f1b":
        assert found is None or found.rule != "parallel-method"


@pytest.mark.parametrize("preset", ["cp", "ulysses"])
def test_packed_rows_are_refused_where_sequences_are_split(preset: str) -> None:
    found = refusal(preset, packing="true")
    assert found is not None
    assert found[0] == (
        f"--packing does not work under preset '{preset}': a packed row's documents would attend to each other across"
        " ranks"
    )
    assert unsupported(load_preset("fsdp2_tp"), Job(packing=True, tp=2)) is None


@pytest.mark.parametrize(("preset", "refused"), [("fsdp2_tp", True), ("cp", True), ("ulysses", True), ("ep", False)])
def test_the_chunked_loss_needs_the_whole_head_and_the_whole_sequence(preset: str, refused: bool) -> None:
    found = unsupported(load_preset(preset), Job(loss="chunked"))
    assert (found is not None) is refused
    assert found is None or found.hint == "leave `--loss` out: it is `full` here"


@pytest.mark.parametrize(
    ("preset", "name", "refused"),
    [
        ("ulysses", "eager", True),
        ("ulysses", "flex_attention", True),
        ("ulysses", "sdpa", False),
        ("ulysses", "flash_attention_2", False),
        ("cp", "eager", True),
        ("cp", "flash_attention_2", True),
        ("cp", "sdpa", False),
        ("fsdp2_tp", "eager", False),
    ],
)
def test_sequences_are_split_in_front_of_attention_functions_that_take_them(
    preset: str, name: str, refused: bool
) -> None:
    found = unsupported(load_preset(preset), Job(attn_implementation=name))
    assert (found is not None) is refused
    assert found is None or found.hint == "`--attn_implementation sdpa`"


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj"), ("gate",)])
@pytest.mark.parametrize("degree", ["ep", "tp"])
def test_adapters_of_experts_are_refused_where_experts_are_divided(degree: str, targets: tuple[str, ...]) -> None:
    given = {"lora_r": "8", degree: "2"} | ({"lora_target_modules": list(targets)} if targets else {})
    for config, refused in ((QWEN3_MOE, True), (LLAMA, False)):
        method = Job.from_values(given)
        reason = unsupported(None, method, model=ModelLimits(split=read_split(config)))
        if degree == "ep" and not refused:
            continue  # Llama has no experts at all
        assert (reason is not None) is refused
        assert reason is None or reason.hint == "`--lora_target_modules q_proj k_proj v_proj o_proj`"


def test_adapters_of_attention_layers_work_with_divided_experts() -> None:
    method = Job.from_values({"lora_r": "8", "ep": "2", "lora_target_modules": ["q_proj", "v_proj"]})
    assert unsupported(None, method, model=ModelLimits(split=read_split(QWEN3_MOE))) is None


# -- through the command


def test_the_command_refuses_before_it_starts_a_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 8)
    options = ["train", "--preset", "fsdp2_tp", "--num-processes", "8", "--cpu", "--dry-run", "--"]
    words = ["--model_name_or_path", str(tmp_path), "--dataset", "rows.jsonl", "--output_dir", "out", "--tp", "4"]
    with pytest.raises(SystemExit) as ended:
        main([*options, *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --tp 4 does not work for this model: 4 does not divide its 2 key-value heads",
        "  hint: `--tp 2`",
    ]
    assert not (tmp_path / "out").exists()


# -- pipelines


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"pp": 4, "gradient_accumulation_steps": 2}, "1f1b fills 4 stages with 2 micro-batches", "`--gradient_accumu"),
        ({"pipeline_schedule": "interleaved_1f1b", "pipeline_chunks": 1}, "interleaves two stages", "`--pipeline_chu"),
        ({"pipeline_chunks": 2}, "1f1b has one stage per GPU", "`--pipeline_schedule interleaved_1f1b`"),
        ({"pipeline_schedule": "interleaved_1f1b", "gradient_accumulation_steps": 5}, "cannot be dealt out", "`--grad"),
        ({"pipeline_chunks": 0}, "--pipeline_chunks is 0, expected 1 or more", "None"),
        ({"neftune_noise_alpha": 5}, "--neftune_noise_alpha does not work under preset", "leave it out"),
        ({"label_smoothing_factor": 0.1}, "--label_smoothing_factor does not work under preset", "leave it out"),
        ({"lora_r": 8}, "--lora_r does not work under preset 'pipeline_1f1b': stages hold no adapters", "`--preset"),
        ({"loss": "chunked"}, "--loss chunked does not work under preset 'pipeline_1f1b'", "leave `--loss` out"),
        (
            {"optim": "adafactor"},
            "--optim adafactor does not work under preset 'pipeline_1f1b': only AdamW",
            "`--optim",
        ),
        ({"save_only_model": "true"}, "--save_only_model does not work under preset 'pipeline_1f1b'", "leave it out"),
        ({"freeze": "model.*"}, "--freeze does not work under preset 'pipeline_1f1b'", "leave it out"),
    ],
)
def test_what_a_pipeline_does_not_run_is_refused(arguments: dict[str, Any], message: str, hint: str) -> None:
    found = refusal("pipeline_1f1b", **arguments)
    assert found is not None
    assert message in found[0]
    assert str(found[1]).startswith(hint)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (LLAMA, {"pp": 4}, "4 stages of a model with 2 layers"),
        (LLAMA, {"pp": 2, "pipeline_schedule": "interleaved_1f1b"}, "4 stages of a model with 2 layers"),
        ({**LLAMA, "model_type": "gpt2"}, {"pp": 2}, "--pp 2 does not work for this model: stages were verified for"),
    ],
)
def test_a_model_without_so_many_stages_is_refused(config: dict[str, Any], given: dict[str, Any], message: str) -> None:
    reason = unsupported(None, Job(**given, gradient_accumulation_steps=4), model=ModelLimits(split=read_split(config)))
    assert reason is not None
    assert reason.message.startswith(message)


def test_a_pipeline_option_without_a_pipeline_is_refused() -> None:
    found = refusal("ddp", pipeline_schedule="gpipe")
    assert found == (
        "--pipeline_schedule does not work under preset 'ddp': it has no pipeline",
        "`--preset pipeline_1f1b`",
    )
