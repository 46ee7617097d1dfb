"""What each rank must read under a preset: values, bytes by the shapes of the live parameters, and its optimizer."""

import math
from collections.abc import Container
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from toolkit.engines.live_engine import live_engine
from toolkit.engines.planned import ADAM_STATES
from toolkit.engines.tensors import (
    compute_dtype,
    constant_bytes,
    dtype_name,
    frozen_weights,
    innermost_optimizer,
    local,
    quantized_modules,
    uncompiled,
)
from toolkit.models.optimizers import OPTIMIZERS, OptimizerSpec, UpdatedTensor, optimizer_spec
from toolkit.observe.parts import ExpectedRun
from toolkit.presets.spec import PresetSpec
from toolkit.record.reading import RankReading, Values


def expected_values(run: ExpectedRun, trainer: Any) -> Values:
    """Return the values that every rank must read; without a preset the settings and the world size alone."""
    preset, world_size, layout, expected = run.preset, run.world_size, run.layout, dict(run.settings)
    if world_size is not None:
        expected["world_size"] = world_size
    made = {} if run.made_optimizer is None else {"optimizer_class": run.made_optimizer}
    if preset is None:
        return expected | made
    if preset.replicas > 1 and run.dp_shard_size is not None:
        expected["dp_shard_size"] = run.dp_shard_size
    # accelerate 1.15 wraps a single process in DDP on a CPU only.
    engine = preset.engine if trainer.args.device.type == "cpu" else preset.traits.in_effect(world_size)
    if layout is not None:
        expected["layout"] = layout.degrees()
        if preset.sharded_at_load and layout.data_parallel_size == 1:  # nothing is left to shard
            engine = "none"
    dtype = dtype_name(compute_dtype(trainer.args))
    sent_by_hook = run.settings.get("ddp_comm_hook") is not None
    gradients = preset.traits.gradient_facts(
        compute_dtype=dtype, settings=preset.settings, splits_sequences="sp" in preset.degrees
    )
    return expected | {
        "engine": engine,
        "sharding": preset.sharding,
        "offload_optimizer": preset.offload_optimizer,
        "offload_param": preset.offload_param,
        "compute_dtype": dtype,
        **preset.traits.held_dtypes(preset.settings),
        **{name: value for name, value in gradients.items() if name != "reduce_dtype" or not sent_by_hook},
        **_expected_optimizer(known_optimizer(run, trainer), preset),
        **made,
    }


def expected_bytes(
    run: ExpectedRun, trainer: Any, reading: RankReading, with_gradient: Container[int] = ()
) -> RankReading:
    """Return the bytes that the preset's sharding allows each part on this rank, from the live parameters' shapes.

    Somebody's script may leave parameters unused, or out of an optimizer that it makes itself. `with_gradient` are
    those that have a gradient, and the Trainer's own optimizer updates them all.
    """
    preset = run.preset
    if preset is None:
        return RankReading.of(byte_limits={}, whole_bytes={})
    model = trainer.model_wrapped
    trained = [p for p in model.parameters() if p.requires_grad]
    in_4bit = [module.weight for module in quantized_modules(model)]
    # DeepSpeed keeps all parameters in the compute dtype; DDP and FSDP2 keep the fp32 master weights themselves.
    keeps_masters = live_engine(model).reduces_itself
    used = stepped = trained
    if run.of_script and not keeps_masters:
        states = innermost_optimizer(trainer.optimizer).state
        used = [p for p in trained if id(p) in with_gradient]
        stepped = [p for p in trained if p in states] if run.own_optimizer or not states else used
    parts = {
        "parameter": [
            (trained, element_bytes(reading.compute_dtype if keeps_masters else reading.master_dtype)),
            (frozen_weights(model), element_bytes(reading.frozen_dtype)),
            (in_4bit, element_bytes(reading.quantized_storage_dtype)),
        ],
        "gradient": [(used, element_bytes(reading.gradient_dtype))],
    }
    spec = known_optimizer(run, trainer)
    if spec is not None and spec.is_fp32_adamw:
        held = preset.traits.held_dtypes(preset.settings)
        state = reading.optimizer_dtype if "master_dtype" in run.allowed else held["optimizer_dtype"]
        master = keeps_masters * element_bytes(held["master_dtype"])
        parts["optimizer"] = [(stepped, ADAM_STATES * element_bytes(state) + master)]
    ranks = reading.dp_shard_size or reading.world_size or 1
    allowed, whole = {}, {}
    for part, tensors in parts.items():
        shapes = [([tuple(getattr(p, "ds_shape", p.shape)) for p in parameters], size) for parameters, size in tensors]
        limits = [
            preset.shard_byte_limits(part, found, size, ranks=ranks, hidden_size=_hidden_size(trainer.model))
            for found, size in shapes
        ]
        allowed[part] = (sum(lowest for lowest, _ in limits), sum(highest for _, highest in limits))
        whole[part] = sum(sum(map(math.prod, found)) * size for found, size in shapes)
        if run.layout_at_load is not None:  # some layers are split, others and adapters may be replicated
            allowed[part] = (0, whole[part] - (not hasattr(trainer.model, "peft_config")))
    # Somebody's script does not show what has no gradient, and its optimizer may have a part of them.
    if run.of_script and keeps_masters:
        partial = {"gradient"} | ({"optimizer"} if run.own_optimizer else set())
        for part in partial & allowed.keys():
            allowed[part] = (0, allowed[part][1])
            whole[part] = 0
    if reading.stages is not None:  # this rank's are only a part; all of them are trained in fp32
        states = {"parameter": 1, "gradient": 1, "optimizer": ADAM_STATES}
        whole = {part: count * (reading.num_params or 0) * element_bytes("float32") for part, count in states.items()}
    replicated = constant_bytes(model)
    lowest, highest = allowed["parameter"]
    allowed["parameter"] = (lowest + replicated, highest + replicated)
    whole["parameter"] += replicated
    expected = RankReading.of(byte_limits=allowed, whole_bytes=whole)
    if spec is None or spec.is_fp32_adamw:
        return expected
    dtypes = spec.state_dtypes(updated_tensors(trainer))
    if dtypes and spec.follows_weights:
        dtypes = preset.traits.held_dtypes(preset.settings)["optimizer_dtype"]
    return expected | RankReading.of(expected_optimizer_dtype=dtypes)


