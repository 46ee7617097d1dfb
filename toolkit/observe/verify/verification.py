"""The verification of a run: digests before the first step, readings after it, then the verdict.

A run that does not match its preset ends here, with both values of each difference.
"""

import contextlib
import functools
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from toolkit.engines.live_engine import live_engine
from toolkit.engines.tensors import clean_name, compiled_modules, compute_dtype, dtype_names, num_trainable_params
from toolkit.engines.zero_live import remove_shared_buffer
from toolkit.errors import AttestationFailed
from toolkit.observe.batches import labels_padding
from toolkit.observe.kernels.packed_documents import document_rows
from toolkit.observe.kernels.read_kernels import LossGraph, kernel_rows
from toolkit.observe.observed_run import ObservedRun, gather_from_ranks
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.script_file import bf16_switched_off
from toolkit.observe.timer import StepTimer
from toolkit.observe.trackers import tell_verdict
from toolkit.observe.verify.clipping import (
    CHANGED_AFTER_CLIPPING,
    NormReader,
    clipping_differences,
    gradient_replicas,
    was_clipped,
)
from toolkit.observe.verify.differences import (
    IN_OPTIMIZER,
    Difference,
    byte_differences,
    differences,
    kernel_differences,
    layout_differences,
    optimizer_differences,
    pipeline_differences,
    rank_differences,
    replica_differences,
)
from toolkit.observe.verify.expected import expected_bytes, expected_values, known_optimizer
from toolkit.observe.verify.loss_scale import scale_warning
from toolkit.observe.verify.read_rank import ForwardDetector, read_accumulated, read_gradients, read_rank
from toolkit.observe.verify.replicas import ReplicaCheck
from toolkit.observe.verify.weights_digest import weights_digest
from toolkit.presets.spec import PresetSpec
from toolkit.record.folder import content_sha256, write_json
from toolkit.record.kernel_table import DIFFERS, KernelRow, merged_rows, reading_of, row, table_lines
from toolkit.record.reading import RankReading, Values
from toolkit.units import gib

# FSDP2 keeps the outermost group gathered after its forward; accelerate 1.15 finds layers by these names only.
WHOLE_MODEL_HINT = (
    "FSDP2 gathers this model as a whole, since its layers are not known: name their class, "
    "`FSDP_TRANSFORMER_CLS_TO_WRAP=Layer` in the environment or `_no_split_modules = ['Layer']` on the model's class"
)

UNFROZEN_HINT = (
    "parameters were unfrozen after the engine was made: it does not reduce their gradients, which clipping counts on"
    " each rank; unfreeze them before `train()`"
)
SAME_ROWS = "warning: all ranks train on the same rows: let accelerate prepare the loader, or use `DistributedSampler`"
OTHER_SIZES = "warning: ranks have batches of {} rows: the mean of their gradients weighs rows differently"
NO_DROPOUT = "warning: every dropout is off in the first step: the model is in eval mode, `model.train()` ends it"
LABELED_PADDING = "note: tokens that `attention_mask` hides have labels, and the model's own loss counts them"
FRESH_OPTIMIZER = "warning: the optimizer began anew after step {}: its states were not saved, or not loaded"
RATE_OF_ZERO = "warning: the learning rate is 0 since step {}; accelerate steps a prepared schedule once for each rank"
# Where the weights are trained in another dtype, their gradients and optimizer states are in that too.
FOLLOWING_MASTERS = ("gradient_dtype", "reduce_dtype", "optimizer_dtype")
# transformers 5.19 has the second alone; 5.23 has both.
CHECKPOINTING_ARGUMENTS = ("activation_checkpointing", "gradient_checkpointing")


