"""examples/: each is linted, planned and dry-run as it is typed; scripts and notebook train on two CPU ranks."""

import ast
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launching import PYTHON_PATH, ROOT, cpu_environment, nightly, nightly_launch, read, run_bash, torchrun

from toolkit.files.model_weights import read_weights
from toolkit.hardware.gpu_table import find_gpu
from toolkit.job.job import Job
from toolkit.models.hub import UNGATED
from toolkit.plan.planner import Plan, plan_run
from toolkit.presets import load_preset
from toolkit.units import GIB

EXAMPLES = ROOT / "examples"
README = EXAMPLES / "README.md"
WHEN = "When to use it: "
# Models of the examples, and the numbers of their published configurations.
CONFIGS = {UNGATED: "qwen3-8b", "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b"}
GPU_OF = {"qlora_8b.yaml": ("rtx-4090", "24 GB")}
DEFAULT_GPU = ("h100-sxm", "80 GB")
# Not planned: TRL computes other things from the logits than this toolkit's script; the notebook plans itself.
NOT_PLANNED = {
    **dict.fromkeys(("with_trl.py", "with_dpo.py", "with_grpo.py"), "its memory is TRL's"),
    "notebook.ipynb": "planned in the notebook",
    "tensor_parallel.py": "depends on `--tp`: `toolkit plan`",
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A file of examples/, and what it says about itself."""

    path: Path
    when: str  # its first sentence, without `When to use it:`
    line: str  # what to type, from the root of the repository

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def read_example(path: Path) -> Example:
    if path.suffix == ".ipynb":
        text = "".join(json.loads(path.read_text())["cells"][0]["source"])
        line = f"jupyter lab examples/{path.name}"
    else:
        text = re.sub(r"^# ?", "", path.read_text(), flags=re.MULTILINE)
        line = next(line.strip() for line in text.splitlines() if re.match(r" +(toolkit|bash|torchrun) ", line))
    found = re.search(rf"{WHEN}([^.\n]+)", text)
    assert found, f"{path.name} does not say when to use it"
    return Example(path=path, when=found[1], line=line)


FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".sh", ".py", ".ipynb"))
YAMLS = [path for path in FILES if path.suffix == ".yaml"]


def arguments_of(path: Path) -> list[str]:
    if path.suffix == ".yaml":
        return [str(path)]
    if path.suffix == ".sh":
        defaults = re.sub(r'"\$\{\w+:-([^}]*)\}"', r"\1", path.read_text().replace("\\\n", " "))
        command = next(line for line in defaults.splitlines() if line.startswith("toolkit compare"))
        return shlex.split(command.partition(" -- ")[2])
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    settings = constants["SETTINGS"] | {"max_seq_length": constants["MAX_LENGTH"], "model_name_or_path": UNGATED}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def presets_of(example: Example) -> list[str]:
    words = example.path.read_text().split() if example.path.suffix == ".sh" else example.words
    return [words[position + 1] for position, word in enumerate(words) if word == "--preset"]


def world_size_of(example: Example) -> int:
    text = example.path.read_text() if example.path.suffix == ".sh" else example.line
    return int(re.findall(r"(?:NUM_PROCESSES:-|--nproc_per_node |--num-processes )(\d+)", text)[0])


def plans_of(example: Example) -> list[Plan]:
    job = Job.from_argv(arguments_of(example.path))
    config = ROOT / "tests" / "fixtures" / CONFIGS[str(job.model_name_or_path)]
    job, gpu = job.with_values(model_name_or_path=str(config)), find_gpu(GPU_OF.get(example.name, DEFAULT_GPU)[0])
    world_size = world_size_of(example)
    return [plan_run(load_preset(name), job, world_size=world_size, gpu=gpu) for name in presets_of(example)]


# -- the table


def examples_table() -> str:
    head = ["example", "when to use it", "GPUs", "planned GiB per GPU", "one line to type"]
    lines = [f"| {' | '.join(head)} |", "| :--- | :--- | :--- | :--- | :--- |"]
    for example in map(read_example, FILES):
        if example.path.suffix == ".ipynb":
            gpus = "any number, or a CPU"
        else:
            gpus = f"{world_size_of(example)} x {GPU_OF.get(example.name, DEFAULT_GPU)[1]}"
        cells = [f"[{example.name}]({example.name})", example.when, gpus, planned(example), f"`{example.line}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def planned(example: Example) -> str:
    if example.name in NOT_PLANNED:
        return NOT_PLANNED[example.name]
    peaks = {plan.preset.name: f"{plan.memory.planned_peak_bytes / GIB:.1f}" for plan in plans_of(example)}
    if len(peaks) == 1:
        return next(iter(peaks.values()))
    return ", ".join(f"`{preset}` {peak}" for preset, peak in peaks.items())


def test_every_file_is_in_the_table_or_named_below_it() -> None:
    text = README.read_text()
    assert [path.name for path in EXAMPLES.iterdir() if f"]({path.name})" not in text and path != README] == []
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (EXAMPLES / target).exists(), target


# -- linted, planned, dry-run


@pytest.mark.parametrize(
    "example", [read_example(path) for path in FILES if path.name not in NOT_PLANNED], ids=lambda example: example.name
)
def test_an_example_is_planned_to_fit(example: Example) -> None:
    assert {plan.preset.name: plan.verdict for plan in plans_of(example)} == dict.fromkeys(presets_of(example), "fits")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub that has the configurations of the examples' models, so that their lines run offline."""
    folder, commit = tmp_path_factory.mktemp("hub"), "0" * 40
    for model, fixture in CONFIGS.items():
        repository = folder / "hub" / f"models--{model.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        shutil.copytree(ROOT / "tests" / "fixtures" / fixture, repository / "snapshots" / commit)
    return folder


def run_line(line: str, hub: Path, **variables: str) -> CompletedProcess[str]:
    """Run a line with the hub's cache; nothing listens on its port, so that no time is lost."""
    return run_bash(line, cpu_environment() | variables | {"HF_HOME": str(hub), "HF_ENDPOINT": "http://127.0.0.1:9"})


@pytest.mark.parametrize("path", [YAMLS[0], *nightly(*YAMLS[1:])], ids=lambda path: path.name)
def test_a_configuration_is_dry_run_by_the_line_that_it_names(path: Path, hub: Path, tmp_path: Path) -> None:
    example, (gpu, _) = read_example(path), GPU_OF.get(path.name, DEFAULT_GPU)
    line = example.line.replace("toolkit train", f"toolkit train --dry-run --gpu {gpu}")
    ended = run_line(f"{line} --output_dir {tmp_path / 'run'}", hub)
    assert ended.returncode == 0, ended.stderr
    (plan,) = plans_of(example)
    assert f"GPU memory: {plan.memory.planned_peak_bytes / GIB:.1f} GiB planned" in ended.stderr
    assert ended.stderr.endswith(" is not asked of the hub; nothing was started\n")
    assert ended.stdout.startswith("accelerate launch --config_file ")
    assert not (tmp_path / "run").exists()


def test_the_comparison_is_dry_run_for_gpus_that_are_not_here(hub: Path, tmp_path: Path) -> None:
    example = read_example(EXAMPLES / "compare_8gpu.sh")
    ended = run_line(f"{example.line} --dry-run --gpu h100", hub, OUTPUT_DIR=str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr
    for plan in plans_of(example):
        assert len(re.findall(rf"^\[\d/9\] {plan.preset.name} on 8 processes, ", ended.stdout, re.MULTILINE)) == 3
        assert f"predicted memory {plan.memory.planned_peak_bytes / GIB:.2f} GiB" in ended.stdout
    assert "9 of 9 trials to run" in ended.stdout


# -- trained


def run_script(name: str, preset: str, model: Path, output: Path, *options: str, log: str = "checkpoint-2") -> Path:
    """Run a script as its line says, for two steps in two processes, and return its last checkpoint."""
    words = ["--preset", preset, "--model", str(model), "--output_dir", str(output), "--max_steps", "2", *options]
    ended = torchrun(str(EXAMPLES / name), *words, num_processes=2)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    history = read(output / log / "trainer_state.json")["log_history"]
    assert len([row["loss"] for row in history if "loss" in row]) == 2
    return output / "checkpoint-2"


@nightly_launch
def test_a_trainer_script_of_ones_own_trains_under_its_preset(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = run_script("own_trainer.py", "zero3", tiny_model, tmp_path)
    # ZeRO-3 shards the parameters: one file of them per rank.
    assert len(list(checkpoint.glob("global_step2/zero_pp_rank_*_mp_rank_00_model_states.pt"))) == 2


@nightly_launch
def test_a_model_whose_layers_are_split_is_saved_whole(tiny_model: Path, tmp_path: Path) -> None:
    run_script("tensor_parallel.py", "tp", tiny_model, tmp_path, "--tp", "2", log="")
    before, after = (read_weights(folder) for folder in (tiny_model, tmp_path))
    shapes = {name: weight.shape for name, weight in after.items() if name in before}
    assert shapes == {name: weight.shape for name, weight in before.items()}


@nightly_launch
def test_trls_trainer_trains_an_adapter_under_its_preset(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = run_script("with_trl.py", "zero2", tiny_model, tmp_path)
    assert (checkpoint / "adapter_model.safetensors").is_file()
    # ZeRO-2 shards the optimizer states: one file of them per rank.
    assert len(list(checkpoint.glob("global_step2/*zero_pp_rank_*_mp_rank_00_optim_states.pt"))) == 2


@nightly_launch
def test_a_dpo_script_that_knows_nothing_of_the_toolkit_is_verified_and_exported(
    tiny_model: Path, tmp_path: Path
) -> None:
    line = read_example(EXAMPLES / "with_dpo.py").line.replace("runs/with_dpo", str(tmp_path / "run"))
    line = line.replace("--num-processes 8", "--num-processes 2")
    own = f"--model {tiny_model} --max_steps 2 --output_dir {tmp_path / 'out'}"
    ended = run_bash(
        f"{line} -- {own}; toolkit checkpoint export {tmp_path / 'run'} {tmp_path / 'adapter'}", cpu_environment()
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    assert "verified: zero3 (deepspeed, full_shard), 2 ranks" in ended.stderr
    assert any(name.endswith("lora_B.weight") for name in read_weights(tmp_path / "adapter"))


@nightly_launch
def test_a_grpo_script_with_one_line_of_the_toolkit_is_verified_and_recorded(tiny_model: Path, tmp_path: Path) -> None:
    words = ["--preset", "zero2", "--model", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    ended = torchrun(str(EXAMPLES / "with_grpo.py"), *words, "--max_completion_length", "8", num_processes=2)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    run = read(tmp_path / "run" / "run.json")
    assert (run["status"], run["preset"], run["measured"]["steps"]) == ("completed", "zero2", 2)
    assert read(tmp_path / "run" / "attestation.json")["verdict"] == "attested"
    assert run["checkpoints_folder"] == str(tmp_path / "run" / "checkpoints")


@nightly_launch
def test_the_notebook_runs_from_top_to_bottom(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    before = set((ROOT / "runs").glob("notebook-*"))
    monkeypatch.setenv("MODEL", str(tiny_model))
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "completed: 8 steps in 2 processes under zero2" in shown
    assert "h100-sxm" in shown
    (run,) = set((ROOT / "runs").glob("notebook-*")) - before
    assert (run / "adapter_model.safetensors").is_file()
    shutil.rmtree(run)
    pictures: list[Any] = [output for output in notebook.cells[-2].outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
