"""What presets, launches, checks, plans and checkpoints ask of an engine; one subclass each, without torch.

An engine's module has what the installed version of its library does: deepspeed 0.19.8, accelerate 1.15,
transformers 5.23, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from toolkit.engines.planned import Collective, EngineBuffers, ModelStates, PlannedBatch
from toolkit.files.documents import read_table
from toolkit.models.job_weights import FP32_BYTES, JobWeights, elements_of
from toolkit.models.optimizers import OPTIMIZERS, OptimizerSpec, UpdatedTensor
from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.parallel.layout import ParallelLayout

NO_OPTIMIZER: Mapping[str, Mapping[str, Sequence[str]]] = read_table(__file__, "no_optimizer")
SUB_GROUP = 1_000_000_000  # elements: DeepSpeed's default
PARTS = ("parameter", "gradient", "optimizer")
# accelerate's launcher sets one of these when its configuration file names an engine.
ENGINE_VARIABLES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


class Sharding(NamedTuple):
    """What ranks send under one sharding of an engine, and what others call it."""

    communication: str
    """Elements that a rank sends and receives, in multiples of the trained model's parameters P, without the ring's
    factor (N-1)/N: as the engine communicates, which docs/concepts/ddp-zero-fsdp2.md checks against counted runs."""
    fsdp1_name: str | None
    other_name: str | None  # the same in another engine


class Engine:
    """The facts of an engine, as those of a single process are; each engine states what differs."""

    name = "none"
    shardings: Mapping[str, Sharding] = {"replicate": Sharding("0", None, None)}
    state_bytes = (4, 4, 8)  # per parameter: itself, its own master weight, in fp32; its gradient; AdamW's states
    libraries: tuple[str, ...] = ()  # packages that ranks import beside the training script's
    needs: tuple[str, ...] = ()
    needs_to_offload: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()  # dimensions of parallelism that a preset's file may list
    max_world_size: int | None = None
    has_settings_file = False  # true if accelerate's YAML names a JSON with the engine's settings
    needs_launcher = True  # false where a plain `python` starts it
    launcher_options: tuple[str, ...] = ()  # options of `accelerate launch` that several nodes need
    compiles_ops = False
    keeps_masters = False  # true if trained weights are 16-bit copies, beside fp32 master weights of the engine's own
    launcher_decides_precision = True  # false where `bf16: false` of a script's arguments wins
    is_loaded_whole = True  # true if every rank loads the same checkpoint
    keeps_empty_groups = True  # false if parameter groups without parameters are dropped
    writes_universal = False  # true if a converted checkpoint has DeepSpeed's universal layout
    uses_fsdp_plugin = False  # true if accelerate's FSDP plugin shards the model
    uses_ddp = False
    chooses_accumulation = False  # gradients may wait for the last accumulation step either way, sharded or whole
    gathers_layers = False  # true if FSDP2 gathers each layer where it is used
    autocasts = True  # true if fp32 weights are cast where they are used
    has_flat_states = False  # true if gradients and optimizer states are flat partitions, which come and go in the step
    fragments_in_step = 0.0  # share of what a full fine-tune allocates in the step that is reserved beside it
    offloaded_optimizer: str | None = None  # the class, with its library, that replaces any that is offloaded
    host_adam_seconds = (0.22, 0.57, 1.5)
    """Of AdamW on the host, per 1e9 parameters on all cores of a node: at best, estimated, at worst. Source: table 4 of
    the ZeRO-Offload paper, 1.4 to 1.5 for torch's on two sockets (https://arxiv.org/abs/2101.06840)."""
    no_offloaded_optimizer: str | None = None  # why only AdamW can be offloaded
    needs_for_kernels: tuple[str, ...] = ()  # where a preset cannot run on a CPU
    plain_preset: str | None = None  # to name for the engine: without offload, and without parallelism of layers
    checkpoint_weights = 3  # size of a checkpoint in multiples of the fp32 weights: weights, momentum and variance
    script_keys: Mapping[str, Sequence[str]] = {}
    """Keys of the engine's block in accelerate's YAML that a script without its launcher can put in effect."""
    settings_option = ""  # option of `accelerate launch` for the engine's settings, a path or the text
    settings_variable = ""  # variable in which ranks find them
    rejects_best_of_weights = False  # true if the Trainer cannot load the best of checkpoints that hold only weights
    accelerate_uses_cpu = "true"  # what `ACCELERATE_USE_CPU` must be on a CPU for the engine to be in effect

    rejects_auto_find_batch_size = False
    """True if the Trainer raises for `auto_find_batch_size` with sharded parameters (transformers 5.23)."""
    upstream_bugs: Mapping[str, str] = {}  # by sharding: what does not work, and the upstream issue
    offloaded_gradient_bytes: Mapping[str, int] = {}  # by sharding, where the optimizer is offloaded
    no_comm_hook: str | None = "there is nothing to communicate"
    no_trace: str | None = None  # why it does not run on fake tensors
    no_async_save = "rank 0 writes its checkpoints alone, and no rank has a shard"
    fixed_accumulation: Mapping[str, str] = {
        "sharded": "every GPU holds all gradients, so a reduction in each accumulation step would save nothing"
    }

    @property
    def no_optimizer(self) -> Mapping[str, Sequence[str]]:
        """Return why an optimizer, by its name or library, does not work, and what does."""
        return NO_OPTIMIZER.get(self.name, {})

    def with_dimensions(self, names: Sequence[str]) -> Engine:
        """Return the engine that divides its ranks by these dimensions."""
        return self

    def preset_fields(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], parallel: Sequence[str]
    ) -> dict[str, Any]:
        """Return what accelerate's configuration and DeepSpeed's settings specify, as fields of a `PresetSpec`."""
        return {
            "sharding": "replicate",
            "min_world_size": 1,
            "offload_optimizer": None,
            "offload_param": None,
            "mixed_precision": config.get("mixed_precision") or "no",
        }

    def in_effect(self, world_size: int | None) -> str:
        """Return the name of the engine that wraps the model of so many processes on GPUs."""
        return self.name

    def sharded_parts(self, sharding: str) -> tuple[str, ...]:
        """Return the model states of which each rank holds only a shard between steps."""
        few = {"replicate": (), "shard_optimizer": ("optimizer",), "shard_grad_op": ("gradient", "optimizer")}
        return few.get(sharding, PARTS)

    def breaks_compiled_graphs(self, sharding: str) -> str | None:
        """Return why `torch_compile` does not pay, or None where it may."""
        return None

    def fits_any_world_size(self, *, universal: bool, sharding: str | None, one_number_each: bool) -> bool:
        """Return True where each rank finds its shard of a checkpoint by itself.

        In a distributed checkpoint it does if optimizer states have one fp32 number for each element of a parameter.
        """
        return sharding != "hybrid_shard" and one_number_each

    def expect_no_other_ranks(self) -> None:
        """Let it start in a rehearsal, where no other rank sends anything."""

    # -- what each rank must read

    def held_dtypes(self, settings: Mapping[str, Any] | None) -> dict[str, str]:
        """Return the dtypes of master weights and of AdamW's states (docs/concepts/numerics.md)."""
        return {"master_dtype": "float32", "optimizer_dtype": "float32"}

    def gradient_facts(
        self, *, compute_dtype: str, settings: Mapping[str, Any] | None, splits_sequences: bool
    ) -> dict[str, str]:
        """Return what is known of the dtypes of gradients and of their reduction (docs/concepts/numerics.md)."""
        return {"gradient_dtype": "float32", "reduce_dtype": "float32"}

    def largest_shard(self, shapes: Sequence[tuple[int, ...]], *, ranks: int) -> int:
        """Return the elements of the largest shard that one rank may hold, including padding."""
        raise NotImplementedError(f"{self.name} shards nothing")

    def persistence_threshold(self, zero_block: Mapping[str, Any], sharding: str, *, hidden_size: int | None) -> int:
        """Return the elements up to which a gathered parameter is never released."""
        return 0

    def launcher_environment(self, launch: Any, arguments: Any, defaults: Any) -> dict[str, str]:
        """Return what `accelerate launch` sets for its ranks, by the functions of `accelerate.commands.launch`."""
        return dict(launch.prepare_multi_gpu_env(arguments))

    # -- what puts it in effect in a script of one's own

    def training_arguments(self, config: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the `TrainingArguments` that the preset's files stand for."""
        return {}

    def variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of the launcher's environment that `TrainingArguments` cannot carry."""
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
            optimizer_bytes=state_bytes(optimizer, weights, elements_of, settings.trained_bytes),
        )

    def buffers(
        self, settings: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedBatch
    ) -> EngineBuffers:
        """Return what is allocated beside model states and activations: two weights that are cast, and the step."""
        casts = settings.trained_bytes == FP32_BYTES  # weights that are held in bf16 are not cast
        cast_weight = 2 * (weights.largest_trained if weights.adapters else weights.largest_linear) * casts
        return EngineBuffers(
            step_bytes=OPTIMIZERS[job.optim].step_copies * settings.trained_bytes * weights.num_trained,
            backward_bytes=cast_weight,
            first_layer_bytes=cast_weight,
        )

    def offloaded_blocks(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> Iterator[int]:
        """Yield the blocks of host memory that one rank allocates when its engine is built."""
        yield from ()

    def created_on_host(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> int:
        """Return what one rank allocates there in its first step, with its optimizer offloaded."""
        return 0

    def collectives(self, step: PlannedStep) -> Iterator[Collective]:
        """Yield what a rank sends in one optimizer step to hold its model states; docs/concepts/ddp-zero-fsdp2.md."""
        del step
        yield from ()

    def loads_once(self, settings: EngineSettings, weights: JobWeights) -> bool:
        """Return True if only the first rank of a node has the weights on the host before they are on the GPU."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Everything about an engine that decides bytes, once the world size is known. Bucket sizes are in elements."""

    traits: Engine  # what wraps the model; that of one process where DDP has nothing to reduce
    sharding: str
    shards_parameters: bool
    world_size: int
    shard_ranks: int  # ranks that share one copy of the model
    rank: int = 0
    element_bytes: int = 2  # bytes per element of a parameter in the compute dtype
    trained_bytes: int = 4  # per element of a trained weight and its gradient, outside of DeepSpeed
    master_bytes: int = 4  # per element of DeepSpeed's master weights
    state_bytes: int = 4  # per element of each state of an optimizer that follows them
    offload_optimizer: str | None = None
    offload_param: str | None = None
    reduce_bucket: int = 0  # size of each buffer that gradients are reduced in
    num_reduce_buckets: int = 1
    prefetch_bucket: int = 0
    persistence_threshold: int = 0
    reuse_distance: int = 0
    live_parameters: int = 0  # gathered ones, above which ZeRO-3 prefetches nothing
    sub_group: int = SUB_GROUP
    secondary_partition: int = 1  # ZeRO++ (hpZ): ranks of a node that share a second copy of the parameters; 1: none
    pins_memory: bool = True  # true if offloaded tensors are in page-locked memory
    layout: ParallelLayout | None = None  # how the ranks are divided; None for data parallelism alone
    sharded_at_load: bool = False  # transformers shards the model while it loads it, and reduces gradients in fp32

    def host_block(self, size: int) -> int:
        """Return what a block of offloaded tensors takes: torch rounds page-locked ones up to a power of two."""
        return 1 << (size - 1).bit_length() if self.pins_memory and size else size

    def ranks_sharing(self, tensor: Tensor) -> int:
        """Return how many ranks share a tensor, which tensor and expert parallelism have split already.

        Experts have a mesh of their own, and adapters are attached after transformers sharded the model.
        """
        if self.layout is None or not self.sharded_at_load:
            return self.shard_ranks
        if ".lora_" in tensor.name:
            return 1
        return self.layout.expert_shard if self.layout.ep > 1 and tensor.is_expert else self.shard_ranks

    @property
    def tp(self) -> int:
        """Ranks that each layer is split over."""
        return 1 if self.layout is None else self.layout.tp

    @property
    def unties_head(self) -> bool:
        """True if a tied head is gathered and reduced beside its embedding: transformers splits the two one by one."""
        return self.sharded_at_load and self.tp > 1 and self.traits.gathers_layers

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that hold a part of each sequence."""
        return 1 if self.layout is None else self.layout.cp * self.layout.sp

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of a gradient while it is reduced."""
        return 4 if self.sharded_at_load else self.element_bytes

    @property
    def num_groups(self) -> int:
        """Groups of ranks that communicate, each with a communicator of its own."""
        if self.world_size == 1:
            return 0
        if self.layout is None:
            return 2 if self.sharding == "hybrid_shard" else 1
        if not self.sharded_at_load and self.layout.pp == 1:  # model states are shared among all, sequences among some
            return 2
        return sum(degree > 1 for degree in self.layout.degrees().values())

    @property
    def autocasts(self) -> bool:
        """True if fp32 weights are cast where they are used; those of DeepSpeed and FSDP2 are bf16 by then."""
        return self.traits.autocasts and self.element_bytes < self.trained_bytes


class PlannedStep(Protocol):
    """What of a job on a model decides the collectives of an optimizer step."""

    @property
    def world_size(self) -> int: ...
    @property
    def engine(self) -> EngineSettings: ...
    @property
    def layout(self) -> ParallelLayout | None: ...
    @property
    def zero_block(self) -> Mapping[str, Any]: ...
    @property
    def job(self) -> PlannedBatch: ...
    @property
    def accumulation_steps(self) -> int: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def part(self) -> ModelShape: ...
    @property
    def weights(self) -> JobWeights: ...
    @property
    def trained(self) -> tuple[Layer, ...]: ...
    @property
    def largest_stage(self) -> int: ...


@lru_cache(maxsize=64)  # of whole tensors they are the same under every preset
def state_bytes(
    optimizer: OptimizerSpec, weights: JobWeights, share: Callable[[Tensor], int], trained_bytes: int
) -> int:
    """States of the rows of each tensor that a rank holds. torch's have the dtype of what they update."""
    outer = set(weights.shape.outer)  # hundreds of tensors are looked up in it

    def held(tensor: Tensor, count: int) -> UpdatedTensor:
        first, *others = tensor.shape or (1,)
        rows = first * share(tensor) // max(tensor.num_elements, 1)
        return UpdatedTensor(
            shape=(rows, *others),
            whole_rows=first if rows < first else 0,
            count=count,
            is_embedding=tensor.is_embedding,
            is_hidden_matrix=tensor.is_linear_weight and tensor not in outer,
            is_projected=bool(optimizer.targets)
            and tensor.is_linear_weight
            and not tensor.is_embedding
            and optimizer.projects(_module(tensor, outer)),
        )

    held_bytes = optimizer.state_bytes(held(tensor, count) for tensor, count in weights.trained)
    return held_bytes * trained_bytes // FP32_BYTES if optimizer.follows_weights else held_bytes


def _module(tensor: Tensor, outer: Set[Tensor]) -> str:
    """The name of a tensor's module: of the first layer, where it is in all of a kind."""
    name = tensor.name.removesuffix(".weight")
    return name if tensor in outer else f"model.layers.0.{name}"
