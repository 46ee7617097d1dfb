"""Real comparisons with a fault in one row: each fault must be caught by the check that is meant for it.

    python benchmarks/live_faults.py --work DIR

Every row of one `toolkit compare` is a trial of the tiny Llama on two CPU ranks. `benchmarks/faulty_ranks` injects a
fault into the ranks of each row that is named after one; rows of the same presets without a fault are the controls, and
must pass every check. Finished trials are in the ledgers under DIR: the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from record import ROOT, print_table, write_result
from small_job import small_model, words

from toolkit.compare.results import load_results
from toolkit.compare.rows import Row
from toolkit.record.folder import read_json

FAULTY_RANKS = ROOT / "benchmarks" / "faulty_ranks"
HEADER = ("Fault", "What one side does differently", "Preset, arguments", "Caught by", "Message")
SKEWED = 2.0  # a rank slept 0.3 s a step, several times what it otherwise takes by itself
PASSED = ("reference", "agrees")
CONTROLS = ("zero2", "zero3", "fsdp2")  # besides ddp, the baseline


class Fault(NamedTuple):
    """One row with an injected fault."""

    row: str  # its name; a fault of this name in `faulty_ranks` is put into its ranks
    variant: str  # a preset and arguments, as `--variant` has them
    does: str
    caught_by: str
    """The check that must catch it: of a rank's start, a fact of the attestation, a check of parity, or `rank_skew`."""


DTYPE, NORM = "attestation: optimizer_dtype", "attestation: gradient norm at the optimizer"
TRIED = "attestation: norm of a large gradient, clipped"
CHECKPOINTED = "ddp --activation_checkpointing true"
PARITY_OF_CHECKPOINTING = "parity: activation_checkpointing"
WORLD, RECOMPUTES = "start: number of ranks", "attestation: activation_checkpointing"
FAULTS = {
    "bf16 Adam states": (
        Fault("bf16_adam", "ddp", "Adam's moments are kept in bf16", DTYPE),
        Fault("bf16_adam_on_rank_1", "ddp", "the same on one rank", DTYPE),
        Fault("bf16_adam_zero2", "zero2", "the same inside DeepSpeed", DTYPE),
    ),
    "gradient clipping off": (
        Fault("no_clipping", "ddp", "the norm is computed, nothing is clipped", NORM),
        Fault("no_clipping_zero2", "zero2", "the same", NORM),
        Fault("no_clipping_zero3", "zero3", "the same", NORM),
        Fault("no_clipping_fsdp2", "fsdp2", "the same", NORM),
        Fault("nothing_to_clip_yet", "ddp --max_grad_norm 100", "the same, where no gradient is that large", TRIED),
        Fault("clipping_off", "ddp --max_grad_norm 0", "its arguments say so", "parity: gradient_clipping"),
    ),
    "another seed or data order": (
        Fault("order_on_rank_1", "ddp", "rank 1 takes its rows in another order", "parity: batch"),
        Fault("seed_on_rank_1", "ddp", "rank 1 has another seed", "attestation: seed"),
        Fault("other_seed", "ddp --seed 43", "all ranks have another seed", "parity: seed"),
    ),
    "world size 1 for 2": (
        Fault("one_process", "ddp", "one rank trains, the other ends", WORLD),
        Fault("each_alone", "ddp", "two ranks train, each alone", WORLD),
    ),
    "DDP for FSDP": (
        Fault("ddp_for_fsdp2", "fsdp2", "accelerate runs DDP", "attestation: engine"),
        Fault("fsdp2_without_resharding", "fsdp2", "weights stay gathered after forward", "attestation: sharding"),
    ),
    "first step in the timing": (
        Fault("first_step_timed", "ddp", "all steps are timed, the first is 1 s slower", "parity: timed steps"),
        Fault("first_step_timed_as_fast", "ddp", "all steps are timed, none is slower", "parity: timed steps"),
        Fault("compiled_late", "ddp", "the first timed step is 1 s slower", "parity: first timed step"),
    ),
    "one rank slowed": (
        Fault("slow_rank", "ddp", "0.3 s before each forward", "rank_skew"),
        Fault("slow_rank_zero2", "zero2", "the same", "rank_skew"),
        Fault("slow_rank_fsdp2", "fsdp2", "the same", "rank_skew"),
        Fault("slow_loading_on_rank_1", "ddp", "0.3 s in data loading", "rank_skew"),
        Fault("slow_optimizer_on_rank_1", "ddp", "0.3 s in the optimizer", "rank_skew"),
    ),
    "activation checkpointing changed": (
        Fault("checkpointing", "ddp", "switched on in the model", RECOMPUTES),
        Fault("checkpointing_without_a_flag", "ddp", "done, and no module says so", RECOMPUTES),
        # A layer whose checkpoint function is not torch's reads as one that offloads, and that is reported first.
        Fault("no_checkpointing", CHECKPOINTED, "enabled, and not done", f"{RECOMPUTES}_offload"),
        Fault("recomputing", CHECKPOINTED, "its arguments say so", PARITY_OF_CHECKPOINTING),
    ),
}
# Rows of different lengths, so that there is padding.
MISCOUNTED = (
    Fault("padding_counted_alone", "ddp", "only padding is counted", "parity: tokens"),
    Fault("padding_counted_as_text", "ddp", "padding is counted as text", "parity: non-padding tokens"),
    Fault("prompt_counted_as_supervised", "ddp", "prompts are counted as supervised", "parity: supervised tokens"),
    Fault("padded_to_the_longest", "ddp", "counted right, but all rows are padded to 256", "parity: batch"),
)
# Compared with itself: the baseline with one process is the control of the baseline with two.
AT_TWO = Fault("checkpointing_at_two", "ddp", "off with one process, on with two", PARITY_OF_CHECKPOINTING)

