"""What the training arguments switch on: the readings that they determine, and readers of the live objects."""

from __future__ import annotations

from typing import Any

from toolkit.models.attention import needs_no_mask
from toolkit.observe.attest.readings import Values
from toolkit.observe.attest.tensors import compute_dtype, dtype_name
from toolkit.train.arguments import Arguments
from toolkit.train.engine.comm_hooks import registered_hook
from toolkit.train.model.chunked_loss import read_loss


def expected_methods(arguments: Arguments) -> Values:
    """Return the values that every rank must read under these arguments."""
    model, training = arguments.job, arguments.training
    expected: Values = {
        "ddp_comm_hook": model.ddp_comm_hook,
        "activation_checkpointing_offload": model.activation_checkpointing_offload,
        "torch_compile": arguments.job.compilation is not None,
        "neftune_noise_alpha": training.neftune_noise_alpha,
        "load_in_4bit": model.load_in_4bit,
        "quantized_storage_dtype": dtype_name(compute_dtype(training)) if model.load_in_4bit else None,
    }
    if arguments.pipeline is not None:
        expected |= {
            "pipeline_schedule": arguments.pipeline.schedule,
            "pipeline_stages": arguments.pipeline.stages,
            "micro_batches": training.gradient_accumulation_steps,
            "activation_dtype": "float32",  # the residual stream between layers, under autocast too
        }
    if model.loss != "auto":
        expected["loss"] = model.loss
    if model.loss == "chunked":
        expected["loss_chunk_tokens"] = model.loss_chunk_tokens
    if arguments.job.uses_activation_checkpointing:
        expected["activation_checkpointing"] = True
    if model.accumulate is not None:
        expected["accumulate"] = model.accumulate
    if model.attn_implementation is not None:
        expected["attn_implementation"] = model.attn_implementation
    if arguments.job.packing and needs_no_mask(model.attn_implementation):
        expected["packing_mask_bytes"] = 0
    return expected


def read_methods(trainer: Any, plain: Any) -> Values:
    """Read the communication hook and the loss in effect; `plain` is the model without wrappers."""
    hook = registered_hook(trainer.model_wrapped)
    return {"ddp_comm_hook": None if hook is None else hook.name, **read_loss(plain)}


def hook_dtype(wrapped: Any) -> str | None:
    """Return the dtypes that DDP's communication hook has sent; None without a hook."""
    hook = registered_hook(wrapped)
    return None if hook is None else "+".join(sorted(hook.counter.dtypes))
