"""`toolkit tune` against all trials of the same twelve settings, on two CPU ranks.

    python benchmarks/tune_on_two_ranks.py --work DIR --run     # every setting in every round; repeat to resume
    python benchmarks/tune_on_two_ranks.py --work DIR           # replay the search, and write the result

The job is a tiny Llama with eight sequences per step, and the user's own setting a poor one: zero2 with a per-GPU batch
of 1, four accumulation steps and activation checkpointing. A search is a function of its ledger, so it is replayed on
the ledger of all trials: it sees the trials that it would have run, in the rounds in which they ran, and no others. It
does as well as it should if its setting is the fastest of all trials, or not shown to be slower by them, and if its
trials took at most half of the time of all.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import ROOT, print_table, write_result
from small_job import fork_runs_on_cpus, small_model, words

from toolkit.compare.commands import check_comparison
from toolkit.compare.ledger import LEDGER_FILE, Ledger, LedgerRecord
from toolkit.compare.runner import Runner
from toolkit.compare.significance import common_steps, ratio_confidence
from toolkit.compare.specification import make_specification, open_comparison
from toolkit.tune.commands import compare_options
from toolkit.tune.elimination import ratio_interval
from toolkit.tune.field import make_field
from toolkit.tune.options import TuneOptions
from toolkit.tune.standing import stand, trial_of

OWN = "zero2"
LARGEST_SHARE = 0.5


def options_of(folder: Path, model: Path) -> TuneOptions:
    """Return the search."""
    job = {"model_name_or_path": model, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    return TuneOptions(
        output_dir=folder,
        preset=(OWN, "ddp"),
        keep=("loss", "compile"),
        num_processes=2,
        cpu=True,
        training_arguments=tuple(words(**job, activation_checkpointing="true", learning_rate="1e-3")),
    )


def run_all(options: TuneOptions) -> None:
    """Run every trial of every setting, as `toolkit compare` does."""
    compared = compare_options(options, make_field(options, OWN))
    runner = check_comparison(Runner(options=compared, spec=make_specification(compared)))
    open_comparison(options.output_dir, runner.spec, resume=True)
    with runner.progress:
        runner.run()


def compare(options: TuneOptions) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Replay the search on the trials; return facts about it and about all trials, and a row per setting."""
    field = make_field(options, OWN)
    records = Ledger(options.output_dir / LEDGER_FILE).read()
    trials = [record for record in records.values() if record.kind == "trial"]
    finished = Counter(trial.preset for trial in trials)
    rounds = min(finished[setting.name] for setting in field.settings)
    trials = [trial for trial in trials if trial.repeat < rounds]
    spec = make_specification(compare_options(replace(options, rounds=rounds), field))
    seen: dict[str, LedgerRecord] = {}
    while (standing := stand(field.settings, spec, seen)).missing:
        trial = trial_of(standing.missing[0], spec, standing.round - 1).id
        seen[trial] = next(record for record in trials if record.trial == trial)
    steps = common_steps(trials)
    seconds = {
        setting.name: [
            statistics.fmean(trial.step_seconds[number - 1] or 0.0 for number in trial.timed_step_numbers[:steps])
            for trial in sorted(trials, key=lambda trial: trial.repeat)
            if trial.preset == setting.name and trial.completed
        ]
        for setting in field.settings
    }
    logs = {name: [math.log(each) for each in values] for name, values in seconds.items()}
    best = min(logs, key=lambda name: statistics.fmean(logs[name]))
    assert standing.winner is not None
    winner = standing.winner.setting.name
    confidence = ratio_confidence(len(logs) - 1)
    interval = None if winner == best else ratio_interval(logs, winner, best, confidence=confidence)
    spent, whole = (sum(trial.wall_seconds or 0.0 for trial in each) for each in (seen.values(), trials))
    facts = {
        "winner": winner,
        "ended": standing.ended,
        "ratio_to_yours": standing.ratio_to_yours(winner),
        "rounds": rounds,
        "exhaustive_winner": best,
        "ratio_of_winners": math.exp(statistics.fmean(logs[winner]) - statistics.fmean(logs[best])),
        "ratio_interval": interval,
        "winner_is_right": interval is None or interval[0] <= 1,
        "trials": len(seen),
        "exhaustive_trials": len(trials),
        "trial_seconds": spent,
        "exhaustive_trial_seconds": whole,
        "share_of_time": spent / whole,
    }
    rows = [
        {
            "setting": each.setting.name,
            "outcome": each.outcome,
            "round": each.round,
            "trials": len(each.logs),
            "seconds_per_step": seconds[each.setting.name],
        }
        for each in standing.measured
    ]
    return facts, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--run", action="store_true", help="run the trials that are missing")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    options = options_of(given.work / "all", small_model(given.work / "tiny-llama", vocab_size=4096))
    if given.run:
        os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        fork_runs_on_cpus()
        run_all(options)
        return 0
    facts, rows = compare(options)
    table = [
        [row["setting"], row["outcome"], row["round"] or "", row["trials"], geometric(row["seconds_per_step"])]
        for row in sorted(rows, key=lambda row: geometric(row["seconds_per_step"]))
    ]
    print_table(("setting", "outcome", "round", "trials", "s per step, all trials"), table)
    print(facts)
    print(write_result("tune_on_two_ranks", facts, rows))
    return int(not (facts["winner_is_right"] and facts["share_of_time"] <= LARGEST_SHARE))


def geometric(values: list[float]) -> float:
    return round(statistics.geometric_mean(values), 4) if values else math.nan


if __name__ == "__main__":
    sys.exit(main())
