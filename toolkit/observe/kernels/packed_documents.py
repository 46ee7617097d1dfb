"""Verify that packed documents stay apart: other tokens in the first must change no layer's output for the second."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.engines.live_engine import live_engine
from toolkit.engines.tensors import clean_name, without_adapters
from toolkit.observe.observed_run import gather_from_ranks
from toolkit.record.kernel_table import KernelRow, row

LABELS = ("labels", "shift_labels", "num_items_in_batch")
TEXT = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
COMPARED_TOKENS = 8  # of the second document: a state of the first has decayed later
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.03  # of the norm: experts with another number of tokens round otherwise


def boundary(inputs: Any) -> tuple[int, int, int] | None:
    """Return the row, the first token and the end of a document that another one follows; None without positions.

    >>> boundary({"input_ids": torch.ones(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
    (0, 0, 3)
    """
    given = inputs if isinstance(inputs, Mapping) else {}
    positions, ids = given.get("position_ids"), given.get("input_ids")
    others = [n for n, v in given.items() if isinstance(v, torch.Tensor) and n not in (*LABELS, *TEXT)]  # images
    if positions is None or ids is None or positions.shape != ids.shape or others:
        return None
    begins = ((positions[:, 1:-1] == 0) & (positions[:, :-2] > 0) & (positions[:, 2:] == 1)).nonzero().tolist()
    return next(((at, last - int(positions[at, last]), last + 1) for at, last in begins), None)


def document_rows(trainer: Any, plain: Any, inputs: Any) -> list[KernelRow]:
    """Return the row of the first batch; nothing where it is not packed. Collective for sharded models.

    The model runs twice without gradients, in evaluation mode, and is left as it was.
    """
    wrapped, packed = trainer.model_wrapped, boundary(inputs)
    is_sharded = live_engine(wrapped).is_divided
    if not any(gather_from_ranks(packed is not None) if is_sharded else [packed]):
        return []
    caller = wrapped if is_sharded else plain.forward  # no hook of the model is called without need
    at, begin, end = packed or (0, 0, 0)
    small = {"logits_to_keep": 1, "use_cache": False}
    takes = inspect.signature(without_adapters(plain).forward).parameters
    kept = {n: v for n, v in {**inputs, **small}.items() if n not in LABELS and (n in inputs or n in takes)}
    other = kept["input_ids"].clone()
    other[at, begin:end] = other[at, begin:end].roll(1)
    modes = {module: module.training for module in plain.modules()}
    plain.eval()
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad(), trainer.accelerator.autocast():
            one, two = (_outputs(caller, plain, kept | {"input_ids": x}, at, end) for x in (kept["input_ids"], other))
    except Exception:  # its forward needs labels, or has no memory left
        return []
    finally:
        for module, mode in modes.items():
            module.training = mode
    leak = next((name for name, value in one.items() if _differs(value, two[name])), "")
    repair = "no attention_mask beside position_ids, or flash attention" if "ttention" in leak else "no packing"
    words = ("mixed", leak, leak, "tokens are predicted from other documents", repair) if leak else ("isolated",)
    return [row("documents", "isolated", *words)] if packed and one else []


def _outputs(caller: Any, plain: Any, inputs: Any, at: int, first: int) -> dict[str, torch.Tensor]:
    """Return the outputs of layers and their parts for the first tokens of the second document, in turn."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) and output else output
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[:2] == inputs["input_ids"].shape:
            outputs.setdefault(name, value[at, first : first + COMPARED_TOKENS].clone())

    blocks = {n: m for n, m in plain.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    layers = {f"{n}.{child}": m for n, block in blocks.items() for child, m in block.named_children()} | blocks
    names = {m: f"{clean_name(n)} ({type(m).__name__})" for n, m in layers.items()}
    hooks = [m.register_forward_hook(lambda m, _, output: keep(names[m], output)) for m in names]
    try:
        keep("logits", getattr(caller(**inputs), "logits", None))
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = TOLERANCE if torch.finfo(one.dtype).bits > 16 else HALF_PRECISION_TOLERANCE
    return float((one - other).float().norm()) > tolerance * float(one.float().norm())
