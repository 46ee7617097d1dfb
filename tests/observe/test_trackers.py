"""What a run's trackers show of it: real W&B, TensorBoard, MLflow and Trackio, without a network."""

import importlib.util
import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from launching import SCRIPTS, cpu_environment, nightly, nightly_launch, read, run_captured, run_warm

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
        (config,) = database.execute("select config from configs").fetchone()
    return config.decode() if isinstance(config, bytes) else str(config)  # trackio 0.43 stores bytes


def offline(folder: Path) -> dict[str, str]:
    """Return the variables with which each tracker writes to a folder alone."""
    uri = f"sqlite:///{folder}/mlflow.db"
    return {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": uri, "TRACKIO_DIR": str(folder / "trackio")}


TOLD = {"tensorboard": told_tensorboard, "wandb": told_wandb, "mlflow": told_mlflow, "trackio": told_trackio}


@pytest.mark.launch
@pytest.mark.parametrize("tracker", ["tensorboard", *nightly("wandb", "mlflow", "trackio")])
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


class TrainJobStatus(HTTPServer):
    """What Kubeflow Trainer's controller is to a pod: it takes the status of the job."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _TakesStatus)
        self.taken: list[dict[str, Any]] = []


class _TakesStatus(BaseHTTPRequestHandler):
    server: TrainJobStatus

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer of-the-pod"
        self.server.taken.append(body["trainerStatus"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def train_job() -> Iterator[TrainJobStatus]:
    with TrainJobStatus() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@nightly_launch
def test_the_status_of_a_train_job_shows_progress_and_what_was_verified(
    train_job: TrainJobStatus, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of-the-pod")
    of_the_pod = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{train_job.server_port}",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    words = ["--output-dir", str(tmp_path / "run"), str(SCRIPTS / "somebodys.py"), "tracked", str(tmp_path / "out")]
    command = [sys.executable, "-m", "toolkit.observe", *words, "none"]  # no tracker is named
    ended = run_captured(command, cpu_environment() | {"OMP_NUM_THREADS": "1"} | of_the_pod, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [train_job.taken[0]["progressPercentage"], train_job.taken[-1]["progressPercentage"]] == [0, 100]
    told = {metric["name"]: metric["value"] for metric in train_job.taken[-1]["metrics"]}
    assert told["toolkit/verification"] == "no_preset"
    assert told["toolkit/verification_sha256"] == read(tmp_path / "run" / "attestation.json")["sha256"]
    assert all(0 < len(text) <= 64 for pair in told.items() for text in pair)  # the CRD refuses longer ones
