"""sbatch files, of runs and of comparisons, and runs inside of a job: what makes them right by construction."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_jobs import check_shell, node_script_of, run_cluster, write_inputs

from toolkit.cluster.allocation import Allocation
from toolkit.cluster.options import limit_seconds
from toolkit.cluster.slurm import COMPARISON_FILE, LEDGER_FILE
from toolkit.compare.ledger import LEDGER_FILE as LEDGER_OF_COMPARISON
from toolkit.compare.options import CompareOptions
from toolkit.compare.specification import SPEC_FILE
from toolkit.errors import ToolkitError
from toolkit.launch.command import LaunchCommand, launch_command
from toolkit.lint import lint_paths
from toolkit.presets import load_preset

Write = Callable[..., str]


@pytest.fixture
def sbatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Write:
    """Return a function that writes the sbatch file of a job of two nodes with four GPUs each."""

    def write(*options: str, preset: str = "zero2", nodes: str = "2", training: tuple[str, ...] = ()) -> str:
        words = ["slurm", "--preset", preset, "--nodes", nodes, "--gpus-per-node", "4", *options]
        code, text, errors = run_cluster([*words, "--", *write_inputs(tmp_path), *training], capsys)
        assert code == 0, errors
        check_shell(text)
        check_shell(node_script_of(text))
        return text

    return write


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)", text, re.MULTILINE)


def outside_the_node_script(text: str) -> str:
    return text.replace(node_script_of(text), "")


def test_each_node_starts_one_torchrun_for_its_gpus(sbatch: Write) -> None:
    text = sbatch()
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=16"} <= set(directives(text))
    script = node_script_of(text)
    assert "export TOOLKIT_PRESET=zero2\n" in script
    assert "export TOOLKIT_WORLD_SIZE=8\n" in script, "ranks refuse a smaller allocation"
    assert "--nnodes 2 --nproc-per-node 4 " in script
    assert "-m toolkit.train " in script
    assert "accelerate" not in text
    assert '--kill-on-bad-exit=1 --wait=60 --output="$logs/$ATTEMPT-%N.log"' in text, (
        "the first that fails ends the job"
    )


def test_the_attempt_and_the_head_are_those_of_the_allocation(sbatch: Write) -> None:
    text = sbatch()
    assert 'export ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"' in text, "another one after a requeue"
    assert '--rdzv-id "$ATTEMPT" ' in node_script_of(text)
    assert 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")' in text
    assert "HEAD_NODE=${nodes[0]}" in text
    assert not re.search("localhost|127.0.0.1", text)


def test_no_variable_of_a_task_is_expanded_on_the_first_node(sbatch: Write) -> None:
    text = sbatch("--preflight")
    assert not re.search(r"SLURM_(PROCID|NODEID|LOCALID)", outside_the_node_script(text))
    assert "<<'END_OF_NODE_SCRIPT'" in text, "a quoted here-document expands nothing"


def measured_run(folder: Path, *saves: dict[str, object], step_seconds: float) -> tuple[str, str]:
    """Write the record of an earlier run, and return the option that names it."""
    folder.mkdir()
    run = {"schema_version": 1, "saves": saves, "measured": {"step_seconds_median": step_seconds}}
    (folder / "run.json").write_text(json.dumps(run))
    return "--saves-of", str(folder)


def test_the_signal_leaves_twice_the_measured_save_and_step(sbatch: Write, tmp_path: Path) -> None:
    saves = [{"kind": "checkpoint", "step": 5, "seconds": 40.0, "bytes": 1}, {"kind": "model", "seconds": 50.0}]
    text = sbatch(*measured_run(tmp_path / "earlier", *saves, step_seconds=3.0))
    # 2 x (50 + 3) + 30 for the ranks, and 30 more for torchrun and srun
    assert "--shutdown-timeout 136" in text
    assert "--signal=TERM@166" in directives(text)


def test_the_signal_leaves_an_asynchronous_save_the_write_of_the_one_before(sbatch: Write, tmp_path: Path) -> None:
    """The second save waited 5 s for the first; its `stall_seconds` say nothing of its own write."""
    first = {"kind": "checkpoint", "seconds": 40.0, "stall_seconds": 3.0, "waited_seconds": 0.0, "write_seconds": 38.0}
    second = {"kind": "checkpoint", "seconds": 39.0, "stall_seconds": 9.0, "waited_seconds": 5.0, "write_seconds": 37.0}
    earlier = measured_run(tmp_path / "earlier", first, second, step_seconds=1.0)
    # 2 x (40 + 38 + 1) + 30: the whole save, after the writing of the one before
    training = ("--async_save", "true")
    assert "--shutdown-timeout 188" in sbatch(*earlier, preset="fsdp2", training=training)
    assert "--shutdown-timeout 112" in sbatch(*earlier, preset="fsdp2"), "2 x (40 + 1) + 30"
    assert "--shutdown-timeout 270" in sbatch("--save-seconds", "60", preset="fsdp2", training=training)


def test_a_save_that_was_not_measured_is_assumed_and_said(sbatch: Write) -> None:
    text = sbatch()
    assert "--signal=TERM@300" in directives(text)
    assert "# A save takes 120 s (assumed; `--saves-of RUN` measures it).\n" in text


def test_an_interrupted_run_is_requeued_and_resumes(sbatch: Write) -> None:
    text = sbatch()
    assert "--requeue" in directives(text)
    assert "--resume_from_checkpoint latest" in node_script_of(text)
    condition = re.search(r"^if \[\[ (.*) \]\]$", text, re.MULTILINE)
    assert condition is not None
    # the run's own word, of this attempt; something to resume from; and a job that nobody cancelled
    parts = {"$status == interrupted", "$failure -nt $started", "-n $saved", "$state == RUNNING"}
    assert set(condition[1].split(" && ")) == parts


@pytest.mark.parametrize(
    ("options", "training"), [(("--no-requeue",), ()), ((), ("--save_strategy", "no"))], ids=["option", "no saves"]
)
def test_a_run_without_checkpoints_is_not_requeued(
    sbatch: Write, options: tuple[str, ...], training: tuple[str, ...]
) -> None:
    text = sbatch(*options, training=training)
    assert "--no-requeue" in directives(text)
    assert "scontrol requeue" not in text


def test_an_elastic_job_outlives_a_node_and_keeps_its_global_batch(sbatch: Write) -> None:
    text = sbatch(nodes="1:2", training=("--gradient_accumulation_steps", "2"))
    assert {"--nodes=1-2", "--no-kill"} <= set(directives(text))
    assert "--no-kill --kill-on-bad-exit=0 " in text
    script = node_script_of(text)
    assert "--nnodes 1:2 " in script
    assert "--max-restarts 3 " in script
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in script
    assert "--global_batch_size 128" in script  # 8 rows x 2 accumulation steps x 8 GPUs
    assert "--gradient_accumulation_steps" not in script
    assert "TOOLKIT_WORLD_SIZE" not in script


@pytest.mark.parametrize(
    ("options", "training", "minutes"),
    [
        (("--save-seconds", "2"), (), 2),  # no less: connecting the ranks is no progress
        (("--save-seconds", "2"), ("--torch_compile", "true"), 10),
        (("--save-seconds", "600"), (), 21),
    ],
)
def test_an_elastic_job_notices_a_lost_node_as_soon_as_its_saves_allow(
    sbatch: Write, options: tuple[str, ...], training: tuple[str, ...], minutes: int
) -> None:
    script = node_script_of(sbatch(*options, nodes="1:2", training=training))
    assert f"export TOOLKIT_HANG_TIMEOUT_MINUTES={minutes}\n" in script
    assert "# TOOLKIT_HANG_TIMEOUT_MINUTES: a node that loses power closes no connection" in script


def test_the_users_own_hang_timeout_stays_and_other_jobs_have_the_default(sbatch: Write) -> None:
    given = node_script_of(sbatch("--env", "TOOLKIT_HANG_TIMEOUT_MINUTES=30", nodes="1:2"))
    assert re.findall("TOOLKIT_HANG_TIMEOUT_MINUTES.*", given) == ["TOOLKIT_HANG_TIMEOUT_MINUTES=30"]
    passed = node_script_of(sbatch("--env", "TOOLKIT_HANG_TIMEOUT_MINUTES", nodes="1:2"))
    assert "export TOOLKIT_HANG_TIMEOUT_MINUTES" not in passed
    assert "TOOLKIT_HANG_TIMEOUT_MINUTES" not in node_script_of(sbatch())


def test_quotes_and_line_breaks_stay_what_they_are(sbatch: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--run_name 'it'\"'\"'s $HOME'" in node_script_of(sbatch(training=("--run_name", "it's $HOME")))
    monkeypatch.setattr("sys.argv", ["toolkit", "cluster", "slurm", "--run_name", "a\nrm -rf x"])
    assert "\nrm -rf" not in sbatch()  # it does not leave the comment that names the command


def test_preflight_runs_on_every_node_before_training_and_checks_what_the_preset_needs(
    sbatch: Write, tmp_path: Path
) -> None:
    text = sbatch("--preflight")
    doctor, compare, train = (text.index(part) for part in ("doctor --json", "doctor --compare", 'bash -c "$node'))
    assert doctor < compare < train
    assert text.count('"${each_node[@]}"') == 3
    found = f"doctor --json --output-dir {tmp_path}/out --num-processes 4 --gpus-per-node 4 --preset"
    assert f"{found} zero2'" in text
    disk = sbatch("--preflight", "--env", "TOOLKIT_NVME_PATH=/nvme", preset="zero3_nvme_offload")
    assert f"{found} zero3_nvme_offload --nvme-path /nvme'" in disk


def test_a_secret_is_passed_by_its_name(sbatch: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    text = sbatch("--env", "HF_TOKEN", "--env", "NCCL_DEBUG=WARN")
    assert "a-secret-value" not in text
    assert ': "${HF_TOKEN:?' in node_script_of(text)
    assert "export NCCL_DEBUG=WARN\n" in node_script_of(text)


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [("pyxis", "--container-image=image.sqsh"), ("apptainer", "apptainer exec --nv --bind")],
)
def test_a_container_runs_the_script_of_the_nodes(sbatch: Write, runtime: str, expected: str) -> None:
    text = sbatch("--container", "image.sqsh", "--container-runtime", runtime)
    assert expected in text
    assert "exec python -m torch.distributed.run" in node_script_of(text)


def test_modules_and_setup_lines_come_before_torchrun(sbatch: Write) -> None:
    text = sbatch("--module", "cuda/12.8", "--setup", "source .venv/bin/activate", "--sbatch-option", "mem=0")
    assert "--mem=0" in directives(text)
    order = [text.index(part) for part in ("module load cuda/12.8", "\nsource .venv/bin/activate", " -m torch.")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12", 216_000), ("1-1:1:1", 90_061)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: int) -> None:
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize("text", ["1h", "1:2:3:4", "-5"])
def test_a_time_limit_that_slurm_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(ToolkitError, match="expected MINUTES, HH:MM:SS or D-HH:MM:SS"):
        limit_seconds(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--time-limit", "5"), "--time-limit 5 is too short: the run is stopped 300 s before its end to save (120 s"),
        (("--submit",), "error: `sbatch` is not on the PATH: the job was not submitted\n  hint: run this on a login"),
    ],
)
def test_a_limit_in_which_the_run_could_only_stop_and_a_missing_sbatch_are_refused(
    option: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["slurm", "--preset", "zero2", "--nodes", "2", *option, "--", *write_inputs(tmp_path)]
    code, text, errors = run_cluster(words, capsys)
    assert (code, text) == (2, "")
    assert message in errors


# -- comparisons

PRESETS = ["--preset", "ddp", "--preset", "zero2"]
TWO = ["slurm", *PRESETS, "--nodes", "1:2", "--gpus-per-node", "4"]


def comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    training = [*write_inputs(tmp_path), "--max_steps", "20"]
    code, text, errors = run_cluster([*TWO, *options, "--", *training], capsys)
    assert code == 0, errors
    check_shell(text)
    return text


def test_each_number_of_nodes_is_a_world_size_of_one_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = comparison(tmp_path, capsys, "--repeats", "5")
    assert "#SBATCH --nodes=2\n" in text
    assert "    --repeats 5 \\\n" in text
    assert "--preset ddp --preset zero2 \\\n    --nproc-per-node 4 --num-processes 4,8 \\\n" in text
    assert f"output_dir={tmp_path}/out\n" in text
    assert "--output_dir" not in text.partition("toolkit compare")[2]
    assert '[[ -e "$output_dir/comparison.json" ]] && resume=(--resume)' in text


def test_the_files_that_it_looks_for_are_those_of_a_comparison() -> None:
    assert (COMPARISON_FILE, LEDGER_FILE) == (SPEC_FILE, LEDGER_OF_COMPARISON)


@pytest.mark.parametrize(
    ("state", "ledger", "requeued"), [("RUNNING", True, True), ("RUNNING", False, False), ("COMPLETING", True, False)]
)
def test_the_signal_requeues_a_running_job_that_has_finished_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, ledger: bool, requeued: bool
) -> None:
    text = comparison(tmp_path, capsys)
    assert re.findall(r"^#SBATCH (--signal.*|--.*requeue)", text, re.MULTILINE) == ["--signal=B:TERM@60", "--requeue"]
    function = re.search(r"^requeue\(\) \{.*?^\}", text, re.MULTILINE | re.DOTALL)
    assert function is not None
    (tmp_path / "1-0.started").touch()
    os.utime(tmp_path / "1-0.started", (0, 0))
    if ledger:
        (tmp_path / "ledger.jsonl").touch()
    commands = f'squeue() {{ echo {state}; }}; scontrol() {{ echo called "$@"; }}; SLURM_JOB_ID=1 ATTEMPT=1-0'
    folders = f"output_dir={tmp_path}; logs={tmp_path}"
    script = f"{commands}; {folders}\n{function[0]}\nrequeue"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert ("called requeue 1" in ended.stdout) is requeued


def test_the_file_has_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.sbatch").write_text(comparison(tmp_path, capsys, "--preflight"))
    assert lint_paths([tmp_path / "job.sbatch"]).findings == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["slurm", *PRESETS, "--nodes", "2", "--container", "i"], "a comparison starts srun itself"),
        (["slurm", "--preset", "ddp", "--preset", "single", "--nodes", "2"], "preset 'single' trains in one process"),
        (["slurm", "--preset", "ddp", "--preset", "zero3_nvme_offload", "--nodes", "2"], "checks on one node only"),
        (["ssh", *PRESETS, "--nodes", "1", "--host", "a"], "several presets (ddp, zero2) are a comparison"),
        (["slurm", "--nodes", "2"], "missing option '--preset'"),
        ([*TWO, "--save_strategy=no"], "--save_strategy is set by the comparison itself"),
    ],
)
def test_what_is_no_comparison_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    training = [*write_inputs(tmp_path), "--max_steps", "20", *(word for word in options if word.startswith("--save_"))]
    words = [word for word in options if not word.startswith("--save_")]
    code, text, errors = run_cluster([*words, "--gpus-per-node", "4", "--", *training], capsys)
    assert (code, text) == (2, "")
    assert message in errors


# -- inside of a job

needs_scontrol = pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol: apt install slurm-client")
TWO_NODES = Allocation(nodes=("node1", "node2"), processes_per_node=4)


def zero2(num_processes: int) -> LaunchCommand:
    argv = ["--dataset", "rows of mine.jsonl", "--token", "secret"]
    return launch_command(load_preset("zero2"), num_processes=num_processes, training_argv=argv, cpu=True)


@needs_scontrol
def test_the_nodes_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3],gpu7")
    allocation = Allocation.current(processes_per_node=8)
    assert allocation.nodes == ("node1", "node2", "node3", "gpu7")
    assert allocation.max_processes == 32


def test_ranks_that_do_not_fit_the_nodes_and_a_process_outside_of_a_job_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [len(TWO_NODES.nodes_of(size)) for size in (1, 4, 8)] == [1, 1, 2]
    for size, message in ((6, "does not fill nodes of 4 ranks"), (12, "has 2 nodes with 4 each")):
        with pytest.raises(ToolkitError, match=message):
            TWO_NODES.check(size)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ToolkitError, match="runs in no SLURM job"):
        Allocation.current(processes_per_node=8)


def test_each_node_starts_one_torchrun_with_the_run_id_as_its_rendezvous() -> None:
    plain = zero2(8)
    spread = TWO_NODES.spread(plain)
    assert {"srun", "--nodes=2", "--ntasks=2", "--nodelist=node1,node2", "--kill-on-bad-exit=1"} <= set(spread.argv)
    check_shell(spread.argv[-1])
    assert f'--nnodes 2 --nproc-per-node 4 --rdzv-id "{plain.run_id}"' in spread.argv[-1]
    assert re.search(r"--head node1 --port (2[0-9]{4}) --peer node2.* --rdzv-endpoint .node1:\1.", spread.argv[-1])
    assert "'rows of mine.jsonl'" in spread.argv[-1]


def test_a_run_on_one_node_of_the_job_names_that_node_and_no_secret() -> None:
    spread = TWO_NODES.spread(zero2(2))
    assert "--nodelist=node1" in spread.argv
    assert "--nnodes 1 --nproc-per-node 2 " in spread.argv[-1]
    assert not any("secret" in word for word in spread.argv)
    assert any("secret" in value for value in spread.environment.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "--nproc-per-node needs --num-processes"), ({"warm_start": True}, "--warm-start forks ranks on this node")],
)
def test_a_comparison_over_nodes_needs_a_number_of_processes_and_no_fork_server(
    options: dict[str, bool], message: str
) -> None:
    with pytest.raises(ToolkitError, match=message):
        CompareOptions(preset=("ddp",), output_dir=Path("out"), nproc_per_node=4, **options)  # type: ignore[arg-type]
