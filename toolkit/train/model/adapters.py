"""LoRA adapters on frozen weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments
from toolkit.models.lora import ALL_LINEAR

# Fields of `LoraConfig` that train copies of the model's own weights.
BASE_WEIGHT_FIELDS = ("modules_to_save", "trainable_token_indices")


def with_lora(model: Any, arguments: ModelArguments) -> Any:
    """Return the model with trainable LoRA adapters on frozen weights; `lora_config` sets further `LoraConfig` fields.

    Raises ToolkitError if peft rejects the configuration.
    """
    from peft import LoraConfig, get_peft_model

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
        return get_peft_model(model, config, autocast_adapter_dtype=not is_deepspeed_zero3_enabled())
    except (ValueError, TypeError, ImportError) as error:
        given = f" with {', '.join(f'{name}={value}' for name, value in fields.items())}" if fields else ""
        raise ToolkitError(
            f"LoRA{given}: {' '.join(str(error).split())}", hint="see `--lora_target_modules` and `--lora_config`"
        ) from None


def saved_lora(model: Any, checkpoint: Path) -> Any:
    """Return the model with the trainable adapters of a checkpoint."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)


def trains_base_weights(arguments: ModelArguments) -> bool:
    """Return True if `lora_config` trains weights of the model itself, beside the adapters."""
    fields = arguments.lora_config or {}
    return fields.get("bias", "none") != "none" or any(fields.get(name) for name in BASE_WEIGHT_FIELDS)
