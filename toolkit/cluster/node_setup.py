"""What a node does before torchrun starts on it: check the head and its port, and choose the network interface.

    settings=$(python -m toolkit.cluster.node_setup --head node1 --port 29500 --gpus 8) && eval "$settings"

Shell assignments go to stdout: the node's address for torchrun's `--local-addr`, and the interface for NCCL and gloo.
Everything else goes to stderr. Every engine's job file runs this, inside the container where there is one.
"""

import argparse
import contextlib
import errno
import ipaddress
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

from toolkit.entry_point import exit_code_of, print_message
from toolkit.errors import ToolkitError
from toolkit.hardware.gpus import count_gpus
from toolkit.job.argument_values import Range, check_range

ADDRESS_VARIABLE = "TOOLKIT_NODE_ADDRESS"
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
RESOLVE_SECONDS = 120.0  # the DNS names of a Kubernetes job's pods appear a few seconds after the pods
RETRY_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print this node's settings as shell assignments; two lines and exit code 2 where the node cannot take part."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.cluster.node_setup", description=(__doc__ or "")[:109])
    parser.add_argument("--head", required=True, help="host name of the node with the rendezvous")
    parser.add_argument("--port", type=int, help="port of the rendezvous, which must be free on the head")
    parser.add_argument("--attempt", help="torchrun's --rdzv-id: another torchrun of the same may have the port")
    parser.add_argument("--peer", help="another node, to which the head's own route leads")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the job needs on each node")
    parser.add_argument(
        "--wait-seconds", type=float, default=RESOLVE_SECONDS, help="time for the head's name to appear"
    )
    options = parser.parse_args(argv)

    def work() -> None:
        found = count_gpus() if options.gpus else 0
        if found < options.gpus:
            raise ToolkitError(
                f"{socket.gethostname()} has {found} visible GPUs, the job starts {options.gpus} ranks on each node",
                hint="check the allocation (`nvidia-smi -L`), or write the job file with another `--gpus-per-node`",
            )
        head = resolve(options.head, seconds=options.wait_seconds)
        if options.port is not None and is_this_node(head):
            check_port(options.head, options.port, attempt=options.attempt)
        address = local_address(head, peer=options.peer)
        interface = interface_of(address)
        for name, value in node_settings(address, interface).items():
            print(f"export {name}={shlex.quote(value)}")
        shown = " ".join(f"{name}={os.environ.get(name, interface) or 'unset'}" for name in INTERFACE_VARIABLES)
        print_message(f"{socket.gethostname()}: address {address}, head {options.head} ({head}), {shown}")

    return exit_code_of(work)


def resolve(name: str, *, seconds: float) -> str:
    """Return the address of a host, looked up for this many seconds. Raises ToolkitError if it does not resolve."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][4][0])
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ToolkitError(
                    f"the head {name!r} does not resolve from {socket.gethostname()}: {error.strerror}",
                    hint=f"`getent hosts {name}` on this node; add it to DNS or /etc/hosts, or use its address",
                ) from None
        time.sleep(RETRY_SECONDS)


def is_this_node(address: str) -> bool:
    """Return True for an address of this node, to which no packet leaves it."""
    return ipaddress.ip_address(address).is_loopback or source_address(address) == address


def check_port(head: str, port: int, *, attempt: str | None) -> None:
    """Raise ToolkitError for a port on which this node, the head, cannot listen.

    Nodes that share a host share its ports: a torchrun of the same attempt that listens there is the rendezvous.
    """
    check_range("--port", port, Range(lowest=1, highest=65535))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier job do not count
        try:
            probe.bind(("", port))  # as torch's store does
        except OSError as error:
            what = f"cannot be used: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                process, command = listener_on(port)
                if attempt is not None and ("--rdzv-id", attempt) in pairwise(command):
                    return
                what = f"is in use{process}"
            hint = f"`ss -ltnp 'sport = :{port}'` on it; end that process, or use another port"
            raise ToolkitError(f"port {port} of the head {head} {what}", hint=hint) from None


def listener_on(port: int) -> tuple[str, list[str]]:
    """Return the process that listens on a port, as text, and its command; nothing if this user may not see it."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr[1:] == (port,) and found.pid is not None:
                process = psutil.Process(found.pid)
                return f" by process {process.pid} ({process.name()})", process.cmdline()
    return "", []


def local_address(head: str, *, peer: str | None) -> str:
    """Return the source address of this node's route to the head; there, of its route to `peer`."""
    return source_address(resolve(peer, seconds=0) if peer and is_this_node(head) else head)


def source_address(target: str) -> str:
    """Return the source address of the route to an address; no packet is sent. Raises ToolkitError without a route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # a UDP socket only chooses its route; any port will do
        except OSError as error:
            raise ToolkitError(
                f"{socket.gethostname()} has no route to {target}: {error.strerror}",
                hint=f"`ip route get {target}` on this node",
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None for the loopback and in odd namespaces."""
    import psutil

    if ipaddress.ip_address(address).is_loopback:
        return None
    interfaces = psutil.net_if_addrs().items()
    found = (name for name, every in interfaces for each in every if each.address.partition("%")[0] == address)
    return next(found, None)


def node_settings(address: str, interface: str | None) -> dict[str, str]:
    """Return the variables to set; an interface that the user has chosen stays.

    >>> node_settings("10.0.0.2", None)
    {'TOOLKIT_NODE_ADDRESS': '10.0.0.2'}
    """
    chosen = {} if interface is None else {name: interface for name in INTERFACE_VARIABLES if name not in os.environ}
    return {ADDRESS_VARIABLE: address, **chosen}


if __name__ == "__main__":
    sys.exit(main())
