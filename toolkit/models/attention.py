"""Attention functions: which ones a model, a device and an installation run, and which one packed rows get.

A packed row needs the boundaries of its documents. `eager` and `sdpa` take them as a mask of all pairs of positions,
which no flash kernel accepts. Functions of variable length take the lengths of the documents, and compute each
document alone: flash attention, and `sdpa_varlen`, the toolkit's own (`toolkit/train/model/varlen_attention.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.versions import attention_names, is_importable, model_class_flags

AUTO = "auto"  # chosen for packed rows; the model's default for others
VARLEN = "sdpa_varlen"  # the toolkit's function: torch's `varlen_attn` on a GPU, one SDPA call per document elsewhere
# A function of the hub's `kernels`: owner/name, with @revision and :function (transformers 5.23, `is_kernel`).
KERNEL = re.compile(r"[^/:]+/[^/:]+(?:@[^/:]+)?(?::[^/:]+)?")
# Version of flash attention -> its module and the package that installs it (transformers 5.23,
# `FLASH_ATTENTION_COMPATIBILITY_MATRIX`). With `kernels` installed, transformers fetches one from the hub instead.
FLASH_ATTENTION = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn", "flash-attn-4"),
}
# What each function needs of a model: the name of a class attribute in transformers.
_FLAGS = {"flash": "_supports_flash_attn", "sdpa": "_supports_sdpa", "flex": "_supports_flex_attn"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAttention:
    """What a model's attention works with, from its class in transformers and its configuration."""

    model_type: str
    flash: bool  # passes document lengths and sliding windows to the attention function, as flash attention needs them
    sdpa: bool
    flex: bool
    named_flash: tuple[str, ...] = ()  # the only flash kernels that it works with, if its class names any
    softcap: bool = False  # it caps its scores
    chunks: bool = False  # a token attends to its own chunk of the row, which only a mask expresses

    def why_not(self, name: str) -> str | None:
        """Return why the model does not run this attention function, or None if it does."""
        if name == VARLEN:
            if not self.sdpa:
                return f"transformers does not support SDPA for {self.model_type}"
            if not self.flash:
                return f"{self.model_type} does not pass the lengths of documents to its attention"
            return "it caps its scores" if self.softcap else "it attends within chunks" if self.chunks else None
        if name in FLASH_ATTENTION and self.named_flash and name not in self.named_flash:
            return f"{self.model_type} works with {' and '.join(self.named_flash)} only"
        kind = "flash" if "flash" in name else {"sdpa": "sdpa", "flex_attention": "flex"}.get(name)
        return f"transformers does not support it for {self.model_type}" if kind and not getattr(self, kind) else None

    @property
    def working(self) -> tuple[str, ...]:
        """Functions that run on every device."""
        return tuple(name for name in (VARLEN, "sdpa", "eager") if self.why_not(name) is None)


def attention_words() -> tuple[str, ...]:
    """Return the values of `--attn_implementation`, other than the name of a kernel on the hub."""
    return (AUTO, VARLEN, *attention_names())


def needs_no_mask(name: str | None) -> bool:
    """Return True for a function that takes the lengths of documents in place of a mask."""
    return name is not None and (name == VARLEN or "flash" in name)  # of a package, or of the hub


def read_model_attention(config: Mapping[str, Any]) -> ModelAttention | None:
    """Return what the model of a `config.json` works with; None for an architecture that transformers does not have."""
    model_type = str(config.get("model_type"))
    flags = model_class_flags(model_type)
    if flags is None:
        return None
    chunked = "chunked_attention" in (config.get("layer_types") or ()) or config.get("attention_chunk_size")
    return ModelAttention(
        model_type=model_type,
        **{name: flags.get(flag) is True for name, flag in _FLAGS.items()},
        named_flash=tuple(flags.get("_compatible_flash_implementations") or ()),
        softcap=config.get("attn_logit_softcapping") is not None,
        chunks=bool(chunked),
    )


def packed_attention(
    model: ModelAttention | None, *, capability: tuple[int, int] | None, half_precision: bool
) -> str | None:
    """Return the attention function for packed rows that makes no mask, or None where there is none.

    `capability` is that of the GPU, None on a CPU. Nothing is fetched from the hub, even if `kernels` is installed.
    """
    if model is None:
        return None
    if capability is not None and half_precision and model.flash and not model.named_flash:
        for name, wanted in (("flash_attention_3", capability[0] == 9), ("flash_attention_2", capability >= (8, 0))):
            if wanted and is_importable(FLASH_ATTENTION[name][0]):
                return name
    return VARLEN if model.why_not(VARLEN) is None else None


def missing_attention_package(name: Any) -> str | None:
    """Return the package that an attention function needs and that is not installed."""
    if name is None or is_importable("kernels"):
        return None
    if KERNEL.fullmatch(str(name)):
        return "kernels"
    module, package = FLASH_ATTENTION.get(str(name), ("", ""))
    return package if module and not is_importable(module) else None
