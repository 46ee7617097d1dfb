"""The training script of a rehearsal: one process that is rank r of N, with a fake process group around it.

It is `toolkit.train.script` with other parts: the same arguments, run folder, engine and Trainer; synthetic data where
none is given, random weights where there are none, and a summary of what this rank held instead of a trained model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from transformers import set_seed

from toolkit.observe.attest.tensors import compute_dtype
from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.observer import Observer
from toolkit.observe.progress import Progress
from toolkit.presets.spec import PresetSpec
from toolkit.record.measurements import read_rows
from toolkit.rehearse.rehearsal import RehearsedRank, has_local_weights
from toolkit.rehearse.stand_ins import REHEARSAL_PARTS, join_fake_world, rehearsal_data, rehearsal_model
from toolkit.rehearse.trace import trace
from toolkit.train.active_run import ActiveRun, open_run
from toolkit.train.arguments import LaunchContext, parse_args, set_up_libraries
from toolkit.train.trainer import build_trainer

# A rehearsal measures neither of these: recorded in run.json and shown with every result.
NOT_MEASURED = (
    "losses, gradient norms and accuracies (what other ranks would have sent is not there)",
    "the speed of collectives, and of a step that waits for them",
    "whether all ranks hold the same weights and different batches",
)
WITH_EXPERTS = "how many tokens other ranks send to the experts of this one: here as many as it sends itself"
WITH_PACKING = "whether the rows of a pack are isolated from each other (that takes the weights of all ranks)"
MODEL_STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")


def main(rehearsed: RehearsedRank, preset: PresetSpec, argv: Sequence[str], progress: Progress) -> None:
    """Rehearse the rank with the training arguments `argv`. Raises whatever went wrong."""
    progress.enter("arguments")
    join_fake_world(rehearsed, preset)
    set_up_libraries(progress)
    launch = replace(LaunchContext.of_preset(preset, rehearsed.world_size), folder_prepared=True)
    args = parse_args(argv, launch)
    facts = asdict(rehearsed)
    with open_run(args, launch, progress, single_process=True, rehearsal=facts) as run:
        run.start_health_checks()
        set_seed(args.training.seed)
        if rehearsed.fake_tensors:
            run.write_completion(rehearsal=facts | trace(args, launch) | {"random_weights": True})
            return
        progress.enter("data")
        tokenizer, data = rehearsal_data(args)
        progress.enter("load")
        model = rehearsal_model(args.job, compute_dtype=compute_dtype(args.training), layout_at_load=run.layout_at_load)
        trainer = build_trainer(run, model, tokenizer, data, REHEARSAL_PARTS)
        trainer.train()
        run.write_completion(rehearsal=rehearsal_facts(run, rehearsed, trainer))


def rehearsal_facts(run: ActiveRun, rehearsed: RehearsedRank, trainer: Any) -> dict[str, Any]:
    """Return run.json's `rehearsal`: the bytes that this rank held, read back after its first step, and its peaks."""
    job, layout = run.arguments.job, run.arguments.layout
    facts = measured_facts(run, rehearsed, trainer.observer, untimed_steps=job.untimed_steps)
    more = [*([WITH_EXPERTS] if layout is not None and layout.ep > 1 else []), *([WITH_PACKING] if job.packing else [])]
    facts["not_measured"] += more
    return facts | {"random_weights": not has_local_weights(str(job.model_name_or_path))}


def measured_facts(
    run: ObservedRun, rehearsed: RehearsedRank, observer: Observer, *, untimed_steps: int
) -> dict[str, Any]:
    """Return what was read back from this rank's live objects after its first step, and its peaks."""
    own, rows = dict(observer.attestation.reading or {}), read_rows(run.folder.rank_rows(rehearsed.rank))
    timed = [row.seconds for row in rows[untimed_steps:]]
    return {
        **asdict(rehearsed),
        "steps": len(rows),
        **{name: own[name] for name in (*MODEL_STATES, "num_params", "num_trainable_params")},
        **{name: max((size for row in rows if (size := getattr(row, name))), default=None) for name in PEAKS},
        # On a CPU, fp32 arithmetic says nothing about a GPU's step.
        "compute_step_seconds": statistics.median(timed) if timed and own["device"].startswith("cuda") else None,
        "not_measured": list(NOT_MEASURED),
        "phase_peaks": observer.timer.read_peaks(),
    }