class Verification:
    """Verifies one run and writes `attestation.json`. The first step is read, so it must be added before `train()`.

    `trainer` is a Trainer, or an `ObservedLoop`. The `timer` has the digests of this rank's first batches, and leaves
    out the time that a verification takes. A run that differs ends where `strict` (AttestationFailed on every rank).
    """

    def __init__(
        self, run: ObservedRun, parts: ObserverParts, timer: StepTimer, *, trainer: Any, strict: bool = True
    ) -> None:
        self.run, self.progress, self.parts, self.timer = run, run.progress, parts, timer
        self.trainer, self.strict, self.first_step = trainer, strict, 0
        self.before_training = RankReading()
        self.with_gradient: set[int] = set()
        """Parameters that have a gradient in the first step that is not sparse, by identity."""
        gather = functools.partial(gather_from_ranks, single_process=run.single_process)
        self.replicas, self.replica_checks = ReplicaCheck(trainer, gather), list[Values]()
        self.zero_rates = -math.inf  # steps in a row whose learning rates are all 0, once there was another rate
        self.trains_apart = False  # once a difference between ranks was reported
        self._expect_first_step()

    def _expect_first_step(self) -> None:
        self.norms, self.forwards = NormReader(), ForwardDetector()
        self.reading: RankReading | None = None
        """This rank's reading, once the first step is over."""
        self.gradients: RankReading | None = None
        self.accumulated = RankReading.of(accumulate=None)
        self.loss_graph: LossGraph | None = None
        self.reached, self.labels_padding, self.reads_saved = set[int](), False, True
        """`reached`: parameters with a gradient, by identity; `reads_saved`: the script does not hook saved tensors."""
        self.scale_warning: str | None = None  # how the first loss is divided, once it is read; empty if as it should
        self.documents: list[KernelRow] | None = None

    def begin_training(self, step: int) -> None:
        """Read what only the weights before the first step after `step` show. Collective."""
        self.first_step = step + 1
        self.progress.enter("attest")
        self.norms.stop(tries_clipping=False)  # of a try of `auto_find_batch_size`, whose first step did not end
        self.forwards.stop()
        self._expect_first_step()
        wrapped = self.trainer.model_wrapped
        if self.strict:
            check_master_dtype(self.parts.expected, wrapped)
        self.before_training = self.read_before_training(self.plain)
        live_engine(wrapped).call_at_gradient_peak(self.before_optimizer_step)
        self.norms.start(self.trainer, self.parts.expected.layout_at_load)
        if not compiled_modules(wrapped):  # a hook would make torch compile the graph a second time
            self.forwards.start(self.plain)
        self.progress.enter("train")
        self.timer.restart_clock()

    def before_loss(self, inputs: Any) -> None:
        """Verify the documents of the first batch, unless its step is timed, or ranks share its rows. Collective."""
        if self.scale_warning is None:  # a script's hooks may give what autograd has saved only once
            self.reads_saved = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        if self.reading is None and self.parts.expected.of_script:
            encodes = getattr(getattr(self.plain, "config", None), "is_encoder_decoder", False)  # other tokens' labels
            self.labels_padding |= not encodes and labels_padding(inputs)
        if self.documents is None:
            expected, config = self.parts.expected, getattr(self.trainer.accelerator, "parallelism_config", None)
            skips = expected.layout or expected.layout_at_load or config or not self.timer.untimed_steps
            skips = skips or (dist.is_initialized() and dist.get_backend() == "fake")
            self.documents = [] if skips else document_rows(self.trainer, self.plain, inputs)

    def after_loss(self, loss: Any) -> None:
        """Read the graph of the first loss."""
        if self.loss_graph is None:
            self.loss_graph = LossGraph(None)
            checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in self.plain.modules())
            with contextlib.suppress(Exception):  # a kind of node that is not known must not end the run
                self.loss_graph = LossGraph(loss, reads_saved=self.reads_saved and not checkpoints)

    def before_backward(self, loss: Any, steps: int, *, items: Any = None, **backward: Any) -> None:
        """Read how the first loss is divided by the accumulation steps; a Trainer has DeepSpeed not divide it."""
        if self.scale_warning is None and self.reads_saved:
            divides = backward.get("scale_wrt_gas", True) and self.trainer.accelerator.gradient_accumulation_steps > 1
            self.scale_warning = ""
            with contextlib.suppress(Exception):  # nor here
                self.scale_warning = scale_warning(loss, steps, by_accelerate=divides, items=items)

    @property
    def plain(self) -> Any:
        """The model without wrappers."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped, keep_torch_compile=False)

    def end_accumulation_step(self) -> None:
        """Read the gradients that wait, after each accumulation step of an optimizer step but the last."""
        if self.accumulated.accumulate is None and self.reading is None:
            self.accumulated = read_accumulated(self.trainer)

    def before_optimizer_step(self) -> None:
        """Read the gradients of the first step, and the learning rates of each."""
        self.replicas.note_rates()
        if self.gradients is None:
            trained = [p for p in self.trainer.model_wrapped.parameters() if p.grad is not None]
            self.with_gradient = {id(p) for p in trained if not p.grad.is_sparse}
            self.reached = {id(p) for p in trained}
            self.gradients = read_gradients(self.trainer, self.parts.reduce_dtype)

    def end_step(self, number: int) -> None:
        """Read everything else after the first step, and verify it. Collective there, and in the first that updates."""
        if number != self.first_step:
            has_rate = any(not isinstance(rate, float) or rate for rate in self.replicas.rates)
            self.zero_rates = 0 if has_rate else self.zero_rates + 1
            if self.zero_rates == 2:
                print(f"{RATE_OF_ZERO.format(number - 1)}\n" * self.run.writes, end="", flush=True)
            # a warm-up from 0 leaves the weights equal, whatever the ranks' gradients are
            first_rates = self.reading.learning_rates if self.reading and not self.replica_checks else None
            if first_rates and not any(first_rates) and any(self.replicas.rates):
                self.check_replicas(number)
                self.timer.restart_clock()
            return
        self.progress.enter("attest")
        self.norms.stop(tries_clipping=self.strict)
        self.forwards.stop()
        gradients = self.gradients or RankReading()
        reading = read_rank(self.trainer, gradients, readers=self.parts.read, forwards=self.forwards)
        own = self.parts.expected.own_optimizer
        rows, graph = [*(self.documents or ())], self.loss_graph or LossGraph(None)
        if packing := self.before_training.packing:  # the script has verified its packs itself
            rows = [row("documents", "isolated", packing)]
        try:
            rows += kernel_rows(graph, self.trainer, self.plain, reading, self.forwards, own_optimizer=own)
        except Exception as error:  # nor a kind of model
            rows.append(row("kernels", None, f"not read: {type(error).__name__}: {error}"))
        reading |= reading_of(rows)
        reading |= expected_bytes(self.parts.expected, self.trainer, reading, self.with_gradient)
        reading |= self.accumulated | self.before_training | self.replicas.read()
        first_rows = hashlib.sha256("+".join(self.timer.first_batches).encode()).hexdigest()
        batch_size = getattr(self.trainer.args, "per_device_train_batch_size", None)
        self.reading = reading | RankReading.of(first_rows_sha256=first_rows, batch_size=batch_size)
        self.verify(self.reading)
        self.progress.enter("train")
        self.timer.restart_clock()

    def check_replicas(self, step: int) -> None:
        """Compare the ranks again, at a save and at the end; raise where only now they differ. Collective."""
        reading = self.reading
        if reading is None or step in (self.first_step, *(check["step"] for check in self.replica_checks[-1:])):
            return
        trained = RankReading.of(num_trainable_params=num_trainable_params(self.plain))
        ranks: list[RankReading] = self.replicas.gather(reading | self.replicas.read() | trained)
        found = replica_differences(ranks)
        unfrozen = any((rank.num_trainable_params or 0) > (reading.num_trainable_params or 0) for rank in ranks)
        self.replica_checks.append({"step": step, "replicas": found[0].found if found else ranks[0].replicas})
        if self.run.writes:
            self.run.folder.update_run(replica_checks=self.replica_checks)
        if found and not self.trains_apart:
            self.trains_apart = True
            message, hint = f"the ranks do not train one model: after step {step} {found[0]}", self.replicas.hint
            if unfrozen:
                hint = f"{UNFROZEN_HINT}; {hint}"
            if self.strict and not unfrozen:
                raise AttestationFailed(message, hint=hint or None)
            print(f"warning: {message}: {hint}\n" * self.run.writes, end="", flush=True)

    def read_before_training(self, model: Any) -> RankReading:
        """Return the digest of the initial weights, and what the script reads with forwards of its own. Collective."""
        digest = weights_digest(model, compute_dtype(self.trainer.args))
        return RankReading.of(initial_weights_sha256=digest) | self.parts.read_before_training(self.trainer)

    def verify(self, reading: RankReading) -> None:
        """Gather the readings of all ranks, write `attestation.json` on rank 0, and raise on every rank."""
        of_rank = (reading, self.norms.reading, self.expected_values())
        gathered = gather_from_ranks(of_rank, single_process=self.run.single_process)
        remove_shared_buffer(self.run.rank)
        ranks: list[RankReading] = [reading for reading, _, _ in gathered]
        norms: list[Values] = [norm for _, norm, _ in gathered]
        expected = gathered[0][2]  # another rank's arguments may differ, and then that rank is the one that deviates
        preset, path = self.parts.expected.preset, self.run.folder.attestation_json
        differing = self.differences(expected, ranks, norms)
        of_script = [each for each in differing if self.is_of_script(each)]
        # Bytes are checked only if the engine is right: one cause would be reported many times otherwise.
        found = [each for each in differing if each not in of_script] or self.byte_differences(ranks)
        self.trains_apart = bool(replica_differences(ranks))
        if self.run.writes:
            clipped = RankReading.of(clipped=was_clipped(norms, self.trainer.args.max_grad_norm or 0.0))
            readings = [reading | clipped for reading in ranks]
            attestation = attestation_json(preset, expected, readings, found, of_script)
            write_json(path, attestation)
            tell_verdict(self.trainer, self.run.folder, attestation)
            lines = [verified_line(preset, ranks[0])] if preset is None or not found else []
            sharding = None if preset is None else preset.sharding
            others = ranks[0].other_models or {}
            lines += [other_model_line(name, other, sharding) for name, other in others.items()]
            first_by_name = {difference.name: difference for difference in reversed(of_script)}
            lines += [f"note: the script's own, beside its preset: {first}" for first in first_by_name.values()]
            why = f": {self.replicas.hint}" if self.replicas.hint and found == replica_differences(ranks) else ""
            lines += [f"warning: {found[0]}{why}"] if found and not self.strict else []
            rows = {rank.first_rows_sha256 for rank in ranks if self.timer.first_batches and not rank.layout}
            lines += [SAME_ROWS] * (self.parts.expected.of_script and len(rows) == 1 < len(ranks))
            sizes = sorted({rank.batch_size for rank in ranks if rank.batch_size})
            lines += [OTHER_SIZES.format(" and ".join(map(str, sizes)))] * (len(sizes) > 1)
            lines += self._lines_of_training(reading) if self.parts.expected.of_script else []
            not_as_asked = [kernel for kernel in attestation["kernels"] if kernel["verdict"] == DIFFERS]
            lines += table_lines(not_as_asked, "warning: kernels")
            print("".join(f"{line}\n" for line in lines), end="", flush=True)  # in one piece: another thread prints too
        if found and self.strict:
            first = "; ".join(map(str, found[:3]))
            whole = ranks[0].fsdp2_groups == 1 and any(difference.name == "sharding" for difference in found)
            hint = f"{WHOLE_MODEL_HINT}; " if whole else f"{self.replicas.hint}; " if self.replicas.hint else ""
            raise AttestationFailed(
                f"the run does not match its preset and arguments: {first}", hint=f"{hint}all values are in {path}"
            )

    def _lines_of_training(self, reading: RankReading) -> list[str]:
        """What the first step shows of training that is not what the script's author may think."""
        lines, missed = [self.scale_warning] if self.scale_warning else [], list[str]()
        if self.reached and not live_engine(self.trainer.model_wrapped).reduces_itself:
            # of another rank's weights FSDP1 leaves none here
            trained = [(name, p) for name, p in self.plain.named_parameters() if p.requires_grad and p.numel()]
            missed = [clean_name(name) for name, p in trained if id(p) not in self.reached]
        lines += [f"note: trained, without a gradient in the first step ({len(missed)}): {name}" for name in missed[:1]]
        lines += [LABELED_PADDING] * self.labels_padding
        lines += [NO_DROPOUT] * (self.forwards.dropouts == {False})
        lines += [FRESH_OPTIMIZER.format(self.first_step - 1)] * (self.first_step > 1 == reading.optimizer_steps)
        return lines

    def differences(self, expected: Values, ranks: list[RankReading], norms: list[Values]) -> list[Difference]:
        """Return where the readings of all ranks, or their gradient norms, are not as expected."""
        layout, of_script = self.parts.expected.layout, self.parts.expected.of_script
        found = optimizer_differences(ranks) if of_script else []
        found += differences(expected, ranks) + rank_differences("initial_weights_sha256", ranks)
        found += layout_differences(ranks, layout) + pipeline_differences(ranks, layout) + replica_differences(ranks)
        found += kernel_differences(ranks) if self.strict else []
        threshold = self.trainer.args.max_grad_norm or 0.0
        return found + clipping_differences(norms, threshold, replicas=gradient_replicas(ranks))

    def is_of_script(self, difference: Difference) -> bool:
        """Return True for what somebody's script does beside its preset, and for what the user has allowed."""
        name, expected, allowed = difference.name, self.parts.expected, self.parts.expected.allowed
        if "master_dtype" in allowed:
            allowed = dict.fromkeys(FOLLOWING_MASTERS, allowed["master_dtype"]) | allowed
        if name in allowed and difference.found == allowed[name]:
            return True
        if not expected.of_script or name in expected.settings:
            return False
        if name == "optimizer_dtype":
            return known_optimizer(expected, self.trainer) is None
        if name == "compute_dtype":  # adapters on a model that the script has loaded in 16 bits, without `bf16=True`
            if difference.expected == "float16" and self.trainer.args.device.type == "cpu":
                return bool(difference.found == "float32")  # accelerate 1.15 leaves `fp16=True` out on a CPU
            frozen = self.reading.frozen_dtype if self.reading else None
            return bool(difference.expected == "float32" and difference.found == frozen)
        checkpoints = name == "activation_checkpointing" and difference.expected is False
        return checkpoints or name == CHANGED_AFTER_CLIPPING or (name == IN_OPTIMIZER and difference.found > 0)

    def byte_differences(self, ranks: list[RankReading]) -> list[Difference]:
        return byte_differences(ranks)

    def expected_values(self) -> Values:
        """Return the values that every rank must read, from the preset and the training arguments."""
        args, expected = self.trainer.args, self.parts.expected
        preset, at_load = expected.preset, expected.layout_at_load
        # FSDP's YAML can switch checkpointing on where `TrainingArguments` does not see it.
        fsdp = {} if preset is None else preset.accelerate_config().get("fsdp_config") or {}
        given = [fsdp.get("fsdp_activation_checkpointing")]
        given += [getattr(args, name, None) for name in CHECKPOINTING_ARGUMENTS]
        # a loop on accelerate may show neither clipping nor checkpointing
        checkpointing = any(given) if set(given) != {None} else None
        known = {"gradient_clipping": args.max_grad_norm, "activation_checkpointing": checkpointing}
        settings = {name: value for name, value in known.items() if value is not None} | expected.settings
        if self.accumulated.accumulate is None:  # the first step had one accumulation step
            settings.pop("accumulate", None)
        if at_load is not None and (at_load.data_parallel_size == 1 or hasattr(self.trainer.model, "peft_config")):
            settings.pop("accumulate", None)  # no gradient is sharded: FSDP2 has nothing to divide, or no adapters
        return expected_values(replace(expected, settings=settings), self.trainer)


