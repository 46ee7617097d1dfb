"""Thirty questions about fine-tuning on several GPUs, and which of them the command line answers rightly.

    python benchmarks/tasks.py --work DIR                # all; real runs of two CPU ranks are kept in DIR
    python benchmarks/tasks.py --work DIR --only resume  # one again, whose row in the record is replaced

Ten questions are from public threads, whose reported outcome is the truth. The others are judged by a trace, a real
run's files, a published measurement, or another library. A judge must refuse the task's wrong answer: one that accepts
it ends the benchmark. Four questions have no command, and count as not answered.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from record import ROOT, print_table, read_result, write_result
from small_job import small_model

from toolkit.demo.assets import default_data_file

GITHUB = "https://github.com/"
STEPS = 6
SLEEP_SECONDS = 0.4


class Judged(NamedTuple):
    """What the product answered, who is right, and an answer that must be refused."""

    answer: Any
    is_right: Callable[[Any], bool]
    wrong: Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question."""

    name: str
    question: str
    truth: str  # where the right answer is from
    judge: Callable[[Desk], Judged] | None


class Desk:
    """Runs commands in a folder, and remembers them; keeps the real runs."""

    def __init__(self, work: Path) -> None:
        self.work, self.commands = work, list[str]()

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run `toolkit COMMAND` as a person types it, and return its stdout. Raises RuntimeError where it fails."""
        self.commands.append(f"toolkit {command}".replace(f"{self.work}/", "DIR/"))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        words = [sys.executable, "-m", "toolkit", *shlex.split(command)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=self.work)
        if done.returncode and not fails:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-600:]}")
        return done.stdout

    def ask(self, command: str, *, fails: bool = False) -> Any:
        """Run a command with --json and return its answer."""
        head, dashes, tail = command.partition(" -- ")
        return json.loads(self.run(f"{head} --json{dashes}{tail}", fails=fails))

    def plans(self, command: str) -> dict[str, dict[str, Any]]:
        """Return the plans of a command by preset."""
        return {row["preset"]: row for row in self.ask(f"plan {command}")["plans"]}

    @cached_property
    def model(self) -> Path:
        """The model of the real runs."""
        return small_model(self.work / "model", vocab_size=4096)

    @property
    def job(self) -> str:
        """Model and rows of the real runs."""
        return f"--model_name_or_path {self.model} --dataset {default_data_file('faq-en-alpaca.jsonl')}"

    def train(self, name: str, preset: str, processes: int, more: str = "") -> Path:
        """Train for some steps, once, and return the run folder."""
        folder = self.work / name
        job = f"{self.job} --seed 7 --output_dir {folder}"
        job += f" --max_seq_length 64 --max_steps {STEPS} --save_strategy steps --save_steps 3"
        job += f" --per_device_train_batch_size {4 // processes} {more}"
        if not (folder / "run.json").is_file():
            self.run(f"train --preset {preset} --num-processes {processes} --cpu -- {job}")
        return folder

    def observe(self, name: str, fault: str) -> dict[str, Any]:
        """Run a Trainer with a fault on two ranks, once; return its run.json, and failure.json where it failed."""
        path, folder = self.work / f"{name}.py", self.work / name
        path.write_text(TRAINER % {"fault": fault, "model": self.model, "folder": folder, "steps": STEPS})
        if not (folder / "run.json").is_file():
            command = f"train --preset ddp --num-processes 2 --cpu --output-dir {folder} --script {path}"
            self.run(command, fails=True)
        failure = folder / "failure.json"
        return read(folder / "run.json") | {"failure": read(failure) if failure.is_file() else None}


def read(path: Path) -> Any:
    """Return the JSON of a file."""
    return json.loads(path.read_text())


TASKS: list[Task] = []


def task(question: str, *, truth: str) -> Callable[[Callable[[Desk], Judged]], Callable[[Desk], Judged]]:
    """Register the function that answers a question and judges the answer."""

    def register(judge: Callable[[Desk], Judged]) -> Callable[[Desk], Judged]:
        name = judge.__name__.replace("_", " ")
        TASKS.append(Task(name=name, question=question, truth=truth, judge=judge))
        return judge

    return register


SEVEN = "meta-llama/Llama-2-7b-hf"
SEVENTY = "meta-llama/Llama-2-70b-hf"


# Question, thread, preset, options of `toolkit plan`, and what was reported.
THREADS = {
    "alpaca on four a100": (
        "Can I fine-tune LLaMA 7B on four A100 40G?",
        "tatsu-lab/stanford_alpaca/issues/280",
        "fsdp2_cpu_offload",
        f"{SEVEN} --gpu a100-40gb --num-processes 4 --fsdp1 --per-device-train-batch-size 2 --max-seq-length 512 "
        "--loss upcast --gradient-accumulation-steps 8 --no-activation-checkpointing",
        "fits",  # with offload, and a batch of 2
    ),
    "qlora 70b on two 3090": (
        "OOM with FSDP and QLoRA, 70B on two RTX 3090",
        "axolotl-ai-cloud/axolotl/issues/1522",
        "fsdp2",
        f"{SEVENTY} --gpu rtx-3090 --num-processes 2 --lora-r 32 --load-in-4bit --max-seq-length 512 --fsdp1 "
        "--per-device-train-batch-size 1 --program axolotl --activation-checkpointing --gradient-accumulation-steps 4",
        "does_not_fit",
    ),
    "seven b on two v100": (
        "7B on two V100 16 GB runs out of memory with ZeRO-2 and CPU offload, though the estimate says 12.4 GB",
        "deepspeedai/DeepSpeed/issues/3770",
        "zero2_cpu_offload",
        f"{SEVEN} --gpu v100-16gb --num-processes 2 --fp16 --per-device-train-batch-size 1",
        "does_not_fit",
    ),
    "seven b on eight v100": (
        "Is my FSDP working? 7B runs out of memory on 8 V100 16 GB",
        "meta-llama/llama-cookbook/issues/234",
        "fsdp2",
        f"{SEVEN} --gpu v100-16gb --num-processes 8 --fsdp1 --fp16 --loss full --per-device-train-batch-size 4 "
        "--no-activation-checkpointing --max-seq-length 4096",
        "does_not_fit",
    ),
}


def planned_verdict(preset: str, options: str, reported: str, desk: Desk) -> Judged:
    """Answer with the plan's verdict, right if it is the reported one; `too_close` is no answer."""
    row = desk.plans(f"{options} --preset {preset}")[preset]
    other = {"fits": "does_not_fit", "does_not_fit": "fits"}[reported]
    return Judged(row["verdict"], lambda answer: answer == reported, other)


