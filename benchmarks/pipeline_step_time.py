"""Steps of a real pipeline of two stages against the step that `toolkit simulate pipeline` predicts for them.

    python benchmarks/pipeline_step_time.py --rounds 20         # two gloo ranks on one node; minutes
    python benchmarks/pipeline_step_time.py --rounds 20 --table # writes the table of the recorded result again

The ranks train the stages of `pipeline_1f1b` (toolkit/train/engine/pipeline/), without an optimizer step. A round runs
every schedule once with one micro-batch, one transfer of its activations, and once with all micro-batches. Each
forward and backward is timed where torch calls it. There are two predictions of a step: from the times of the lone
micro-batch, while the other rank waits, and from the times inside the step, while both compute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, print_table, spread, write_result, write_table

from toolkit.compare.significance import geometric_mean, mean_interval
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B, PipelineSettings
from toolkit.simulate.pipeline_schedules import PipelineSize
from toolkit.simulate.pipeline_step import ChunkTimes, simulate

DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence" / "simulations.md"
TABLE = "measured pipeline steps"
HEADER = ["model", "schedule", "step", "step / prediction from times inside the step"]
HEADER += ["step / prediction from times of one micro-batch", "step / step of `1f1b`", "the same, predicted"]
RANKS, MICRO_BATCHES, WARM_UP, TRANSFERS = 2, 4, 2, 5
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
Operations = dict[tuple[int, str], list[float]]
"""Seconds of each forward and backward, by stage."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama and the tokens of a micro-batch."""

    name: str
    hidden_size: int
    layers: int
    vocab_size: int
    tokens: int

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "llama",
            hidden_size=self.hidden_size,
            intermediate_size=11 * self.hidden_size // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden_size // 32,
            num_key_value_heads=self.hidden_size // 32,
            vocab_size=self.vocab_size,
            tie_word_embeddings=False,
            use_cache=False,
        )


SIZES = (
    Size(name="hidden size 64, 4 layers, 64 tokens", hidden_size=64, layers=4, vocab_size=512, tokens=64),
    Size(name="hidden size 256, 8 layers, 256 tokens", hidden_size=256, layers=8, vocab_size=2048, tokens=256),
)


