"""The model that a checkpoint belongs to: its configuration, tokenizer, adapter and base model.

Each file is searched in the checkpoint, then in the output folder around it, then in the base model that the manifest
or the adapter names.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from toolkit.data.data_files import is_hub_id
from toolkit.errors import ToolkitError
from toolkit.files.documents import CONFIGURATION, read_json_object
from toolkit.files.paths import user_path
from toolkit.models.config_fields import read_config
from toolkit.record.checkpoints import FINGERPRINT, Fingerprint, Manifest, read_checkpoint, read_fingerprint

ADAPTER_NAME = "default"  # peft's name of the one adapter that the training script makes
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "spiece.model", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)
# Classes of peft's task types that end in another head than a language model's: the base's config.json has none of it.
HEADED = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
NAME_BASE = "name it: `--base-model FOLDER`"
WEIGHTS_ONLY = "a class of your own: `--weights-only` exports its weights under their own names"
HEAD = f".modules_to_save.{ADAPTER_NAME}."  # in the name of a module that is trained in full beside an adapter


@dataclass(frozen=True)
class ModelFiles:
    """The files of one checkpoint's or model folder's model."""

    path: Path
    base_override: str | None = None  # the base model to use instead of the recorded one

    @cached_property
    def manifest(self) -> Manifest | None:
        return read_checkpoint(self.path).manifest

    @cached_property
    def base(self) -> str | None:
        """The model that training started from: a folder or a hub id."""
        candidates = [self.base_override, getattr(self.manifest, "model_name_or_path", None)]
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
        why = "it is neither a folder nor a hub id"
        if is_hub_id(self.base):
            from huggingface_hub import snapshot_download

            patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
            try:
                return Path(snapshot_download(self.base, allow_patterns=patterns))
            except Exception as error:  # no network, no such id, no permission: each has its own class
                why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ToolkitError(f"the base model {self.base[:80]!r} of {self.path} cannot be found: {why}", hint=NAME_BASE)

    def find(self, name: str, *, base: bool = True) -> Path | None:
        """Return the nearest file of this name; None if there is none."""
        path = self.path.absolute()
        folders = [path, *([path.parent] if path.name.startswith("checkpoint-") else [])]
        near = next((folder / name for folder in folders if (folder / name).exists()), None)
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
        near = self.path / "adapter_config.json"
        full = not near.exists() and (self.path / "config.json").exists()
        return None if full else self.find("adapter_config.json", base=False)

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
            message = f"{self.path} has no config.json, and no base model is recorded"
            raise ToolkitError(message, hint=f"{NAME_BASE}; or without a model class: `--weights-only`")
        read_config(folder / "config.json")
        with built_by_a_library(folder / "config.json"):
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)

    def peft_config(self) -> Any:
        """Return the adapter's peft configuration. Raises ToolkitError if there is none."""
        from peft import PeftConfig

        if self.adapter_config is None:
            raise no_adapter_config(self.path)
        read_adapter_config(self.adapter_config)
        with built_by_a_library(self.adapter_config):
            return PeftConfig.from_pretrained(self.adapter_config.parent)


