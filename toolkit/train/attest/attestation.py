"""The attestation as a Trainer callback: digests before the first step, readings after it, then the verdict.

A run whose live objects differ from the preset's promise ends here, with both values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.errors import AttestationFailed
from toolkit.presets import Preset
from toolkit.presets.sizes import ADAM_STATES, limits
from toolkit.runs.folder import write_json
from toolkit.train.attest.check import byte_differences, describe, differences, promised_facts, unequal
from toolkit.train.attest.clipping import GradientNorms, clipping_differences, without_norms
from toolkit.train.attest.gradients import read_gradients, watch_deepspeed_gradients
from toolkit.train.attest.packing import check_isolated, read_packing
from toolkit.train.attest.readings import Facts, read_rank
from toolkit.train.attest.recomputation import Recomputation
from toolkit.train.attest.tensors import full_shape, local_bytes, weights_sha256
from toolkit.train.batches import PackCollator
from toolkit.train.failure import Progress
from toolkit.train.promise import Promise

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_OF_PRECISION = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Attestation(TrainerCallback):  # type: ignore[misc]
    """Attests one run. `trainer` is set once it exists; `after` is called when attesting is over."""

    def __init__(self, path: Path, promise: Promise, *, precision: str, progress: Progress) -> None:
        self.path, self.promise, self.progress = path, promise, progress
        self.compute_dtype = DTYPE_OF_PRECISION[precision]
        self.trainer: Any = None
        self.asked: Facts = {}
        """What the arguments switch on, beside what is known here."""
        self.after: Callable[[], None] = lambda: None
        self.gradients: Facts | None = None
        self.norms, self.recomputation = GradientNorms(), Recomputation()
        self.weights: str | None = ""
        self.own: Facts = {}
        """What this rank read of itself, once it has."""
        self.packing: Facts = {"packing": None}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.progress.enter("attest")
        plain = self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped, keep_torch_compile=False)
        self.weights = self._digest(plain)
        if hasattr(self.trainer.model_wrapped, "zero_optimization_stage"):
            watch_deepspeed_gradients(self.trainer.model_wrapped, self._look_at_gradients)
        if isinstance(self.trainer.data_collator, PackCollator):
            self.packing = read_packing(self.trainer, compute_dtype=self.compute_dtype)
            check_isolated(self.packing, getattr(plain.config, "_attn_implementation", None))
        self.norms.watch(self.trainer)
        if not self.trainer.args.torch_compile:  # a hook would have the graph made twice
            self.recomputation.watch()
        self.progress.enter("train")
        self.after()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.gradients is None:
            self._look_at_gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step != self.trainer._initial_global_step + 1:
            return
        self.progress.enter("attest")
        self.norms.close()
        self.recomputation.close()
        own = read_rank(self.trainer, self.gradients or {}, recomputed=self.recomputation.seen)
        own |= self._byte_facts(own)
        own |= self.packing | {"initial_weights_sha256": self.weights}
        self.own = own
        self._conclude(own)
        self.progress.enter("train")
        self.after()

    def _look_at_gradients(self) -> None:
        self.gradients = read_gradients(self.trainer)

    def _byte_facts(self, own: Facts) -> Facts:
        """What the preset's sharding allows each part on this rank, from the shapes of the live parameters."""
        preset = self.promise.preset
        if preset is None:
            return {"byte_limits": {}, "whole_bytes": {}}
        parameters = list(self.trainer.model_wrapped.parameters())
        trained = [p for p in parameters if p.requires_grad]
        packed = [p for p in parameters if hasattr(p, "quant_state")]  # 4-bit: no dtype says its bytes
        parameters = [p for p in parameters if not hasattr(p, "quant_state")]
        held = {"parameter": (parameters, _element_bytes(own["compute_dtype"] if _casts(own) else own["master_dtype"]))}
        held["gradient"] = (trained, _element_bytes(own["gradient_dtype"]))
        if str(getattr(self.trainer.args.optim, "value", self.trainer.args.optim)).startswith("adamw_torch"):
            masters = 1 if own["engine"] == "deepspeed" else 0
            held["optimizer"] = (trained, (ADAM_STATES + masters) * _element_bytes("float32"))
        shapes = {part: [full_shape(p) for p in which] for part, (which, _) in held.items()}
        ranks = own.get("dp_shard_size") or own["world_size"]
        allowed = {part: limits(preset, part, shapes[part], size, ranks=ranks) for part, (_, size) in held.items()}
        whole = {part: sum(map(math.prod, shapes[part])) * size for part, (_, size) in held.items()}
        extra = local_bytes(packed)
        allowed["parameter"] = (allowed["parameter"][0] + extra, allowed["parameter"][1] + extra)
        whole["parameter"] += extra
        return {"byte_limits": allowed, "whole_bytes": whole}

    def _digest(self, plain: Any) -> str | None:
        """Of the whole weights, before the first step."""
        return weights_sha256(plain, TORCH_DTYPES[self.compute_dtype])

    def _conclude(self, own: Facts) -> None:
        ranks = _gather(own | self.norms.facts)
        found = self._differences(ranks)
        ranks = without_norms(ranks, self.trainer.args.max_grad_norm)
        promised = self._promised()
        if self.trainer.args.process_index == 0:
            write_json(self.path, attestation(self.promise.preset, promised, ranks, found))
            if self.promise.preset is None:
                print("attestation: no preset is known for this run, so its readings are held against none", flush=True)
            elif not found:
                print(attested_line(self.promise.preset, ranks[0]), flush=True)
        if found:
            first = "; ".join(describe(difference) for difference in found[:3])
            raise AttestationFailed(f"the run is not what it promised: {first}", hint=f"all values are in {self.path}")

    def _promised(self) -> Facts:
        args = self.trainer.args
        asked = {
            "seed": args.seed,
            "gradient_clipping": args.max_grad_norm,
            "activation_checkpointing": bool(args.activation_checkpointing) or _preset_recomputes(self.promise.preset),
        }
        asked |= self.asked
        return promised_facts(
            self.promise.preset,
            self.promise.world_size,
            compute_dtype=self.compute_dtype,
            asked=asked,
            dp_shard_size=self.promise.dp_shard_size,
            on_cpu=args.device.type == "cpu",
        )

    def _differences(self, ranks: list[Facts]) -> list[Facts]:
        found = differences(self._promised(), ranks) + unequal("initial_weights_sha256", ranks)
        found += clipping_differences(ranks, self.trainer.args.max_grad_norm)
        # Bytes are asked only of an engine that is the promised one: otherwise one cause would be told many times.
        return found or byte_differences(ranks)


