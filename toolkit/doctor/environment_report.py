"""Facts of this node for an issue report, read without torch: versions, GPUs, compilers, memory, disks, variables.

    print(as_markdown(environment_report()))

No secret is in a report: variables with a token, key or password are only said to be set, and their values are removed
wherever else they occur.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.cache import home_folder
from toolkit.doctor.collectors import (
    SHARED_MEMORY,
    compiled_ops,
    compiler_versions,
    described_disks,
    driver_cuda_version,
    filesystem_bytes,
    hub_home,
    hub_login,
    rdma_ports,
    usual_folders,
    without_secrets,
)
from toolkit.doctor.ops import has_libaio_header
from toolkit.files.secrets import HIDDEN, is_secret_name
from toolkit.hardware.cgroups import cpu_limit, memory_limit_bytes
from toolkit.hardware.gpus import count_gpus, gpu_topology
from toolkit.hardware.node import LIBRARIES, describe_node, git_commit
from toolkit.hardware.system_text import entries_of, text_of
from toolkit.units import NOT_AVAILABLE, gib
from toolkit.versions import installed_version, torch_cuda_version

# What a run may import beside `LIBRARIES`.
OTHER_PACKAGES = (
    *("huggingface_hub", "tokenizers", "safetensors", "numpy", "pyarrow", "triton", "trl"),
    *("bitsandbytes", "liger-kernel", "nvidia-ml-py", "flash-attn"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
# Variables that the libraries below a run read.
PREFIXES = (
    *("ACCELERATE_", "FSDP_", "DS_", "DEEPSPEED_", "TOOLKIT_", "HF_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "GLOO_", "TP_", "OMP_", "MKL_", "UCX_", "FI_", "TRITON_"),
    *("MASTER_", "LOCAL_", "SLURM_", "WANDB_"),
)
NAMES = (
    *("RANK", "NODE_RANK", "WORLD_SIZE", "CC", "CXX", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "TMPDIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
TOKEN_VARIABLES = ("HF_TOKEN", "WANDB_API_KEY")  # reported also where they are not set
SET, NOT_SET = "set", "not set"
MAX_FILE_LINES = 40


def environment_report(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the facts of this node and this process's environment, without secrets.

    None where a fact is not known, or there is no limit; bytes are integers.
    """
    node = describe_node()
    folders = {"working directory": Path.cwd()} | usual_folders(environment)
    facts = {
        "version": __version__,
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "packages": {name: installed_version(name) for name in (*LIBRARIES[:-1], *OTHER_PACKAGES)},
        "torch_cuda_version": torch_cuda_version(),
        "driver_cuda_version": driver_cuda_version(),
        "gpus": node["gpus"],
        "visible_gpus": count_gpus(),  # after CUDA_VISIBLE_DEVICES
        "gpu_topology": gpu_topology(),
        "infiniband": [f"{port.name}: {port.rate or NOT_AVAILABLE}" for port in rdma_ports()],
        "network_interfaces": [path.name for path in entries_of(Path("/sys/class/net"))],
        "compilers": compiler_versions(environment),
        "libaio_header": has_libaio_header(),
        "compiled_ops": compiled_ops(),
        **{name: node[name] for name in ("cpu", "cpu_count", "host_memory_bytes")},
        "cpu_limit": cpu_limit(),
        "memory_limit_bytes": memory_limit_bytes(),
        "shared_memory_bytes": filesystem_bytes(SHARED_MEMORY),
        "disks": described_disks(folders),
        "hub_login": hub_login(environment),
        "variables": shown_variables(environment),
        "files": _configuration_files(environment),
    }
    hidden: dict[str, Any] = without_secrets(facts, environment)
    return hidden


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read, in name order; of one that holds a secret, only that it is set."""
    found = {
        name: SET if is_secret_name(name) else value
        for name, value in environment.items()
        if name in NAMES or name.startswith(PREFIXES)
    }
    return dict(sorted(({name: NOT_SET for name in TOKEN_VARIABLES} | found).items()))


def _configuration_files(environment: Mapping[str, str]) -> dict[str, str]:
    """First lines of the files that change a run without being named in its command; of a secret, only the key."""
    paths = [
        Path(environment.get("ACCELERATE_CONFIG_FILE") or hub_home(environment) / "accelerate/default_config.yaml"),
        home_folder() / ".deepspeed_env",
        Path(".deepspeed_env").absolute(),
        Path(environment.get("NCCL_CONF_FILE") or home_folder() / ".nccl.conf"),
        Path("/etc/nccl.conf"),
    ]
    texts = {str(path): text_of(path) for path in dict.fromkeys(paths)}
    return {
        path: "\n".join(map(_without_secret_value, text.splitlines()[:MAX_FILE_LINES]))
        for path, text in texts.items()
        if text is not None
    }


def _without_secret_value(line: str) -> str:
    found = re.match(r"([^=:]*[=:]\s*)\S", line)
    return f"{found[1]}{HIDDEN}" if found and is_secret_name(found[1]) else line


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a list, for an issue; what is absent is left out where a list would only say so."""
    lines = [f"- {name}: {' '.join(value.split())}" for name, value in _names_and_values(report)]
    blocks = {"GPU topology": report["gpu_topology"]} | report["files"]
    for title, text in blocks.items():
        lines += [f"- {title}:", "  ```", *(f"  {line}" for line in text.splitlines()), "  ```"] if text else []
    text, home = "\n".join(lines), str(home_folder())  # which often is a person's name
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?=/|\s|$)", "~", text)


