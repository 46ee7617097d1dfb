"""Attention of packed rows without a mask, registered with transformers as `sdpa_varlen`.

transformers gives SDPA the documents of a packed row as a mask of all pairs of positions, and no flash kernel. Here
each document is computed alone: on a GPU in half precision all in one call of torch's `varlen_attn` (its own flash
attention), otherwise in one call of `scaled_dot_product_attention` each.
"""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from toolkit.models.attention import VARLEN

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12
LARGEST_HEAD_DIM = 256  # of torch's flash attention; a multiple of 8
NOT_SUPPORTED = ("softcap", "s_aux", "position_bias", "cache")


def register() -> None:
    """Add `sdpa_varlen` to the attention functions of transformers, before a model is loaded."""
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, varlen_mask)


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention within each document: (rows, tokens, heads, head size) from (rows, heads, tokens, ...).

    The documents are those of `cu_seq_lens_q` (transformers' `FlashAttentionKwargs`), or begin where `position_ids` do.
    Rows with a mask, which are padded, get plain SDPA. Raises ValueError for what only other functions compute.
    """
    if attention_mask is not None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    given = [name for name in NOT_SUPPORTED if kwargs.get(name) is not None]
    if given or not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise ValueError(f"{VARLEN} does not support {' and '.join(given) or 'attention in both directions'}")
    rows, _, tokens, _ = query.shape
    if cu_seq_lens_q is None or max_length_q is None:  # without positions, each row is one document
        positions = torch.arange(tokens, device=query.device) if position_ids is None else position_ids
        (cu_seq_lens_q, _), (max_length_q, _) = prepare_fa_kwargs_from_position_ids(positions.expand(rows, tokens))
    # (rows, heads, tokens, head size) as (rows x tokens, heads, head size)
    query, key, value = (_autocast(part).transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    if has_varlen_kernel(query, value, dropout=dropout):
        before = -1 if sliding_window is None else sliding_window - 1  # a token counts in its own window
        starts, longest, groups = cu_seq_lens_q, int(max_length_q), query.shape[1] // key.shape[1]
        how: dict[str, Any] = {"window_size": (before, 0), "scale": scaling}
        if groups > 1 and TAKES_GROUPS:
            how["enable_gqa"] = True
        elif groups > 1:
            key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        output = varlen_attn(query, key, value, starts, starts, longest, longest, **how)
    else:
        how = {"dropout_p": dropout, "scale": scaling}
        output = _by_document(query, key, value, cu_seq_lens_q, window=sliding_window, **how)
    return output.reshape(rows, tokens, *output.shape[-2:]), None


def varlen_mask(
    *, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **kwargs: Any
) -> torch.Tensor | None:
    """Return no mask; for padded rows, and for a model that adds a pattern of its own, the mask of SDPA."""
    if attention_mask is None and not use_vmap:
        return None
    return sdpa_mask(attention_mask=attention_mask, use_vmap=use_vmap, **kwargs)


def has_varlen_kernel(query: torch.Tensor, value: torch.Tensor, *, dropout: float) -> bool:
    """Return True for what torch's flash attention computes: it takes no fp32, no dropout and no unequal head sizes."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_dim == value.shape[-1] <= LARGEST_HEAD_DIM
        and head_dim % 8 == 0
        and not dropout
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast as autocast casts the inputs of SDPA. Rotary embeddings can leave fp32 behind, which no kernel mixes."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents differs from row to row
def _by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, *, window: int | None, **how: Any
) -> torch.Tensor:
    """Return the attention of one document after the other; `how` is dropout and scale."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    outputs = []
    for q, k, v in zip(*(part.split(starts.diff().tolist(), dim=2) for part in (query, key, value)), strict=True):
        at = torch.arange(q.shape[2], device=q.device)
        mask = None if window is None else (at <= at[:, None]) & (at > at[:, None] - window)
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **how))
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)
