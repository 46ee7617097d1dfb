"""Checks with `--long`: NVIDIA's own diagnostics, and an all-reduce between the GPUs of the node."""

from __future__ import annotations

import re
import shutil

from toolkit.doctor.checks import ERROR, WARNING, Outcome, node_check
from toolkit.doctor.node_readings import NodeReadings, NotMeasured
from toolkit.doctor.speed_probe import PAYLOAD_BYTES, measure_all_reduce, run_program
from toolkit.hardware.gpu_table import GIGA, Gpu, common_gpu
from toolkit.hardware.gpus import count_gpus
from toolkit.plan.collectives import Collective
from toolkit.plan.interconnect import Interconnect
from toolkit.versions import installed_version

DCGM = "https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/"


@node_check(
    threshold="a test fails",
    source=f"{DCGM}dcgm-diagnostics.html",
    long=True,
)
def dcgm(node: NodeReadings) -> Outcome:
    """NVIDIA's diagnostics where they are installed, `dcgmi diag -r 2`: memory, PCIe, software."""
    node.gpus()
    if shutil.which("dcgmi") is None:
        raise NotMeasured(f"dcgmi is not installed: {DCGM}getting-started.html")
    code, printed = run_program(["dcgmi", "diag", "-r", "2"])
    failed = failed_tests(printed)
    outcome = Outcome({"exit_code": code, "failed": failed})
    if code != 0 or failed:
        last = (printed.strip().splitlines() or ["it printed nothing"])[-1]
        value, fix = ", ".join(failed) or f"exit code {code}: {last}", "`dcgmi diag -r 2` shows GPU and reason"
        outcome.add(ERROR, "NVIDIA's diagnostics fail", value=value, expected="all tests pass", fix=fix)
    return outcome


def failed_tests(printed: str) -> list[str]:
    """Return the tests that failed in the table of `dcgmi diag`.

    >>> failed_tests("| PCIe        | Pass - All |\\n| GPU Memory  | Fail - GPU: 3 |")
    ['GPU Memory: Fail - GPU: 3']
    """
    rows = re.findall(r"^\|\s*(\S.*?)\s*\|\s*(Fail.*?)\s*\|$", printed, re.MULTILINE)
    return [f"{test}: {result}" for test, result in rows]


@node_check(
    threshold="it fails or adds up wrongly; slower than the slow end of the planner's table",
    source="`toolkit/plan/interconnect.py`; bus bandwidth as in "
    "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
    long=True,
)
def all_reduce(node: NodeReadings) -> Outcome:
    """Bus bandwidth of an all-reduce of 256 MiB: by nccl-tests' `all_reduce_perf` or by torch between all GPUs, by
    torch and gloo between two processes on a CPU.
    """
    gpus = count_gpus()
    if gpus == 1:
        raise NotMeasured("one GPU")
    if installed_version("torch") is None and shutil.which("all_reduce_perf") is None:
        raise NotMeasured("neither torch nor nccl-tests is installed")
    result = measure_all_reduce(gpus)
    kind = common_gpu(node.gpu_names) if gpus else None
    expected = slowest_bus_bandwidth(kind, gpus) if kind else None
    bandwidth = result.bus_bytes_per_second
    outcome = Outcome(
        {
            "measured_by": result.measured_by,
            "ranks": result.ranks,
            "payload_bytes": PAYLOAD_BYTES,
            "bus_bytes_per_second": None if bandwidth is None else round(bandwidth),
            "planned_at_least_bytes_per_second": None if expected is None else round(expected),
            "remark": None if gpus else "two processes on the CPU: says nothing about a GPU",
        }
    )
    if bandwidth is None:
        what, fix = f"the all-reduce of {result.ranks} processes fails", "NCCL_DEBUG=INFO toolkit doctor --long"
        outcome.add(ERROR, what, value=result.failure, expected="a result", fix=fix)
    elif expected and bandwidth < expected:
        outcome.add(
            WARNING,
            f"the all-reduce of {gpus} GPUs is slower than the planner's range",
            value=f"{bandwidth / GIGA:.0f} GB/s",
            expected=f"at least {expected / GIGA:.0f} GB/s",
            fix="NCCL_DEBUG=INFO toolkit doctor --long; see gpu-links and nccl-variables",
        )
    return outcome


def slowest_bus_bandwidth(gpu: Gpu, world_size: int) -> float:
    """Return the bus bandwidth at the slow end of the planner's range, on one node.

    >>> from toolkit.hardware.gpu_table import find_gpu
    >>> round(slowest_bus_bandwidth(find_gpu("h100"), 8) / 1e9)
    107
    """
    collective = Collective(name="all_reduce", purpose="doctor", payload_bytes=PAYLOAD_BYTES, group_size=world_size)
    node = Interconnect(gpu=gpu, world_size=world_size, gpus_per_node=world_size)
    return collective.sent_bytes / node.seconds(collective)[1]
