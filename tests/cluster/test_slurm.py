"""sbatch files, of runs and of comparisons, and runs inside of a job: what makes them right by construction."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_jobs import check_shell, node_script_of, run_cluster, write_inputs

from toolkit.cluster.allocation import Allocation
from toolkit.cluster.job_files import COMPARISON_FILE, LEDGER_FILE
from toolkit.cluster.options import limit_seconds
from toolkit.compare.ledger import LEDGER_FILE as LEDGER_OF_COMPARISON
from toolkit.compare.options import CompareOptions
from toolkit.compare.specification import SPEC_FILE
from toolkit.errors import ToolkitError
from toolkit.launch.command import LaunchCommand, command_of
from toolkit.launch.options import TrainOptions
from toolkit.lint.check import lint_paths
from toolkit.presets import load_preset

Capsys = pytest.CaptureFixture[str]

Write = Callable[..., str]


@pytest.fixture
def sbatch(tmp_path: Path, capsys: Capsys) -> Write:
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


@dataclass(frozen=True)
class Case:
    """Options of a job, and what its file then has."""

    options: tuple[str, ...] = ()
    preset: str = "zero2"
    nodes: str = "2"
    training: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # in this order in the file
    absent: str = "a-secret-value"  # a pattern that nothing in the file matches


FOUND = "doctor --json --output-dir {out} --num-processes 4 --gpus-per-node 4 --preset"
CASES = {
    "each node starts one torchrun for its GPUs": Case(
        directives=("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=16"),
        parts=("export TOOLKIT_PRESET=zero2\n", "export TOOLKIT_WORLD_SIZE=8\n",  # ranks refuse a smaller allocation
               "--nnodes 2 --nproc-per-node 4 ", "-m toolkit.train ",
               '--kill-on-bad-exit=1 --wait=60 --output="$logs/$ATTEMPT-%N.log"'),  # the first that fails ends the job
        absent="accelerate|TOOLKIT_HANG_TIMEOUT_MINUTES"),
    "the attempt and the head are those of the allocation": Case(
        parts=('export ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',  # another one after a requeue
               'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")', "HEAD_NODE=${nodes[0]}",
               "<<'END_OF_NODE_SCRIPT'", '--rdzv-id "$ATTEMPT" '),  # a quoted here-document expands nothing
        absent="localhost|127.0.0.1|SLURM_(PROCID|NODEID|LOCALID)"),
    "a save that was not measured is assumed": Case(
        directives=("--signal=TERM@300",), parts=("# A save takes 120 s (assumed; `--saves-of RUN` measures it).\n",)),
    "not requeued by choice": Case(("--no-requeue",), directives=("--no-requeue",), absent="scontrol requeue"),
    "not requeued without checkpoints": Case(
        training=("--save_strategy", "no"), directives=("--no-requeue",), absent="scontrol requeue"),
    "an elastic job outlives a node and keeps its global batch": Case(
        nodes="1:2", training=("--gradient_accumulation_steps", "2"), directives=("--nodes=1-2", "--no-kill"),
        parts=("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n", "--nnodes 1:2 ", "--max-restarts 3 ",
               "--global_batch_size 128",  # 8 rows x 2 accumulation steps x 8 GPUs
               "--no-kill --kill-on-bad-exit=0 "),
        absent="--gradient_accumulation_steps|TOOLKIT_WORLD_SIZE|#SBATCH --ntasks"),
    "no less than 2 minutes: connecting the ranks is no progress": Case(
        ("--save-seconds", "2"), nodes="1:2",
        parts=("a node that loses power closes no connection", "export TOOLKIT_HANG_TIMEOUT_MINUTES=2\n")),
    "compiling is no progress": Case(
        ("--save-seconds", "2"), nodes="1:2", training=("--torch_compile", "true"),
        parts=("export TOOLKIT_HANG_TIMEOUT_MINUTES=10\n",)),
    "a lost node is noticed after a long save": Case(
        ("--save-seconds", "600"), nodes="1:2", parts=("export TOOLKIT_HANG_TIMEOUT_MINUTES=21\n",)),
    "the user's own hang timeout": Case(
        ("--env", "TOOLKIT_HANG_TIMEOUT_MINUTES=30"), nodes="1:2",
        parts=("export TOOLKIT_HANG_TIMEOUT_MINUTES=30\n",), absent="# TOOLKIT_HANG_TIMEOUT_MINUTES"),
    "the user's own hang timeout, from the environment": Case(
        ("--env", "TOOLKIT_HANG_TIMEOUT_MINUTES"), nodes="1:2", absent="export TOOLKIT_HANG_TIMEOUT_MINUTES"),
    "quotes stay what they are": Case(
        training=("--run_name", "it's $HOME"), parts=("--run_name 'it'\"'\"'s $HOME'",)),
    "preflight runs on every node before training": Case(
        ("--preflight",), parts=(f"{FOUND} zero2'", "doctor --compare", 'bash -c "$node'),
        absent="SLURM_(PROCID|NODEID|LOCALID)"),  # they would be expanded on the first node
    "preflight checks the disk that the preset needs": Case(
        ("--preflight", "--env", "TOOLKIT_NVME_PATH=/nvme"), preset="zero3_nvme_offload",
        parts=(f"{FOUND} zero3_nvme_offload --nvme-path /nvme'",)),
    "a secret is passed by its name": Case(
        ("--env", "HF_TOKEN", "--env", "NCCL_DEBUG=WARN"), parts=("export NCCL_DEBUG=WARN\n", ': "${HF_TOKEN:?')),
    "pyxis": Case(
        ("--container", "image.sqsh"),
        parts=("exec python -m torch.distributed.run", "--container-image=image.sqsh")),
    "apptainer": Case(
        ("--container", "image.sqsh", "--container-runtime", "apptainer"),
        parts=("exec python -m torch.distributed.run", "apptainer exec --nv --bind")),
    "modules and setup lines come before torchrun": Case(
        ("--module", "cuda/12.8", "--setup", "source .venv/bin/activate", "--sbatch-option", "mem=0"),
        directives=("--mem=0",), parts=("module load cuda/12.8", "\nsource .venv/bin/activate", " -m torch.")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_file_has_its_options(sbatch: Write, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    text = sbatch(*case.options, preset=case.preset, nodes=case.nodes, training=case.training)
    assert set(case.directives) <= set(directives(text))
    places = [text.index(part.replace("{out}", f"{tmp_path}/out")) for part in case.parts]
    assert places == sorted(places)
    assert not re.search(case.absent, text)


def measured_run(folder: Path, *saves: dict[str, object], step_seconds: float) -> tuple[str, str]:
    folder.mkdir()
    run = {"schema_version": 1, "saves": saves, "measured": {"step_seconds_median": step_seconds}}
    (folder / "run.json").write_text(json.dumps(run))
    return "--saves-of", str(folder)


def test_the_signal_leaves_twice_the_measured_save_and_step(sbatch: Write, tmp_path: Path) -> None:
    saves = [
        {"kind": "checkpoint", "step": 5, "seconds": 40.0, "bytes": 1},
        {"kind": "model", "step": 6, "seconds": 50.0},
    ]
    text = sbatch(*measured_run(tmp_path / "earlier", *saves, step_seconds=3.0))
    # 2 x (50 + 3) + 30 for the ranks, and 30 more for torchrun and srun
    assert "--shutdown-timeout 136" in text
    assert "--signal=TERM@166" in directives(text)


def test_the_signal_leaves_an_asynchronous_save_the_write_of_the_one_before(sbatch: Write, tmp_path: Path) -> None:
    """The second save waited 5 s for the first; its `stall_seconds` say nothing of its own write."""
    first = {"kind": "checkpoint", "step": 5, "seconds": 40.0, "stall_seconds": 3.0, "write_seconds": 38.0}
    second = first | {"step": 6, "seconds": 39.0, "stall_seconds": 9.0, "waited_seconds": 5.0, "write_seconds": 37.0}
    earlier = measured_run(tmp_path / "earlier", first, second, step_seconds=1.0)
    # 2 x (40 + 38 + 1) + 30: the whole save, after the writing of the one before
    training = ("--async_save", "true")
    assert "--shutdown-timeout 188" in sbatch(*earlier, preset="fsdp2", training=training)
    assert "--shutdown-timeout 112" in sbatch(*earlier, preset="fsdp2"), "2 x (40 + 1) + 30"
    assert "--shutdown-timeout 270" in sbatch("--save-seconds", "60", preset="fsdp2", training=training)


def test_an_interrupted_run_is_requeued_and_resumes(sbatch: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["toolkit", "cluster", "slurm", "--run_name", "a\nrm -rf x"])
    text = sbatch()
    assert "\nrm -rf" not in text  # a line break does not leave the comment that names the command
    assert "--requeue" in directives(text)
    assert "--resume_from_checkpoint latest" in node_script_of(text)
    condition = re.search(r"^if \[\[ (.*) \]\]$", text, re.MULTILINE)
    assert condition is not None
    # the run's own word, of this attempt; something to resume from; and a job that nobody cancelled
    parts = {"$status == interrupted", "$failure -nt $started", "-n $saved", "$state == RUNNING"}
    assert set(condition[1].split(" && ")) == parts


def test_a_time_limit_is_read_as_slurm_reads_it() -> None:
    seconds = {"90": 5400, "1:30": 90, "1:30:00": 5400, "2-12": 216_000, "1-1:1:1": 90_061}
    assert {text: limit_seconds(text) for text in seconds} == seconds
    for text in ("1h", "1:2:3:4", "-5"):
        with pytest.raises(ToolkitError, match="expected MINUTES, HH:MM:SS or D-HH:MM:SS"):
            limit_seconds(text)


# -- comparisons

PRESETS = ["--preset", "ddp", "--preset", "zero2"]
TWO = ["slurm", *PRESETS, "--nodes", "1:2", "--gpus-per-node", "4"]


def comparison(tmp_path: Path, capsys: Capsys, *options: str) -> str:
    training = [*write_inputs(tmp_path), "--max_steps", "20"]
    code, text, errors = run_cluster([*TWO, *options, "--", *training], capsys)
    assert code == 0, errors
    check_shell(text)
    (tmp_path / "job.sbatch").write_text(text)
    assert lint_paths([tmp_path / "job.sbatch"]).findings == []
    return text


def test_each_number_of_nodes_is_a_world_size_compared(tmp_path: Path, capsys: Capsys) -> None:
    assert (COMPARISON_FILE, LEDGER_FILE) == (SPEC_FILE, LEDGER_OF_COMPARISON)  # the files that it looks for
    text = comparison(tmp_path, capsys, "--repeats", "5", "--preflight")
    assert "#SBATCH --nodes=2\n" in text
    assert "    --repeats 5 \\\n" in text
    assert "--preset ddp --preset zero2 \\\n    --nproc-per-node 4 --num-processes 4,8 \\\n" in text
    assert f"output_dir={tmp_path}/out\n" in text
    assert "--output_dir" not in text.partition("toolkit compare")[2]
    assert '[[ -e "$output_dir/comparison.json" ]] && resume=(--resume)' in text


@pytest.mark.parametrize(
    ("state", "ledger", "requeued"), [("RUNNING", True, True), ("RUNNING", False, False), ("COMPLETING", True, False)]
)
def test_the_signal_requeues_a_running_job_that_has_finished_a_trial(
    tmp_path: Path, capsys: Capsys, state: str, ledger: bool, requeued: bool
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
    script = f"{commands}; output_dir={tmp_path}; logs={tmp_path}\n{function[0]}\nrequeue"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert ("called requeue 1" in ended.stdout) is requeued


# -- inside of a job

needs_scontrol = pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol: apt install slurm-client")
TWO_NODES = Allocation(nodes=("node1", "node2"), processes_per_node=4)


def zero2(num_processes: int) -> LaunchCommand:
    words = ("--dataset", "rows of mine.jsonl", "--token", "secret")
    options = TrainOptions(preset="zero2", num_processes=num_processes, training_arguments=words, cpu=True)
    return command_of(options, load_preset("zero2"))


@needs_scontrol
def test_the_nodes_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3],gpu7")
    allocation = Allocation.current(processes_per_node=8)
    assert allocation.nodes == ("node1", "node2", "node3", "gpu7")
    assert allocation.max_processes == 32


def test_ranks_that_do_not_fill_nodes_and_processes_outside_a_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(TWO_NODES.nodes_of(size)) for size in (1, 4, 8)] == [1, 1, 2]
    for size, message in ((6, "does not fill nodes of 4 ranks"), (12, "has 2 nodes with 4 each")):
        with pytest.raises(ToolkitError, match=message):
            TWO_NODES.check(size)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ToolkitError, match="runs in no SLURM job"):
        Allocation.current(processes_per_node=8)


def test_each_node_of_the_run_starts_one_torchrun_with_the_run_id_and_no_secret() -> None:
    plain = zero2(8)
    spread = TWO_NODES.spread(plain)
    assert {"srun", "--nodes=2", "--ntasks=2", "--nodelist=node1,node2", "--kill-on-bad-exit=1"} <= set(spread.argv)
    check_shell(spread.argv[-1])
    assert f'--nnodes 2 --nproc-per-node 4 --rdzv-id "{plain.run_id}"' in spread.argv[-1]
    assert re.search(r"--head node1 --port (2[0-9]{4}) --peer node2.* --rdzv-endpoint .node1:\1.", spread.argv[-1])
    assert "'rows of mine.jsonl'" in spread.argv[-1]
    spread = TWO_NODES.spread(zero2(2))  # on one of its nodes
    assert "--nodelist=node1" in spread.argv
    assert "--nnodes 1 --nproc-per-node 2 " in spread.argv[-1]
    assert not any("secret" in word for word in spread.argv)
    assert any("secret" in value for value in spread.environment.values())


def test_a_comparison_over_nodes_needs_num_processes() -> None:
    with pytest.raises(ToolkitError, match="--nproc-per-node needs --num-processes"):
        CompareOptions(preset=("ddp",), output_dir=Path("out"), nproc_per_node=4)
