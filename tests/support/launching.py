"""Start real distributed runs for tests: through `accelerate launch`, `torchrun` and the toolkit's own commands."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import fork_server as server_module
import pytest
from fork_server import SERVER_VARIABLE, fork_process

from toolkit.engines.compiled_ops import path_with_ninja, torch_extensions_folder

ROOT = Path(__file__).parents[2]
# This checkout, `tests/warm_starts`, and packages that the caller brought in a folder.
PYTHON_PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
SCRIPTS = ROOT / "tests" / "scripts"
LLAMA_8B_CONFIG = ROOT / "tests" / "fixtures" / "llama-8b" / "config.json"
# The fixture `tiny_model`: a Llama of 336,192 parameters, with a vocabulary of 4,096.
TINY_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True},
}

# Every preset that a CPU can run, and the ranks that its runs have here; the global batch is the same for all.
CPU_PRESETS = {
    **{name: 2 for name in ("ddp", "zero1", "zero2", "zero3", "zero3_cpu_offload", "fsdp2")},
    **{"single": 1, "zero2_cpu_offload": 2, "fsdp2_grad_op": 2, "fsdp2_cpu_offload": 2, "fsdp2_hybrid": 4},
}
GLOBAL_BATCH = 4
# accelerate's own options for presets that leave their mesh to the launch.
MESH_OPTIONS = {"fsdp2_hybrid": ["--parallelism_config_dp_shard_size", "2"]}

# The runs of the fixture `saved_runs`, and after how many steps each saves; it saves after the last one too.
SAVED_STEPS = 6
SAVED = {"ddp": 1, "zero2": 3, "zero2-lora": 2, "zero3": 2, "zero3-lora": 5, "fsdp2": 4, "fsdp2-lora": 3}
LORA = ["--lora_r", "4", "--lora_dropout", "0.1"]  # dropout: the random state must resume too


def nightly_launch(test: Any) -> Any:
    """Mark a test that starts ranks, and that runs in `make test-nightly` only."""
    return pytest.mark.launch(pytest.mark.nightly(test))


def nightly(*values: Any) -> list[Any]:
    """Parameters of a test that run in `make test-nightly` only."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


@cache
def fork_server() -> str:
    """One server for the whole session, on the CPU; it ends with pytest, whatever ends pytest."""
    return server_module.fork_server(cpu_environment())


def cpu_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": PYTHON_PATH, "CUDA_VISIBLE_DEVICES": ""}


def succeeded(ended: CompletedProcess[str]) -> CompletedProcess[str]:
    """Return what has ended with exit code 0; otherwise fail with the end of what it printed."""
    assert ended.returncode == 0, f"{ended.args}\n{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    return ended


