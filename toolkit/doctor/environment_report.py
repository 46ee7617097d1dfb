"""Facts of this node for an issue report, read without torch: versions, GPUs, compilers, memory, disks, variables.

Whatever cannot be read is None. No secret is in a report: variables with a token, key or password are only said to be
set, and their values are removed wherever else they occur.
"""

import contextlib
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from toolkit._version import __version__
from toolkit.doctor.node_packages import find_nvcc
from toolkit.doctor.ops import has_libaio_header
from toolkit.engines.compiled_ops import which_are_compiled
from toolkit.files.documents import read_table
from toolkit.files.paths import cache_folder, home_folder
from toolkit.files.secrets import HIDDEN, hide_secrets, is_secret_name
from toolkit.hardware.disks import disk_facts, existing_folder
from toolkit.hardware.gpus import count_gpus, gpu_topology
from toolkit.hardware.node import LIBRARIES, cpu_limit, describe_node, git_commit, memory_limit_bytes
from toolkit.hardware.system_text import entries_of, output_of, text_of
from toolkit.models.hub import hub_home, token_file
from toolkit.units import NOT_AVAILABLE, gib
from toolkit.versions import installed_version, torch_cuda_version

SHARED_MEMORY = Path("/dev/shm")
NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
TABLES = read_table(__file__, "tables")
OTHER_PACKAGES, PREFIXES, NAMES = (tuple(TABLES[part].split()) for part in ("packages", "variables", "names"))
TOKEN_VARIABLES = ("HF_TOKEN", "WANDB_API_KEY")  # reported also where they are not set
MAX_FILE_LINES = 40
SEVERAL_LINES = ("packages", "compilers", "disks", "variables", "files")


def environment_report() -> dict[str, Any]:
    """Return the facts of this node and its environment, without secrets; None is unknown, or no limit."""
    node = describe_node()
    facts = {
        "version": __version__,
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "packages": {name: installed_version(name) for name in (*LIBRARIES, *OTHER_PACKAGES)},
        "torch_cuda_version": torch_cuda_version(),
        "driver_cuda_version": driver_cuda_version(),
        "gpus": node["gpus"],
        "visible_gpus": count_gpus(),  # after CUDA_VISIBLE_DEVICES
        "gpu_topology": gpu_topology(),
        "infiniband": [f"{port.name}: {port.rate or NOT_AVAILABLE}" for port in rdma_ports()],
        "network_interfaces": [path.name for path in entries_of(Path("/sys/class/net"))],
        "compilers": compiler_versions(),
        "libaio_header": has_libaio_header(),
        "compiled_ops": which_are_compiled(),
        **{name: node[name] for name in ("cpu", "cpu_count", "host_memory_bytes")},
        "cpu_limit": cpu_limit(),
        "memory_limit_bytes": memory_limit_bytes(),
        "shared_memory_bytes": filesystem_bytes(SHARED_MEMORY),
        "disks": described_disks("working directory", Path.cwd()),
        "hub_login": hub_login(),
        "variables": shown_variables(),
        "files": _configuration_files(),
    }
    return dict(without_secrets(facts))


def shown_variables() -> dict[str, str]:
    """Return the variables that libraries read, in name order; of one that holds a secret, only that it is set."""
    variables = dict.fromkeys(TOKEN_VARIABLES, "not set")
    for name, value in os.environ.items():
        if name in NAMES or name.startswith(PREFIXES):
            variables[name] = "set" if is_secret_name(name) else value
    return dict(sorted(variables.items()))


