"""Parity: did the trials of a row train the baseline's problem?

>>> trial = Run.model_construct(timed_step_numbers=(2, 3), step_seconds=(9.0, 0.5, 0.5))
>>> timing_difference(trial, untimed_steps=2)
'step 2 is timed, with untimed_steps 2'

The checks, in this order, each with both values in its message: what the trial's preset specifies; the facts that must
be equal; the batch of each step and rank, what was counted of it, and which steps were timed; then the first loss and
gradient norm, and the loss of every step, against the band of the baseline's own repeats. A row fails if one of its
repeats does.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.compare.rows import PARITY_FAILED, Parity, Row, RowKey, Run, TrainedProblem
from toolkit.compare.specification import ComparisonSpec
from toolkit.job.global_batch import BATCH_ARGUMENT
from toolkit.job.job import Job
from toolkit.models.optimizers import OPTIMIZERS
from toolkit.parallel.layout import ParallelLayout
from toolkit.units import number

# The numerics contract (docs/concepts/numerics.md): master weights and optimizer states.
CONTRACT = ("master_dtype", "optimizer_dtype")
CONTRACT_DTYPE = "float32"
FP32_ADAMW, SCRIPTS_OPTIMIZER = "fp32 AdamW", "the script's"
# Equal in every trial of a comparison, with any number of processes.
FACTS_OF_COMPARISON = (
    "num_trainable_params",
    "compute_dtype",
    "initial_weights_sha256",  # of the weights rounded to the compute dtype
    "master_dtype",
    "frozen_dtype",
    "optimizer_dtype",
    "gradient_clipping",
    "activation_checkpointing",
    "packing",
    "seed",
    "max_steps",
)
# Equal with the same number of processes, which a scaled learning rate and a weakly scaled batch follow.
FACTS_OF_WORLD_SIZE = ("world_size", "global_batch_size", "learning_rate")
# A row that differs by design may have others than the baseline.
FREE_BY_DESIGN = ("master_dtype", "optimizer_dtype", "global_batch_size", "learning_rate", "activation_checkpointing")

# Counted in each step, over all ranks; the first with padding.
COUNTS = {
    "step_tokens": "tokens",
    "step_non_padding_tokens": "non-padding tokens",
    "step_supervised_tokens": "supervised tokens",
}

BATCHES_UNSEEN = (
    "losses are not compared: the script makes its batches itself, of what its model generates (as GRPO and RLOO do) or"
    " of an iterable data set, so that no digest shows whether they are equal; weights, dtypes, clipping and seed agree"
)

# Relative floors of the band. Measured on a 3.2 M Llama, 30 steps on two CPU ranks, against ddp: fp32 0, 6e-5
# and 2e-6 (zero3, fsdp2), bf16 5e-4, 9e-5 and 3e-3 (zero2, fsdp2); docs/evidence/trust.md has the table. Under FSDP2
# accelerate also rounds the loss to the compute dtype (`output_dtype`), by up to 2^-8 in bf16 and 2^-11 in fp16.
FIRST_LOSS_FLOOR = {"float32": 1e-5, "bfloat16": 1e-3 + 2**-8, "float16": 1e-3 + 2**-11}
FIRST_GRAD_NORM_FLOOR = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}
LOSS_CURVE_FLOOR = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
# Rounding drives two correct runs apart, the further the longer they are: a curve's floor grows from this step on.
CURVE_STEPS = 30
# Three repeats span about two standard deviations; one more trial of the same problem lies within three such spans.
BAND_SPANS = 3
SLOW_FIRST_STEP = 2  # the first timed step over the median of the others, from which on it belongs to the untimed steps
MIN_STEPS_TO_JUDGE_FIRST = 4


def design_group(spec: ComparisonSpec, row: RowKey, trials: Sequence[Run]) -> str | None:
    """Return what sets a row apart from the baseline by design; None if nothing does."""
    baseline = spec.baseline(row.world_size)
    own, other = spec.job(row), spec.job(baseline)
    masters = {_problem_of(trial).expected_masters for trial in trials} - {None, CONTRACT_DTYPE}
    labels = {
        f"ddp_comm_hook {own.ddp_comm_hook or 'none'}": own.ddp_comm_hook != other.ddp_comm_hook,
        "quantised communication": spec.expected[row.preset].quantises != spec.expected[baseline.preset].quantises,
        f"optim {own.optim}": _optimizer(own) != _optimizer(other),
        **{f"{dtype} masters": True for dtype in masters},
        f"activation_checkpointing {str(own.uses_activation_checkpointing).lower()}": (
            own.uses_activation_checkpointing != other.uses_activation_checkpointing
        ),
        f"{BATCH_ARGUMENT} {own.per_device_train_batch_size}": not _same_sequences(spec, row, baseline),
    }
    return ", ".join(label for label, differs in labels.items() if differs) or None


def check_parity(
    row: Row, trials: Mapping[RowKey, Sequence[Run]], spec: ComparisonSpec
) -> tuple[Parity | None, str | None]:
    """Return the `parity` and `parity_message` columns of a row, from the trials of all rows."""
    baseline, fewest = (
        [trial for trial in trials.get(spec.baseline(size), ()) if trial.completed]
        for size in (row.world_size, min(spec.world_sizes))
    )
    if not row.completed or not baseline:
        return None, None
    by_design, repeats = row.group is not None, trials[row.key]
    for trial in repeats:
        message = next(filter(None, _differences(trial, baseline, fewest[:1], spec, by_design=by_design)), None)
        if message is not None:
            return PARITY_FAILED, message if len(repeats) == 1 else f"repeat {trial.repeat + 1}: {message}"
    if message := slow_first_step(repeats):
        return PARITY_FAILED, message
    if row.preset == spec.reference:
        return "reference", None
    if by_design:
        return None, f"differs by design: {row.group}; its losses are not compared"
    if any(map(batches_unseen, repeats)):
        return None, BATCHES_UNSEEN
    return "agrees", None


def _differences(
    trial: Run, baseline: Sequence[Run], fewest: Sequence[Run], spec: ComparisonSpec, *, by_design: bool
) -> Iterator[str | None]:
    """One message per check, None where the trial passes it.

    Facts are compared with the baseline that has the same number of processes, then with the one that has the fewest.
    Batches are not compared where the row has its own per-GPU batch, nor losses where it differs by design. Ranks of
    another layout divide the same rows of a step in another way, and pad them otherwise.
    """
    other = baseline[0]
    # What somebody's own script has is checked in the run itself, and that baseline and row have the same.
    optimizer = SCRIPTS_OPTIMIZER if spec.script_or_module else _optimizer(spec.job(trial.key))
    yield preset_difference(trial, spec.expected_facts(trial.key), optimizer=optimizer)
    free = FREE_BY_DESIGN if by_design else ()
    if optimizer != FP32_ADAMW:  # which tensors are quantized depends on the shards
        free = (*free, "optimizer_dtype")
    yield fact_difference(trial, other, [*FACTS_OF_COMPARISON, *FACTS_OF_WORLD_SIZE], free)
    strong = ("global_batch_size",) if spec.scaling == "strong" else ()
    for smallest in fewest:
        yield fact_difference(trial, smallest, [*FACTS_OF_COMPARISON, *strong], free)
    if _same_sequences(spec, trial.key, other.key):
        own, others = (spec.layout(key) or ParallelLayout() for key in (trial.key, other.key))
        same_layout = (own.ranks_per_batch, own.pieces) == (others.ranks_per_batch, others.pieces)
        if same_layout:
            yield batch_difference(trial, other)
        yield count_difference(trial, other, padding=same_layout)
    yield timing_difference(trial, untimed_steps=spec.untimed_steps)
    if not by_design and not batches_unseen(trial):
        yield from outside_band(trial, baseline)


def _optimizer(job: Job) -> str:
    """The optimizer's name with its arguments; all AdamWs with fp32 states are one."""
    spec = OPTIMIZERS.get(job.optim)
    if spec is not None and spec.is_fp32_adamw:
        return FP32_ADAMW
    targets = job.value("optim_target_modules")
    return " ".join(map(str, filter(None, (job.optim, job.optim_args, targets))))


