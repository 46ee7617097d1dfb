"""Tokens per CPU-second of the timed steps under `toolkit train`, against a plain Trainer script on the same job.

    python benchmarks/overhead.py --work DIR
    python benchmarks/overhead.py --work DIR --first-step      # seconds until the first step is done, cold starts

Both sides train the default model in fp32 on CPU ranks of one thread each, on the same batches: their losses are
compared step by step. They run in alternating order, and both are forked from one fork server, which does not change
the steps (`benchmarks/warm_starts.py`). A ratio above 1 means that the toolkit trains more tokens with the same
processor time. CPU-seconds, since the wall time of two runs on a node with other load differs severalfold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from record import print_table, spread, write_result, write_table

from toolkit.cache import path_with_ninja
from toolkit.compare.significance import geometric_mean, mean_interval
from toolkit.launch.command import LaunchCommand
from toolkit.launch.environment import inherited_environment
from toolkit.launch.launch import command_of, run_training
from toolkit.launch.options import TrainOptions
from toolkit.launch.warm_start import WarmStart, fork_process

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "evidence" / "overhead.md"
TABLE, FIRST_STEP_TABLE = "overhead", "first-step"
MAX_SEQ_LENGTH = 64
LORA_R = {"full": 0, "lora": 8}
WORLD_SIZES = {"single": 1, "ddp": 2, "zero2": 2, "fsdp2": 2}
# torchtune 0.6.1 trains LoRA in one process with 1.12 times the tokens per CPU-second of a plain Trainer.
GOALS = {"single/lora": 1.12}
GOAL = 1.0
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Input of both sides, and where they may write."""

    model: Path
    dataset: Path
    tokens: Path
    """The same rows, tokenised, on disk."""
    scratch: Path
    steps: int
    untimed_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Result of one run: seconds of the timed steps, losses and tokens."""

    wall_seconds: float
    """Per step the slowest rank, summed over the timed steps."""
    cpu_seconds: float
    """Of all ranks, over the timed steps."""
    losses: list[list[float]]
    """Per step, each rank's."""
    tokens: int | None
    """Of all ranks over the timed steps; None for the plain script, which trains on the same batches uncounted."""
    first_step_seconds: float
    """From the launch until rank 0 has printed its first step."""


def reduce(ranks: list[list[dict[str, Any]]], untimed_steps: int, first_step_seconds: float) -> Side:
    """Reduce the rows of all ranks, in the same way for both sides."""
    steps = list(zip(*ranks, strict=True))
    timed = steps[untimed_steps:]
    counted = [row["tokens"] for step in timed for row in step if "tokens" in row]
    return Side(
        wall_seconds=math.fsum(max(row["seconds"] for row in step) for step in timed),
        cpu_seconds=math.fsum(row["cpu_seconds"] for step in timed for row in step),
        losses=[[row["loss"] for row in step] for step in steps],
        tokens=sum(counted) or None,
        first_step_seconds=first_step_seconds,
    )


class FirstStep:
    """Notes when the first step's line is printed."""

    def __init__(self) -> None:
        self.started, self.seconds = time.monotonic(), math.nan

    def __call__(self, line: str) -> None:
        if line.startswith("step 1/"):
            self.seconds = time.monotonic() - self.started


def toolkit_command(case: str, job: Job, output: Path) -> tuple[TrainOptions, LaunchCommand]:
    preset, method = case.split("/")
    training = {
        "model_name_or_path": job.model,
        "dataset": job.dataset,
        "output_dir": output,
        "max_steps": job.steps,
        "untimed_steps": job.untimed_steps,
        "max_seq_length": MAX_SEQ_LENGTH,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "save_model": "false",
        "save_strategy": "no",
    } | ({"lora_r": LORA_R[method]} if LORA_R[method] else {})
    words = [word for name, value in training.items() for word in (f"--{name}", str(value))]
    options = TrainOptions(preset=preset, num_processes=WORLD_SIZES[preset], training_arguments=tuple(words), cpu=True)
    return options, command_of(options)


def run_toolkit(case: str, job: Job, warm_start: WarmStart | None) -> Side:
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder:
        output = Path(folder) / "run"
        options, command = toolkit_command(case, job, output)
        server = socket_of(warm_start, command)
        first_step = FirstStep()
        result = run_training(command, options=options, output_dir=output, on_line=first_step, fork_server=server)
        if result.exit_code != 0:
            raise SystemExit(
                f"toolkit train, {case}: ended with {result.exit_code}:\n{(output / 'train.log').read_text()[-4000:]}"
            )
        paths = [output / "ranks" / f"rank{rank}.jsonl" for rank in range(options.num_processes)]
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return reduce(rows, job.untimed_steps, first_step.seconds)


