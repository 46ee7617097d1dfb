"""Verify that packed documents stay apart: other tokens in the first must change no layer's output for the second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.observe.attest.tensors import clean_name
from toolkit.observe.observed_run import gather_from_ranks
from toolkit.record.kernel_table import KernelRow, row

# Inputs that say nothing of the tokens' content; a model with others (images) is not asked with other tokens.
POSITIONAL = ("attention_mask", "position_ids", "token_type_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
COMPARED_TOKENS = 8  # of the second document: a state of the first has decayed later
# Norm of the difference over the norm: other shapes per expert round otherwise.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_PRECISION_TOLERANCE = 0.03


def boundary(inputs: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return the row, the first token and the end of a document that another one follows; None without positions.

    >>> boundary({"input_ids": torch.ones(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
    (0, 0, 3)
    """
    positions, ids = inputs.get("position_ids"), inputs.get("input_ids")
    tensors = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim() > 0]
    known = {"input_ids", "labels", "shift_labels", "num_items_in_batch", *POSITIONAL}
    if positions is None or ids is None or positions.shape != ids.shape or not known.issuperset(tensors):
        return None
    begins = (positions[:, 1:-1] == 0) & (positions[:, :-2] > 0) & (positions[:, 2:] == 1)
    if not begins.any():
        return None
    row, last = begins.nonzero()[0].tolist()
    return row, last - int(positions[row, last]), last + 1


def document_rows(trainer: Any, model: Any, inputs: Any) -> list[KernelRow]:
    """Return the row of the first batch, and nothing where it is not packed. Collective for sharded models.

    The model runs twice without gradients, in evaluation mode, and is left as it was.
    """
    wrapped, plain = trainer.model_wrapped, model
    is_split = getattr(trainer.accelerator, "parallelism_config", None) is not None
    packed = boundary(inputs) if isinstance(inputs, Mapping) and not is_split else None
    is_sharded = hasattr(wrapped, "zero_optimization_stage") or isinstance(wrapped, FSDPModule)
    if not any(gather_from_ranks(packed is not None) if is_sharded else [packed]):
        return []
    caller = wrapped if is_sharded else plain.forward  # no hook of the model is called without need
    at, begin, end = packed or (0, 0, 0)
    kept = {n: v for n, v in inputs.items() if n not in ("labels", "shift_labels", "num_items_in_batch")}
    other = kept["input_ids"].clone()
    other[at, begin:end] = other[at, begin:end].roll(1)
    modes = {module: module.training for module in plain.modules()}
    plain.eval()
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            pair = [_outputs(caller, plain, kept | {"input_ids": ids}, at, end) for ids in (kept["input_ids"], other)]
    finally:
        for module, mode in modes.items():
            module.training = mode
    if packed is None:
        return []
    leak = next((name for name, one in pair[0].items() if _differs(one, pair[1][name])), None)
    if leak is None:
        return [row("documents", "isolated", "isolated")]
    repair = "no attention_mask beside position_ids, or flash attention" if "ttention" in leak else "no packing"
    return [row("documents", "isolated", "mixed", leak, leak, "tokens are predicted from other documents", repair)]


def _outputs(caller: Any, plain: Any, inputs: Any, row: int, first: int) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[:2] == inputs["input_ids"].shape:
                outputs.setdefault(name, value[row, first : first + COMPARED_TOKENS].clone())

        return hook

    blocks = [(n, m) for n, m in plain.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    layers = {f"{n}.{c}": child for n, block in blocks for c, child in block.named_children()} | dict(blocks)
    hooks = [m.register_forward_hook(keep(f"{clean_name(n)} ({type(m).__name__})")) for n, m in layers.items()]
    try:
        result = caller(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not outputs:
        keep("logits")(None, (), getattr(result, "logits", None))
    return outputs


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = TOLERANCE.get(one.dtype, HALF_PRECISION_TOLERANCE)
    return float((one.float() - other.float()).norm()) > tolerance * float(one.float().norm())
