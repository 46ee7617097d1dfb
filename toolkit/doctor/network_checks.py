"""Checks of the network: RDMA ports, the name of this node, ports of the rendezvous, NCCL's variables."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from toolkit.doctor.checks import ERROR, NOTE, WARNING, NodeFinding, Outcome, node_check
from toolkit.doctor.infiniband import RdmaPort
from toolkit.doctor.node_readings import NodeReadings, NotMeasured

NCCL_VARIABLES = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
# torch's defaults: c10d rendezvous (torch/distributed/elastic), and the master port of `torchrun` without one.
RENDEZVOUS_PORTS = (29400, 29500)
# Variables that switch off a fast path, and the value that does.
SLOW_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"}
EFA_PLUGINS = ("/opt/amazon/ofi-nccl/lib*/**/libnccl-net*.so", "/opt/aws-ofi-nccl/lib*/libnccl-net*.so")


@node_check(
    "rdma",
    looks_at="ports of InfiniBand, RoCE and EFA: state, rate, links that went down, GPUDirect's module",
    threshold="a port not Active; a rate below the others; EFA without NCCL's plugin; no nvidia_peermem",
    source="https://github.com/linux-rdma/rdma-core/blob/master/infiniband-diags/man/ibstat.8.in.rst, "
    "https://docs.nvidia.com/cuda/gpudirect-rdma/",
)
def rdma(node: NodeReadings) -> Outcome:
    """Find ports that carry nothing, or less than they could."""
    ports = node.rdma_ports
    if not ports:
        raise NotMeasured("no RDMA port: several nodes would use TCP")
    modules = Path("/proc/modules").read_text("utf-8") if Path("/proc/modules").exists() else ""
    found = [*port_findings(ports)]
    if node.has_gpu and "nvidia_peermem" not in modules and not any(port.is_efa for port in ports):
        found.append(
            NodeFinding(
                level=NOTE,
                what="nvidia_peermem is not loaded: without it or DMA-BUF, data of the GPU passes through host memory",
                value="not loaded",
                expected="loaded, or a kernel with DMA-BUF",
                fix="modprobe nvidia-peermem; `NCCL_DEBUG=INFO` prints `GDRDMA` where it works",
            )
        )
    if any(port.is_efa for port in ports) and not _has_efa_plugin():
        found.append(
            NodeFinding(
                level=ERROR,
                what="EFA without NCCL's plugin: nodes would use TCP",
                value="no libnccl-net.so",
                expected="aws-ofi-nccl",
                fix="install aws-ofi-nccl and add its folder to LD_LIBRARY_PATH",
            )
        )
    measured = {f"{port.device}/{port.port}": f"{port.state}, {port.rate}, {port.link_layer}" for port in ports}
    return Outcome(measured=measured, findings=tuple(found))


def port_findings(ports: list[RdmaPort]) -> list[NodeFinding]:
    """Return what is wrong with ports, by their states and rates."""
    found = []
    active = [port for port in ports if port.state == "Active"]
    best = max((port.gigabits_per_second or 0 for port in active), default=0)
    for port in ports:
        name = f"{port.device} port {port.port}"
        if port.state != "Active":
            found.append(
                NodeFinding(
                    level=WARNING if active else ERROR,
                    what=f"{name} is not active",
                    value=f"{port.state}, {port.physical_state}",
                    expected="Active, LinkUp",
                    fix="Initializing: start the subnet manager; Polling or Down: check cable and switch port; "
                    "unused: leave it out with NCCL_IB_HCA",
                )
            )
        elif (port.gigabits_per_second or 0) < best and port.link_layer == "InfiniBand":
            found.append(
                NodeFinding(
                    level=WARNING,
                    what=f"{name} is slower than the other ports",
                    value=str(port.rate),
                    expected=f"{best:g} Gb/sec",
                    fix="check cable and switch port: `iblinkinfo`",
                )
            )
        if port.link_downed:
            found.append(_went_down(port))
    return found


def _went_down(port: RdmaPort) -> NodeFinding:
    return NodeFinding(
        level=WARNING,
        what=f"the link of {port.device} port {port.port} has gone down since the driver was loaded",
        value=f"{port.link_downed} ×",
        expected="0",
        fix="check cable and switch port: `perfquery -x`; a job that ran then has lost its connections",
    )


def _has_efa_plugin() -> bool:
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    named = any(found for folder in folders for found in folder.glob("libnccl-net*.so"))
    return named or any(found for pattern in EFA_PLUGINS for found in Path("/").glob(pattern.lstrip("/")))


@node_check(
    "hostname",
    looks_at="address that this node's own name resolves to, and addresses of its interfaces",
    threshold="it does not resolve, or to a loopback address: other nodes would be told a wrong address",
    source="https://docs.pytorch.org/docs/stable/elastic/run.html (`--local-addr`)",
)
def hostname(_: NodeReadings) -> Outcome:
    """Find a name that other nodes could not connect to."""
    name = socket.gethostname()
    up = {card for card, state in psutil.net_if_stats().items() if state.isup}
    addresses = {
        card: [found.address for found in listed if found.family == socket.AF_INET]
        for card, listed in psutil.net_if_addrs().items()
        if card in up and card != "lo"
    }
    addresses = {card: listed for card, listed in addresses.items() if listed}
    try:
        resolved: str | None = socket.gethostbyname(name)
    except OSError:
        resolved = None
    measured = {"hostname": name, "resolves_to": resolved, "addresses": addresses}
    if resolved is not None and not ipaddress.ip_address(resolved).is_loopback:
        return Outcome(measured=measured)
    own = next((listed[0] for listed in addresses.values()), "ADDRESS")
    found = NodeFinding(
        level=WARNING,
        what="this node's name is of no use to other nodes",
        value=f"{name} → {resolved or 'does not resolve'}",
        expected="an address of one of its interfaces",
        fix=f"name the address: `torchrun --local-addr {own}`, and as the head `--rdzv-endpoint {own}:29500`",
    )
    return Outcome(measured=measured, findings=(found,))


@node_check(
    "ports",
    looks_at="ports that the rendezvous needs on the head node",
    threshold="another process listens on one",
    source="torch's defaults, 29400 and 29500: https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def ports(node: NodeReadings) -> Outcome:
    """Find ports that are taken."""
    taken = {port: error for port in node.options.port or RENDEZVOUS_PORTS if (error := _cannot_listen(port))}
    found = [
        NodeFinding(
            level=WARNING,
            what=f"port {port} cannot be used",
            value=error,
            expected="free",
            fix=f"`ss -ltnp sport = :{port}` shows who has it; or use another: `--rdzv-endpoint HEAD:OTHER`",
        )
        for port, error in taken.items()
    ]
    checked = list(node.options.port or RENDEZVOUS_PORTS)
    return Outcome(measured={"checked": checked, "taken": list(taken)}, findings=tuple(found))


def _cannot_listen(port: int) -> str | None:
    """Why this process cannot listen on a port of all interfaces; None if it can. A port in TIME_WAIT can be used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return None


