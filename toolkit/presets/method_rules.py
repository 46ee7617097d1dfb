"""Compatibility rules of training methods: freezing, QLoRA, attention, compilation, accumulation, checkpoints."""

from __future__ import annotations

from toolkit.models.attention import AUTO, FLASH_ATTENTION, VARLEN, needs_no_mask
from toolkit.presets.compatibility import Answer, Case, method_answer
from toolkit.presets.spec import PresetSpec, default_accumulate

QLORA_PRESETS_HINT = (
    "`--preset ddp`; `fsdp2` or `zero3` shard the 4-bit weights, `zero3_cpu_offload` keeps them in host memory"
)


def freeze_and_train_only(case: Case) -> Answer:
    if not (case.job.freeze and case.job.train_only):
        return None
    why = "--freeze and --train_only together"
    return why, why, "use one of them"


def checkpointing_offload(case: Case) -> Answer:
    if not case.job.activation_checkpointing_offload or case.job.uses_activation_checkpointing:
        return None
    why = "--activation_checkpointing_offload without --activation_checkpointing: there are no checkpoints to offload"
    return why, why, "add `--activation_checkpointing true`"


def four_bit_needs_lora(case: Case) -> Answer:
    if not case.job.load_in_4bit or case.job.is_lora:
        return None
    option = case.option("lora_r")
    why = f"{case.option('load_in_4bit')} needs {option}: 4-bit weights are not trained"
    return why, why, f"add `{option} 16`"


def freeze_with_lora(case: Case) -> Answer:
    name = "freeze" if case.job.freeze else "train_only" if case.job.train_only else None
    if name is None or not case.job.is_lora:
        return None
    why = f"--{name} with --lora_r: only the adapters are trained already"
    return why, why, "`--lora_config layers_to_transform=[0,1]`, or `--lora_target_modules q_proj v_proj`"


def qlora(case: Case) -> Answer:
    preset = case.preset
    if preset is None or not case.job.load_in_4bit:
        return None
    if preset.needs_gpu is not None:
        why = "it quantizes what it gathers, and packed 4-bit weights are no numbers"
    elif preset.offload_optimizer and not preset.shards_parameters:
        why = "the adapters' optimizer states are too small to offload"
    elif preset.uses_nvme:
        why = "4-bit weights on a disk have not been run; in host memory they have"
    else:
        return None
    return method_answer(case, "load_in_4bit", why, QLORA_PRESETS_HINT)


def chunked_with_liger(case: Case) -> Answer:
    if case.job.loss != "chunked" or not case.job.use_liger_kernel:
        return None
    why = "--loss chunked with --use_liger_kernel: Liger computes the loss without the full logits itself"
    return why, why, "leave `--loss` out"


def gpu_only_method(case: Case) -> Answer:
    if case.device is None or case.device.type != "cpu":
        return None
    for name, (because, hint) in _GPU_ONLY_METHODS.items():
        if case.uses(name):
            why = f"--{name} needs a GPU: {because}"
            return why, why, hint
    return None


_GPU_ONLY_METHODS = {
    "use_liger_kernel": ("its kernels are written in Triton", "leave it out on a CPU"),
    "activation_checkpointing_offload": ("on a CPU activations are in host memory already", "leave it out on a CPU"),
    "memory_snapshot": ("it records CUDA's allocator", "`--profile_steps 3:5` works on a CPU"),
}


def attention_device(case: Case) -> Answer:
    name = case.job.attn_implementation
    if name is None or case.device is None or case.device.type != "cpu":
        return None
    if name in FLASH_ATTENTION or (name.startswith("kernels-community/") and needs_no_mask(name)):
        because = "its kernels are built for GPUs"
    elif name == "flex_attention":
        because = "FlexAttention has no backward on a CPU (torch 2.13)"
    else:
        return None
    why = f"{case.option('attn_implementation')} {name} needs a GPU: {because}"
    return why, why, _working_attention(case)


def attention_rows(case: Case) -> Answer:
    if case.job.attn_implementation != VARLEN or case.job.packing:
        return None
    option = case.option("attn_implementation")
    why = f"{option} {VARLEN} without --packing: padded rows need a mask"
    packing = "--packing" if case.purpose in ("plan", "recommend") else "--packing true"
    return why, why, f"add `{packing}`, or `{option} sdpa`"


def attention_model(case: Case) -> Answer:
    name, model = case.job.attn_implementation, case.model.attention
    because = None if model is None or name in (None, AUTO) else model.why_not(str(name))
    if because is None:
        return None
    why = f"{case.option('attn_implementation')} {name} does not run this model: {because}"
    return why, why, _working_attention(case)


def _working_attention(case: Case) -> str:
    """Name the functions that run on every device."""
    model = case.model.attention
    names = (VARLEN, "sdpa") if model is None else model.working
    shown = [name for name in names if case.job.packing or name != VARLEN]
    return " or ".join(f"`{case.option('attn_implementation')} {name}`" for name in shown[:2])