for NAME, (QUESTION, THREAD, *PLAN) in THREADS.items():
    TASKS.append(Task(name=NAME, question=QUESTION, truth=GITHUB + THREAD, judge=partial(planned_verdict, *PLAN)))


@task("Can I fully fine-tune 70B on 8 A100 80 GB?", truth=f"{GITHUB}meta-pytorch/torchtune/issues/863")
def seventy_b_on_one_node(desk: Desk) -> Judged:
    presets = "--preset fsdp2 --preset fsdp2_cpu_offload"
    rows = desk.plans(f"{SEVENTY} --gpu a100-80gb --num-processes 8 {presets} --host-memory-gib 2048")
    answer = {name: row["verdict"] for name, row in rows.items()}
    reported = {"fsdp2": "does_not_fit", "fsdp2_cpu_offload": "fits"}  # only with offload
    return Judged(answer, lambda given: given == reported, dict.fromkeys(reported, "fits"))


@task("How much host memory does ZeRO offload of a 7B need?", truth=f"{GITHUB}deepspeedai/DeepSpeed/issues/3606")
def host_memory_of_offload(desk: Desk) -> Judged:
    row = desk.plans(f"{SEVEN} --gpu a100-40gb --num-processes 8 --preset zero3_cpu_offload")["zero3_cpu_offload"]
    # Reported: 94 GB were too little, and eight GPUs took about 178 GB while the engine started.
    return Judged(row["host_bytes"] / 1e9, lambda answer: 94 < answer < 1.3 * 178, 50.0)


