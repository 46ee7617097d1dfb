"""SkyPilot tasks, validated against SkyPilot's own schemas.

The schemas of skypilot 0.14.1 are recorded in tests/fixtures/skypilot-schemas.json: the package pins click below 8.2,
and brings a web server and two databases' clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cluster_jobs import check_shell, run_cluster, write_inputs

SCHEMAS = json.loads((Path(__file__).parents[1] / "fixtures" / "skypilot-schemas.json").read_text())
Task = Callable[..., dict[str, Any]]


def words(folder: Path, *options: str, output_dir: str = "/runs/first") -> list[str]:
    training = [*write_inputs(folder)[:-1], output_dir]
    return ["skypilot", "--preset", "zero2", "--nodes", "2", "--gpus-per-node", "4", *options, "--", *training]


@pytest.fixture
def task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Task:
    """Return a function that writes a task of two nodes, which SkyPilot's schemas accept."""

    def write(*options: str) -> dict[str, Any]:
        given = ["--gpu", "H100", "--mount", "s3://bucket=/runs", *options]
        code, text, errors = run_cluster(words(tmp_path, *given), capsys)
        assert code == 0, errors
        found: dict[str, Any] = yaml.safe_load(text)
        jsonschema.validate(found, SCHEMAS["task"])
        jsonschema.validate(found["resources"], SCHEMAS["resources"])
        for mount in found["file_mounts"].values():
            jsonschema.validate(mount, SCHEMAS["storage"])
        check_shell(found["run"])
        return found

    return write


def test_the_schemas_refuse_a_key_that_skypilot_does_not_have(task: Task) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task() | {"nodes": 2}, SCHEMAS["task"])


def test_every_node_runs_torchrun_with_the_head_that_skypilot_lists_first(task: Task) -> None:
    found = task()
    assert (found["num_nodes"], found["resources"]["accelerators"]) == (2, {"H100": 4})
    assert 'HEAD_NODE=$(sed -n 1p <<< "$SKYPILOT_NODE_IPS")' in found["run"]
    assert "--nnodes 2 --nproc-per-node 4 " in found["run"]
    assert '--rdzv-endpoint "$HEAD_NODE:29500"' in found["run"]
    assert 'ATTEMPT="$SKYPILOT_TASK_ID-${SKYPILOT_INTERNAL_JOB_ID:-0}-$HEAD_NODE"' in found["run"]
    assert '--rdzv-id "$ATTEMPT"' in found["run"]


def test_a_recovered_job_finds_its_checkpoints_in_the_mounted_bucket(task: Task) -> None:
    found = task("--spot", "--job-restarts", "2")
    assert found["file_mounts"] == {"/runs": {"source": "s3://bucket", "mode": "MOUNT"}}
    assert found["resources"]["use_spot"] is True
    assert found["resources"]["job_recovery"] == {"max_restarts_on_errors": 2}
    assert "--resume_from_checkpoint latest" in found["run"]


def test_a_secret_has_a_name_and_no_value(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    found = task("--env", "HF_TOKEN")
    assert found["secrets"] == {"HF_TOKEN": None}
    assert "a-secret-value" not in json.dumps(found)


def test_image_folder_and_install_lines_are_skypilots_own_keys(task: Task) -> None:
    found = task("--container", "my/image:1", "--workdir", ".", "--install", "pip install .", "--infra", "aws")
    assert found["resources"]["image_id"] == "docker:my/image:1"
    assert (found["workdir"], found["setup"], found["resources"]["infra"]) == (".", "pip install .\n", "aws")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mount", "s3://b=/runs"), "--gpu is missing: SkyPilot chooses the instance by its GPU"),
        (("--gpu", "H100"), "--output_dir /runs/first is in no folder that all nodes mount (none)"),
        (("--gpu", "H100", "--mount", "s3://b"), "--mount is 's3://b', expected SOURCE=/PATH"),
        (("--gpu", "H100", "--nodes", "1:2"), "--nodes 1:2 on SkyPilot: a task has a fixed number of nodes"),
    ],
)
def test_what_is_no_task_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    code, text, errors = run_cluster(words(tmp_path, *options), capsys)
    assert (code, text) == (2, "")
    assert f"error: {message}" in errors
