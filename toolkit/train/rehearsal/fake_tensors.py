"""A rehearsal on fake tensors: the Trainer's step and FSDP2 on a model that is too large for this machine.

    facts = trace(arguments, promise)    # {"peaks": {"forward": {"total_bytes": ..., "parts": {...}}, ...}, ...}

The model has shapes and no memory; forward, backward and optimizer step run operator by operator, and every storage
counts while it is alive. accelerate wraps the model (`fully_shard`), as in a run. DDP's own reducer is C++ and takes
no fake tensors: its gradient buckets are counted as one tensor beside the model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoConfig, Trainer
from transformers.initialization import no_init_weights

from toolkit.errors import AttestationFailed
from toolkit.presets import Preset
from toolkit.runs.pulses import peak_resident_bytes
from toolkit.runs.rehearsals import TRACE_CANNOT_TELL
from toolkit.train.arguments import Arguments
from toolkit.train.attest.attestation import DTYPE_OF_PRECISION
from toolkit.train.attest.check import describe, differences, promised_facts
from toolkit.train.attest.readings import engine_reader, torch_optimizer_states
from toolkit.train.attest.recomputation import recomputes_activations
from toolkit.train.attest.tensors import full_size, local
from toolkit.train.modelling import from_pretrained
from toolkit.train.promise import Promise
from toolkit.train.rehearsal.inputs import model_from_config
from toolkit.train.rehearsal.live_memory import LiveMemory, Peak
from toolkit.train.rehearsal.patches import on_fake_tensors

Facts = dict[str, Any]

STEPS = 1  # optimizer states are made before it, as a first step would


def trace(arguments: Arguments, promise: Promise) -> Facts:
    """Peaks of an optimizer step by phase and part, and the bytes that this rank holds.

    Raises AttestationFailed where what wraps the model is not what the preset promises.
    """
    model_arguments, data_arguments, training = arguments
    assert promise.preset is not None
    vocabulary = from_pretrained(AutoConfig, model_arguments).get_text_config().vocab_size
    memory = LiveMemory(wide=vocabulary)
    with on_fake_tensors(memory, engine=promise.preset.engine):
        with no_init_weights():
            model = model_from_config(model_arguments)
        model.tie_weights()
        trainer = prepared_trainer(model, training, memory)
        buckets = reduction_buckets(trainer.model_wrapped, promise.preset, memory, alone=promise.world_size == 1)
        batch = synthetic_batch(training.per_device_train_batch_size, data_arguments.max_seq_length)
        held = Held(memory)
        make_optimizer_states(trainer, memory)
        one_step(trainer, batch, held)
        own = readings(trainer, promise) | held.facts()
        del buckets
    serials = held.serials
    peaks = {
        name: told(peak, serials) for name, peak in memory.peaks.items() if name in ("forward", "backward", "step")
    }
    return own | {
        "steps": STEPS,
        "peaks": peaks,
        "peak_host_bytes": peak_resident_bytes(),
        "not_told": list(TRACE_CANNOT_TELL),
    }


class TracedTrainer(Trainer):  # type: ignore[misc]
    """The Trainer, telling forward from backward."""

    memory: LiveMemory

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.memory.phase("forward"):
            return super().compute_loss(*args, **kwargs)


def prepared_trainer(model: Any, training: Any, memory: LiveMemory) -> TracedTrainer:
    """Wrapped by the Trainer's own preparation, but with an optimizer made afterwards.

    accelerate finds the parameters that FSDP2 replaced by their addresses, and fake tensors have none. Loading from
    rank 0 is left out: it would be the highest moment of a model that is whole.
    """
    with unset_fake_temporarily():  # a hybrid mesh is made here, and its ranks are asked for
        trainer = TracedTrainer(model=model, args=training)
    trainer.memory = memory
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.cpu_ram_efficient_loading = False
    if training.activation_checkpointing:
        trainer.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*data_ptr")
        wrapped, _ = trainer._prepare_for_training(STEPS, None, None)
    trainer.optimizer = None
    trainer.create_optimizer(wrapped)
    trainer.current_gradient_accumulation_steps = training.gradient_accumulation_steps
    wrapped.train()
    return trainer


class Held:
    """The model states of all steps so far, by serial number, and the bytes of the last; no tensor is kept alive."""

    def __init__(self, memory: LiveMemory) -> None:
        self.memory = memory
        self.serials: dict[str, set[int]] = {"parameter": set(), "optimizer": set(), "gradient": set()}
        self.bytes: dict[str, int] = {}

    def note(self, part: str, tensors: list[Any]) -> None:
        """What a part is made of at this moment."""
        self.serials[part] |= self.memory.serials(tensors)
        self.bytes[part] = storage_bytes(tensors)

    def facts(self) -> Facts:
        """As a run's attestation names them."""
        return {f"{part}_bytes": size for part, size in self.bytes.items()}


