"""Load the model and its tokenizer: trained weights in fp32, frozen ones in the compute dtype."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config, Mxfp4Config

from toolkit.engines.fsdp2 import uses_fsdp
from toolkit.engines.sharded_at_load import distributed_config
from toolkit.engines.zero_process import shard_no_more_models, shards_while_loading
from toolkit.errors import ToolkitError, nearest, shown
from toolkit.files.documents import read_text
from toolkit.files.paths import user_path
from toolkit.job.argument_fields import ModelArguments
from toolkit.job.job import Job
from toolkit.models.attention import AUTO, packed_attention, read_model_attention
from toolkit.models.lora import ALL_LINEAR, share_inputs
from toolkit.models.nf4 import keep_packing, quantization_config
from toolkit.observe.rank_process import without_bitsandbytes
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets.compatibility import ModelLimits
from toolkit.presets.support import check_supported
from toolkit.train.model import varlen_attention

varlen_attention.register()

# Fields of `LoraConfig` that train copies of the model's own weights.
BASE_WEIGHT_FIELDS = ("modules_to_save", "trainable_token_indices")


def load_tokenizer(arguments: ModelArguments, *, chat_template: str | None) -> Any:
    """Return the model's tokenizer, with the chat template of the file `chat_template` if given."""
    tokenizer = from_pretrained(AutoTokenizer, arguments)
    if not isinstance(limit := tokenizer.model_max_length, (int, float)):
        what = f"model_max_length is {str(limit)[:80]!r} in tokenizer_config.json of {arguments.model_name_or_path!r}"
        raise ToolkitError(what, hint="expected a number of tokens: correct it, or leave it out")
    if chat_template is not None:
        tokenizer.chat_template = read_text(user_path(chat_template))
    return tokenizer


def choose_attention(job: Job, *, compute_dtype: torch.dtype, on_cpu: bool) -> str | None:
    """Return the attention function to load the model with, or None for the model's own.

    Packed rows get one that makes no mask, if none is named. Raises ToolkitError for one that the model does not run.
    """
    name = job.attn_implementation
    if name is None and not job.packing:
        return None
    config = from_pretrained(AutoConfig, job).to_dict()
    model = None if job.trust_remote_code and "auto_map" in config else read_model_attention(config)
    asked = Job(packing=job.packing, attn_implementation=name)
    check_supported(None, asked, model=ModelLimits(attention=model))
    if name not in (None, AUTO) or not job.packing:
        return None if name == AUTO else name
    capability = None if on_cpu else torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", "0")))
    return packed_attention(model, capability=capability, half_precision=compute_dtype != torch.float32)


def load_model(
    arguments: ModelArguments,
    *,
    compute_dtype: torch.dtype,
    layout: ParallelLayout | None = None,
    checkpoint: Path | None = None,
) -> Any:
    """Return the model, with LoRA adapters or frozen parameters if the arguments say so.

    With a `layout`, transformers shards the model while it loads it, and the weights of a `checkpoint` are loaded here,
    too: the Trainer loads them into every other model. The stored dtype does not matter (docs/concepts/numerics.md).
    """
    extra: dict[str, Any] = {"dtype": loaded_dtype(arguments, compute_dtype)}
    if arguments.attn_implementation:
        extra["attn_implementation"] = arguments.attn_implementation
    if arguments.load_in_4bit:
        extra["quantization_config"] = quantization_config(compute_dtype)
    else:
        extra |= dequantized(from_pretrained(AutoConfig, arguments))
    source, adapter = arguments, None
    if layout is not None:
        extra["distributed_config"] = distributed_config(layout, half=compute_dtype == torch.bfloat16)
        adapter = checkpoint
        if checkpoint is not None and arguments.lora_r is None:
            source = replace(arguments, model_name_or_path=str(checkpoint), revision="main")
    load = partial(from_pretrained, AutoModelForCausalLM, source, **extra)
    if not arguments.load_in_4bit:
        model = load()
    else:
        from toolkit.models.nf4_experts import load_with_experts_in_4_bits
        from toolkit.train.model.four_bit import load_for_shards

        model = load_with_experts_in_4_bits(partial(load_for_shards, load) if _is_sharded_4_bit(arguments) else load)
        keep_packing(model)
    return prepare_model(model, arguments, compute_dtype=compute_dtype, adapter=adapter)


def dequantized(config: Any) -> dict[str, Any]:
    """Return the argument that loads weights stored in mxfp4 or fp8 in a dtype that trains; nothing for others.

    On a GPU transformers would keep them packed, which nothing trains (`Mxfp4HfQuantizer.is_trainable`).
    """
    kinds = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
    stored = getattr(config, "quantization_config", None) or {}
    kind = kinds.get(str(stored.get("quant_method"))) if isinstance(stored, dict) else None
    if kind is None:
        return {}
    left = stored.get("modules_to_not_convert")
    return {"quantization_config": kind(dequantize=True, modules_to_not_convert=left)}


