"""Checks of a job before any rank starts."""

import json
from pathlib import Path

import pytest
from model_configs import TINY

from toolkit.engines.registry import ENGINES
from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.launch import preflight
from toolkit.launch.resume import TrainingRun
from toolkit.presets import list_presets, load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.record.folder import write_json


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What a model folder shows without torch: a configuration and 1,000 bytes of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float32"}')
    header = b'{"w": {"dtype": "U8", "shape": [928], "data_offsets": [0, 928]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(928))
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "hej"}\n' * 16)
    return path


def check(model: object, rows: object, *words: str, preset: str = "ddp", n: int = 2) -> TrainingRun:
    argv = ["--model_name_or_path", str(model), "--dataset", str(rows), *words]
    return preflight.check_run(TrainingRun(preset=load_preset(preset), job=Job.from_argv(argv), num_processes=n))


def check_processes(n: int, gpus: int | None, preset: PresetSpec, ranks_per_gpu: int = 1) -> None:
    device = preflight.device_of(on_cpu=gpus is None, gpus=gpus, ranks_per_gpu=ranks_per_gpu)
    preflight.check_process_count(TrainingRun(preset=preset, job=Job(), num_processes=n, device=device))


def test_a_valid_job_passes_with_its_global_batch_size(model: Path, rows: Path) -> None:
    job = check(model, rows, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")
    assert job.global_batch_size == 16  # 2 x 4 x 2 ranks, and 16 rows
    assert check(model, rows).global_batch_size == 16  # transformers' default of 8 a device


@pytest.mark.parametrize(
    ("preset", "n", "gpus", "ranks", "message", "hint"),
    [
        ("ddp", 4, 2, 1, "4 processes, but 2 GPUs are visible here", "`--num-processes 2`, or `--ranks-per-gpu 2` for"),
        ("ddp", 0, None, 1, "--num-processes is 0, expected 1 or more", "None"),
        ("fsdp2_hybrid", 2, None, 1, "preset 'fsdp2_hybrid' needs at least 4 processes, got 2", ""),
        ("fsdp2_hybrid", 5, 8, 1, "preset 'fsdp2_hybrid' needs a multiple of 2 processes, got 5", "`--num-processes 6"),
        ("single", 2, 2, 1, "preset 'single' trains in one process, got 2", "`--num-processes 1`, or `--preset ddp`"),
        ("zero3", 8, 1, 4, "8 processes, but 1 GPU is visible here, with 4 ranks on each", "`--ranks-per-gpu 8`"),
        ("zeropp", 8, 1, 8, "preset 'zeropp' divides its quantised gradients by the GPUs", "`--preset zero3`"),
        ("ddp", 2, None, 2, "--ranks-per-gpu needs a GPU, and this run has none", "leave it out"),
        ("ddp", 2, 0, 2, "--ranks-per-gpu needs a GPU, and this run has none", "leave it out"),
    ],
)
def test_processes_and_ranks_per_gpu_that_do_not_work_are_refused(
    preset: str, n: int, gpus: int | None, ranks: int, message: str, hint: str
) -> None:
    with pytest.raises(ToolkitError) as refused:
        check_processes(n, gpus, load_preset(preset), ranks)
    assert refused.value.message.startswith(message)
    assert hint in str(refused.value.hint)


def test_as_many_ranks_as_the_gpus_take_pass_under_every_other_preset() -> None:
    for preset in list_presets():
        if preset.needs_gpu is None and preset.max_world_size is None:
            check_processes(8, 2, preset, 4)


def test_a_job_without_a_model_or_data_is_refused(model: Path) -> None:
    for argv, missing in (([], "model_name_or_path"), (["--model_name_or_path", str(model)], "dataset")):
        with pytest.raises(ToolkitError, match=f"--{missing} is missing"):
            preflight.check_run(TrainingRun(preset=load_preset("ddp"), job=Job.from_argv(argv), num_processes=2))


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ({"max_steps": "10", "save_steps": "3"}, 4),  # after 3, 6, 9 and the last
        ({"max_steps": "10", "save_steps": "3", "save_total_limit": "2"}, 3),  # two, and the one being written
        ({"max_steps": "10", "save_steps": "0.5"}, 2),
        ({"max_steps": "10"}, 1),
        ({"save_strategy": "epoch", "save_total_limit": "1"}, 2),
        ({"save_strategy": "epoch"}, 1),
        ({"save_strategy": "no", "max_steps": "10", "save_steps": "1"}, 0),
    ],
)
def test_the_estimate_counts_the_checkpoints_on_disk_at_once(words: dict[str, str], count: int) -> None:
    assert preflight.checkpoints_on_disk(Job.from_values(words)) == count


