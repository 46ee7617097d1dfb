"""What a run's trackers show of it: real W&B, TensorBoard, MLflow and Trackio, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import SCRIPTS, cpu_environment, read, run_captured, run_warm

PACKAGES = {"wandb": ["wandb"], "mlflow": ["mlflow-skinny", "sqlalchemy", "alembic"], "trackio": ["trackio"]}


@pytest.fixture(scope="session")
def tracker_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what puts a tracker on the path: nothing where it is installed, or a folder that pip fills."""

    def folder_of(tracker: str) -> str:
        if importlib.util.find_spec(tracker) is not None:
            return ""
        folder = tmp_path_factory.mktemp("packages") / tracker
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *PACKAGES[tracker]]
        installed = run_captured(install, dict(os.environ))
        assert installed.returncode == 0, installed.stderr
        return str(folder)

    return folder_of


def told_tensorboard(folder: Path) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    shown = EventAccumulator(str(events)).Reload()
    return " ".join(each.tensor_proto.string_val[0].decode() for each in shown.Tensors("toolkit/text_summary"))


def told_wandb(folder: Path) -> str:
    (file,) = folder.rglob("run-*.wandb")
    return file.read_bytes().decode(errors="replace")


def told_mlflow(folder: Path) -> str:
    with sqlite3.connect(folder / "mlflow.db") as database:
        return json.dumps(database.execute("select key, value from tags").fetchall())


def told_trackio(folder: Path) -> str:
    (file,) = (file for file in folder.rglob("*.db"))
    with sqlite3.connect(file) as database:
        return json.dumps(database.execute("select * from configs").fetchall())


def offline(folder: Path) -> dict[str, str]:
    """Return the variables with which each tracker writes to a folder alone."""
    uri = f"sqlite:///{folder}/mlflow.db"
    return {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": uri, "TRACKIO_DIR": str(folder / "trackio")}


TOLD = {"tensorboard": told_tensorboard, "wandb": told_wandb, "mlflow": told_mlflow, "trackio": told_trackio}


@pytest.mark.launch
@pytest.mark.parametrize(
    "tracker", ["tensorboard", *(pytest.param(name, marks=pytest.mark.nightly) for name in list(TOLD)[1:])]
)
def test_a_tracker_shows_what_was_verified_beside_the_trainers_own_values(
    tracker: str, tmp_path: Path, tracker_folder: Any
) -> None:
    packages = tracker_folder(tracker)
    environment = cpu_environment() | {"OMP_NUM_THREADS": "1"}
    words = ["--output-dir", str(tmp_path / "run"), str(SCRIPTS / "somebodys.py"), "tracked", str(tmp_path / "out")]
    command = [sys.executable, "-m", "toolkit.observe", *words, tracker]
    if tracker == "tensorboard":
        ended = run_warm(command, environment, cwd=tmp_path)
    else:
        path = os.pathsep.join(filter(None, [environment["PYTHONPATH"], packages]))
        ended = run_captured(command, environment | offline(tmp_path) | {"PYTHONPATH": path}, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "was not told" not in ended.stdout
    told = TOLD[tracker](tmp_path)
    attestation = read(tmp_path / "run" / "attestation.json")
    for value in ("toolkit/preset", "toolkit/verification", "no_preset", attestation["sha256"]):
        assert value in told
    assert "toolkit/peak_host_bytes_of_rank_0" in told
