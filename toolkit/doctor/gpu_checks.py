"""Checks of NVIDIA GPUs by what NVML and the kernel log say. Nothing here uses a GPU.

One H200 has confirmed the readings; faults and NVLink are from NVML's documentation.
"""

import re
from functools import partial
from itertools import combinations
from pathlib import Path

from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, NodeReadings, NotMeasured, Outcome, node_check
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_table
from toolkit.hardware.gpu_table import common_gpu
from toolkit.hardware.gpus import Nvml
from toolkit.hardware.system_text import entries_of, output_of
from toolkit.units import gib
from toolkit.versions import is_importable

XID_CATALOG = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
MEMORY_ERRORS = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html"
DEBUG_GUIDE = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/nvidia/debug.md"
LIMIT_TOLERANCE = 0.02  # a limit or a rate that is lower by less than this is rounding
# Arguments of NVML's functions, from nvml.h. nvidia-ml-py 13 defines NVML_P2P_CAPS_INDEX_READ as a tuple.
UNCORRECTED, VOLATILE, AGGREGATE, SRAM, CLOCK_SM, TEMPERATURE = 1, 0, 1, 7, 1, 0
PEER_READ, PEER_NVLINK, PEER_OK = 0, 2, 0
MAX_NVLINKS = 18
NVLINK_COUNTERS = ("replays", "recoveries", "CRC errors of flits", "CRC errors of data")
FABRIC_STATES = dict(enumerate(("not supported", "not started", "in progress", "completed")))
RECOVERY_ACTIONS = dict(enumerate(("none", "reset the GPU", "reboot the node", "drain its traffic", "drain and reset")))

RESET = "end all processes on it, then `nvidia-smi -r -i {index}`, or reboot the node"
REPLACE = "replace this GPU: `nvidia-bug-report.sh` writes what its vendor asks for"
COOLING = "check cooling and power supply (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`)"
FABRIC = "systemctl restart nvidia-fabricmanager   (of the driver's version), then look at its log"
SOME_GPUS = "SLURM: --gpus-per-node; docker run --gpus all"


@node_check(f"{DEBUG_GUIDE}#how-to-detect-if-a-node-is-missing-gpus")
def gpu_count(node: NodeReadings, outcome: Outcome) -> None:
    """GPUs on the PCI bus, with the driver, and listed to this process."""
    pci, driver = len(node.pci_gpus), len(entries_of(Path("/proc/driver/nvidia/gpus")))
    listed, wanted = len(node.gpu_names), node.options.gpus_per_node
    outcome.measured = {"pci": pci, "driver": driver, "listed": listed, "names": node.gpu_names}
    if 0 < driver < pci:
        fix = "`dmesg | grep -i nvrm` and Xid 79 tell why; reboot the node, then return it to its provider"
        what, value = "GPUs on the PCI bus that the driver does not drive", f"{driver} with the driver"
        outcome.add(ERROR, what, value, f"{pci}, all on the bus", fix)
    if listed < (wanted or 0) or (node.has_gpu and not listed):
        failure = node.nvml if node.has_gpu and is_importable("pynvml") else None
        value = f"{listed} listed" + (f", {failure.message}" if isinstance(failure, ToolkitError) else "")
        expected = f"{wanted}, as --gpus-per-node says" if wanted else f"{pci or driver}, all on the bus"
        outcome.add(ERROR, "GPUs are missing", value, expected, f"{SOME_GPUS}; without a driver: install NVIDIA's")
    elif 0 < listed < pci and driver in (0, pci):
        expected = f"{pci}, unless the job was given only these"
        outcome.add(NOTE, "this job sees only some of the node's GPUs", listed, expected, SOME_GPUS)