def test_columns_are_checked_before_a_process_starts(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "Hej?", "answer": "Hello"}\n' * 16)
    with pytest.raises(ToolkitError, match="fields found: question, answer") as caught:
        check(model, rows)
    words = str(caught.value.hint).split("`")[1].split()
    assert check(model, rows, *words, "--eval_dataset", str(rows)).job.column == {
        "instruction": "question",
        "output": "answer",
    }
    for word, close in (("output=answr", "output=answer"), ("input=Question", "input=question")):
        with pytest.raises(ToolkitError, match=f"--column {word}: the rows have no such column") as caught:
            check(model, rows, *words, "--column", word)
        assert close in str(caught.value.hint)


def test_the_estimated_size_of_the_saved_files(model: Path) -> None:
    arguments = {"model_name_or_path": str(model), "max_steps": "4", "save_steps": "1"}
    assert preflight.saved_bytes(Job.from_values(arguments), ENGINES["ddp"]) == 1000 + 4 * 3000
    assert preflight.saved_bytes(Job.from_values(arguments | {"save_model": "false"}), ENGINES["deepspeed"]) == 4 * 5000
    assert preflight.saved_bytes(Job.from_values(arguments | {"lora_r": "8"}), ENGINES["ddp"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--eval_strategy steps", "--eval_strategy is set, but there are no evaluation rows"),
        ("--eval_on_start true", "--eval_on_start is set, but there are no evaluation rows"),
        ("--val_size 4 --eval_dataset {rows}", "both --eval_dataset and --val_size are given"),
        ("--val_size 0", "--val_size is 0, expected a fraction below 1 or a number of rows"),
        ("--val_size 16", "--val_size is 16, expected a fraction below 1 or fewer than all 16 rows"),
        ("--val_size 0.9", "without the 14 of --val_size, {rows} has 2 rows, fewer than one global batch of 16"),
        ("--attn_implementation owner/kernel", "--attn_implementation owner/kernel needs kernels"),
        ("--optim adamw_8bit", "--optim adamw_8bit needs bitsandbytes"),
        ("--chat_template {rows}.jinja", "no such file: {rows}.jinja"),
        ("--profile_steps １:２", "--profile_steps is '１:２', expected A:B"),
        ("--load_best_model_at_end true --save_only_model true --save_strategy best --eval_strategy steps --val_size 1"
         " --per_device_train_batch_size 1", "--load_best_model_at_end does not work with --save_only_model"),
    ],
)  # fmt: skip
def test_what_the_ranks_would_refuse_is_refused_before_they_start(
    words: str, message: str, model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.models.attention.is_importable", lambda _: False)
    monkeypatch.setattr("toolkit.job.job_checks.is_importable", lambda _: False)
    (model / "config.json").write_text(json.dumps(TINY | {"model_type": "llama"}))
    preset = "zero2" if "save_only_model" in words else "ddp"
    with pytest.raises(ToolkitError) as caught:
        check(model, rows, *words.format(rows=rows).split(), preset=preset)
    assert caught.value.message.startswith(message.format(rows=rows))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "line 1: Expected an expression, got 'end of statement block'"),
        ("a\n{{ x|nope }}", "line 2: No filter named 'nope'."),
        ("{% generation %}{% for m in messages %}", "line 1: Unexpected end of template"),
        ("{% for m in messages %}{%- generation -%}{{ m.content }}{%- endgeneration -%}{% break %}{% endfor %}", ""),
        ("{{ tools | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ raise_exception('no') }}{{ bos_token }}", ""),
    ],
)
def test_a_file_that_is_not_a_chat_template_is_refused(template: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    job = Job.from_values({"chat_template": str(file)})
    if not message:
        preflight.check_chat_template(job)
        return
    with pytest.raises(ToolkitError) as caught:
        preflight.check_chat_template(job)
    assert caught.value.message.startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    "words", ["--eval_strategy steps", "--max_seq_length 1", "--optim adamw", "--lora_r 4 --loss_on x"]
)
def test_the_ranks_of_a_plain_launch_refuse_the_same(words: str, model: Path, rows: Path, tmp_path: Path) -> None:
    from toolkit.train.arguments import LaunchContext, parse_args

    argv = ["--model_name_or_path", str(model), "--dataset", str(rows), *words.split()]
    with pytest.raises(ToolkitError) as before:
        preflight.check_run(TrainingRun(preset=load_preset("ddp"), job=Job.from_argv(argv), num_processes=1))
    with pytest.raises(ToolkitError) as launched:
        parse_args([*argv, "--output_dir", str(tmp_path / "out")], LaunchContext.from_env())
    assert launched.value.message == before.value.message or "invalid choice" in launched.value.message


