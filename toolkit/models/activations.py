"""Activation sizes of a model: bytes that the forward pass saves for the backward pass.

There is one model of activations, `SavedActivations`, with two sources:

- **Counting**: `toolkit.models.count_from_transformers` runs the model on fake tensors and sums up what autograd
  saves. It works for almost any architecture, but needs torch, transformers and peft: 10 to 30 s in a child process,
  then cached.
- **Formulas**, in this module, for the architectures of `toolkit.models.decoders`: 0.1 s without torch, so that
  `toolkit plan` and `toolkit recommend` answer at once and `toolkit train` can plan every run before it starts.

The formulas are a fast path and not a second opinion: `tests/models/test_activations.py` counts every architecture that
has formulas, with each option that changes the result, and fails where the bytes per token of the layers differ by more
than 0.25 %.

Terms in bytes per token and layer, for hidden width h, query width q, key width kv, MLP width f, and bf16 compute, as
read off the saved tensors of transformers 5.23 under torch 2.13:

- RMSNorm: its input in fp32 (4h), the normalised row in bf16 for the weight's gradient (2h), one fp32 statistic (4).
- Inputs of linear layers: 2h shared by query, key and value, 2h shared by gate and up.
- Attention (SDPA): query, key, value, output, and one fp32 statistic per head.
- Gated MLP: gate, its activation, up, and their product: 8f.

Under autocast (DDP and one process) a full fine-tune's residual stream is fp32, so norms save 8h, and every linear
layer saves its own bf16 copy of its input and of its weight. With adapters, the frozen model is bf16 and only the
adapters' own weights are copied.
"""

from dataclasses import dataclass, replace

from toolkit.models.lora import adapts_experts, dora_bytes, lora_layer, oft_fixed_bytes, rotations
from toolkit.models.shape import MATH, Layer, ModelShape, SavedActivations, SavedBytes, Tensor
from toolkit.parallel.layout import ParallelLayout

