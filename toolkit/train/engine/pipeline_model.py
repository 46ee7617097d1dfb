"""The stages of a decoder that one rank holds, and all ranks of a pipeline together as one model.

A stage keeps the forward of its architecture in transformers, which makes masks and positions itself: layers that
belong to other stages are taken out of the model before it has weights. Each rank reads the weights of its stages only.
Training goes through `PipelineTrainer`; called as a module, the pipeline computes one batch without gradients.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from toolkit.errors import ToolkitError
from toolkit.files.model_weights import read_weights
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import PipelineSettings, divide_layers
from toolkit.record.folder import write_json
from toolkit.train.arguments import Arguments
from toolkit.train.model.loading import from_pretrained

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Stage(torch.nn.Module):  # type: ignore[misc]
    """Some layers of a decoder. It takes token ids in the first stage and hidden states in the others."""

    def __init__(self, config: Any, layers: range, *, number: int, stages: int, attention: str | None) -> None:
        super().__init__()
        self.number = number
        self.is_first, self.is_last = number == 0, number == stages - 1
        self.tied = bool(config.get_text_config().tie_word_embeddings)
        extra = {} if attention is None else {"attn_implementation": attention}
        with init_empty_weights(include_buffers=False):
            self.decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **extra)
        backbone = self.decoder.model
        held, backbone.layers = backbone.layers, torch.nn.ModuleList()
        for index in layers:  # under their own numbers, by which weights are named
            backbone.layers.add_module(str(index), held[index])
        # The backbone loops over the layers that it has, and looks their types up by their place among them.
        backbone.config = copy.copy(backbone.config)
        backbone.config.num_hidden_layers = len(layers)
        if getattr(backbone.config, "layer_types", None):
            backbone.config.layer_types = [backbone.config.layer_types[index] for index in layers]
        if not self.is_first:
            backbone.embed_tokens = None
        if not self.is_last:
            backbone.norm, self.decoder.lm_head = torch.nn.Identity(), None
        elif self.tied:  # one tensor in the model's file; here each of the two ranks has a copy
            self.decoder.lm_head.weight = Parameter(self.decoder.lm_head.weight.detach())
        self.compute_dtype = torch.float32
        self.micro_batches: list[dict[str, Any]] = []  # mask, positions and labels of each of the step's

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
        return self.compute(inputs, **self.micro_batches[int(micro_batch)])

    def compute(self, inputs: torch.Tensor, *, labels: Any = None, **options: Any) -> torch.Tensor:
        """Return hidden states; in the last stage the loss with `labels`, and logits without."""
        given = {"input_ids" if self.is_first else "inputs_embeds": inputs, "use_cache": False, **options}
        half = self.compute_dtype != torch.float32
        with torch.autocast(inputs.device.type, dtype=self.compute_dtype, enabled=half):
            if self.is_last:
                output = self.decoder(**given, labels=labels)
                return output.logits if labels is None else output.loss
            given.pop("num_items_in_batch", None)
            return self.decoder.model(**given).last_hidden_state


def weights_reader(name: str, revision: str) -> Callable[[str], torch.Tensor]:
    """Return a function that reads one tensor by name, from a local folder or a hub id."""
    patterns = ["*.safetensors", "*.json"]
    is_local = Path(name).is_dir()
    folder = Path(name) if is_local else Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    stored = read_weights(folder)
    opened: Callable[[Path], Any] = cache(partial(safe_open, framework="pt"))

    def read(tensor: str) -> torch.Tensor:
        if tensor not in stored:
            what = f"model {name!r} has no tensor {tensor!r}, which a stage of the pipeline needs"
            raise ToolkitError(what, hint="`--preset fsdp2` loads it through transformers, which converts older names")
        return opened(stored[tensor].path).get_tensor(tensor)

    return read


class PipelineRanks:
    """The process groups of a layout: this rank's pipeline, and the ranks that hold the same stages in others."""

    def __init__(self, layout: ParallelLayout, device_type: str) -> None:
        self.layout, sizes = layout, (layout.dp_replicate, layout.pp)
        self.mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("dp_replicate", "pp"))
        self.pipeline, self.replicas = self.mesh.get_group("pp"), self.mesh.get_group("dp_replicate")
        self.rank, self.replica = self.mesh.get_local_rank("pp"), self.mesh.get_local_rank("dp_replicate")
        self.ends: Any = None  # the group of the first and the last rank of this pipeline; None on ranks between them
        for first in range(0, dist.get_world_size(), layout.pp):
            both = [first, first + layout.pp - 1]
            group = dist.new_group(both)  # every rank takes part in making each group
            self.ends = group if dist.get_rank() in both else self.ends