@task("Resume a ZeRO checkpoint on another number of GPUs", truth=f"{GITHUB}deepspeedai/DeepSpeed/issues/3810")
def resume(desk: Desk) -> Judged:
    before = desk.train("zero2", "zero2", 2)
    converted = desk.work / "one_rank" / "checkpoint-3"
    if not converted.is_dir():
        desk.run(f"checkpoint convert {before}/checkpoint-3 {converted} --preset zero2 --num-processes 1")
    after = desk.train("resumed", "zero2", 1, f"--resume_from_checkpoint {converted}")
    lasting, resumed = losses(before), losses(after)
    wrong = {step: loss + 0.5 for step, loss in resumed.items()}
    return Judged(resumed, lambda answer: set(answer) == {4, 5, 6} and near(answer, lasting), wrong)


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step: the mean over ranks, as the Trainer scales their losses."""
    found: dict[int, list[float]] = {}
    for path in folder.glob("ranks/rank[0-9].jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            found.setdefault(row["step"], []).append(row["loss"])
    return {step: statistics.fmean(each) for step, each in found.items()}


def near(some: dict[int, float], whole: dict[int, float]) -> bool:
    return all(math.isclose(loss, whole[step], rel_tol=1e-4) for step, loss in some.items())


@task("Weights trained with ZeRO-3 have size 0", truth=f"{GITHUB}huggingface/transformers/issues/20082")
def weights_of_zero3(desk: Desk) -> Judged:
    run, out = desk.train("zero3", "zero3", 2), desk.work / "exported"
    if not out.is_dir():
        desk.run(f"checkpoint export {run}/checkpoint-6 {out}")
    from safetensors.torch import load_file

    exported, base = (shapes(load_file(folder / "model.safetensors")) for folder in (out, desk.model))
    return Judged(exported, lambda answer: answer == base, dict.fromkeys(exported, (0,)))


def shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def refused_by_transformers(settings: dict[str, Any], **arguments: Any) -> bool:
    """Return True if transformers itself refuses these DeepSpeed settings with these arguments."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = HfTrainerDeepSpeedConfig(dict(settings))
    try:
        given = TrainingArguments(output_dir="out", report_to="none", use_cpu=True, **arguments)
        config.trainer_config_process(given)
        config.trainer_config_finalize(given, None, 10)
    except (ValueError, TypeError):
        return True
    return False


def mismatch(desk: Desk, name: str, value: Any, given: int) -> Judged:
    """Lint DeepSpeed settings beside Trainer arguments; the right finding names the key that transformers refuses."""
    folder = desk.work / name
    folder.mkdir(exist_ok=True)
    settings = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    settings |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": value}
    (folder / "ds.json").write_text(json.dumps(settings))
    launch = f"accelerate launch --use_deepspeed train.py --gradient_accumulation_steps {given}"
    (folder / "run.sh").write_text(f"#!/bin/bash\n{launch} --deepspeed ds.json --output_dir out\n")
    findings = desk.ask(f"lint {folder}", fails=True)["findings"]
    named = [each["key"] for each in findings if each["level"] == "error" or "auto" in (each["fix"] or "")]
    fails = refused_by_transformers(settings, gradient_accumulation_steps=given)
    return Judged(named, lambda keys: fails and any("gradient_accumulation" in str(key) for key in keys), [])


@task("Why: ds gradient_accumulation_steps=4 vs hf 2?", truth=f"transformers; {GITHUB}hiyouga/LlamaFactory/issues/201")
def accumulation_differs(desk: Desk) -> Judged:
    return mismatch(desk, "differs", 4, 2)


