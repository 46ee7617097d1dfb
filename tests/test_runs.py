"""Nouns of a run: arguments read without torch, the run folder, measured steps, statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.installed import training_argument_types
from toolkit.runs import status
from toolkit.runs.argv import argument_types, flag, integer, read_arguments
from toolkit.runs.folder import RunFolder, read_json, write_json
from toolkit.runs.steps import grad_norm, measure, percentile, read_rows, read_steps, throughput

# -- argv


def test_the_names_read_from_the_source_are_the_fields_of_training_arguments() -> None:
    from transformers import TrainingArguments

    fields = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    assert list(training_argument_types()) == fields


def test_ours_and_transformers_arguments_share_no_name() -> None:
    ours = set(argument_types()) - set(training_argument_types())
    assert {"model_name_or_path", "dataset", "lora_r", "untimed_steps"} <= ours
    assert len(argument_types()) == len(ours) + len(training_argument_types())


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_steps", "8"],
        ["--max_steps=8"],
        ["--max-steps", "8"],
        ["--max-steps=8"],
        ["--max_steps", "7", "--max_steps", "8"],
    ],
    ids=" ".join,
)
def test_a_flag_has_one_meaning_in_every_spelling(argv: list[str]) -> None:
    assert read_arguments(argv) == {"max_steps": "8"}


def test_a_value_may_hold_an_equals_sign_or_a_minus() -> None:
    assert read_arguments(["--run_name=a=b", "--max_steps", "-1"]) == {"run_name": "a=b", "max_steps": "-1"}


def test_a_flag_that_takes_a_list_takes_several_words() -> None:
    assert read_arguments(["--lora_target_modules", "q_proj", "v_proj"]) == {
        "lora_target_modules": ["q_proj", "v_proj"]
    }


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--bf16"], True),
        (["--bf16", "True"], True),
        (["--bf16=yes"], True),
        (["--bf16", "1"], True),
        (["--bf16", "false"], False),
        (["--no_bf16"], False),
        (["--no-bf16"], False),
    ],
    ids=str,
)
def test_a_boolean_is_read_as_transformers_reads_it(argv: list[str], expected: bool) -> None:
    assert flag(read_arguments(argv)["bf16"]) is expected


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("max_steps: 8\nlearning_rate: 1e-4\nbf16: true\nlora_r:\n")
    values = read_arguments([str(config), "--max_steps", "9"])
    assert values == {"max_steps": "9", "learning_rate": "1e-4", "bf16": True, "lora_r": None}


def test_a_json_file_is_a_configuration_file_too(tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    config.write_text('{"max_steps": 8}')
    assert read_arguments([str(config)]) == {"max_steps": 8}


def test_an_absent_or_null_number_is_its_default() -> None:
    assert integer({}, "seed", 42) == 42
    assert integer({"seed": None}, "seed", 42) == 42
    assert integer({"seed": "7"}, "seed", 42) == 7


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["--max_stepz", "8"], "unknown argument --max_stepz", "did you mean `--max_steps`?"),
        (["--no_save_modl"], "unknown argument --no_save_modl", None),
        (["--qqq"], "unknown argument --qqq", "see `python -m toolkit.train --help`"),
        (["--evaluation_strategy", "no"], "unknown argument --evaluation_strategy", None),
        (["max_steps", "8"], "unexpected word 'max_steps'; a flag starts with `--`", "did you mean `--max_steps`?"),
        (["--max_steps", "8", "zero2"], "unexpected word 'zero2' after --max_steps 8", None),
        (["--max_steps", "--bf16"], "--max_steps has no value", "`--max_steps VALUE`"),
        (["--max_steps", "many"], "--max_steps is 'many', expected a whole number", None),
        (["--max_steps", "8.5"], "--max_steps is '8.5', expected a whole number", None),
        (["--learning_rate", "fast"], "--learning_rate is 'fast', expected a number", None),
        (["--bf16", "maybe"], "--bf16 is 'maybe', expected true or false", None),
        (["nowhere.yaml"], "no such configuration file: nowhere.yaml", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_argument_is_named(argv: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_arguments(argv)
    assert caught.value.message == message
    assert hint is None or caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stepz: 8", "unknown key 'max_stepz'"),
        ("max_steps: many", "--max_steps is 'many', expected a whole number"),
        ("- max_steps", "holds no keys and values"),
        ("", "holds no keys and values"),
        ("a: [", "cannot be read: while parsing"),
        ("1: 2", "unknown key 1"),
    ],
)
def test_a_wrong_configuration_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(text)
    with pytest.raises(ToolkitError) as caught:
        read_arguments([str(config)])
    assert message in caught.value.message


def test_an_unknown_key_of_the_file_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("learning_rat: 1e-4\n")
    with pytest.raises(ToolkitError) as caught:
        read_arguments([str(config)])
    assert str(caught.value) == f"{config}: unknown key 'learning_rat'\n  hint: did you mean `learning_rate`?"


# -- the run folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def filled(path: Path, run: dict[str, Any]) -> RunFolder:
    """A folder as a run leaves it."""
    folder = RunFolder(path)
    write_json(folder.run_json, run)
    for file in (folder.log, folder.failure_json, folder.attestation_json, folder.rank_rows(0), folder.rank_rows(1)):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}\n")
    (path / "model.safetensors").write_text("weights")
    return folder


def test_a_finished_run_is_refused_and_nothing_in_it_changes(tmp_path: Path) -> None:
    folder = filled(tmp_path / "out", {"status": "completed"})
    before = contents(folder.path)
    with pytest.raises(ToolkitError, match="already holds a finished run, which is never overwritten") as caught:
        folder.prepare()
    assert caught.value.hint == f"name another folder, or remove it: `rm -r {folder.path}`"
    assert contents(folder.path) == before
    assert len(before) == 7


@pytest.mark.parametrize("ended", sorted(set(status.STATUSES) - {"completed"}))
def test_an_unfinished_run_is_replaced(ended: str, tmp_path: Path) -> None:
    folder = filled(tmp_path / "out", {"status": ended, "launcher_pid": None})
    folder.prepare()
    assert sorted(contents(folder.path)) == ["model.safetensors"]
    assert (folder.path / "ranks").is_dir()


def test_a_run_of_a_living_process_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        folder = filled(tmp_path / "out", {"status": "running", "launcher_pid": living.pid})
        with pytest.raises(ToolkitError, match=rf"still going \(process {living.pid}\)"):
            folder.prepare()
        living.communicate(b"\n")
    folder.prepare()  # the process has ended, so the run was killed


def test_a_file_is_no_output_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("notes")
    with pytest.raises(ToolkitError, match="is a file"):
        RunFolder(tmp_path / "out").prepare()
    assert (tmp_path / "out").read_text() == "notes"


def test_a_folder_under_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("notes")
    with pytest.raises(ToolkitError, match="cannot be written: Not a directory"):
        RunFolder(tmp_path / "notes" / "out").prepare()


def test_a_folder_that_the_system_refuses_cannot_be_written() -> None:
    with pytest.raises(ToolkitError, match=r"/proc/out/here cannot be written"):
        RunFolder(Path("/proc/out/here")).check_writable()


@pytest.mark.parametrize("depth", ["out", "a/b/out"])
def test_asking_whether_a_folder_can_be_written_leaves_nothing_behind(depth: str, tmp_path: Path) -> None:
    RunFolder(tmp_path / depth).check_writable()
    assert not list(tmp_path.iterdir())


def test_a_relative_output_folder_can_be_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder(Path("out")).check_writable()
    RunFolder(Path("out")).prepare()
    assert (tmp_path / "out" / "ranks").is_dir()


def test_facts_are_merged_into_run_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.update_run(status="running", seed=42)
    assert folder.update_run(status="completed") == {"schema_version": 1, "status": "completed", "seed": 42}
    assert folder.read_run() == {"schema_version": 1, "status": "completed", "seed": 42}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_half_a_json_file_reads_as_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "comp')
    assert read_json(tmp_path / "run.json") is None
    assert RunFolder(tmp_path).read_run() is None


# -- steps


def test_throughput_counts_only_timed_steps() -> None:
    step_seconds = [9.0, 0.5, 0.5]  # the first step compiles
    assert throughput(step_seconds=step_seconds, tokens=[10, 1000, 1000], untimed_steps=1) == 2000


def test_no_timed_step_has_no_throughput() -> None:
    assert throughput(step_seconds=[9.0], tokens=[10], untimed_steps=1) is None
    assert throughput(step_seconds=[], tokens=[], untimed_steps=0) is None


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(10, 0.9, 9), (11, 0.9, 10), (1, 0.9, 1), (10, 0.5, 5), (10, 0.0, 1), (10, 1.0, 10)],
)
def test_a_percentile_is_the_smallest_value_that_covers_the_share(count: int, share: float, expected: int) -> None:
    assert percentile(list(range(count, 0, -1)), share) == expected
    assert percentile([], share) is None


def row(rank: int, **measured: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "seconds": 1.0,
        "cpu_seconds": 2.0,
        "tokens": 100,
        "non_padding_tokens": 80,
        "supervised_tokens": 40,
        "loss": 2.0,
        "grad_norm": None,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "peak_host_bytes": 1000,
        "batch_sha256": f"batch of {rank}",
    } | measured


def test_the_slowest_rank_decides_the_seconds_and_all_ranks_bring_tokens() -> None:
    steps = [
        [row(0, seconds=9.0), row(1, seconds=8.0)],
        [row(0, seconds=0.5), row(1, seconds=1.0)],
        [row(0, seconds=1.0), row(1, seconds=0.25)],
    ]
    measured = measure(steps, untimed_steps=1)
    assert measured.step_seconds == [9.0, 1.0, 1.0]
    assert (measured.steps, measured.timed_steps, measured.timed_seconds) == (3, 2, 2.0)
    assert measured.tokens_per_second == 200  # 2 steps x 2 ranks x 100 tokens in 2 s
    assert measured.non_padding_tokens_per_second == 160
    assert measured.supervised_tokens_per_second == 80
    assert measured.tokens_per_cpu_second == 50  # 400 tokens in 2 x 2 x 2 s
    assert (measured.step_seconds_median, measured.step_seconds_p90) == (1.0, 1.0)


def test_padding_is_what_is_left_of_all_tokens() -> None:
    steps = [[row(0, tokens=100, non_padding_tokens=70), row(1, tokens=100, non_padding_tokens=80)]]
    assert measure(steps, untimed_steps=0).padding_fraction == 0.25


def test_a_loss_is_the_mean_over_ranks() -> None:
    steps = [[row(0, loss=1.0), row(1, loss=2.0)], [row(0, loss=0.5), row(1, loss=0.5)]]
    assert measure(steps, untimed_steps=0).losses == [1.5, 0.5]


def test_the_largest_peak_names_its_rank() -> None:
    steps = [
        [row(0, peak_allocated_bytes=5, peak_host_bytes=900), row(1, peak_allocated_bytes=7, peak_host_bytes=800)],
        [row(0, peak_allocated_bytes=6, peak_host_bytes=901), row(1, peak_allocated_bytes=7, peak_host_bytes=800)],
    ]
    measured = measure(steps, untimed_steps=0)
    assert (measured.peak_allocated_bytes, measured.peak_host_bytes, measured.peak_rank) == (7, 901, 1)


def test_without_an_allocator_the_resident_set_names_the_rank() -> None:
    measured = measure([[row(0, peak_host_bytes=10), row(1, peak_host_bytes=20)]], untimed_steps=0)
    assert (measured.peak_allocated_bytes, measured.peak_host_bytes, measured.peak_rank) == (None, 20, 1)


def reading(at: float, joules: float | None, *reasons: str) -> dict[str, Any]:
    return {"monotonic_seconds": at, "energy_joules": joules, "throttle_reasons": list(reasons)}


def test_energy_is_the_power_between_readings_over_the_timed_steps_of_all_ranks() -> None:
    first = [{"seconds": 9.0, "gpu_reading": reading(9.0, 0.0, "software power cap")}] * 2  # untimed
    timed = [
        [{"gpu_reading": reading(10.0, 1000.0)}, {"gpu_reading": reading(10.5, 5000.0)}],
        [{"gpu_reading": None}, {"gpu_reading": None}],
        [{"gpu_reading": reading(12.0, 1600.0)}, {"gpu_reading": reading(12.5, 5800.0, "hardware slowdown")}],
    ]
    steps = [[row(rank, **step[rank]) for rank in (0, 1)] for step in [first, *timed]]
    measured = measure(steps, untimed_steps=1)
    assert measured.energy_joules == 2100  # (600 / 2 + 800 / 2) W over 3 timed steps of 1 s
    assert measured.throttle_reasons == ["hardware slowdown"]


def test_energy_is_unknown_where_one_rank_shows_no_counter() -> None:
    ones = [[row(0, gpu_reading=reading(at, 100.0 * at)), row(1, gpu_reading=reading(at, None))] for at in (1.0, 2.0)]
    assert measure(ones, untimed_steps=0).energy_joules is None
    assert measure(ones, untimed_steps=0).throttle_reasons == []
    assert measure([[row(0)]], untimed_steps=0).throttle_reasons is None


def test_the_ladder_is_the_highest_rank_s_at_each_rung() -> None:
    ladder = {"bytes_of": "allocated", "load": 4, "forward": 9, "backward": 8, "step": 16}
    other = {"bytes_of": "allocated", "load": 5, "forward": 7, "backward": None, "step": None}
    steps = [[row(0, memory_ladder=ladder), row(1, memory_ladder=other)], [row(0), row(1)]]
    expected = {"bytes_of": "allocated", "load": 5, "forward": 9, "backward": 8, "step": 16}
    assert measure(steps, untimed_steps=0).memory_ladder == expected
    assert measure([[row(0)]], untimed_steps=0).memory_ladder is None


def test_driver_peak_and_retries_are_of_the_largest_rank() -> None:
    steps = [[row(0, driver_bytes=7, allocator_retries=0), row(1, driver_bytes=None, allocator_retries=2)]]
    measured = measure(steps, untimed_steps=0)
    assert (measured.peak_driver_bytes, measured.allocator_retries) == (7, 2)


def test_no_step_has_no_speed_and_no_peak() -> None:
    measured = measure([], untimed_steps=2)
    assert (measured.steps, measured.losses, measured.tokens_per_second, measured.peak_rank) == (0, [], None, None)
    assert (measured.step_seconds_median, measured.step_seconds_p90, measured.padding_fraction) == (None, None, None)


def test_shares_of_a_gradient_norm_add_up_as_squares() -> None:
    shares = [row(0, local_grad_norm=3.0, grad_norm_ranks=2), row(1, local_grad_norm=4.0, grad_norm_ranks=2)]
    assert grad_norm(shares) == 5.0


def test_a_replica_of_the_whole_norm_counts_once() -> None:
    whole = [row(0, local_grad_norm=5.0, grad_norm_ranks=1), row(1, local_grad_norm=5.0, grad_norm_ranks=1)]
    assert grad_norm(whole) == 5.0


def test_a_norm_that_the_engine_gave_is_taken() -> None:
    assert grad_norm([row(0, grad_norm=1.5), row(1, grad_norm=1.5)]) == 1.5


def test_a_norm_with_a_share_missing_is_unknown() -> None:
    assert grad_norm([row(0, local_grad_norm=3.0, grad_norm_ranks=2), row(1)]) is None
    assert grad_norm([row(0), row(1)]) is None


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "loss"')
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_a_step_that_only_one_rank_finished_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank, steps in ((0, 3), (1, 2)):
        folder.rank_rows(rank).parent.mkdir(exist_ok=True)
        folder.rank_rows(rank).write_text("".join(json.dumps({"rank": rank, "step": s}) + "\n" for s in range(steps)))
    assert [[(r["rank"], r["step"]) for r in step] for step in read_steps(folder)] == [
        [(0, 0), (1, 0)],
        [(0, 1), (1, 1)],
    ]


def test_ranks_are_ordered_as_numbers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in range(11):
        folder.rank_rows(rank).parent.mkdir(exist_ok=True)
        folder.rank_rows(rank).write_text(json.dumps({"rank": rank}) + "\n")
    assert [r["rank"] for r in read_steps(folder)[0]] == list(range(11))


def test_a_run_without_rows_has_no_steps(tmp_path: Path) -> None:
    assert read_steps(RunFolder(tmp_path)) == []


# -- statuses


@pytest.mark.parametrize("name", status.STATUSES)
def test_a_status_means_one_exit_code(name: str) -> None:
    expected = {"completed": 0, "out_of_memory": 3, "host_out_of_memory": 3}.get(name, 1)
    assert status.exit_code_of(name) == expected
    assert status.exit_code_of(name, wrong_input=True) == 2


def test_the_statuses_are_those_of_the_contract() -> None:
    assert set(status.STATUSES) == {
        *("planned", "running", "completed", "out_of_memory", "host_out_of_memory", "timed_out", "diverged"),
        *("attestation_failed", "failed", "interrupted"),
    }


def test_this_process_is_not_a_run_that_is_still_going(tmp_path: Path) -> None:
    filled(tmp_path / "out", {"status": "running", "launcher_pid": os.getpid()}).check_unused()
