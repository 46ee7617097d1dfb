"""Scripts as people write them: each does observed what it does alone, and none is flagged for what is its own.

A row says how a script of `cases/` ends, and what its observed run says besides what it prints alone.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from launching import cpu_environment, nightly, nightly_launch, read, run_warm, torchrun_words

from toolkit.observe import hang_detection
from toolkit.observe.batches import counted_batches, tensor_facts
from toolkit.observe.hang_detection import Watchdog
from toolkit.observe.progress import Progress
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import Heartbeat
from toolkit.record.measurements import read_rows

CASES = Path(__file__).parent / "cases"
TRACEBACK = "Traceback (most recent call last)"
# Lines that differ from run to run: times, libraries' logs.
TIMED = re.compile(r"runtime|per_second|\d+it/s|[EIW]\d{4} |[Ww]arn|gloo|^\s|^$")


class Case(NamedTuple):
    """A script, and how it ends."""

    name: str
    says: tuple[str, ...] = ()
    status: str = "completed"
    code: int = 0
    trainings: int = 1
    variables: dict[str, str] = {}  # noqa: RUF012 (never changed)
    words: tuple[str, ...] = ()
    script: str | None = None
    """Its file, if it is not called like the case."""


def note(name: str) -> tuple[str, ...]:
    return ("note: the script's own, beside its preset: " + name,)


VERIFIED = [
    *("best_tb", "distill", "eval_iterable", "eval_start", "eval_callback", "eval_bert", "eval_loop_after"),
    *("eval_fixed", "iterable", "optimizers_given", "overrides", "own_clip", "own_group", "prompt_tuning"),
    *("unused", "workers"),
]
PLAIN = {
    "bf16_flag": {"bf16": True},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "compile": {"max_steps": 3, "torch_compile": True, "torch_compile_backend": "aot_eager"},
}
LORA = {
    **{"lora_fp32": ("input_grads",), "lora_bf16": ("bf16_model", "bf16_flag"), "lora_auto": ("bf16_model",)},
    "kbit_prepare": ("kbit",),  # the model is not quantized, so peft switches no checkpointing on
}
# What no library says of training that goes on: the warning, and the line about it alone.
SILENT = {
    "twice": "warning: the loss is divided by gradient_accumulation_steps (2) by the script, and again by the Trainer",
    "never": "warning: nothing divides the loss, a mean over each micro-batch, by gradient_accumulation_steps (2)",
    "eval": "warning: every dropout is off in the first step",
    "order": "note: each epoch has the same order (2 steps)",
    "padding": "note: tokens that `attention_mask` hides have labels",
    "adapters": "note: trained, without a gradient in the first step (1): adapter.weight",
    "schedule": "warning: the learning rate is 0 since step 5",
    "resume": "warning: the optimizer began anew after step 4",
    "averages": "",
    "once": "",
}
QUICK = [
    Case("error_after", says=("error_after.py", "RuntimeError: evaluation data is missing"), status="failed", code=1)
]
NIGHTLY = [
    Case(
        "optimizer_partial",
        says=(*note("gradient norm at the optimizer, after what"), *note("trained parameters in the optimizer")),
    ),
    Case("peek_batch"),
    Case("collator_attr", says=("p = 1.0 is it mine: True",)),
    Case("train_twice", trainings=3, says=("SCRIPT DONE Trainer True",)),
    Case("rank0_after", says=("ValueError: my real error",), status="failed", code=1),
    Case("slow_callback", words=("20",), variables={"TOOLKIT_HANG_TIMEOUT_MINUTES": "0.1"}),
    # Alone, torch 2.13 may hang in `destroy_process_group` of gloo: it is not launched alone.
    Case("plain_loop", says=("hint: a loop without accelerate",), status="failed", code=1, trainings=0),
    *(Case(name) for name in VERIFIED),
    *(Case(name, script="plain", words=(json.dumps(given),)) for name, given in PLAIN.items()),
    *(Case(name, script="lora", words=words) for name, words in LORA.items()),
    # Clipping counts gradients that DDP does not reduce: the ranks' heads really come apart.
    Case("zero_init", says=("warning: the ranks do not train one model", "parameters were unfrozen after the engine")),
    Case("auto_find"),
    Case("gc_direct", says=note("activation_checkpointing")),
    Case("grad_noise", says=note("gradient norm at the optimizer, after what the script does")),
    Case(
        "fp16_flag",
        script="plain",
        words=('{"fp16": true}',),
        says=note("compute_dtype on rank 0 is float32, expected float16"),  # not on a CPU
    ),
    Case("lion_bf16", says=note("optimizer_dtype")),
    Case("rank1_exits", ("error: the script called sys.exit(3)",), "failed", 1, 0, {}, ("exits",), "rank1_raises"),
    Case("rank1_raises", says=("rank1_raises.py", "KeyError: 'only rank 1'"), status="failed", code=1),
]


def launch(name: str, out: Path, *words: str, run: Path | None = None, **variables: str) -> CompletedProcess[str]:
    observed = [] if run is None else ["-m", "toolkit.observe", "--output-dir", str(run), "--require", "ddp"]
    command = [sys.executable, *torchrun_words(2), *observed, str(CASES / f"{name}.py"), str(out), *words]
    return run_warm(command, cpu_environment() | {"OMP_NUM_THREADS": "1"} | variables, cwd=out.parent)


def lines(ended: CompletedProcess[str]) -> Counter[str]:
    return Counter(line for line in ended.stdout.splitlines() if not TIMED.search(line))


def files(out: Path) -> set[str]:
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if "tfevents" not in path.name}


@pytest.mark.launch
@pytest.mark.parametrize("case", [*QUICK, *nightly(*NIGHTLY)], ids=lambda case: case.name)
def test_a_script_does_observed_what_it_does_alone(case: Case, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    script = case.script or case.name
    alone = launch(script, tmp_path / "alone", *case.words) if case.trainings else None
    ended = launch(script, tmp_path / "out", *case.words, run=run.path, **case.variables)
    text = ended.stdout + ended.stderr
    assert ended.returncode == case.code, text[-3000:]
    if alone is not None:
        assert alone.returncode == ended.returncode
        assert files(tmp_path / "out") == files(tmp_path / "alone")
        alone_lines = Counter(line.replace("/alone", "/out") for line in lines(alone))
        # Ranks that print at a time alone may share a line.
        missing, more = alone_lines - lines(ended), lines(ended) - alone_lines
        assert not Counter("".join(missing.elements())) - Counter("".join(more.elements()))
    assert [said for said in case.says if said not in text] == []
    recorded: dict[str, Any] = read(run.run_json)
    assert recorded["status"] == case.status
    folders = [RunFolder(path.parent) for path in sorted(run.path.rglob("attestation.json"))]
    assert [read(folder.attestation_json)["differences"] for folder in folders] == [[]] * case.trainings
    assert all(read_rows(folder.rank_rows(0)) for folder in folders)
    if case.code and alone is not None:
        assert text.count(TRACEBACK) <= alone.stderr.count(TRACEBACK)


@pytest.mark.launch
@pytest.mark.parametrize("fault", ["twice", *nightly(*(fault for fault in SILENT if fault != "twice"))])
def test_what_trains_otherwise_than_it_seems_is_named_and_nothing_else(fault: str, tmp_path: Path) -> None:
    ended = launch("silent", tmp_path / "out", fault, run=tmp_path / "run")
    assert ended.returncode == 0, ended.stderr[-3000:]
    named = [line for line in ended.stdout.splitlines() if line.startswith(("warning", "note"))]
    assert [line.startswith(SILENT[fault]) for line in named] == [True] * bool(SILENT[fault]), named


@nightly_launch
def test_a_model_in_bf16_is_refused_before_its_first_step_unless_it_is_allowed(tmp_path: Path) -> None:
    refused = launch("bf16_model", tmp_path / "out", run=tmp_path / "run")
    assert refused.returncode == 1
    assert "the weights to train are bfloat16, and 'ddp' trains float32 master weights" in refused.stderr
    assert "dtype=torch.float32" in refused.stderr
    assert "--allow master_dtype=bfloat16" in refused.stderr
    assert read(tmp_path / "run" / "run.json")["status"] == "attestation_failed"


@nightly_launch
def test_a_deviation_that_the_user_allows_is_recorded(tmp_path: Path) -> None:
    words = ["-m", "toolkit.observe", "--output-dir", str(tmp_path / "run"), "--require", "ddp"]
    words += ["--allow", "master_dtype=bfloat16", str(CASES / "bf16_model.py"), str(tmp_path / "out")]
    ended = run_warm([sys.executable, *torchrun_words(2), *words], cpu_environment() | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-3000:]
    attestation = read(tmp_path / "run" / "attestation.json")
    assert (attestation["verdict"], attestation["differences"]) == ("attested", [])
    assert {row["fact"] for row in attestation["of_script"]} >= {"master_dtype", "optimizer_dtype"}


# -- a rank that computes, or compiles, is not hung


@pytest.fixture(autouse=True)
def little_work_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detection, "PROGRESS_CPU_SECONDS", 0.02)


def computes(folder: Path, file: str, code: str = "while len(answers) < 5: pass") -> bool:
    """Return whether a watchdog sees a main thread compute, which runs code of a file; on a busy node not at once."""
    watchdog, answers = Watchdog(Progress(phase="step"), ranks=folder, rank=0), list[bool]()

    def look() -> None:
        for _ in range(5):
            time.sleep(0.1)
            answers.append(watchdog._computes())

    looking = Thread(target=look)
    looking.start()
    exec(compile(code, file, "exec"))
    looking.join()
    return any(answers[1:])


def test_a_callback_that_computes_makes_progress_and_a_collective_does_not(tmp_path: Path) -> None:
    assert computes(tmp_path, "callback.py")
    assert not computes(tmp_path, "site-packages/torch/distributed/distributed_c10d.py")


@pytest.mark.nightly  # 3 s, in which a call that releases the interpreter takes processor time at one place
def test_waiting_for_a_gpu_at_one_place_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not computes(tmp_path, "trainer.py", "__import__('hashlib').pbkdf2_hmac('sha256', b'-', b'-', 8_000_000)")


def test_a_compiler_makes_progress_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert computes(tmp_path, "site-packages/triton/runtime/autotuner.py")
    watchdog = Watchdog(Progress(phase="step"), ranks=tmp_path, rank=0)
    watchdog.moved_unix -= 100
    exec(compile("watchdog._computes()\nwatchdog._computes()", "site-packages/torch/_inductor/compile_fx.py", "exec"))
    assert capsys.readouterr().out == "rank 0 compiles in step 1 (torch/_inductor)\n"


def test_a_rank_that_ended_by_itself_is_not_gone() -> None:
    facts = {"rank": 1, "host": os.uname().nodename, "pid": 2**22 - 1, "process_started_unix": 1.0}
    facts |= {"step": 4, "micro_steps": 4, "phase": "end", "progress_unix": 1.0, "written_unix": 1.0}
    assert [Heartbeat(**facts, ended=ended).is_gone for ended in (False, True)] == [True, False]


# -- batches


def test_a_loader_yields_its_own_batches_and_their_facts_beside_them() -> None:
    rows = [{"input_ids": torch.full((4,), number)} for number in range(12)]
    for workers in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        loader = DataLoaderShard(rows, batch_size=2, **workers)
        loader.skip_batches = 2
        alone = list(loader)
        counted = list(counted_batches(loader, tensor_facts))
        assert [batch["input_ids"].tolist() for batch, _ in counted] == [each["input_ids"].tolist() for each in alone]
        assert [facts for _, facts in counted] == [tensor_facts((), batch) for batch in alone]
        assert "__iter__" not in vars(loader.base_dataloader)
        assert all(set(batch) == {"input_ids"} for batch, _ in counted)
