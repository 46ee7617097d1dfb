"""The verification of a run as a Trainer callback: digests before the first step, readings after it, then the verdict.

A run that does not match its preset ends here, with both values of each difference.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.errors import AttestationFailed
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets import Preset
from toolkit.presets.shard_bytes import ADAM_STATES, shard_byte_limits
from toolkit.record.folder import write_json
from toolkit.train.attest.accumulated_gradients import AccumulatedGradients, read_accumulated
from toolkit.train.attest.activation_checkpointing import RecomputeDetector
from toolkit.train.attest.clipping import NormReader, NormReading, clipping_differences, gradient_replicas, was_clipped
from toolkit.train.attest.differences import byte_differences, differences, expected_values, rank_differences
from toolkit.train.attest.document_isolation import check_isolated, read_packing
from toolkit.train.attest.optimizer import (
    expected_optimizer,
    named_optimizer,
    optimizer_byte_limits,
    state_dtype_differences,
    updated_tensors,
)
from toolkit.train.attest.read_deepspeed import call_at_gradient_peak
from toolkit.train.attest.read_layout import largest_part, layout_differences, replicated_gradient, split_shapes
from toolkit.train.attest.read_pipeline import pipeline_differences
from toolkit.train.attest.read_rank import read_gradients, read_rank
from toolkit.train.attest.readings import (
    ByteReading,
    Difference,
    GradientReading,
    PackingReading,
    RankReading,
    Values,
)
from toolkit.train.attest.tensors import constant_bytes, frozen_weights, full_shape, weights_sha256
from toolkit.train.data.collation import PackCollator
from toolkit.train.dtypes import compute_dtype, dtype_name, element_bytes
from toolkit.train.engine.compiled_layers import compiled_modules, uncompiled_forward
from toolkit.train.health.progress import Progress
from toolkit.train.launch_context import LaunchContext
from toolkit.train.model.four_bit import quantized_modules


class Attestation(TrainerCallback):  # type: ignore[misc]
    """Verifies one run and writes `attestation.json`. Raises AttestationFailed on every rank if the run differs.

    The first step is read, so it must be added before `train()`.
    """

    def __init__(
        self,
        path: Path,
        launch: LaunchContext,
        *,
        trainer: Any,
        progress: Progress,
        expected_settings: Values | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """Verify the model of `trainer` against `launch`, and write to `path`.

        `expected_settings` are the readings that the training arguments determine, beside those known here.
        `on_done` is called when training resumes after a verification, so that a timer can leave it out.
        """
        self.path, self.launch, self.progress, self.on_done = path, launch, progress, on_done
        self.trainer = trainer
        self.compute_dtype = compute_dtype(trainer.args)
        self.layout: ParallelLayout | None = trainer.run.arguments.layout
        self.expected_settings = expected_settings or {}
        self.reading: RankReading | None = None
        """This rank's reading, once the first step is over."""
        self.initial_weights: str | None = None
        self.gradients: GradientReading | None = None
        self.accumulated: AccumulatedGradients | None = None
        self.replicated: list[float] | None = None
        self.packing: PackingReading = {"packing": None}
        self.norms, self.recompute = NormReader(), RecomputeDetector()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.progress.enter("attest")
        wrapped = self.trainer.model_wrapped
        plain = self.trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
        self.initial_weights = self.hash_weights(plain)
        if hasattr(wrapped, "zero_optimization_stage"):
            call_at_gradient_peak(wrapped, self._read_gradients)
        if isinstance(self.trainer.data_collator, PackCollator):
            with uncompiled_forward():
                self.packing = read_packing(self.trainer, compute_dtype=dtype_name(self.compute_dtype))
            check_isolated(self.packing, getattr(plain.config, "_attn_implementation", None))
        self.norms.start(self.trainer)
        if not compiled_modules(plain):  # a hook would make torch compile the graph a second time
            self.recompute.start()
        self.progress.enter("train")
        self.on_done()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """After each accumulation step of an optimizer step but the last."""
        if self.accumulated is None and self.reading is None:
            self.accumulated = read_accumulated(self.trainer)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.gradients is None:
            self._read_gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step != self.trainer._initial_global_step + 1:
            return
        self.progress.enter("attest")
        self.norms.stop()
        self.recompute.stop()
        reading = read_rank(self.trainer, self.gradients or {}, recompute_detected=self.recompute.detected)
        layout = self.trainer.run.layout_at_load
        limits = expected_bytes(self.launch.preset, self.trainer, reading, layout_at_load=layout)
        reading.update(limits)  # type: ignore[typeddict-item]
        self._add_accumulated(reading)
        reading.update(self.packing)  # type: ignore[typeddict-item]
        reading["initial_weights_sha256"] = self.initial_weights
        reading["replicated_gradient"] = self.replicated
        self.reading = reading
        self.verify(reading)
        self.progress.enter("train")
        self.on_done()

    def hash_weights(self, model: Any) -> str | None:
        """Return the digest of the initial weights; every rank takes part. A rehearsal has none."""
        return weights_sha256(model, self.compute_dtype)

    def verify(self, reading: RankReading) -> None:
        """Gather the readings of all ranks, write `attestation.json` on rank 0, and raise on every rank."""
        gathered = _gather((reading, self.norms.reading))
        ranks, norms = [reading for reading, _ in gathered], [norm for _, norm in gathered]
        expected, threshold = self.expected_values(), self.trainer.args.max_grad_norm
        found = differences(expected, ranks) + rank_differences("initial_weights_sha256", ranks)
        found += state_dtype_differences(ranks) + layout_differences(ranks, self.layout)
        found += pipeline_differences(ranks, self.layout)
        found += clipping_differences(norms, threshold, replicas=gradient_replicas(ranks))
        # Bytes are checked only if the engine is right: one cause would be reported many times otherwise.
        found = found or byte_differences(ranks)
        clipped = was_clipped(norms, threshold)
        for reading in ranks:  # its last digits may differ from run to run
            reading.pop("replicated_gradient", None)
        ranks = [{**reading, "clipped": clipped} for reading in ranks]
        preset = self.launch.preset
        if self.trainer.args.process_index == 0:
            write_json(self.path, attestation_json(preset, expected, ranks, found))
            if preset is None:
                print("attestation: no preset is known for this run, so its readings are not checked", flush=True)
            elif not found:
                print(verified_line(preset, ranks[0]), flush=True)
        if found:
            first = "; ".join(map(str, found[:3]))
            raise AttestationFailed(
                f"the run does not match its preset and arguments: {first}", hint=f"all values are in {self.path}"
            )

    def expected_values(self) -> Values:
        """Return the values that every rank must read, from the preset and the training arguments."""
        args, preset = self.trainer.args, self.launch.preset
        # FSDP's YAML can switch checkpointing on where `TrainingArguments` does not see it.
        fsdp = {} if preset is None else preset.accelerate_config().get("fsdp_config") or {}
        settings = {
            "seed": args.seed,
            "gradient_clipping": args.max_grad_norm,
            "activation_checkpointing": bool(
                args.activation_checkpointing or fsdp.get("fsdp_activation_checkpointing")
            ),
        } | self.expected_settings
        if self.accumulated is None:  # the first step had one accumulation step
            settings.pop("accumulate", None)
        at_load = self.trainer.run.layout_at_load
        if at_load is not None and (at_load.data_parallel_size == 1 or hasattr(self.trainer.model, "peft_config")):
            settings.pop("accumulate", None)  # no gradient is sharded: FSDP2 has nothing to divide, or no adapters
        return expected_values(
            preset,
            self.launch.world_size,
            compute_dtype=dtype_name(self.compute_dtype),
            settings=settings,
            dp_shard_size=self.launch.dp_shard_size,
            on_cpu=args.device.type == "cpu",
            has_frozen_weights=bool(frozen_weights(self.trainer.model)),
            optimizer=None if preset is None else expected_optimizer(named_optimizer(args), preset),
            layout=self.layout,
        )

    def _add_accumulated(self, reading: RankReading) -> None:
        reading["accumulate"] = None
        if self.accumulated is None:
            return
        reading["accumulate"] = self.accumulated.accumulate
        reading["accumulated_gradient_bytes"] = self.accumulated.num_bytes
        if self.launch.preset is not None:
            if self.trainer.run.layout_at_load is not None:
                return
            ranks = reading.get("dp_shard_size") or reading["world_size"]
            limits = self.accumulated.byte_limits(self.launch.preset, ranks=ranks)
            reading["byte_limits"]["accumulated_gradient"] = limits

    def _read_gradients(self) -> None:
        self.gradients = read_gradients(self.trainer)
        self.replicated = replicated_gradient(self.trainer.model_wrapped, self.trainer.run.layout_at_load)


