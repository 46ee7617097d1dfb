"""How often verification is right: every deviation that it claims to find, and honest runs that it must not flag.

    python benchmarks/verification.py --work DIR

Each run is the small Llama on CPU ranks, one optimizer step. `deviating_runs.py` has the runs, and `faults`, by
`tests/support/faulty_ranks`, changes what trains, from outside. A deviation counts as found only if the run ended with
the verification's error, and the field is among its differences, with the expected value and the one that was read.
Finished runs are in DIR/runs.jsonl: the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deviating_runs import GRPO, OURS, Run, deviating_runs, honest_runs
from record import ROOT, append_line, read_lines, write_result
from small_job import fork_runs_on_cpus, small_model, words

sys.path.append(str(ROOT / "tests" / "support"))

from trl_jobs import GENERATES, TRL_ROWS

from toolkit.launch.launch import prepare_run, run_training
from toolkit.launch.options import TrainOptions
from toolkit.observe.verify.differences import Difference
from toolkit.record.folder import read_json

FAULTY_RANKS = ROOT / "tests" / "support" / "faulty_ranks"
FAULTS = ROOT / "benchmarks" / "faults"
FAULT_VARIABLE = "TOOLKIT_FAULT"
OTHER_TRAINERS = ROOT / "tests" / "scripts" / "other_trainers.py"
COPIES = ROOT / "tests" / "scripts" / "apart.py"
TIMEOUT_MINUTES = 10.0


def options_of(run: Run, folder: Path, model: Path) -> TrainOptions:
    """Return the options of `toolkit train` for a run in `folder`."""
    given = TrainOptions(preset=run.preset, num_processes=run.ranks, cpu=True, timeout_minutes=TIMEOUT_MINUTES)
    more = run.arguments.split()
    if run.trainer == OURS:
        job = {"model_name_or_path": model, "save_model": "false", "max_steps": 1, "per_device_train_batch_size": 2}
        return replace(given, training_arguments=(*words(**job, output_dir=folder / "run"), *more))
    if run.trainer.startswith(("Trainer", "Copies")):
        script = OTHER_TRAINERS if run.trainer.startswith("Trainer") else COPIES
        words_of = (run.trainer.partition("(")[2].rstrip(")"), str(folder / "out"))
        return replace(given, script=str(script), output_dir=folder / "run", training_arguments=words_of)
    rows = [TRL_ROWS[run.trainer] for _ in range(16)]
    if run.trainer != GRPO:
        rows = [row | {"prompt": f"Question {number}?"} for number, row in enumerate(rows)]
    (folder / "rows").mkdir(parents=True)
    (folder / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = {"model_name_or_path": model, "dataset_name": folder / "rows", "output_dir": folder / "out", "max_steps": 1}
    job |= {"report_to": "none", "per_device_train_batch_size": 2, "save_strategy": "no", "use_cpu": "true"}
    more = [word for name, value in job.items() for word in (f"--{name}", str(value))] + ["--bf16", "true", *more]
    words_of = (*more, *(GENERATES if run.trainer == GRPO else ()))
    module = f"trl.scripts.{run.trainer}"
    return replace(given, module=module, output_dir=folder / "run", training_arguments=words_of)


def measure(run: Run, work: Path, model: Path) -> dict[str, Any]:
    """Run it, and return how it ended."""
    folder = work / "runs" / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ.pop(FAULT_VARIABLE, None)
    if run.fault:
        os.environ[FAULT_VARIABLE] = run.fault
    started = time.monotonic()
    prepared = prepare_run(options_of(run, folder, model), on_message=lambda _: None)
    result = run_training(
        prepared.command,
        options=prepared.options,
        output_dir=prepared.run.output_dir,
        on_line=lambda _: None,
    )
    failure, log = result.failure or {}, (folder / "run" / "train.log").read_text(errors="replace")
    message = failure.get("message") or ""
    told = log.partition("error: ")[2] if run.field == "world_size" else message  # each such rank is rank 0
    acted = sorted(int(rank) for rank in re.findall(r"fault \w+ acts on rank (\d+)", log))
    ended = {"status": str(result.status), "message": message[:400], "ranks_that_acted": acted}
    return {
        **run._asdict(),
        **ended,
        "found": found(run, folder / "run", told),
        "seconds": time.monotonic() - started,
    }


def found(run: Run, folder: Path, message: str) -> str | None:
    """Return the reported difference of the run's field, with both values; None if there is none."""
    if run.field == "packing":
        isolated = re.search(r"packed rows are not isolated: a token's loss differs by .+? from the row alone", message)
        return isolated[0] if isolated else None
    if run.field == "world_size" and (started := re.search(r"asked for 2 ranks .*?, and 1 were started", message)):
        return started[0]  # the check at a rank's start comes first
    if run.field in ("master_dtype", "gradient_dtype"):  # and a 16-bit model is refused when `train()` begins
        refused = re.match(r"the weights to train are bfloat16, and '\w+' trains float32 master weights", message)
        if refused:
            return refused[0]
    attestation = read_json(folder / "attestation.json") or {}
    if attestation.get("verdict") != "attestation_failed" or not message.startswith(
        "the run does not match its preset"
    ):
        return None
    differences = [Difference(name=found.pop("fact"), **found) for found in attestation["differences"]]
    of_field = [each for each in differences if each.name.partition(" (")[0].removesuffix(" of all ranks") == run.field]
    return str(of_field[0]) if of_field else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Deviations that verification must find, and honest runs.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument(
        "--only", default="", help="run those alone whose name matches this pattern; several may run at once"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run after so many minutes")
    given = parser.parse_args()
    os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, (FAULTY_RANKS, FAULTS, ROOT))), "OMP_NUM_THREADS": "1"}
    fork_runs_on_cpus()
    given.work.mkdir(parents=True, exist_ok=True)
    model, ledger = small_model(given.work / "small-llama"), given.work / "runs.jsonl"
    runs = [*deviating_runs(), *honest_runs()]
    assert len({run.name for run in runs}) == len(runs)
    deadline = time.monotonic() + given.minutes * 60
    done = {Run(*(row[name] for name in Run._fields)): row for row in read_lines(ledger)}
    for run in runs:
        if run not in done and re.search(given.only, run.name) and time.monotonic() < deadline:
            done[run] = measure(run, given.work, model)
            append_line(ledger, done[run])
            print(run.name, done[run]["status"], done[run]["found"] or done[run]["message"], flush=True)
    rows = [done[run] for run in runs if run in done]
    return publish(rows, planned=len(runs), writes=not given.only)


