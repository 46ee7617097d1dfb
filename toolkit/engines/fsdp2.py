"""FSDP2: torch's `fully_shard`, as accelerate's plugin calls it, or transformers while it loads a model."""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from toolkit.engines.engine import PARTS, Engine, EngineSettings, PlannedStep, Sharding, state_bytes
from toolkit.engines.planned import Collective, EngineBuffers, ModelStates, PlannedBatch
from toolkit.models.job_weights import FP32_BITS, FP32_BYTES, JobWeights, TensorCounts, rows_share, total
from toolkit.models.optimizers import OPTIMIZERS, OptimizerSpec
from toolkit.models.shape import Layer, Tensor
from toolkit.parallel.layout import PARALLEL_KEY, ParallelLayout

# FSDP2 in the backward: parameters of the layer and of the next one, gradients, and the input of the reduce-scatter
# (torch, `_fsdp_param_group.py`, `post_backward` and `_prefetch_unshard`). Without resharding all parameters are there
# anyway, and are freed layer by layer; frozen layers have no gradients. Next to the first is an untied embedding.
PARAMETER_LAYERS = 2
FORWARD_LAYERS = 3  # the layer, the next one, and the buffer it is gathered through
# accelerate's key -> the key of `TrainingArguments.fsdp_config` (transformers 5.23, `_process_fsdp_args`), which
# silently drops every other one.
FSDP_CONFIG_KEYS = {
    f"fsdp_{name}": name
    for name in (
        *("version", "reshard_after_forward", "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap"),
        *("cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing"),
    )
} | {"fsdp_offload_params": "cpu_offload"}
# Only the environment carries these: accelerate's plugin reads them there, whoever constructs it.
FSDP_ENVIRONMENT_KEYS = ("fsdp_activation_checkpointing_offload", "fsdp_ignored_modules")


