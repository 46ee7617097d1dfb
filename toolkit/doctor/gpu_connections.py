"""Checks of how GPUs are connected: PCIe, NVLink, peer access. Nothing here uses a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.doctor.checks import NOTE, WARNING, NodeFinding, Outcome, node_check
from toolkit.doctor.collectors import output_of
from toolkit.doctor.gpu_checks import DEBUG_GUIDE, gpu_check, is_below
from toolkit.doctor.node_readings import NodeReadings, NotMeasured
from toolkit.doctor.nvidia_smi import GpuState, parse_nvlink_errors, parse_nvlink_status, parse_peer_access
from toolkit.doctor.xid import CATALOG
from toolkit.hardware.gpu_table import common_gpu


@gpu_check(
    "gpu-pcie",
    looks_at="PCIe lanes and generation; an idle GPU lowers its generation, so only the possible one counts",
    threshold="fewer lanes than the GPU has: a warning; a slot of an older generation: a note",
    source=f"{DEBUG_GUIDE}#how-to-check-if-your-gpus-pcie-generation-is-supported",
    measures=lambda gpu: {"width": gpu.pcie_width, "max_width": gpu.max_pcie_width, "replays": gpu.pcie_replays},
)
def gpu_pcie(gpu: GpuState) -> Iterator[NodeFinding]:
    """Find GPUs whose connection to the host is slower than they could use."""
    if is_below(gpu.pcie_width, gpu.max_pcie_width):
        yield NodeFinding(
            level=WARNING,
            what=f"{gpu.label}: PCIe runs with fewer lanes",
            value=f"{gpu.pcie_width}x",
            expected=f"{gpu.max_pcie_width}x",
            fix="reseat the card or choose a slot with all lanes; offload and checkpoints suffer most",
        )
    if is_below(gpu.host_pcie_generation, gpu.device_pcie_generation):
        yield NodeFinding(
            level=NOTE,
            what=f"{gpu.label}: the slot or a switch has an older PCIe generation",
            value=f"generation {gpu.host_pcie_generation}",
            expected=f"generation {gpu.device_pcie_generation}",
            fix="dmesg | grep -i 'limited by'   (names the bridge)",
        )


@node_check(
    "gpu-nvlink",
    looks_at="NVLink error counters, inactive links, and which pairs of GPUs have NVLink",
    threshold="a counter above 0; a link inactive; a pair without NVLink on GPUs that have it",
    source=f"{DEBUG_GUIDE}#how-to-check-error-counters-of-nvlink-links, {CATALOG} (Xid 74)",
)
def gpu_nvlink(node: NodeReadings) -> Outcome:
    """Find NVLinks that are down or unreliable."""
    gpus = node.gpus()
    errors = parse_nvlink_errors(output_of("nvidia-smi", "nvlink", "-e") or "")
    status = parse_nvlink_status(output_of("nvidia-smi", "nvlink", "--status") or "")
    inactive = [link for link, rate in status.items() if "inactive" in rate.lower()]
    found = [
        NodeFinding(
            level=WARNING,
            what=f"{link}: errors on the NVLink",
            value=", ".join(f"{count} {name}" for name, count in counters.items()),
            expected="0",
            fix="nvidia-smi nvlink -re   (sets them to 0); if they return in a run, report the GPU",
        )
        for link, counters in errors.items()
    ]
    if inactive:
        found.append(
            NodeFinding(
                level=WARNING,
                what="NVLinks are inactive",
                value=", ".join(inactive),
                expected="all active",
                fix="nvidia-smi topo -m; reset the GPUs, or reboot the node",
            )
        )
    gpu = common_gpu(gpu.name for gpu in gpus)
    if gpu is not None and gpu.nvlink_bytes_per_second and status:
        found += _without_nvlink(node)
    return Outcome(measured={"links": len(status), "inactive": inactive, "errors": errors}, findings=tuple(found))


def _without_nvlink(node: NodeReadings) -> Iterator[NodeFinding]:
    others = {pair: link for pair, link in node.topology.gpu_links.items() if not link.startswith("NV")}
    if others:
        yield NodeFinding(
            level=WARNING,
            what="pairs of GPUs without NVLink",
            value=", ".join(f"{first}-{second} {link}" for (first, second), link in list(others.items())[:8]),
            expected="NV# between all GPUs",
            fix="nvidia-smi nvlink --status; keep tensor parallelism to pairs with NVLink",
        )


@node_check(
    "gpu-peer-access",
    looks_at="pairs of GPUs that read each other's memory",
    threshold="a pair that cannot: NCCL copies through host memory",
    source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
)
def gpu_peer_access(node: NodeReadings) -> Outcome:
    """Find pairs of GPUs without peer-to-peer access."""
    if len(node.gpus()) < 2:
        raise NotMeasured("one GPU")
    pairs = parse_peer_access(output_of("nvidia-smi", "topo", "-p2p", "r") or "")
    if not pairs:
        raise NotMeasured("`nvidia-smi topo -p2p r` prints nothing")
    refused = {f"{first}-{second}": status for (first, second), status in pairs.items() if status != "OK"}
    found = NodeFinding(
        level=WARNING,
        what="pairs of GPUs have no peer access",
        value=", ".join(f"{pair} {status}" for pair, status in list(refused.items())[:8]),
        expected="OK",
        fix="turn off ACS in the BIOS and IOMMU in the kernel's command line; GeForce cards have none (CNS, GNS)",
    )
    return Outcome(measured={"pairs": len(pairs), "refused": refused}, findings=(found,) if refused else ())