def run_bare(case: str, job: Job, warm_start: WarmStart | None) -> Side:
    preset, method = case.split("/")
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder:
        output = Path(folder)
        argv = [sys.executable, "-m", "accelerate.commands.launch"]
        argv += ["--config_file", str(ROOT / "accelerate_configs" / f"{preset}.yaml")]
        argv += ["--num_processes", str(WORLD_SIZES[preset]), "--num_machines", "1", "--main_process_port", "0"]
        argv += [str(ROOT / "benchmarks" / "bare_trainer.py"), "--model", str(job.model), "--data", str(job.tokens)]
        argv += ["--output", str(output), "--max_steps", str(job.steps), "--lora_r", str(LORA_R[method])]
        # Threads, compiled ops and warnings as `toolkit train` sets them, so that only the scripts differ.
        _, command = toolkit_command(case, job, output)
        environment = {**inherited_environment(), **command.environment}
        server, first_step = socket_of(warm_start, command), FirstStep()
        log = execute(argv, environment, server, first_step)
        paths = [output / f"rank{rank}.json" for rank in range(WORLD_SIZES[preset])]
        if not all(path.exists() for path in paths):
            raise SystemExit(f"{' '.join(argv)}\nleft no results:\n{log[-4000:]}")
        rows = [json.loads(path.read_text()) for path in paths]
    return reduce(rows, job.untimed_steps, first_step.seconds)


def socket_of(warm_start: WarmStart | None, command: LaunchCommand) -> str | None:
    if warm_start is None:
        return None
    return warm_start.socket_path({**inherited_environment(), **command.environment}, on_line=print)


def execute(
    argv: Sequence[str], environment: dict[str, str], server: str | None, on_line: Callable[[str], None]
) -> str:
    """Run the plain script, forked from the server if there is one, and return what it printed."""
    if server is None:
        process: Any = subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    else:
        process = fork_process(server, argv, environment=environment)
    lines = []
    for line in process.stdout:
        on_line(line)
        lines.append(line)
    code = process.wait()
    if code != 0:
        raise SystemExit(f"{' '.join(argv)}\nended with {code}:\n{''.join(lines)[-6000:]}")
    return "".join(lines)


def prepare(scratch: Path, model: Path | None, steps: int, untimed_steps: int) -> Job:
    """Prepare model and data, the demo's by default, and write the toolkit's tokens to disk for the plain script."""
    import datasets

    from toolkit.demo.assets import default_data_file, prepare_default_model
    from toolkit.job.script_arguments import ModelArguments
    from toolkit.train.data.tokenization import load_rows, tokenize
    from toolkit.train.model.loading import load_tokenizer

    datasets.disable_progress_bars()
    model, dataset, tokens = model or prepare_default_model(), default_data_file(), scratch / "tokens"
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=str(model)), chat_template=None)
    rows, data_format = load_rows(str(dataset), "train")
    tokenized = tokenize(
        rows, tokenizer=tokenizer, data_format=data_format, max_seq_length=MAX_SEQ_LENGTH, loss_on=None
    )
    tokenized.dataset.save_to_disk(tokens)
    return Job(model=model, dataset=dataset, tokens=tokens, scratch=scratch, steps=steps, untimed_steps=untimed_steps)


def measure_pair(case: str, number: int, job: Job, warm_start: WarmStart | None) -> dict[str, Any]:
    """Run both sides once; every second pair begins with the plain script."""
    sides: dict[str, Callable[[str, Job, WarmStart | None], Side]] = {"toolkit": run_toolkit, "bare": run_bare}
    order = sides if number % 2 == 0 else reversed(sides)
    measured = {name: asdict(sides[name](case, job, warm_start)) for name in order}
    return {"case": case, "number": number, **measured}


