"""What a checkpoint belongs to: its model's configuration, tokenizer, adapter and base, wherever they lie.

Looked for in the checkpoint, then in the run folder around it, then in the base model that the manifest names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import ToolkitError
from toolkit.runs.checkpoints import MANIFEST
from toolkit.runs.folder import RunFolder, read_json

SIDE_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "spiece.model", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)


def recorded_answer(path: Path, *, dtype: str = "float32") -> dict[str, Any] | None:
    """The manifest's fingerprint, with the coarser of the dtypes that computed it and that it is held against."""
    manifest = read_json(path / MANIFEST) or {}
    if not manifest.get("fingerprint"):
        return None
    return {**manifest["fingerprint"], "compute_dtype": manifest.get("compute_dtype") if dtype == "float32" else dtype}


@dataclass(frozen=True)
class Description:
    """Of one checkpoint or model folder."""

    path: Path
    base_override: str | None = None
    """The base model, where the one that was recorded is no longer there."""

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.path / MANIFEST) or {}

    @cached_property
    def run(self) -> dict[str, Any]:
        return next((run for folder in self.folders[:2] if (run := RunFolder(folder).read_run())), {})

    @property
    def folders(self) -> list[Path]:
        """The checkpoint, and the run folder if there is one around it."""
        return [self.path, *([self.path.parent] if (self.path.parent / "run.json").exists() else [])]

    @cached_property
    def base(self) -> str | None:
        """The model that training started from: a folder or a hub id."""
        adapter = read_json(self.adapter_config) if self.adapter_config is not None else None
        spec = (self.run.get("spec") or {}).get("model") or {}
        named = [self.base_override, self.manifest.get("model_name_or_path"), spec.get("model_name_or_path")]
        named += [(adapter or {}).get("base_model_name_or_path")]
        return next((str(name) for name in named if name), None)

    @cached_property
    def base_folder(self) -> Path | None:
        """The base model's files on this machine; a hub id's are fetched."""
        if self.base is None:
            return None
        if Path(self.base).expanduser().is_dir():
            return Path(self.base).expanduser()
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.base, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
        except Exception as error:  # many kinds: no network, no such id, not allowed
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ToolkitError(
                f"the base model {self.base!r} of {self.path} cannot be found: {first}",
                hint="name it: `--base-model FOLDER`",
            ) from None

    def find(self, name: str, *, base: bool = True) -> Path | None:
        """A file that belongs to the checkpoint."""
        near = next((folder / name for folder in self.folders if (folder / name).exists()), None)
        if near is not None or not base or self.base_folder is None:
            return near
        return self.base_folder / name if (self.base_folder / name).exists() else None

    @cached_property
    def adapter_config(self) -> Path | None:
        return self.find("adapter_config.json", base=False)

    @property
    def adapter(self) -> bool:
        """Whether an adapter was trained."""
        return bool(self.manifest.get("adapter", self.adapter_config is not None))

    def side_files(self) -> list[Path]:
        """Tokenizer and generation configuration, each from where it lies nearest."""
        return [path for name in SIDE_FILES if (path := self.find(name)) is not None]

    def model_config(self) -> Any:
        """The model's configuration as transformers reads it."""
        from transformers import AutoConfig

        path = None if self.adapter else self.find("config.json")
        folder = path.parent if path is not None else self.base_folder
        if folder is None:
            raise ToolkitError(
                f"{self.path} has no config.json, and nothing names its base model",
                hint="name it: `--base-model FOLDER`",
            )
        return AutoConfig.from_pretrained(folder)

    def peft_config(self) -> Any:
        """The adapter's configuration as peft reads it."""
        from peft import PeftConfig

        if self.adapter_config is None:
            raise ToolkitError(
                f"{self.path} holds an adapter, and no adapter_config.json is in it or in the run folder around it",
                hint="copy the adapter_config.json of the same training into it",
            )
        return PeftConfig.from_pretrained(self.adapter_config.parent)


class Skeleton:
    """The training model without weights: names in its own order, ties, and the optimizer's two groups."""

    def __init__(self, description: Description) -> None:
        from transformers import AutoModelForCausalLM

        config = description.model_config()
        with torch.device("meta"):
            self.plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            self.model = self.plain
            if description.adapter:
                from peft import get_peft_model

                peft_config = description.peft_config()
                peft_config.inference_mode = False
                self.model = get_peft_model(self.plain, peft_config)
        self.adapter = description.adapter

    @cached_property
    def trainable(self) -> list[str]:
        """Names that may have optimizer states, in the model's order; tied ones once."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight that a saved model needs: parameters, tied ones once, and persistent buffers."""
        named = dict(self.model.named_parameters())
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in self.model.state_dict()}
        found = {name: tuple(tensor.shape) for name, tensor in (named | buffers).items()}
        return {name: shape for name, shape in found.items() if not self.adapter or name in set(self.trainable)}

    @cached_property
    def saved_names(self) -> dict[str, str]:
        """Parameter name to the name in an adapter's file; the same for a whole model."""
        if not self.adapter:
            return {}
        from peft import get_peft_model_state_dict

        saved = list(get_peft_model_state_dict(self.model, save_embedding_layers=False))
        if len(saved) != len(self.trainable):
            raise ToolkitError(
                f"the adapter saves {len(saved)} tensors and trains {len(self.trainable)}: its kind is not known here"
            )
        return dict(zip(self.trainable, saved, strict=True))

    def groups(self, optimized: list[str]) -> list[list[str]]:
        """The Trainer's parameter groups, by its own rule: with weight decay, without it."""
        from transformers import Trainer

        kept = set(optimized)
        decayed = set(Trainer.get_decay_parameter_names(None, self.model))
        groups = [
            [name for name in self.trainable if name in kept and (name in decayed) == want] for want in (True, False)
        ]
        return groups
