"""Verify a checkpoint, an exported folder or a trained model by loading it again.

Structure is checked first (missing, unexpected, empty, NaN and infinite tensors, by name), then the logits of fixed
tokens against the fingerprint that the live model recorded.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.hf_checkpoint import WeightFiles, live_weights
from toolkit.checkpoint.hf_export import export
from toolkit.checkpoint.inspect import check_readable, is_checkpoint, newest_of_script
from toolkit.checkpoint.model_definition import ADAPTER_NAME, MetaModel, ModelFiles, UnknownModel, built_by_a_library
from toolkit.errors import ToolkitError
from toolkit.models.nf4 import PACKED_BF16, as_in_training, quantization_config
from toolkit.record.checkpoints import MANIFEST, Fingerprint, read_checkpoint

# Relative to the largest logit, by the live model's compute dtype; the reloaded model computes in fp32, unless its base
# is in 4 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """The problems of a checkpoint or model; fields are the keys of `verify --json`."""

    path: str
    kind: str
    """`checkpoint` or `model`."""
    num_tensors: int = 0
    max_difference: float | None = None
    """Largest difference of a logit, relative to the largest logit; None without a fingerprint."""
    tolerance: float | None = None
    four_bit_matmul: str | None = None
    """How 4-bit layers computed, here as in the live model: `dequantized` or `packed_bf16`; None without them."""
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(
    path: Path, *, base_model: str | None = None, trust_pickle: bool = False, weights_only: bool = False
) -> VerifyResult:
    """Reload and compare. Raises ToolkitError for no checkpoint or model, and for one that only DeepSpeed reads."""
    path = newest_of_script(path)
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint, an exported folder or a run folder")
    if not is_checkpoint(path):
        if not any(path.glob("*model*.safetensors")):
            raise ToolkitError(f"{path} holds neither a model nor a checkpoint", hint="name a folder `checkpoint-STEP`")
        return _verify_model(path, path, "model", base_model, weights_only)
    problem = read_checkpoint(path).problem(deep=True) if os.path.lexists(path / MANIFEST) else None
    if problem is not None:
        return VerifyResult(path=str(path), kind="checkpoint", problems=[problem])
    check_readable(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".verifying-") as folder:
        exported = Path(folder) / "model"
        try:
            export(path, exported, base_model=base_model, trust_pickle=trust_pickle, weights_only=weights_only)
        except ToolkitError as error:
            return VerifyResult(path=str(path), kind="checkpoint", problems=[error.message])
        return _verify_model(path, exported, "checkpoint", base_model, weights_only)


def _verify_model(path: Path, model: Path, kind: str, base_model: str | None, weights_only: bool) -> VerifyResult:
    files = ModelFiles(path, base_model)
    definition = UnknownModel(files) if weights_only else MetaModel(files)
    recorded, weights = None if weights_only else files.fingerprint(), live_weights(model, definition)
    live_names = {saved: name for name, saved in definition.saved_names.items()}
    definition.take_shapes({live_names.get(saved, saved): shape for saved, shape in weights.shapes().items()})
    problems, difference, tolerance = _structure_problems(weights, definition), None, None
    if recorded is not None and not problems:
        dtype = "bfloat16" if recorded.four_bit_matmul == PACKED_BF16 else str(recorded.compute_dtype)
        tolerance = TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
        vocabulary = definition.base_model.config.get_text_config().vocab_size
        if max(recorded.input_ids) >= vocabulary or len(recorded.logits) > vocabulary:
            raise ToolkitError(f"{path}: the fingerprint is of another model than that of {vocabulary} tokens")
        with built_by_a_library(model):
            reloaded = _reloaded_logits(model, files, definition.model_class, recorded)
        live = torch.tensor(recorded.logits)
        difference = float((reloaded[: len(live)] - live).abs().max() / live.abs().max().clamp_min(1e-12))
        if not difference <= tolerance:
            far = f"by {difference:.3g} of the largest, more than {tolerance:g}"
            problems = [f"logits differ from the live model's {far}"]
    return VerifyResult(
        path=str(path),
        kind=kind,
        num_tensors=len(weights.tensors),
        max_difference=difference,
        tolerance=tolerance,
        four_bit_matmul=None if recorded is None else recorded.four_bit_matmul,
        problems=problems,
    )


def _structure_problems(weights: WeightFiles, model: MetaModel) -> list[str]:
    expected = {model.saved_names.get(name, name): shape for name, shape in model.shapes.items()}
    allowed = set(expected) | model.known_names
    found = weights.shapes()
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, shape in found.items():
        if name not in allowed:
            problems.append(f"{name} is unexpected")
        elif 0 in shape:
            problems.append(f"{name} is empty")
        elif name in expected and shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
        else:
            tensor = weights.read(name)
            counts = {"NaN": int(tensor.isnan().sum()), "infinite": int(tensor.isinf().sum())}
            if bad := [f"{count} {kind}" for kind, count in counts.items() if count]:
                problems.append(f"{name} has {' and '.join(bad)} of {tensor.numel()} values")
    return problems


def _reloaded_logits(model: Path, files: ModelFiles, model_class: Any, recorded: Fingerprint) -> torch.Tensor:
    """Load the model on the CPU in fp32, a 4-bit base in 4 bits, and return the logits of the last position."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if files.adapter:
        from peft import PeftModel

        load = partial(model_class.from_pretrained, files.base_folder)
        if recorded.load_in_4bit:  # quantized as it was: from weights in the compute dtype
            from toolkit.models.nf4_experts import decode_experts_when_used, load_with_experts_in_4_bits

            dtype = getattr(torch, str(recorded.compute_dtype))
            packed = partial(load, dtype=dtype, quantization_config=quantization_config(dtype))
            base = load_with_experts_in_4_bits(packed)
        else:
            base = load(dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, model, adapter_name=ADAPTER_NAME)
        if recorded.load_in_4bit:
            decode_experts_when_used(loaded)
    else:
        loaded = model_class.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    same_path = as_in_training(loaded) if recorded.four_bit_matmul != PACKED_BF16 else contextlib.nullcontext()
    with torch.no_grad(), same_path:
        outputs = loaded(input_ids=torch.tensor([recorded.input_ids]), use_cache=False)
    logits: torch.Tensor = outputs.logits[0, -1].float()
    return logits
