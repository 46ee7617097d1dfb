"""Floating-point operations of a token, and what share of a GPU's peak a measured speed is.

    >>> token_flops(num_params=125_311_488, num_layers=12, attention_width=768, seq_length=2048).model_flops
    978338304

A multiplication with its addition is two operations. Norms, activations, softmax and the optimizer are left out, as
in the published figures (PaLM, appendix B, https://arxiv.org/abs/2204.02311).
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFlops:
    """Operations of one token through the whole model, averaged over a sequence."""

    dense_forward: int
    """2 a parameter that the token passes through."""
    attention_forward: int
    """Scores and weighted values: 4 · layers · width · length, half of it where only the causal half is counted."""
    dense_backward: int
    """2 a parameter for the gradient that is passed down, and 2 a trained one for its own."""
    attention_backward: int
    recomputed: int = 0
    """What activation checkpointing does again: one more forward pass."""

    @property
    def forward_flops(self) -> int:
        """The forward pass alone."""
        return self.dense_forward + self.attention_forward

    @property
    def model_flops(self) -> int:
        """What the training needs, however it is done: MFU counts these."""
        return self.forward_flops + self.dense_backward + self.attention_backward

    @property
    def hardware_flops(self) -> int:
        """What the GPU does, recomputation included: HFU counts these."""
        return self.model_flops + self.recomputed


def token_flops(
    *,
    num_params: int,
    num_layers: int,
    attention_width: int,
    seq_length: int,
    num_trainable_params: int | None = None,
    causal: bool = False,
    recompute: bool = False,
) -> TokenFlops:
    """From bare numbers: 6·N + 12·L·d·s for full training with full attention.

    `num_trainable_params` is None where all of them are trained; with N_f frozen ones it is 4·N_f + 6·N_t. The
    gradient is passed down through all layers even where only the last are trained, which counts too much then.
    `causal` counts the half of the scores that causal attention needs; published figures mostly count all.
    """
    trained = num_params if num_trainable_params is None else num_trainable_params
    attention = 4 * num_layers * attention_width * seq_length // (2 if causal else 1)
    return TokenFlops(
        dense_forward=2 * num_params,
        attention_forward=attention,
        dense_backward=2 * num_params + 2 * trained,
        attention_backward=2 * attention,
        recomputed=2 * num_params + attention if recompute else 0,
    )


def flops_of(
    shape: ModelShape,
    *,
    seq_length: int,
    num_trainable_params: int | None = None,
    num_adapter_params: int = 0,
    causal: bool = False,
    recompute: bool = False,
    count_embeddings: bool = True,
) -> TokenFlops:
    """For a model: a mixture of experts counts what one token passes through.

    `num_adapter_params` are those of LoRA, beside the model's own: alone trained unless `num_trainable_params` says
    otherwise. `count_embeddings=False` leaves out a table that is only looked up; a tied one is multiplied as the
    head, and counts. Published figures mostly count all parameters.
    """
    num_params = shape.num_active_params if count_embeddings else num_matmul_params(shape)
    if num_trainable_params is None and num_adapter_params:
        num_trainable_params = num_adapter_params
    if num_trainable_params is not None:
        num_trainable_params = min(num_trainable_params, num_params + num_adapter_params)
    return token_flops(
        num_params=num_params + num_adapter_params,
        num_layers=shape.num_layers,
        attention_width=shape.num_attention_heads * shape.head_dim,
        seq_length=seq_length,
        num_trainable_params=num_trainable_params,
        causal=causal,
        recompute=recompute,
    )


def num_matmul_params(shape: ModelShape) -> int:
    """Parameters that a token is multiplied by: all that it passes through but tables that are only looked up."""
    tied_head = shape.vocab_size * shape.hidden_size if shape.tied_embeddings else 0
    return shape.num_active_params - shape.num_embedding_params + tied_head


def mfu(*, tokens_per_second_per_gpu: float, flops_per_token: int, peak_flops: float | None) -> float | None:
    """Share of the dense peak that the needed operations make up, between 0 and 1; None where the peak is unknown.

    With `hardware_flops` in place of `model_flops` it is the HFU.
    """
    if peak_flops is None:
        return None
    return tokens_per_second_per_gpu * flops_per_token / peak_flops