def _names_and_values(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    installed = {name: version for name, version in report["packages"].items() if version is not None}
    absent = [name for name in ("bitsandbytes", "liger-kernel", "nvidia-ml-py") if name not in installed]
    if "torch" in installed:
        cuda = report["torch_cuda_version"]
        installed["torch"] += f" (built for CUDA {cuda})" if cuda else " (a CPU build)"
    gpus = Counter(f"{gpu['name']} ({gib(gpu['memory_bytes'])})" for gpu in report["gpus"])
    drivers = ", ".join(sorted({str(gpu["driver"]) for gpu in report["gpus"]})) or "none"
    limits = [] if report["cpu_limit"] is None else [f"{report['cpu_limit']:g} cores"]
    limits += [] if report["memory_limit_bytes"] is None else [gib(report["memory_limit_bytes"])]
    return [
        ("finetune-toolkit", f"{report['version']}, commit {report['git_commit'] or NOT_AVAILABLE}"),
        ("platform", f"{report['platform']}, {report['libc']}"),
        ("Python", f"{report['python']} ({report['executable']})"),
        *installed.items(),
        ("not installed", ", ".join(absent) or "none of the optional packages"),
        ("GPUs", ", ".join(f"{count} × {gpu}" for gpu, count in gpus.items()) or "none"),
        ("visible GPUs", str(report["visible_gpus"])),
        ("driver", f"{drivers}, CUDA up to {report['driver_cuda_version'] or NOT_AVAILABLE}"),
        ("InfiniBand", "; ".join(report["infiniband"]) or "none"),
        ("network interfaces", ", ".join(report["network_interfaces"]) or "none"),
        *((name, version or "not found") for name, version in report["compilers"].items()),
        ("libaio.h", "found" if report["libaio_header"] else "not found"),
        ("compiled DeepSpeed ops", ", ".join(op for op, done in report["compiled_ops"].items() if done) or "none"),
        ("CPU", f"{report['cpu'] or NOT_AVAILABLE}, {report['cpu_count']} usable cores"),
        ("host memory", f"{gib(report['host_memory_bytes'])}, /dev/shm {gib(report['shared_memory_bytes'])}"),
        ("container limits", ", ".join(limits) or "none found"),
        *((name, _disk(disk)) for name, disk in report["disks"].items()),
        ("hub login", report["hub_login"] or "none"),
        *report["variables"].items(),
    ]


def _disk(disk: Mapping[str, Any]) -> str:
    filesystem = disk["filesystem"] or NOT_AVAILABLE
    return f"{disk['path']} ({filesystem}), {gib(disk['free_bytes'])} free of {gib(disk['total_bytes'])}"