# How a parity message begins, and the check that reports it. Other messages begin with the fact that differs.
PARITY = {
    r"batch of step \d+ on rank \d+ is": "batch",
    r"step \d+ has [\d,]+ (tokens|non-padding tokens|supervised tokens),": "",
    r"step \d+ is (?:not )?timed": "timed steps",
    r"step \d+, the first timed, took": "first timed step",
    r"(\w+) is ": "",
}


def compare(folder: Path, training: Sequence[str], faults: Sequence[Fault], *options: str) -> None:
    """Run or resume one comparison, with `FAULTY_RANKS` on its path."""
    variants = [word for fault in faults for word in ("--variant", f"{fault.row}={fault.variant}")]
    command = ["compare", *options, *variants, "--repeats", "1", "--target-interval", "0", "--cpu", "--resume"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FAULTY_RANKS), str(ROOT)])}
    argv = [sys.executable, "-m", "toolkit", *command, "--output", str(folder), "--", *training]
    if code := subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"the comparison in {folder} ended with {code}")


def caught_by(row: Row, run: Path) -> str | None:
    """Return the check that reported first, from the files of the run and the comparison; None if none did."""
    if row.status == "attestation_failed":
        first = (read_json(run / "attestation.json") or {})["differences"][0]
        return f"attestation: {first['fact']}"
    if row.status == "failed" and re.match(r"the job asked for \d+ ranks", row.message or ""):
        return WORLD
    if row.failed_parity:
        return f"parity: {parity_check(row.parity_message or '')}"
    return "rank_skew" if row.completed and (row.rank_skew or 0) > SKEWED else None


def parity_check(message: str) -> str:
    for pattern, name in PARITY.items():
        if found := re.match(pattern, message):
            return name or found[1]
    return message


