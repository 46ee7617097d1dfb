"""Bytes of logits and loss of one micro-batch: the toolkit's losses, other libraries' and those of TRL's methods."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toolkit.job.argument_values import LOSS_CHUNK_TOKENS
from toolkit.models.job_weights import FP32_BYTES

# Tokens and vocabulary entries of a tile in TRL 1.16 (`trl/kernels/chunked_logprob.py`, `trl/trainer/utils.py`).
TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
# Architectures whose loss is computed from the full logits whatever `--loss` is: `UnknownHead` is raised for them. All
# causal models of transformers 5.23 were tried that build from their default configuration.
WITHOUT_CHUNKED_LOSS = frozenset(
    (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "cpmant", "data2vec-text", "electra", "ernie", "git", "inkling2_text", "marian", "mbart"),
        *("megatron-bert", "modernbert-decoder", "mvp", "pegasus", "plbart", "prophetnet", "rembert", "roberta"),
        *("roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl"),
        *("xlnet", "xmod"),
    )
)
# Architectures that Liger-Kernel 0.8.2 patches (`monkey_patch.py`, `MODEL_TYPE_TO_APPLY_LIGER_FN`): with any other,
# `use_liger_kernel` changes nothing, and the loss is transformers' own.
LIGER_TYPES = frozenset(
    (
        *("deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text"),
        *("glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "internvl"),
        *("llama", "llama4", "llama4_text", "llava", "ministral", "mistral", "mixtral", "mllama"),
        *("mllama_text_model", "nemotron", "olmo2", "olmo3", "paligemma", "phi3", "pixtral", "qwen2", "qwen2_5_vl"),
        *("qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text"),
        *("qwen3_vl_text", "smollm3", "smolvlm"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSizes:
    """What decides the bytes of a loss; compute is in `element_bytes`."""

    tokens: int
    vocab_size: int
    hidden_size: int
    saved_bytes: int = 0  # per logit, before the loss
    head_bytes: int = 0  # of an element of the head's gradient; 0 if the head is frozen
    element_bytes: int = 2
    chunk_tokens: int = LOSS_CHUNK_TOKENS
    scored: int = 0  # tokens whose log-probabilities are needed
    rows: int = 1
    row_bytes: int = 2  # of an element of the hidden states
    output_bytes: int = 2  # of a logit that the model returns: fp32 under autocast

    @property
    def logits(self) -> int:
        """Elements of all logits."""
        return self.tokens * self.vocab_size

    @property
    def head(self) -> int:
        """Elements of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the head and of its input."""
        return self.head_bytes * self.head + self.row_bytes * self.tokens * self.hidden_size


def _chunked(sizes: LossSizes) -> tuple[int, int]:
    """One chunk of logits and its fp32 copy (2 + 4), the gradient of the hidden states, and, from two chunks on, the
    head's gradient in fp32; then that in its own dtype. The gradients are alive until the backward takes them."""
    chunk = min(sizes.tokens, sizes.chunk_tokens) * sizes.vocab_size
    # Beside the logits their fp32 copy, unless they are fp32; a soft cap needs one more.
    copies = (4 if sizes.element_bytes < 4 else 0) + (4 if sizes.saved_bytes else 0)
    of_input = sizes.element_bytes * sizes.tokens * sizes.hidden_size
    gradients = of_input + sizes.head_bytes * sizes.head
    sums = FP32_BYTES * sizes.head if sizes.head_bytes and sizes.tokens > sizes.chunk_tokens else 0
    computing = (sizes.element_bytes + copies) * chunk + of_input + sums
    return max(computing, gradients + (sums if sizes.head_bytes < FP32_BYTES else 0)), gradients


def _fused(sizes: LossSizes) -> tuple[int, int]:
    """One chunk of bf16 logits and the gradients of the head and of its input; where the head is fp32, its bf16 copy
    too (Liger-Kernel 0.8.5, `fused_linear_cross_entropy`)."""
    chunks = math.ceil(sizes.vocab_size / max(sizes.hidden_size, 1))
    chunk = min(sizes.tokens, 1 << (math.ceil(sizes.tokens / chunks) - 1).bit_length())
    copy = sizes.element_bytes * sizes.head if sizes.head_bytes > sizes.element_bytes else 0
    return sizes.element_bytes * chunk * sizes.vocab_size + copy + sizes.gradients, sizes.gradients


