"""Job files without SLURM: Kubernetes objects and SkyPilot tasks, as their own models and schemas read them, and ssh.

The models of Kubeflow Trainer's API and of JobSet ignore a key that they do not know: an object must come back from a
round trip as it was. The schemas of skypilot 0.14.1 are recorded in tests/fixtures/skypilot-schemas.json: the package
pins click below 8.2, and brings a web server and two databases' clients.

Of the script for nodes without a scheduler, two launchers on this host stand for two nodes.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cluster_jobs import check_shell, run_cluster, write_inputs
from launching import ROOT, read

MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
Written = Callable[..., Any]


def words(engine: str, folder: Path, *options: str) -> list[str]:
    training = [*write_inputs(folder)[:-1], "/runs/first"]
    return [engine, "--preset", "zero2", "--nodes", "2", "--gpus-per-node", "4", *options, "--", *training]


@pytest.mark.parametrize(
    ("engine", "options", "code"),
    [
        ("kubernetes", ["--container", "my/image:1", "--mount", "runs=/runs"], 2),
        ("kubernetes", ["--container", "my/image:1", "--mount", "runs=/runs", "--no-check-files"], 0),
        ("kubernetes", ["--container", "my/image:1", "--mount", "runs=/runs", "--mount", "inputs={folder}"], 0),
        ("skypilot", ["--gpu", "H100", "--mount", "s3://runs=/runs"], 2),
        ("skypilot", ["--gpu", "H100", "--mount", "s3://runs=/runs", "--workdir", "."], 2),  # the paths are absolute
        ("skypilot", ["--gpu", "H100", "--mount", "s3://runs=/runs", "--mount", "s3://in={folder}"], 0),
    ],
)
def test_a_model_that_the_nodes_will_not_see_is_refused(
    engine: str, options: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_cluster(words(engine, tmp_path, *(option.format(folder=tmp_path) for option in options)), capsys)
    assert found[0] == code, found[2]
    seen = f"error: --model_name_or_path {tmp_path}/model is on this node, where the nodes of the job will not see it"
    assert (seen in found[2]) == (code == 2)


def test_skypilot_copies_relative_paths_in_the_workdir(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = words("skypilot", tmp_path, "--gpu", "H100", "--mount", "s3://runs=/runs", "--python", "/my env/python")
    relative = [word.removeprefix(f"{tmp_path}/") for word in given]
    at = relative.index("--")
    assert run_cluster(relative, capsys)[0] == 2
    code, text, errors = run_cluster([*relative[:at], "--workdir", ".", *relative[at:]], capsys)
    assert code == 0, errors
    assert "exec '/my env/python' -m" in yaml.safe_load(text)["run"]


@pytest.fixture
def manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Written:
    """Return a function that writes the objects of a job of two pods, which the API's models know."""
    from kubeflow_trainer_api import models  # takes a second

    def write(*options: str) -> list[dict[str, Any]]:
        given = ["--container", "my/image:1", "--mount", "runs=/runs", "--no-check-files", *options]
        code, text, errors = run_cluster(words("kubernetes", tmp_path, *given), capsys)
        assert code == 0, errors
        documents = list(yaml.safe_load_all(text))
        assert [getattr(models, MODELS[each["kind"]]).from_dict(each).to_dict() for each in documents] == documents
        return documents

    return write


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"].get("template", document)["spec"]
    return dict(spec["replicatedJobs"][0]["template"]["spec"])


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    return dict(job_of(document)["template"]["spec"])


def test_a_job_set_starts_one_pod_per_node_and_all_of_them_again(manifest: Written) -> None:
    (document,) = manifest()
    job, container = job_of(document), pod_of(document)["containers"][0]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert (job["backoffLimit"], document["spec"]["failurePolicy"]) == (0, {"maxRestarts": 3})
    script = container["command"][2]
    check_shell(script)
    assert '--rdzv-endpoint "zero2-node-0-0.zero2:29500"' in script
    assert document["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    restart = container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]
    assert restart == "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    assert 'export ATTEMPT="zero2-$RESTART_ATTEMPT"' in script


def test_a_pod_has_time_to_save_shared_memory_the_claim_and_resources(manifest: Written) -> None:
    pod = pod_of(manifest("--save-seconds", "100", "--resource", "rdma/ib=8")[0])
    assert pod["terminationGracePeriodSeconds"] == 260  # twice the save, and 30 s each for ranks and torchrun
    assert "--shutdown-timeout 230" in pod["containers"][0]["command"][2]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volumes["mount-0"]["persistentVolumeClaim"] == {"claimName": "runs"}
    mounted = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounted == {"/dev/shm": "shm", "/runs": "mount-0"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4", "rdma/ib": "8"}


def test_preflight_compares_the_nodes_and_a_secret_comes_from_a_secret(
    manifest: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    (document,) = manifest("--env", "HF_TOKEN", "--preflight")
    script = pod_of(document)["containers"][0]["command"][2]
    check_shell(script)
    assert script.index("doctor --json") < script.index("doctor --compare") < script.index("torch.distributed.run")
    key = {"name": "zero2-env", "key": "HF_TOKEN"}
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}} in pod_of(document)["containers"][0]["env"]
    assert "a-secret-value" not in json.dumps(document)


def test_an_elastic_job_set_replaces_a_lost_pod_and_ends_with_the_head(manifest: Written) -> None:
    job = job_of(manifest("--nodes", "1:2")[0])
    assert job["backoffLimit"] == 3
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    script = job["template"]["spec"]["containers"][0]["command"][2]
    assert "--nnodes 1:2 " in script
    assert "--peer" not in script, "the other pod may never come"


def test_a_train_job_runs_the_same_script_in_a_runtime_with_the_same_pods(manifest: Written) -> None:
    runtime, job = manifest("--kind", "trainjob")
    (job_set,) = manifest()
    container = pod_of(job_set)["containers"][0]
    assert job["spec"]["trainer"]["command"] == container["command"]
    assert job["spec"]["trainer"]["resourcesPerNode"] == container["resources"]
    assert (job["spec"]["trainer"]["numNodes"], job["spec"]["trainer"]["numProcPerNode"]) == (2, 4)
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "zero2"}
    assert pod_of(runtime)["volumes"] == pod_of(job_set)["volumes"]
    labels = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