def loaded_dtype(arguments: ModelArguments, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to load in: fp32 if any of the checkpoint's own weights are trained."""
    fields = arguments.lora_config or {}
    trains_base = fields.get("bias", "none") != "none" or any(fields.get(name) for name in BASE_WEIGHT_FIELDS)
    return torch.float32 if arguments.lora_r is None or trains_base else compute_dtype


def prepare_model(
    model: Any, arguments: ModelArguments, *, compute_dtype: torch.dtype, adapter: Path | None = None
) -> Any:
    """Add LoRA adapters, or load those of the checkpoint `adapter`, or freeze parts; then give weights their dtypes."""
    model.config.use_cache = False
    if arguments.lora_r is not None:
        with contextlib.nullcontext() if arguments.load_in_4bit else without_bitsandbytes():
            model = with_lora(model, arguments, adapter)
        if compute_dtype != torch.float32:
            share_inputs(model)
    else:
        for line in freeze(model, frozen=arguments.freeze, trained=arguments.train_only):
            if os.environ.get("RANK", "0") == "0":
                print(line, flush=True)
    if arguments.load_in_4bit:
        from toolkit.models.nf4_experts import decode_experts_when_used

        decode_experts_when_used(model)
    cast_weights(model, compute_dtype)
    if _is_sharded_4_bit(arguments):
        from toolkit.train.model.four_bit import make_shardable

        make_shardable(model)
    return model


def _is_sharded_4_bit(arguments: ModelArguments) -> bool:
    return arguments.load_in_4bit and (shards_while_loading() or uses_fsdp())


def with_lora(model: Any, arguments: ModelArguments, checkpoint: Path | None) -> Any:
    """Return the model with LoRA adapters, new or of a checkpoint. Raises ToolkitError if peft refuses them."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if checkpoint is not None:
        return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
    targets, fields = arguments.lora_target_modules, dict(arguments.lora_config or {})
    try:
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha or 2 * (arguments.lora_r or 0),
            lora_dropout=arguments.lora_dropout,
            target_modules="all-linear" if targets == ALL_LINEAR else list(targets),
            **fields,
        )
        # ZeRO-3 computes with adapters as they are, and keeps their fp32 masters itself.
        return get_peft_model(model, config, autocast_adapter_dtype=not shards_while_loading())
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        given = f" with {', '.join(f'{name}={value}' for name, value in fields.items())}" if fields else ""
        what, hint = " ".join(str(error).split()), "see `--lora_target_modules` and `--lora_config`"
        raise ToolkitError(f"LoRA{given}: {what}", hint=hint) from None


def freeze(model: Any, *, frozen: Sequence[str] | None, trained: Sequence[str] | None) -> list[str]:
    """Set `requires_grad` by shell patterns on names, and return a line for each tied weight of which one name matched.

    Raises ToolkitError for a pattern that matches nothing, and if nothing is left to train.
    """
    patterns = list(frozen or trained or ())
    if not patterns:
        return []
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    every_name = [name for tied in names.values() for name in tied]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every_name):
            option = "freeze" if frozen else "train_only"
            close = nearest(pattern[:200], every_name, cutoff=0.3) or every_name[0]
            raise ToolkitError(f"--{option} {shown(pattern)} matches no parameter", hint=f"there is `{close}`")
    lines = []
    for parameter, tied in names.items():
        matched = [name for name in tied if any(fnmatchcase(name, pattern) for pattern in patterns)]
        parameter.requires_grad_(bool(matched) if trained else not matched)
        if matched and len(matched) < len(tied):
            others = ", ".join(name for name in tied if name not in matched)
            lines.append(f"{matched[0]} is tied to {others}: the pattern applies to all of them")
    if not any(parameter.requires_grad for parameter in names):
        raise ToolkitError("--freeze leaves nothing to train", hint="freeze fewer parameters")
    return lines


def cast_weights(model: Any, compute_dtype: torch.dtype) -> None:
    """Hold trained weights in fp32, to accumulate updates, and frozen ones in the compute dtype.

    ZeRO-3 shards weights in the compute dtype as they are loaded, and keeps fp32 masters of the trained ones.
    """
    if shards_while_loading():
        return
    for parameter in model.parameters():
        dtype = torch.float32 if parameter.requires_grad else compute_dtype
        if parameter.is_floating_point() and parameter.dtype != dtype and not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.to(dtype)


def model_without_weights(arguments: ModelArguments) -> Any:
    """Return the model on the meta device."""
    shard_no_more_models()
    config = from_pretrained(AutoConfig, arguments)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=arguments.trust_remote_code)


def from_pretrained(auto_class: Any, arguments: ModelArguments, **extra: Any) -> Any:
    """Call `from_pretrained` for the model. Raises ToolkitError with the first line of an error."""
    name = arguments.model_name_or_path
    source = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    try:
        return auto_class.from_pretrained(name, **source, **extra)
    except Exception as error:  # the tokenizers library raises bare ones for a file that is damaged
        if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
            raise  # of torch: out of memory
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        hint = "give a local folder with config.json, weights and tokenizer, or a hub id that this node can reach"
        raise ToolkitError(f"model {name!r} cannot be loaded: {first_line}", hint=hint) from None