def check_master_dtype(expected: ExpectedRun, wrapped: Any) -> None:
    """Raise AttestationFailed, before the first step, for a model of somebody's script that is loaded in 16 bits.

    transformers 5 loads a bf16 checkpoint so. DeepSpeed and FSDP2 under mixed precision keep fp32 masters beside it.
    """
    preset, dtype = expected.preset, dtype_names(p for p in wrapped.parameters() if p.requires_grad)
    if preset is None or preset.traits.keeps_masters or not expected.of_script:
        return
    if dtype not in (None, "float32", expected.allowed.get("master_dtype")):
        raise AttestationFailed(
            f"the weights to train are {dtype}, and {preset.name!r} trains float32 master weights: updates below the"
            f" last of {dtype}'s digits would be lost",
            hint="load the model in float32: `from_pretrained(name, dtype=torch.float32)`; `bf16=True` computes in"
            f" bfloat16 all the same. `--allow master_dtype={dtype}` trains it as it is",
        )


def attestation_json(
    preset: PresetSpec | None,
    expected: Values,
    ranks: list[RankReading],
    found: list[Difference],
    of_script: Sequence[Difference] = (),
) -> Values:
    """Return the content of `attestation.json`. Its digest is equal for equal runs."""
    verdict = "attested" if preset is not None else "no_preset"
    body = {
        "schema_version": 1,
        "preset": None if preset is None else preset.name,
        "verdict": "attestation_failed" if found else verdict,
        "expected": expected,
        "differences": [difference.to_json() for difference in found],
        **({"of_script": [difference.to_json() for difference in of_script]} if of_script else {}),
        "kernels": merged_rows(ranks),
        "ranks": [reading.to_json() for reading in ranks],
    }
    return body | {"sha256": content_sha256(body)}


