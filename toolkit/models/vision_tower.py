"""An encoder of images and its projector, per token that they add to a row: saved activations and operations.

An image is cut into patches; the encoder's blocks run over patches, and its projector joins some of them into one token
of the language model. Blocks and projector are told by their tensors' names. Terms in bytes per patch and block, for
width h and MLP width f, in bf16: norms 2h each with a bias and 6h without, inputs of linear layers 4h, attention 8h,
the MLP 4f, or 8f if it is gated. `tests/models/test_vision_tower.py` compares them with what autograd saves.
"""

import re
from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import MODEL_TYPES
from toolkit.models.shape import Layer, ModelShape, Tensor

BLOCK = re.compile(r"\.(?:blocks|layers?)\.\d+\.")
ATTENTION_INPUTS, MLP_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv"), ("fc1", "linear_fc1", "gate_proj", "up_proj")
MLP_OUTPUTS = ("fc2", "linear_fc2", "down_proj")


def patches_per_token(values: Mapping[str, Any]) -> int:
    """Return how many patches of an image become one token, from a configuration or its type's default."""
    vision = values.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    side = vision.get("spatial_merge_size") or values.get("spatial_merge_size") or values.get("scale_factor")
    side = side or vision.get("pooling_kernel_size") or values.get("downsample_factor")
    for ratio in (values.get("downsample_ratio"), vision.get("pixel_shuffle_ratio")):
        side = side or (ratio and round(1 / ratio))
    tokens, size, patch = values.get("mm_tokens_per_image"), vision.get("image_size"), vision.get("patch_size")
    if side is None and tokens and size and patch:  # Gemma 3 averages
        return int((size // patch) ** 2 // tokens)
    kind, defaults = values.get("model_type"), MODEL_TYPES["patches_per_token"].items()
    return int(side) ** 2 if side else next((int(number) for number, each in defaults if kind in each.split()), 1)


def is_of_images(tensor: Tensor) -> bool:
    """Return True for a tensor, or an adapter's, of an encoder of images or its projector."""
    return tensor.in_tower and "audio" not in tensor.name


def check_image_tokens(shape: ModelShape, image_tokens: int, row_tokens: int) -> None:
    """Raise ToolkitError if rows of this model cannot have that many tokens of images."""
    if image_tokens > row_tokens:
        message = f"--image-tokens is {image_tokens:,}, and a row has {row_tokens:,} tokens, images included"
        raise ToolkitError(message, hint=f"`--max-seq-length {image_tokens + 256}` leaves 256 for the text")
    if reason := why_without_images(shape):
        hint = "leave out --image-tokens and --freeze-vision-tower: rows of text are planned"
        raise ToolkitError(f"{shape.model_type} is not planned with images: {reason}", hint=hint)


def why_without_images(shape: ModelShape) -> str | None:
    """Return why no images are planned for a model; None where they are."""
    reason = MODEL_TYPES["other_towers"].get(shape.model_type)
    return reason or (None if any(map(is_of_images, shape.outer)) else "it has no encoder of images")


def saved_per_token(shape: ModelShape, *, autocast: bool, lora_r: int | None, recomputes: bool) -> int:
    """Return the bytes that a trained encoder and its projector save for one token of an image.

    With activation checkpointing, that is the input of each block, and the activations of one.
    """
    blocks, projector = _divided(shape)
    gemma = shape.model_type.startswith("gemma4")
    normed = any("post_conv" in tensor.name for tensor in projector)  # GLM: a norm of fp32 weights before its blocks
    sizes = [_block_bytes(block, autocast, lora_r, fp32_norms=gemma, fp32_stream=normed) for block in blocks]
    inputs = sum((4 if autocast and lora_r is None else 2) * _width(block) for block in blocks)
    per_patch = inputs + max(sizes, default=0) if recomputes else sum(sizes)
    return shape.patches_per_token * per_patch + sum(2 * sum(t.shape) for t in projector if t.is_linear_weight)


def forward_operations(shape: ModelShape) -> int:
    """Return the operations of one token of an image in the encoder and its projector: 2 per weight and patch."""
    blocks, projector = _divided(shape)
    per_patch = sum(tensor.num_elements for block in blocks for tensor in block if tensor.is_linear_weight)
    return 2 * (shape.patches_per_token * per_patch + sum(t.num_elements for t in projector if t.is_linear_weight))


def _divided(shape: ModelShape) -> tuple[list[Layer], Layer]:
    blocks: dict[str, list[Tensor]] = {}
    for tensor in filter(is_of_images, shape.outer):
        match = BLOCK.search(tensor.name)
        blocks.setdefault(tensor.name[: match.end()] if match else "", []).append(tensor)
    projector = tuple(blocks.pop("", ()))
    return [tuple(block) for block in blocks.values()], projector


def _width(block: Layer) -> int:
    return min((tensor.shape[1] for tensor in block if tensor.is_linear_weight), default=0)


def _block_bytes(block: Layer, autocast: bool, lora_r: int | None, *, fp32_norms: bool, fp32_stream: bool) -> int:
    """With trained weights in fp32 under autocast, the residual stream is fp32, and each linear layer casts its own.

    Where query, key and value are one tensor, it stays alive beside the rotated query and key, attention's output is
    copied, and the stream has the dtype of the patches' convolution, unless `fp32_stream`.
    """
    weights = [tensor for tensor in block if tensor.is_linear_weight]
    by_name = [(tensor.name.replace(".linear.", ".").split(".")[-2], tensor) for tensor in weights]
    fused, width = any(name == "qkv" for name, _ in by_name), _width(block)
    fp32, total = autocast and lora_r is None and (fp32_stream or not fused), (6 if fused else 0) * width
    for tensor in block:
        if len(tensor.shape) == 1 and "lambda" in tensor.name:  # InternVL scales what a block adds
            total += 2 * width
        elif len(tensor.shape) == 1 and tensor.name.endswith("weight"):
            has_bias = any(other.name == tensor.name.replace("weight", "bias") for other in block)
            per_element = 2 if has_bias else 4 if lora_r else 8 if fp32_norms else 6
            total += min(8, per_element + 2 * fp32) * max(width, tensor.shape[0]) + 8  # one of a head is for all heads
    for names in (ATTENTION_INPUTS, MLP_INPUTS):
        readers = [2 * tensor.shape[1] for name, tensor in by_name if name in names]
        total += sum(readers) if fp32 else max(readers, default=0)
    total += sum(2 * tensor.shape[0] for name, tensor in by_name if name in ATTENTION_INPUTS) + 2 * width
    gated = any(name == "gate_proj" for name, _ in by_name)
    total += sum((8 if gated else 4) * tensor.shape[1] for name, tensor in by_name if name in MLP_OUTPUTS)
    return total + 2 * (lora_r or 0) * len(weights)
