"""Compatibility rules of training methods: freezing, QLoRA, optimizers, attention, accumulation, checkpoints."""

from collections.abc import Sequence

from toolkit.engines.ddp import Single
from toolkit.engines.engine import Engine
from toolkit.engines.registry import ENGINES
from toolkit.engines.zero import BF16_MASTERS, bf16_keys, why_no_bf16_states
from toolkit.job.argument_values import nearest_word
from toolkit.models.attention import AUTO, FLASH_ATTENTION, VARLEN, needs_no_mask
from toolkit.models.optimizers import OPTIMIZERS, why_not_planned
from toolkit.presets.compatibility import Answers, Case, job_answer, method_answer, preset_answer
from toolkit.presets.layout_rules import RULES
from toolkit.presets.spec import PresetSpec, default_accumulate


def freeze_and_train_only(case: Case) -> Answers:
    if case.job.freeze and case.job.train_only:
        yield job_answer("--freeze and --train_only together", "use one of them")


def checkpointing_kind(case: Case) -> Answers:
    job, model, option = case.job, case.model.attention, "--activation_checkpointing"
    if job.activation_checkpointing_offload and not job.uses_activation_checkpointing:
        why = f"{option}_offload without {option}: there are no checkpoints to offload"
        yield job_answer(why, f"add `{option} true`")
    given = job.activation_checkpointing_kwargs or job.gradient_checkpointing_kwargs or {}
    without_sdpa = job.attn_implementation in (None, AUTO) and model is not None and not model.sdpa
    attention = "eager" if without_sdpa else str(job.attn_implementation)
    nothing = RULES["nothing_to_keep"].get(attention)
    reentrant = given.get("use_reentrant")
    refused = (
        (not job.uses_activation_checkpointing, f"without {option}: nothing is recomputed", f"add `{option} true`"),
        (job.activation_checkpointing_offload, f"with {option}_offload: its outputs would stay on the GPU", "use one"),
        (reentrant, "with use_reentrant: all is recomputed then", f"leave it out of `{option}_kwargs`"),
        (nothing, f"with attention {attention}: {nothing}", "leave it out, or `--attn_implementation sdpa`"),
    )
    for is_so, why, hint in refused:
        if is_so and job.activation_checkpointing_selective:
            yield job_answer(f"{option}_selective {why}", hint)


def selective_checkpointing(case: Case, preset: PresetSpec) -> Answers:
    """torch replays the operators of the forward pass (2.13, `_CachedTorchDispatchMode`), and raises for others."""
    why = None
    if preset.traits.breaks_compiled_graphs(preset.sharding) is not None:
        why = "ZeRO-3 gathers weights in hooks, in the backward pass at other places than in the forward pass"
    elif {"pp", "ep"} & set(preset.parallel):
        why = "it was never run on stages, nor beside experts of other ranks"
    if why is not None and case.job.activation_checkpointing_selective:
        yield method_answer(case, "activation_checkpointing_selective", why, "`--preset fsdp2`, or leave it out")


def four_bit_needs_lora(case: Case) -> Answers:
    if case.job.load_in_4bit and not case.job.is_lora:
        option = case.option("lora_r")
        why = f"{case.option('load_in_4bit')} needs {option}: 4-bit weights are not trained"
        yield job_answer(why, f"add `{option} 16`")


def freeze_with_lora(case: Case) -> Answers:
    name = "freeze" if case.job.freeze else "train_only"
    if case.uses(name) and case.job.is_lora:
        hint = "`--lora_config layers_to_transform=[0,1]`, or `--lora_target_modules q_proj v_proj`"
        yield job_answer(f"--{name} with --lora_r: only the adapters are trained already", hint)


def qlora(case: Case, preset: PresetSpec) -> Answers:
    if not case.job.load_in_4bit:
        return
    why = None
    if preset.needs_gpu is not None:
        why = "it quantizes what it gathers, and packed 4-bit weights are no numbers"
    elif preset.offload_optimizer and not preset.shards_parameters:
        why = "the adapters' optimizer states are too small to offload"
    elif preset.uses_nvme:
        why = "4-bit weights on a disk have not been run; in host memory they have"
    hint = "`--preset ddp`; `fsdp2` or `zero3` shard the 4-bit weights, `zero3_cpu_offload` keeps them in host memory"
    if why is not None:
        yield method_answer(case, "load_in_4bit", why, hint)


