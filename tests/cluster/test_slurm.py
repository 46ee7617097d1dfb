"""sbatch files: what makes them right by construction."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_jobs import check_shell, node_script_of, run_cluster, write_inputs

from toolkit.cluster.options import limit_seconds
from toolkit.errors import ToolkitError

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


def test_a_quote_in_a_training_argument_reaches_the_script_as_it_is(sbatch: Write) -> None:
    assert "--run_name 'it'\"'\"'s $HOME'" in node_script_of(sbatch(training=("--run_name", "it's $HOME")))


def test_a_line_break_in_an_argument_does_not_leave_the_comment_that_names_the_command(
    sbatch: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["toolkit", "cluster", "slurm", "--run_name", "a\nrm -rf x"])
    assert "\nrm -rf" not in sbatch()


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


def refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code, text, errors = run_cluster(["slurm", *words, "--", *write_inputs(tmp_path)], capsys)
    assert (code, text) == (2, "")
    return errors


def test_a_limit_in_which_the_run_could_only_stop_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused(["--preset", "zero2", "--nodes", "2", "--time-limit", "5"], tmp_path, capsys)
    assert "--time-limit 5 is too short: the run is stopped 300 s before its end to save (120 s, assumed" in found


def test_submitting_without_sbatch_says_where_to_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = refused(["--preset", "zero2", "--nodes", "2", "--submit"], tmp_path, capsys)
    assert "error: `sbatch` is not on the PATH: the job was not submitted\n  hint: run this on a login node" in found