@contextmanager
def timed_operations() -> Iterator[Operations]:
    """Time every forward and backward of the stages in this process."""
    from torch.distributed.pipelining import PipelineStage

    found: Operations = defaultdict(list)
    kept = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk

    def timed(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(stage: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            result = run(stage, *args, **kwargs)
            found[stage.stage_index, kind].append(time.monotonic() - start)
            return result

        return call

    PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk = (
        timed("forward", kept[0]),
        timed("backward", kept[1]),
    )
    try:
        yield found
    finally:
        PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk = kept


class Pipeline:
    """This rank's stages under one schedule."""

    def __init__(self, size: Size, schedule: str, ranks: Any, folder: Path) -> None:
        import torch

        from toolkit.train.engine.pipeline.pipeline_model import PipelineModel
        from toolkit.train.engine.pipeline.pipeline_steps import PipelineSteps

        self.settings = PipelineSettings.of(ranks=RANKS, schedule=schedule, chunks=None)
        alone = self.settings if schedule == INTERLEAVED else PipelineSettings.of(ranks=RANKS, schedule=GPIPE, chunks=1)
        self.model = PipelineModel(size.config(), self.settings, ranks, attention=None)
        self.model.load(str(folder), "main", torch.device("cpu"))
        self.steps = PipelineSteps(self.model, micro_batches=MICRO_BATCHES, begin_forward=lambda: None)
        self.model.settings = alone  # 1F1B has no step of fewer micro-batches than stages
        self.lone_step = PipelineSteps(self.model, micro_batches=1, begin_forward=lambda: None)
        tokens = torch.randint(0, size.vocab_size, (1, size.tokens), generator=torch.Generator().manual_seed(0))
        self.batch = {"input_ids": tokens, "labels": tokens.clone()}

    def step(self, micro_batches: int) -> tuple[float, Operations]:
        """Run a step on all ranks; return its seconds, and those of this rank's operations."""
        import torch
        import torch.distributed as dist

        alone = micro_batches == 1
        steps, settings = (self.lone_step, self.model.settings) if alone else (self.steps, self.settings)
        kept, self.model.settings = self.model.settings, settings
        with timed_operations() as found:
            dist.barrier()
            start = time.monotonic()
            steps.run(
                [self.batch] * micro_batches, num_items=torch.tensor(micro_batches * self.batch["labels"].numel())
            )
            own = (start, time.monotonic())
        self.model.settings = kept
        self.model.zero_grad()
        spans: list[Any] = [None] * RANKS
        dist.all_gather_object(spans, own)
        return max(end for _, end in spans) - min(start for start, _ in spans), dict(found)


def transfer_seconds(size: Size) -> float:
    """Return the seconds in which a micro-batch's activations reach the other rank: half of the way there and back."""
    import torch
    import torch.distributed as dist

    activations, seconds = torch.zeros(1, size.tokens, size.hidden_size), []
    for _ in range(TRANSFERS):
        dist.barrier()
        start = time.monotonic()
        for sender in range(RANKS):
            if dist.get_rank() == sender:
                dist.send(activations, dst=1 - sender)
            else:
                dist.recv(activations, src=sender)
        seconds.append((time.monotonic() - start) / 2)
    return statistics.median(seconds)


def measure_on_rank(rank: int, folder: Path, rounds: int) -> None:
    """Measure all rounds of every size and schedule; rank 0 writes them to `folder`."""
    import torch
    import torch.distributed as dist

    from toolkit.parallel.layout import ParallelLayout
    from toolkit.train.engine.pipeline.pipeline_model import PipelineRanks

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ranks = PipelineRanks.of(ParallelLayout(pp=RANKS), "cpu")
    rows: list[dict[str, Any]] = []
    for place, size in enumerate(SIZES):
        pipelines = {schedule: Pipeline(size, schedule, ranks, folder / str(place)) for schedule in SCHEDULES}
        for number in range(-WARM_UP, rounds):
            order = random.Random(number).sample(SCHEDULES, len(SCHEDULES))
            found = [measured_row(size, schedule, pipelines[schedule]) for schedule in order]
            rows += [row | {"round": number} for row in found if number >= 0]
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured_row(size: Size, schedule: str, pipeline: Pipeline) -> dict[str, Any]:
    """Return a measured step and both predictions of it. Collective."""
    lone_times = [pipeline.step(1)[1] for _ in range(3)]
    transfer = transfer_seconds(size)
    seconds, inside = pipeline.step(MICRO_BATCHES)
    merged: Operations = defaultdict(list)
    for times in lone_times:
        for key, values in times.items():
            merged[key] += values
    return {
        "model": size.name,
        "schedule": schedule,
        "step_seconds": seconds,
        "transfer_seconds": transfer,
        "from_one_micro_batch": prediction(schedule, pipeline.settings, merged, transfer),
        "from_inside_the_step": prediction(schedule, pipeline.settings, inside, transfer),
    }


def prediction(schedule: str, settings: PipelineSettings, own: Operations, transfer: float) -> dict[str, Any]:
    """Return the simulated step of the medians of all ranks' operations. Collective."""
    import torch.distributed as dist

    of_all: list[Any] = [None] * RANKS
    dist.all_gather_object(of_all, {key: statistics.median(values) for key, values in own.items()})
    medians = {key: value for found in of_all for key, value in found.items()}
    times = [
        ChunkTimes(
            forward_seconds=medians[stage, "forward"], backward_seconds=medians[stage, "backward"], weight_seconds=0.0
        )
        for stage in range(settings.stages)
    ]
    size = PipelineSize(stages=RANKS, micro_batches=MICRO_BATCHES, chunks=settings.chunks)
    run = simulate(schedule, size, times, transfer_seconds=transfer)
    return {
        "step_seconds": run.makespan_seconds,
        "forward_seconds": [chunk.forward_seconds for chunk in times],
        "backward_seconds": [chunk.backward_seconds for chunk in times],
    }


def table_rows(found: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table: geometric means over the rounds, with 95 % intervals."""
    by_setting: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in found["rows"]:
        by_setting[row["model"], row["schedule"]].append(row)
    return [
        _table_row(rows, by_setting[model, ONE_F_ONE_B]) for (model, _), rows in sorted(by_setting.items(), key=_place)
    ]


def _place(item: tuple[tuple[str, str], Any]) -> tuple[int, int]:
    (model, schedule), _ = item
    return [size.name for size in SIZES].index(model), SCHEDULES.index(schedule)


def _table_row(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    first, steps = rows[0], [row["step_seconds"] for row in rows]
    ratios = [
        _mean([row["step_seconds"] / row[name]["step_seconds"] for row in rows])
        for name in ("from_inside_the_step", "from_one_micro_batch")
    ]
    both = list(zip(_by_round(rows), _by_round(baseline), strict=True))
    measured = _mean([own["step_seconds"] / other["step_seconds"] for own, other in both])
    predicted = _mean([_inside(own) / _inside(other) for own, other in both])
    compared = ["1", "1"] if first["schedule"] == ONE_F_ONE_B else [measured, predicted]
    return [first["model"], f"`{first['schedule']}`", f"{1000 * geometric_mean(steps):.1f} ms", *ratios, *compared]


def _inside(row: dict[str, Any]) -> float:
    return float(row["from_inside_the_step"]["step_seconds"])


def _by_round(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["round"])


def _mean(ratios: list[float]) -> str:
    interval = mean_interval(ratios)
    assert interval is not None
    return f"{geometric_mean(ratios):.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


def measure(rounds: int) -> dict[str, Any]:
    """Measure on two ranks, and return every round with the load before and after."""
    import torch
    from torch.multiprocessing import spawn
    from transformers import AutoModelForCausalLM

    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        for place, size in enumerate(SIZES):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(size.config(), dtype=torch.float32).save_pretrained(
                Path(folder, str(place))
            )
        spawn(measure_on_rank, args=(Path(folder), rounds), nprocs=RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text())
    steps = {size.name: spread([row["step_seconds"] for row in rows if row["model"] == size.name]) for size in SIZES}
    load = {"before": before, "after": os.getloadavg()}
    return {"ranks": RANKS, "micro_batches": MICRO_BATCHES, "load_averages": load, "step_seconds": steps, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--table", action="store_true", help="only write the table of the recorded result again")
    options = parser.parse_args()
    path = RESULTS / f"{Path(__file__).stem}.json"
    if not options.table:
        path = write_result(path.stem, measure(options.rounds))
    rows = table_rows(json.loads(path.read_text()))
    write_table(DOCUMENT, TABLE, HEADER, rows)
    print_table(HEADER, rows)


if __name__ == "__main__":
    main()