@task("Why: ds gradient_accumulation_steps=8 vs hf 8?", truth=f"transformers; {GITHUB}hiyouga/LlamaFactory/issues/1116")
def accumulation_is_text(desk: Desk) -> Judged:
    return mismatch(desk, "text", "8", 8)


@task("Make this fit: Qwen3-0.6B, all weights, 4 x T4, 4,096 tokens", truth="a trace of the recommended settings")
def make_it_fit(desk: Desk) -> Judged:
    where = "Qwen/Qwen3-0.6B --gpu t4 --num-processes 4 --max-seq-length 4096 --preset fsdp2"
    choice = desk.ask(f"recommend {where}")["choice"]
    memory = choice["planned_peak_bytes"] + choice["headroom_bytes"]
    model = f"--model_name_or_path {ROOT}/toolkit/models/known/Qwen/Qwen3-0.6B/config.json --max_seq_length 4096"

    def fits(setting: tuple[int, bool]) -> bool:
        rows, recomputes = setting
        job = f"--per_device_train_batch_size {rows} --activation_checkpointing {str(recomputes).lower()}"
        traced = desk.ask(f"rehearse --preset fsdp2 --num-processes 4 --fake-tensors -- {model} {job} --max_steps 1")
        return max(each["total_bytes"] for each in traced["peaks"].values()) < memory

    answer = (choice["per_device_train_batch_size"], choice["activation_checkpointing"])
    return Judged(answer, fits, (8, False))


@task("How long does 100 M tokens of full Mistral-7B take on one A100, and its cost?", truth="fms-acceleration's speed")
def time_and_cost(desk: Desk) -> Judged:
    where = "mistralai/Mistral-7B-v0.3 --gpu a100-80gb --num-processes 1 --preset single --pure-bf16 --packing"
    job = "--per-device-train-batch-size 4 --gradient-accumulation-steps 1 --max-seq-length 4096"
    job += " --activation-checkpointing --dataset-tokens 100000000 --price-per-gpu-hour 2"
    finish = desk.plans(f"{where} {job}")["single"]["finish"]
    hours = 1e8 / 3062.7 / 3600  # tests/fixtures/measured_speed.csv, its first row
    return Judged(
        (finish["hours_range"], finish["dollars_range"]),
        lambda answer: answer[0][0] <= hours <= answer[0][1] and answer[1][0] <= 2 * hours <= answer[1][1],
        ([1.0, 2.0], [2.0, 4.0]),
    )


@task("Is it really sharded?", truth="sizes of the optimizer files that each rank wrote")
def really_sharded(desk: Desk) -> Judged:
    run = desk.train("zero2", "zero2", 2)
    said = [rank["optimizer_bytes"] for rank in read(run / "attestation.json")["ranks"]]
    files = sorted(run.glob("checkpoint-6/**/*optim_states.pt"))
    written = [path.stat().st_size for path in files]
    whole = [2 * each for each in said]

    def is_right(answer: list[int]) -> bool:
        """A rank's file has little beside the states that the rank says it holds."""
        pairs = zip(written, answer, strict=False)
        return len(written) == 2 and all(math.isclose(*sizes, rel_tol=0.1) for sizes in pairs)

    return Judged(said, is_right, whole)


TRAINER = """
import time, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
rows = [dict(input_ids=[index %% 90 + 5] * 32, labels=[index %% 90 + 5] * 32) for index in range(64)]
def collate(batch):
    %(fault)s
    return {name: torch.tensor([row[name] for row in batch]) for name in ("input_ids", "labels")}
arguments = TrainingArguments(output_dir="%(folder)s", max_steps=%(steps)d, per_device_train_batch_size=2, use_cpu=True,
    report_to="none", save_strategy="no", remove_unused_columns=False)
model = AutoModelForCausalLM.from_pretrained("%(model)s")
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate).train()
"""