def verified_line(preset: PresetSpec | None, reading: RankReading) -> str:
    """Return the log line of a verified run, or of what is in effect where no preset is required."""
    held = reading.num_trainable_params if reading.num_optimizer_params is None else reading.num_optimizer_params
    trained = f"{held:,} of {reading.num_params:,} parameters trained"
    dtypes = f"{reading.compute_dtype} compute, {reading.master_dtype} master weights"
    dtypes += "" if reading.frozen_dtype is None else f", {reading.frozen_dtype} frozen weights"
    engine, ranks = f"{reading.engine}, {reading.sharding}", reading.world_size
    what = f"in effect: {engine}" if preset is None else f"verified: {preset.name} ({engine})"
    ending = "; no preset is required" if preset is None else ""
    if (flag := bf16_switched_off(sys.argv)) and reading.compute_dtype == "bfloat16":
        ending += f"; `{flag}` had no effect: mixed precision is the preset's"
    return f"{what}, {ranks} rank{'s' * (ranks != 1)}, {dtypes}; {trained}{ending}"


def other_model_line(name: str, reading: Mapping[str, Any], sharding: str | None) -> str:
    """Return the log line of a model that is not trained, a warning if it is whole where the preset shards the other.

    >>> sizes = {"dtype": "float32", "bytes": 2**29, "whole_bytes": 2**30}
    >>> other_model_line("ref_model", sizes | {"sharding": "full_shard", "fsdp2_groups": 1}, "full_shard")
    'ref_model: 0.50 GiB of 1.00 GiB on each rank (float32), gathered as a whole in its forward'
    """
    whole, dtype = gib(reading["whole_bytes"]), reading["dtype"]
    if reading["sharding"] != "replicate":
        together = ", gathered as a whole in its forward" if reading.get("fsdp2_groups") == 1 else ""
        return f"{name}: {gib(reading['bytes'])} of {whole} on each rank ({dtype}){together}"
    warns = sharding in ("full_shard", "hybrid_shard")
    beside = ", where the preset shards the trained model" if warns else ""
    return f"{'warning: ' * warns}{name}: whole on each rank ({dtype}, {whole}){beside}"
