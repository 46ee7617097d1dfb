"""Whether a trial trained the reference's problem: what it was before the first step, and what came of it.

    problem = unlike(trial, reference_trial)        # 'gradient_clipping is 0.0, 1.0 in ddp-n2-r0', or None

Checked in this order, each check with both values: what the trial's own preset promises; the facts that must be equal;
the batch of each step and rank, what was counted of it, and which steps were timed; then the first loss and gradient
norm, and the loss of every step, against the band that the reference's own repeats show. Plain rows in, sentences out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]

# The numerics contract (docs/numerics.md): masters and optimizer states.
CONTRACT = ("master_dtype", "optimizer_dtype")
CONTRACT_DTYPE = "float32"
# Equal in every trial of a comparison, whatever the number of processes.
EVERYWHERE = (
    "num_trainable_params",
    "initial_weights_sha256",
    "compute_dtype",
    "master_dtype",
    "optimizer_dtype",
    "gradient_clipping",
    "activation_checkpointing",
    "packing",
    "seed",
    "max_steps",
)
# Equal where the number of processes is: a scaled rate and a weakly scaled batch follow it.
HERE = ("world_size", "global_batch_size", "learning_rate")

# What is counted of each step, over all ranks.
COUNTED = {
    "step_tokens": "tokens",
    "step_non_padding_tokens": "non-padding tokens",
    "step_supervised_tokens": "supervised tokens",
}

# Relative floors of the band. Measured on a 3.2 M Llama, 30 steps on two CPU ranks, against ddp (docs/compare.md):
# fp32 0, 6e-5 and 2e-6 (zero3, fsdp2), bf16 5e-4, 9e-5 and 3e-3 (zero2, fsdp2).
FIRST_LOSS = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
FIRST_GRAD_NORM = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}
CURVE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
# Rounding drives two correct runs apart the further, the longer they are: the floor of a curve grows from here on.
CURVE_STEPS = 30
# Three repeats span about two standard deviations; a further trial of the same problem lies within three such spans.
BAND_SPANS = 3


def promise_broken(trial: Row, promised: Mapping[str, Any]) -> str | None:
    """What the trial attests otherwise than its preset, its command and the numerics contract say."""
    facts = trial["problem"]
    masters = facts["promised_masters"] or CONTRACT_DTYPE
    if facts["ranks"] != trial["world_size"]:
        return f"{facts['ranks']} ranks attested, {trial['world_size']} were asked for"
    expected = {"world_size": trial["world_size"], **promised, **dict.fromkeys(CONTRACT, masters)}
    return next(
        (
            f"{name} is {_shown(facts[name])}, promised {value}"
            for name, value in expected.items()
            if facts[name] != value
        ),
        None,
    )


def unlike(trial: Row, reference: Row, *, names: Sequence[str] = (*EVERYWHERE, *HERE)) -> str | None:
    """The first fact that is not the reference's."""
    own, other = trial["problem"], reference["problem"]
    for name in names:
        if own[name] != other[name]:
            return f"{name} is {_shown(own[name])}, {_shown(other[name])} in {reference['trial']}"
    return None


def other_batches(trial: Row, reference: Row) -> str | None:
    """The first step whose batch on a rank is not the reference's; steps that both have."""
    for step, (own, other) in enumerate(zip(trial["batch_sha256"], reference["batch_sha256"], strict=False), 1):
        if len(own) != len(other):
            return f"step {step} has batches of {len(own)} ranks, of {len(other)} in {reference['trial']}"
        for rank, (mine, theirs) in enumerate(zip(own, other, strict=True)):
            if mine != theirs:
                return f"batch of step {step} on rank {rank} is {mine}, {theirs} in {reference['trial']}"
    return None


def other_counts(trial: Row, reference: Row) -> str | None:
    """The first step of which something else was counted than of the reference's: batches alike count alike."""
    for key, words in COUNTED.items():
        for step, (own, other) in enumerate(zip(trial.get(key, ()), reference.get(key, ()), strict=False), 1):
            if own != other:
                return f"step {step} has {own:,} {words}, {other:,} in {reference['trial']}"
    return None


def other_timing(trial: Row, *, untimed_steps: int) -> str | None:
    """Steps timed that should not be, or the reverse: speeds of a comparison count the same steps."""
    found = trial["timed_step_numbers"]
    promised = list(range(untimed_steps + 1, len(trial["step_seconds"]) + 1))
    if found == promised:
        return None
    step = min(set(found) ^ set(promised))
    return f"step {step} is {'timed' if step in found else 'not timed'}, with untimed_steps {untimed_steps}"


def outside_band(trial: Row, references: Sequence[Row]) -> str | None:
    """The first loss, the first gradient norm or the first step whose loss lies outside the reference's band."""
    dtype = str(trial["problem"]["compute_dtype"])
    figures = (("loss", "losses", FIRST_LOSS), ("gradient norm", "grad_norms", FIRST_GRAD_NORM))
    for words, key, floors in figures:
        said = _outside(f"{words} of step 1", [row[key][:1] for row in (trial, *references)], 0, floors.get(dtype, 0.0))
        if said is not None:
            return f"{said} of {references[0]['preset']}"
    curves = [row["losses"] for row in (trial, *references)]
    for step in range(1, min(map(len, curves))):
        floor = CURVE.get(dtype, 0.0) * max(1.0, (step + 1) / CURVE_STEPS)
        said = _outside(f"loss of step {step + 1}", curves, step, floor)
        if said is not None:
            return f"{said} of {references[0]['preset']}"
    return None


def untimed_step_in_timing(trials: Sequence[Row]) -> str | None:
    """Whether the first timed step is a slow one in every repeat: compilation or growth that should be untimed."""
    shown = []
    for trial in trials:
        seconds = [trial["step_seconds"][number - 1] for number in trial["timed_step_numbers"]]
        if len(seconds) < 4 or seconds[0] <= 2 * statistics.median(seconds[1:]):
            return None
        shown.append((trial["timed_step_numbers"][0], seconds[0], statistics.median(seconds[1:])))
    if not shown:
        return None
    step, first, median = shown[0]
    slow = f"step {step}, the first timed, took {first:.3f} s"
    return f"{slow}, the median of the others {median:.3f} s: raise untimed_steps"


def _outside(words: str, curves: Sequence[Sequence[float | None]], step: int, floor: float) -> str | None:
    """One value of the trial (the first curve) against the same value of the reference's repeats."""
    values = [curve[step] for curve in curves if len(curve) > step]
    own, *others = (value if value is not None and math.isfinite(value) else None for value in values)
    known = [value for value in others if value is not None]
    if own is None or not known:
        return None
    middle = (max(known) + min(known)) / 2
    allowed = max(floor * abs(middle), BAND_SPANS * (max(known) - min(known)))
    if abs(own - middle) <= allowed:
        return None
    return f"{words} is {own:.6f}, allowed {middle:.6f} ± {allowed:.6f}"


def _shown(value: Any) -> str:
    """A digest by its beginning; what ranks do not share, rank by rank."""
    if isinstance(value, list):
        return f"{', '.join(map(_shown, value))} by rank"
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
