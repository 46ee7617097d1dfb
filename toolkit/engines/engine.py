"""What presets, launches, checks, plans and checkpoints ask of an engine; one subclass each, without torch.

An engine's module has what the installed version of its library does: deepspeed 0.19.8, accelerate 1.15,
transformers 5.23, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.engines.planned import EngineBuffers, EngineSettings, ModelStates, PlannedBatch, state_bytes
from toolkit.models.job_weights import FP32_BYTES, JobWeights, elements_of
from toolkit.models.optimizers import OPTIMIZERS, OptimizerSpec
from toolkit.units import MIB

Values = dict[str, Any]
"""Values by the names that `attestation.json` gives them; docs/reference/run-folder.md says what each is.

One rank's reading lacks a key where the engine or the run has no such thing. `byte_limits` has the lowest and highest
bytes that the preset's sharding allows this rank, by part of the model states; `whole_bytes` those of the unsharded
part.
"""
# DDP first broadcasts all parameters through flat copies of this size, two at a time (torch, `distributed.py`,
# `broadcast_bucket_size`; `c10d/comm.cpp`, `broadcast_coalesced`).
BROADCAST_BYTES, BROADCASTS = 250 * MIB, 2
PARTS = ("parameter", "gradient", "optimizer")


class Sharding(NamedTuple):
    """What ranks send under one sharding of an engine, and what others call it."""

    communication: str
    """Elements that a rank sends and receives, in multiples of the trained model's parameters P, without the ring's
    factor (N-1)/N: as the engine communicates, which docs/concepts/communication.md checks against counted runs."""
    fsdp1_name: str | None
    other_name: str | None
    """The same in another engine."""


class Engine:
    """The facts of an engine, as those of a single process are; each engine states what differs."""

    name = "none"
    shardings: Mapping[str, Sharding] = {"replicate": Sharding("0", None, None)}
    state_bytes = (4, 4, 8)
    """Of parameter, gradient and AdamW's states, for each parameter: the fp32 parameter is its own master weight."""
    libraries: tuple[str, ...] = ()
    """Packages that ranks import beside the training script's."""
    needs: tuple[str, ...] = ()
    needs_to_offload: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()
    """Dimensions of parallelism that a preset's file may list."""
    max_world_size: int | None = None
    reads_deepspeed_settings = False
    needs_launcher = True
    """False where a plain `python` starts it."""
    launcher_options: tuple[str, ...] = ()
    """Options of `accelerate launch` that several nodes need."""
    compiles_ops = False
    keeps_masters = False
    """True if trained weights are 16-bit copies, beside fp32 master weights of the engine's own."""
    launcher_decides_precision = True
    """False where `bf16: false` of a script's arguments wins."""
    is_loaded_whole = True
    """True if every rank loads the same checkpoint."""
    keeps_empty_groups = True
    """False if parameter groups without parameters are dropped."""
    writes_universal = False
    """True if a converted checkpoint has DeepSpeed's universal layout."""
    uses_fsdp_plugin = False
    uses_ddp = False
    chooses_accumulation = False
    """True if gradients may wait for the last accumulation step either way, sharded or whole."""
    gathers_layers = False
    """True if FSDP2 gathers each layer where it is used."""
    autocasts = True
    """True if fp32 weights are cast where they are used."""
    has_flat_states = False
    """True if gradients and optimizer states are flat partitions, which come and go in the step."""
    fragments_in_step = 0.0
    """Share of what a full fine-tune allocates in the step that is reserved beside it."""
    can_be_traced = True
    """False if it reads values and addresses of its tensors, which fake ones have not."""
    replaces_offloaded_optimizer = False
    rejects_best_of_weights = False
    """True if the Trainer cannot load the best of checkpoints that hold only weights."""
    accelerate_uses_cpu = "true"
    """What `ACCELERATE_USE_CPU` must be on a CPU for the engine to be in effect."""

    no_comm_hook: str | None = "there is nothing to communicate"
    no_async_save = "rank 0 writes its checkpoints alone, and no rank has a shard"
    no_optimizer: Mapping[str, tuple[str, str]] = {}
    """Name or library of an optimizer -> why it does not work, and what does."""
    fixed_accumulation: Mapping[str, str] = {
        "sharded": "every GPU holds all gradients, so a reduction in each accumulation step would save nothing"
    }

    def with_dimensions(self, names: Sequence[str]) -> Engine:
        """Return the engine that divides its ranks by these dimensions."""
        del names
        return self

    def preset_fields(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], parallel: Sequence[str]
    ) -> dict[str, Any]:
        """Return what accelerate's configuration and DeepSpeed's settings specify, as fields of a `PresetSpec`."""
        del settings, parallel
        return {
            "sharding": "replicate",
            "min_world_size": 1,
            "offload_optimizer": None,
            "offload_param": None,
            "mixed_precision": config.get("mixed_precision") or "no",
        }

    def in_effect(self, world_size: int | None) -> str:
        """Return the name of the engine that wraps the model of so many processes on GPUs."""
        del world_size
        return self.name

    def sharded_parts(self, sharding: str) -> tuple[str, ...]:
        """Return the model states of which each rank holds only a shard between steps."""
        few = {"replicate": (), "shard_optimizer": ("optimizer",), "shard_grad_op": ("gradient", "optimizer")}
        return few.get(sharding, PARTS)

    def offloaded_gradient_bytes(self, sharding: str) -> int:
        """Return the bytes of a gradient whose optimizer is offloaded."""
        del sharding
        return self.state_bytes[1]

    def breaks_compiled_graphs(self, sharding: str) -> str | None:
        """Return why `torch_compile` does not pay, or None where it may."""
        del sharding
        return None

    def rejects_auto_find_batch_size(self, sharding: str) -> bool:
        """Return True if the Trainer raises for `auto_find_batch_size` (transformers 5.23, `Trainer.__init__`)."""
        del sharding
        return False

    def upstream_bugs(self, sharding: str) -> tuple[str, ...]:
        """Return what does not work, and the upstream issue."""
        del sharding
        return ()

    def fits_any_world_size(self, *, universal: bool, sharding: str | None, one_number_each: bool) -> bool:
        """Return True where each rank finds its shard of a checkpoint by itself.

        In a distributed checkpoint it does if optimizer states have one fp32 number for each element of a parameter.
        """
        del universal
        return sharding != "hybrid_shard" and one_number_each

    def expect_no_other_ranks(self) -> None:
        """Let it start in a rehearsal, where no other rank sends anything."""

    # -- what each rank must read

    def gradient_facts(
        self, *, compute_dtype: str, deepspeed_config: Mapping[str, Any] | None, splits_sequences: bool
    ) -> dict[str, str]:
        """Return what is known of the dtypes of gradients and of their reduction (docs/concepts/numerics.md)."""
        del compute_dtype, deepspeed_config, splits_sequences
        return {"gradient_dtype": "float32", "reduce_dtype": "float32"}

    def largest_shard(self, shapes: Sequence[tuple[int, ...]], *, ranks: int) -> int:
        """Return the elements of the largest shard that one rank may hold, including padding."""
        raise NotImplementedError(f"{self.name} shards nothing")

    def persistence_threshold(self, zero_block: Mapping[str, Any], sharding: str, *, hidden_size: int | None) -> int:
        """Return the elements up to which a gathered parameter is never released."""
        del zero_block, sharding, hidden_size
        return 0

    # -- what puts it in effect in a script of one's own

    def training_arguments(
        self, config: Mapping[str, Any], deepspeed_config: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the `TrainingArguments` that the preset's files stand for."""
        del config, deepspeed_config
        return {}

    def variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of the launcher's environment that `TrainingArguments` cannot carry."""
        del config
        return {}

    # -- what a plan asks

    def model_states(self, settings: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec) -> ModelStates:
        """Return the bytes that the rank holds between steps: here everything."""
        # Without FSDP2 the gradient of a split embedding is whole: other ranks' parts add to it. That of a tied one is
        # added to its head's, which is split: one H200 held vocabulary x hidden x 2 bytes less than a whole one.
        adds_parts = not weights.frozen and not weights.shape.tied_embeddings
        whole_embedding = (settings.tp - 1) * weights.embedding if adds_parts else 0
        return ModelStates(
            parameter_bytes=weights.held_bytes(settings.element_bytes, settings.trained_bytes),
            gradient_bytes=settings.trained_bytes * (weights.num_trained + whole_embedding),
            optimizer_bytes=state_bytes(optimizer, weights, elements_of, settings),
        )

    def buffers(
        self, settings: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedBatch
    ) -> EngineBuffers:
        """Return what is allocated beside model states and activations."""
        trained_bytes = settings.trained_bytes
        buckets = trained_bytes * weights.num_trained if self.uses_ddp else 0
        # As views of them, gradients take nothing of their own, but for those of earlier accumulation steps.
        views, accumulates = self.uses_ddp and job.has_bucket_views, job.gradient_accumulation_steps > 1
        casts = settings.trained_bytes == FP32_BYTES  # weights that are held in bf16 are not cast
        cast_weight = 2 * (weights.largest_trained if weights.adapters else weights.largest_linear) * casts
        # A tied head's gradient waits outside of its bucket until the embedding's is added.
        tied = views and weights.shape.tied_embeddings and not weights.adapters
        head = trained_bytes * weights.embedding if tied else 0
        return EngineBuffers(
            lasting_bytes=0 if views else buckets,
            waiting_bytes=buckets if views and accumulates else 0,
            step_bytes=OPTIMIZERS[job.optim].step_copies * trained_bytes * weights.num_trained,
            backward_bytes=cast_weight + head,
            first_layer_bytes=cast_weight + head,
            load_bytes=min(states.parameter_bytes, BROADCASTS * BROADCAST_BYTES) if self.uses_ddp else 0,
        )

    def offloaded_blocks(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> Iterator[int]:
        """Yield the blocks of host memory that one rank allocates when its engine is built."""
        del settings, weights, states
        yield from ()

    def created_on_host(self, states: ModelStates) -> int:
        """Return what one rank allocates there in its first step, with its optimizer offloaded."""
        del states
        return 0

    def loads_once(self, settings: EngineSettings, weights: JobWeights) -> bool:
        """Return True if only the first rank of a node has the weights on the host before they are on the GPU."""
        del settings, weights
        return False
