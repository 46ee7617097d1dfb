"""The head's name and port are checked before torchrun; between machines in test_refusals.py."""

from __future__ import annotations

import socket

import pytest

from toolkit.cluster.rendezvous import check_rendezvous, main
from toolkit.errors import ToolkitError


def test_a_free_port_of_this_node_is_accepted_and_one_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ToolkitError, match=f"port {port} of the head localhost is in use"):
            check_rendezvous("localhost", port)
    check_rendezvous("localhost", port)


def test_a_head_without_an_address_is_refused_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-host.invalid", "29500", "--wait-seconds", "0"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: the head 'no-such-host.invalid' does not resolve from ")
    assert said[1].startswith("  hint: ")


@pytest.mark.parametrize("port", [0, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ToolkitError, match=f"port is {port}, expected 1 to 65535"):
        check_rendezvous("localhost", port)
