"""One stage of a decoder: some of its layers, with the embedding in the first stage and the head in the last.

A stage keeps the forward of its architecture in transformers, which makes masks and positions itself: layers that
belong to other stages are taken out of the model before it has weights.

Each rank reads the weights of its stages only, from a model folder or the hub, and writes them as one safetensors file
with the names of the whole model; rank 0 writes the index, so that `from_pretrained` loads the folder without a merge.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import Parameter
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json_object
from toolkit.files.model_weights import read_weights
from toolkit.record.folder import write_json

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Stage(torch.nn.Module):  # type: ignore[misc]
    """Some layers of a decoder. It takes token ids in the first stage and hidden states in the others."""

    def __init__(self, config: Any, layers: range, *, number: int, stages: int, attention: str | None) -> None:
        """Build the stage without weights; `load` gives it those."""
        super().__init__()
        self.number, self.layers = number, layers
        self.is_first, self.is_last = number == 0, number == stages - 1
        self.tied = bool(config.get_text_config().tie_word_embeddings)
        extra = {} if attention is None else {"attn_implementation": attention}
        with init_empty_weights(include_buffers=False):
            self.decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **extra)
        self._take_out_other_stages()
        self.compute_dtype = torch.float32
        self.micro_batches: list[dict[str, Any]] = []
        """Mask, positions and labels of each micro-batch of the step, which are not handed on."""
        self.begin_forward: Callable[[], None] = lambda: None

    def _take_out_other_stages(self) -> None:
        backbone = self.decoder.model
        own = torch.nn.ModuleList()
        for index in self.layers:  # under their own numbers, by which weights are named
            own.add_module(str(index), backbone.layers[index])
        backbone.layers = own
        # The backbone loops over the layers that it has, and looks their types up by their place among them.
        backbone.config = copy.copy(backbone.config)
        backbone.config.num_hidden_layers = len(self.layers)
        if getattr(backbone.config, "layer_types", None):
            backbone.config.layer_types = [backbone.config.layer_types[index] for index in self.layers]
        if not self.is_first:
            backbone.embed_tokens = None
        if not self.is_last:
            backbone.norm, self.decoder.lm_head = torch.nn.Identity(), None
        elif self.tied:  # one tensor in the model's file; here each of the two ranks has a copy
            self.decoder.lm_head.weight = Parameter(self.decoder.lm_head.weight.detach())

    @property
    def tied_copy(self) -> Any:
        """The head's weight where it is a second copy of the embedding; None in any other stage."""
        return self.decoder.lm_head.weight if self.tied and self.is_last else None

    def load(self, read: Callable[[str], torch.Tensor], device: torch.device) -> None:
        """Load each parameter in fp32 with `read`, which takes its name in a model folder."""
        for name, _ in list(self.decoder.named_parameters()):
            stored = EMBEDDING if self.tied and name == HEAD else name
            module, _, attribute = name.rpartition(".")
            weight = Parameter(read(stored).to(device=device, dtype=torch.float32))
            setattr(self.decoder.get_submodule(module), attribute, weight)

    def forward(self, inputs: torch.Tensor, *, micro_batch: torch.Tensor) -> torch.Tensor:
        """Return hidden states, or in the last stage the loss of a micro-batch of the step, given by its number."""
        self.begin_forward()
        return self.compute(inputs, **self.micro_batches[int(micro_batch)])

    def compute(self, inputs: torch.Tensor, *, labels: Any = None, **options: Any) -> torch.Tensor:
        """Return hidden states; in the last stage the loss with `labels`, and logits without."""
        given = {"input_ids" if self.is_first else "inputs_embeds": inputs, "use_cache": False, **options}
        half = self.compute_dtype != torch.float32
        with torch.autocast(inputs.device.type, dtype=self.compute_dtype, enabled=half):
            if not self.is_last:
                given.pop("num_items_in_batch", None)
                hidden: torch.Tensor = self.decoder.model(**given).last_hidden_state
                return hidden
            output = self.decoder(**given, labels=labels)
            result: torch.Tensor = output.logits if labels is None else output.loss
            return result


def weights_reader(name: str, revision: str) -> Callable[[str], torch.Tensor]:
    """Return a function that reads one tensor by name, from a local folder or a hub id.

    Of a hub id with several files, only those that hold the tensors that are read are downloaded.
    """
    find = _local_files(Path(name)) if Path(name).is_dir() else _hub_files(name, revision)
    opened: dict[str, Any] = {}

    def read(tensor: str) -> torch.Tensor:
        path = find(tensor)
        if path is None:
            raise ToolkitError(
                f"model {name!r} has no tensor {tensor!r}, which a stage of the pipeline needs",
                hint="`--preset fsdp2` loads it through transformers, which converts older names",
            )
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        loaded: torch.Tensor = opened[path].get_tensor(tensor)
        return loaded

    return read


def _local_files(folder: Path) -> Callable[[str], str | None]:
    stored = read_weights(folder)
    return lambda tensor: str(stored[tensor].path) if tensor in stored else None


def _hub_files(name: str, revision: str) -> Callable[[str], str | None]:
    found = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, revision=revision, _raise_exceptions_for_missing_entries=False)
    if found is None:
        single = cached_file(name, SAFE_WEIGHTS_NAME, revision=revision)
        with safe_open(single, framework="pt") as file:
            names = set(file.keys())
        return lambda tensor: single if tensor in names else None
    file_of = read_json_object(Path(found))["weight_map"]
    return lambda tensor: cached_file(name, file_of[tensor], revision=revision) if tensor in file_of else None


def write_part(folder: Path, tensors: dict[str, torch.Tensor], *, part: int, parts: int) -> dict[str, str]:
    """Write one rank's tensors, and return the index of their names."""
    file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    return dict.fromkeys(tensors, file)


def write_index(folder: Path, weight_map: dict[str, str], *, total_bytes: int) -> None:
    """Write the index over the files of all ranks."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