@task("Why is this run slow?", truth="each batch is made 0.4 s late, on both ranks")
def slow_data(desk: Desk) -> Judged:
    run = desk.observe("slow_data", f"time.sleep({SLEEP_SECONDS})")
    late = SLEEP_SECONDS * STEPS
    return Judged(run["goodput"]["waiting_seconds"], lambda answer: 0.5 * late <= answer <= 3 * late, 0.0)


@task("Does a slow rank hold up the others?", truth="rank 1 makes each batch 0.4 s late")
def slow_rank(desk: Desk) -> Judged:
    run = desk.observe("slow_rank", f"dist.get_rank() == 1 and time.sleep({SLEEP_SECONDS})")
    return Judged(run["measured"]["rank_skew"], lambda answer: answer > 1.3, 1.0)


@task("Why did my run fail?", truth="rank 1 raises an error in its third batch")
def failed_run(desk: Desk) -> Judged:
    line = "assert dist.get_rank() == 0 or torch.initial_seed() == 0, 'no such image: 17.png'"
    failure = desk.observe("failed", line)["failure"] or {}
    answer = (failure.get("rank"), failure.get("message") or "")
    return Judged(answer, lambda given: given[0] == 1 and "17.png" in given[1], (0, "exit code 1"))


@task("Does ZeRO-2 change what is trained?", truth="losses of the ranks' own records")
def same_training(desk: Desk) -> Judged:
    one, other = (losses(desk.train(name, name, 2)) for name in ("ddp", "zero2"))
    if not (desk.work / "both" / "results.json").is_file():
        command = "compare --preset ddp --preset zero2 --num-processes 2 --cpu --repeats 1"
        job = f"{desk.job} --max_steps 8 --max_seq_length 64 --per_device_train_batch_size 2"
        desk.run(f"{command} --output-dir {desk.work}/both -- {job}")
    rows = desk.ask(f"report {desk.work}/both")["rows"]
    answer = {row["preset"]: row["last_loss"] for row in rows}
    same = near(one, other)
    wrong = {"ddp": 1.0, "zero2": 2.0}
    return Judged(answer, lambda given: same and math.isclose(given["ddp"], given["zero2"], rel_tol=0.01), wrong)


@task("Which is faster on this node, DDP or ZeRO-2?", truth="the step times in the ranks' own records")
def faster_here(desk: Desk) -> Judged:
    same_training(desk)
    rows = {row["preset"]: row for row in desk.ask(f"report {desk.work}/both")["rows"]}
    said = min(rows, key=lambda name: rows[name]["step_seconds_median"])
    medians = {}
    for name in rows:
        path = next(desk.work.glob(f"both/trials/*{name}*/ranks/rank0.jsonl"))
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        medians[name] = statistics.median(row["seconds"] for row in steps[2:])
    truth = min(medians, key=lambda name: medians[name])
    return Judged(said, lambda given: given == truth, next(name for name in medians if name != truth))


@task("Is this checkpoint complete?", truth="one of its files is cut in half")
def complete_checkpoint(desk: Desk) -> Judged:
    whole, broken = desk.train("zero2", "zero2", 2) / "checkpoint-3", desk.work / "broken" / "checkpoint-3"
    if not broken.is_dir():
        shutil.copytree(whole, broken)
        path = next(broken.glob("**/*optim_states.pt"))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = [desk.ask(f"checkpoint inspect {folder}", fails=True)["checkpoints"][0] for folder in (whole, broken)]
    answer = [(each["state"], each["problem"]) for each in said]
    cut = next(broken.glob("**/*optim_states.pt")).name

    def is_right(given: list[tuple[str, str | None]]) -> bool:
        (first, _), (second, problem) = given
        return first == "complete" != second and cut in str(problem)

    return Judged(answer, is_right, [("complete", None), ("complete", None)])