def attestation(preset: Preset | None, promised: Facts, ranks: list[Facts], found: list[Facts]) -> Facts:
    """attestation.json; its digest leaves out what differs from run to run."""
    body = {
        "schema_version": 1,
        "preset": None if preset is None else preset.name,
        "verdict": verdict(preset, found),
        "promised": promised,
        "differences": found,
        "ranks": ranks,
    }
    return body | {"sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}


def attested_line(preset: Preset, facts: Facts) -> str:
    """What is in force, in one line for the log."""
    trained = f"{facts['num_trainable_params']:,} of {facts['num_params']:,} parameters trained"
    where = f"{facts['world_size']} ranks, {facts['compute_dtype']} compute, {facts['master_dtype']} masters"
    return f"attested: {preset.name} ({facts['engine']}, {facts['sharding']}), {where}; {trained}"


def verdict(preset: Preset | None, found: list[Facts]) -> str:
    """`attested`, `attestation_failed`, or `no_preset` where nobody said what to hold the readings against."""
    if found:
        return "attestation_failed"
    return "attested" if preset is not None else "no_preset"


def _preset_recomputes(preset: Preset | None) -> bool:
    """FSDP can be told to checkpoint activations in the YAML, where `TrainingArguments` does not see it."""
    fsdp = {} if preset is None else preset.accelerate_config().get("fsdp_config") or {}
    return bool(fsdp.get("fsdp_activation_checkpointing"))


def _casts(own: Facts) -> bool:
    """DeepSpeed keeps parameters in the compute dtype; DDP and FSDP2 keep the masters themselves."""
    return bool(own["engine"] == "deepspeed")


def _element_bytes(dtype: str | None) -> int:
    return TORCH_DTYPES[dtype].itemsize if dtype in TORCH_DTYPES else 0


def _gather(own: Facts) -> list[Facts]:
    """Every rank's facts on every rank, so that all of them come to the same verdict."""
    if not dist.is_initialized():
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
