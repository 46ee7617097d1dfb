"""The comparison with other programs: what each is given, how runs are read, and what the table says of them."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, cpu_environment, nightly_launch, run_warm

from toolkit.convert.conversion import convert_file
from toolkit.job.argument_reading import read_arguments

sys.path[:0] = [str(ROOT / "benchmarks")]

import peers  # noqa: E402
from peer_jobs import comparison, measurement  # noqa: E402
from peer_jobs.commands import PROGRAMS, Launch  # noqa: E402
from peer_jobs.job import LORA_R, Job, Setting, make_rows  # noqa: E402
from peer_jobs.turns import run_in_turns  # noqa: E402

SETTING = Setting(steps=4, untimed_steps=2, max_length=8)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("peer_jobs.commands.tokenized_rows", lambda _: '{"input_ids": [1, 2]}\n')
    model, rows = tmp_path / "model", tmp_path / "rows" / "train.jsonl"
    model.mkdir()
    rows.parent.mkdir()
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    return Job(preset="zero2", method="lora", setting=SETTING, model=model, rows=rows)


def launch_of(program: str, job: Job) -> Launch:
    return PROGRAMS[program](job, "python", Path("run"))


@pytest.mark.parametrize("program", ["llamafactory", "axolotl"])
def test_another_programs_file_describes_the_job_as_our_converter_reads_it(
    program: str, job: Job, tmp_path: Path
) -> None:
    for name, text in launch_of(program, job).files.items():
        (tmp_path / name).write_text(text.replace("run/deepspeed.json", str(tmp_path / "deepspeed.json")))
    found = convert_file(tmp_path / "job.yaml", "llama-factory" if program == "llamafactory" else program).arguments
    assert found["model_name_or_path"] == str(job.model)
    assert (found["max_steps"], found["per_device_train_batch_size"]) == (4, 2)
    assert float(found["learning_rate"]) == Setting().learning_rate
    assert (found["max_seq_length"], found["lora_r"], found["lora_alpha"]) == (8, LORA_R, 2 * LORA_R)


def test_every_flag_of_the_bare_trainer_and_of_trl_is_a_field_of_their_arguments(job: Job) -> None:
    from transformers import TrainingArguments
    from trl import ModelConfig, ScriptArguments, SFTConfig

    launcher = {"config_file", "num_processes", "num_machines", "main_process_port", "mixed_precision"}
    own = {"model", "data", "max_length", "lora_r"}
    for program, known, classes in (
        ("bare", launcher | own, (TrainingArguments,)),
        ("trl", launcher, (SFTConfig, ScriptArguments, ModelConfig)),
    ):
        given = {word.removeprefix("--") for word in launch_of(program, job).argv if word.startswith("--")}
        assert given - known - {field.name for each in classes for field in dataclasses.fields(each)} == set()


def test_our_own_command_line_is_read_and_trains_lora_as_the_others_do(job: Job) -> None:
    argv = launch_of("toolkit", job).argv
    found = read_arguments(argv[argv.index("--") + 1 :])
    assert (found["lora_r"], found["lora_alpha"], found["train_sampling_strategy"]) == (8, 16, "sequential")


class Letters:
    """A tokenizer with a token per letter, but one for two letters `a` in a row."""

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoding", (), {"input_ids": list(text.replace("aa", "A"))})

    def decode(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("A", "aa")


def test_every_row_is_tokenised_back_to_the_same_number_of_tokens() -> None:
    rows = make_rows(["abcaaa", "d"], Letters(), 5, max_length=4)  # and one end-of-text token
    assert rows == ["abc", "aaa ", "bcaa", "a d", "caaa"]


LOSSES = [4.0, 3.0, 2.0, 1.0]


def figures(
    losses: list[float], *, engine: str = "ddp", ranks: int = 2, resumed_after: float | None = None
) -> dict[str, Any]:
    """A run of steps that end a second apart, each after half a second of processor time on every rank."""
    steps = [{"step": n + 1, "time": 100.0 + n, "cpu_seconds": 3 + n / 2, "loss": x} for n, x in enumerate(losses)]
    for step in steps if resumed_after is not None else ():
        step["resumed"] = {name: step[name] + resumed_after for name in ("time", "cpu_seconds")}
    steps[0] |= {"engine": engine, "trained_parameters": 10, "trained_dtypes": ["torch.float32"]}
    steps[0] |= {"activation_checkpointing": False}
    run = {"ranks": [steps] * ranks, "started": 90.0, "cpu_seconds": 8.0, "peak_pss_bytes": 5}
    return comparison.figures(run, untimed_steps=2, tokens_per_step=32)


def test_figures_count_the_timed_steps_and_the_processor_time_of_every_rank() -> None:
    found = figures(LOSSES)
    assert found["tokens_per_second"] == 2 * 32 / 2
    assert found["tokens_per_cpu_second"] == 2 * 32 / (2 * 2 * 0.5)
    assert found["first_step_seconds"] == 10


@pytest.mark.parametrize(
    ("losses", "changes", "difference"),
    [
        ([4.0, 3.0, 2.01, 1.0], {}, None),
        ([3.5, 2.625, 1.75, 0.875], {}, None),  # divided by the 8 tokens of a row, not by the 7 predicted
        ([4.1, 3.0, 2.0, 1.0], {}, "first loss 4.1000, bare Trainer: 4.0000"),
        ([4.0, 3.0, 2.0, 1.2], {}, "losses differ by up to 20.0%: last 1.2000, bare: 1.0000"),
        ([4.0, 3.0, 2.0], {}, "3 steps with a loss, bare Trainer: 4"),
        (LOSSES, {"engine": "fsdp2"}, "ran as fsdp2"),
        (LOSSES, {"ranks": 1}, "1 of 2 ranks trained"),
    ],
)
def test_a_run_that_trained_something_else_is_not_the_same_job(
    losses: list[float], changes: dict[str, Any], difference: str | None, job: Job
) -> None:
    ddp = dataclasses.replace(job, preset="ddp", method="full")
    found = comparison.differences(figures(losses, **changes), figures(LOSSES), ddp)
    assert found == ([] if difference is None else [difference])


def test_a_ratio_pairs_the_runs_of_the_same_repeat() -> None:
    runs = [{"repeat": n, "figures": figures(LOSSES) | {"tokens_per_second": v}} for n, v in ((0, 8.0), (1, 2.0))]
    theirs = [{"repeat": 1, "figures": figures(LOSSES) | {"tokens_per_second": 1.0}}]
    ratios = comparison.row(theirs, runs)["ours_over_theirs"]
    assert ratios["tokens_per_second"] == {"ratio": 2.0, "interval": None}


def test_a_resumed_benchmark_repeats_neither_finished_runs_nor_failures() -> None:
    done = [{"repeat": 0, "job": "ddp-full", "program": name, "error": None} for name in ("bare", "axolotl")]
    done[1]["error"] = "no GPU"
    left = peers.waiting(peers.runs_in_order(["bare", "trl", "axolotl"], ["ddp-full"], 2), done)
    assert left == [(0, "ddp-full", "trl"), (1, "ddp-full", "trl"), (1, "ddp-full", "bare")]


def test_the_reason_of_a_failure_is_the_programs_not_the_launchers() -> None:
    log = "[rank1]: RuntimeError: no CUDA\nE1122 failed\ntorch.distributed.elastic.ChildFailedError: \nsee above"
    assert measurement.error_line(log) == "RuntimeError: no CUDA"


TRAINS_IN_TURNS = """
import json, os, sys, time
import sitecustomize as hook