@node_check(
    "nccl-variables",
    looks_at="variables that switch off a fast path of NCCL, and interfaces that do not exist",
    threshold="one is set: it may be left over from a test",
    source=NCCL_VARIABLES,
)
def nccl_variables(_: NodeReadings) -> Outcome:
    """Find settings that slow every job down."""
    found = [*variable_findings(os.environ, set(psutil.net_if_addrs()))]
    names = [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]
    return Outcome(measured={"set": sorted(names)}, findings=tuple(found))


def variable_findings(environment: Mapping[str, str], interfaces: set[str]) -> list[NodeFinding]:
    """Return the variables that slow down or break communication."""
    found = [
        NodeFinding(
            level=WARNING,
            what=f"{name} switches off a fast path",
            value=environment[name],
            expected="not set",
            fix=f"unset {name}",
        )
        for name, value in SLOW_SETTINGS.items()
        if environment.get(name) == value
    ]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        words = [word.lstrip("=") for word in environment.get(name, "").split(",") if word]
        if words and not words[0].startswith("^") and not any(card.startswith(w) for card in interfaces for w in words):
            found.append(
                NodeFinding(
                    level=ERROR,
                    what=f"{name} names no interface of this node",
                    value=environment[name],
                    expected=", ".join(sorted(interfaces - {"lo"})),
                    fix=f"unset {name}, or name one of them",
                )
            )
    return found
