"""What nvidia-smi prints is read as values, from recorded outputs of several drivers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from recorded_outputs import FOLDER, recorded

from toolkit.doctor.infiniband import parse_ibstat
from toolkit.doctor.nvidia_smi import (
    EccCounters,
    RemappedRows,
    parse_nvlink_errors,
    parse_nvlink_status,
    parse_peer_access,
    parse_query,
    parse_topology,
)
from toolkit.doctor.xid import parse_xids
from toolkit.errors import ToolkitError


def test_the_driver_and_the_gpus_in_their_order_are_read() -> None:
    query = parse_query(recorded("nvidia_smi_healthy.xml"))
    assert (query.driver, query.cuda) == ("570.86.15", "12.8")
    assert [gpu.label for gpu in query.gpus] == ["GPU 0 (0000:19:00.0)", "GPU 1 (0000:9D:00.0)"]
    gpu = query.gpus[0]
    assert (gpu.name, gpu.vbios, gpu.persistence_mode) == ("NVIDIA H100 80GB HBM3", "96.00.89.00.01", True)
    assert (gpu.power_limit_watts, gpu.default_power_limit_watts) == (700.0, 700.0)
    assert (gpu.max_sm_clock_mhz, gpu.application_sm_clock_mhz) == (1980, 1980)
    assert (gpu.pcie_width, gpu.max_pcie_width, gpu.device_pcie_generation) == (16, 16, 5)
    assert (gpu.throttle_reasons, gpu.temperature_celsius, gpu.recovery_action) == ((), 41, "None")


def test_counters_and_flags_of_a_faulty_gpu_are_read() -> None:
    gpu = parse_query(recorded("nvidia_smi_faulty.xml")).gpus[1]
    assert gpu.ecc == EccCounters(
        correctable=177,
        uncorrectable=1,
        lifetime_sram_uncorrectable=5,  # 1 parity and 4 SEC-DED
        lifetime_dram_uncorrectable=0,
        sram_threshold_exceeded=False,
    )
    assert gpu.rows == RemappedRows(correctable=0, uncorrectable=8, pending=True, failed=True)
    assert (gpu.persistence_mode, gpu.pcie_width, gpu.host_pcie_generation) == (False, 8, 4)
    assert gpu.throttle_reasons == ("hardware thermal slowdown",)
    assert (gpu.recovery_action, gpu.fabric_state, gpu.fabric_status) == ("GPU Reset", "In Progress", None)


def test_names_of_older_drivers_are_read_and_what_they_do_not_print_is_unknown() -> None:
    (gpu,) = parse_query(recorded("nvidia_smi_driver_470.xml")).gpus
    assert (gpu.throttle_reasons, gpu.power_limit_watts) == (("software power cap",), 300.0)
    assert gpu.rows == RemappedRows(correctable=None, uncorrectable=2, pending=True, failed=None)
    assert (gpu.ecc_enabled, gpu.ecc.uncorrectable, gpu.fabric_state, gpu.pcie_width) == (False, None, None, None)


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't communicate", "<nvidia_smi_log><gpu>"])
def test_what_is_no_xml_is_refused(text: str) -> None:
    with pytest.raises(ToolkitError, match="nvidia-smi -q -x prints no XML"):
        parse_query(text)


def test_each_pair_of_the_topology_is_read_once_with_numa_nodes() -> None:
    topology = parse_topology(recorded("topo_m.txt"))
    assert topology.gpu_links == {
        **dict.fromkeys([("GPU0", "GPU1"), ("GPU0", "GPU2"), ("GPU1", "GPU2")], "NV18"),
        **{("GPU0", "GPU3"): "PHB", ("GPU1", "GPU3"): "NV18", ("GPU2", "GPU3"): "NV18"},
    }
    assert (topology.links["GPU2", "NIC1"], topology.links["NIC0", "NIC1"]) == ("PXB", "SYS")
    assert topology.numa_nodes == {"GPU0": 0, "GPU1": 0, "GPU2": 1, "GPU3": 1}


def test_underlined_headings_and_nothing_at_all_are_read() -> None:
    underlined = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X \t0-7\t0"
    assert parse_topology(underlined).numa_nodes == {"GPU0": 0}
    assert parse_topology("").links == {}


def test_peer_access_is_read_by_pair() -> None:
    pairs = {("GPU0", "GPU1"): "OK", ("GPU0", "GPU2"): "CNS", ("GPU1", "GPU2"): "OK"}
    assert parse_peer_access(recorded("topo_p2p.txt")) == pairs
    assert parse_peer_access("") == {}


def test_only_nvlink_counters_above_zero_are_reported() -> None:
    found = {"GPU1 link 2": {"Recovery Errors": 1, "CRC Errors": 8814}}
    assert parse_nvlink_errors(recorded("nvlink_errors.txt")) == found
    assert parse_nvlink_errors("GPU 0: Tesla V100 (UUID: GPU-1)\n\t Links 0-5: No errors") == {}


def test_the_rate_of_each_nvlink_is_read() -> None:
    status = parse_nvlink_status(recorded("nvlink_status.txt"))
    assert (len(status), status["GPU0 link 0"], status["GPU1 link 1"]) == (6, "26.562 GB/s", "<inactive>")


PARSERS = (parse_ibstat, parse_nvlink_errors, parse_nvlink_status, parse_peer_access, parse_topology, parse_xids)


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_an_output_that_is_cut_off_or_of_another_program_is_read_without_an_error(path: Path) -> None:
    text = path.read_text()
    for end in range(0, len(text), 97):
        for parse in PARSERS:
            parse(text[:end])
        with contextlib.suppress(ToolkitError):
            parse_query(text[:end])
