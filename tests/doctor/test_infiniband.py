"""RDMA ports are read from ibstat's output and from the kernel's files, and judged by state and rate."""

from __future__ import annotations

from pathlib import Path

from recorded_outputs import recorded

from toolkit.doctor.infiniband import RdmaPort, parse_ibstat, ports_in_sysfs
from toolkit.doctor.network_checks import port_findings


def test_ibstats_ports_are_read() -> None:
    ports = parse_ibstat(recorded("ibstat.txt"))
    assert [port.device for port in ports] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert ports[0] == RdmaPort(
        device="mlx5_0",
        port=1,
        state="Active",
        physical_state="LinkUp",
        rate="400 Gb/sec",
        link_layer="InfiniBand",
    )
    assert (ports[2].state, ports[2].physical_state, ports[3].link_layer) == ("Down", "Polling", "Ethernet")
    assert parse_ibstat("ibpanic: [4711] main: can't list ibpanic") == []


def test_the_kernels_files_say_the_same(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    for name, text in (files | {"counters/link_downed": "3"}).items():
        (port / name).write_text(f"{text}\n")
    (found,) = ports_in_sysfs(tmp_path)
    assert (found.state, found.physical_state, found.gigabits_per_second) == ("Active", "LinkUp", 400.0)
    assert (found.link_layer, found.link_downed, found.is_efa) == ("InfiniBand", 3, False)
    assert ports_in_sysfs(tmp_path / "no such folder") == []


def test_a_port_that_is_down_slower_or_unreliable_is_a_finding() -> None:
    found = {
        finding.what: (finding.level, finding.value) for finding in port_findings(parse_ibstat(recorded("ibstat.txt")))
    }
    assert found == {
        "mlx5_1 port 1 is slower than the other ports": ("warning", "200 Gb/sec"),
        "mlx5_2 port 1 is not active": ("warning", "Down, Polling"),
    }  # an Ethernet port of a storage network may be slower
    down = RdmaPort(
        device="mlx5_0", port=1, state="Down", physical_state="Disabled", rate=None, link_layer=None, link_downed=2
    )
    assert [(finding.level, finding.value) for finding in port_findings([down])] == [
        ("error", "Down, Disabled"),  # no port at all is active
        ("warning", "2 ×"),
    ]


def test_cards_of_aws_are_told_apart() -> None:
    names = ("efa_0", "rdmap16s27", "mlx5_0")
    fields = {"port": 1, "state": None, "physical_state": None, "rate": None, "link_layer": None}
    assert [RdmaPort(device=name, **fields).is_efa for name in names] == [True, True, False]