class MetaModel:
    """The training model on the meta device: parameter names in its own order, ties, and the optimizer's groups."""

    def __init__(self, files: ModelFiles) -> None:
        config, self.adapter = files.model_config(), files.adapter
        peft_config = files.peft_config() if files.adapter else None
        self.model_class = model_class(config, getattr(peft_config, "task_type", None))
        with built_by_a_library(files.path), torch.device("meta"):
            auto = getattr(self.model_class, "from_config", None)
            how = {"dtype": torch.float32, "trust_remote_code": False}
            self.base_model = self.model_class(config) if auto is None else auto(config, **how)
            self.training_model = self.base_model
            if peft_config is not None:
                from peft import get_peft_model

                peft_config.inference_mode = False
                self.training_model = get_peft_model(self.base_model, peft_config)

    @cached_property
    def trainable(self) -> list[str]:
        """Names of trainable parameters in the model's order; a tied weight appears once."""
        return [name for name, parameter in self.training_model.named_parameters() if parameter.requires_grad]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the saved weights: parameters (a tied weight once) and persistent buffers; an adapter's alone."""
        named = dict(self.training_model.named_parameters())
        if self.adapter:
            return {name: tuple(named[name].shape) for name in self.trainable}
        persistent = self.training_model.state_dict()
        named |= {name: buffer for name, buffer in self.training_model.named_buffers() if name in persistent}
        return {name: tuple(tensor.shape) for name, tensor in named.items()}

    @cached_property
    def known_names(self) -> set[str]:
        """Names of the live model, a tied weight's each, and of the buffers that older files have."""
        model = self.base_model
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        return {*self.shapes, *(name for name, _ in named)}

    @cached_property
    def saved_names(self) -> dict[str, str]:
        """Parameter name to the name in an adapter's file; empty for a full model, which saves its own names."""
        if not self.adapter:
            return {}
        from peft import get_peft_model_state_dict

        named = self.training_model.state_dict(keep_vars=True)
        saved = get_peft_model_state_dict(self.training_model, state_dict=dict(named), save_embedding_layers=False)
        names = {id(parameter): name for name, parameter in saved.items()}
        if len(saved) != len(self.trainable) or any(id(named[name]) not in names for name in self.trainable):
            raise ToolkitError(
                f"the adapter saves {len(saved)} tensors and trains {len(self.trainable)}: its kind is not supported"
            )
        return {name: names[id(named[name])] for name in self.trainable}

    def take_shapes(self, saved: Mapping[str, tuple[int, ...]]) -> None:
        """Take shapes of the checkpoint that the base's configuration does not tell: of modules trained in full."""
        heads = {name: saved[name] for name in self.shapes if HEAD in name and name in saved}
        self.shapes = self.shapes | heads
        if heads and self.model_class.__name__ in HEADED.values():
            self.base_model.config.num_labels = next(iter(heads.values()))[0]

    def groups(self, optimized: list[str]) -> list[list[str]]:
        """Return the Trainer's parameter groups of the optimized names: with weight decay, and without it."""
        from transformers import Trainer

        decayed = set(Trainer.get_decay_parameter_names(None, self.training_model))
        wanted = set(optimized)
        chosen = [name for name in self.trainable if name in wanted]
        return [[name for name in chosen if (name in decayed) is with_decay] for with_decay in (True, False)]


class UnknownModel(MetaModel):
    """A model whose class is not known here: its weights have the names and shapes of the checkpoint."""

    def __init__(self, files: ModelFiles) -> None:
        if files.adapter:
            raise ToolkitError(f"{files.path} holds an adapter, whose names only its model tells", hint=NAME_BASE)
        self.adapter, self.model_class = False, None
        self.base_model = self.training_model = torch.nn.Module()

    def take_shapes(self, saved: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(saved)


def no_adapter_config(path: Path) -> ToolkitError:
    """Return the error for an adapter of unknown rank, scale and layers: FSDP2 alone saves only its tensors."""
    return ToolkitError(
        f"{path} holds an adapter, but neither it nor the folder around it has an adapter_config.json",
        hint=f"write it with the script's values: `LoraConfig(...).save_pretrained({str(path)!r})`; `toolkit train` and"
        " `--complete-saves` save it",
    )


def model_class(config: Any, task_type: str | None = None) -> Any:
    """Return transformers' class by config.json, or by an adapter's task. Raises ToolkitError for an unknown one."""
    import transformers

    if task_type in HEADED:
        return getattr(transformers, HEADED[task_type])
    name = str(next(iter(config.architectures or ()), "AutoModelForCausalLM"))
    found = getattr(transformers, name, None)
    known = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if name != "AutoModelForCausalLM" and not known:
        raise ToolkitError(f"config.json is of a {name[:80]}, which transformers does not have", hint=WEIGHTS_ONLY)
    return found


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Return an adapter's configuration. Raises ToolkitError for another file, and for a module to import."""
    config = read_json_object(path, limits=CONFIGURATION, allow_nan=True)
    if not isinstance(config.get("peft_type"), str):
        raise ToolkitError(f"{path} has no peft_type, expected the kind of the adapter, for example `LORA`")
    # peft writes "megatron.core" into every LoRA configuration, and imports it only with megatron_config.
    if config.get("megatron_config") is not None or config.get("megatron_core") not in (None, "megatron.core"):
        raise ToolkitError(f"{path}: megatron_config names a module to import")
    return config


@contextlib.contextmanager
def built_by_a_library(source: Path) -> Iterator[None]:
    """Turn what transformers or peft raises for someone's configuration into a ToolkitError."""
    try:
        yield
    except (ToolkitError, MemoryError):
        raise
    except Exception as error:  # each wrong value of a configuration has its own exception, in its own place
        why = " ".join(str(error).split())[:200] or "no reason given"
        raise ToolkitError(
            f"no model can be built from the configuration in {source}: {type(error).__name__}: {why}",
            hint=f"use the configuration that is stored with the weights; {WEIGHTS_ONLY}",
        ) from None
