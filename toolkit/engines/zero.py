"""DeepSpeed's ZeRO: flat partitions of optimizer states, gradients and parameters, with offload."""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from toolkit.engines.engine import Engine, EngineSettings, PlannedStep, Sharding
from toolkit.engines.planned import ADAM_STATES, Collective, EngineBuffers, ModelStates, PlannedBatch, round_up
from toolkit.models.job_weights import FP32_BYTES, JobWeights, elements_of, total
from toolkit.models.optimizers import OPTIMIZERS, OptimizerSpec, UpdatedTensor
from toolkit.models.shape import Tensor

SHARDING_OF_STAGE = {0: "replicate", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
# accelerate fills `"nvme_path": "auto"` of a block from these; `accelerate launch` sets neither from its own flags.
NVME_VARIABLES = {
    "offload_optimizer": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
}
COLLECTIVES_FOLDER = "deepspeed/comm"
LOADED_OP = r"DeepSpeed deepspeed\.\S+ built successfully"  # a line of its log
# What its checkpoints hold beside tensors and plain containers.
CHECKPOINT_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SHARDS_PARAMETERS = ("full_shard", "hybrid_shard")
PERSISTENCE_THRESHOLD = 100_000  # elements: DeepSpeed's default (`runtime/zero/config.py`)
# Of its `bf16` block: master weights and gradients in bf16, and the states of the optimizer with them.
BF16_MASTERS, BF16_STATES = "bf16_master_weights_and_grads", "bf16_optimizer_states"

PARAMETER_GROUPS = 2  # the Trainer's: with and without weight decay
NORM_BYTES = 8  # gradient norms are in fp64, one tensor at a time (`zero/utils.py`, `get_norm_dtype`)


def nvme_blocks(zero_block: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the offload blocks of a `zero_optimization` block whose device is NVMe."""
    blocks = {name: zero_block.get(name) or {} for name in NVME_VARIABLES}
    return {name: block for name, block in blocks.items() if block.get("device") == "nvme"}


def bf16_keys(settings: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """Return True for master weights in bf16, and for optimizer states in bf16."""
    block = (settings or {}).get("bf16") or {}
    return bool(block.get(BF16_MASTERS)), bool(block.get(BF16_STATES))


def why_no_bf16_states(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what DeepSpeed 0.19.8 refuses of these keys, and what to write; None where it takes them.

    (`_do_error_check` in runtime/config.py, `_configure_master_weights` in runtime/base_optimizer.py.) accelerate makes
    a CPU Adam with fp32 states; DeepSpeed makes one with bf16 states from an `optimizer` block of its own.
    """
    masters, states = bf16_keys(settings)
    zero = settings.get("zero_optimization") or {}
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if states and not masters:
        return f"{BF16_STATES} needs {BF16_MASTERS}", f"add `{BF16_MASTERS}: true`"
    if masters and not zero.get("stage"):
        return f"{BF16_MASTERS} needs ZeRO stage 1, 2 or 3", "`stage: 2`"
    if masters and not states and not offloads:
        return f"{BF16_MASTERS} needs {BF16_STATES}, or offload_optimizer", f"add `{BF16_STATES}: true`"
    if states and offloads and not settings.get("optimizer"):
        return (
            f"{BF16_STATES} with offload_optimizer needs an `optimizer` block: accelerate's CPU Adam has fp32 states",
            f"remove {BF16_STATES}, or name AdamW in an `optimizer` block of the JSON",
        )
    return None


def partition_share(elements: int, *, ranks: int) -> int:
    """Return the elements of a tensor that every rank holds under ZeRO-3."""
    return -(-elements // ranks)


class Zero(Engine):
    """DeepSpeed with a stage of ZeRO; stage 0 replicates, as DDP does."""

    name = "deepspeed"
    shardings: Mapping[str, Sharding] = {
        "replicate": Sharding("2 P per step", "NO_SHARD", "DDP"),
        "shard_optimizer": Sharding("3 P per step", None, None),
        "shard_grad_op": Sharding(
            "2 P per accumulation step, 1 P per step", "SHARD_GRAD_OP", "close to FSDP2 without resharding"
        ),
        "full_shard": Sharding("2 to 3 P per accumulation step", "FULL_SHARD", "FSDP2"),
        # Of a rank on nodes of 8 GPUs, as `_zero3_collectives` counts; its paper: https://arxiv.org/abs/2306.10209.
        "hybrid_shard": Sharding(
            "0.5 P per step, P/32 per accumulation step across nodes", "close to HYBRID_SHARD", "ZeRO++ (hpZ, qwZ, qgZ)"
        ),
    }
    # A bf16 parameter, and an fp32 master weight, momentum and variance (ZeRO paper, section 3.1,
    # https://arxiv.org/abs/1910.02054).
    state_bytes = (2, 2, 12)
    dimensions: tuple[str, ...] = ("dp_shard", "sp")
    has_settings_file = True
    libraries = ("deepspeed", "ninja")
    needs = ("deepspeed",)
    needs_to_offload = ("a C++ compiler, for DeepSpeed's CPU Adam",)
    # accelerate's default is pdsh, which needs a hostfile; without one, each node would train alone.
    launcher_options = ("--deepspeed_multinode_launcher standard",)
    compiles_ops = True
    keeps_masters = True
    launcher_decides_precision = False
    is_loaded_whole = False
    keeps_empty_groups = False
    writes_universal = True
    autocasts = False  # weights are in the compute dtype
    has_flat_states = True
    host_adam_seconds = (0.22, 0.24, 0.52)  # of DeepSpeed's CPU Adam, same table: 0.22 to 0.26
    # Flat partitions, their fp32 copies and buckets come and go beside states that stay. Six jobs on one H200 reserved
    # 3.7 to 10.4 % more than without this.
    fragments_in_step = 0.05
    offloaded_optimizer = "deepspeed.DeepSpeedCPUAdam"
    no_offloaded_optimizer = "accelerate replaces an offloaded optimizer by DeepSpeed's CPU Adam"
    needs_for_kernels = ("a GPU and nvcc, for DeepSpeed's CUDA quantiser",)
    plain_preset = "zero3"
    checkpoint_weights = 5  # also fp32 master weights, and (ZeRO-1 and ZeRO-2) its own copy beside the safetensors
    script_keys: Mapping[str, Sequence[str]] = {"deepspeed_config": ("deepspeed_config_file",)}
    settings_option = "--deepspeed_config_file"
    settings_variable = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    no_trace = "DeepSpeed reads the values and addresses of its tensors"
    rejects_best_of_weights = True
    accelerate_uses_cpu = "false"  # with "true", accelerate turns a DeepSpeed run into DDP
    rejects_auto_find_batch_size = True
    upstream_bugs: Mapping[str, str] = {
        "shard_grad_op": "`overlap_comm`, which can give wrong gradients (DeepSpeed#7188, #5294, #8061)",
        **dict.fromkeys(
            SHARDS_PARAMETERS,
            "the Trainer's own save of LoRA adapters, which can be empty (trl#4416, peft#2892, DeepSpeed#7900)",
        ),
    }
    # ZeRO-2 keeps the fp32 gradients of its master weights, and ZeRO-3 a bf16 partition and an fp32 copy of it
    # (`stage_1_and_2.py` line 940, `stage3.py` lines 791 and 1342).
    offloaded_gradient_bytes: Mapping[str, int] = {"shard_grad_op": 4, "full_shard": 6, "hybrid_shard": 6}
    no_comm_hook = "DeepSpeed reduces gradients itself"
    no_async_save = "DeepSpeed writes its checkpoints itself"
    fixed_accumulation: Mapping[str, str] = {
        "sharded": "below ZeRO-2, gradients are reduced in the last accumulation step only",
        "whole": "ZeRO-2 and ZeRO-3 reduce and shard gradients in every accumulation step",
    }

    def preset_fields(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], parallel: Sequence[str]
    ) -> dict[str, Any]:
        zero = settings.get("zero_optimization", {})
        # ZeRO++ keeps a second copy of the parameters within groups of this many ranks; 1 means none.
        hpz = int(zero.get("zero_hpz_partition_size", 1))
        quantized = [key for key in QUANTIZED_KEYS if zero.get(key)]
        devices = {block: (zero.get(block) or {}).get("device", "none") for block in NVME_VARIABLES}
        # `auto` in a precision block leaves the value to `TrainingArguments`, but still names the precision.
        enabled = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled") in (True, "auto")]
        return super().preset_fields(config, settings, parallel) | {
            "sharding": "hybrid_shard" if hpz > 1 else SHARDING_OF_STAGE[zero.get("stage", 0)],
            "min_world_size": hpz,
            "world_size_multiple": hpz,
            "needs_gpu": f"{quantized[0]} runs CUDA kernels of DeepSpeed's" if quantized else None,
            "mixed_precision": enabled[0] if enabled else "no",
            **{block: None if device == "none" else device for block, device in devices.items()},
        }

    def breaks_compiled_graphs(self, sharding: str) -> str | None:
        """Return why ZeRO-3 is not compiled: docs/evidence/speed-and-memory.md has 15 graph breaks in two layers."""
        if sharding not in SHARDS_PARAMETERS:
            return None
        return "ZeRO-3 gathers weights in hooks, so that the compiler's graph ends at each linear layer"

    def fits_any_world_size(self, *, universal: bool, sharding: str | None, one_number_each: bool) -> bool:
        return universal

    def expect_no_other_ranks(self) -> None:
        from toolkit.engines import zero_live

        zero_live.expect_no_other_ranks()

    def held_dtypes(self, settings: Mapping[str, Any] | None) -> dict[str, str]:
        names = ("master_dtype", "optimizer_dtype")
        dtypes = ("bfloat16" if is_bf16 else "float32" for is_bf16 in bf16_keys(settings))
        return dict(zip(names, dtypes, strict=True))

    def gradient_facts(
        self, *, compute_dtype: str, settings: Mapping[str, Any] | None, splits_sequences: bool
    ) -> dict[str, str]:
        """Return the dtype of the reduction; stage and offload decide which buffer holds a gradient.

        The parts of a sequence are summed in fp32, whatever the compute dtype.
        """
        config = settings or {}
        if splits_sequences:
            sent = config.get("seq_parallel_communication_data_type", "fp32")
        else:
            sent = config.get("communication_data_type")
        return {"reduce_dtype": DTYPES.get(str(sent).lower(), compute_dtype)}

    def largest_shard(self, shapes: Sequence[tuple[int, ...]], *, ranks: int) -> int:
        """Return the elements of the largest flat partition, padded for each parameter group."""
        sizes = [math.prod(shape) for shape in shapes]
        flat = math.ceil(sum(sizes) / ranks) + PARAMETER_GROUPS * 2 * ranks
        return max(flat, sum(partition_share(size, ranks=ranks) for size in sizes))

    def persistence_threshold(self, zero_block: Mapping[str, Any], sharding: str, *, hidden_size: int | None) -> int:
        """Return the elements up to which ZeRO-3 never releases a gathered parameter.

        `auto` is 10 x the hidden size, which the libraries read from the model's configuration (transformers 5,
        `integrations/deepspeed.py`).
        """
        if sharding not in SHARDS_PARAMETERS:
            return 0
        value = zero_block.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
        return 10 * (hidden_size or 0) if value == "auto" else int(value)

    def launcher_environment(self, launch: Any, arguments: Any, defaults: Any) -> dict[str, str]:
        # launch_command sets this field before it builds the environment
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return dict(launch.prepare_deepspeed_cmd_env(arguments)[1])

    def training_arguments(self, config: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"deepspeed": copy.deepcopy(dict(settings or {}))}  # which its reader may change

    def variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        return {"ACCELERATE_USE_DEEPSPEED": "true"}

    # -- what a plan asks

    def model_states(self, settings: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec) -> ModelStates:
        """Return the bytes of the rank's flat partitions, or of its part of each tensor."""
        return (_zero3_states if settings.shards_parameters else _zero12_states)(settings, weights, optimizer)

    def buffers(
        self, settings: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedBatch
    ) -> EngineBuffers:
        """Return buckets, what is gathered, and what the step flattens."""
        copies = OPTIMIZERS[job.optim].step_copies
        return (_zero3_buffers if settings.shards_parameters else _zero12_buffers)(settings, weights, copies)

    def offloaded_blocks(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> Iterator[int]:
        """Yield master weights, gradients, and what passes between host and GPU; page-locked blocks are rounded.

        ZeRO-3 locks the fp32 gradients of each sub-group, and no master weights (`stage3.py`, lines 1340 and 1158); the
        partition of each tensor (`partition_parameters.py`, line 1843), whose block torch keeps when the trained ones
        move to flat buffers, and those (`stage3.py`, line 906).
        """
        if settings.offload_optimizer is None:
            return
        elements, master, element = optimizer_elements(settings, states), settings.master_bytes, settings.element_bytes
        shards, in_host = settings.shards_parameters, settings.offload_optimizer == "cpu"

        def partition(tensor: Tensor) -> int:
            return settings.host_block(element * partition_share(tensor.num_elements, ranks=settings.world_size))

        if in_host:
            yield master * elements if shards else settings.host_block(master * elements)  # master weights
        groups = _sub_groups(settings, weights) if in_host and shards else [elements]
        yield from (settings.host_block(master * group) for group in groups)  # gradients as the optimizer reads them
        # Updated parameters on their way back to the GPU, or ZeRO-3's partition of the gradients.
        yield settings.host_block(element * elements)
        if not shards:
            yield settings.host_block(element * weights.largest_trained)
        elif settings.offload_param == "cpu":
            yield settings.host_block(element * elements)
            yield total(weights.frozen, partition) + (total(weights.trained, partition) if settings.pins_memory else 0)
        if settings.offload_optimizer == "nvme":
            # Buffers that a sub-group is read into (docs/how-to/optimizers.md).
            yield 4 * master * min(elements, settings.sub_group)

    def created_on_host(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> int:
        """Return Adam's states, which DeepSpeed too creates in the first step (`initialize_optimizer_states`)."""
        return ADAM_STATES * settings.state_bytes * optimizer_elements(settings, states)

    def collectives(self, step: PlannedStep) -> Iterator[Collective]:
        """Yield reductions and gathers of flat partitions, or of tensors one by one."""
        return (_zero3_collectives if step.engine.shards_parameters else _zero12_collectives)(step)

    def loads_once(self, settings: EngineSettings, weights: JobWeights) -> bool:
        """Return True where ZeRO-3 shards 4-bit weights: rank 0 quantizes all of them first (`four_bit.py`)."""
        return bool(settings.shards_parameters and weights.in_4bit)


def optimizer_elements(settings: EngineSettings, states: ModelStates) -> int:
    """Return the elements of a rank's optimizer partition."""
    return states.optimizer_bytes // (ADAM_STATES * settings.state_bytes + settings.master_bytes)


def _sub_groups(settings: EngineSettings, weights: JobWeights) -> Iterator[int]:
    """Elements of one rank's sub-groups: each ends with the tensor that fills it (`_create_fp16_sub_groups`)."""
    held = 0
    for tensor, count in weights.trained:
        for _ in range(count):
            held += partition_share(tensor.num_elements, ranks=settings.world_size)
            if held >= settings.sub_group:
                yield held
                held = 0
    if held:
        yield held


def _zero12_states(settings: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec) -> ModelStates:
    groups = [group for group in weights.groups(elements_of) if group]
    whole = settings.sharding == "replicate"
    ranks = settings.world_size
    partitions = groups if whole else [round_up(group, 2 * ranks) // ranks for group in groups]
    share = sum(partitions)
    gradient = settings.element_bytes * weights.num_trained
    if settings.sharding == "shard_grad_op":
        gradient = (settings.master_bytes if settings.offload_optimizer else settings.element_bytes) * share
    return ModelStates(
        parameter_bytes=settings.element_bytes * (weights.num_trained + weights.num_frozen) + weights.constant_bytes,
        gradient_bytes=gradient,
        optimizer_bytes=_flat_state_bytes(settings, optimizer, partitions),
    )


def _zero3_states(settings: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec) -> ModelStates:
    def share(tensor: Tensor) -> int:
        return partition_share(tensor.num_elements, ranks=settings.world_size)

    def persistent(tensor: Tensor) -> int:
        single = settings.world_size == 1  # the shard is the complete tensor then
        return 0 if single or tensor.num_elements > settings.persistence_threshold else tensor.num_elements

    trained, frozen = total(weights.trained, share), total(weights.frozen, share)
    kept = settings.element_bytes * (total(weights.trained, persistent) + total(weights.frozen, persistent))
    return ModelStates(
        parameter_bytes=settings.element_bytes * (trained + frozen) + kept + weights.constant_bytes,
        gradient_bytes=settings.element_bytes * trained,
        optimizer_bytes=_flat_state_bytes(settings, optimizer, weights.groups(share)),
        persistent_bytes=kept + weights.constant_bytes,
    )


def _flat_state_bytes(settings: EngineSettings, optimizer: OptimizerSpec, partitions: Iterable[int]) -> int:
    held = [UpdatedTensor(shape=(elements,)) for elements in partitions if elements]
    states = optimizer.state_bytes(held)
    states = states * settings.state_bytes // FP32_BYTES if optimizer.follows_weights else states
    return settings.master_bytes * sum(tensor.num_elements for tensor in held) + states


def _master_copy_bytes(settings: EngineSettings) -> int:
    """Of a gradient's copy in the dtype of its master weight, which bf16 master weights do not need."""
    return FP32_BYTES if settings.master_bytes == FP32_BYTES else 0


def _zero12_buffers(settings: EngineSettings, weights: JobWeights, step_copies: int) -> EngineBuffers:
    """A reduction bucket until the step; in the step the partition's flat gradients and their fp32 copy, which alone is
    left, with the gradients freed, when the optimizer runs (`stage_1_and_2.py`, `step`)."""
    share = weights.num_trained // settings.world_size
    bucket = settings.element_bytes * settings.reduce_bucket * settings.num_reduce_buckets
    if settings.sharding == "shard_grad_op":
        # A bucket is reduced in a flat copy (`allreduce_bucket`). ZeRO-1 frees gradients as they are reduced, so that
        # there is room for the copy.
        bucket += settings.element_bytes * min(settings.reduce_bucket, weights.num_trained)
    norm = NORM_BYTES * min(weights.largest_trained, share)
    flat = (settings.element_bytes + _master_copy_bytes(settings)) * share
    updating = (settings.master_bytes * (1 + step_copies) - settings.element_bytes) * share
    if settings.offload_optimizer:  # gradients pass through the GPU one at a time
        staging = settings.element_bytes * weights.largest_trained
        return EngineBuffers(lasting_bytes=staging, backward_bytes=bucket, first_layer_bytes=bucket, step_bytes=0)
    reduced = bucket + settings.element_bytes * weights.largest_trained
    return EngineBuffers(
        backward_bytes=reduced,
        first_layer_bytes=reduced,
        step_bytes=max(norm, flat, updating),
        # `stage_1_and_2.py` line 440: a group is flattened on the GPU if it has room for it; later come master weights
        # and gradients of zeros (`initialize_optimizer_states`).
        load_bytes=max(settings.element_bytes * weights.num_trained, 2 * settings.master_bytes * share),
    )


def _zero3_buffers(settings: EngineSettings, weights: JobWeights, step_copies: int) -> EngineBuffers:
    """Gathered at once: parameters that are used again within the reuse distance, or that have been prefetched.

    The reuse distance counts uses in forward and backward, so it covers half as many parameters. Each module, also one
    without parameters, prefetches at least one tensor: soon as many are there as may be, and the one that exceeds it
    (`partitioned_param_coordinator.py`, `__params_to_release` and `_fetch_sub_module_impl`).
    """
    num_params, element = weights.num_trained + weights.num_frozen, settings.element_bytes
    copies = settings.world_size > 1 or settings.offload_param is not None  # else `NoGatherHandle`: the shard itself
    live = settings.live_parameters if settings.prefetch_bucket else 0
    held = max(settings.reuse_distance // 2, live, weights.largest) + weights.largest_in_layer
    gathered = element * min(num_params, held) * copies
    with_embedding = element * min(num_params, max(held, live + weights.largest)) * copies
    share = weights.num_trained // settings.world_size
    sub_group = min(share, settings.sub_group)
    secondary = element * num_params // settings.secondary_partition if settings.secondary_partition > 1 else 0
    # A gradient and its flat copy; a bucket is scattered from a copy too (`reduce_scatter_coalesced`). That of adapters
    # is left out: it is 12 MiB of the jobs that an H200 measured.
    bucket = 0 if weights.adapters else min(settings.reduce_bucket, weights.num_trained)
    copied = max(weights.largest_trained, bucket)
    backward = gathered + element * (weights.largest_trained + copied)
    # `stage3.py`: tensors arrive whole; later come master weights, then a sub-group of zeros or the gradient partition.
    build = settings.master_bytes * share + max(settings.master_bytes * sub_group, element * share)
    return EngineBuffers(
        lasting_bytes=element * settings.reduce_bucket + secondary,
        forward_bytes=gathered,
        loss_bytes=gathered,
        backward_bytes=backward,
        midway_bytes=with_embedding - gathered,
        first_layer_bytes=backward,
        end_bytes=gathered,
        # Of a sub-group: gradients in fp32, made beside the flat ones, and then beside the optimizer's own copies.
        step_bytes=0
        if settings.offload_optimizer
        else (_master_copy_bytes(settings) + max(element, settings.master_bytes * step_copies)) * sub_group,
        load_bytes=max(weights.largest_bytes(element), 0 if settings.offload_optimizer else build),
    )


def _zero12_collectives(step: PlannedStep) -> Iterator[Collective]:
    """Gradients are all-reduced although each rank keeps a share; updated shares are gathered after the step.

    `use_multi_rank_bucket_allreduce`, DeepSpeed's default, all-reduces the gradients of a bucket, where the paper's
    reduce-scatter would send half. ZeRO-2 does so in every accumulation step, ZeRO-1 (and 0) in the last one.
    """
    zero = step.zero_block
    sharding, element_bytes = step.engine.sharding, step.engine.element_bytes
    steps = step.accumulation_steps if sharding == "shard_grad_op" else 1
    to_owner = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    everyone, trained = partial(Collective, group_size=step.world_size), step.weights.num_trained
    calls = steps * math.ceil(trained / max(step.engine.reduce_bucket, 1))
    name = "reduce" if to_owner and sharding != "replicate" else "all_reduce"
    yield everyone(name, "gradients", steps * element_bytes * trained, calls)
    if sharding != "replicate":  # flat buffers of the Trainer's parameter groups, with and without weight decay
        groups = step.weights.groups(lambda tensor: tensor.num_elements)
        payload = element_bytes * sum(round_up(size, 2 * step.world_size) for size in groups)
        yield everyone("all_gather", "updated parameters", payload, 1 if step.weights.adapters else 2)


def _zero3_collectives(step: PlannedStep) -> Iterator[Collective]:
    """Tensors are gathered where they are used and missing; gradients are reduced in every accumulation step.

    With hpZ, only the first gather of a step crosses nodes. qgZ sends gradients in 4 bits per element to the ranks of
    the node, then their sums to the same rank of the other nodes.
    """
    zero, ranks, engine, steps = step.zero_block, step.world_size, step.engine, step.accumulation_steps
    element_bytes, node = engine.element_bytes, engine.secondary_partition
    everyone = partial(Collective, group_size=ranks)
    same_node = partial(Collective, group_size=node, group="replica")

    counted = zero3_gathers(step, persistent=engine.persistence_threshold, reuse=engine.reuse_distance)
    first, again = (sum(round_up(size, ranks) * times for size, times in part.items()) for part in counted)
    tensors = steps * sum(part.total() for part in counted)
    gathers = [("forward", steps * first, everyone), ("backward", steps * again, everyone)]
    if node > 1:
        later = (steps - 1) * first + steps * again
        gathers = [("step's first use", first, everyone), ("later uses", later, same_node)]
    gathered_bytes = 1 if zero.get("zero_quantized_weights") else element_bytes
    for phase, elements, group in gathers:
        # A gather fills a prefetch bucket, or takes one tensor if the preset prefetches nothing.
        calls = min(-(-elements // max(engine.prefetch_bucket, 1)), tensors)
        yield group("all_gather", f"parameters in the {phase}", gathered_bytes * elements, calls)

    padded = sum(round_up(tensor.num_elements, ranks) for layer in step.trained for tensor in layer)
    calls = steps * math.ceil(padded / max(engine.reduce_bucket, 1))
    if zero.get("zero_quantized_gradients") and ranks > node:
        payload = steps * padded // 2
        between = partial(Collective, group_size=ranks // node, group="replicas")
        yield same_node("all_to_all", "gradients", payload, calls)
        yield between("all_to_all", "gradients between nodes", payload // node, calls)
    else:
        name = "reduce_scatter" if zero.get("reduce_scatter", True) else "all_reduce"
        yield everyone(name, "gradients", steps * element_bytes * padded, calls)
    sizes = [tensor.num_elements for unit in step.weights.units for tensor in unit]
    small = element_bytes * sum(round_up(size, ranks) for size in sizes if size <= engine.persistence_threshold)
    yield everyone("all_gather", "small parameters, after the step", small)


def zero3_gathers(step: PlannedStep, *, persistent: int, reuse: int) -> tuple[Counter[int], Counter[int]]:
    """Return how often tensors of each size are gathered in an accumulation step: for the first time, and again.

    DeepSpeed 0.19.8 records the order in which modules are used, and releases a tensor after a use unless it is used
    again within `reuse` elements (`stage3_max_reuse_distance`): a model of up to half that size is gathered once.
    Tensors of up to `persistent` elements are never released.
    """
    first, again = Counter[int](), Counter[int]()
    used_until: dict[int, int] = {}
    elements = 0
    for tensor, size in _zero3_uses(step):
        if size > persistent and tensor not in used_until:
            first[size] += 1
        elif size > persistent and elements - used_until[tensor] >= reuse:
            again[size] += 1
        elements += size
        used_until[tensor] = elements
    return first, again


def _zero3_uses(step: PlannedStep) -> list[tuple[int, int]]:
    """(tensor, elements) in order of use: forward, then backward, each layer recomputed before its backward."""
    numbers = iter(range(10**9))
    embeddings = [(next(numbers), tensor.num_elements) for tensor in step.shape.outer if tensor.is_embedding]
    layers = [[(next(numbers), tensor.num_elements) for tensor in layer] for layer in step.weights.units[:-1]]
    rest = [(next(numbers), tensor.num_elements) for tensor in step.shape.outer if not tensor.is_embedding]
    head = [*rest, *(embeddings[:1] if step.shape.tied_embeddings else [])]
    uses = [*embeddings, *(use for layer in layers for use in layer), *head, *reversed(head)]
    for layer in reversed(layers):
        uses += [*layer, *reversed(layer)] if step.job.activation_checkpointing else [*reversed(layer)]
    return uses + list(reversed(embeddings))