def _hidden_size(model: Any) -> int | None:
    """Return the size from which transformers fills DeepSpeed's `auto` (`trainer_config_finalize`)."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        sizes = getattr(part, "hidden_size", None) or getattr(part, "hidden_sizes", None)
        if sizes is not None:
            return int(sizes if isinstance(sizes, int) else max(sizes))
    return None


def element_bytes(name: str | None) -> int:
    """Return the bytes of one element by the dtype's name; 0 for None and for a mixture such as `bfloat16+float32`."""
    dtype = getattr(torch, name or "", None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 0


# -- the optimizer that `--optim` names, or the script has made: what it should hold is in `toolkit.models.optimizers`


def known_optimizer(run: ExpectedRun, trainer: Any) -> OptimizerSpec | None:
    """Return what the optimizer keeps; None if that is not known."""
    if not run.own_optimizer:
        args = trainer.args
        return optimizer_spec(
            str(getattr(args.optim, "value", args.optim)), args.optim_args, getattr(args, "optim_target_modules", None)
        )
    optimizer = innermost_optimizer(trainer.optimizer)
    name = optimizer_class(optimizer)
    optim = next((s.optim for s in OPTIMIZERS.values() if s.class_name == name and name.startswith("torch.")), name)
    momentum = optimizer.param_groups[0].get("momentum")
    return optimizer_spec(optim, f"momentum={momentum}" if momentum else None)


def optimizer_class(optimizer: Any) -> str:
    """Return the library and the class: `torch.AdamW`."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"


def _expected_optimizer(spec: OptimizerSpec | None, preset: PresetSpec) -> Values:
    """The dtypes of AdamW's states are the numerics contract's; those of others follow from each rank's tensors."""
    contract = {"optimizer_dtype": preset.traits.held_dtypes(preset.settings)["optimizer_dtype"]}
    if spec is None:
        return contract
    if preset.traits.offloaded_optimizer and preset.offload_optimizer:
        return contract | {"optimizer_class": preset.traits.offloaded_optimizer, "adam_w_mode": True}
    named = {"optimizer_class": spec.class_name, "optimizer_paged": spec.paged}
    return contract | named if spec.is_fp32_adamw else named


def updated_tensors(trainer: Any) -> list[UpdatedTensor]:
    """Return the tensors that this rank's optimizer updates: parameters, their shards, or DeepSpeed's partitions."""
    wrapped = uncompiled(trainer.model_wrapped)
    flat = live_engine(wrapped).flat_masters()
    if flat is not None:
        return [UpdatedTensor(shape=(master.numel(),)) for master in flat]
    embeddings = {id(m.weight) for m in wrapped.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = hidden_matrices(trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False))
    groups = innermost_optimizer(trainer.optimizer).param_groups
    projected = {id(p) for group in groups if "rank" in group for p in group["params"]}
    return [
        UpdatedTensor(
            shape=tuple(local(p).shape),
            is_embedding=id(p) in embeddings,
            is_hidden_matrix=id(p) in matrices,
            is_projected=id(p) in projected,
        )
        for p in wrapped.parameters()
        if p.requires_grad
    ]


def hidden_matrices(model: Any) -> set[int]:
    """Return the ids of the weights that Muon trains: those of linear layers, but not the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()  # a model class of one's own has none
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return {id(weight) for weight in linear if weight.ndim == 2 and weight.requires_grad} - embeddings
