"""Check the rendezvous before torchrun, whose own failure does not say what is wrong.

    python -m toolkit.cluster.rendezvous node1 29500

Run on every node: the head's name must resolve, and on the head itself its port must be free.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence

from toolkit.cluster.node_setup import resolve, source_address
from toolkit.entry_point import exit_code_of
from toolkit.errors import ToolkitError

RESOLVE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 where this node can take part; print two lines and return 2 where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.cluster.rendezvous", description=(__doc__ or "")[:76])
    parser.add_argument("head", help="host name of the node with the rendezvous")
    parser.add_argument("port", type=int, help="port of --rdzv-endpoint")
    parser.add_argument("--wait-seconds", type=float, default=RESOLVE_SECONDS, help="time for the name to appear")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: check_rendezvous(options.head, options.port, seconds=options.wait_seconds))


def check_rendezvous(head: str, port: int, *, seconds: float = RESOLVE_SECONDS) -> None:
    """Raise ToolkitError where the head does not resolve from this node, or is this node and its port is taken."""
    if not 0 < port < 2**16:
        raise ToolkitError(f"port is {port}, expected 1 to 65535", hint="29500 is torchrun's own default")
    address = resolve(head, seconds=seconds)
    if ipaddress.ip_address(address).is_loopback or source_address(address) == address:  # this node is the head
        check_port(head, address, port)


def check_port(head: str, address: str, port: int) -> None:
    """Raise ToolkitError for a port that this node cannot listen on; the connections of an earlier job do not count."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise ToolkitError(
                f"port {port} of the head {head} {what}",
                hint=f"`ss -ltnp 'sport = :{port}'` shows what listens there; or another port in `--rdzv-endpoint`",
            ) from None


if __name__ == "__main__":
    sys.exit(main())