def accelerate_launch(
    config: Path | str,
    *words: str,
    script: str | None = None,
    num_processes: int = 2,
    options: Sequence[str] = (),
    cwd: Path = ROOT,
    variables: dict[str, str] | None = None,
    cold: bool = False,
    module: str = "toolkit.train",
) -> CompletedProcess[str]:
    """Run two ranks on the CPU, from the repository root, under the file or the name of a preset.

    `options` are accelerate's own, beside `MESH_OPTIONS`.

    `script` is a file of `scripts/`, or the name of a change in `changed_training.py`; the training script otherwise.

    Launcher and ranks are forked from `fork_server`, 8 s faster than started cold. Their parents' command lines then do
    not name the preset, so the environment does, as under `toolkit train`.
    """
    config = ROOT / "accelerate_configs" / f"{config}.yaml" if isinstance(config, str) else config
    started = ["-m", module] if script is None else [str(SCRIPTS / script)]
    if script is not None and not script.endswith(".py"):
        started = [str(SCRIPTS / "changed_training.py"), script]
    named = ["--config_file", str(config), "--num_processes", str(num_processes), "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *named, *MESH_OPTIONS.get(config.stem, ()), *options]
    command += [*started, *words]
    environment = cpu_environment() | (variables or {})
    if cold or SERVER_VARIABLE not in os.environ:
        return run_captured(command, environment, cwd=cwd)
    preset = {"TOOLKIT_PRESET": str((cwd / config).resolve()), "TOOLKIT_WORLD_SIZE": str(num_processes)}
    return run_warm(command, environment | preset, cwd=cwd)


def preset_job(preset: str, model: Path, data: Path) -> list[str]:
    """Return the arguments of the job that the fixture `preset_runs` trains, all but its output folder."""
    words = ["--model_name_or_path", str(model), "--dataset", str(data), "--max_seq_length", "64", "--max_steps", "3"]
    words += ["--per_device_train_batch_size", str(GLOBAL_BATCH // CPU_PRESETS[preset]), "--learning_rate", "1e-3"]
    return [*words, "--save_strategy", "no"]


def launch_preset(preset: str, model: Path, data: Path, output: Path, *, cold: bool = False) -> None:
    """Train `preset_job` with what `train_and_fingerprint.py` writes; fails unless it completes."""
    ended = accelerate_launch(
        ROOT / "accelerate_configs" / f"{preset}.yaml",
        *preset_job(preset, model, data),
        *("--output_dir", str(output)),
        script="train_and_fingerprint.py",
        num_processes=CPU_PRESETS[preset],
        cold=cold,
    )
    assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    assert "cold start" not in ended.stderr  # the launcher's message about a rank that the server refuses


def torchrun(script: str, *words: str, num_processes: int) -> CompletedProcess[str]:
    """Run a script of the user's own under torchrun; one process is started without it."""
    command = [sys.executable, *(torchrun_words(num_processes) if num_processes > 1 else [])]
    compiled = {"TORCH_EXTENSIONS_DIR": str(torch_extensions_folder()), "PATH": path_with_ninja()}  # by the set-up
    return run_warm([*command, str(SCRIPTS / script), *words], cpu_environment() | {"OMP_NUM_THREADS": "1"} | compiled)


def torchrun_preset(
    preset: str | None, *words: str, num_processes: int = 2, options: Sequence[str] = (), **more: str
) -> CompletedProcess[str]:
    """Run the training script under torchrun alone, with the preset in the environment; `more` are other variables."""
    named = {} if preset is None else {"TOOLKIT_PRESET": preset}
    command = [sys.executable, *torchrun_words(num_processes), *options, "-m", "toolkit.train", *words]
    return run_warm(command, cpu_environment() | {"OMP_NUM_THREADS": "1"} | named | more)


def torchrun_observed(*words: str) -> CompletedProcess[str]:
    """Observe a script of the user's own on two ranks under torchrun, which knows no preset."""
    compiled = {"TORCH_EXTENSIONS_DIR": str(torch_extensions_folder()), "PATH": path_with_ninja()}  # by the set-up
    command = [sys.executable, *torchrun_words(2), "-m", "toolkit.observe", *words]
    return run_warm(command, cpu_environment() | {"OMP_NUM_THREADS": "1"} | compiled)


def torchrun_words(num_processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]


def toolkit(*words: str, cwd: Path = ROOT) -> CompletedProcess[str]:
    """Run a command of the toolkit; a test that launches has it forked, on the CPU, 0.4 s of a processor faster."""
    environment = cpu_environment() if SERVER_VARIABLE in os.environ else os.environ | {"PYTHONPATH": PYTHON_PATH}
    return run_warm([sys.executable, "-m", "toolkit", *words], environment, cwd=cwd)


def run_captured(command: Sequence[str], environment: dict[str, str], cwd: Path = ROOT) -> CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)


def run_bash(script: str, environment: dict[str, str]) -> CompletedProcess[str]:
    """Run a script with this environment's programs first; it stops at the first command that fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run_captured(["bash", "-euo", "pipefail", "-c", script], environment | {"PATH": path})


def run_warm(command: Sequence[str], environment: dict[str, str], cwd: Path = ROOT) -> CompletedProcess[str]:
    """Like `run_captured`, forked from the session's server; cold where the test says so."""
    server = os.environ.get(SERVER_VARIABLE)
    if server is None:
        return run_captured(command, environment, cwd=cwd)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, contextlib.chdir(cwd):
        process = fork_process(server, command, environment=environment, stdout=out.fileno(), stderr=err.fileno())
        try:
            code = process.wait(900)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return CompletedProcess(command, code, out.read(), err.read())


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def attested_ranks(folder: Path) -> list[dict[str, Any]]:
    attestation = read(folder / "attestation.json")
    assert attestation["verdict"] == "attested"
    found: list[dict[str, Any]] = attestation["ranks"]
    return found


def attested(folder: Path) -> dict[str, Any]:
    return dict(_leaves(read(folder / "attestation.json")))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list):
        yield name, value
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield from _leaves(each, f"{name}.{key}")


def rank_rows(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()]


def losses(folder: Path, ranks: int = 2) -> list[float]:
    """Mean over ranks of each step's loss."""
    rows = [rank_rows(folder, rank) for rank in range(ranks)]
    return [sum(row["loss"] for row in step) / ranks for step in zip(*rows, strict=True)]