class FullyShard(Engine):
    """torch's `fully_shard`, whoever calls it. Gradients stay sharded between accumulation steps, or wait whole."""

    name = "fsdp2"
    shardings: Mapping[str, Sharding] = {
        "full_shard": Sharding("3 P per accumulation step", "FULL_SHARD", "ZeRO-3"),
        "shard_grad_op": Sharding(
            "2 P per accumulation step", "SHARD_GRAD_OP", "close to ZeRO-2, but parameters are shards between steps"
        ),
        "hybrid_shard": Sharding(
            "3 P, and 2 P/S between replicas, per accumulation step", "HYBRID_SHARD", "close to ZeRO++'s hpZ"
        ),
        "replicate": Sharding("2 P/T between replicas per accumulation step", None, None),
    }
    is_loaded_whole = False
    chooses_accumulation = True
    gathers_layers = True
    autocasts = False  # the weights are bf16 where they are used
    rejects_best_of_weights = True
    no_comm_hook = "FSDP2 reduce-scatters gradients itself, without DDP's buckets"

    def sharded_parts(self, sharding: str) -> tuple[str, ...]:
        """Return all parts, also without resharding: gathered parameters live from forward to backward only."""
        return PARTS if sharding == "shard_grad_op" else super().sharded_parts(sharding)

    def largest_shard(self, shapes: Sequence[tuple[int, ...]], *, ranks: int) -> int:
        """Return the elements of the first rank's rows.

        >>> Fsdp2().largest_shard([(5, 2)], ranks=2)
        6
        """
        return sum(rows_share(shape, ranks=ranks) for shape in shapes)

    # -- what a plan asks

    def model_states(self, settings: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec) -> ModelStates:
        # the place of this rank among those that share its copy of the model
        apart = settings.layout.ranks_per_batch if settings.layout is not None and settings.sharded_at_load else 1
        shard_rank = settings.rank // apart % settings.shard_ranks

        def share(tensor: Tensor) -> int:
            ranks = settings.ranks_sharing(tensor)
            return rows_share(tensor.shape, ranks=ranks, rank=shard_rank % ranks)

        trained, frozen = total(weights.trained, share), total(weights.frozen, share)
        in_fp32 = weights.base is not None and weights.base.bits == FP32_BITS
        frozen_bytes = FP32_BYTES if in_fp32 else settings.element_bytes
        return ModelStates(
            parameter_bytes=settings.trained_bytes * trained + frozen_bytes * frozen + weights.constant_bytes,
            gradient_bytes=settings.trained_bytes * trained,
            optimizer_bytes=state_bytes(optimizer, weights, share, settings.trained_bytes),
            persistent_bytes=weights.constant_bytes,
        )

    def buffers(
        self, settings: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedBatch
    ) -> EngineBuffers:
        """Return the buffers: layers are gathered one by one; norm and head stay from forward to backward."""
        element, reduced, is_tied = settings.element_bytes, settings.reduce_bytes, weights.shape.tied_embeddings
        layer = weights.largest_layer(settings.ranks_sharing)
        # accelerate's root unit: final norm and head
        # without an encoder of images, whose blocks are units of their own
        outer = sum(tensor.num_elements for tensor in weights.shape.outer if not tensor.in_tower)
        root = outer - (0 if is_tied else weights.embedding)
        root += weights.embedding if settings.unties_head and is_tied else 0
        resharded = settings.sharding != "shard_grad_op"
        unsharded = 0 if resharded else weights.num_trained + weights.num_frozen
        trained = 0 if weights.adapters else 1
        gradients = (element + reduced) * trained * layer  # and what the reduce-scatter takes
        # An untied embedding is reduced last and alone: its gradient, and both ends of the reduce-scatter.
        embedding = 0 if is_tied else trained * weights.embedding
        # The buffer that the last unit was gathered through stays until the next gather: the root unit's, or a layer's
        # if the head is tied.
        last_gathered = layer if is_tied else root
        return EngineBuffers(
            forward_bytes=element * ((root if resharded else unsharded) + last_gathered),
            # The buffer of an untied embedding stays until the first layer's is made (`wait_for_unshard`).
            start_bytes=element * (root + weights.embedding + layer) if resharded and not is_tied else 0,
            forward_layer_bytes=element * FORWARD_LAYERS * layer if resharded else 0,
            loss_bytes=element * (root if resharded else unsharded),
            backward_bytes=element * (unsharded + (PARAMETER_LAYERS * layer if resharded else 0)) + gradients,
            first_layer_bytes=element * (layer + (0 if is_tied else weights.embedding)) + gradients,
            end_bytes=(element + reduced) * embedding + reduced * (embedding // settings.shard_ranks) or element * root,
            accumulated_bytes=reduced * weights.num_trained if job.keeps_whole_gradients else 0,
            step_bytes=OPTIMIZERS[job.optim].step_copies * states.gradient_bytes,
            load_bytes=weights.largest_bytes(element),  # rank 0 broadcasts one complete tensor at a time
        )

    def offloaded_blocks(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> Iterator[int]:
        """Yield the shards, each page-locked (torch 2.13, `_fsdp_param.py`, lines 315 and 1045)."""
        if settings.offload_optimizer is not None:
            in_fp32 = weights.base is not None and weights.base.bits == FP32_BITS
            yield _on_host(settings, weights.trained, settings.trained_bytes)
            yield _on_host(settings, weights.frozen, FP32_BYTES if in_fp32 else settings.element_bytes)

    def created_on_host(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> int:
        """Return gradients, which are copied into page-locked blocks (`_fsdp_collectives.py`, line 730), and states."""
        return _on_host(settings, weights.trained, settings.trained_bytes) + states.optimizer_bytes

    def loads_once(self, settings: EngineSettings, weights: JobWeights) -> bool:
        """Return True: rank 0 loads and broadcasts one tensor at a time (`fsdp_cpu_ram_efficient_loading`)."""
        return True


class Fsdp2(FullyShard):
    """accelerate's FSDP plugin, version 2."""

    dimensions: tuple[str, ...] = ("dp_shard", "cp")
    uses_fsdp_plugin = True
    plain_preset = "fsdp2"
    script_keys: Mapping[str, Sequence[str]] = {"fsdp_config": (*FSDP_CONFIG_KEYS, *FSDP_ENVIRONMENT_KEYS)}

    def preset_fields(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], parallel: Sequence[str]
    ) -> dict[str, Any]:
        """Return the fields; the replicas of a hybrid mesh are in `parallelism_config`."""
        block = config.get("fsdp_config") or {}
        replicas = int((config.get("parallelism_config") or {}).get("parallelism_config_dp_replicate_size", 1))
        sharding = "full_shard" if block.get("fsdp_reshard_after_forward", True) else "shard_grad_op"
        offload = "cpu" if block.get("fsdp_offload_params") else None
        return super().preset_fields(config, settings, parallel) | {
            "sharding": "hybrid_shard" if replicas > 1 else sharding,
            "replicas": replicas,
            "min_world_size": 2 * replicas,
            "world_size_multiple": replicas,
            "offload_optimizer": offload,
            "offload_param": offload,
        }

    def gradient_facts(
        self, *, compute_dtype: str, settings: Mapping[str, Any] | None, splits_sequences: bool
    ) -> dict[str, str]:
        """Return fp32 gradients, which are reduced in the compute dtype."""
        return {"gradient_dtype": "float32", "reduce_dtype": compute_dtype}

    def collectives(self, step: PlannedStep) -> Iterator[Collective]:
        """Yield gathers of units in every accumulation step, and reductions of gradients in each or in the last.

        accelerate makes a unit of each layer, of an untied input embedding, and of the root: final norm, head, and a
        tied embedding, which stay gathered between forward and backward.
        """
        steps, element_bytes, ranks = step.accumulation_steps, step.engine.element_bytes, step.engine.shard_ranks
        replicas = step.world_size // ranks
        inside = partial(Collective, group_size=ranks, group="replica" if replicas > 1 else "all")
        weights, calls = step.weights, steps * len(step.weights.units)
        gathered = total((*weights.trained, *weights.frozen), partial(_padded, ranks=ranks))
        embedding = () if step.shape.tied_embeddings else tuple(t for t in step.shape.outer if t.is_embedding)[:1]
        regathered = gathered - _padded_rows(weights.units[-1:], ranks) + _padded_rows([embedding], ranks)
        yield inside("all_gather", "parameters in the forward", steps * element_bytes * gathered, calls)
        if step.engine.sharding != "shard_grad_op":
            yield inside("all_gather", "parameters in the backward", steps * element_bytes * regathered, calls)
        reductions = 1 if step.job.keeps_whole_gradients else steps
        payload = reductions * element_bytes * total(weights.trained, partial(_padded, ranks=ranks))
        calls = reductions * len(weights.units)
        yield inside("reduce_scatter", "gradients", payload, calls)
        between = partial(Collective, group_size=replicas, group="replicas")
        yield between("all_reduce", "gradients between replicas", payload // ranks, calls)

    def training_arguments(self, config: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
        block = config["fsdp_config"]
        given = {FSDP_CONFIG_KEYS[key]: value for key, value in block.items() if key in FSDP_CONFIG_KEYS}
        return {"fsdp": True, "fsdp_config": given}

    def variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        environment = {"ACCELERATE_USE_FSDP": "true"}
        for key, value in config["fsdp_config"].items():
            if key != PARALLEL_KEY:
                name = key.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS")
                environment[name] = str(value).lower() if isinstance(value, bool) else str(value)
        return environment


class ShardedAtLoad(FullyShard):
    """transformers shards the model while it loads it (`DistributedConfig`); accelerate only starts the ranks.

    The model's `distributed_config` says all, and gradients are reduced in fp32.
    """

    dimensions: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp", "ep")
    keeps_empty_groups = False

    def preset_fields(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], parallel: Sequence[str]
    ) -> dict[str, Any]:
        """Return the fields: the dimensions say how it shards."""
        sharding = "full_shard" if "dp_shard" in parallel else "replicate"
        if {"dp_replicate", "dp_shard"} <= set(parallel):
            sharding = "hybrid_shard"
        return super().preset_fields(config, settings, parallel) | {"sharding": sharding, "sharded_at_load": True}

    def collectives(self, step: PlannedStep) -> Iterator[Collective]:
        """Yield those of FSDP2 on what tensor and expert parallelism leave.

        Experts, dealt to `ep` ranks, have groups of their own. Ranks of one group are as far apart as the dimensions
        inside are large. Adapters are attached after the model was sharded, and are whole on each data-parallel rank.
        """
        layout = step.layout
        if layout is None:
            return
        if step.weights.adapters:
            group = "dp_shard" if layout.dp_replicate == 1 else "dp_replicate"
            ranks = partial(Collective, group_size=layout.data_parallel_size, group=group, stride=layout.tp)
            payload = 4 * step.weights.num_trained
            yield ranks("all_reduce", "gradients of adapters", payload, sum(map(len, step.trained)))
        yield from _at_load_group(step, layout, experts=False, ranks=layout.dp_shard, stride=layout.tp)
        if layout.ep > 1:
            yield from _at_load_group(step, layout, experts=True, ranks=layout.expert_shard, stride=layout.ep)


def _at_load_group(
    step: PlannedStep, layout: ParallelLayout, *, experts: bool, ranks: int, stride: int
) -> Iterator[Collective]:
    """Gathers in the compute dtype, and reductions in fp32, of the experts or of everything else."""

    def held(units: Iterable[Layer]) -> list[Layer]:
        apart = layout.ep > 1
        parts = (tuple(tensor for tensor in unit if (apart and tensor.is_expert) == experts) for unit in units)
        return [part for part in parts if part]

    layers, outer, steps = step.part.layers, step.part.outer, step.accumulation_steps
    sharers = partial(Collective, group_size=ranks, group="dp_shard", stride=stride)
    name, gradients = ("experts", "gradients of experts") if experts else ("parameters", "gradients")
    embedding = () if step.shape.tied_embeddings else outer[:1]
    tied_head = outer[:1] if step.engine.unties_head and step.shape.tied_embeddings else ()
    for phase, units in (("forward", held((*layers, outer, tied_head))), ("backward", held((*layers, embedding)))):
        payload = steps * step.engine.element_bytes * _padded_rows(units, ranks)
        yield sharers("all_gather", f"{name} in the {phase}", payload, steps * len(units))
    reduced = [] if step.weights.adapters else held((*step.trained, tied_head))
    reductions = 1 if step.job.keeps_whole_gradients else steps
    payload = reductions * step.engine.reduce_bytes * _padded_rows(reduced, ranks)
    calls = reductions * len(reduced)
    yield sharers("reduce_scatter", gradients, payload, calls)
    between = partial(Collective, group_size=layout.dp_replicate, group="replicas")
    yield between("all_reduce", f"{gradients} between replicas", payload // ranks, calls)


def _on_host(settings: EngineSettings, tensors: TensorCounts, element_bytes: int) -> int:
    def block(tensor: Tensor) -> int:
        return settings.host_block(element_bytes * rows_share(tensor.shape, ranks=settings.ranks_sharing(tensor)))

    return total(tensors, block)


def _padded_rows(units: Iterable[Layer], ranks: int) -> int:
    """Elements under FSDP2: the first dimension of each tensor is rounded up to a multiple of the ranks."""
    return sum(_padded(tensor, ranks) for unit in units for tensor in unit)


def _padded(tensor: Tensor, ranks: int) -> int:
    return ranks * rows_share(tensor.shape, ranks=ranks) if tensor.shape else 0


def uses_fsdp() -> bool:
    """Return True if the launcher chose FSDP for this process: what accelerate itself reads."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def enable_fsdp_on_cpu(*, for_any_script: bool = False) -> None:
    """Let accelerate run FSDP2 on a CPU, for rehearsals and tests; a run without FSDP is not affected.

    `for_any_script`: FSDP2 may also be switched on by a script's own `TrainingArguments` later.

    accelerate 1.15 turns MULTI_GPU (and other accelerators) into FSDP, but keeps MULTI_CPU although an FSDP plugin was
    given, and would silently run DDP. The run-time verification of each run checks that FSDP2 is in effect.
    """
    if not uses_fsdp() and not for_any_script:
        return
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = AcceleratorState.__init__
    if hasattr(original, "__wrapped__"):
        return  # patched already

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning memory needs a GPU
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init
