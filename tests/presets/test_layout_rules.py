"""Each rule about layers, experts and sequences that are split: what is refused, and the next thing to type."""

from typing import Any

import pytest
from split_runs import MODELS, SIZES

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.models.split import read_split
from toolkit.presets import list_presets, load_preset
from toolkit.presets.compatibility import ModelLimits
from toolkit.presets.support import check_arguments, unsupported

LLAMA = {"model_type": "llama", **SIZES}
QWEN3_MOE = LLAMA | MODELS["qwen3_moe"]
GPT2 = {**LLAMA, "model_type": "gpt2"}
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


@pytest.mark.parametrize("preset", [preset.name for preset in list_presets() if preset.parallel])
def test_a_full_fine_tune_with_two_ranks_of_each_degree_is_accepted_and_none_without_it(preset: str) -> None:
    assert refusal(preset) is None
    assert (refusal(preset, lora_r=8) is None) is (preset != "pipeline_1f1b")
    missing = next(iter(DEGREES[preset]))
    with pytest.raises(ToolkitError, match=f"preset '{preset}' needs --{missing}") as refused:
        check_arguments(Job(), load_preset(preset), num_processes=8, on_cpu=False)
    assert refused.value.hint == f"add `--{missing} 2`"


INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b"}
ACROSS = "a packed row's documents would attend to each other across ranks"


@pytest.mark.parametrize(
    ("preset", "ranks", "given", "message", "hint"),
    [
        # a degree that the preset does not have
        ("fsdp2", 8, {"tp": 2}, "--tp 2 does not work under preset 'fsdp2': it has no tensor parallelism",
         "`--preset fsdp2_tp`, or `tp` without sharding"),
        ("fsdp2_tp", 8, {"dp_replicate": 2},
         "--dp_replicate 2 does not work under preset 'fsdp2_tp': it has no replicas of a sharded model",
         "`--preset hsdp_tp`"),
        ("ddp", 8, {"pipeline_schedule": "gpipe"},
         "--pipeline_schedule does not work under preset 'ddp': it has no pipeline", "`--preset pipeline_1f1b`"),
        # ranks that do not divide, with a number that does
        ("hsdp_tp", 12, {"tp": 2, "dp_replicate": 4},
         "preset 'hsdp_tp' with dp_replicate 4 x tp 2 needs a multiple of 8 processes, 16 or more, got 12",
         "`--num-processes 16`"),
        ("ep_tp", 8, {"tp": 4, "ep": 2}, "--ep 2 is no multiple of --tp 4", "`--ep 4`"),
        ("ep", 8, {"ep": 3}, "--ep 3 does not divide the 8 processes", "`--ep 2`"),
        # what sequences and stages do not train with
        ("cp", 8, {"packing": "true"}, f"--packing does not work under preset 'cp': {ACROSS}", "leave it out"),
        ("pipeline_1f1b", 8, {"pp": 4, "gradient_accumulation_steps": 2},
         "--pipeline_schedule 1f1b fills 4 stages with 2 micro-batches", "`--gradient_accumu"),
        ("pipeline_1f1b", 8, {**INTERLEAVED, "pipeline_chunks": 1},
         "--pipeline_schedule interleaved_1f1b interleaves two stages", "`--pipeline_chu"),
        ("pipeline_1f1b", 8, {"pipeline_chunks": 2}, "--pipeline_schedule 1f1b has one stage per GPU",
         "`--pipeline_schedule interleaved_1f1b`"),
        ("pipeline_1f1b", 8, {"pipeline_chunks": 0}, "--pipeline_chunks is 0, expected 1 or more", "None"),
        ("pipeline_1f1b", 8, {"lora_r": 8},
         "--lora_r does not work under preset 'pipeline_1f1b': stages hold no adapters", "`--preset"),
        ("pipeline_1f1b", 8, {"loss": "chunked"}, "--loss chunked does not work under preset 'pipeline_1f1b'", "leave"),
        ("pipeline_1f1b", 8, {"optim": "adafactor"},
         "--optim adafactor does not work under preset 'pipeline_1f1b': only AdamW", "`--optim"),
        *(("pipeline_1f1b", 8, {name: value}, f"--{name} does not work under preset 'pipeline_1f1b'", "leave it out")
          for name, value in {"neftune_noise_alpha": 5, "label_smoothing_factor": 0.1, "save_only_model": "true",
                              "freeze": "model.*"}.items()),
    ],
)  # fmt: skip
def test_what_does_not_work_is_refused_with_what_does(
    preset: str, ranks: int, given: dict[str, Any], message: str, hint: str
) -> None:
    found = refusal(preset, ranks=ranks, **given)
    assert found[0].startswith(message)
    assert str(found[1]).startswith(hint)
    if hint.startswith(("`--num-processes", "`--ep")):
        number = int(hint.strip("`").split()[-1])
        fixed = {"ranks": number} if "num-processes" in hint else {"ranks": ranks, "ep": number}
        assert refusal(preset, **{**given, **fixed}) is None