def compiled_zero3(case: Case) -> Answer:
    preset = case.preset
    if preset is None or not case.uses("torch_compile"):
        return None
    if preset.engine != "deepspeed" or not preset.shards_parameters:
        return None
    # docs/evidence/speed-and-memory.md: 15 graph breaks in a model of two layers, and nothing is fused
    why = "ZeRO-3 gathers weights in hooks, so that the compiler's graph ends at each linear layer"
    return method_answer(case, "torch_compile", why, "`--preset fsdp2` shards the same")


def comm_hook(case: Case) -> Answer:
    if case.job.ddp_comm_hook is None:
        return None
    if case.purpose in ("rehearse", "trace"):
        why = "--ddp_comm_hook cannot be rehearsed: a hook reads what the other ranks send"
        return why, why, "leave it out"
    if case.preset is not None and case.preset.engine in _NO_COMM_HOOK:
        return method_answer(case, "ddp_comm_hook", _NO_COMM_HOOK[case.preset.engine], "`--preset ddp`")
    if case.world_size == 1:
        why = f"--ddp_comm_hook with one process: {_NO_COMM_HOOK['none']}"
        return why, why, "`--num-processes 2`"
    return None


_NO_COMM_HOOK = {
    "deepspeed": "DeepSpeed reduces gradients itself",
    "fsdp2": "FSDP2 reduce-scatters gradients itself, without DDP's buckets",
    "none": "there is nothing to communicate",
    "pipeline": "gradients between pipelines are reduced without DDP's buckets",
}


def accumulation(case: Case) -> Answer:
    preset, chosen = case.preset, case.job.chosen_accumulate
    if preset is None or chosen is None or preset.engine == "fsdp2" or chosen == default_accumulate(preset):
        return None
    why = _FIXED_ACCUMULATION["deepspeed" if preset.engine == "deepspeed" else "ddp", chosen]
    return method_answer(case, f"accumulate {chosen}", why, "leave it out, or `--preset fsdp2`")


_FIXED_ACCUMULATION = {
    ("ddp", "sharded"): "every GPU holds all gradients, so a reduction in each accumulation step would save nothing",
    ("deepspeed", "sharded"): "below ZeRO-2, gradients are reduced in the last accumulation step only",
    ("deepspeed", "whole"): "ZeRO-2 and ZeRO-3 reduce and shard gradients in every accumulation step",
}


def rejects_save_only_model(fsdp_state_dict_type: str) -> bool:
    """Return True if the Trainer raises for `save_only_model` (transformers 5.23, `Trainer.__init__`)."""
    return fsdp_state_dict_type == "SHARDED_STATE_DICT"


def rejects_auto_find_batch_size(*, engine: str, zero_stage: int) -> bool:
    """Return True if the Trainer raises for `auto_find_batch_size` (transformers 5.23, `Trainer.__init__`)."""
    return engine == "deepspeed" and zero_stage == 3


def save_only_model(case: Case) -> Answer:
    preset = case.preset
    if preset is None or not preset.uses_fsdp_plugin or not case.job.save_only_model:
        return None
    if not rejects_save_only_model(_fsdp_state_dict_type(preset)):
        return None
    why = "the Trainer rejects it with FSDP2's sharded state dict"
    return method_answer(case, "save_only_model", why, "leave it out")


def _fsdp_state_dict_type(preset: PresetSpec) -> str:
    """The preset's choice, or accelerate's default with FSDP2."""
    config = preset.accelerate_config()["fsdp_config"]
    return str(config.get("fsdp_state_dict_type", "SHARDED_STATE_DICT"))


def async_save(case: Case) -> Answer:
    preset = case.preset
    if preset is None or not case.job.async_save or preset.sharded_at_load:
        return None
    hint = "leave it out, or `--preset fsdp2`"
    if preset.engine == "deepspeed":
        return method_answer(case, "async_save", "DeepSpeed writes its checkpoints itself", hint)
    if preset.engine == "pipeline":
        return method_answer(case, "async_save", "its stages write their checkpoints themselves", hint)
    if not preset.uses_fsdp_plugin:
        return method_answer(case, "async_save", "rank 0 writes its checkpoints alone, and no rank has a shard", hint)
    state_dict_type = _fsdp_state_dict_type(preset)
    if state_dict_type == "SHARDED_STATE_DICT":
        return None
    why = f"its fsdp_state_dict_type is {state_dict_type}, which rank 0 writes alone"
    return method_answer(case, "async_save", why, "`fsdp_state_dict_type: SHARDED_STATE_DICT`")


def auto_find_batch_size(case: Case) -> Answer:
    preset = case.preset
    if preset is None or not case.job.auto_find_batch_size:
        return None
    if not rejects_auto_find_batch_size(zero_stage=3 if preset.shards_parameters else 2, engine=preset.engine):
        return None
    why = "the Trainer rejects it with ZeRO-3"
    return method_answer(case, "auto_find_batch_size", why, "leave it out, or `--preset zero2`")