def figures(folder: Path, name: str) -> dict[str, Any]:
    """Return the comparison's verdicts on one row."""
    row = next(row for row in load_results(folder).rows if row.trial == name)
    run = folder / row.run_folder
    log = (run / "train.log").read_text()
    shown = ("status", "parity", "tokens_per_second", "rank", "rank_skew")
    return {
        "found_by": caught_by(row, run),
        "message": first_difference(row.parity_message or row.message or ""),
        "ranks_that_acted": sorted(int(rank) for rank in re.findall(r"fault \w+ acts on rank (\d+)", log)),
        **{key: getattr(row, key) for key in shown},
    }


def judged(name: str, fault: Fault, found: dict[str, Any]) -> dict[str, Any]:
    """Return the fault with how it was detected."""
    slow = fault.caught_by == "rank_skew"
    kept = found["tokens_per_second"] is not None and found["parity"] == "agrees"
    withheld = found["tokens_per_second"] is None and found["rank"] is None
    as_it_should = found["found_by"] == fault.caught_by and (kept if slow else withheld)
    if slow and kept:
        found = found | {"message": f"rank_skew {found['rank_skew']:.1f}, its speed is kept"}
    return {"fault": name, **fault._asdict(), "as_it_should": as_it_should, **found}


def table_rows(_: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    shown = ("fault", "does", "variant", "found_by")
    return [[*(row[key] for key in shown), f"`{row['message']}`"] for row in rows if "fault" in row]


def first_difference(message: str) -> str:
    """Return the first of several differences, without the introduction that all messages share."""
    # The attestation's message begins with a sentence on the run, whose words differ between recorded versions.
    difference = message.partition(": ")[2] if message.startswith("the run ") else message
    return difference.partition("; ")[0]


def job(model: Path, max_seq_length: int = 64) -> list[str]:
    """Return the training arguments of every row; at 64 tokens nearly all sequences are truncated to one length."""
    steps = {"max_steps": 8, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    return words(model_name_or_path=model, max_seq_length=max_seq_length, **steps)


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults in live comparisons, each caught by its own check.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the comparisons")
    given = parser.parse_args()
    model = small_model(given.work / "small-llama")
    every = [(name, fault) for name, faults in FAULTS.items() for fault in faults]
    presets = [word for name in ("ddp", *CONTROLS) for word in ("--preset", name)]
    two, padded, scaled = (given.work / name for name in ("two", "padded", "scaled"))
    compare(two, job(model), [fault for _, fault in every], *presets, "--num-processes", "2")
    compare(padded, job(model, 256), MISCOUNTED, "--preset", "ddp", "--num-processes", "2")
    compare(scaled, job(model), [AT_TWO], "--num-processes", "1,2")
    controls = {name: figures(two, f"{name}-n2") for name in ("ddp", *CONTROLS)}
    controls["ddp, with padding"] = figures(padded, "ddp-n2")
    controls["ddp, one process"] = figures(scaled, f"{AT_TWO.row}-n1")
    faults = [judged(name, fault, figures(two, f"{fault.row}-n2")) for name, fault in every]
    faults.append(judged(every[-1][0], AT_TWO, figures(scaled, f"{AT_TWO.row}-n2")))
    faults += [judged("tokens miscounted", fault, figures(padded, f"{fault.row}-n2")) for fault in MISCOUNTED]
    return publish(controls, faults)


def publish(controls: dict[str, dict[str, Any]], faults: Sequence[dict[str, Any]]) -> int:
    """Print the table and write the results; return 1 if a fault was missed or a control failed a check."""
    print_table(HEADER, table_rows({}, faults))
    missed = [row["row"] for row in faults if not row["as_it_should"]]
    flagged = [name for name, control in controls.items() if control["found_by"] or control["parity"] not in PASSED]
    idle = [row["row"] for row in faults if " " not in row["variant"] and not row["ranks_that_acted"]]
    for introduction, names in (("missed", missed), ("flagged without a fault", flagged), ("never acted", idle)):
        print(f"{introduction}: {', '.join(names) or 'none'}")
    print(write_result("live_faults", {}, [*({"control": name, **row} for name, row in controls.items()), *faults]))
    return int(bool(missed or flagged or idle))


if __name__ == "__main__":
    sys.exit(main())
