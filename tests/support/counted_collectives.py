"""The payload of each collective that a run counted (tests/scripts/count_collectives.py), and the planned one."""

import json
from collections import Counter
from pathlib import Path

import pytest

from toolkit.plan.communication import step_collectives
from toolkit.plan.training_setup import TrainingSetup

NOISE_BYTES = 1024  # losses, norms, flags and the recorded order of modules: no plan counts them


def counted(folder: Path, rank: int = 0) -> dict[str, int]:
    """Payload by collective of the last step; the first one of ZeRO-3 records, and sends more."""
    rows = [json.loads(line) for line in (folder / "collectives" / f"rank{rank}.jsonl").read_text().splitlines()]
    return {name: row["bytes"] for name, row in rows[-1].items() if name != "step" and row["bytes"] > NOISE_BYTES}


def planned(setup: TrainingSetup) -> dict[str, int]:
    """Payload by collective, those among fewer than all ranks apart, as the run counts them."""
    payloads: Counter[str] = Counter()
    for collective in step_collectives(setup):
        among = "" if collective.group_size == setup.world_size else f" of {collective.group_size}"
        payloads[collective.name + among] += collective.payload_bytes
    return dict(payloads)


def assert_planned(setup: TrainingSetup, folder: Path) -> None:
    seen, plan = counted(folder), planned(setup)
    assert plan.keys() == seen.keys()
    assert plan == {name: pytest.approx(payload, rel=0.01) for name, payload in seen.items()}
