"""Checks of speed, with `--long`: matmul against the achievable figure, all-reduce against the interconnect table."""

from __future__ import annotations

from toolkit.doctor.checks import ERROR, OWN_CHOICE, WARNING, NodeFinding, Outcome, node_check
from toolkit.doctor.node_readings import NodeReadings
from toolkit.doctor.speed_probe import ACHIEVABLE_SOURCE, PAYLOAD_BYTES, NodeSpeed, achievable_matmul
from toolkit.hardware.gpu_table import GIGA, Gpu, known_gpu
from toolkit.plan.collectives import Collective
from toolkit.plan.interconnect import Interconnect
from toolkit.units import MIB

# "I have seen 5% and higher differences on an 8-gpu node" (the page of ACHIEVABLE_SOURCE).
MAX_SPREAD = 0.05
# Below this share of the achievable figure a GPU is not just of another torch version.
ACHIEVABLE_SHARE = 0.9
ON_CPU = "two processes on the CPU: says nothing about a GPU"


@node_check(
    "matmul",
    looks_at="bf16 matmul on all GPUs at once, in the shape of the published figure; fp32 in two processes on a CPU",
    threshold="more than 5 % between the GPUs; below 90 % of the achievable figure (H100 and H200: 794.5 TFLOP/s)",
    source=f"{ACHIEVABLE_SOURCE}; 90 % is {OWN_CHOICE}",
    long=True,
)
def matmul(node: NodeReadings) -> Outcome:
    """Find GPUs that compute more slowly than they should."""
    speed, name = node.speed, _gpu_name(node)
    known = achievable_matmul(name) if speed.device == "cuda" else None
    measured = {
        "device": speed.device,
        "shape": list(speed.shape),
        "dtype": "bf16" if speed.device == "cuda" else "fp32",
        "tflops": [round(value, 3) for value in speed.matmul_tflops],
        "achievable_tflops": known.tflops if known else None,
    }
    measured |= {"remark": ON_CPU} if speed.device == "cpu" else {}
    if not speed.matmul_tflops:
        return Outcome(measured=measured, findings=(_failed("the matmul fails", speed),))
    findings = matmul_findings(speed.matmul_tflops, known.tflops if known else None) if speed.device == "cuda" else ()
    return Outcome(measured=measured, findings=tuple(findings))


def matmul_findings(tflops: tuple[float, ...], achievable: float | None) -> list[NodeFinding]:
    """Return what is wrong with the figures of a node's GPUs, in the order of the GPUs."""
    found = []
    slowest, fastest = min(tflops), max(tflops)
    if slowest < fastest * (1 - MAX_SPREAD):
        found.append(
            NodeFinding(
                level=WARNING,
                what=f"GPU {tflops.index(slowest)} computes more slowly than the others, and all wait for it",
                value=f"{slowest:.0f} TFLOP/s, {1 - slowest / fastest:.0%} below GPU {tflops.index(fastest)}",
                expected=f"within {MAX_SPREAD:.0%} of {fastest:.0f} TFLOP/s",
                fix="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER during a run; report the GPU if it stays slower",
            )
        )
    if achievable is not None and fastest < achievable * ACHIEVABLE_SHARE:
        found.append(
            NodeFinding(
                level=WARNING,
                what="all GPUs compute more slowly than the same GPU elsewhere",
                value=f"{fastest:.0f} TFLOP/s",
                expected=f"at least {achievable * ACHIEVABLE_SHARE:.0f} of {achievable:.0f} TFLOP/s",
                fix="check power limit, clocks and cooling (the checks gpu-clocks, gpu-throttling), then torch's CUDA",
            )
        )
    return found


@node_check(
    "all-reduce",
    looks_at=f"bus bandwidth of an all-reduce of {PAYLOAD_BYTES // MIB} MiB (fp32), the same on every node; "
    "NCCL between all GPUs, or gloo between two processes on a CPU",
    threshold="it fails or adds up wrongly; slower than the slow end of the planner's table",
    source="`toolkit/plan/interconnect.py`; bus bandwidth as in "
    "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
    long=True,
)
def all_reduce(node: NodeReadings) -> Outcome:
    """Find communication that fails, or is slower than the planner assumes."""
    speed = node.speed
    bandwidth = speed.bus_bytes_per_second
    gpu = known_gpu(_gpu_name(node) or "") if speed.device == "cuda" else None
    expected = slowest_bus_bandwidth(gpu, speed.world_size) if gpu and speed.world_size > 1 else None
    measured = {
        "backend": "nccl" if speed.device == "cuda" else "gloo",
        "ranks": speed.world_size,
        "payload_bytes": PAYLOAD_BYTES,
        "seconds": speed.all_reduce_seconds,
        "bus_bytes_per_second": None if bandwidth is None else round(bandwidth),
        "planned_at_least_bytes_per_second": None if expected is None else round(expected),
    }
    measured |= {"remark": ON_CPU} if speed.device == "cpu" else {}
    if speed.failure:
        return Outcome(measured=measured, findings=(_failed("the all-reduce fails", speed),))
    if bandwidth is None or expected is None or bandwidth >= expected:
        return Outcome(measured=measured)
    slow = NodeFinding(
        level=WARNING,
        what=f"the all-reduce of {speed.world_size} GPUs is slower than the planner's range",
        value=f"{bandwidth / GIGA:.0f} GB/s",
        expected=f"at least {expected / GIGA:.0f} GB/s",
        fix="NCCL_DEBUG=INFO toolkit doctor --long; see gpu-nvlink, gpu-peer-access and nccl-variables",
    )
    return Outcome(measured=measured, findings=(slow,))


def slowest_bus_bandwidth(gpu: Gpu, world_size: int) -> float:
    """Return the bus bandwidth at the slow end of the planner's range, on one node.

    >>> from toolkit.hardware.gpu_table import find_gpu
    >>> round(slowest_bus_bandwidth(find_gpu("h100"), 8) / 1e9)
    107
    """
    collective = Collective(name="all_reduce", purpose="doctor", payload_bytes=PAYLOAD_BYTES, group_size=world_size)
    node = Interconnect(gpu=gpu, world_size=world_size, gpus_per_node=world_size)
    return collective.sent_bytes / node.seconds(collective)[1]


def _gpu_name(node: NodeReadings) -> str | None:
    return node.gpu_query.gpus[0].name if node.gpu_query and node.gpu_query.gpus else None


def _failed(what: str, speed: NodeSpeed) -> NodeFinding:
    return NodeFinding(
        level=ERROR,
        what=f"{what} ({speed.world_size} processes, {speed.device})",
        value=speed.failure or "no result",
        expected="a result",
        fix="NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL toolkit doctor --long",
    )
