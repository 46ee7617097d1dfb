"""A comparison for real: presets of a tiny Llama, killed, resumed, replayed, and tampered with."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, read, toolkit

from toolkit.compare.aggregate import compared
from toolkit.compare.asked import Entry, numbers_of_processes, parse_variant, strong_batches
from toolkit.compare.dry_run import dry_run_text
from toolkit.compare.largest_batch import largest_that_runs
from toolkit.compare.ledger import Ledger, alone
from toolkit.compare.loading import load_results
from toolkit.compare.rows import row_of
from toolkit.compare.trials import Trial, open_comparison, read_comparison
from toolkit.errors import ToolkitError
from toolkit.runs.folder import RunFolder

TRIALS = ["ddp-n2-r0", "ddp-n2-r1", "zero2-n2-r0", "zero2-n2-r1"]


def words(folder: Path, model: Path, data: Path, *options: str) -> list[str]:
    job = ["--model_name_or_path", str(model), "--dataset", str(data), "--max_seq_length", "64"]
    job += ["--max_steps", "30", "--per_device_train_batch_size", "2"]
    return ["compare", *options, "--num-processes", "2", "--output", str(folder), "--cpu", "--resume", "--", *job]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Path:
    """ddp and zero2 twice each, a variant that fails and a preset that a CPU cannot run; killed and interrupted."""
    folder = tmp_path_factory.mktemp("comparison") / "cmp"
    options = ["--preset", "ddp", "--preset", "zero2", "--preset", "zeropp", "--repeats", "2"]
    options += ["--variant", "flash=ddp --attn_implementation flash_attention_2", "--target-interval", "0.9"]
    # in this order: ddp, zero2, flash, ddp, flash, zero2
    command = words(folder, tiny_model, faq_alpaca, *options, "--order-seed", "6")
    killed(command, signal.SIGKILL, lambda: "data: alpaca" in log_of(folder, "ddp-n2-r0"))
    killed(command, signal.SIGKILL, lambda: len(ledger_lines(folder)) == 1)
    said = killed(command, signal.SIGINT, lambda: "data: alpaca" in log_of(folder, "zero2-n2-r0"))
    assert "`--resume` goes on" in said
    assert read(folder / "trials" / "zero2-n2-r0" / "run.json")["status"] == "interrupted"
    before = ledger_lines(folder)
    ended = toolkit(*command)
    assert ended.returncode == 0, ended.stderr
    assert ledger_lines(folder)[: len(before)] == before  # what was finished is not run again
    assert "already in the ledger" in ended.stderr
    (folder / "said.txt").write_text(ended.stdout + ended.stderr)
    return folder


def killed(command: list[str], number: signal.Signals, when: Callable[[], bool]) -> str:
    """Start the comparison and send it a signal when something has come to pass; what it said."""
    started = subprocess.Popen(
        [sys.executable, "-m", "toolkit", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not when():
        assert time.monotonic() < deadline, "waited too long"
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.05)
    started.send_signal(number)
    return started.communicate(timeout=60)[0]


def log_of(folder: Path, trial: str) -> str:
    log = folder / "trials" / trial / "train.log"
    return log.read_text() if log.exists() else ""


def ledger_lines(folder: Path) -> list[str]:
    ledger = folder / "ledger.jsonl"
    return ledger.read_text().splitlines() if ledger.exists() else []


@pytest.mark.launch
def test_a_comparison_killed_at_three_moments_holds_each_trial_once(finished: Path) -> None:
    trials = [json.loads(line)["trial"] for line in ledger_lines(finished)]
    failed = [name for name in trials if name.startswith("flash")]
    assert sorted(trials) == sorted([*TRIALS, *failed])
    assert len(failed) == 1  # its second repeat would fail as the first did
    assert f"since {failed[0]} ended as failed" in (finished / "said.txt").read_text()


@pytest.mark.launch
def test_rows_carry_intervals_and_agree(finished: Path) -> None:
    results = load_results(finished)
    ddp, zero2, zeropp, flash = results["rows"]
    assert [row["status"] for row in results["rows"]] == ["completed", "completed", "not_supported", "failed"]
    assert (ddp["parity"], zero2["parity"], ddp["repeats"], zero2["repeats"]) == ("reference", "agrees", 2, 2)
    assert (zero2["gradient_bytes"], ddp["gradient_bytes"]) == (6_439_552, 12_879_104)
    assert zero2["losses"] == pytest.approx(ddp["losses"][: len(zero2["losses"])], rel=1e-5)
    assert zero2["ratio_to_reference"] == pytest.approx(
        (zero2["tokens_per_second"] or 0) / (ddp["tokens_per_second"] or 1)
    )
    low, high = zero2["ratio_interval"] or (0, 0)
    assert low < (zero2["ratio_to_reference"] or 0) < high
    assert "CUDA kernels" in (zeropp["message"] or "")
    assert "flash" in (flash["message"] or "").lower()
    assert (flash["failure"] or {})["phase"] == "load"
    assert flash["tokens_per_second"] is None
    assert results["method"]["repeats"] == 2


@pytest.mark.launch
def test_trials_keep_what_each_run_showed(finished: Path) -> None:
    trials = load_results(finished)["trials"]
    assert sorted(row["trial"] for row in trials if row["status"] == "completed") == TRIALS
    for row in trials:
        if row["status"] == "completed":
            assert (row["startup_seconds"] or 0) > 0
            assert row["timed_step_numbers"][0] == 3
    assert not list(finished.glob("trials/*/model.safetensors"))
    for name in ("report.md", "report.html", "results.json", "results.csv", "comparison.png"):
        assert (finished / name).stat().st_size > 0


@pytest.mark.launch
def test_steps_end_early_and_on_all_ranks_after_the_same_one(finished: Path) -> None:
    """±90 % is reached at the first decision with ten timed steps, after step 15; step 17 ends it."""
    for name in TRIALS:
        run = finished / "trials" / name
        assert read(run / "run.json")["stopped_after"] == {"step": 17, "why": "median step known to 90.0%"}
        assert [len((run / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)] == [17, 17]


@pytest.mark.launch
def test_results_follow_their_schema(finished: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra [dev]")
    jsonschema.validate(read(finished / "results.json"), read(ROOT / "toolkit/compare/results.schema.json"))


@pytest.mark.launch
def test_a_row_can_be_replayed(finished: Path) -> None:
    ended = toolkit("compare", "--replay", str(finished), "--row", "ddp-n2")
    assert ended.returncode == 0, ended.stderr
    assert "where its 2 repeats expect one more run (95 %)" in ended.stdout
    assert read(finished / "replays" / "ddp-n2-0" / "run.json")["status"] == "completed"
    unknown = toolkit("compare", "--replay", str(finished), "--row", "ddp-n3")
    assert (unknown.returncode, "--row ddp-n3 is not in the comparison" in unknown.stderr) == (2, True)


@pytest.mark.launch
def test_a_dry_run_knows_the_durations_of_a_ledger_and_starts_nothing(finished: Path) -> None:
    before = sorted(finished.rglob("*"))
    said = dry_run_text(read_comparison(finished), finished, {"zeropp-n2": "needs CUDA kernels"})
    assert "ddp-n2-r0: completed, already in the ledger" in said
    assert "zeropp-n2-r0: not supported here: needs CUDA kernels" in said
    assert "--num_processes 2 -m toolkit.train" in said
    assert "0 of 8 trials to run, in " in said.splitlines()[-1]
    assert re.search(r"flash-n2-r\d: not run, since flash-n2-r\d ended as failed", said)
    assert sorted(finished.rglob("*")) == before


# Faults in recorded runs: each changes one file of one side, as the fault itself would have.


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def attest(fact: str, value: Any, *ranks: int) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        def edit(content: Any) -> None:
            for rank in ranks:
                content["ranks"][rank][fact] = value

        edit_json(run / "attestation.json", edit)

    return change


def rewrite_rows(rank: int, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = run / "ranks" / f"rank{rank}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            change(row)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return edit


def padding_alone(row: dict[str, Any]) -> None:
    row["tokens"] -= row["non_padding_tokens"]


def every_step_timed(row: dict[str, Any]) -> None:
    row["step_of_process"] += 2
    row["seconds"] = 9.0 if row["step"] == 1 else 0.1


def one_rank(run: Path) -> None:
    edit_json(run / "attestation.json", lambda content: content["ranks"].pop())
    (run / "ranks" / "rank1.jsonl").unlink()


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "bf16 Adam states": (attest("optimizer_dtype", "bfloat16", 0, 1), "optimizer_dtype is bfloat16, promised float32"),
    "clipping off": (attest("gradient_clipping", 0.0, 0, 1), "gradient_clipping is 0.0, 1.0 in ddp-n2-r0"),
    "another data order on one rank": (
        rewrite_rows(1, lambda row: row.update(batch_sha256="f" * 16)),
        "batch of step 1 on rank 1 is ffffffffffffffff, ",
    ),
    "another seed": (
        lambda run: edit_json(run / "run.json", lambda content: content["spec"].update(seed=1)),
        "seed is 1, 42 in ddp-n2-r0",
    ),
    "one process for two": (one_rank, "1 ranks attested, 2 were asked for"),
    "DDP for another engine": (attest("engine", "ddp", 0, 1), "engine is ddp, promised deepspeed"),
    "a count of padding alone": (rewrite_rows(0, padding_alone), "step 1 has "),
    "activation checkpointing": (
        attest("activation_checkpointing", True, 0, 1),
        "activation_checkpointing is True, False in ddp-n2-r0",
    ),
    "another first loss": (rewrite_rows(0, lambda row: row.update(loss=row["loss"] + 0.01)), "loss of step 1 is "),
}


@pytest.mark.launch
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_run_is_caught_by_its_own_check(finished: Path, tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    row = zero2_with(finished, tmp_path, change, "zero2-n2-r0")
    assert row["parity"] == "parity failed"
    assert row["parity_message"].startswith(f"repeat 0: {said}")
    assert row["tokens_per_second"] is None


@pytest.mark.launch
def test_a_slow_first_step_left_in_the_timing_is_caught(finished: Path, tmp_path: Path) -> None:
    def change(run: Path) -> None:
        for rank in (0, 1):
            rewrite_rows(rank, every_step_timed)(run)

    row = zero2_with(finished, tmp_path, change, "zero2-n2-r0", "zero2-n2-r1")
    assert row["parity_message"] == "repeat 0: step 1 is timed, with untimed_steps 2"


@pytest.mark.launch
def test_a_rank_that_is_slowed_is_reported_as_skew(finished: Path, tmp_path: Path) -> None:
    def change(run: Path) -> None:
        for rank, seconds in ((0, 0.1), (1, 0.3)):
            rewrite_rows(rank, lambda row, own=seconds: row.update(own_seconds=own))(run)

    row = zero2_with(finished, tmp_path, change, "zero2-n2-r0", "zero2-n2-r1")
    assert (row["parity"], row["rank_skew"]) == ("agrees", pytest.approx(3.0))


def zero2_with(finished: Path, tmp_path: Path, change: Callable[[Path], None], *changed: str) -> dict[str, Any]:
    """zero2's row when the run folders of some of its trials are changed."""
    spec = read_comparison(finished)
    rows = []
    for position, trial in enumerate(spec.trials()):
        if trial.id in TRIALS:
            shutil.copytree(finished / "trials" / trial.id, tmp_path / trial.id)
            if trial.id in changed:
                change(tmp_path / trial.id)
            rows.append(row_of(trial, RunFolder(tmp_path / trial.id), tmp_path, untimed_steps=2, position=position))
    found, _ = compared({row["trial"]: row for row in rows}, spec, {})
    return next(row for row in found if row["preset"] == "zero2")