def bf16_states(case: Case, preset: PresetSpec) -> Answers:
    refused = why_no_bf16_states(preset.settings or {})
    if refused is None and case.purpose in ("plan", "recommend") and preset.uses_nvme and bf16_keys(preset.settings)[0]:
        refused = f"{BF16_MASTERS} beside NVMe is not planned: its swap buffers have not been run", "offload to `cpu`"
    if refused is not None:
        yield preset_answer(preset, f"cannot be used: {refused[0]}", refused[1])


def chunked_with_liger(case: Case) -> Answers:
    if case.job.loss == "chunked" and case.job.use_liger_kernel:
        why = "--loss chunked with --use_liger_kernel: Liger computes the loss without the full logits itself"
        yield job_answer(why, "leave `--loss` out")


def gpu_only_method(case: Case) -> Answers:
    for name, (because, hint) in RULES["gpu_only"].items():
        if case.on_cpu and case.uses(name):
            yield job_answer(f"--{name} needs a GPU: {because}", hint)


def compiled_zero3(case: Case, preset: PresetSpec) -> Answers:
    why = preset.traits.breaks_compiled_graphs(preset.sharding)
    if why is not None and case.uses("torch_compile"):
        yield method_answer(case, "torch_compile", why, "`--preset fsdp2` shards the same")


def comm_hook(case: Case) -> Answers:
    if case.job.ddp_comm_hook is None:
        return
    if case.purpose in ("rehearse", "trace"):
        yield job_answer("--ddp_comm_hook cannot be rehearsed: a hook reads what the other ranks send", "leave it out")
    elif case.preset is not None and (why := case.preset.traits.no_comm_hook) is not None:
        yield method_answer(case, "ddp_comm_hook", why, "`--preset ddp`")
    elif case.world_size == 1:
        yield job_answer(f"--ddp_comm_hook with one process: {Single.no_comm_hook}", "`--num-processes 2`")


def accumulation(case: Case, preset: PresetSpec) -> Answers:
    chosen = case.job.chosen_accumulate
    if preset.traits.chooses_accumulation or chosen in (None, default_accumulate(preset)):
        return
    why = preset.traits.fixed_accumulation[chosen]
    yield method_answer(case, f"accumulate {chosen}", why, "leave it out, or `--preset fsdp2`")


# -- attention


def attention_device(case: Case) -> Answers:
    name = case.job.attn_implementation
    if name is None or not case.on_cpu:
        return
    if name in FLASH_ATTENTION or (name.startswith("kernels-community/") and needs_no_mask(name)):
        because = "its kernels are built for GPUs"
    elif name == "flex_attention":
        because = "FlexAttention has no backward on a CPU (torch 2.13)"
    else:
        return
    option = case.option("attn_implementation")
    yield job_answer(f"{option} {name} needs a GPU: {because}", _working_attention(case))


def attention_rows(case: Case) -> Answers:
    if case.job.attn_implementation == VARLEN and not case.job.packing:
        option = case.option("attn_implementation")
        packing = "--packing" if case.purpose in ("plan", "recommend") else "--packing true"
        why = f"{option} {VARLEN} without --packing: padded rows need a mask"
        yield job_answer(why, f"add `{packing}`, or `{option} sdpa`")


def attention_model(case: Case) -> Answers:
    name, model = case.job.attn_implementation, case.model.attention
    because = None if model is None or name in (None, AUTO) else model.why_not(str(name))
    if because is not None:
        option = case.option("attn_implementation")
        yield job_answer(f"{option} {name} does not run this model: {because}", _working_attention(case))


def _working_attention(case: Case) -> str:
    model = case.model.attention
    names = (VARLEN, "sdpa") if model is None else model.working
    working = [name for name in names if case.job.packing or name != VARLEN]
    return " or ".join(f"`{case.option('attn_implementation')} {name}`" for name in working[:2])


# -- checkpoints, and what the Trainer rejects when it is built (transformers 5.23, `Trainer.__init__`)


def rejects_save_only_model(fsdp_state_dict_type: str) -> bool:
    """Return True if the Trainer raises for `save_only_model`."""
    return fsdp_state_dict_type == "SHARDED_STATE_DICT"


def _fsdp_state_dict_type(preset: PresetSpec) -> str:
    """The preset's choice, or accelerate's default with FSDP2."""
    return str(preset.accelerate_config()["fsdp_config"].get("fsdp_state_dict_type", "SHARDED_STATE_DICT"))