name, ranks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for _ in range(1, ranks):
    if os.fork() == 0:
        break
hook.facts_of = lambda *_: {}
for step in range(steps):
    time.sleep(0.03)
    hook.add_record(step, None, None)
print(json.dumps([name, hook.records]))
"""


def test_programs_train_a_step_each_and_one_that_ends_early_holds_nobody_up(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(ROOT / "benchmarks/peer_jobs/hook"), "PEER_UNTIMED_STEPS": "1"}
    variables["PEER_STEPS_FOLDER"] = str(tmp_path)

    def start(name: str, steps: int, port: int) -> list[tuple[float, float, str]]:
        """Train on two ranks; return when each of their timed steps began and ended."""
        argv = [sys.executable, "-c", TRAINS_IN_TURNS, name, "2", str(steps)]
        environment = variables | {"PEER_TURNS_PORT": str(port)}
        lines = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        ranks = [json.loads(line)[1] for line in lines]
        assert len(ranks) == 2
        return [(a["resumed"]["time"], b["time"], name) for rank in ranks for a, b in itertools.pairwise(rank)]

    lasting = {"a": 5, "b": 5, "ends early": 2}
    starts = [functools.partial(start, name, steps) for name, steps in lasting.items()]
    starts.append(lambda _: [])  # one that fails before its first step
    *trained, failed = run_in_turns(starts, ranks=2, rounds=4)
    assert [len(steps) for steps in trained] == [2 * 4, 2 * 4, 2 * 1]
    assert failed == []
    in_time = sorted(itertools.chain.from_iterable(trained))
    turns = [list(steps) for _, steps in itertools.groupby(in_time, lambda step: step[2])]
    assert [turn[0][2] for turn in turns] == ["a", "b", "ends early", "b", "a", "b", "a"]
    for one, other in itertools.pairwise(turns):
        assert max(end for _, end, _ in one) <= min(began for began, *_ in other)


def test_the_wait_for_a_turn_is_no_part_of_a_steps_time() -> None:
    waited = figures(LOSSES, resumed_after=0.25)
    assert waited["tokens_per_second"] == 2 * 32 / (2 * 0.75)
    assert waited["tokens_per_cpu_second"] == 2 * 32 / (2 * 2 * 0.25)


@nightly_launch
@pytest.mark.parametrize("turns", [[], ["--in-turns"]], ids=["one by one", "in turns"])
def test_a_bare_trainer_and_the_toolkit_train_the_same_job(turns: list[str], tmp_path: Path) -> None:
    words = [*turns, "--work", str(tmp_path / "work"), "--peers", "bare", "toolkit", "--jobs", "single-full"]
    words += ["--repeats", "1", "--steps", "3", "--untimed-steps", "1", "--batch-size", "1", "--max-length", "32"]
    words += ["--name", str(tmp_path / "result")]
    argv = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *words]
    ended = run_warm(argv, cpu_environment())  # each of its runs is started cold
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    _, *rows = map(json.loads, (tmp_path / "result.jsonl").read_text().splitlines())
    assert [(row["program"], row.get("differences")) for row in rows] == [("bare", []), ("toolkit", [])]
    assert all(row["facts"]["engine"] == "single" for row in rows)
