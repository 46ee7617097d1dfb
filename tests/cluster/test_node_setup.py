"""What each node checks and chooses before torchrun starts on it."""

import socket
import subprocess
import sys

import psutil
import pytest

from toolkit.cluster import node_setup
from toolkit.errors import ToolkitError

TORCHRUN = (
    "import socket, time; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"
)


def own_addresses() -> dict[str, str]:
    every = [(name, each) for name, addresses in psutil.net_if_addrs().items() for each in addresses]
    every = [(name, each) for name, each in every if each.family == socket.AF_INET]
    return {name: each.address for name, each in every if not each.address.startswith("127.")}


def test_the_interface_is_the_one_that_has_the_address() -> None:
    for name, address in own_addresses().items():
        assert node_setup.interface_of(address) == name
    assert node_setup.interface_of("127.0.0.1") is None
    assert node_setup.interface_of("192.0.2.1") is None, "a documentation address, which no host has"


def test_the_address_is_the_source_of_the_route_to_the_head() -> None:
    assert node_setup.local_address("127.0.0.1", peer=None) == "127.0.0.1"
    for address in own_addresses().values():
        assert node_setup.local_address(address, peer=None) == address
        assert node_setup.local_address("127.0.0.1", peer=address) == address, "the head's own route is the loopback"


def test_settings_are_shell_assignments_and_the_choice_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node_setup.main(["--head", "127.0.0.1"]) == 0
    out, err = capsys.readouterr()
    assert out == "export TOOLKIT_NODE_ADDRESS=127.0.0.1\n"
    expected = "address 127.0.0.1, head 127.0.0.1 (127.0.0.1), NCCL_SOCKET_IFNAME=unset GLOO_SOCKET_IFNAME=unset\n"
    assert err == f"{socket.gethostname()}: {expected}"
    # An interface that the user chose stays.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = node_setup.node_settings("10.0.0.2", "eth0")
    assert found == {"TOOLKIT_NODE_ADDRESS": "10.0.0.2", "GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-host.invalid", "--wait-seconds", "0"], "the head 'no-such-host.invalid' does not resolve"),
        (["127.0.0.1", "--port", "0"], "--port is 0, expected "),
        (["127.0.0.1", "--gpus", "8"], "{host} has 0 visible GPUs, the job starts 8 ranks on each node"),
    ],
)
def test_a_node_that_cannot_take_part_ends_before_a_rank_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert node_setup.main(["--head", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message.format(host=socket.gethostname())}")


def test_the_rendezvous_of_the_same_attempt_has_the_port_where_nodes_share_a_host() -> None:
    """The words of its command line are what is known of a torchrun."""
    command = [sys.executable, "-c", TORCHRUN, "--rdzv-id", "7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            port = int(first.stdout.readline())
            node_setup.check_port("node1", port, attempt="7")
            taken = f"port {port} of the head node1 is in use by process {first.pid}"
            for other in ("8", None):
                with pytest.raises(ToolkitError, match=taken):
                    node_setup.check_port("node1", port, attempt=other)
        finally:
            first.kill()