@node_check(f"{DEBUG_GUIDE}#uncorrectable-ecc-error-encountered, {MEMORY_ERRORS}")
def gpu_ecc(node: NodeReadings, outcome: Outcome) -> None:
    """ECC mode, uncorrectable errors, remapped memory rows."""
    for gpu in node.gpus():
        add = partial(outcome.add, gpu=gpu)
        enabled, after_reboot = gpu.read("nvmlDeviceGetEccMode") or (None, None)
        recent = gpu.read("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE)
        lifetime = gpu.read("nvmlDeviceGetMemoryErrorCounter", UNCORRECTED, AGGREGATE, SRAM)
        _, remapped, pending, failed = gpu.read("nvmlDeviceGetRemappedRows") or (None, None, 0, 0)  # since Ampere
        measured = {"enabled": enabled, "uncorrectable": recent, "lifetime_sram": lifetime, "remapped_rows": remapped}
        outcome.measured[str(gpu.index)] = measured
        what, fix = "ECC is off: memory errors change results unnoticed", "nvidia-smi -e 1 -i {index}; reboot"
        off = "off" if enabled == 0 else "off after the next reboot"
        add(ERROR, "uncorrectable SRAM errors in its life", lifetime, "at most 4", REPLACE, when=(lifetime or 0) > 4)
        add(ERROR, "a memory row could not be remapped", "failed", "no failure", REPLACE, when=failed)
        add(ERROR, "uncorrectable ECC errors since the driver was loaded", recent, 0, RESET, when=recent)
        add(WARNING, "a memory row waits to be remapped", "pending", "none pending", RESET, when=pending)
        add(WARNING, what, off, "on", fix, when=0 in (enabled, after_reboot))


@node_check(f"{MEMORY_ERRORS}, https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/")
def gpu_recovery(node: NodeReadings, outcome: Outcome) -> None:
    """Recovery action that the driver asks for, NVSwitch fabric."""
    for gpu in node.gpus():
        action, (fabric, status) = gpu.recovery_action() or 0, gpu.fabric() or (0, 0)
        named, state = RECOVERY_ACTIONS.get(action, f"action {action}"), FABRIC_STATES.get(fabric, f"state {fabric}")
        outcome.measured[str(gpu.index)] = {"action": named, "fabric": state}
        if action:
            outcome.add(ERROR, "the driver asks for a recovery", named, None, RESET, gpu=gpu)
        if fabric in (1, 2) or (fabric and status):
            value, expected = f"{state}, status {status}", "completed, status 0"
            outcome.add(ERROR, "the NVSwitch fabric is not initialised", value, expected, FABRIC, gpu=gpu)


# -- Xid errors

LOOK_UP = (WARNING, f"look it up: {XID_CATALOG}")
_XIDS = read_table(__file__, "tables")["xids"]
XID_ACTIONS = {code: (level, action) for level, action, codes in _XIDS for code in codes}
XID_PATTERN = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, (.*))?")


@node_check(XID_CATALOG)
def gpu_xid(_: NodeReadings, outcome: Outcome) -> None:
    """Xid errors, which the driver writes into the kernel log, since boot."""
    log = output_of("dmesg") or output_of("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager")
    if log is None:
        raise NotMeasured("this user may not read the kernel log: `sudo dmesg | grep Xid`")
    xids: dict[tuple[int, str], list[str]] = {}
    for bus_id, code, message in XID_PATTERN.findall(log):
        xids.setdefault((int(code), bus_id.lower()), []).append(message.strip())
    outcome.measured = {"log_lines": len(log.splitlines()), "xids": [code for code, _ in xids]}
    for (number, bus_id), messages in xids.items():
        level, action = XID_ACTIONS.get(number, LOOK_UP)
        value = f"{len(messages)} ×, last: {messages[-1][:120] or 'no text'}"
        outcome.add(level, f"Xid {number} of {bus_id}", value, None, action)


# -- speed


