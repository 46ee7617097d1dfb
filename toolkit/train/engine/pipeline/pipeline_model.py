"""The stages that one rank holds, and all ranks of a pipeline together as one model.

Training goes through `pipeline_steps`. Called as a module, the pipeline computes one batch from the first stage to the
last without gradients: for evaluations, and for the live model's logits of fixed tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_outputs import CausalLMOutput

from toolkit.job.argument_fields import ModelArguments
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import PipelineSettings, divide_layers
from toolkit.train.engine.pipeline.stage import Stage, weights_reader, write_index, write_part
from toolkit.train.model.loading import from_pretrained


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRanks:
    """The ranks of this rank's pipeline, and those that hold the same stages in other pipelines."""

    mesh: Any
    pipeline: Any
    """The group of the ranks of one pipeline."""
    replicas: Any
    """The group of the ranks that hold the same stages."""
    ends: Any
    """The group of the first and the last rank of this pipeline; None on ranks between them."""
    rank: int
    """This rank's place in its pipeline."""
    size: int
    num_replicas: int
    replica: int

    @classmethod
    def of(cls, layout: ParallelLayout, device_type: str) -> PipelineRanks:
        """Make the process groups of a layout. Collective."""
        mesh = init_device_mesh(device_type, (layout.dp_replicate, layout.pp), mesh_dim_names=("dp_replicate", "pp"))
        ends = None
        for first in range(0, dist.get_world_size(), layout.pp):
            both = [first, first + layout.pp - 1]
            group = dist.new_group(both)
            ends = group if dist.get_rank() in both else ends
        return cls(
            mesh=mesh,
            pipeline=mesh.get_group("pp"),
            replicas=mesh.get_group("dp_replicate"),
            ends=ends,
            rank=int(mesh.get_local_rank("pp")),
            size=layout.pp,
            num_replicas=layout.dp_replicate,
            replica=int(mesh.get_local_rank("dp_replicate")),
        )

    def global_rank(self, rank: int) -> int:
        """Return the rank in the world of a rank of this pipeline."""
        return int(dist.get_global_rank(self.pipeline, rank))


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
        self.architecture = type(self.stages[0].decoder).__name__
        self.schedule_in_effect: str | None = None
        """The class of torch's schedule, once a step has run."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_input_embeddings(self) -> Any:
        """Return the embedding in the first rank, and None in the others."""
        return self.stages[0].decoder.model.embed_tokens

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Recompute the activations of each layer in backward."""
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
        options["position_ids"] = position_ids
        own = {stage.number: stage for stage in self.stages}
        shape = (*input_ids.shape, self.config.get_text_config().hidden_size)
        hidden = input_ids
        for number in range(self.settings.stages):
            if number not in own:
                continue
            if number > 0:
                hidden = torch.empty(shape, device=self.device)
                dist.recv(hidden, src=self._rank_of(number - 1), group=self.ranks.pipeline)
            hidden = own[number].compute(hidden, labels=labels, **options)
            if number < self.settings.stages - 1:
                dist.send(hidden.contiguous(), dst=self._rank_of(number + 1), group=self.ranks.pipeline)
        vocabulary = self.config.get_text_config().vocab_size
        if self.settings.stages - 1 not in own:
            hidden = torch.empty(() if labels is not None else (*input_ids.shape, vocabulary), device=self.device)
        result = hidden.float().contiguous()
        dist.broadcast(result, src=self._rank_of(self.settings.stages - 1), group=self.ranks.pipeline)
        return CausalLMOutput(logits=result) if labels is None else CausalLMOutput(loss=result)

    def _rank_of(self, stage: int) -> int:
        return self.ranks.global_rank(self.settings.rank_of(stage))

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter of the whole model in name order, one at a time. Collective."""
        own = self.own_weights()
        holders: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(holders, {name: tuple(p.shape) for name, p in own.items()}, group=self.ranks.pipeline)
        of_all = {name: (rank, shape) for rank, found in enumerate(holders) for name, shape in found.items()}
        for name, (rank, shape) in sorted(of_all.items()):
            weight = own[name].detach().clone() if rank == self.ranks.rank else torch.empty(shape, device=self.device)
            dist.broadcast(weight, src=self.ranks.global_rank(rank), group=self.ranks.pipeline)
            yield name, weight

    def num_params_of_all_stages(self) -> int:
        """Return the parameters of the whole model, a tied weight once. Collective."""
        number = torch.tensor(sum(weight.numel() for weight in self.own_weights().values()), device=self.device)
        dist.all_reduce(number, group=self.ranks.pipeline)
        return int(number)

    def save_pretrained(self, folder: Path, *, is_main_process: bool) -> None:
        """Write a model folder, each rank of the first pipeline one file of weights. Collective."""
        dist.barrier()  # the main process may have emptied the folder
        folder.mkdir(parents=True, exist_ok=True)
        own = self.own_weights()
        parts: list[Any] = [None] * self.ranks.size
        index = {} if self.ranks.replica else write_part(folder, own, part=self.ranks.rank, parts=self.ranks.size)
        total = sum(weight.nbytes for weight in own.values())
        dist.all_gather_object(parts, (index, total), group=self.ranks.pipeline)
        if is_main_process:
            weight_map = {name: file for found, _ in parts for name, file in found.items()}
            write_index(folder, weight_map, total_bytes=sum(total for _, total in parts))
            self.config.architectures, self.config.dtype = [self.architecture], "float32"
            self.config.save_pretrained(folder)
            self.generation_config.save_pretrained(folder)

    def load(self, name: str, revision: str, device: torch.device) -> None:
        """Load this rank's weights only, from a model folder or a hub id."""
        read = weights_reader(name, revision)
        for stage in self.stages:
            stage.load(read, device)


def load_pipeline(
    arguments: ModelArguments,
    settings: PipelineSettings,
    ranks: PipelineRanks,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    checkpoint: Path | None,
) -> PipelineModel:
    """Return the stages of this rank with their weights, from a checkpoint where the run resumes. Collective."""
    config = from_pretrained(AutoConfig, arguments)
    config.use_cache = False
    model = PipelineModel(config, settings, ranks, attention=arguments.attn_implementation)
    with contextlib.suppress(OSError):  # a model folder need not have one
        model.generation_config = GenerationConfig.from_pretrained(
            arguments.model_name_or_path, revision=arguments.revision
        )
    name, revision = str(arguments.model_name_or_path), arguments.revision
    model.load(*((name, revision) if checkpoint is None else (str(checkpoint), "main")), device)
    for stage in model.stages:
        stage.compute_dtype = compute_dtype
    model.to(device)
    return model