# -- SkyPilot

SCHEMAS = json.loads((Path(__file__).parents[1] / "fixtures" / "skypilot-schemas.json").read_text())


@pytest.fixture
def task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Written:
    def write(*options: str) -> dict[str, Any]:
        given = ["--gpu", "H100", "--mount", "s3://bucket=/runs", "--no-check-files", *options]
        code, text, errors = run_cluster(words("skypilot", tmp_path, *given), capsys)
        assert code == 0, errors
        found: dict[str, Any] = yaml.safe_load(text)
        jsonschema.validate(found, SCHEMAS["task"])
        jsonschema.validate(found["resources"], SCHEMAS["resources"])
        for mount in found["file_mounts"].values():
            jsonschema.validate(mount, SCHEMAS["storage"])
        check_shell(found["run"])
        return found

    return write


def test_every_node_runs_torchrun_with_the_head_that_skypilot_lists_first(task: Written) -> None:
    found = task()
    assert (found["num_nodes"], found["resources"]["accelerators"]) == (2, {"H100": 4})
    assert 'HEAD_NODE=$(sed -n 1p <<< "$SKYPILOT_NODE_IPS")' in found["run"]
    assert "--nnodes 2 --nproc-per-node 4 " in found["run"]
    assert '--rdzv-endpoint "$HEAD_NODE:29500"' in found["run"]
    assert 'ATTEMPT="$SKYPILOT_TASK_ID-${SKYPILOT_INTERNAL_JOB_ID:-0}-$HEAD_NODE"' in found["run"]
    assert '--rdzv-id "$ATTEMPT"' in found["run"]
    found = task("--spot", "--job-restarts", "2")  # a recovered job finds its checkpoints in the mounted bucket
    assert found["file_mounts"] == {"/runs": {"source": "s3://bucket", "mode": "MOUNT"}}
    assert found["resources"]["use_spot"] is True
    assert found["resources"]["job_recovery"] == {"max_restarts_on_errors": 2}
    assert "--resume_from_checkpoint latest" in found["run"]


def test_skypilots_own_keys_are_used_and_secrets_have_no_value(task: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    options = ["--container", "my/image:1", "--workdir", ".", "--install", "pip install .", "--infra", "aws"]
    found = task(*options, "--env", "HF_TOKEN")
    assert found["resources"]["image_id"] == "docker:my/image:1"
    assert (found["workdir"], found["setup"], found["resources"]["infra"]) == (".", "pip install .\n", "aws")
    assert found["secrets"] == {"HF_TOKEN": None}
    assert "a-secret-value" not in json.dumps(found)


HOSTS = ["--host", "127.0.0.1", "--host", "127.0.0.2"]


def test_one_line_starts_the_script_on_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--gpus-per-node", "4", "--host", "node1", "--host", "me@node2"]
    words = ["ssh", "--preset", "zero2", *options, "--output", str(tmp_path / "job.sh"), "--", *write_inputs(tmp_path)]
    code, _, messages = run_cluster(words, capsys)
    assert code == 0, messages
    text = (tmp_path / "job.sh").read_text()
    check_shell(text)
    line = messages.rpartition("start it on all nodes: ")[2].strip()
    check_shell(line)
    assert line.startswith("attempt=$(date +%s); for host in node1 me@node2; do ssh -n $host ")
    assert f"#   {line}\n" in text
    assert '--rdzv-endpoint "node1:29500"' in text
    assert '--peer "node2"' in text


@pytest.mark.launch
@pytest.mark.nightly
@pytest.mark.cold_start
def test_two_nodes_train_one_run(tmp_path: Path, tiny_job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    training = [*tiny_job, "--max_steps", "2", "--per_device_train_batch_size", "1", "--save_strategy", "no"]
    training += ["--output_dir", str(tmp_path / "out")]
    options = ["--nodes", "2", "--gpus-per-node", "1", "--cpu", *HOSTS, "--output", str(tmp_path / "job.sh")]
    options += ["--setup", f"cd {ROOT}"]
    code, _, errors = run_cluster(["ssh", "--preset", "ddp", *options, "--", *training], capsys)
    assert code == 0, errors
    command, names = ["bash", str(tmp_path / "job.sh"), "7"], ("one", "two")
    nodes = [subprocess.Popen(command, env=os.environ | {"HOSTNAME": name}) for name in names]
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    run = read(tmp_path / "out" / "run.json")
    assert (run["status"], run["preset"], run["world_size"]) == ("completed", "ddp", 2)
    assert sorted(path.name for path in (tmp_path / "out" / "logs").iterdir()) == ["7-one.log", "7-two.log"]
    assert "NCCL_SOCKET_IFNAME=unset" in (tmp_path / "out" / "logs" / "7-two.log").read_text()