def _same_sequences(spec: ComparisonSpec, row: RowKey, other: RowKey) -> bool:
    return spec.sequences_per_accumulation_step(row) == spec.sequences_per_accumulation_step(other)


def preset_difference(trial: Run, expected: Mapping[str, Any], *, optimizer: str) -> str | None:
    """Return the first fact that preset, command and numerics contract (fp32 AdamW) specify otherwise."""
    facts = _problem_of(trial)
    if facts.ranks != trial.world_size:
        return f"{facts.ranks} ranks attested, expected {trial.world_size}"
    masters = facts.expected_masters or CONTRACT_DTYPE
    contract = CONTRACT if optimizer == FP32_ADAMW else CONTRACT[:1]
    for name, value in {"world_size": trial.world_size, **expected, **dict.fromkeys(contract, masters)}.items():
        found = getattr(facts, name)
        if found != value:
            return f"{name} is {_shown(found)}, expected {value}"
    return None


def batches_unseen(trial: Run) -> bool:
    """Return True if a batch of the trial has no digest."""
    return any("" in ranks for ranks in trial.batch_sha256)


def fact_difference(trial: Run, baseline: Run, names: Sequence[str], free: Sequence[str]) -> str | None:
    """Return the first of the named facts that is not the baseline's, without those that are free."""
    for name in names:
        own, other = getattr(_problem_of(trial), name), getattr(_problem_of(baseline), name)
        if own != other and name not in free:
            repair = "; `--bf16 true` of a script holds under each preset" if name == "compute_dtype" else ""
            return f"{name} is {_shown(own)}, {_shown(other)} in {baseline.label}{repair}"
    return None


