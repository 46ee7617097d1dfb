"""A rehearsal on fake tensors: the Trainer's step and FSDP2 on a model that is too large for this node.

The model has shapes and no memory; forward, backward and optimizer step run operator by operator, and every storage
counts while it is alive. accelerate wraps the model (`fully_shard`), as in a run. DDP's own reducer is C++ and takes
no fake tensors: its buckets are tensors next to the model, and hooks copy gradients into them.
"""

import contextlib
import copy
import functools
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import Trainer

from toolkit.engines.tensors import full_size, local, num_trainable_params, optimizer_state_tensors
from toolkit.errors import AttestationFailed
from toolkit.models.fake_tensors import LiveMemory, MemoryPeak
from toolkit.observe.parts import ExpectedRun
from toolkit.observe.verify.differences import differences
from toolkit.observe.verify.expected import expected_values
from toolkit.observe.verify.read_rank import read_engine, uses_activation_checkpointing
from toolkit.record.heartbeat import peak_resident_bytes
from toolkit.record.reading import RankReading
from toolkit.train.model.chunked_loss import read_loss

Facts = dict[str, Any]

STEPS = 1  # optimizer states are made before it, as a first step would
NOT_TRACED = (
    "what an allocator adds: rounding, fragmentation, cached blocks",
    "workspaces of kernels and libraries, the CUDA context, the communication library's buffers",
    "the peak while the model is loaded",
    "time, losses and gradient norms",
)
PHASES = ("forward", "backward", "step")


class TracedTrainer(Trainer):  # type: ignore[misc]
    """Stands before a Trainer's own class, and reports forward and backward as separate phases."""

    memory: LiveMemory

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.memory.phase("forward"):
            return super().compute_loss(*args, **kwargs)


def prepare(trainer: Any, memory: LiveMemory) -> None:
    """Wrap the model by the Trainer's own preparation, with an optimizer made afterwards.

    accelerate finds the parameters that FSDP2 replaced by their addresses, and fake tensors have none. Loading from
    rank 0 is left out: its full model would be the peak.
    """
    training = trainer.args
    trainer.__class__ = type(type(trainer).__name__, (TracedTrainer, type(trainer)), {})
    trainer.memory = memory
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.cpu_ram_efficient_loading = False
    if training.activation_checkpointing:
        given = {"use_reentrant": False} | (training.activation_checkpointing_kwargs or {})
        every = given.pop("every_n_layers", 1)
        trainer.model.activation_checkpointing_enable(activation_checkpointing_kwargs=given, every_n_layers=every)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*data_ptr")
        wrapped, _ = trainer._prepare_for_training(STEPS, None, None)
    trainer.optimizer = None
    trainer.create_optimizer(wrapped)
    trainer.current_gradient_accumulation_steps = training.gradient_accumulation_steps
    wrapped.train()


def trace_step(
    trainer: Any,
    memory: LiveMemory,
    batches: list[Any],
    expected: ExpectedRun,
    *,
    num_items: Any = None,
    other_models: Mapping[str, Any] | None = None,
) -> Facts:
    """Return the peaks of an optimizer step by phase and part, and the bytes that this rank holds between steps.

    `batches` has one for each accumulation step; `num_items` is what the Trainer counted in them; `other_models` are
    held beside the trained one, by name. `peaks` is
    {"forward": {"total_bytes": ..., "parts": {...}}, ...}. Raises AttestationFailed where what wraps the model is not
    what the preset specifies.
    """
    trained = [parameter for parameter in trainer.model_wrapped.parameters() if parameter.requires_grad]
    has_buckets = expected.preset is not None and expected.preset.traits.uses_ddp and expected.world_size != 1
    with memory.tagged("buckets"):
        buckets = [torch.empty_like(parameter) for parameter in trained] if has_buckets else []
    views = buckets if getattr(trainer.accelerator.ddp_handler, "gradient_as_bucket_view", False) else []
    states = TracedModelStates(memory)
    for parameter, view in itertools.zip_longest(trained, views):  # as a first step would, without forward and backward
        parameter.grad = torch.zeros_like(parameter) if view is None else view
    with memory.phase("step"):
        trainer.optimizer.step()
    trainer.model_wrapped.zero_grad()
    run_step(trainer, batches, num_items, states, views)
    own = verified_facts(trainer, expected) | {f"{part}_bytes": size for part, size in states.bytes.items()}
    others = {}
    for name, model in (other_models or {}).items():
        states.record("other_models", [local(tensor) for tensor in model.parameters()])
        others[name] = states.bytes.pop("other_models")
    del buckets
    return own | {
        "other_model_bytes": others,
        "steps": STEPS,
        "peaks": {phase: peak_facts(memory.peaks[phase], states) for phase in PHASES if phase in memory.peaks},
        "peak_host_bytes": peak_resident_bytes(),
        "not_measured": list(NOT_TRACED),
    }