@task("What does this pull request do to memory?", truth="plans of both files")
def pull_request(desk: Desk) -> Judged:
    folder = desk.work / "repository"
    job = "base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 16\nsequence_len: {}\nmicro_batch_size: 2\n"
    job += "gradient_accumulation_steps: 1\nlearning_rate: 0.0001\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\n"
    folder.mkdir(exist_ok=True)
    (folder / "axolotl.yaml").write_text(job.format(1024))
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "Begin"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    (folder / "axolotl.yaml").write_text(job.format(4096))
    (desk.work / "before.yaml").write_text(job.format(1024))
    where, peaks = "--gpu h100 --num-processes 8", []
    for path in (desk.work / "before.yaml", folder / "axolotl.yaml"):
        peaks.append(desk.ask(f"plan --config {path} --preset ddp {where}")["plans"][0]["planned_peak_bytes"])
    desk_in = Desk(folder)
    text = desk_in.run(f"diff HEAD {where} --format json", fails=True)
    desk.commands += desk_in.commands
    numbers = sorted(set(all_numbers(json.loads(text))))
    return Judged(numbers, lambda given: bool(given) and max(given) >= max(peaks) * 0.9, [min(peaks) / 2])


def all_numbers(value: Any) -> list[float]:
    """Return the peaks of an answer, wherever they are."""
    if isinstance(value, dict):
        named = [number for name, number in value.items() if name == "planned_peak_bytes" and number]
        return named + [number for each in value.values() for number in all_numbers(each)]
    return [number for each in value for number in all_numbers(each)] if isinstance(value, list) else []


@task("Turn my axolotl file into your arguments", truth="the file's own values")
def convert_axolotl(desk: Desk) -> Judged:
    import yaml

    path = ROOT / "tests" / "fixtures" / "axolotl.yaml"
    theirs = yaml.safe_load(path.read_text())
    ours = yaml.safe_load(desk.run(f"convert-config {path}"))
    names = {"sequence_len": "max_seq_length", "micro_batch_size": "per_device_train_batch_size"}
    names |= {"gradient_accumulation_steps": "gradient_accumulation_steps", "learning_rate": "learning_rate"}
    expected = {new: float(theirs[old]) for old, new in names.items() if old in theirs}
    answer = {name: float(ours[name]) for name in expected if name in ours}
    return Judged(answer, lambda given: len(given) >= 3 and given == expected, answer | {"max_seq_length": 1.0})