def _configuration_files() -> dict[str, str]:
    """First lines of the files that change a run without being named in its command; of a secret, only the key."""
    paths = [
        Path(os.environ.get("ACCELERATE_CONFIG_FILE") or hub_home() / "accelerate/default_config.yaml"),
        home_folder() / ".deepspeed_env",
        Path(".deepspeed_env").absolute(),
        Path(os.environ.get("NCCL_CONF_FILE") or home_folder() / ".nccl.conf"),
        Path("/etc/nccl.conf"),
    ]
    shown: dict[str, str] = {}
    for path in paths:
        if text := text_of(path):
            keys = [(line, re.match(r"([^=:]*[=:]\s*)\S", line)) for line in text.splitlines()[:MAX_FILE_LINES]]
            lines = (f"{key[1]}{HIDDEN}" if key and is_secret_name(key[1]) else line for line, key in keys)
            shown[str(path)] = "\n".join(lines)
    return shown


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a list, for an issue."""
    lines: list[str] = []
    for name, value in report.items():
        for key, entry in (value if name in SEVERAL_LINES else {_words(name): value}).items():
            text = shown(name, entry) or ("none" if isinstance(entry, list | dict) else NOT_AVAILABLE)
            if "\n" in text:
                lines += [f"- {key}:", "  ```", *(f"  {line}" for line in text.splitlines()), "  ```"]
            elif name != "packages" or entry is not None:
                lines.append(f"- {key}: {text}")
    text, home = "\n".join(lines), str(home_folder())  # which often is a person's name
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)


def shown(name: str, value: Any) -> str:
    """Return a fact as text: bytes with a unit, equal entries of a list counted, unknown and empty ones left out.

    >>> shown("disk", {"free_bytes": 2**30, "reads_bytes_per_second": 2**31, "path": None, "gpus": ["T4", "T4"]})
    'free=1.00 GiB, reads=2.00 GiB/s, gpus=2 × T4'
    """
    if isinstance(value, dict):
        texts = {key: shown(key, entry) for key, entry in value.items()}
        texts = {key: f"({text})" if isinstance(value[key], dict) else text for key, text in texts.items() if text}
        return ", ".join(f"{_words(key)}={text}".lstrip("=") for key, text in texts.items())
    if isinstance(value, list | tuple):
        counts = Counter(shown("", entry) for entry in value)
        return ", ".join(f"{count} × {text}" if count > 1 else text for text, count in counts.items())
    if "bytes" in name and isinstance(value, int):
        return f"{gib(value)}{'/s' if name.endswith('_per_second') else ''}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _words(name: str) -> str:
    return name.removesuffix("_per_second").removesuffix("bytes").rstrip("_").replace("_", " ")


# -- Facts of the report that checks judge, too


class RdmaPort(NamedTuple):
    """One port of InfiniBand, RoCE or EFA in the kernel's files; None where they do not say."""

    name: str  # `mlx5_0 port 1`
    state: str | None  # `ACTIVE`, `INIT`, `DOWN`
    rate: str | None  # `400 Gb/sec (4X NDR)`
    link_layer: str | None

    @property
    def gigabits_per_second(self) -> float:
        """The rate as a number; 0 if it is not known."""
        number = re.match(r"[\d.]+", self.rate or "")
        return float(number[0]) if number else 0.0


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[RdmaPort]:
    """Return the RDMA ports that the kernel lists."""
    ports = []
    for port in (port for device in entries_of(root) for port in entries_of(device / "ports")):
        state, rate, link_layer = (text_of(port / name) for name in ("state", "rate", "link_layer"))
        state = (state or "").rpartition(": ")[2] or None  # of `4: ACTIVE`
        ports.append(RdmaPort(f"{port.parent.parent.name} port {port.name}", state, rate, link_layer))
    return ports


def driver_cuda_version() -> str | None:
    """Return the newest CUDA that the driver supports."""
    version = re.search(r"CUDA Version\s*:\s*([\d.]+)", output_of("nvidia-smi", "--version") or "")
    return version[1] if version else None


def compiler_versions() -> dict[str, str | None]:
    """Return the version line of nvcc, of the C++ and C compilers that torch would call, and of ninja."""
    programs = dict.fromkeys([os.environ.get("CXX") or "c++", os.environ.get("CC") or "gcc", "ninja"])
    versions: dict[str, str | None] = {}
    for name, program in {"nvcc": find_nvcc(), **{name: name for name in programs}}.items():
        lines = (output_of(str(program), "--version") or "").splitlines() if program else []
        versions[name] = next((line for line in lines if re.search(r"\d+\.\d+", line)), None)  # nvcc: last but one
    return versions


def filesystem_bytes(folder: Path) -> int | None:
    """Return the size of the file system of a folder."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).total
    return None


def described_disks(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the disks of a folder, which may not exist yet, of both caches and of temporary files."""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    folders = {name: folder, "hub cache": hub_home(), "toolkit cache": cache_folder(), "temporary files": temporary}
    return {name: {"path": str(path), **disk_facts(existing_folder(path))} for name, path in folders.items()}


def hub_login() -> str | None:
    """Return where the hub's token comes from; None without one. The token itself is not read."""
    return "HF_TOKEN" if os.environ.get("HF_TOKEN") else "token file" if token_file().is_file() else None


def without_secrets(value: Any) -> Any:
    """Return facts with every secret of the environment, and whatever looks like one, replaced in all texts."""
    stored = text_of(token_file())
    return hide_secrets(value, known=[stored] if stored else [])