class PipelineModel(torch.nn.Module):  # type: ignore[misc]
    """This rank's stages. `forward`, `save_pretrained` and `whole_weights` are collective."""

    accepts_loss_kwargs = True
    loss_type = "ForCausalLM"  # the Trainer counts the tokens of labels that are shifted

    def __init__(self, config: Any, settings: PipelineSettings, ranks: PipelineRanks, *, attention: str | None) -> None:
        super().__init__()
        self.config, self.settings, self.ranks = config, settings, ranks
        self.generation_config = GenerationConfig.from_model_config(config)
        layers = divide_layers(config.get_text_config().num_hidden_layers, settings.stages)
        self.stages = torch.nn.ModuleList(
            Stage(config, layers[number], number=number, stages=settings.stages, attention=attention)
            for number in settings.stages_of(ranks.rank)
        )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_input_embeddings(self) -> Any:
        """Return the embedding in the first rank, and None in the others."""
        return self.stages[0].decoder.model.embed_tokens

    def activation_checkpointing_enable(self, **options: Any) -> None:
        for stage in self.stages:
            stage.decoder.activation_checkpointing_enable(**options)

    @property
    def tied_weight(self) -> Any:
        """This rank's copy of a weight that embedding and head share; None on other ranks, or if they share none."""
        first, last = self.stages[0], self.stages[-1]
        if not first.tied:
            return None
        return first.decoder.model.embed_tokens.weight if first.is_first else last.tied_copy

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters under the names of the whole model, a tied weight on the first rank only."""
        return {
            name: parameter
            for stage in self.stages
            for name, parameter in stage.decoder.named_parameters()
            if parameter is not stage.tied_copy
        }

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Return the loss of a batch with `labels`, and its logits without, on every rank of the pipeline."""
        sizes, group = self.config.get_text_config(), self.ranks.pipeline

        def rank_of(stage: int) -> int:
            return int(dist.get_global_rank(group, self.settings.rank_of(stage)))

        result = input_ids
        for stage in self.stages:
            if not stage.is_first:
                result = torch.empty((*input_ids.shape, sizes.hidden_size), device=self.device)
                dist.recv(result, src=rank_of(stage.number - 1), group=group)
            result = stage.compute(result, labels=labels, position_ids=position_ids, **options)
            if not stage.is_last:
                dist.send(result.contiguous(), dst=rank_of(stage.number + 1), group=group)
        if not self.stages[-1].is_last:
            shape = () if labels is not None else (*input_ids.shape, sizes.vocab_size)
            result = torch.empty(shape, device=self.device)
        result = result.float().contiguous()
        dist.broadcast(result, src=rank_of(self.settings.stages - 1), group=group)
        return CausalLMOutput(logits=result) if labels is None else CausalLMOutput(loss=result)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter of the whole model in name order, one at a time. Collective."""
        own, group = self.own_weights(), self.ranks.pipeline
        holders = self._gathered({name: tuple(parameter.shape) for name, parameter in own.items()})
        of_all = {name: (rank, shape) for rank, found in enumerate(holders) for name, shape in found.items()}
        for name, (rank, shape) in sorted(of_all.items()):
            weight = own[name].detach().clone() if rank == self.ranks.rank else torch.empty(shape, device=self.device)
            dist.broadcast(weight, src=dist.get_global_rank(group, rank), group=group)
            yield name, weight

    def num_params_of_all_stages(self) -> int:
        """Return the number of parameters of the whole model, a tied weight once. Collective."""
        return sum(self._gathered(sum(weight.numel() for weight in self.own_weights().values())))

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.settings.ranks
        dist.all_gather_object(values, value, group=self.ranks.pipeline)
        return values

    def save_pretrained(self, folder: Path, *, is_main_process: bool) -> None:
        """Write a model folder with an index, each rank of the first pipeline one file of weights. Collective."""
        folder.mkdir(parents=True, exist_ok=True)
        own = {name: weight.detach().contiguous() for name, weight in self.own_weights().items()}
        file = f"model-{self.ranks.rank + 1:05d}-of-{self.settings.ranks:05d}.safetensors"
        if self.ranks.replica == 0:
            save_file(own, folder / file, {"format": "pt"})
        parts = self._gathered((dict.fromkeys(own, file), sum(weight.nbytes for weight in own.values())))
        if is_main_process:
            weight_map = {name: file for names, _ in parts for name, file in names.items()}
            size = {"total_size": sum(total for _, total in parts)}
            index = {"metadata": size, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
            self.config.architectures, self.config.dtype = [type(self.stages[0].decoder).__name__], "float32"
            self.config.save_pretrained(folder)
            self.generation_config.save_pretrained(folder)

    def load(self, name: str, revision: str, device: torch.device) -> None:
        """Load this rank's weights only, from a model folder or a hub id."""
        read = weights_reader(name, revision)
        for stage in self.stages:
            stage.load(read, device)


def load_pipeline(arguments: Arguments, *, compute_dtype: torch.dtype, checkpoint: Path | None) -> PipelineModel:
    """Return the stages of this rank with their weights, from a checkpoint where the run resumes. Collective."""
    job, device, layout, settings = arguments.job, arguments.training.device, arguments.layout, arguments.pipeline
    assert layout is not None
    assert settings is not None
    config = from_pretrained(AutoConfig, job)
    config.use_cache = False
    model = PipelineModel(config, settings, PipelineRanks(layout, device.type), attention=job.attn_implementation)
    with contextlib.suppress(OSError):  # a model folder need not have one
        model.generation_config = GenerationConfig.from_pretrained(job.model_name_or_path, revision=job.revision)
    source = (str(job.model_name_or_path), job.revision) if checkpoint is None else (str(checkpoint), "main")
    model.load(*source, device)
    for stage in model.stages:
        stage.compute_dtype = compute_dtype
    return model.to(device)  # type: ignore[no-any-return]
