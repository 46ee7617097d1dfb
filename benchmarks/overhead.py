"""Tokens per CPU-second of the timed steps under `toolkit train`, against a plain Trainer script on the same job.

    python benchmarks/overhead.py --work DIR
    python benchmarks/overhead.py --work DIR --first-step      # seconds until the first step is done
    python benchmarks/overhead.py --work DIR --observe         # other scripts: under toolkit.observe, and alone

Both sides train the default model in fp32 on CPU ranks of one thread each, on the same batches: their losses are
compared step by step. The two sides of a pair train in turns, a step each (`peer_jobs/turns.py`): what slows the node
down slows both. A ratio above 1 means that the toolkit trains more tokens with the same processor time. With
`--observe` both sides are the same script, on the small model and the rows of `benchmarks/peers.py`.

glibc gives the pages of large tensors back to the kernel and asks for them again, at a rate that depends on where the
heap happens to end: one script's page faults per step differed by half from run to run. With `--observe` both sides
keep them, so that what the programs themselves do is measured.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peer_jobs import comparison
from peer_jobs.job import METHODS, Job, Setting
from peer_jobs.job import prepare as prepare_peers_job
from peer_jobs.measurement import Run
from peer_jobs.turns import run_in_turns
from peers import BASELINE, OURS, run_program
from record import append_line, print_table, read_lines, spread, write_result

from toolkit.compare.significance import mean_interval
from toolkit.engines.compiled_ops import path_with_ninja

TABLE, FIRST_STEP_TABLE = "overhead", "first_step"
HEADER = ("job", "pairs", "tokens per CPU-second: toolkit / plain script (95 % CI)", "goal", "largest loss difference")
OBSERVED_TABLE = "observed_pages_kept"
OBSERVED_HEADER = ("script", "pairs", "tokens per CPU-second: observed / alone (95 % CI)", "goal")
OBSERVED_HEADER += ("first step later by, median (s)", "largest loss difference")
FIRST_STEP_HEADER = ("job", "pairs", "toolkit (s)", "plain script (s)", "difference (s)")
SIDES = (OURS, BASELINE)
MAX_SEQ_LENGTH = 64
OBSERVED_CASES = [f"{preset}/{script}" for preset in ("single", "ddp") for script in ("bare", "trl")]
CASES = [f"{preset}/{method}" for preset in ("single", "ddp", "zero2", "fsdp2") for method in METHODS]
# torchtune 0.6.1 trains LoRA in one process with 1.12 times the tokens per CPU-second of a plain Trainer.
GOALS = {"single/lora": 1.12}
GOAL = 1.0
OBSERVED_GOAL, WIDEST_INTERVAL = 0.99, 0.02
TIMEOUT_SECONDS = 1200
# One arena, because those of threads other than the first end at 64 MiB, and what is larger is mapped anew.
KEPT_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**36), "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_ARENA_MAX": "1"}


def prepare(scratch: Path, model: Path | None) -> tuple[Path, Path, Path]:
    """Return model and data, the demo's by default, and the toolkit's tokens of the data for the plain script."""
    import datasets

    from toolkit.demo.assets import default_data_file, prepare_default_model
    from toolkit.job.argument_fields import DataArguments, ModelArguments
    from toolkit.train.data.tokenization import EncodedSource, encode_rows, load_rows, row_encoder
    from toolkit.train.model.loading import load_tokenizer

    datasets.disable_progress_bars()
    model, dataset, tokens = model or prepare_default_model(), default_data_file(), scratch / "tokens"
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=str(model)), chat_template=None)
    rows, data_format = load_rows(str(dataset), "train")
    encoder = row_encoder(tokenizer, data_format, DataArguments(max_seq_length=MAX_SEQ_LENGTH))
    source = EncodedSource(name=str(dataset), rows=encode_rows(rows, encoder), encoder=encoder)
    source.supervised()[0].save_to_disk(tokens)
    return model, dataset, tokens


def measure_pair(case: str, sides: dict[str, tuple[str, Job, bool]], number: int) -> dict[str, Any]:
    """Run both sides: each a program, its job, and whether it is observed; every second pair begins with the second.

    Raises SystemExit where one fails, or where its ranks do not train together.
    """
    order = SIDES if number % 2 == 0 else tuple(reversed(SIDES))
    setting = sides[OURS][1].setting
    starts = [functools.partial(measure_side, *sides[side]) for side in order]
    turns = run_in_turns(starts, ranks=sides[OURS][1].ranks, rounds=setting.timed_steps)
    runs = dict(zip(order, turns, strict=True))
    figures = {}
    for side, run in runs.items():
        job = sides[side][1]
        if run.error is not None:
            raise SystemExit(f"{case}, {side}: {run.error}")
        figures[side] = comparison.figures(asdict(run), job.setting.untimed_steps, 1)
        if (ran_as := figures[side]["facts"]["engine"]) != job.preset:
            raise SystemExit(f"{case}, {side}: it ran as {ran_as}")
    losses = zip(*(figures[side]["losses"] for side in SIDES), strict=True)
    return {
        "case": case,
        "number": number,
        "cpu_seconds": {name: setting.timed_steps / own["tokens_per_cpu_second"] for name, own in figures.items()},
        "first_step_seconds": {name: own["first_step_seconds"] for name, own in figures.items()},
        "loss_difference": max(abs(ours - bare) / abs(bare) for ours, bare in losses),
    }


def measure_side(program: str, job: Job, observed: bool, turns_port: int) -> Run:
    """Run a program once, in turns with the other side."""
    with tempfile.TemporaryDirectory() as folder:
        where = {"environments_folder": Path(folder), "timeout": TIMEOUT_SECONDS, "turns_port": turns_port}
        run = run_program(program, job, Path(folder) / "run", **where, observed=observed)
        if run.error is not None:
            print((Path(folder) / "run" / "log").read_text(errors="replace")[-4000:])
        return run


def cases_of(pairs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {case: [pair for pair in pairs if pair["case"] == case] for case in dict.fromkeys(p["case"] for p in pairs)}


def table_rows(_: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Return per case the ratio of tokens per CPU-second, with Student's t on logarithms, and whether it is enough."""
    rows: list[list[object]] = []
    for case, own in cases_of(pairs).items():
        # Both sides train the same tokens, so that the ratio of tokens per second is the inverse ratio of the seconds.
        ratios = [pair["cpu_seconds"]["bare"] / pair["cpu_seconds"]["toolkit"] for pair in own]
        mean, interval, goal = statistics.geometric_mean(ratios), mean_interval(ratios), GOALS.get(case, GOAL)
        shown = f"{mean:.3f}" + ("" if interval is None else " ({:.3f} to {:.3f})".format(*interval))
        goal = OBSERVED_GOAL if case in OBSERVED_CASES else goal
        reached = f"{goal:.2f} {'reached' if mean >= goal else 'missed'}"
        if case in OBSERVED_CASES and (interval is None or interval[1] - interval[0] > 2 * WIDEST_INTERVAL):
            reached = f"not shown: CI wider than ± {WIDEST_INTERVAL:.0%}"
        rows.append([case, len(own), shown, reached, f"{max(pair['loss_difference'] for pair in own):.0e}"])
    return rows


