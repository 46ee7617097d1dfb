"""The model that a checkpoint belongs to: its configuration, tokenizer, adapter and base model.

Each file is searched in the checkpoint, then in the run folder around it, then in the base model that the manifest
names.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from toolkit.data import is_hub_id
from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json_object
from toolkit.files.reading import user_path
from toolkit.files.value_limits import CONFIGURATION
from toolkit.models.config_fields import read_config
from toolkit.record.checkpoints import FINGERPRINT, Fingerprint, Manifest, read_checkpoint, read_fingerprint
from toolkit.record.folder import RunFolder

ADAPTER_NAME = "default"  # peft's name of the one adapter that the training script makes
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "spiece.model", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)


# Building a model of 2,000 layers without weights takes about half of that.
BUILD_CPU_SECONDS = 30
# Fields of peft's configurations with which it imports a module that the file names.
_IMPORTS = ("megatron_core", "megatron_config")
_MAX_RANK = 2**20


def without_adapter_name(name: str) -> str:
    """Return a parameter's name as peft saves it, without the adapter's own name.

    >>> without_adapter_name("q_proj.lora_A.default.weight")
    'q_proj.lora_A.weight'
    """
    parts = [part for part in name.split(".") if part != ADAPTER_NAME]
    saved = ".".join(parts)
    # DoRA's magnitude is a module with a weight in the model, and the vector itself in the file.
    return saved.removesuffix(".weight") if "lora_magnitude_vector" in parts else saved


@dataclass(frozen=True)
class ModelFiles:
    """The files of one checkpoint's or model folder's model."""

    path: Path
    base_override: str | None = None
    """The base model to use instead of the recorded one."""

    @cached_property
    def manifest(self) -> Manifest | None:
        return read_checkpoint(self.path).manifest

    @cached_property
    def run(self) -> dict[str, Any]:
        return next((run for folder in self.folders[:2] if (run := RunFolder(folder).read_run())), {})

    @property
    def folders(self) -> list[Path]:
        """The checkpoint, and the run folder around it if there is one."""
        return [self.path, *([self.path.parent] if (self.path.parent / "run.json").exists() else [])]

    @cached_property
    def base(self) -> str | None:
        """The model that training started from: a folder or a hub id."""
        spec = as_section(as_section(self.run, "spec"), "model")
        candidates = [self.base_override, getattr(self.manifest, "model_name_or_path", None)]
        candidates += [spec.get("model_name_or_path")]
        if self.adapter_config is not None:
            candidates += [read_adapter_config(self.adapter_config).get("base_model_name_or_path")]
        return next((name for name in candidates if isinstance(name, str) and name), None)

    @cached_property
    def base_folder(self) -> Path | None:
        """The base model's local files; those of a hub id are downloaded."""
        if self.base is None:
            return None
        folder = user_path(self.base)
        if folder.is_dir():
            return folder
        if not is_hub_id(self.base):
            raise self._no_base("it is neither a folder nor a hub id")
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.base, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
        except Exception as error:  # no network, no such id, no permission: each has its own class
            raise self._no_base((str(error).strip().splitlines() or [type(error).__name__])[0]) from None

    def _no_base(self, why: str) -> ToolkitError:
        return ToolkitError(
            f"the base model {str(self.base)[:80]!r} of {self.path} cannot be found: {why}",
            hint="name it: `--base-model FOLDER`",
        )

    def find(self, name: str, *, base: bool = True) -> Path | None:
        """Return the nearest file of this name; None if there is none."""
        near = next((folder / name for folder in self.folders if (folder / name).exists()), None)
        if near is not None or not base or self.base_folder is None:
            return near
        return self.base_folder / name if (self.base_folder / name).exists() else None

    def fingerprint(self, *, dtype: str = "float32") -> Fingerprint | None:
        """Return the live model's recorded logits for fixed tokens; None if none were recorded.

        They are in a checkpoint's manifest, or beside a trained or exported model. `compute_dtype` is the coarser of
        the dtype that computed them and the `dtype` of the weights that they are compared with.
        """
        if self.manifest is not None:
            recorded, default = self.manifest.fingerprint, self.manifest.compute_dtype
        else:
            path = self.path / FINGERPRINT
            recorded, default = read_fingerprint(path) if path.exists() else None, None
        if recorded is None:
            return None
        computed_in = recorded.compute_dtype or default if dtype == "float32" else dtype
        return recorded.model_copy(update={"compute_dtype": computed_in})

    @cached_property
    def adapter_config(self) -> Path | None:
        return self.find("adapter_config.json", base=False)

    @property
    def adapter(self) -> bool:
        """True if an adapter was trained."""
        recorded = getattr(self.manifest, "adapter", None)
        return self.adapter_config is not None if recorded is None else bool(recorded)

    def tokenizer_files(self) -> list[Path]:
        """Return the files of the nearest tokenizer, and of the generation configuration."""
        base = self.find("tokenizer_config.json", base=False) is None
        return [path for name in TOKENIZER_FILES if (path := self.find(name, base=base)) is not None]

    def model_config(self) -> Any:
        """Return the model's transformers configuration. Raises ToolkitError if there is none."""
        from transformers import AutoConfig

        path = None if self.adapter else self.find("config.json")
        folder = path.parent if path is not None else self.base_folder
        if folder is None:
            raise ToolkitError(
                f"{self.path} has no config.json, and no base model is recorded",
                hint="name it: `--base-model FOLDER`",
            )
        read_config(folder / "config.json")
        with built_by_a_library(folder / "config.json"):
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)

    def peft_config(self) -> Any:
        """Return the adapter's peft configuration. Raises ToolkitError if there is none."""
        from peft import PeftConfig

        if self.adapter_config is None:
            raise ToolkitError(
                f"{self.path} holds an adapter, but neither it nor the run folder around it has an adapter_config.json",
                hint="copy the adapter_config.json of the same run into it",
            )
        read_adapter_config(self.adapter_config)
        with built_by_a_library(self.adapter_config):
            return PeftConfig.from_pretrained(self.adapter_config.parent)