def expected_bytes(
    preset: Preset | None, trainer: Any, reading: RankReading, *, layout_at_load: ParallelLayout | None = None
) -> ByteReading:
    """Return the bytes that the preset's sharding allows each part on this rank, from the live parameters' shapes.

    `layout_at_load` is how transformers sharded the model while it loaded it.
    """
    if preset is None:
        return {"byte_limits": {}, "whole_bytes": {}}
    model = trainer.model_wrapped
    trained = [p for p in model.parameters() if p.requires_grad]
    in_4bit = [module.weight for module in quantized_modules(model)]
    # DeepSpeed keeps all parameters in the compute dtype; DDP and FSDP2 keep the fp32 master weights themselves.
    deepspeed = reading["engine"] == "deepspeed"
    parts = {
        "parameter": [
            (trained, element_bytes(reading["compute_dtype" if deepspeed else "master_dtype"])),
            (frozen_weights(model), element_bytes(reading["frozen_dtype"])),
            (in_4bit, element_bytes(reading["quantized_storage_dtype"])),
        ],
        "gradient": [(trained, element_bytes(reading["gradient_dtype"]))],
    }
    spec = named_optimizer(trainer.args)
    if spec is not None and spec.is_fp32_adamw:
        parts["optimizer"] = [(trained, (ADAM_STATES + deepspeed) * element_bytes("float32"))]
    ranks = reading.get("dp_shard_size") or reading["world_size"]
    allowed, whole = {}, {}
    for part, tensors_of_size in parts.items():
        shapes = [([full_shape(p) for p in tensors], size) for tensors, size in tensors_of_size]
        if layout_at_load is not None:
            divided = [
                (split_shapes(model, layout_at_load, tensors, part=part), size) for tensors, size in tensors_of_size
            ]
            limits = [(0, largest_part(found) * size) for found, size in divided]
        else:
            limits = [shard_byte_limits(preset, part, found, size, ranks=ranks) for found, size in shapes]
        allowed[part] = (sum(lowest for lowest, _ in limits), sum(highest for _, highest in limits))
        whole[part] = sum(sum(map(math.prod, found)) * size for found, size in shapes)
    if "stages" in reading:  # this rank's are only a part; all of them are trained in fp32
        states = {"parameter": 1, "gradient": 1, "optimizer": ADAM_STATES}
        whole = {part: count * reading["num_params"] * element_bytes("float32") for part, count in states.items()}
    replicated = constant_bytes(model)
    lowest, highest = allowed["parameter"]
    allowed["parameter"] = (lowest + replicated, highest + replicated)
    whole["parameter"] += replicated
    expected: ByteReading = {"byte_limits": allowed, "whole_bytes": whole}
    if spec is not None and not spec.is_fp32_adamw:
        allowed["optimizer"] = optimizer_byte_limits(spec, preset, trainer, trained, ranks=ranks)
        whole["optimizer"] = deepspeed * element_bytes("float32") * sum(math.prod(full_shape(p)) for p in trained)
        expected["expected_optimizer_dtype"] = spec.state_dtypes(updated_tensors(trainer))
    return expected