def save_only_model(case: Case, preset: PresetSpec) -> Answers:
    if not preset.traits.uses_fsdp_plugin or not case.job.save_only_model:
        return
    if rejects_save_only_model(_fsdp_state_dict_type(preset)):
        why = "the Trainer rejects it with FSDP2's sharded state dict"
        yield method_answer(case, "save_only_model", why, "leave it out")


def async_save(case: Case, preset: PresetSpec) -> Answers:
    if not case.job.async_save or preset.sharded_at_load:
        return
    if not preset.traits.uses_fsdp_plugin:
        yield method_answer(case, "async_save", preset.traits.no_async_save, "leave it out, or `--preset fsdp2`")
    elif (kind := _fsdp_state_dict_type(preset)) != "SHARDED_STATE_DICT":
        why = f"its fsdp_state_dict_type is {kind}, which rank 0 writes alone"
        yield method_answer(case, "async_save", why, "`fsdp_state_dict_type: SHARDED_STATE_DICT`")


def auto_find_batch_size(case: Case, preset: PresetSpec) -> Answers:
    rejects = preset.traits.rejects_auto_find_batch_size and preset.shards_parameters
    if case.job.auto_find_batch_size and rejects:
        why = "the Trainer rejects it with ZeRO-3"
        yield method_answer(case, "auto_find_batch_size", why, "leave it out, or `--preset zero2`")


# -- optimizers


def planned_optimizer(case: Case) -> Answers:
    optim = case.job.optim
    if case.purpose in ("plan", "recommend") and optim not in OPTIMIZERS:
        close = nearest_word(optim, OPTIMIZERS)  # the first that begins so: AdamW's
        hint = f"did you mean `{close}`?" if close else f"planned: {', '.join(OPTIMIZERS)}"
        why = why_not_planned(optim)
        yield job_answer(f"--optim {optim} is not planned{f': {why}' if why else ''}", hint)


def survives_offload(optim: str) -> bool:
    """Return True if DeepSpeed's offload keeps the optimizer: torch's AdamW, as its own CPU kernel."""
    return optim in ("adamw_torch_fused", "adamw_torch")


def split_model_optimizer(case: Case, preset: PresetSpec) -> Answers:
    optim = case.job.optim
    in_stages = "pp" in preset.parallel
    if (in_stages or preset.sharded_at_load) and not survives_offload(optim):
        why = f"only AdamW was run on {'the stages of a pipeline' if in_stages else 'a model that is sharded at load'}"
        yield method_answer(case, f"optim {optim}", why, f"`--optim adamw_torch`, or {preset_that_runs(optim)}")


def optimizer_runs(case: Case, preset: PresetSpec) -> Answers:
    optim = case.job.optim
    if survives_offload(optim):  # which works under every preset
        return
    found = _no_optimizer(preset.traits, optim, offloaded=preset.offload_optimizer is not None)
    why = preset.traits.no_offloaded_optimizer
    if why is not None and preset.offload_optimizer:
        # accelerate 1.15, `map_pytorch_optim_to_deepspeed`: all others but Adagrad and Lion become a CPU Adam with L2
        # regularisation in place of decoupled weight decay; 8-bit and paged states become plain fp32 ones.
        found = why, f"`--optim adamw_torch`, or {preset_that_runs(optim)}"
    if found is not None:
        why, hint = found
        yield why, f"--optim {optim} does not work under preset {preset.name!r}: {why}", hint


def _no_optimizer(engine: Engine, optim: str, *, offloaded: bool = False) -> Sequence[str] | None:
    answers, library = engine.no_optimizer, optimizer_library(optim)
    return answers.get(optim) or answers.get(library) or (answers.get(f"{library} offloaded") if offloaded else None)


def preset_that_runs(optim: str) -> str:
    """Name a preset that can run an optimizer."""
    engines = [engine for engine in reversed(ENGINES.values()) if engine.plain_preset]
    return f"`--preset {next(each.plain_preset for each in engines if _no_optimizer(each, optim) is None)}`"


def optimizer_library(optim: str) -> str:
    """Return the package that an optimizer is from; empty for one that the table does not have."""
    spec = OPTIMIZERS.get(optim)
    return "" if spec is None else spec.class_name.partition(".")[0]