class MetaModel:
    """The training model on the meta device: parameter names in its own order, ties, and the optimizer's groups."""

    def __init__(self, files: ModelFiles) -> None:
        from transformers import AutoModelForCausalLM

        config, self.adapter = files.model_config(), files.adapter
        with built_by_a_library(files.path), torch.device("meta"):
            self.base_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        self.training_model = self.base_model
        if files.adapter:
            from peft import get_peft_model

            peft_config = files.peft_config()
            peft_config.inference_mode = False
            with built_by_a_library(files.path), torch.device("meta"):
                self.training_model = get_peft_model(self.base_model, peft_config)

    @cached_property
    def trainable(self) -> list[str]:
        """Names of trainable parameters in the model's order; a tied weight appears once."""
        return [name for name, parameter in self.training_model.named_parameters() if parameter.requires_grad]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the saved weights: parameters (a tied weight once) and persistent buffers; an adapter's alone."""
        named = dict(self.training_model.named_parameters())
        buffers = {
            name: buffer
            for name, buffer in self.training_model.named_buffers()
            if name in self.training_model.state_dict()
        }
        found = {name: tuple(tensor.shape) for name, tensor in (named | buffers).items()}
        return {name: shape for name, shape in found.items() if not self.adapter or name in set(self.trainable)}

    @cached_property
    def saved_names(self) -> dict[str, str]:
        """Parameter name to the name in an adapter's file; empty for a full model, which saves its own names."""
        if not self.adapter:
            return {}
        from peft import get_peft_model_state_dict

        saved = list(get_peft_model_state_dict(self.training_model, save_embedding_layers=False))
        if len(saved) != len(self.trainable):
            raise ToolkitError(
                f"the adapter saves {len(saved)} tensors and trains {len(self.trainable)}: its kind is not supported"
            )
        return dict(zip(self.trainable, saved, strict=True))

    def groups(self, optimized: list[str]) -> list[list[str]]:
        """Return the Trainer's parameter groups of the optimized names: with weight decay, and without it."""
        from transformers import Trainer

        chosen = set(optimized)
        decayed = set(Trainer.get_decay_parameter_names(None, self.training_model))
        return [
            [name for name in self.trainable if name in chosen and (name in decayed) is with_decay]
            for with_decay in (True, False)
        ]


# -- Configurations that others wrote, given to transformers and peft: checked first, with a limit on their time


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Return an adapter's configuration.

    Raises ToolkitError for a file that is not one, for a rank that no adapter has, and for a module that it would
    import.
    """
    config = read_json_object(path, limits=CONFIGURATION, allow_nan=True)
    if not isinstance(config.get("peft_type"), str):
        raise ToolkitError(f"{path} has no peft_type, expected the kind of the adapter, for example `LORA`")
    for name in _IMPORTS:
        # peft writes "megatron.core" into every LoRA configuration, and imports it only with megatron_config.
        if config.get(name) not in (None, "megatron.core"):
            raise ToolkitError(f"{path}: {name} is {str(config[name])[:80]!r}, which names a module to import")
    ranks = [("r", config.get("r")), *as_section(config, "rank_pattern").items()]
    for name, rank in ranks:
        if rank is not None and (type(rank) is not int or not 1 <= rank <= _MAX_RANK):
            raise ToolkitError(f"{path}: {name[:80]} is {repr(rank)[:80]}, expected an integer from 1 to {_MAX_RANK:,}")
    return config


def as_section(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key; empty where there is none."""
    value = content.get(key)
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def built_by_a_library(source: Path, *, cpu_seconds: int = BUILD_CPU_SECONDS) -> Iterator[None]:
    """Turn what a library raises for someone's configuration into a ToolkitError, and stop it if it takes too long.

    `cpu_seconds` 0 is no limit.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise ToolkitError(
            f"the model of {source} takes more than {cpu_seconds} CPU seconds to build without weights",
            hint="use the configuration that is stored with the weights",
        )

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        yield
    except (ToolkitError, MemoryError):
        raise
    except Exception as error:  # each wrong value of a configuration has its own exception, in its own place
        why = " ".join(str(error).split())[:200] or "no reason given"
        raise ToolkitError(
            f"no model can be built from the configuration in {source}: {type(error).__name__}: {why}",
            hint="use the configuration that is stored with the weights",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