@node_check(
    "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html, "
    f"https://docs.nvidia.com/deploy/driver-persistence/; 2 %: {OWN_CHOICE}",
)
def gpu_clocks(node: NodeReadings, outcome: Outcome) -> None:
    """Why clocks are reduced now, temperature, power limits, highest clocks, persistence mode."""
    kinds = set()
    for gpu in node.gpus():
        add = partial(outcome.add, gpu=gpu)
        reasons, celsius = gpu.throttle_reasons() or [], gpu.read("nvmlDeviceGetTemperature", TEMPERATURE)
        limit, default = (gpu.read(f"nvmlDeviceGetPowerManagement{which}Limit") for which in ("", "Default"))
        watts, clock = limit and limit / 1000, gpu.read("nvmlDeviceGetMaxClockInfo", CLOCK_SM)
        persistence = gpu.read("nvmlDeviceGetPersistenceMode")
        measured = {"power_limit_watts": watts, "max_sm_clock_mhz": clock, "celsius": celsius, "reduced_by": reasons}
        outcome.measured[str(gpu.index)] = measured | {"persistence": persistence}
        kinds.add(f"{gpu.read('nvmlDeviceGetName')}, {watts} W, {clock} MHz")
        if reasons:
            level = ERROR if any(reason.startswith("hardware") for reason in reasons) else WARNING
            add(level, "its clocks are reduced", f"{', '.join(reasons)}, at {celsius} °C", "no reason", COOLING)
        if limit is not None and default is not None and limit < default * (1 - LIMIT_TOLERANCE):
            normal, fix = f"{default / 1000:g}", "nvidia-smi -i {index} -pl "
            add(WARNING, "the power limit is below its default", f"{watts:g} W", f"{normal} W", f"{fix}{normal}")
        if persistence == 0:
            add(WARNING, "persistence mode is off", "off", "on", "systemctl enable --now nvidia-persistenced")
    if len(kinds) > 1:
        what, fix = "the node's GPUs differ: the slowest sets the pace of all", "GPUs of one kind; nvidia-smi -pl, -rgc"
        outcome.add(WARNING, what, "; ".join(sorted(kinds)), "the same on all GPUs", fix)


@node_check(OWN_CHOICE)
def gpu_processes(node: NodeReadings, outcome: Outcome) -> None:
    """Processes on the GPUs."""
    for gpu in node.gpus():
        processes = gpu.read("nvmlDeviceGetComputeRunningProcesses") or []
        pids = outcome.measured[str(gpu.index)] = [process.pid for process in processes]
        if processes:
            held = gib(sum(process.usedGpuMemory or 0 for process in processes))
            fix = f"`ps -fp {','.join(map(str, pids))}` shows whose they are; end those that are left over"
            outcome.add(NOTE, "other processes use it", held, "none, before a job starts", fix, gpu=gpu)


# -- connections


@node_check(
    f"{DEBUG_GUIDE}#how-to-check-error-counters-of-nvlink-links, {XID_CATALOG} (Xid 74), "
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
)
def gpu_links(node: NodeReadings, outcome: Outcome) -> None:
    """Active NVLinks, their error counters, and pairs of GPUs that read each other's memory."""
    gpus, uses_nvlink = node.gpus(), False
    for gpu in gpus:
        states = [gpu.read("nvmlDeviceGetNvLinkState", link) for link in range(MAX_NVLINKS)]
        active, inactive = ([link for link, state in enumerate(states) if state == wanted] for wanted in (1, 0))
        outcome.measured[str(gpu.index)] = {"active_nvlinks": len(active)}
        uses_nvlink = uses_nvlink or bool(active)
        if inactive:
            value, fix = ", ".join(map(str, inactive)), "reset the GPUs, or reboot the node"
            outcome.add(WARNING, "NVLinks are inactive", value, "all active", fix, gpu=gpu)
        for link in active:
            counts = [gpu.read("nvmlDeviceGetNvLinkErrorCounter", link, counter) for counter in range(4)]
            errors = [f"{count} {name}" for name, count in zip(NVLINK_COUNTERS, counts, strict=True) if count]
            if errors:
                what, fix = f"errors on NVLink {link}", "if they grow in a run, report the GPU"
                outcome.add(WARNING, what, ", ".join(errors), None, fix, gpu=gpu)
    kind = common_gpu(node.gpu_names)
    if kind and kind.nvlink_bytes_per_second and uses_nvlink and (pairs := _refused_pairs(gpus, PEER_NVLINK)):
        fix = "keep tensor parallelism to pairs with NVLink"
        outcome.add(WARNING, "pairs of GPUs without NVLink", pairs, "NVLink between all", fix)
    if pairs := _refused_pairs(gpus, PEER_READ):
        fix = "turn off ACS in the BIOS and IOMMU in the kernel's command line; GeForce cards have none"
        outcome.add(WARNING, "pairs of GPUs have no peer access", pairs, "all pairs", fix)


def _refused_pairs(gpus: list[Nvml], capability: int) -> str:
    """`0-3` for each pair that NVML says to lack a capability of peer access."""
    return ", ".join(
        f"{first.index}-{second.index}"
        for first, second in combinations(gpus, 2)
        if first.read("nvmlDeviceGetP2PStatus", second.handle, capability) not in (PEER_OK, None)
    )