def _log_probs(sizes: LossSizes) -> tuple[int, int]:
    """A tile of logits, the rows of the hidden states of the scored tokens, and all rows that they are taken from; in
    the backward the fp32 gradients of these rows and of the head, each then converted (TRL)."""
    width, element, row, head = sizes.hidden_size, sizes.element_bytes, sizes.row_bytes, sizes.head_bytes
    tile_tokens = min(sizes.scored, TILE_TOKENS)
    tile = element * tile_tokens * TILE_VOCABULARY
    if row > element:  # under autocast, casts of the rows of a tile
        tile += element * tile_tokens * width
    rows = row * sizes.scored * width
    gradients = FP32_BYTES * (sizes.scored * width + (sizes.head if head else 0))
    if head > element:  # casts of the head's columns; the last ones live until the next are cast
        tile += element * min(TILE_VOCABULARY, sizes.vocab_size) * width
        gradients += element * min(TILE_VOCABULARY, max(0, sizes.vocab_size - TILE_VOCABULARY)) * width
    converted = (rows if row < FP32_BYTES else 0) + (head * sizes.head if head < FP32_BYTES else 0)
    return rows + tile + row * sizes.tokens * width, rows + tile + gradients + converted


# Bytes at the end of the forward and at the start of the backward.
LOSSES: Mapping[str, Callable[[LossSizes], tuple[int, int]]] = {
    "chunked": _chunked,  # the default of `toolkit train` (docs/concepts/plan.md)
    # bf16 logits, their fp32 copy and the fp32 log-probabilities (2 + 4 + 4); in the backward the log-probabilities and
    # the gradients of loss and logits (4 + 4 + 4): transformers' `ForCausalLMLoss`, torch's `cross_entropy`.
    "full": lambda sizes: ((10 + sizes.saved_bytes) * sizes.logits, (12 + sizes.saved_bytes) * sizes.logits),
    # Up to transformers 4.45 also a copy of the fp32 logits without the last row of each sequence. A loop that keeps
    # the outputs has these in the backward too; the Trainer drops them, but its jobs are no closer with 12 bytes.
    "upcast": lambda sizes: ((14 + sizes.saved_bytes) * sizes.logits, (16 + sizes.saved_bytes) * sizes.logits),
    # A loop whose loss stays in bf16: logits, the copy, log-probabilities; in the backward also two gradients.
    "bf16": lambda sizes: ((6 + sizes.saved_bytes) * sizes.logits, (8 + sizes.saved_bytes) * sizes.logits),
    "fused": _fused,
    # Cut cross entropy, and Unsloth's: no logits, a number per token.
    "cut": lambda sizes: (FP32_BYTES * sizes.tokens, sizes.gradients),
    # torchtune's: bf16 logits and their gradient, and an eighth of the rest.
    "chunked_output": lambda sizes: (2 * sizes.logits + sizes.logits, 4 * sizes.logits + sizes.logits),
    # TRL's. `log_probs` makes no logits; the others are in multiples of what the model returns.
    "log_probs": _log_probs,
    # Log-probabilities save the logits as they are, and their gradient is one more; under autocast the bf16 logits are
    # alive while they are converted.
    "simpo": lambda sizes: (
        (2 * sizes.output_bytes - sizes.element_bytes) * sizes.logits,
        2 * sizes.output_bytes * sizes.logits,
    ),
    # Beside them, the likelihood of the chosen half of the rows saves a copy of it and its log-probabilities, which
    # have gradients too.
    "orpo": lambda sizes: (2 * sizes.output_bytes * sizes.logits, 3 * sizes.output_bytes * sizes.logits),
    # fp32 logits of all rows, kept for metrics, and their log-probabilities; in the backward these and two gradients
    # (LLaMA-Factory, `train/dpo/trainer.py`: `concatenated_forward`; `train/trainer_utils.py`: `get_batch_logps`).
    "log_softmax": lambda sizes: (8 * sizes.logits, 12 * sizes.logits),
    # Logits of what is scored, divided by the temperature, and their log-probabilities, row by row; in the backward
    # these or their gradients, and two gradients of a row (TRL 0.17 and ms-swift 4.5, `_get_per_token_logps`).
    "completions": lambda sizes: (
        2 * sizes.output_bytes * sizes.scored * sizes.vocab_size,
        int(max(2, 1 + 2 / sizes.rows) * sizes.output_bytes * sizes.scored * sizes.vocab_size),
    ),
    "scores": lambda _: (0, 0),  # a number per row
}


def loss_that_computes(name: str, model_type: str, *, splits_head: bool, has_liger: bool) -> str:
    """Return the loss that computes where `--loss` is this one: the full one where a head or a patch is missing."""
    if name == "chunked" and (splits_head or model_type in WITHOUT_CHUNKED_LOSS):
        return "full"
    return "full" if name == "fused" and has_liger and model_type not in LIGER_TYPES else name