def reduced(case: str, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one case's ratios by pair, and whether both sides trained the same."""
    both = [(Side(**pair["toolkit"]), Side(**pair["bare"])) for pair in measured]
    return {
        "case": case,
        "goal": GOALS.get(case, GOAL),
        "tokens": both[0][0].tokens,
        # Both sides train the same tokens, so that the ratio of tokens per second is the inverse ratio of the seconds.
        "ratio_wall": interval([bare.wall_seconds / ours.wall_seconds for ours, bare in both]),
        "ratio_cpu": interval([bare.cpu_seconds / ours.cpu_seconds for ours, bare in both]),
        "first_step_difference": spread([ours.first_step_seconds - bare.first_step_seconds for ours, bare in both]),
        "first_step": {
            side: spread([pair[side]["first_step_seconds"] for pair in measured]) for side in ("toolkit", "bare")
        },
        "largest_loss_difference": max(loss_difference(ours, bare) for ours, bare in both),
        "pairs": [{side: seconds_of(pair[side]) for side in ("toolkit", "bare")} for pair in measured],
    }


def interval(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the geometric mean of the ratios and its 95 % confidence interval (Student's t on logarithms)."""
    return {"mean": geometric_mean(ratios), "confidence_interval": mean_interval(ratios, CONFIDENCE)}


def seconds_of(side: dict[str, Any]) -> dict[str, float]:
    return {name: side[name] for name in ("wall_seconds", "cpu_seconds", "first_step_seconds")}


def loss_difference(ours: Side, bare: Side) -> float:
    """Return the largest relative difference between the two sides' losses, over steps and ranks."""
    both = zip(chain.from_iterable(ours.losses), chain.from_iterable(bare.losses), strict=True)
    return max(abs(a - b) / abs(b) for a, b in both)


HEADER = (
    "job",
    "pairs",
    "tokens per CPU-second: toolkit / plain script (95 % CI)",
    "goal",
    "largest loss difference",
)
FIRST_STEP_HEADER = ("job", "pairs", "toolkit (s)", "plain script (s)", "difference (s)")


def table_rows(result: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for found in result["cases"]:
        ratio = found["ratio_cpu"]
        shown = f"{ratio['mean']:.3f}"
        if ratio["confidence_interval"] is not None:
            shown += " ({:.3f} to {:.3f})".format(*ratio["confidence_interval"])
        goal = f"{found['goal']:.2f} {'reached' if ratio['mean'] >= found['goal'] else 'missed'}"
        rows.append([found["case"], len(found["pairs"]), shown, goal, f"{found['largest_loss_difference']:.0e}"])
    return rows


def first_step_rows(result: dict[str, Any]) -> list[list[object]]:
    return [
        [
            found["case"],
            len(found["pairs"]),
            *(f"{found['first_step'][side]['median']:.1f}" for side in ("toolkit", "bare")),
            "{median:+.1f} ({min:+.1f} to {max:+.1f})".format(**found["first_step_difference"]),
        ]
        for found in result["cases"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of `toolkit train` against a plain Trainer script.")
    every = [f"{preset}/{method}" for preset in WORLD_SIZES for method in LORA_R]
    parser.add_argument("--case", nargs="+", default=every, choices=every, metavar="PRESET/METHOD")
    parser.add_argument("--model", type=Path, help="a folder; the default model if not given")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--untimed-steps", type=int, default=2)
    parser.add_argument("--first-step", action="store_true", help="cold starts of one step, for the seconds until then")
    parser.add_argument("--work", type=Path, required=True, help="folder for finished pairs; the same command resumes")
    parser.add_argument("--at-most", type=int, help="stop after this many pairs; the next call resumes")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    # Set before the fork server starts and before each cold start: the same threads for both sides.
    # And the same ninja: another version of it would compile DeepSpeed's ops again in every second run.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": path_with_ninja()}
    if given.first_step:
        given.steps, given.untimed_steps = 1, 0
    name = "first_step" if given.first_step else "overhead"
    ledger = given.work / f"{name}.jsonl"
    done = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    finished = {(pair["case"], pair["number"]) for pair in done}
    wanted = [(case, number) for number in range(given.pairs) for case in given.case]
    waiting = [pair for pair in wanted if pair not in finished]
    with tempfile.TemporaryDirectory() as scratch, WarmStart() as warm_start:
        job = prepare(Path(scratch), given.model, given.steps, given.untimed_steps)
        for case, number in waiting[: given.at_most]:
            done.append(measure_pair(case, number, job, None if given.first_step else warm_start))
            with ledger.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    if given.at_most is not None and len(waiting) > given.at_most:
        raise SystemExit(f"{len(waiting) - given.at_most} of {len(wanted)} pairs are left: the same command resumes")
    result = {"cases": [reduced(case, [pair for pair in done if pair["case"] == case]) for case in given.case]}
    if given.first_step:
        header, rows, table = FIRST_STEP_HEADER, first_step_rows(result), FIRST_STEP_TABLE
    else:
        header, rows, table = HEADER, table_rows(result), TABLE
    print_table(header, rows)
    print(write_result(name, result))
    write_table(DOCUMENT, table, header, rows)


if __name__ == "__main__":
    main()