def attestation_json(
    preset: Preset | None, expected: Values, ranks: list[RankReading], found: list[Difference]
) -> Values:
    """Return the content of `attestation.json`. Its digest is equal for equal runs."""
    verdict = "attested" if preset is not None else "no_preset"
    body = {
        "schema_version": 1,
        "preset": None if preset is None else preset.name,
        "verdict": "attestation_failed" if found else verdict,
        "promised": expected,
        "differences": [difference.to_json() for difference in found],
        "ranks": ranks,
    }
    return body | {"sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}


def verified_line(preset: Preset, reading: RankReading) -> str:
    """Return the log line of a verified run."""
    trained = f"{reading['num_trainable_params']:,} of {reading['num_params']:,} parameters trained"
    dtypes = f"{reading['compute_dtype']} compute, {reading['master_dtype']} master weights"
    if reading["frozen_dtype"] is not None:
        dtypes += f", {reading['frozen_dtype']} frozen weights"
    engine = f"{reading['engine']}, {reading['sharding']}"
    return f"verified: {preset.name} ({engine}), {reading['world_size']} ranks, {dtypes}; {trained}"


def _gather(own: tuple[RankReading, NormReading]) -> list[tuple[RankReading, NormReading]]:
    """Every rank's reading on every rank, so that all of them come to the same verdict."""
    if not dist.is_initialized():
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
