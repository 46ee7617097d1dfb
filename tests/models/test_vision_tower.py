"""Encoders of images: what their blocks save is what autograd saves in transformers' own, run on a CPU."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from live_bytes import saved_storages
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from toolkit.errors import ToolkitError
from toolkit.models.flops import flops_of
from toolkit.models.read_model import read_model
from toolkit.models.shape import Tensor
from toolkit.models.vision_tower import (
    check_image_tokens,
    forward_operations,
    is_of_images,
    patches_per_token,
    saved_per_token,
)

PATCHES = 16 * 16
TEXT = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
TEXT |= {"head_dim": 16, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
SIDES: dict[str, Any] = {"image_size": 224, "patch_size": 14}
VISION: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
QWEN: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 64}
QWEN |= {"patch_size": 14}
GLM = QWEN | {"image_size": 224, "out_hidden_size": 512}  # its blocks' MLP is as wide as its output
BY_PATCHES = ("qwen", "glm")  # they take patches and the grid that these are of
PIXTRAL = VISION | SIDES | {"model_type": "pixtral", "head_dim": 32}
SIGLIP = VISION | SIDES | {"model_type": "siglip_vision_model"}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl_text", QWEN | {"fullatt_block_indexes": [0, 1, 2]}, {}),
    "qwen3_vl": ("qwen3_vl_text", QWEN | {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]}, {}),
    "gemma3": ("gemma3_text", SIGLIP, {"mm_tokens_per_image": 64}),
    "mistral3": ("mistral", PIXTRAL, {"spatial_merge_size": 2}),
    "llava": ("mistral", PIXTRAL, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "glm4v": ("glm4v_text", GLM, {}),
    "glm4v_moe": ("glm4v_moe_text", GLM, {}),
    "aya_vision": ("cohere2", SIGLIP | {"vision_use_head": False}, {"downsample_factor": 2}),
    "idefics3": ("llama", VISION | SIDES | {"model_type": "idefics3_vision"}, {"scale_factor": 2}),
    "lfm2_vl": (
        "lfm2",
        VISION | {"model_type": "siglip2_vision_model", "patch_size": 14, "num_patches": 256},
        {"downsample_factor": 2},
    ),
    "internvl": (
        "qwen3",
        VISION | {"model_type": "internvl_vision", "image_size": [224, 224], "patch_size": [14, 14]},
        {"downsample_ratio": 0.5},
    ),
    "llama4": (
        "llama4_text",
        VISION | SIDES | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        {},
    ),
    "gemma4": (
        "gemma4_text",
        VISION | {"num_key_value_heads": 4, "head_dim": 32, "pooling_kernel_size": 2, "default_output_length": 64},
        {"audio_config": None},
    ),
}
# Of what a block saves. Gemma 4's norm of values has no weight; Pixtral's and Qwen2.5's norms under autocast.
TOLERANCE = {"gemma4": 0.06, ("mistral3", True): 0.06, ("llava", True): 0.06, ("qwen2_5_vl", True): 0.04}


def config_of(model_type: str, blocks: int) -> Any:
    text, vision, fields = MODELS[model_type]
    more: dict[str, Any] = {"num_local_experts": 2, "intermediate_size_mlp": 128} if model_type == "llama4" else {}
    if model_type == "gemma4":
        more = {"hidden_size_per_layer_input": 16, "layer_types": ["full_attention"], "num_kv_shared_layers": 0}
    number = "depth" if model_type.startswith(BY_PATCHES) else "num_hidden_layers"
    parts = {"text_config": TEXT | more | {"model_type": text}, "vision_config": vision | {number: blocks}}
    return AutoConfig.for_model(model_type, **json.loads(json.dumps(parts | fields)))


def images(model_type: str, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    vision = config.vision_config
    if model_type.startswith(BY_PATCHES):
        size = 3 * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.randn(PATCHES, size, dtype=dtype), "image_grid_thw": torch.tensor([[1, 16, 16]])}
    if model_type == "gemma4":
        places = torch.cartesian_prod(torch.arange(16), torch.arange(16))[None]
        pixels = torch.randn(1, PATCHES, 3 * vision.patch_size**2, dtype=dtype)
        return {"pixel_values": pixels, "image_position_ids": places}
    if model_type == "lfm2_vl":
        pixels = torch.randn(1, PATCHES, 3 * vision.patch_size**2, dtype=dtype)
        mask = torch.ones(1, PATCHES, dtype=torch.int64)
        return {"pixel_values": pixels, "spatial_shapes": torch.tensor([[16, 16]]), "pixel_attention_mask": mask}
    more = {"image_sizes": torch.tensor([[224, 224]]), "vision_feature_layer": -1} if model_type == "mistral3" else {}
    pixels = torch.randn(1, 3, 224, 224, dtype=dtype)
    return {"pixel_values": pixels[None] if model_type == "idefics3" else pixels} | more


def saved_and_planned(model_type: str, blocks: int, *, autocast: bool) -> tuple[int, int]:
    """Bytes that autograd saves in the encoder for an image, less its weights' copies, and those of the formulas."""
    config, dtype = config_of(model_type, blocks), torch.float32 if autocast else torch.bfloat16
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype).train()
    linear = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    outer = tuple(
        Tensor(name=name, shape=tuple(p.shape), in_linear=id(p) in linear) for name, p in model.named_parameters()
    )
    compute = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with saved_storages(model.parameters()) as storages, compute:
        getattr(model, "model", model).get_image_features(**images(model_type, config, dtype))
    saved = sum(storages.values())
    if autocast:
        saved -= sum(2 * t.num_elements for t in outer if is_of_images(t) and t.is_linear_weight)
    patches = patches_per_token(config.to_dict())
    shape = replace(read_model("Qwen/Qwen3-0.6B"), model_type=model_type, outer=outer, patches_per_token=patches)
    return saved, saved_per_token(shape, autocast=autocast, lora_r=None, recomputes=False) * PATCHES // patches


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_saves_what_autograd_saves(model_type: str, autocast: bool) -> None:
    small = saved_and_planned(model_type, 1, autocast=autocast)
    large = saved_and_planned(model_type, 3, autocast=autocast)
    tolerance = TOLERANCE.get(model_type, TOLERANCE.get((model_type, autocast), 0.01))
    assert large[1] - small[1] == pytest.approx(large[0] - small[0], rel=tolerance)


