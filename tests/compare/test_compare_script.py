"""Comparisons of a script that somebody else wrote: trials of its first training, checked against each other."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from comparison_records import aggregate_rows, checked_comparison, comparison, trial
from launching import SCRIPTS, nightly_launch, read, succeeded, toolkit
from trl_jobs import TRL_ROWS, trl_words

from toolkit.compare.build_results import build_results
from toolkit.compare.comparison_report import report_text
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import dry_run, dry_run_text
from toolkit.compare.results import Results, load_results
from toolkit.compare.specification import make_specification, open_comparison
from toolkit.errors import ToolkitError
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows

SCRIPT = SCRIPTS / "somebodys.py"


def options(folder: Path, **given: Any) -> CompareOptions:
    known = {"preset": ("ddp", "zero2"), "num_processes": ("2",), "cpu": True, "script": str(SCRIPT), "repeats": 1}
    return CompareOptions(**known | {"output_dir": folder} | given)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ddp and zero2; a variant of zero2 with another loss, and one in which the script turns DeepSpeed off."""
    folder = tmp_path_factory.mktemp("script")
    words = ["compare", "--script", str(SCRIPT), "--stop-after-steps", "3", "--cpu", "--repeats", "1"]
    words += ["--preset", "ddp", "--preset", "zero2", "--num-processes", "2", "--output-dir", str(folder / "cmp")]
    words += ["--variant", "drifts=zero2 drifts", "--variant", "contradicts=zero2 without-deepspeed"]
    succeeded(toolkit(*words, "--", "compared", str(folder / "out")))
    return folder


@pytest.fixture(scope="module")
def results(finished: Path) -> Results:
    return load_results(finished / "cmp")


@nightly_launch
def test_rows_of_somebodys_script_agree_unless_it_trains_another_problem_or_contradicts_its_preset(
    results: Results,
) -> None:
    ddp, zero2, drifts, contradicts = results.rows
    assert [row.status for row in results.rows] == [*["completed"] * 3, "attestation_failed"]
    assert (ddp.parity, zero2.parity, drifts.parity) == ("reference", "agrees", "parity failed")
    assert (drifts.parity_message or "").startswith("loss of step 1 is ")
    assert "engine on rank 0 is ddp, expected deepspeed" in (contradicts.message or "")
    assert (zero2.gradient_bytes, ddp.gradient_bytes) == (24_736, 4 * 24_736)  # bf16 in halves, and fp32
    assert (zero2.tokens_per_second or 0) > 0


@nightly_launch
def test_a_trial_ends_with_its_training_and_leaves_nothing_outside_of_its_folder(finished: Path) -> None:
    """The script saves and evaluates in each step, and saves its model into a folder of its own afterwards."""
    for name in ("ddp-n2-r0", "zero2-n2-r0"):
        folder = RunFolder(finished / "cmp" / "trials" / name)
        assert [row.step for row in read_rows(folder.rank_rows(1))] == [1, 2, 3]
        run = read(folder.run_json)
        assert run["status"] == "completed"
        assert run["checkpoints_folder"] == str(folder.path / "trainer_output")
        assert run["goodput"]["evaluation_seconds"] == 0
    assert not (finished / "out").exists()
    assert not list(finished.rglob("checkpoint-*"))
    assert not list(finished.rglob("*.safetensors"))


@nightly_launch
def test_a_report_names_the_script_its_arguments_and_what_its_trainer_had(finished: Path, results: Results) -> None:
    job = results.job
    assert (job.script, job.model, job.dataset, job.stop_after_steps) == (str(SCRIPT), None, None, 3)
    assert (job.seed, job.per_device_train_batch_size, job.gradient_accumulation_steps) == (42, 2, 1)
    page = report_text(results, "md")
    assert page.startswith("# somebodys.py: 4 presets on 2 CPU processes")
    assert f"| its arguments | compared {finished / 'out'} |" in page


@nightly_launch
@pytest.mark.parametrize("script", TRL_ROWS)
def test_trls_scripts_train_the_same_problem_under_each_preset(script: str, tiny_model: Path, tmp_path: Path) -> None:
    words = ["compare", "--module", f"trl.scripts.{script}", "--stop-after-steps", "4", "--cpu", "--repeats", "1"]
    words += ["--preset", "ddp", "--preset", "zero2", "--preset", "fsdp2", "--num-processes", "2"]
    words += ["--output-dir", str(tmp_path / "cmp"), "--", *trl_words(script, tiny_model, tmp_path)]
    words += ["--bf16", "true", "--use_cpu", "true"]  # transformers refuses the first without the second
    # At TRL's own 1e-4, a reward's loss that ZeRO-2 computes in bf16 is 1.05 % from that of ddp after four steps.
    words += ["--learning_rate", "1e-5"] if script == "reward" else []
    succeeded(toolkit(*words))
    rows = load_results(tmp_path / "cmp").rows
    assert [row.status for row in rows] == ["completed"] * 3, [row.message for row in rows]
    if script not in ("grpo", "rloo"):
        assert [row.parity for row in rows] == ["reference", "agrees", "agrees"], [row.parity_message for row in rows]
        return
    assert [row.parity for row in rows] == ["reference", None, None], [row.parity_message for row in rows]
    assert {(row.parity_message or "").split(":")[0] for row in rows[1:]} == {"losses are not compared"}
    assert all((row.step_seconds_median or 0) > 0 and row.tokens_per_second is None for row in rows)
    assert not (tmp_path / "out").exists()