@task("Which GPUs do I need for Qwen3-8B?", truth="a plan of that number, and of half of it")
def which_gpus(desk: Desk) -> Judged:
    first = desk.ask("plan Qwen/Qwen3-8B")["plans"][0]
    where = f"Qwen/Qwen3-8B --gpu {first['gpu']} --preset {first['preset']}"
    count = first["world_size"]
    fits = {n: desk.plans(f"{where} --num-processes {n}")[first["preset"]]["verdict"] for n in (count, count // 2)}
    return Judged(count, lambda given: fits[given] == "fits" and fits[count // 2] != "fits", count // 2)


@task("Write the SLURM file for two nodes of eight GPUs", truth="bash, and the words of sbatch")
def slurm_file(desk: Desk) -> Judged:
    options = "--preset fsdp2 --nodes 2 --gpus-per-node 8"
    text = desk.run(f"cluster slurm {options} -- {desk.job} --output_dir {desk.work}/shared")

    def is_right(given: str) -> bool:
        parses = subprocess.run(["bash", "-n"], input=given, text=True, capture_output=True).returncode == 0
        ranks = re.search(r"--nproc[-_]per[-_]node[= ]+8\b", given)
        return parses and "#SBATCH --nodes=2" in given and ranks is not None

    return Judged(text, is_right, text.replace("--nodes=2", "--nodes=1"))


@task("How often should 1,024 GPUs save?", truth="Young's formula: sqrt(2 x time of a save x time between failures)")
def how_often_to_save(desk: Desk) -> Judged:
    said = desk.ask("simulate failures --gpus 1024 --checkpoint-seconds 60 --runs 1 --days 10")
    young = math.sqrt(2 * 60 * said["mean_hours_between_failures"] * 3600)
    best = said["best_checkpoint_interval_seconds"]
    hours = 1000 / 6.5 / 128 * 24  # 6.5 failures of 1,000 nodes in a day, 128 nodes
    honest = math.isclose(said["mean_hours_between_failures"], hours, rel_tol=0.05)
    return Judged(best, lambda given: honest and math.isclose(given, young, rel_tol=0.1), 2 * best)


@task("Is the network the bottleneck between my two nodes?", truth="2 (N-1)/N of the fp32 gradients over 3 GB/s")
def network(desk: Desk) -> Judged:
    where = "Qwen/Qwen3-0.6B --gpu h100 --num-processes 16 --preset ddp --network-gb-per-second 3"
    choice = desk.ask(f"recommend {where}")["choice"]
    sent = 2 * 15 / 16 * 4 * 596_049_920  # tied head; a ring sends it once between the nodes
    said = choice["communication_seconds"]
    # Not within NVLink's seconds, and not several times those of the network.
    return Judged(said, lambda given: given[0] / 1.5 <= sent / 3e9 <= given[1] * 1.5, [sent / 450e9, sent / 300e9])


@task("How many parameters does LoRA of rank 16 train?", truth="peft, on the meta device")
def lora_parameters(desk: Desk) -> Judged:
    where = "Qwen/Qwen3-0.6B --gpu h100 --num-processes 1 --preset single --lora-r 16"
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(ROOT / "toolkit/models/known/Qwen/Qwen3-0.6B")
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config)
        model = get_peft_model(bare, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained, _ = model.get_nb_trainable_parameters()
    said = desk.plans(where)["single"]["num_trainable_params"]
    return Judged(said, lambda given: given == trained, said // 2)


for NAME, QUESTION in (
    ("longest sequence", "What is the longest sequence that fits on my GPUs?"),
    ("learning rate", "Which learning rate should I use?"),
    ("quality", "Will the fine-tuned model be better than the one I have?"),
    ("cheapest offer", "Which cloud is cheapest for this job today?"),
):
    TASKS.append(Task(name=NAME, question=QUESTION, truth="no command answers it", judge=None))


def outcome(each: Task, desk: Desk) -> dict[str, Any]:
    """Return a row: answered rightly, wrongly, or not at all, with the commands."""
    row: dict[str, Any] = {"task": each.name, "question": each.question, "truth": each.truth}
    desk.commands = []
    if each.judge is None:
        return row | {"outcome": "not answered", "commands": []}
    try:
        judged = each.judge(desk)
    except Exception as error:
        traceback.print_exc()
        return row | {"outcome": "not answered", "commands": desk.commands, "error": str(error)[-400:]}
    if judged.is_right(judged.wrong):
        raise AssertionError(f"the judge of {each.name!r} accepts a wrong answer: {judged.wrong!r}")
    said = "right" if judged.is_right(judged.answer) else "wrong"
    if judged.answer == "too_close":
        said = "not answered"
    return row | {"outcome": said, "commands": desk.commands, "answer": str(judged.answer)[:200]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--only", help="tasks whose name has this")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    desk = Desk(given.work.resolve())
    rows, recorded = [], {row["task"]: row for row in read_result("tasks")[1]}
    for each in TASKS:
        if given.only is None or given.only in each.name:
            rows.append(outcome(each, desk))
            print(rows[-1]["outcome"], "-", each.name, "-", rows[-1].get("answer", "")[:100], flush=True)
        elif each.name in recorded:
            rows.append(recorded[each.name])
    counts = {name: sum(row["outcome"] == name for row in rows) for name in ("right", "wrong", "not answered")}
    print_table(("outcome", "tasks"), list(counts.items()))
    print(write_result("tasks", counts, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
