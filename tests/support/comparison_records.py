"""Comparisons, and ledger records of trials that no process ran, for the tests of `toolkit compare`."""

from pathlib import Path
from typing import Any

from toolkit.compare.build_results import aggregate_trials
from toolkit.compare.ledger import LedgerRecord
from toolkit.compare.options import CompareOptions
from toolkit.compare.results import Environment
from toolkit.compare.rows import Failure, Row, RowKey, Trial
from toolkit.compare.runner import Runner, check_comparison
from toolkit.compare.specification import ComparisonSpec, ExpectedStrategy, make_specification
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import PlanRequest, make_plans
from toolkit.presets import load_preset

SECONDS = {0: 0.50, 1: 0.505, 2: 0.495}
"""Of a timed step, by repeat: trials vary by one percent."""


DDP = ExpectedStrategy(engine="ddp", sharding="replicate", quantises=False)
FSDP2_TP = ExpectedStrategy(
    engine="fsdp2", sharding="full_shard", quantises=False, parallel=("dp_shard", "tp"), sharded_at_load=True
)


def comparison(*presets: str, **changes: Any) -> ComparisonSpec:
    """A comparison with `ddp` as the baseline, two processes and three repeats, on a CPU; all presets expect DDP."""
    known = {
        **{"presets": presets, "preset_files": {name: {} for name in presets}, "expected": dict.fromkeys(presets, DDP)},
        **{"preset_sources": {name: name for name in presets}, "extra_arguments": {}, "training_arguments": ()},
        **{"world_sizes": (2,), "untimed_steps": 2, "reference": "ddp", "cpu": True, "repeats": 3},
    }
    return ComparisonSpec.model_validate(known | changes)


def comparison_runner(spec: ComparisonSpec, folder: Path, **options: Any) -> Runner:
    given = CompareOptions(output_dir=folder, num_processes=("2",), cpu=True, **options)
    return Runner(options=given, spec=spec)


def checked_comparison(options: CompareOptions) -> Runner:
    return check_comparison(Runner(options=options, spec=make_specification(options)))


def comparison_on_gpus(model: Path, **changes: Any) -> ComparisonSpec:
    """A comparison of `zero2` alone on two GPUs: 30 steps, sequences of 512 tokens, two repeats."""
    words = ("--model_name_or_path", str(model), "--max_steps", "30", "--max_seq_length", "512")
    gpus = {"training_arguments": words, "repeats": 2, "cpu": False, "reference": "zero2"}
    return comparison("zero2", **gpus | changes)


def planned_step_seconds(model: Path) -> tuple[float, float]:
    """Low and high step time of that comparison on two H100s, as `toolkit plan` predicts it."""
    request = PlanRequest(
        shape=read_model(str(model)),
        presets=[load_preset("zero2")],
        world_sizes=[2],
        job=PlannedJob(per_device_train_batch_size=8, max_seq_length=512),
        gpu=find_gpu("h100-sxm"),
    )
    (plan,) = make_plans(request)
    assert plan.speed is not None
    return plan.speed.step_seconds


def trial(
    preset: str,
    repeat: int,
    *,
    world_size: int = 2,
    slower: float = 1.0,
    problem: dict[str, Any] | None = None,
    **changes: Any,
) -> LedgerRecord:
    """A completed trial of eight steps, the first two untimed; `slower` multiplies its step times."""
    facts = {
        **{"ranks": world_size, "world_size": world_size, "engine": "ddp", "sharding": "replicate", "packing": None},
        **dict.fromkeys(("compute_dtype", "master_dtype", "expected_masters", "optimizer_dtype"), "float32"),
        **{"frozen_dtype": None, "gradient_clipping": 1.0, "activation_checkpointing": False, "learning_rate": 1e-3},
        **{"num_trainable_params": 10, "initial_weights_sha256": "a" * 64, "global_batch_size": 2 * world_size},
        **{"seed": 42, "max_steps": 8},
    }
    seconds = SECONDS[repeat] * slower
    known = {
        **{"trial": Trial(row=RowKey(preset=preset, world_size=world_size), repeat=repeat).id, "preset": preset},
        **{"world_size": world_size, "repeat": repeat, "position": 0, "status": "completed"},
        **{"problem": facts | (problem or {}), "step_seconds": [9.0, 0.7, *[seconds] * 6]},
        **{"step_tokens": [100 * world_size] * 8, "step_non_padding_tokens": [90 * world_size] * 8},
        **{"step_supervised_tokens": [45 * world_size] * 8, "timed_step_numbers": [3, 4, 5, 6, 7, 8]},
        "batch_sha256": [[f"{step}{rank}" for rank in range(world_size)] for step in range(8)],
        **{"losses": [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3], "grad_norms": [3.0] * 8},
        **{"tokens_per_second": 100 * world_size / seconds, "tokens_per_cpu_second": 10.0, "rank_skew": 1.0},
        **{"supervised_tokens_per_second": 10.0, "wall_seconds": 10.0, "timed_seconds": 6 * seconds, "timed_steps": 6},
        **{"run_folder": f"trials/{preset}-n{world_size}-r{repeat}", "command": "", "peak_host_bytes": 1000 + repeat},
        "peak_rank": repeat % 2,
    }
    return LedgerRecord.model_validate(known | changes)


def probe(preset: str, size: int, *, world_size: int = 2, **changes: Any) -> LedgerRecord:
    """A completed run of one micro-batch, as the search for the largest one records it."""
    record = trial(preset, 0, world_size=world_size)
    name = f"{record.key.name}-b{size}"
    known = {"trial": name, "kind": "probe", "per_device_train_batch_size": size}
    return LedgerRecord.model_validate(dict(record) | known | changes)


def failure(status: str, **changes: Any) -> dict[str, Any]:
    return dict.fromkeys(Failure.model_fields) | {"kind": status, **changes}


def row(preset: str = "ddp", *, world_size: int = 2, **changes: Any) -> Row:
    name = RowKey(preset=preset, world_size=world_size).name
    known = {"preset": preset, "world_size": world_size, "status": "completed", "timed_steps": 6, "repeats": 3}
    return Row.model_validate({"trial": name} | known | changes)


def node(device: str, *gpus: dict[str, Any]) -> Environment:
    return Environment.model_validate({"device": device, "gpus": gpus, "versions": {}, "python": "3.11"})


def aggregate_rows(
    spec: ComparisonSpec, *trials: LedgerRecord, unsupported: dict[str, str] | None = None
) -> dict[str, Row]:
    rows, _ = aggregate_trials({record.trial: record for record in trials}, spec, unsupported or {})
    return {row.trial: row for row in rows}


def row_beside_ddp(*, repeats: int = 3, spec: ComparisonSpec | None = None, **changes: Any) -> Row:
    """The row of `other`, whose trials have `changes`, compared with unchanged trials of `ddp`."""
    baseline = [trial("ddp", repeat) for repeat in range(repeats)]
    others = [trial("other", repeat, **changes) for repeat in range(repeats)]
    spec = spec or comparison("ddp", "other", repeats=repeats)
    return aggregate_rows(spec, *baseline, *others)["other-n2"]