# Without a run.


def test_a_line_cut_off_by_a_kill_is_dropped_at_any_byte(tmp_path: Path) -> None:
    whole = Ledger(tmp_path / "whole.jsonl")
    rows = [{"trial": "a", "status": "completed"}, {"trial": "b", "status": "completed"}]
    for row in rows:
        whole.append(row)
    content = whole.path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(len(content) + 1):
        torn = Ledger(tmp_path / "torn.jsonl")
        torn.path.write_bytes(content[:cut])
        kept = [] if cut < first else (["a"] if cut < len(content) else ["a", "b"])
        assert list(torn.read()) == kept
        torn.append({"trial": "c", "status": "completed"})
        assert list(torn.read()) == [*kept, "c"]


def test_two_runners_never_share_a_folder(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(ToolkitError, match=rf"still going \(process {os.getpid()}\)"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_a_comparison_of_single_runs_is_not_gone_on_with(tmp_path: Path) -> None:
    from test_parity import comparison

    (tmp_path / "comparison.json").write_text('{"schema_version": 1, "presets": ["ddp"]}')
    with pytest.raises(ToolkitError, match="a comparison of an older toolkit, with single runs"):
        open_comparison(tmp_path, comparison("ddp"), resume=True)


def test_a_specification_is_read_as_it_was_written(tmp_path: Path) -> None:
    from test_parity import comparison

    written = comparison("ddp", "zero2", num_processes=(1, 2), scaling="weak", find_max_batch=8)
    open_comparison(tmp_path, written, resume=False)
    assert read_comparison(tmp_path) == written


@pytest.mark.parametrize(("given", "read"), [(["2"], [2]), (["1,2,4"], [1, 2, 4]), (["1", "2"], [1, 2])])
def test_numbers_of_processes_stand_apart_or_with_commas(given: list[str], read: list[int]) -> None:
    assert numbers_of_processes(given) == read


def test_a_number_of_processes_that_is_none_is_refused() -> None:
    with pytest.raises(ToolkitError, match="--num-processes is 'two'"):
        numbers_of_processes(["1,two"])


def test_a_variant_has_a_name_a_preset_and_arguments_of_its_own() -> None:
    entry = parse_variant("ddp_int8=ddp --ddp_comm_hook int8")
    assert (entry.name, entry.preset.name, entry.extra_arguments) == ("ddp_int8", "ddp", ["--ddp_comm_hook", "int8"])
    for words in ("ddp", "=ddp", "a b=ddp", "a="):
        with pytest.raises(ToolkitError, match="expected a name of letters"):
            parse_variant(words)
    with pytest.raises(ToolkitError, match="unknown argument --ddp_com_hook"):
        parse_variant("a=ddp --ddp_com_hook int8")


@pytest.mark.parametrize(
    ("micro", "accumulation", "expected"),
    [(4, 1, [(4, 1), (2, 1), (1, 1)]), (2, 4, [(2, 4), (2, 2), (2, 1)]), (3, 4, [(3, 4), (3, 2), (3, 1)])],
)
def test_strong_scaling_keeps_the_global_batch(micro: int, accumulation: int, expected: list[tuple[int, int]]) -> None:
    arguments = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    found = strong_batches([entry("ddp")], arguments, [1, 2, 4])
    assert [tuple(found[f"ddp-n{n}"].values()) for n in (1, 2, 4)] == expected


def test_a_global_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ToolkitError, match="a global batch of 3 sequences cannot be shared by 2 processes"):
        strong_batches([entry("ddp")], {"per_device_train_batch_size": 3}, [1, 2])


def entry(name: str) -> Entry:
    return parse_variant(f"{name}={name}")


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 12, 31, 64, 100])
def test_the_largest_batch_is_found_without_trying_a_size_twice(limit: int) -> None:
    tried: list[int] = []

    def runs(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest_that_runs(runs, start=2, cap=64) == (min(limit, 64) or None)
    assert len(tried) == len(set(tried)) <= 12
    assert max(tried) <= 64


def test_a_trial_is_named_by_its_row_and_repeat() -> None:
    trial = Trial(preset="zero2", num_processes=4, repeat=1)
    assert (trial.row, trial.id) == ("zero2-n4", "zero2-n4-r1")
