"""One stage of a decoder: some of its layers, with the embedding in the first stage and the head in the last.

A stage keeps the forward of its architecture in transformers, which makes masks and positions itself: layers that
belong to other stages are taken out of the model before it has weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

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
        backbone.config = _config_of_layers(backbone.config, self.layers)
        if not self.is_first:
            backbone.embed_tokens = None
        if not self.is_last:
            backbone.norm, self.decoder.lm_head = torch.nn.Identity(), None
        elif self.tied:  # one tensor in the model's file; here each of the two ranks has a copy
            self.decoder.lm_head.weight = Parameter(self.decoder.lm_head.weight.detach())

    def stored_names(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each parameter here, and that of its tensor in a model folder."""
        for name, _ in self.decoder.named_parameters():
            yield name, EMBEDDING if self.tied and name == HEAD else name

    @property
    def tied_copy(self) -> Any:
        """The head's weight where it is a second copy of the embedding; None in any other stage."""
        return self.decoder.lm_head.weight if self.tied and self.is_last else None

    def load(self, read: Callable[[str], torch.Tensor], device: torch.device) -> None:
        """Load each parameter in fp32 with `read`, which takes its name in a model folder."""
        for name, stored in self.stored_names():
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


def _config_of_layers(config: Any, layers: range) -> Any:
    """The backbone loops over the layers that it has, and looks their types up by their place among them."""
    own = copy.copy(config)
    own.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        own.layer_types = [config.layer_types[index] for index in layers]
    return own