def make_optimizer_states(trainer: TracedTrainer, memory: LiveMemory) -> None:
    """As the step before this one did, without its forward and backward, which would be traced like the next."""
    model = trainer.model_wrapped
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with memory.phase("step"):
        trainer.optimizer.step()
    model.zero_grad()


def one_step(trainer: TracedTrainer, batch: dict[str, torch.Tensor], held: Held) -> None:
    """One optimizer step as the Trainer's loop makes it."""
    memory = held.memory
    model, micro_steps = trainer.model_wrapped, trainer.args.gradient_accumulation_steps
    for micro_step in range(micro_steps):
        last = micro_step == micro_steps - 1
        together = contextlib.nullcontext() if last else trainer.accelerator.no_sync(model=model)
        with together, memory.phase("backward"):
            trainer.training_step(model, dict(batch))
    trained = [p for p in model.parameters() if p.requires_grad]
    held.note("gradient", [local(p.grad) for p in trained if p.grad is not None])
    with memory.phase("step"):
        trainer.accelerator.clip_grad_norm_(trained, trainer.args.max_grad_norm)
        trainer.optimizer.step()
    held.note("parameter", [local(p) for p in model.parameters()])
    held.note("optimizer", [local(state) for state in torch_optimizer_states(trainer.optimizer)])
    model.zero_grad()


def synthetic_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Rows without padding. Positions are given: without them a model looks into the mask's values."""
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(length).expand(rows, length)}


def reduction_buckets(model: Any, preset: Preset, memory: LiveMemory, *, alone: bool) -> torch.Tensor | None:
    """DDP keeps a second copy of all gradients, in the buckets that it reduces."""
    if preset.engine != "ddp" or alone:
        return None
    with memory.tagged("buckets"):
        return torch.empty(sum(p.numel() for p in model.parameters() if p.requires_grad))


def readings(trainer: TracedTrainer, promise: Promise) -> Facts:
    """What wraps the model, held against the promise. Its bytes are read elsewhere: fake tensors have no addresses."""
    wrapped, parameters = trainer.model_wrapped, list(trainer.model_wrapped.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*data_ptr")
        own = {"rank": trainer.args.process_index, **engine_reader(wrapped)(trainer, wrapped, parameters)}
    compute = DTYPE_OF_PRECISION[trainer.args.mixed_precision]
    promised = promised_facts(
        promise.preset, None, compute_dtype=compute, asked={}, dp_shard_size=promise.dp_shard_size
    )
    if promise.preset is not None and promise.preset.engine == "ddp":
        del promised["engine"]  # its buckets are counted, and nothing wraps the model
    found = differences(promised, [own])
    if found:
        raise AttestationFailed(f"the rehearsal is not what the preset promises: {describe(found[0])}")
    return {
        "num_params": sum(map(full_size, parameters)),
        "num_trainable_params": sum(full_size(p) for p in parameters if p.requires_grad),
        "activation_checkpointing": recomputes_activations(wrapped, None),
    }


def storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the tensors, each storage region once."""
    regions = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.numel() * t.element_size() for t in tensors
    }
    return sum(regions.values())


def told(peak: Peak, serials: dict[str, set[int]]) -> Facts:
    """One peak by part: model states by what they are, everything else by what it was allocated for."""
    parts: Counter[str] = Counter()
    for serial, (tag, size) in peak.held.items():
        parts[next((part for part, known in serials.items() if serial in known), tag)] += size
    return {"total_bytes": peak.total_bytes, "parts": dict(parts.most_common())}