def test_without_digests_of_batches_losses_are_not_compared_and_the_reason_is_named() -> None:
    spec = comparison("ddp", "other", script="grpo.py")
    unseen: dict[str, Any] = {"batch_sha256": [["", ""]] * 8, "step_tokens": [None] * 8}
    unseen |= {"step_non_padding_tokens": [None] * 8, "step_supervised_tokens": [None] * 8, "tokens_per_second": None}
    trials = [trial("ddp", repeat, **unseen) for repeat in range(3)]
    other = aggregate_rows(spec, *trials, *[trial("other", n, losses=[9.0] * 8, **unseen) for n in range(3)])[
        "other-n2"
    ]
    assert other.parity is None
    assert "of what its model generates (as GRPO and RLOO do)" in (other.parity_message or "")
    assert (other.step_seconds_median, other.tokens_per_second) == (pytest.approx(0.5, rel=0.01), None)
    seeded = [trial("other", repeat, problem={"seed": 43}, **unseen) for repeat in range(3)]
    assert aggregate_rows(spec, *trials, *seeded)["other-n2"].parity_message == (
        "repeat 1: seed is 43, 42 in ddp on 2 processes, repeat 1"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"module": "trl.scripts.dpo"}, "both --script and --module are given"),
        ({"script": None, "stop_after_steps": 5}, "--stop-after-steps is for a script of your own"),
        ({"stop_after_steps": 2}, "--stop-after-steps 2 leaves no timed step after 2 untimed ones"),
        *(
            ({name: value, "num_processes": ("1,2",)}, f"--{text} needs the toolkit's own training script, and")
            for name, value, text in (
                *(("find_max_batch", 8, "find-max-batch"), ("scaling", "strong", "scaling strong")),
                *(("profile", True, "profile"), ("measure_save", True, "measure-save"), ("gpu", "h100", "gpu")),
                *(("nvme_path", Path("/tmp"), "nvme-path"), ("nproc_per_node", 2, "nproc-per-node")),
            )
        ),
    ],
)
def test_options_that_do_not_go_with_a_script_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError) as refused:
        options(tmp_path, **given)
    assert refused.value.message.startswith(message)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"script": "no-such.py"}, "script no-such.py does not exist"),
        ({"preset": ("ddp", "tp")}, "preset 'tp' divides the model inside our training script"),
        (
            {"preset": ("zero3_nvme_offload",)},
            "preset 'zero3_nvme_offload' prepares its disk inside our training script",
        ),
    ],
)
def test_a_script_or_a_preset_that_cannot_be_compared_is_refused_before_any_trial(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError) as refused:
        checked_comparison(options(tmp_path, **given))
    assert refused.value.message.startswith(message)


def test_a_dry_run_prints_the_observed_command_of_every_trial(tmp_path: Path) -> None:
    given = options(
        tmp_path / "cmp",
        variant=("half=zero2 --beta 0.5",),
        num_processes=("1,2",),
        stop_after_steps=9,
        target_interval=0.0,
        trial_minutes=2.0,
        training_arguments=("--beta", "0.1", "--hub_token", "hf_A1b2C3d4E5f6"),
    )
    checked = checked_comparison(given)
    text = dry_run_text(dry_run(given, checked.spec, checked.unsupported), checked.spec, None)
    commands = [line for line in text.splitlines() if "toolkit.observe" in line]
    assert len(commands) == 6
    own = f"--output-dir {tmp_path}/cmp/trials/half-n2-r0 --require zero2 --trial --untimed-steps 2"
    stops = f"--stop-after-steps 9 --stop-after-minutes 2.0 {SCRIPT} --beta 0.1 --hub_token '***' --beta 0.5"
    assert f"{own} {stops}" in commands[-1]
    assert "--num_processes 1" in commands[0]
    assert text.splitlines()[-1].startswith("of a script no duration is known before a first trial")


def test_a_changed_script_is_not_resumed(tmp_path: Path) -> None:
    script = shutil.copy(SCRIPT, tmp_path / "mine.py")
    spec = make_specification(options(tmp_path / "cmp", script=str(script)))
    open_comparison(tmp_path / "cmp", spec, resume=False)
    open_comparison(tmp_path / "cmp", make_specification(options(tmp_path / "cmp", script=str(script))), resume=True)
    Path(script).write_text(SCRIPT.read_text() + "\n")
    changed = make_specification(options(tmp_path / "cmp", script=str(script)))
    with pytest.raises(ToolkitError, match="holds another comparison: its script_sha256 is"):
        open_comparison(tmp_path / "cmp", changed, resume=True)


def test_results_without_a_completed_trial_have_unknown_numbers(tmp_path: Path) -> None:
    results = build_results(comparison("ddp", script="dpo.py", script_sha256="a" * 64), tmp_path, {"ddp-n2": "no GPU"})
    assert (results.job.seed, results.job.per_device_train_batch_size) == (None, None)
    assert results.rows[0].per_device_train_batch_size is None
    assert "| seed | n/a |" in report_text(results, "md")
