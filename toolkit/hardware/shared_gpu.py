"""Several real ranks on one GPU: the variables of each rank, and the NCCL version that decides them. No torch.

>>> launched = {"TOOLKIT_RANKS_PER_GPU": "2", "RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "4,6"}
>>> rank_variables(launched, nccl=(2, 30, 7))["CUDA_VISIBLE_DEVICES"]
'6'

NCCL refuses two ranks of one host on one device (`init.cc`). With host ids of their own they communicate through
sockets, as between hosts; from 2.30 on, a variable allows them on one host.

Each rank is a node of its own by its variables: one device is visible, and `LOCAL_RANK` is 0. So accelerate, DDP's
`device_ids`, DeepSpeed, torch's device meshes and a script's `cuda:$LOCAL_RANK` all use the same device.
"""

import contextlib
import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.hardware.gpus import installed_gpus

RANKS_PER_GPU_VARIABLE, WAY_VARIABLE = "TOOLKIT_RANKS_PER_GPU", "TOOLKIT_RANKS_PER_GPU_BY"
MOST_RANKS_PER_GPU = 64
# Each way by its name, and what its ranks have in their environment, unless the user has set it.
WAYS = {
    "one-host": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "hosts": {
        **{"NCCL_HOSTID": "toolkit-rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"},
        **{"NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"},
    },
}
ONE_HOST_SINCE = (2, 30)
# NCCL's own words: up to 2.29, and since.
REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")


def sharing_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks share this rank's GPU; None where none does, and for a process that is no rank."""
    text = environment.get(RANKS_PER_GPU_VARIABLE) or "1"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS_PER_GPU:
        expected = f"expected a whole number from 1 to {MOST_RANKS_PER_GPU}"
        raise ToolkitError(f"{RANKS_PER_GPU_VARIABLE} is {text[:20]!r}, {expected}", hint="`--ranks-per-gpu 2`")
    return int(text) if int(text) > 1 and "RANK" in environment else None


def rank_variables(environment: Mapping[str, str], *, nccl: tuple[int, ...] | None) -> dict[str, str]:
    """Return the variables that put rank r of this node on device r // N; empty where ranks do not share GPUs.

    Raises ToolkitError for fewer GPUs than that needs, and for several nodes.
    """
    if (ranks := sharing_ranks(environment)) is None:
        return {}
    if environment.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ToolkitError("--ranks-per-gpu is for the GPUs of one node", hint="leave it out on several nodes")
    local_rank, size = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = installed_gpus() if visible is None else [word for word in visible.split(",") if word.strip()]
    if local_rank // ranks >= len(devices):
        hint = f"`--ranks-per-gpu {-(-size // len(devices))}`" if devices else "leave `--ranks-per-gpu` out"
        needed = f"{size} processes with {ranks} ranks per GPU need {-(-size // ranks)} GPUs"
        raise ToolkitError(f"{needed}, and {len(devices)} are visible here", hint=hint)
    way = environment.get(WAY_VARIABLE) or default_way(nccl)
    if way not in WAYS:
        raise ToolkitError(f"{WAY_VARIABLE} is {way[:20]!r}, expected {' or '.join(WAYS)}")
    chosen = {name: text.format(rank=environment["RANK"]) for name, text in WAYS[way].items()}
    place = {"CUDA_VISIBLE_DEVICES": devices[local_rank // ranks], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return place | {name: text for name, text in chosen.items() if name not in environment}


def default_way(nccl: tuple[int, ...] | None) -> str:
    """Return the way of a version of NCCL; of an unknown one, that of older versions."""
    return "one-host" if nccl is not None and nccl >= ONE_HOST_SINCE else "hosts"


def refused_by_nccl(message: str) -> ToolkitError | None:
    """Return NCCL's refusal of several ranks on one GPU with what to do; None for another message."""
    if not any(words in message for words in REFUSALS):
        return None
    hint = "one process per GPU; or `--ranks-per-gpu 2`: two real ranks on each, without speeds"
    if sharing_ranks() is not None:
        hint = f"`export {WAY_VARIABLE}=hosts`, or NCCL 2.30; or under ddp `-- --ddp_backend gloo`"
    return ToolkitError("NCCL refuses several ranks on one GPU", hint=hint)


def nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL that torch loads, by the library itself: torch names the one it was built with."""
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no library
        if ctypes.CDLL(nccl_library()).ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10_000, number.value // 100 % 100, number.value % 100
    return None


def nccl_library() -> str | None:
    """Return the NCCL of torch's own package, or the system's; None without one."""
    with contextlib.suppress(ModuleNotFoundError):  # of the package `nvidia`
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec and spec.submodule_search_locations) or ():
            if (library := Path(folder, "lib", "libnccl.so.2")).is_file():
                return str(library)
    return ctypes.util.find_library("nccl")