def observed_rows(_: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Return the ratio of each script, and how much later its first step is done where it is observed."""
    speeds, starts = table_rows({}, pairs), first_step_rows({}, pairs)
    return [[*speed[:4], start[-1], speed[-1]] for speed, start in zip(speeds, starts, strict=True)]


def first_step_rows(_: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> list[list[object]]:
    rows: list[list[object]] = []
    for case, own in cases_of(pairs).items():
        seconds = [pair["first_step_seconds"] for pair in own]
        medians = [f"{spread([each[name] for each in seconds])['median']:.1f}" for name in SIDES]
        differences = spread([each["toolkit"] - each["bare"] for each in seconds])
        rows.append([case, len(own), *medians, "{median:+.1f} ({min:+.1f} to {max:+.1f})".format(**differences)])
    return rows


TABLES = {TABLE: (HEADER, table_rows), FIRST_STEP_TABLE: (FIRST_STEP_HEADER, first_step_rows)}
TABLES |= {OBSERVED_TABLE: (OBSERVED_HEADER, observed_rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of `toolkit train` against a plain Trainer script.")
    parser.add_argument("--case", nargs="+", metavar="PRESET/METHOD", help="or, with `--observe`, PRESET/SCRIPT")
    parser.add_argument("--model", type=Path, help="a folder; the default model if not given")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, help="default: 14, with `--observe` 30")
    parser.add_argument("--untimed-steps", type=int, help="default: 2, with `--observe` 5")
    parser.add_argument("--first-step", action="store_true", help="two steps, for the seconds until the first is done")
    parser.add_argument(
        "--observe", action="store_true", help="other scripts, observed and alone; `bare` is a plain Trainer"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for finished pairs; the same command resumes")
    parser.add_argument("--name", help="name of the result file; default: by what is measured")
    parser.add_argument("--at-most", type=int, help="stop after this many pairs; the next call resumes")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    # The same ninja for both sides: another version of it would compile DeepSpeed's ops again in every second run.
    os.environ |= {"HF_HUB_OFFLINE": "1", "PATH": path_with_ninja(), **(KEPT_PAGES if given.observe else {})}
    trained = {"batch_size": 1, "max_length": MAX_SEQ_LENGTH, "learning_rate": 1e-5}  # the model has been trained
    setting = Setting() if given.observe else Setting(steps=14, untimed_steps=2, **trained)
    setting = replace(setting, steps=2, untimed_steps=1) if given.first_step else setting
    asked = {"steps": given.steps, "untimed_steps": given.untimed_steps}
    setting = replace(setting, **{name: number for name, number in asked.items() if number is not None})
    if given.first_step and given.observe:
        parser.error("--first-step: the table of --observe has it")
    name = OBSERVED_TABLE if given.observe else FIRST_STEP_TABLE if given.first_step else TABLE
    cases, (header, rows_of) = OBSERVED_CASES if given.observe else CASES, TABLES[name]
    if other := set(given.case or cases).difference(cases):
        parser.error(f"{', '.join(other)}: expected {', '.join(cases)}")
    ledger = given.work / f"{name}.jsonl"
    finished = {(pair["case"], pair["number"]) for pair in read_lines(ledger)}
    wanted = [(case, number) for number in range(given.pairs) for case in given.case or cases]
    waiting = [pair for pair in wanted if pair not in finished]
    with tempfile.TemporaryDirectory() as scratch:
        if given.observe:
            model, rows = prepare_peers_job(given.work / "job", setting)
        else:
            model, dataset, rows = prepare(Path(scratch), given.model)
        for case, number in waiting[: given.at_most]:
            preset, named = case.split("/")
            job = Job(preset=preset, method="full", setting=setting, model=model, rows=rows)
            sides = {OURS: (named, job, True), BASELINE: (named, job, False)}
            if not given.observe:
                job = replace(job, method=named)
                sides = {OURS: (OURS, replace(job, rows=dataset), False), BASELINE: (BASELINE, job, False)}
            append_line(ledger, measure_pair(case, sides, number))
    if given.at_most is not None and len(waiting) > given.at_most:
        raise SystemExit(f"{len(waiting) - given.at_most} of {len(wanted)} pairs are left: the same command resumes")
    pairs = sorted(read_lines(ledger), key=lambda pair: (cases.index(pair["case"]), pair["number"]))
    print_table(header, rows_of({}, pairs))
    print(write_result(given.name or name, {"steps": setting.steps, "untimed_steps": setting.untimed_steps}, pairs))


if __name__ == "__main__":
    main()