@pytest.mark.parametrize(
    ("config", "given", "message", "hint"),
    [
        (LLAMA, {"tp": 4}, "--tp 4 does not work for this model: 4 does not divide its 2 key-value heads", "`--tp 2`"),
        (LLAMA, {"ep": 2}, "--ep 2 does not work for this model: llama has no experts", "transformers has plans for "),
        (GPT2, {"tp": 2}, "--tp 2 does not work for this model: transformers has no plan for gpt2", "transformers h"),
        (GPT2, {"pp": 2}, "--pp 2 does not work for this model: stages were verified for", "`--preset fsdp2` shards"),
        (LLAMA, {"pp": 4}, "4 stages of a model with 2 layers", "`--pp 2`"),
        (LLAMA, {"pp": 2, **INTERLEAVED}, "4 stages of a model with 2 layers", "`--pp 1`"),
    ],
)
def test_a_degree_that_the_model_cannot_have_is_refused(
    config: dict[str, Any], given: dict[str, Any], message: str, hint: str
) -> None:
    job = Job(**given, gradient_accumulation_steps=4)
    reason = unsupported(None, job, model=ModelLimits(split=read_split(config)))
    assert reason.message.startswith(message)
    assert str(reason.hint).startswith(hint)


ON = "true"
NEVER_RUN: list[dict[str, Any]] = [
    *({name: ON} for name in ("torch_compile", "use_liger_kernel", "auto_find_batch_size", "fp16")),
    {"load_in_4bit": ON, "lora_r": 8},
    {"streaming": ON, "streaming_buffer_size": 8},
]
NOT_AT_LOAD: list[dict[str, Any]] = [
    *({"freeze": "*"}, {"train_only": "*"}, {"save_only_model": ON}),
    {"activation_checkpointing_offload": ON, "activation_checkpointing": ON},
    {"lora_config": "use_dora=true", "lora_r": 8},
    *({"optim": name} for name in ("adafactor", "adamw_bnb_8bit", "muon")),
]


@pytest.mark.parametrize("preset", DEGREES)
def test_methods_that_were_never_run_with_split_layers_or_sequences_are_refused(preset: str) -> None:
    for method in (*NEVER_RUN, *(NOT_AT_LOAD if preset in AT_LOAD else ())):
        reason = unsupported(load_preset(preset), Job.from_values({**DEGREES[preset], **method}), world_size=8)
        assert reason is not None, method
        name = next(iter(method)) + (f" {method['optim']}" if "optim" in method else "")
        assert reason.message.startswith(f"--{name} does not work under preset '{preset}': ")
        assert reason.hint


@pytest.mark.parametrize(
    ("preset", "job", "hint"),
    [
        ("fsdp2_tp", Job(loss="chunked"), "leave `--loss` out: it is `full` here"),
        *((preset, Job(loss="chunked"), None) for preset in ("ep", "cp", "ulysses")),
        ("ulysses", Job(attn_implementation="flex_attention"), "`--attn_implementation sdpa`"),
        ("ulysses", Job(attn_implementation="flash_attention_2"), None),
        ("cp", Job(attn_implementation="flash_attention_2"), "`--attn_implementation sdpa`"),
        ("cp", Job(attn_implementation="sdpa"), None),
        ("fsdp2_tp", Job(attn_implementation="eager"), None),
    ],
)
def test_the_loss_and_attention_must_see_what_they_need(preset: str, job: Job, hint: str | None) -> None:
    found = unsupported(load_preset(preset), job)
    assert (None if found is None else found.hint) == hint


@pytest.mark.parametrize(
    ("config", "given", "refused"),
    [
        (QWEN3_MOE, {"ep": "2"}, True),
        (QWEN3_MOE, {"tp": "2", "lora_target_modules": ["q_proj", "down_proj"]}, True),
        (QWEN3_MOE, {"ep": "2", "lora_target_modules": ["gate"]}, True),
        (QWEN3_MOE, {"ep": "2", "lora_target_modules": ["q_proj", "v_proj"]}, False),
        (LLAMA, {"tp": "2"}, False),
    ],
)
def test_adapters_of_experts_are_refused_where_experts_are_divided(
    config: dict[str, Any], given: dict[str, Any], refused: bool
) -> None:
    reason = unsupported(None, Job.from_values({"lora_r": "8", **given}), model=ModelLimits(split=read_split(config)))
    assert (reason is not None) is refused
    assert reason is None or reason.hint == "`--lora_target_modules q_proj k_proj v_proj o_proj`"