def test_patches_per_token_are_transformers_default_where_a_configuration_leaves_them_out() -> None:
    """A configuration that transformers saves has no field with its default."""
    checked = []
    for model_type in {"aya_vision", "cohere2_vision", "lfm2_vl", *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        default = 1
        with contextlib.suppress(Exception):  # whatever a configuration of no arguments raises
            default = patches_per_token(AutoConfig.for_model(model_type).to_dict())
        if default > 1 and not model_type.endswith("thinker"):  # those are models of sound
            assert patches_per_token({"model_type": model_type}) == default, model_type
            checked.append(model_type)
    assert {"glm4v", "glm4v_moe", "idefics3", "internvl", "lfm2_vl", "qwen3_vl"} <= set(checked)
    assert len(checked) > 30


def test_activation_checkpointing_keeps_the_input_of_each_block_and_the_activations_of_one() -> None:
    shape = read_model("Qwen/Qwen3-VL-8B-Instruct")
    whole = saved_per_token(shape, autocast=False, lora_r=None, recomputes=False)
    recomputed = saved_per_token(shape, autocast=False, lora_r=None, recomputes=True)
    per_block = 22 * 1152 + 4 * 4304 + 16  # bytes per patch
    assert shape.patches_per_token == 4
    assert whole - recomputed == 4 * (26 * per_block - 27 * 2 * 1152)


def test_a_token_of_text_does_not_pass_through_the_encoder_of_images() -> None:
    shape = read_model("Qwen/Qwen3-VL-8B-Instruct")
    text = flops_of(shape, seq_length=1).dense_forward // 2
    assert text == shape.num_params - shape.num_tower_params
    blocks, mergers = 27 * (4 * 1152**2 + 2 * 1152 * 4304), 4 * (4608**2 + 4608 * 4096)
    assert forward_operations(shape) == 2 * (4 * blocks + mergers)  # four patches are one token


def test_models_without_tokens_of_images_are_refused_by_name() -> None:
    shape = read_model("Qwen/Qwen3-VL-8B-Instruct")
    with pytest.raises(ToolkitError, match="a row has 1,024 tokens, images included"):
        check_image_tokens(shape, 1025, 1024)
    with pytest.raises(ToolkitError, match="mllama is not planned with images: its images are read by cross-attention"):
        check_image_tokens(replace(shape, model_type="mllama"), 10, 1024)
    with pytest.raises(ToolkitError, match="qwen3 is not planned with images: it has no encoder of images"):
        check_image_tokens(read_model("Qwen/Qwen3-0.6B"), 10, 1024)
