"""The wheel in clean environments outside the clone: what a light install answers, and what `[train]` runs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, nightly_launch
from served_page import served_page

FIXTURES = ROOT / "tests" / "fixtures"
MODEL = str(FIXTURES / "qwen3-8b")
# Commands before a run, each with what its output contains; `{run}` is a folder with files that they read.
LIGHT_COMMANDS = {
    "presets": "zero3_cpu_offload",
    f"plan {MODEL} --num-processes 8 --gpu h100": "zero2",
    f"recommend {MODEL} --num-processes 8 --gpu h100": "use",
    "simulate pipeline --stages 4 --micro-batches 8": "interleaved_1f1b",
    "lint {run}/zero2.yaml": "1 file",
    f"convert-config {FIXTURES}/axolotl.yaml": "model_name_or_path",
    "report {run}": "report.html",
    "env": "torch",
    "cluster slurm --preset zero2 --nodes 2 --gpus-per-node 8 --output {run}/job.sbatch -- --model_name_or_path {run}"
    " --dataset {run}/rows.jsonl --output_dir {run}/out --max_steps 2": "sbatch",
}
ON_ROWS = "--model_name_or_path {run} --dataset {run}/rows.jsonl --max_steps 6"
NEED_TRAIN = (
    f"train --preset ddp -- {ON_ROWS}",
    f"compare --preset ddp --output-dir c -- {ON_ROWS}",
    "rehearse --preset ddp --num-processes 2 -- --model_name_or_path {run}",
    "checkpoint verify .",
    "plan {run}/bamba.json --num-processes 2 --gpu h100",  # an architecture without formulas
)
JOB = "--model_name_or_path {model} --dataset {rows} --max_steps 3 --max_seq_length 64 --per_device_train_batch_size 1"


def run(*words: object, cwd: Path, seconds: int = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program as outside the clone: nothing of it is on Python's path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TOOLKIT_"))}
    options = {"capture_output": True, "text": True, "timeout": seconds, "check": False}
    return subprocess.run(list(map(str, words)), cwd=cwd, env=environment | variables, **options)  # type: ignore[call-overload,no-any-return]


def install_with_pip(wheel: Path, folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    done = run(folder / "env/bin/pip", "install", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "env/bin/toolkit"


def install_with_uv(wheel: Path, folder: Path) -> Path:
    uv = program("uv", folder)
    run(uv, "venv", "--python", sys.executable, folder / "env", cwd=folder)
    done = run(uv, "pip", "install", "--python", folder / "env", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "env/bin/toolkit"


def install_with_pipx(wheel: Path, folder: Path) -> Path:
    homes = {"PIPX_HOME": str(folder / "home"), "PIPX_BIN_DIR": str(folder / "bin")}
    done = run(program("pipx", folder), "install", "--python", sys.executable, wheel, cwd=folder, **homes)
    assert done.returncode == 0, done.stderr
    return folder / "bin/toolkit"


def program(name: str, folder: Path) -> Path:
    """Install a program of the package index into an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True)
    done = run(folder / "tools/bin/pip", "install", name, cwd=folder)
    if done.returncode:
        pytest.skip(f"{name} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder / "tools/bin" / name


def write_inputs(folder: Path) -> None:
    shutil.copy(FIXTURES / "results_small.json", folder / "results.json")
    shutil.copy(ROOT / "accelerate_configs/ddp.yaml", folder / "zero2.yaml")
    config = json.loads((Path(MODEL) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bamba.json").write_text('{"model_type": "bamba", "hidden_size": 64}')
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    rows = [json.dumps({"prompt": f"question {number}", "completion": "answer"}) for number in range(512)]
    (folder / "rows.jsonl").write_text("\n".join(rows))


def check_light_commands(toolkit: Path, folder: Path) -> None:
    inputs = folder / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    for command, contained in LIGHT_COMMANDS.items():
        done = run(toolkit, *command.format(run=inputs).split(), cwd=folder)
        assert done.returncode == 0, (command, done.stderr)
        assert contained in done.stdout + done.stderr, command
    check_page(toolkit, folder)
    doctor = run(toolkit, "doctor", cwd=folder)
    assert "libraries are not installed: torch" in doctor.stdout
    for command in NEED_TRAIN:
        done = run(toolkit, *command.format(run=inputs).split(), cwd=folder)
        first, second = done.stderr.splitlines()[-2:]
        assert done.returncode == 2, command
        assert re.fullmatch(r"error: .*\btorch\b.* (is|are) not installed", first), command
        assert re.fullmatch(r"  hint: (pip install|pipx inject|uv pip install).* 'finetune-toolkit\[train\]'", second)


@pytest.mark.nightly
def test_a_wheel_installed_by_pip_answers_everything_before_a_run(wheel: Path, tmp_path: Path) -> None:
    toolkit = install_with_pip(wheel, tmp_path)
    assert installed_bytes(toolkit) < 60e6
    check_light_commands(toolkit, tmp_path)


def check_page(toolkit: Path, folder: Path) -> None:
    """The planner page without torch and node: nothing but the installed program is on PATH."""
    environment = {"PATH": str(toolkit.parent), "HOME": str(folder)}
    with served_page("--port", 0, cwd=folder, program=[toolkit], environment=environment) as page:
        assert [page.get(name)[0] for name in ("", "page.css", "page.js")] == [200, 200, 200]
        answer = page.ask("recommend", "Qwen/Qwen3-8B", {"gpu": "h100-sxm"})
        done = run(toolkit, *shlex.split(answer["words"])[1:], "--json", cwd=folder)
        assert answer["text"] == done.stdout
        assert page.interrupt()[0] == 0


def installed_bytes(toolkit: Path) -> int:
    """Bytes that the wheel and its dependencies add to an empty environment."""
    (packages,) = toolkit.parents[1].glob("lib/python3*/site-packages")
    empty = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")
    folders = [each for each in packages.iterdir() if not each.name.startswith(empty)]
    files = [file for each in folders for file in ([each] if each.is_file() else each.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files)


@pytest.mark.nightly
@pytest.mark.parametrize("install", [install_with_uv, install_with_pipx], ids=["uv", "pipx"])
def test_a_wheel_installed_by_another_program_answers_the_same(install: object, wheel: Path, tmp_path: Path) -> None:
    check_light_commands(install(wheel, tmp_path), tmp_path)  # type: ignore[operator]


@nightly_launch
def test_with_the_extras_two_ranks_train_and_presets_are_compared_from_any_directory(
    wheel: Path, tmp_path: Path, tiny_model: Path
) -> None:
    toolkit = install_with_pip(wheel, tmp_path)
    pip = toolkit.with_name("pip")
    constraints = ("-c", ROOT / "constraints.txt")
    done = run(pip, "install", *constraints, "finetune-toolkit[train,deepspeed]", cwd=tmp_path, seconds=1200)
    assert done.returncode == 0, done.stderr
    write_inputs(tmp_path)
    job, cache = JOB.format(model=tiny_model, rows=tmp_path / "rows.jsonl").split(), str(tmp_path / "cache")
    for preset in ("ddp", "zero2", "fsdp2"):
        words = ("--preset", preset, "--num-processes", 2, "--cpu", "--", *job, "--output_dir", tmp_path / preset)
        done = run(toolkit, "train", *words, cwd=tmp_path, seconds=600, TOOLKIT_CACHE=cache, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, (preset, done.stdout, done.stderr)
        assert f"verified: {preset}" in done.stdout + done.stderr
        assert ("compiling DeepSpeed's CPU ops" in done.stderr) == (preset == "zero2"), "once, and said"
    job[job.index("--max_steps") + 1] = "6"
    words = ("--preset", "ddp", "--preset", "zero2", "--num-processes", 2, "--cpu", "--output-dir", "c", "--", *job)
    done = run(toolkit, "compare", *words, cwd=tmp_path, seconds=600, TOOLKIT_CACHE=cache, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c/report.html").is_file()
