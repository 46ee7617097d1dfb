"""Prove a checkpoint, an exported folder or a trained model by loading it again.

>>> verify(Path("model")).problems
[]

Structure first (missing, unexpected, empty, NaN, infinite tensors, by name), then the model's answer to fixed tokens
against the fingerprint that the live model left in the manifest.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.description import Description, Skeleton, recorded_answer
from toolkit.checkpoint.export import export
from toolkit.checkpoint.layout import is_checkpoint
from toolkit.checkpoint.names import ADAPTER
from toolkit.checkpoint.plain_source import WeightFiles
from toolkit.errors import ToolkitError
from toolkit.runs.checkpoints import FINGERPRINT, MANIFEST, read_checkpoint
from toolkit.runs.folder import read_json

# Of the largest logit, by the dtype in which the live model computed; the reloaded one computes in fp32.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was looked at, and what is wrong."""

    path: str
    kind: str
    """`checkpoint` or `model`."""
    num_tensors: int
    max_difference: float | None
    """Largest difference of a logit over the largest logit; None without a fingerprint."""
    tolerance: float | None
    problems: list[str]

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(path: Path, *, base_model: str | None = None) -> Verified:
    """Reload and compare. Raises ToolkitError only for a folder that is none of the three."""
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint, an exported folder or a run folder")
    if not is_checkpoint(path):
        if not any(path.glob("*model*.safetensors")):
            raise ToolkitError(f"{path} holds no model and no checkpoint", hint="name a folder `checkpoint-STEP`")
        return _verified(path, path, "model", base_model)
    checkpoint = read_checkpoint(path)
    problem = checkpoint.problem(deep=True) if (path / MANIFEST).exists() else None
    if problem is not None:
        return _failed(path, "checkpoint", [problem])
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".verifying-") as folder:
        exported = Path(folder) / "model"
        try:
            export(path, exported, base_model=base_model)
        except ToolkitError as error:
            return _failed(path, "checkpoint", [error.message])
        return _verified(path, exported, "checkpoint", base_model)


def _verified(path: Path, model: Path, kind: str, base_model: str | None) -> Verified:
    description = Description(path, base_model)
    files, skeleton = WeightFiles(model), Skeleton(description)
    problems = structure_problems(files, skeleton)
    recorded = find_fingerprint(path)
    difference, tolerance = None, None
    if recorded is not None and not problems:
        tolerance = TOLERANCE.get(str(recorded.get("compute_dtype")), TOLERANCE["bfloat16"])
        difference = logits_difference(answer(model, description, recorded["input_ids"]), recorded["logits"])
        if not difference <= tolerance:
            problems = [
                f"logits differ from the live model's by {difference:.3g} of the largest, more than {tolerance:g}"
            ]
    return Verified(
        path=str(path),
        kind=kind,
        num_tensors=len(files.files),
        max_difference=difference,
        tolerance=tolerance,
        problems=problems,
    )


def structure_problems(files: WeightFiles, skeleton: Skeleton) -> list[str]:
    """Tensors that are missing, unexpected, empty, of another shape, or not finite; each by name."""
    expected = {skeleton.saved_names.get(name, name): shape for name, shape in skeleton.shapes.items()}
    allowed = set(expected) | set(dict(skeleton.plain.named_parameters(remove_duplicate=False)))
    found = files.shapes()
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, shape in found.items():
        if name not in allowed:
            problems.append(f"{name} is unexpected")
        elif 0 in shape:
            problems.append(f"{name} is empty")
        elif name in expected and shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
        elif (bad := not_finite(files.read(name))) is not None:
            problems.append(f"{name} has {bad}")
    return problems


def not_finite(tensor: torch.Tensor) -> str | None:
    """How many values are NaN or infinite; None if all are numbers."""
    if not tensor.is_floating_point():
        return None
    nans, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    words = [f"{nans} NaN"] * bool(nans) + [f"{infinite} infinite"] * bool(infinite)
    return f"{' and '.join(words)} of {tensor.numel()} values" if words else None


def find_fingerprint(path: Path) -> dict[str, Any] | None:
    """What the live model answered: in a checkpoint's manifest, or beside a trained or exported model."""
    return recorded_answer(path) if is_checkpoint(path) else read_json(path / FINGERPRINT)


def answer(model: Path, description: Description, input_ids: list[int]) -> torch.Tensor:
    """The reloaded model's logits of the last position, fp32 on this machine's CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if description.adapter:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(description.base_folder, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, model, adapter_name=ADAPTER)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    with torch.no_grad():
        logits: torch.Tensor = loaded(input_ids=torch.tensor([input_ids]), use_cache=False).logits[0, -1].float()
    return logits


def logits_difference(reloaded: torch.Tensor, recorded: list[float]) -> float:
    """Over the largest recorded logit."""
    live = torch.tensor(recorded)
    return float((reloaded[: len(recorded)] - live).abs().max() / live.abs().max().clamp_min(1e-12))


def _failed(path: Path, kind: str, problems: list[str]) -> Verified:
    return Verified(path=str(path), kind=kind, num_tensors=0, max_difference=None, tolerance=None, problems=problems)
