"""`toolkit env`: the facts of a node for an issue report, and no secret."""

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run_command

from toolkit.doctor.environment_report import shown_variables
from toolkit.hardware.node import library_versions

TOKEN, PASSWORD, KEY = "hf_QmVyZ2VuSXNOb3RIZXJl", "correct-horse", "0123456789abcdef0123456789abcdef"
SECRETS = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": KEY,
    "HTTPS_PROXY": f"http://me:{PASSWORD}@proxy.example:3128",
    "NCCL_DEBUG_FILE": f"/tmp/{KEY}.log",
    "HF_ENDPOINT": f"https://user:{TOKEN}@hub.example",
    "CUDA_UNRELATED": "starts with github_pat_11ABCDEFG0123456789",
    "DEEPSPEED_PASSWORD": PASSWORD,
    "UNRELATED_SECRET": "another-secret-value",
    "TOOLKIT_NOTE": "another-secret-value, pasted",
}


Env = Callable[..., str]


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Env:
    """Runs the command in a home with a stored token and configuration files; returns what it prints."""
    hub = tmp_path / ".cache" / "huggingface"
    (hub / "accelerate").mkdir(parents=True)
    (hub / "token").write_text("hf_storedInAFile123\n")
    (hub / "accelerate" / "default_config.yaml").write_text("num_processes: 8\naws_secret_access_key: plain-words\n")
    (tmp_path / ".deepspeed_env").write_text(f"NCCL_IB_HCA=mlx5\nHF_TOKEN={TOKEN}\nNOTE=hf_storedInAFile123\n")
    monkeypatch.chdir(tmp_path)

    def env(*words: str, **variables: str) -> str:
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("HF_", "XDG_"))]:
                patch.delenv(name)
            for name, value in (variables | {"HOME": str(tmp_path)}).items():
                patch.setenv(name, value)
            code, out, err = run_command(["env", *words], capsys)
        assert (code, err) == (0, "")
        return out

    return env


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_no_secret_is_printed(words: tuple[str, ...], env: Env) -> None:
    text = env(*words, **SECRETS)
    for secret in (TOKEN, PASSWORD, KEY, "another-secret-value", "hf_storedInAFile123", "plain-words", "github_pat_11"):
        assert secret not in text
    for kept in ("proxy.example:3128", "hub.example", "num_processes: 8", "NCCL_IB_HCA=mlx5", ".log"):
        assert kept in text


def test_of_a_token_it_only_says_that_it_is_set_and_the_home_folder_is_not_named(env: Env, tmp_path: Path) -> None:
    lines = env(HF_TOKEN=TOKEN).splitlines()
    assert {"- HF_TOKEN: set", "- WANDB_API_KEY: not set", "- hub login: HF_TOKEN"} <= set(lines)
    text = env(NCCL_CONF_FILE=f"{tmp_path}/x")
    assert "- hub login: token file" in text.splitlines()
    assert str(tmp_path) not in text
    assert "~/.cache/huggingface" in text
    report = json.loads(env("--json"))
    assert (report["packages"]["torch"], report["python"]) == (library_versions()["torch"], platform.python_version())
    assert set(report["disks"]) == {"working directory", "hub cache", "toolkit cache", "temporary files"}


def test_variables_that_libraries_read_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"NCCL_DEBUG": "INFO", "HF_HOME": "/data", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.setattr("os.environ", given | {"EDITOR": "vi", "CCACHE_DIR": "/c", "PWD": "/"})
    assert shown_variables() == given | {"HF_TOKEN": "not set", "WANDB_API_KEY": "not set"}


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")
def test_gpus_and_driver_are_those_of_nvidia_smi(env: Env, program: Callable[[str, str], None]) -> None:
    row = "NVIDIA H100 80GB HBM3, 81559, 570.86.15, 700.00, 1980, 2619"
    answers = {
        "-L": "GPU 0: NVIDIA H100\\nGPU 1: NVIDIA H100",
        "--version": "NVIDIA-SMI version  : 570.86.15\\nCUDA Version        : 12.8",
        "topo": "     GPU0 GPU1\\nGPU0  X   NV18",
        "--query-gpu*": f"{row}\\n{row}",
    }
    cases = "".join(f"{pattern}) printf '{text}\\n';;\n" for pattern, text in answers.items())
    program("nvidia-smi", f'case "$1" in\n{cases}esac')
    facts = "memory=79.65 GiB, driver=570.86.15, power limit watts=700.0, max sm clock mhz=1980, max memory clock mhz"
    lines = env(CUDA_VISIBLE_DEVICES="1").splitlines()
    assert f"- gpus: 2 × name=NVIDIA H100 80GB HBM3, {facts}=2619" in lines
    assert {"- visible gpus: 1", "- driver cuda version: 12.8", "  GPU0  X   NV18"} <= set(lines)
