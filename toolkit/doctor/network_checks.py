"""Checks of the network: RDMA ports, the name of this node, ports of the rendezvous, NCCL's variables."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

import psutil

from toolkit.doctor.checks import ERROR, WARNING, Outcome, node_check
from toolkit.doctor.node_readings import NodeReadings, NotMeasured

ELASTIC = "https://docs.pytorch.org/docs/stable/elastic/run.html"
# torch's defaults: c10d rendezvous (torch/distributed/elastic), and the master port of `torchrun` without one.
RENDEZVOUS_PORTS = (29400, 29500)
# Variables that switch off a fast path, and the value that does.
SLOW_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"}


@node_check(
    threshold="a port not active; an InfiniBand port slower than the others",
    source="https://docs.kernel.org/infiniband/sysfs.html",
)
def rdma(node: NodeReadings) -> Outcome:
    """Ports of InfiniBand, RoCE and EFA: state and rate."""
    ports = node.rdma_ports
    if not ports:
        raise NotMeasured("no RDMA port: several nodes would use TCP")
    outcome = Outcome({port.name: f"{port.state}, {port.rate}, {port.link_layer}" for port in ports})
    active = [port for port in ports if port.state == "ACTIVE"]
    fastest = max((port.gigabits_per_second for port in active), default=0.0)
    for port in ports:
        if port not in active:
            outcome.add(
                WARNING if active else ERROR,
                f"{port.name} is not active",
                value=port.state,
                expected="ACTIVE",
                fix="INIT: start the subnet manager; DOWN: check cable and switch port, or leave it out (NCCL_IB_HCA)",
            )
        elif port.gigabits_per_second < fastest and port.link_layer == "InfiniBand":
            what, fix = f"{port.name} is slower than the other ports", "check cable and switch port: `iblinkinfo`"
            outcome.add(WARNING, what, value=port.rate, expected=f"{fastest:g} Gb/sec", fix=fix)
    return outcome


@node_check(
    threshold="it does not resolve, or to a loopback address: other nodes would be told a wrong address",
    source=f"{ELASTIC} (`--local-addr`)",
)
def hostname(_: NodeReadings) -> Outcome:
    """Address that this node's own name resolves to, and addresses of its interfaces."""
    name, resolved = socket.gethostname(), None
    addresses = dict(_addresses())
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname(name)
    outcome = Outcome({"hostname": name, "resolves_to": resolved, "addresses": addresses})
    if resolved is None or ipaddress.ip_address(resolved).is_loopback:
        address = next(iter(addresses.values()), "ADDRESS")
        outcome.add(
            WARNING,
            "other nodes cannot connect to this node by its name",
            value=f"{name} → {resolved or 'does not resolve'}",
            expected="an address of one of its interfaces",
            fix=f"name the address: `torchrun --local-addr {address}`; as the head `--rdzv-endpoint {address}:29500`",
        )
    return outcome


def _addresses() -> Iterator[tuple[str, str]]:
    """The first IPv4 address of each interface that is up."""
    states = psutil.net_if_stats()
    for card, listed in psutil.net_if_addrs().items():
        found = [address.address for address in listed if address.family == socket.AF_INET]
        if found and card != "lo" and card in states and states[card].isup:
            yield card, found[0]


@node_check(threshold="another process listens on one", source=f"torch's defaults, 29400 and 29500: {ELASTIC}")
def ports(node: NodeReadings) -> Outcome:
    """Ports that the rendezvous needs on the head node."""
    checked = node.options.port or RENDEZVOUS_PORTS
    taken = {port: error for port in checked if (error := _cannot_listen(port))}
    outcome = Outcome({"checked": list(checked), "taken": list(taken)})
    for port, error in taken.items():
        fix = f"`ss -ltnp sport = :{port}` shows who has it; or use another: `--rdzv-endpoint HEAD:OTHER`"
        outcome.add(WARNING, f"port {port} cannot be used", value=error, expected="free", fix=fix)
    return outcome


def _cannot_listen(port: int) -> str | None:
    """Why this process cannot listen on a port of all interfaces; None if it can. A port in TIME_WAIT can be used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return None


@node_check(
    threshold="one is set: it may be left over from a test",
    source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
)
def nccl_variables(_: NodeReadings) -> Outcome:
    """Variables that switch off a fast path of NCCL, and interfaces that do not exist."""
    outcome = Outcome({"set": sorted(name for name in os.environ if name.startswith(("NCCL_", "GLOO_")))})
    for name, slow in SLOW_SETTINGS.items():
        if os.environ.get(name) == slow:
            outcome.add(
                WARNING, f"{name} switches off a fast path", value=slow, expected="not set", fix=f"unset {name}"
            )
    interfaces = set(psutil.net_if_addrs())
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(name, "")
        words = tuple(word.lstrip("=") for word in value.split(",") if word)
        if words and not words[0].startswith("^") and not any(card.startswith(words) for card in interfaces):
            outcome.add(
                ERROR,
                f"{name} names no interface of this node",
                value=value,
                expected=", ".join(sorted(interfaces - {"lo"})),
                fix=f"unset {name}, or name one of them",
            )
    return outcome