class TracedModelStates:
    """Storage serial numbers of the model states of all steps so far, and their bytes; no tensor is kept alive."""

    def __init__(self, memory: LiveMemory) -> None:
        self.memory = memory
        self.serials: defaultdict[str, set[int]] = defaultdict(set)
        self.bytes: dict[str, int] = {}

    def record(self, part: str, tensors: list[Any]) -> None:
        """Record the tensors that a part consists of now."""
        self.serials[part] |= self.memory.serials(tensors)
        sizes = {(t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.nbytes for t in tensors}
        self.bytes[part] = sum(sizes.values())  # each storage region counted once


def run_step(
    trainer: Any, batches: list[Any], num_items: Any, states: TracedModelStates, bucket_views: list[torch.Tensor]
) -> None:
    """Run one optimizer step as the Trainer's loop does, and record the model states.

    `bucket_views` are what DDP's reducer would make the gradients views of; none where it keeps copies.
    """
    memory, model = states.memory, trainer.model_wrapped
    trained = [p for p in model.parameters() if p.requires_grad]
    always = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    for accumulation_step, batch in enumerate(batches):
        reduces = always or accumulation_step == len(batches) - 1
        for parameter, view in zip(trained, bucket_views if reduces else (), strict=False):
            parameter.register_post_accumulate_grad_hook(functools.partial(copy_to_bucket, view))
        sync = contextlib.nullcontext() if reduces else trainer.accelerator.no_sync(model=model)
        with sync, memory.phase("backward"):
            trainer.training_step(model, copy.copy(batch), num_items)
        states.record("gradient", [local(p.grad) for p in trained if p.grad is not None])
    with memory.phase("step"):
        trainer.accelerator.clip_grad_norm_(trained, trainer.args.max_grad_norm)
        trainer.optimizer.step()
    states.record("parameter", [local(p) for p in model.parameters()])
    states.record("optimizer", [local(state) for state in optimizer_state_tensors(trainer.optimizer)])
    model.zero_grad()


def copy_to_bucket(view: torch.Tensor, parameter: torch.Tensor) -> None:
    """Make a gradient that is complete a view of its bucket."""
    parameter.grad = view.copy_(parameter.grad)


def verified_facts(trainer: Any, expected: ExpectedRun) -> Facts:
    """Verify what wraps the model against the preset, and return its sizes.

    Its bytes are counted by `TracedModelStates`: fake tensors have no addresses.
    """
    wrapped, parameters = trainer.model_wrapped, list(trainer.model_wrapped.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*data_ptr")
        reading = read_engine(trainer, wrapped, parameters) | RankReading.of(rank=trainer.args.process_index)
    values = expected_values(replace(expected, world_size=None), trainer)
    for of_gradients in ("gradient_dtype", "reduce_dtype"):  # the engine alone is read
        values.pop(of_gradients, None)
    if expected.preset is not None and expected.preset.traits.uses_ddp:
        del values["engine"]  # its buckets are counted, and nothing wraps the model
    found = differences(values, [reading])
    if found:
        raise AttestationFailed(f"the rehearsal does not match its preset: {found[0]}")
    return {
        "num_params": sum(map(full_size, parameters)),
        "num_trainable_params": num_trainable_params(wrapped),
        "activation_checkpointing": uses_activation_checkpointing(wrapped, None),
        **read_loss(trainer.accelerator.unwrap_model(wrapped)).to_json(),
    }


def peak_facts(peak: MemoryPeak, states: TracedModelStates) -> Facts:
    """Return a peak by part: model states by what they are, everything else by what it was allocated for."""
    parts: Counter[str] = Counter()
    for serial, (tag, size) in peak.storages.items():
        parts[next((part for part, serials in states.serials.items() if serial in serials), tag)] += size
    return {"total_bytes": peak.total_bytes, "parts": dict(parts.most_common())}
