"""What a forward leaves behind for the backward, in bytes, out of the architecture.

    >>> llama.layer_bytes_per_token(seq_length=2048)  # 16·h + 4·(q + kv) + 8·f + 4·heads + 8
    366728

Terms in bytes a token and layer, for a hidden width h, queries q, keys kv, an MLP of f, and bf16 compute. Each was
read off the saved tensors of real models on a CPU (torch 2.13, transformers 5.23), the sum within 0.2 %; the test
is `tests/test_activations.py`, the table `docs/plan.md`.

- RMSNorm: its input in fp32 (4h), the normalised row in bf16 for the weight's gradient (2h), one number (4).
- what linear layers read: 2h once for query, key and value, 2h once for gate and up.
- attention (SDPA): query, key, value, output, and a number a head.
- gated MLP: gate, its activation, up, and their product: 8f.

Under autocast (DDP, one process) the residual stream is fp32, so norms keep 8h, every linear layer keeps a bf16 copy of
its own of what it reads, and a bf16 copy of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from toolkit.models.kept import KeptByModel
from toolkit.models.lora import EXPERTS_ADAPTED, is_linear
from toolkit.models.shape import EXPERTS, Layer, ModelShape, Tensor

# Norms that multiply by their weight in fp32 and so keep the fp32 row.
FP32_NORMS = ("gemma", "gemma2", "gemma3_text", "olmo2")
NORMS_WITHOUT_WEIGHTS = {"olmo": 2}  # a layer's norms that are no tensors
SHARED_NORM_INPUT = ("gpt_neox",)  # both norms of a layer read the same residual stream
SOFTCAPPED = ("gemma2",)
DROPOUT_MASKS = 2  # of one byte, where a configuration has dropout: after attention and after the MLP
# Half-rotated queries are put together anew, head by head; attention's output then lies so too, and the next linear
# layer keeps a copy of it.
REORDERED_HEADS = ("gpt_neox", "phi", "phi3", "stablelm")
FIRST_NORMS = ("input_layernorm.weight", "ln_1.weight", "self_attn_layer_norm.weight")
LEARNT_POSITIONS = ("gpt2", "opt")
ONE_INPUT = ("phi",)  # attention and MLP read the same norm
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value")
MLP_OUTPUTS = ("down_proj", "fc2", "dense_4h_to_h")
FUSED_ATTENTION_INPUTS = ("qkv_proj", "c_attn", "query_key_value")
MLP_INPUTS = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h")
# Bytes a width: what the activation reads and what the next layer reads. GPT-2's and Phi's formula is five operations
# in Python; ReLU keeps only its result.
PLAIN_MLP_BYTES = {"gelu_new": 10, "gelu_fast": 10, "relu": 2}
PLAIN_MLP_BYTES_ELSE = 4
GATED_MLP_BYTES = 8
USUAL_READERS = 5  # query, key, value, gate and up, where the names are others
QK_NORM = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The activations of one model under one kind of compute."""

    shape: ModelShape
    autocast: bool = False
    """fp32 weights under autocast, against weights that are bf16 when they are used (DeepSpeed, FSDP2)."""
    lora_r: int | None = None
    quantized: bool = False
    """4-bit weights are unpacked where they are used, and not kept."""

    def layer_bytes_per_token(self, *, seq_length: int, padded: bool = False) -> int:
        """Of the layer that keeps most."""
        counted = self._counted(seq_length, padded)
        if counted is not None:
            return counted.largest.token_bytes(seq_length)
        masked = padded or self._slides(seq_length)
        return max(self._layer(kind, seq_length, masked) for kind in self.shape.layer_kinds)

    def all_layers_bytes_per_token(self, *, seq_length: int, padded: bool = False) -> int:
        """Of all layers together."""
        counted = self._counted(seq_length, padded)
        if counted is not None:
            return counted.layers.token_bytes(seq_length)
        kept = self._all_layers(seq_length, padded)
        if padded or not self._slides(seq_length):
            return kept
        masked = self._all_layers(seq_length, True)
        return kept + (masked - kept) * self.shape.num_sliding_layers // self.shape.num_layers

    def _all_layers(self, seq_length: int, masked: bool) -> int:
        kinds = self.shape.layer_kinds.items()
        return sum(self._layer(kind, seq_length, masked) * count for kind, count in kinds) + self._first_layer()

    def _first_layer(self) -> int:
        """Beside what others keep: cosines and sines, made once; less its first norm, if nothing is trained before."""
        rotary = 0 if self.shape.model_type in LEARNT_POSITIONS else 2 * self.stream_bytes * self.shape.head_dim
        first = next((tensor.name for tensor in self.shape.layers[0] if tensor.name in FIRST_NORMS), None)
        if first is None or self.lora_r is None:
            return rotary
        hidden = self.shape.hidden_size
        biased = any(tensor.name == first.replace("weight", "bias") for tensor in self.shape.layers[0])
        return rotary - (self.stream_bytes * (hidden + 2) if biased else self._norm_bytes(hidden) + 4)

    def mask_bytes(self, *, rows: int, seq_length: int, padded: bool) -> int:
        """Of the masks that all layers read: for full attention, for a window; without padding one for all rows."""
        slides, eager = self._slides(seq_length), self.shape.attention == "eager"
        number = int(padded or eager or slides)
        if (padded or eager) and 0 < self.shape.num_sliding_layers < self.shape.num_layers:
            number = 2
        each = self.stream_bytes if eager else 1
        return number * each * seq_length**2 * (rows if padded else 1)

    def _slides(self, seq_length: int) -> bool:
        """Whether rows are as long as a window, which needs a mask as padding does."""
        return self.shape.sliding_window is not None and seq_length >= self.shape.sliding_window

    def _counted(self, seq_length: int, padded: bool) -> KeptByModel | None:
        """What was read off this model's saved tensors, if it was."""
        if self.shape.kept is None:
            return None
        mask = "padding" if padded else "window" if self._slides(seq_length) else "none"
        return self.shape.kept.of(autocast=self.autocast, lora_r=self.lora_r, mask=mask)

    @property
    def checkpoint_bytes_per_token(self) -> int:
        """Kept of a layer that is computed again: its input."""
        return self.stream_bytes * self.shape.hidden_size

    @property
    def stream_bytes(self) -> int:
        """Of an element of the residual stream."""
        return 4 if self.autocast else 2

    def backward_bytes_per_token(self, *, seq_length: int, padded: bool = False) -> int:
        """What the layer that keeps most needs beside while it goes backward: gradients of both halves of the MLP, and
        of the residual stream."""
        counted = self._counted(seq_length, padded)
        if counted is not None:
            return max(0, counted.working.token_bytes(seq_length))
        experts = self.shape.experts_per_token or 1
        return 4 * self.shape.intermediate_size * experts + 2 * self.stream_bytes * self.shape.hidden_size

    @property
    def outer_bytes_per_token(self) -> int:
        """After the layers: the final norm and what the head reads, which a frozen head does not keep."""
        counted = self._counted(1, False)
        if counted is not None:
            return counted.outer.per_token
        hidden = self.shape.hidden_size
        biased = any("norm" in tensor.name or "ln_" in tensor.name for tensor in self.shape.outer if _is_bias(tensor))
        norm = self.stream_bytes * (hidden + 2) if biased else self._norm_bytes(hidden) + 4
        trained = 2 * hidden + (hidden if self.shape.dropout else 0)  # a mask of the embeddings' dropout
        return norm + (trained if self.lora_r is None else 0)

    @cached_property
    def fixed_bytes(self) -> int:
        """Kept by all layers whatever the batch: bf16 copies of linear weights under autocast, and experts that
        adapters were added to."""
        counted = self._counted(1, False)
        if counted is not None and not self.quantized:
            return counted.layers.fixed
        return sum(self._fixed(kind) * count for kind, count in self.shape.layer_kinds.items())

    @cached_property
    def layer_fixed_bytes(self) -> int:
        """The same of the layer that keeps most."""
        counted = self._counted(1, False)
        if counted is not None and not self.quantized:
            return counted.largest.fixed
        return max(map(self._fixed, self.shape.layer_kinds))

    @property
    def head_copy_bytes(self) -> int:
        """The head's bf16 copy, kept from the forward's end until the backward has begun."""
        return 2 * self.shape.vocab_size * self.shape.hidden_size if self.autocast else 0

    @property
    def logit_bytes(self) -> int:
        """Kept of each logit on its way to the loss: what a soft cap gives."""
        if self.shape.kept is not None:
            return self.shape.kept.logit_bytes
        return 2 if self.shape.model_type in SOFTCAPPED else 0

    @property
    def caches_copies(self) -> bool:
        """autocast keeps its copies of what is trained until the forward ends, whether the backward needs them or not;
        those of frozen weights are made anew (`aten/src/ATen/autocast_mode.cpp`, `cached_cast`)."""
        return self.autocast and self.lora_r is None

    def _fixed(self, kind: Layer) -> int:
        linear = sum(tensor.num_elements for tensor in kind if is_linear(tensor))
        copies = 2 * linear if self.autocast and not self.quantized else 0
        if self.lora_r is None or self.shape.model_type not in EXPERTS_ADAPTED:
            return copies
        # peft adds an adapter's product to the fused experts' weights, and the products with them keep the sum.
        experts = sum(tensor.num_elements for tensor in kind if EXPERTS.search(tensor.name))
        return copies + (4 if self.autocast else 2) * experts

    @property
    def _keeps_normalised(self) -> bool:
        """A frozen norm has no gradient of its weight to keep the row for."""
        return self.lora_r is None

    def _layer(self, kind: Layer, seq_length: int, padded: bool) -> int:
        parts = (self._norms(kind), self._linear_inputs(kind), self._attention(kind, seq_length, padded))
        return sum(parts) + self._mlp(kind) + self._adapters(kind)

    def _norm_bytes(self, width: int) -> int:
        """An RMSNorm's, without its one number a row."""
        kept = 4 if self.autocast or self.shape.model_type in FP32_NORMS else 2
        return (4 + (kept if self._keeps_normalised else 0)) * width

    def _norms(self, kind: Layer) -> int:
        """Norms of the hidden width, and those of query and key."""
        hidden = self.shape.hidden_size
        weights = [tensor for tensor in kind if _is_norm(tensor) and tensor.name.endswith(".weight")]
        biased = {tensor.name.removesuffix(".bias") for tensor in kind if tensor.name.endswith(".bias")}
        total = 0
        for number, tensor in enumerate(weights):
            name = tensor.name.removesuffix(".weight")
            if any(part in name for part in QK_NORM):
                total += self._qk_norm(name, tensor)
            elif name in biased:
                shared = number > 0 and self.shape.model_type in SHARED_NORM_INPUT
                total += (0 if shared else self.stream_bytes * hidden) + 2 * self.stream_bytes
            else:
                total += self._norm_bytes(hidden) + 4
        without = NORMS_WITHOUT_WEIGHTS.get(self.shape.model_type, 0)
        masks = DROPOUT_MASKS * hidden if self.shape.dropout else 0
        return total + without * (4 * hidden + 8) + masks

    def _qk_norm(self, name: str, tensor: Tensor) -> int:
        """Of all heads, in fp32; the number a row is one a head, or one where all heads are normed together."""
        heads = self.shape.num_attention_heads if "q_" in name else self.shape.num_kv_heads
        width = heads * self.shape.head_dim
        together = tensor.num_elements == width and heads > 1
        kept = 4 if self.shape.model_type in FP32_NORMS else 2
        return (4 + (kept if self._keeps_normalised else 0)) * width + 4 * (1 if together else heads)

    def _linear_inputs(self, kind: Layer) -> int:
        """Shared by all that read it, or under autocast a bf16 copy for each."""
        readers = _count(kind, ATTENTION_INPUTS) + _count(kind, MLP_INPUTS) + _has_experts(kind)
        shared = 1 if self.shape.model_type in ONE_INPUT else 2
        return 2 * self.shape.hidden_size * ((readers or USUAL_READERS) if self.autocast else shared)

    def _attention(self, kind: Layer, seq_length: int, padded: bool) -> int:
        heads, head_dim = self.shape.num_attention_heads, self.shape.head_dim
        queries, keys = heads * head_dim, self.shape.num_kv_heads * head_dim
        if self.shape.attention == "eager":
            scores = 8 if self.shape.model_type in SOFTCAPPED else 6
            return 8 * queries + scores * heads * seq_length
        repeated = padded and keys < queries
        kept = 4 * queries + 4 * (queries if repeated else keys) + 4 * heads
        if self.shape.model_type in REORDERED_HEADS:
            kept += 2 * queries
        if _count(kind, FUSED_ATTENTION_INPUTS) and not repeated:
            kept += 2 * queries + 2 * keys if not _is_gpt2(kind) else 0  # value is a view of the three together
        return kept + (2 * seq_length if padded else 0)

    def _mlp(self, kind: Layer) -> int:
        per_width = GATED_MLP_BYTES
        if not self.shape.gated_mlp:
            per_width = PLAIN_MLP_BYTES.get(self.shape.activation, PLAIN_MLP_BYTES_ELSE)
        total = 0
        if _has_experts(kind):
            total += self._experts()
        widths = [tensor for tensor in kind if _is_mlp_output(tensor)]
        dense = sum(_input_width(tensor) for tensor in widths) or (0 if total else self.shape.intermediate_size)
        return total + per_width * dense

    def _experts(self) -> int:
        """A token's rows in each expert that it goes to. Fused experts are no linear layers: autocast leaves them in
        fp32."""
        routed = self.shape.experts_per_token or 1
        rows = routed * (4 * self.shape.hidden_size + GATED_MLP_BYTES * self.shape.intermediate_size)
        router = 4 * (self.shape.num_experts or 0) + 40 * routed
        return rows * (2 if self.autocast else 1) + router

    def _adapters(self, kind: Layer) -> int:
        if self.lora_r is None:
            return 0
        adapted = sum(1 for tensor in kind if is_linear(tensor))
        copies = self.autocast and self.shape.attention != "eager"  # whose output lies as the next layer reads it
        output_copy = 2 * self.shape.num_attention_heads * self.shape.head_dim if copies else 0
        return 2 * self.lora_r * adapted + output_copy


def _count(kind: Layer, names: tuple[str, ...]) -> int:
    """Linear layers of these names."""
    return sum(1 for tensor in kind if is_linear(tensor) and tensor.name.split(".")[-2] in names)


def _has_experts(kind: Layer) -> bool:
    return any(EXPERTS.search(tensor.name) for tensor in kind)


def _is_gpt2(kind: Layer) -> bool:
    """Query, key and value are all views there: no rotary embedding makes new ones."""
    return _count(kind, ("c_attn",)) > 0


def _is_norm(tensor: Tensor) -> bool:
    return len(tensor.shape) == 1 and not tensor.decays and ("norm" in tensor.name or "ln_" in tensor.name)


def _is_bias(tensor: Tensor) -> bool:
    return tensor.name.endswith(".bias")


def _is_mlp_output(tensor: Tensor) -> bool:
    named = tensor.name.split(".")
    return is_linear(tensor) and (named[-2] in MLP_OUTPUTS or tensor.name == "mlp.c_proj.weight")


def _input_width(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.name == "mlp.c_proj.weight" else tensor.shape[1]