def batch_difference(trial: Run, baseline: Run) -> str | None:
    """Return the first step whose batch on a rank is not the baseline's, among the steps that both ran."""
    for step, (own, other) in enumerate(zip(trial.batch_sha256, baseline.batch_sha256, strict=False), 1):
        if len(own) != len(other):
            return f"step {step} has batches of {len(own)} ranks, of {len(other)} in {baseline.label}"
        for rank, (mine, theirs) in enumerate(zip(own, other, strict=True)):
            if mine != theirs:
                return f"batch of step {step} on rank {rank} is {mine}, {theirs} in {baseline.label}"
    return None


def count_difference(trial: Run, baseline: Run, *, padding: bool) -> str | None:
    """Return the first step with another count of tokens than the baseline's; equal batches have equal counts."""
    for key, noun in list(COUNTS.items())[0 if padding else 1 :]:
        for step, (own, other) in enumerate(zip(getattr(trial, key), getattr(baseline, key), strict=False), 1):
            if own != other:
                return f"step {step} has {number(own, 0)} {noun}, {number(other, 0)} in {baseline.label}"
    return None


def timing_difference(trial: Run, *, untimed_steps: int) -> str | None:
    """Return the first step that is timed and should not be, or the reverse: all speeds count the same steps."""
    found = set(trial.timed_step_numbers)
    wrong = found ^ set(range(untimed_steps + 1, len(trial.step_seconds) + 1))
    if not wrong:
        return None
    return f"step {min(wrong)} is {'timed' if min(wrong) in found else 'not timed'}, with untimed_steps {untimed_steps}"


def outside_band(trial: Run, baseline: Sequence[Run]) -> Iterator[str]:
    """Yield a message for each loss and gradient norm outside the band of the baseline's repeats."""
    dtype = str(_problem_of(trial).compute_dtype)
    losses = [record.losses for record in (trial, *baseline)]
    grad_norms = [record.grad_norms for record in (trial, *baseline)]
    checked = [("loss of step 1", losses, 0, FIRST_LOSS_FLOOR.get(dtype, 0.0))]
    checked.append(("gradient norm of step 1", grad_norms, 0, FIRST_GRAD_NORM_FLOOR.get(dtype, 0.0)))
    for step in range(1, min(map(len, losses))):
        floor = LOSS_CURVE_FLOOR.get(dtype, 0.0) * max(1.0, (step + 1) / CURVE_STEPS)
        checked.append((f"loss of step {step + 1}", losses, step, floor))
    for label, curves, step, floor in checked:
        values = [curve[step] for curve in curves if len(curve) > step]
        own, *others = (value if value is not None and math.isfinite(value) else None for value in values or [None])
        known = [value for value in others if value is not None]
        if own is None or not known:
            continue
        middle = (max(known) + min(known)) / 2
        allowed = max(floor * abs(middle), BAND_SPANS * (max(known) - min(known)))
        if abs(own - middle) > allowed:
            yield f"{label} is {own:.6f}, allowed {middle:.6f} ± {allowed:.6f} of {baseline[0].preset}"


def slow_first_step(repeats: Sequence[Run]) -> str | None:
    """Return a message if the first timed step is slow in every repeat: compilation or allocation to leave untimed."""
    message = None
    for trial in reversed(repeats):
        first, *others = [trial.step_seconds[number - 1] or 0.0 for number in trial.timed_step_numbers] or [0.0]
        if len(others) + 1 < MIN_STEPS_TO_JUDGE_FIRST or first <= SLOW_FIRST_STEP * statistics.median(others):
            return None
        message = (
            f"step {trial.timed_step_numbers[0]}, the first timed, took {first:.3f} s, the median of the others"
            f" {statistics.median(others):.3f} s: raise untimed_steps"
        )
    return message


def _problem_of(trial: Run) -> TrainedProblem:
    return trial.problem or TrainedProblem()


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{', '.join(map(_shown, value))} by rank"
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