def publish(rows: Sequence[dict[str, Any]], *, planned: int, writes: bool) -> int:
    """Print what was missed and flagged, and write the results; return 1 if there is any, or a run is left."""
    deviating, honest = [row for row in rows if row["field"]], [row for row in rows if not row["field"]]
    missed = [
        row["fault"] + " under " + row["preset"] + " in " + row["trainer"] for row in deviating if not row["found"]
    ]
    flagged = [f"{row['trainer']} {row['preset']} {row['arguments']}" for row in honest if row["status"] != "completed"]
    print(f"found: {len(deviating) - len(missed)} of {len(deviating)}; missed: {', '.join(missed) or 'none'}")
    print(f"flagged: {len(flagged)} of {len(honest)} honest runs: {', '.join(flagged) or 'none'}")
    if writes:
        trainers = dict(Counter(row["trainer"] for row in honest))
        figures: dict[str, Any] = {
            "planned_runs": planned,
            "deviations": len(deviating),
            "found": len(deviating) - len(missed),
        }
        figures |= {"honest": len(honest), "flagged": len(flagged), "honest_by_trainer": trainers}
        print(write_result("verification", figures, rows))
    return int(bool(missed or flagged) or len(rows) < planned)


if __name__ == "__main__":
    sys.exit(main())