def check_output(output_dir: object, **arguments: object) -> Path:
    """Check the output folder of a job whose model is `model`, in the working directory."""
    given = {"model_name_or_path": "model", "output_dir": str(output_dir), **arguments}
    return preflight.check_output(Job.from_values(given), ENGINES["deepspeed"])


@pytest.mark.parametrize(("place", "what"), [("/", "the root of the file system"), ("~", "the home folder")])
def test_an_output_folder_that_is_no_folder_of_a_run_is_refused(
    place: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(Path(place).expanduser())
    for given in (place, tmp_path / "link"):
        with pytest.raises(ToolkitError, match=f"output_dir .* is {what}") as caught:
            check_output(given)
        assert "name a folder of its own: `--output_dir" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "given", "output_dir"),
    [
        ("model_name_or_path", "model", "model"),
        ("model_name_or_path", "model/", "model/../model"),
        ("model_name_or_path", "model", "link"),
        ("model_name_or_path", "out/checkpoint-2", "out"),
        ("dataset", "out/ranks/rank0.jsonl", "out"),
        ("dataset", "data", "data"),
        ("eval_dataset", "out/run.json", "out"),
        ("chat_template", "out/chat_template.jinja", "out"),
    ],
)
def test_an_output_folder_in_which_the_run_would_replace_its_inputs_is_refused(
    name: str, given: str, output_dir: str, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(model)
    source = tmp_path / given
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        source.mkdir() if "." not in source.name else source.write_text("{}")
    with pytest.raises(ToolkitError, match=f"--{name} {given} is in output_dir") as caught:
        check_output(output_dir, **{"dataset": [str(rows)], name: [given] if name == "dataset" else given})
    assert caught.value.hint == "name another folder: `--output_dir DIR`"


def test_a_folder_with_somebody_elses_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ToolkitError, match="holds a model that no run has written there"):
        check_output(tmp_path)
    write_json(tmp_path / "run.json", {"status": "failed"})
    assert check_output(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [(None, False), ("latest", False), ("elsewhere/checkpoint-3", True), ("false", False), ("None", False)],
)
def test_a_run_continues_only_if_there_is_a_checkpoint(checkpoint: str | None, expected: bool, tmp_path: Path) -> None:
    job = Job.from_values({"resume_from_checkpoint": checkpoint, "output_dir": str(tmp_path)})
    assert preflight.continues(job) is expected
    assert check_output(tmp_path, resume_from_checkpoint=checkpoint) == tmp_path
    write_json(tmp_path / "run.json", {"status": "completed"})
    if not expected:  # a finished run is not resumed from its first step
        with pytest.raises(ToolkitError, match="already holds a finished run"):
            check_output(tmp_path, resume_from_checkpoint=checkpoint)