# Norms that multiply by their weight in fp32 and therefore save the normalised row in fp32.
FP32_NORMS = ("gemma", "gemma2", "gemma3_text", "olmo2")
NORMS_WITHOUT_WEIGHTS = {"olmo": 2}  # norms per layer that have no parameters
SHARED_NORM_INPUT = ("gpt_neox",)  # both norms of a layer read the same residual stream
SOFTCAPPED = ("gemma2",)
TOKEN_BYTES = 8  # int64 indices, which an embedding saves for the gradient of its weight
DROPOUT_MASKS = 2  # of one byte, if the configuration has dropout: after attention and after the MLP
# Rotary embeddings on a part of each head rebuild the queries head by head; attention's output then has that layout,
# and the next linear layer saves a contiguous copy.
PARTIAL_ROTARY = ("gpt_neox", "phi", "phi3", "stablelm")
FIRST_NORMS = ("input_layernorm.weight", "ln_1.weight", "self_attn_layer_norm.weight")
LEARNED_POSITIONS = ("gpt2", "opt")
TWO_ROTARY_EMBEDDINGS = ("gemma3_text",)  # one for sliding layers, one for the others
FP32_ROTARY_EMBEDDINGS = ("olmo", "olmo2")
NO_EMBEDDING_DROPOUT = ("opt",)
PARALLEL_ATTENTION_AND_MLP = ("phi",)  # both read the output of one norm
FUSED_ATTENTION_INPUTS = ("qkv_proj", "c_attn", "query_key_value")
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", *FUSED_ATTENTION_INPUTS)
MLP_INPUTS = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h")
MLP_OUTPUTS = ("down_proj", "fc2", "dense_4h_to_h")
# Bytes per element of the MLP's width: the activation's input and output. GPT-2's and Phi's activation function is five
# Python operations; ReLU saves only its output.
PLAIN_MLP_BYTES = {"gelu_new": 10, "gelu_fast": 10, "relu": 2}
DEFAULT_PLAIN_MLP_BYTES = 4
GATED_MLP_BYTES = 8
DEFAULT_INPUT_READERS = 5  # query, key, value, gate and up, where the names are unknown
SHARED_EXPERT_GATE = "mlp.shared_expert_gate.weight"  # Qwen2-MoE scales the shared expert's output, which is saved
# Liger's RMSNorm saves its input as it is, and its gated MLPs save gate, up and their product (Liger-Kernel 0.8.5,
# `ops/rms_norm.py`, `ops/swiglu.py`, `ops/geglu.py`). A Llama on an H200 held 8.72 GB less, as these terms say.
LIGER_MODELS = ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3")
LIGER_MLP_BYTES = 6
QK_NORM = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activation sizes of one model under one compute dtype and training method."""

    shape: ModelShape
    autocast: bool = False  # trained weights in fp32 under autocast (DDP, one process), and not in bf16 when used
    lora_r: int | None = None
    fp32_residual: bool = False
    fp32_linears: bool = False  # bitsandbytes' 8 bits: inputs and outputs have the dtype of the residual stream
    """True where embeddings and norms are frozen in fp32 (`prepare_model_for_kbit_training`), and with them the
    residual stream."""
    lora_dropout: bool = False
    dora_targets: tuple[str, ...] = ()  # the modules that DoRA adapts; none with LoRA
    oft_targets: tuple[str, ...] = ()  # the modules that OFT rotates the inputs of, in blocks of `oft_block_size`
    oft_block_size: int = 0
    liger: bool = False  # true for Liger's norms and MLPs, in the architectures with formulas that it has them for
    layout: ParallelLayout | None = None  # how ranks divide layers (done in `shape`), experts and sequences

    @property
    def casts_weights(self) -> bool:
        """True if autocast casts the model's own weights, and caches the bf16 copies until the forward ends.

        It does so for trained weights only (torch, `aten/src/ATen/autocast_mode.cpp`, `cached_cast`): frozen ones are
        held in bf16, and only adapters are cast.
        """
        return self.autocast and self.lora_r is None

    @property
    def _has_liger_kernels(self) -> bool:
        return self.liger and self.shape.model_type in LIGER_MODELS

    def saved(self, mask: str) -> SavedActivations:
        """Return what is saved with this attention mask, one of `toolkit.models.shape.MASKS`.

        To that of the model, exchanges of heads (Ulysses) add attention's output in the layout of the heads, beside the
        same in that of the tokens, which the next linear layer saves, and repeated keys and values; a ring, whose sums
        are in the layout of the heads, the same output; exchanges of tokens (expert parallelism) the experts' outputs
        before they are weighted, on their token's rank.
        """
        counted, layout, shape = self.shape.counted_activations, self.layout, self.shape
        if counted is None:
            saved = self._from_formulas(mask)
        else:
            saved = counted.at(autocast=self.autocast, lora_r=self.lora_r, mask=mask)
        more = self._dropout if self.lora_dropout and self.lora_r is not None else 0
        if self.dora_targets:
            saved = self._with_magnitudes(saved)
        if self.oft_targets:
            saved = self._with_rotations(saved)
        if not more and (layout is None or layout.cp == layout.sp == layout.ep == 1):
            return saved
        layout = layout or ParallelLayout()
        if layout.sp > 1:
            repeated = max(0, layout.sp // shape.num_kv_heads - 1) * shape.num_kv_heads
            more += (2 * shape.num_attention_heads + 4 * repeated) * shape.head_dim
        if layout.cp > 1 and shape.model_type not in PARTIAL_ROTARY:  # which have the copy anyway
            more += 2 * shape.num_attention_heads * shape.head_dim
        if layout.ep > 1:
            more += 2 * shape.hidden_size * (shape.experts_per_token or 1) // layout.tp
        one = SavedBytes(per_token=more)
        layers, largest = saved.layers.plus(one, shape.num_layers), saved.largest_layer.plus(one)
        return replace(saved, layers=layers, largest_layer=largest)

    def _with_magnitudes(self, saved: SavedActivations) -> SavedActivations:
        """What DoRA adds; its norms are computed while the layer is recomputed or run, at the peak of the backward."""
        of_kind = {
            kind: dora_bytes(lora_layer(self.shape, kind, 1, self.dora_targets)) for kind in self.shape.layer_kinds
        }
        total = sum(of_kind[kind][0] * count for kind, count in self.shape.layer_kinds.items())
        most, norms = (max(each) for each in zip(*of_kind.values(), strict=True))
        return replace(
            saved,
            layers=saved.layers.plus(SavedBytes(per_token=total)),
            largest_layer=saved.largest_layer.plus(SavedBytes(per_token=most)),
            backward=saved.backward.plus(SavedBytes(fixed=norms * (2 if self.autocast else 1))),
        )

    def _with_rotations(self, saved: SavedActivations) -> SavedActivations:
        """What OFT saves in the place of adapters of rank 1: no output of an A, no copies of A and B, its rotations."""
        added = {}
        for kind in self.shape.layer_kinds:
            pairs = lora_layer(self.shape, kind, 1, self.oft_targets)
            copies = 2 * sum(tensor.num_elements for tensor in pairs) if self.autocast else 0
            fixed = oft_fixed_bytes(rotations(pairs, self.oft_block_size), 14 if self.autocast else 8)
            added[kind] = SavedBytes(fixed=fixed - copies, per_token=-len(pairs))
        layers = saved.layers
        for kind, count in self.shape.layer_kinds.items():
            layers = layers.plus(added[kind], count)
        most = max(added.values(), key=lambda each: each.fixed)
        return replace(saved, layers=layers, largest_layer=saved.largest_layer.plus(most))

    @property
    def _dropout(self) -> int:
        """Per token and layer, with dropout on adapters: each adapter's own input, and a mask of one byte."""
        kinds = self.shape.layer_kinds
        rows = sum(
            3 * tensor.shape[1] * count
            for kind, count in kinds.items()
            for tensor in lora_layer(self.shape, kind, 1)
            if ".lora_A." in tensor.name and not tensor.is_expert
        )
        return rows // max(1, self.shape.num_layers)

    @property
    def exchanged_bytes_per_token(self) -> tuple[int, int]:
        """Bytes per token of this rank that attention and MLP send and receive at a time, beside what they save.

        - Ring attention gathers the keys and values of the whole sequence (accelerate's default, `allgather`), and
          sends its own. Its backward adds up gradients in fp32: of the query (in two halves that are concatenated)
          beside a block's own, of key and value beside a block's own and those that are sent and received (torch,
          `_context_parallel/_attention.py`). A block's kernel has an fp32 query gradient, and gradients of key and
          value per query head (`flash_api.cpp`, `mha_bwd`).
        - Ulysses sends and receives one of query, key, value and output at a time.
        - Expert parallelism sends and receives the rows of the experts.
        """
        layout, shape = self.layout, self.shape
        if layout is None:
            return 0, 0
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        per_head = 4 if keys < queries else 0
        ring = 4 * keys * layout.cp + 32 * keys + (14 + per_head) * queries if layout.cp > 1 else 0
        heads = 4 * queries if layout.sp > 1 else 0
        experts = 4 * shape.hidden_size * (shape.experts_per_token or 1) // layout.tp if layout.ep > 1 else 0
        return ring + heads, experts

    @property
    def mlp_bytes_per_token(self) -> int:
        """Bytes per token that a layer's MLP and its norm save: they do not exist while the layer's attention runs."""
        shape = self.shape
        per_width = (LIGER_MLP_BYTES if self._has_liger_kernels else GATED_MLP_BYTES) if shape.gated_mlp else 2
        return per_width * shape.intermediate_size * (shape.experts_per_token or 1) + 6 * shape.hidden_size

    def mask_at(self, seq_length: int, *, padded: bool, varlen: bool = False) -> str:
        """Return the kind of attention mask that rows of this length need.

        `varlen` functions take the lengths of documents and a window in place of a mask.
        """
        if varlen or padded:
            return ("flash" if self.shape.attention == "eager" else "none") if varlen else "padding"
        window = self.shape.sliding_window
        return "window" if window is not None and seq_length >= window else "none"

    def mask_bytes(self, *, rows: int, seq_length: int, padded: bool, varlen: bool = False) -> int:
        """Return the bytes of the masks that all layers share: one for full attention, one for a sliding window.

        Without padding, all rows of a batch share one mask.
        """
        if varlen:
            return 0
        eager = self.shape.attention == "eager"
        number = int(eager or self.mask_at(seq_length, padded=padded) != "none")
        if (padded or eager) and 0 < self.shape.num_sliding_layers < self.shape.num_layers:
            number = 2
        return number * (self.residual_bytes if eager else 1) * seq_length**2 * (rows if padded else 1)

    @property
    def attention_output_bytes(self) -> int:
        """Bytes per token and layer of what attention's kernel returns: its output, and a statistic per head in fp32.

        Selective checkpointing keeps these. Flash attention saves no more (https://arxiv.org/abs/2205.14135, 3.1).
        """
        heads = self.shape.num_attention_heads
        return 2 * heads * self.shape.head_dim + 4 * heads

    @property
    def residual_bytes(self) -> int:
        """Bytes per element of the residual stream."""
        return 4 if self.casts_weights or self.fp32_residual else 2

    @property
    def head_copy_bytes(self) -> int:
        """Bytes of the head's bf16 copy, alive from the end of the forward until the backward has begun."""
        tp, casts = 1 if self.layout is None else self.layout.tp, self.casts_weights or self.fp32_residual
        return 2 * self.shape.vocab_size * self.shape.hidden_size // tp if casts else 0

    def _from_formulas(self, mask: str) -> SavedActivations:
        kinds = self.shape.layer_kinds
        by_kind = {kind: self._layer(kind, masked=mask != "none") for kind in kinds}
        layers = self._sum(by_kind)
        if mask == "window":  # only sliding layers have a mask
            plain = self._sum({kind: self._layer(kind, masked=False) for kind in kinds})
            layers = plain.plus(layers.plus(plain, -1), self.shape.num_sliding_layers / self.shape.num_layers)
        largest = max(by_kind.values(), key=lambda saved: saved.per_token)
        return SavedActivations(
            layers=layers,
            largest_layer=replace(largest, fixed=max(saved.fixed for saved in by_kind.values())),
            backward=self._backward(),
            outer=SavedBytes(per_token=self._outer()),
            logit_bytes=2 if self.shape.model_type in SOFTCAPPED else 0,
        )

    def _backward(self) -> SavedBytes:
        """Gradients of both halves of the MLP and of the residual stream; of the scores if attention is eager.

        Of experts, also those of three copies of the rows, which are more where experts are narrow (counted for
        Qwen3-MoE on rows of 65,536 tokens; TRL's run of a million tokens was planned 17 % low without them).
        Attention's backward is the peak of a layer that saves scores: the activations of its MLP are freed by then.
        """
        width, routed = self.shape.intermediate_size, self.shape.experts_per_token or 1
        if self.shape.attention != "sdpa":
            scores = (8 if self.shape.attention == MATH else 6) * self.shape.num_attention_heads
            return SavedBytes(per_token=-GATED_MLP_BYTES * width, per_position=scores)
        rows = 6 * self.shape.hidden_size if self.shape.experts_per_token else 0
        of_mlp = max((8 if self.fp32_linears else 4) * width, rows) * routed
        return SavedBytes(per_token=of_mlp + 2 * self.residual_bytes * self.shape.hidden_size)

    def _sum(self, by_kind: dict[Layer, SavedBytes]) -> SavedBytes:
        total = self._first_layer()
        for kind, count in self.shape.layer_kinds.items():
            total = total.plus(by_kind[kind], count)
        return total

    def _first_layer(self) -> SavedBytes:
        """What the first layer saves in addition: cosines and sines; less its first norm, if no input needs a gradient.

        With adapters the embedding is frozen, so nothing below the first adapter has a backward, and under autocast the
        A matrices that read the input of the first layer are not copied.
        """
        shape, rank = self.shape, self.lora_r
        rotary_bytes = 4 if shape.model_type in FP32_ROTARY_EMBEDDINGS else self.residual_bytes
        rotary = 0 if shape.model_type in LEARNED_POSITIONS else 2 * rotary_bytes * shape.head_dim
        if shape.model_type in TWO_ROTARY_EMBEDDINGS and 0 < shape.num_sliding_layers < shape.num_layers:
            rotary *= 2
        if rank is None:
            return SavedBytes(per_token=rotary)
        names, norm = {tensor.name for tensor in shape.layers[0]}, 0
        if shape.model_type in NORMS_WITHOUT_WEIGHTS:
            norm = self._norm_without_weight
        for first in names.intersection(FIRST_NORMS):
            norm = self._norm(has_bias=first.replace("weight", "bias") in names)
        shares_input = shape.model_type in (*PARALLEL_ATTENTION_AND_MLP, *SHARED_NORM_INPUT)
        readers = _count(shape.layers[0], (*ATTENTION_INPUTS, *MLP_INPUTS) if shares_input else ATTENTION_INPUTS)
        not_copied = 2 * readers * rank * shape.hidden_size if self.autocast else 0
        return SavedBytes(fixed=-not_copied, per_token=rotary - norm)

    def _outer(self) -> int:
        """The final norm, and if the head is trained its input and the tokens that were looked up."""
        hidden = self.shape.hidden_size
        norms = [tensor for tensor in self.shape.outer if "norm" in tensor.name or "ln_" in tensor.name]
        has_bias = any(tensor.name.endswith(".bias") for tensor in norms)
        norm = self._norm(has_bias=has_bias) if norms else self._norm_without_weight
        if self.lora_r is not None:
            return norm
        masked = self.shape.dropout and self.shape.model_type not in NO_EMBEDDING_DROPOUT
        return norm + 2 * hidden + TOKEN_BYTES + (hidden if masked else 0)  # a dropout mask of one byte per element

    def _fixed(self, kind: Layer) -> int:
        """bf16 copies of trained weights under autocast, and experts merged with their adapters."""
        if self.lora_r is None:
            return 2 * sum(tensor.num_elements for tensor in kind if tensor.is_linear_weight) if self.autocast else 0
        adapters = lora_layer(self.shape, kind, self.lora_r)
        copies = 2 * sum(tensor.num_elements for tensor in adapters) if self.autocast else 0
        if not adapts_experts(self.shape):
            return copies
        # peft adds the product of an adapter to the fused weights of the experts, and matmuls with the sum save it.
        return copies + 2 * sum(tensor.num_elements for tensor in kind if tensor.is_expert)

    def _layer(self, kind: Layer, *, masked: bool) -> SavedBytes:
        attention = self._attention(kind, masked=masked)
        width = 2 if self.fp32_linears else 1
        per_token = attention.per_token + self._norms(kind) + width * (self._linear_inputs(kind) + self._mlp(kind))
        if self.lora_r is not None:  # the output of each A
            frozen = _count(kind, (*MLP_INPUTS, *MLP_OUTPUTS)) if self._has_frozen_mlp(kind) else 0
            per_token += 2 * self.lora_r * (sum(tensor.is_linear_weight for tensor in kind) - frozen)
        return replace(attention, fixed=self._fixed(kind), per_token=per_token)

    def _norm(self, *, has_bias: bool) -> int:
        """A LayerNorm, which has a bias, or an RMSNorm of the hidden width."""
        hidden = self.shape.hidden_size
        if has_bias:
            return self.residual_bytes * (hidden + 2)
        return self._rms_norm(hidden, fp32=self.casts_weights) + 4

    @property
    def _norm_without_weight(self) -> int:
        """OLMo's LayerNorm, computed in fp32: its input and two statistics."""
        return 4 * self.shape.hidden_size + 8

    def _rms_norm(self, width: int, *, fp32: bool) -> int:
        """An RMSNorm without its statistic; a frozen norm needs no normalised row for its weight's gradient."""
        if self._has_liger_kernels:
            return (4 if fp32 else 2) * width
        normalised = 4 if fp32 or self.shape.model_type in FP32_NORMS else 2
        return (4 + (normalised if self.lora_r is None else 0)) * width

    def _norms(self, kind: Layer) -> int:
        shape, hidden = self.shape, self.shape.hidden_size
        weights = (tensor for tensor in kind if len(tensor.shape) == 1 and tensor.name.endswith(".weight"))
        norms = [tensor for tensor in weights if not tensor.has_weight_decay]
        with_bias = {tensor.name.removesuffix(".bias") for tensor in kind if tensor.name.endswith(".bias")}
        total = DROPOUT_MASKS * hidden if shape.dropout else 0
        for number, tensor in enumerate(norms):
            name = tensor.name.removesuffix(".weight")
            if any(part in name for part in QK_NORM):
                heads = shape.num_attention_heads if "q_" in name else shape.num_kv_heads
                width = heads * shape.head_dim
                together = tensor.num_elements == width and heads > 1  # all heads are normalised as one row
                total += self._rms_norm(width, fp32=False) + 4 * (1 if together else heads)
            elif name in with_bias and number > 0 and shape.model_type in SHARED_NORM_INPUT:
                total += 2 * self.residual_bytes
            else:
                total += self._norm(has_bias=name in with_bias)
        return total + NORMS_WITHOUT_WEIGHTS.get(shape.model_type, 0) * self._norm_without_weight

    def _linear_inputs(self, kind: Layer) -> int:
        """Shared by all readers, or under autocast a bf16 copy for each of them."""
        readers = _count(kind, ATTENTION_INPUTS) + _count(kind, MLP_INPUTS) + _has_experts(kind)
        shared = 1 if self.shape.model_type in PARALLEL_ATTENTION_AND_MLP else 2
        if self._has_frozen_mlp(kind):
            readers, shared = readers - _count(kind, MLP_INPUTS), 1
        return 2 * self.shape.hidden_size * ((readers or DEFAULT_INPUT_READERS) if self.casts_weights else shared)

    def _has_frozen_mlp(self, kind: Layer) -> bool:
        """True for the dense layers of mixtures in which peft adapts only experts: frozen weights need no input."""
        return self.lora_r is not None and adapts_experts(self.shape) and not _has_experts(kind)

    def _attention(self, kind: Layer, *, masked: bool) -> SavedBytes:
        shape, heads = self.shape, self.shape.num_attention_heads
        queries, keys = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        if shape.attention == "eager":
            return SavedBytes(per_token=8 * queries, per_position=(8 if shape.model_type in SOFTCAPPED else 6) * heads)
        if shape.attention == MATH:  # queries, repeated keys and values, and the softmax are saved in fp32
            return SavedBytes(per_token=14 * queries, per_position=4 * heads)
        repeated = masked and keys < queries  # SDPA with a mask repeats keys and values for each head
        saved = 4 * queries + 4 * (queries if repeated else keys) + 4 * heads
        if shape.model_type in PARTIAL_ROTARY:
            saved += 2 * queries
        is_gpt2 = _count(kind, ("c_attn",)) > 0  # query, key and value are all views: no rotary embedding copies them
        if _count(kind, FUSED_ATTENTION_INPUTS) and not repeated and not is_gpt2:
            saved += 2 * queries + 2 * keys  # value is a view of the fused projection, which stays alive
        return SavedBytes(per_token=saved, per_position=2 if masked else 0)

    def _mlp(self, kind: Layer) -> int:
        per_width = LIGER_MLP_BYTES if self._has_liger_kernels else GATED_MLP_BYTES
        if not self.shape.gated_mlp:
            per_width = PLAIN_MLP_BYTES.get(self.shape.activation, DEFAULT_PLAIN_MLP_BYTES)
        if self._has_frozen_mlp(kind):
            per_width -= 2  # the input of the last projection
        experts = self._experts(kind) if _has_experts(kind) else 0
        outputs = [tensor.shape[1] for tensor in kind if _is_linear(tensor, MLP_OUTPUTS)]
        outputs += [tensor.shape[0] for tensor in kind if tensor.name == "mlp.c_proj.weight"]  # GPT-2's is transposed
        return experts + per_width * (sum(outputs) or (0 if experts else self.shape.intermediate_size))

    def _experts(self, kind: Layer) -> int:
        """One row per expert that a token goes to. Fused experts are no linear layers: autocast leaves them in fp32."""
        routed, hidden, width = self.shape.experts_per_token or 1, self.shape.hidden_size, self.shape.intermediate_size
        row = 4 * hidden + GATED_MLP_BYTES * width
        if self.lora_r is not None and not adapts_experts(self.shape):
            row -= 2 * hidden + 2 * width  # torch's grouped matmul, for bf16 only, saves no inputs for frozen weights
        router = 4 * (self.shape.num_experts or 0) + 40 * routed
        shared = 0
        if any(tensor.name == SHARED_EXPERT_GATE for tensor in kind):
            shared = (2 if self.lora_r is not None else self.residual_bytes) * hidden
        # With experts on other ranks, the tokens of a batch are dealt to the ranks that share it.
        ranks = self.layout.tp if self.layout is not None and self.layout.ep > 1 else 1
        return routed * row * (2 if self.casts_weights else 1) // ranks + router + shared


def _is_linear(tensor: Tensor, names: tuple[str, ...]) -> bool:
    return tensor.is_linear_weight and tensor.name.split(".")[-2] in names


def _count(kind: Layer, names: tuple[str, ...]) -> int:
    return sum(_is_linear(tensor, names) for tensor in kind)


def _has_experts(kind: Layer) -> bool:
    return any(tensor.is_expert for tensor in kind)
