"""Floating-point operations per token, and model FLOPs utilisation (MFU).

A multiply-add is two operations. Norms, activation functions, softmax and the optimizer are not counted, as in
published figures (PaLM, appendix B, https://arxiv.org/abs/2204.02311).
"""

from dataclasses import dataclass

from toolkit.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFlops:
    """Operations of one token in a training step, averaged over a sequence."""

    dense_forward: int  # 2 per parameter that the token passes through
    attention_forward: int  # scores and weighted values: 4 · layers · width · length, or half of it for the causal half
    dense_backward: int  # 2 per parameter for the gradient of its input, 2 per trained parameter for its own gradient
    attention_backward: int
    recomputed: int = 0  # activation checkpointing: one more forward pass, of selective one without attention
    attention_recomputed: int = 0  # of it

    @property
    def forward_flops(self) -> int:
        """Operations of the forward pass."""
        return self.dense_forward + self.attention_forward

    @property
    def model_flops(self) -> int:
        """Operations that the training needs, without recomputation: MFU counts these."""
        return self.forward_flops + self.dense_backward + self.attention_backward

    @property
    def hardware_flops(self) -> int:
        """Operations that the GPU executes, with recomputation: HFU counts these."""
        return self.model_flops + self.recomputed


def flops_of(
    shape: ModelShape,
    *,
    seq_length: int,
    num_trainable_params: int | None = None,
    num_adapter_params: int = 0,
    causal: bool = False,
    recompute: bool = False,
    recompute_attention: bool = True,
    count_embeddings: bool = True,
) -> TokenFlops:
    """Return the operations for a model: 6·N + 12·L·d·s for full fine-tuning with full attention.

    A mixture of experts counts what one token passes through; encoders of images count for none. With N_f frozen and
    N_t trained parameters it is 4·N_f + 6·N_t: `num_adapter_params` are those of LoRA, in addition to the model's; only
    they are trained, unless `num_trainable_params` is given. The gradient is assumed to flow through all layers, which
    counts too much if only the last ones are trained. `causal` counts only the half of the scores that causal attention
    needs; most published figures count all. `count_embeddings=False` leaves out embeddings that are only looked up; a
    tied one is also the head, and counts.
    """
    num_params = shape.num_active_params - shape.num_tower_params + num_adapter_params
    if not count_embeddings:
        num_params -= sum(tensor.num_elements for tensor in shape.outer if tensor.is_embedding)
        num_params += shape.vocab_size * shape.hidden_size if shape.tied_embeddings else 0
    trained = (num_adapter_params or num_params) if num_trainable_params is None else num_trainable_params
    width = shape.num_attention_heads * shape.head_dim
    attention = 4 * shape.num_layers * width * seq_length // (2 if causal else 1)
    again = attention if recompute and recompute_attention else 0
    return TokenFlops(
        dense_forward=2 * num_params,
        attention_forward=attention,
        dense_backward=2 * num_params + 2 * min(trained, num_params),
        attention_backward=2 * attention,
        recomputed=2 * num_params + again if recompute else 0,
        attention_recomputed=again,
    )


def mfu(*, tokens_per_second_per_gpu: float, flops_per_token: int, peak_flops: float | None) -> float | None:
    """Return the share of the dense peak, from 0 to 1; None if the peak is unknown.

    With `hardware_flops` instead of `model_flops` as `flops_per_token`, this is the HFU.
    """
    if peak_flops is None:
        return None
    return tokens_per_second_per_gpu * flops_per_token / peak_flops
