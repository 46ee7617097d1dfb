"""Checks of NVIDIA GPUs by what NVML and the kernel log say. Nothing here uses a GPU.

No GPU has confirmed them: they were written from NVML's documentation.

>>> parse_xids("[12.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=0, GPU has fallen off the bus.")
{(79, '0000:3b:00'): ['pid=0, GPU has fallen off the bus.']}
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, Outcome, node_check
from toolkit.doctor.node_readings import NodeReadings, NotMeasured
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import common_gpu
from toolkit.hardware.nvml import Nvml
from toolkit.hardware.system_text import entries_of, output_of
from toolkit.units import gib
from toolkit.versions import is_importable

XID_CATALOG = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
MEMORY_ERRORS = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html"
DEBUG_GUIDE = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/nvidia/debug.md"
# "If you have more than 4, that's usually a reason to RMA that GPU" (DEBUG_GUIDE, uncorrectable ECC error).
MAX_LIFETIME_SRAM_ERRORS = 4
# A clock or power limit that is lower by less than this is rounding.
LIMIT_TOLERANCE = 0.02
# Arguments of NVML's functions, from nvml.h. nvidia-ml-py 13 defines NVML_P2P_CAPS_INDEX_READ as a tuple.
UNCORRECTED, VOLATILE, AGGREGATE, SRAM, CLOCK_SM, TEMPERATURE = 1, 0, 1, 7, 1, 0
PEER_READ, PEER_NVLINK, PEER_OK = 0, 2, 0
MAX_NVLINKS = 18
NVLINK_COUNTERS = ("replays", "recoveries", "CRC errors of flits", "CRC errors of data")
FABRIC_STATES = dict(enumerate(("not supported", "not started", "in progress", "completed")))
RECOVERY_ACTIONS = dict(enumerate(("none", "reset the GPU", "reboot the node", "drain its traffic", "drain and reset")))

RESET = "end all processes on it, then `nvidia-smi -r -i {index}`, or reboot the node"
REPLACE = "replace this GPU: `nvidia-bug-report.sh` writes what its vendor asks for"


@node_check(
    threshold="the driver does not answer; fewer GPUs than on the bus, or than `--gpus-per-node`; a note if a job sees "
    "only some",
    source=f"{DEBUG_GUIDE}#how-to-detect-if-a-node-is-missing-gpus",
)
def gpu_count(node: NodeReadings) -> Outcome:
    """GPUs on the PCI bus, with the driver, listed to this process, and required by `--gpus-per-node`."""
    pci, driver = len(node.pci_gpus), len(entries_of(Path("/proc/driver/nvidia/gpus")))
    listed, wanted = len(node.gpu_names), node.options.gpus_per_node
    outcome = Outcome({"pci": pci, "driver": driver, "listed": listed, "names": node.gpu_names})
    if 0 < driver < pci:
        outcome.add(
            ERROR,
            "GPUs on the PCI bus that the driver does not drive",
            value=f"{driver} with the driver",
            expected=f"{pci}, all on the bus",
            fix="`dmesg | grep -i nvrm` and Xid 79 tell why; reboot the node, then return it to its provider",
        )
    if listed < (wanted or 0) or (node.has_gpu and not listed):
        reason = ""
        if node.has_gpu and is_importable("pynvml") and isinstance(node.nvml, ToolkitError):
            reason = f", {node.nvml.message}"
        outcome.add(
            ERROR,
            "GPUs are missing",
            value=f"{listed} listed{reason}",
            expected=f"{wanted}, as --gpus-per-node says" if wanted else f"{pci or driver}, all on the bus",
            fix="SLURM: --gpus-per-node; docker run --gpus all; without a driver: install NVIDIA's",
        )
    elif 0 < listed < pci and driver in (0, pci):
        outcome.add(
            NOTE,
            "this job sees only some of the node's GPUs",
            value=listed,
            expected=f"{pci}, unless the job was given only these",
            fix="SLURM: --gpus-per-node; docker run --gpus all",
        )
    return outcome


@node_check(
    threshold="any uncorrectable error since the driver was loaded; more than 4 in SRAM in its life, or a failed "
    "remapping: replace the GPU; a pending one: reset it; ECC off or about to change",
    source=f"{DEBUG_GUIDE}#uncorrectable-ecc-error-encountered, {MEMORY_ERRORS}",
)
def gpu_ecc(node: NodeReadings) -> Outcome:
    """ECC mode, uncorrectable errors since the driver was loaded and in the GPU's life, remapped memory rows."""
    outcome = Outcome({})
    for gpu in node.gpus():
        enabled, after_reboot = gpu.read("nvmlDeviceGetEccMode") or (None, None)
        recent = gpu.read("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE)
        lifetime = gpu.read("nvmlDeviceGetMemoryErrorCounter", UNCORRECTED, AGGREGATE, SRAM)
        _, remapped, pending, failed = gpu.read("nvmlDeviceGetRemappedRows") or (None, None, 0, 0)  # since Ampere
        measured = {"enabled": enabled, "uncorrectable": recent, "lifetime_sram": lifetime, "remapped_rows": remapped}
        outcome.measured[str(gpu.index)] = measured
        if (lifetime or 0) > MAX_LIFETIME_SRAM_ERRORS:
            what, expected = "uncorrectable SRAM errors in its life", f"at most {MAX_LIFETIME_SRAM_ERRORS}"
            outcome.add(ERROR, f"{gpu.label}: {what}", value=lifetime, expected=expected, fix=REPLACE)
        if failed:
            what = "a memory row could not be remapped"
            outcome.add(ERROR, f"{gpu.label}: {what}", value="failed", expected="no failure", fix=REPLACE)
        if recent:
            what, fix = "uncorrectable ECC errors since the driver was loaded", RESET.format(index=gpu.index)
            outcome.add(ERROR, f"{gpu.label}: {what}", value=recent, expected=0, fix=fix)
        if pending:
            what, fix = "a memory row waits to be remapped", RESET.format(index=gpu.index)
            outcome.add(WARNING, f"{gpu.label}: {what}", value="pending", expected="none pending", fix=fix)
        if enabled != after_reboot:
            what, fix = "the ECC mode changes at the next reboot", "reboot, so that all GPUs have the same memory"
            value, expected = ("on", "off") if enabled else ("off", "on")
            outcome.add(WARNING, f"{gpu.label}: {what}", value=value, expected=expected, fix=fix)
        elif enabled == 0:
            what, fix = "ECC is off: memory errors change results unnoticed", f"nvidia-smi -e 1 -i {gpu.index}; reboot"
            outcome.add(WARNING, f"{gpu.label}: {what}", value="off", expected="on", fix=fix)
    return outcome


@node_check(
    threshold="an action other than none; the fabric is not initialised: CUDA fails with error 802",
    source=f"{MEMORY_ERRORS}, https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
)
def gpu_recovery(node: NodeReadings) -> Outcome:
    """Recovery action that the driver asks for; NVSwitch fabric."""
    outcome = Outcome({})
    for gpu in node.gpus():
        action, (fabric, status) = gpu.recovery_action() or 0, gpu.fabric() or (0, 0)
        named, state = RECOVERY_ACTIONS.get(action, f"action {action}"), FABRIC_STATES.get(fabric, f"state {fabric}")
        outcome.measured[str(gpu.index)] = {"action": named, "fabric": state}
        if action:
            what, fix = f"{gpu.label}: the driver asks for a recovery", RESET.format(index=gpu.index)
            outcome.add(ERROR, what, value=named, expected="none", fix=fix)
        if fabric in (1, 2) or (fabric and status):
            outcome.add(
                ERROR,
                f"{gpu.label}: the NVSwitch fabric is not initialised",
                value=f"{state}, status {status}",
                expected="completed, status 0",
                fix="systemctl restart nvidia-fabricmanager   (of the driver's version), then look at its log",
            )
    return outcome


# -- Xid errors: codes, level and action by what the catalog asks for, on Ampere and newer GPUs

LOOK_UP = (WARNING, f"look it up: {XID_CATALOG}")
XID_ACTIONS = {
    code: (level, action)
    for codes, level, action in (
        ((79,), ERROR, "reboot the node; if it returns, replace the GPU"),
        ((46, 48, 62, 64, 95, 109, 119, 120, 140, 143, 154), ERROR, "reset the GPU: `nvidia-smi -r`, or reboot"),
        ((74, *range(144, 151), 155), ERROR, "NVLink: reset all GPUs of the node, or reboot"),
        ((94,), WARNING, "restart the job; if it returns on this GPU, report the GPU"),
        ((13, 31, 69, 137), WARNING, "look for the fault in the job: `compute-sanitizer`, or CUDA_LAUNCH_BLOCKING=1"),
        ((43, 45, 63, 92), NOTE, "nothing: the driver dealt with it"),
    )
    for code in codes
}
XID_PATTERN = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, (.*))?")


@node_check(
    threshold="by the catalog's action: a reset or reboot is an error, a restart of the job a warning, else a note",
    source=XID_CATALOG,
)
def gpu_xid(_: NodeReadings) -> Outcome:
    """Xid errors, which the driver writes into the kernel log, since boot."""
    log = output_of("dmesg") or output_of("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager")
    if log is None:
        raise NotMeasured("this user may not read the kernel log: `sudo dmesg | grep Xid`")
    xids = parse_xids(log)
    outcome = Outcome({"log_lines": len(log.splitlines()), "xids": [code for code, _ in xids]})
    for (code, bus_id), messages in xids.items():
        level, action = XID_ACTIONS.get(code, LOOK_UP)
        value = f"{len(messages)} ×, last: {messages[-1][:120] or 'no text'}"
        outcome.add(level, f"Xid {code} of {bus_id}", value=value, expected="none", fix=action)
    return outcome


def parse_xids(kernel_log: str) -> dict[tuple[int, str], list[str]]:
    """Return the messages of each Xid code and PCI address, in the order of their first line."""
    found: dict[tuple[int, str], list[str]] = {}
    for bus_id, code, message in XID_PATTERN.findall(kernel_log):
        found.setdefault((int(code), bus_id.lower()), []).append(message.strip())
    return found


# -- speed


@node_check(
    threshold="clocks reduced by the hardware: an error, by heat or the power limit: a warning; a power limit below "
    "its default by more than 2 %; different GPUs; persistence mode off: limits are lost between jobs",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html, "
    f"https://docs.nvidia.com/deploy/driver-persistence/; 2 %: {OWN_CHOICE}",
)
def gpu_clocks(node: NodeReadings) -> Outcome:
    """Reasons for which clocks are reduced now, temperature, power limits, highest clocks, persistence mode."""
    outcome, kinds = Outcome({}), set()
    for gpu in node.gpus():
        reasons, celsius = gpu.throttle_reasons() or [], gpu.read("nvmlDeviceGetTemperature", TEMPERATURE)
        limit, default = (gpu.read(f"nvmlDeviceGetPowerManagement{which}Limit") for which in ("", "Default"))
        watts, clock = limit and limit / 1000, gpu.read("nvmlDeviceGetMaxClockInfo", CLOCK_SM)
        persistence = gpu.read("nvmlDeviceGetPersistenceMode")
        measured = {"power_limit_watts": watts, "max_sm_clock_mhz": clock, "celsius": celsius, "reduced_by": reasons}
        outcome.measured[str(gpu.index)] = measured | {"persistence": persistence}
        kinds.add(f"{gpu.read('nvmlDeviceGetName')}, {watts} W, {clock} MHz")
        if reasons:
            level = ERROR if any(reason.startswith("hardware") for reason in reasons) else WARNING
            what, value = f"{gpu.label}: its clocks are reduced", f"{', '.join(reasons)}, at {celsius} °C"
            fix = "check cooling and power supply (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`)"
            outcome.add(level, what, value=value, expected="no reason", fix=fix)
        if _is_below(limit, default):
            what, expected = f"{gpu.label}: the power limit is below its default", f"{default / 1000:g} W"
            fix = f"nvidia-smi -i {gpu.index} -pl {default / 1000:g}"
            outcome.add(WARNING, what, value=f"{watts:g} W", expected=expected, fix=fix)
        if persistence == 0:
            what, fix = f"{gpu.label}: persistence mode is off", "systemctl enable --now nvidia-persistenced"
            outcome.add(WARNING, what, value="off", expected="on", fix=fix)
    if len(kinds) > 1:
        what, fix = "the node's GPUs differ: the slowest sets the pace of all", "GPUs of one kind; nvidia-smi -pl, -rgc"
        outcome.add(WARNING, what, value="; ".join(sorted(kinds)), expected="the same on all GPUs", fix=fix)
    return outcome


def _is_below(value: float | None, normal: float | None) -> bool:
    return value is not None and normal is not None and value < normal * (1 - LIMIT_TOLERANCE)


@node_check(
    threshold="another process holds memory of a GPU: a run there may end out of memory",
    source=OWN_CHOICE,
)
def gpu_processes(node: NodeReadings) -> Outcome:
    """Processes on the GPUs."""
    outcome = Outcome({})
    for gpu in node.gpus():
        processes = gpu.read("nvmlDeviceGetComputeRunningProcesses") or []
        outcome.measured[str(gpu.index)] = [process.pid for process in processes]
        if processes:
            pids = ",".join(str(process.pid) for process in processes)
            outcome.add(
                NOTE,
                f"{gpu.label}: other processes use it",
                value=gib(sum(process.usedGpuMemory or 0 for process in processes)),
                expected="none, before a job starts",
                fix=f"`ps -fp {pids}` shows whose they are; end those that are left over",
            )
    return outcome


# -- connections


@node_check(
    threshold="fewer lanes than the GPU has: a warning; a slot of an older generation: a note",
    source=f"{DEBUG_GUIDE}#how-to-check-if-your-gpus-pcie-generation-is-supported",
)
def gpu_pcie(node: NodeReadings) -> Outcome:
    """PCIe lanes and generation; an idle GPU lowers its generation, so only the possible one counts."""
    outcome = Outcome({})
    for gpu in node.gpus():
        width, max_width = (gpu.read(f"nvmlDeviceGet{which}PcieLinkWidth") for which in ("Curr", "Max"))
        possible, generation = (gpu.read(f"nvmlDeviceGet{which}PcieLinkGeneration") for which in ("Max", "GpuMax"))
        outcome.measured[str(gpu.index)] = {"width": width, "max_width": max_width, "generation": possible}
        if _is_below(width, max_width):
            what, fix = "PCIe runs with fewer lanes", "reseat the card, or choose a slot with all lanes"
            outcome.add(WARNING, f"{gpu.label}: {what}", value=f"{width}x", expected=f"{max_width}x", fix=fix)
        if _is_below(possible, generation):
            what, fix = "the slot or a switch has an older PCIe generation", "dmesg | grep -i 'limited by'"
            outcome.add(NOTE, f"{gpu.label}: {what}", value=possible, expected=generation, fix=fix)
    return outcome


@node_check(
    threshold="a counter above 0; a link inactive; a pair without NVLink on GPUs that have it; a pair without peer "
    "access: NCCL copies through host memory",
    source=f"{DEBUG_GUIDE}#how-to-check-error-counters-of-nvlink-links, {XID_CATALOG} (Xid 74), "
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
)
def gpu_links(node: NodeReadings) -> Outcome:
    """NVLinks that are active, their error counters, and pairs of GPUs that read each other's memory."""
    gpus, outcome, active = node.gpus(), Outcome({}), 0
    for gpu in gpus:
        states = {link: gpu.read("nvmlDeviceGetNvLinkState", link) for link in range(MAX_NVLINKS)}
        inactive = [link for link, state in states.items() if state == 0]
        outcome.measured[str(gpu.index)] = {"active_nvlinks": sum(state == 1 for state in states.values())}
        active += outcome.measured[str(gpu.index)]["active_nvlinks"]
        if inactive:
            what, fix = f"{gpu.label}: NVLinks are inactive", "reset the GPUs, or reboot the node"
            outcome.add(WARNING, what, value=", ".join(map(str, inactive)), expected="all active", fix=fix)
        for link in (link for link, state in states.items() if state == 1):
            counts = [gpu.read("nvmlDeviceGetNvLinkErrorCounter", link, counter) for counter in range(4)]
            errors = [f"{count} {name}" for name, count in zip(NVLINK_COUNTERS, counts, strict=True) if count]
            if errors:
                what, fix = f"{gpu.label} link {link}: errors on the NVLink", "if they grow in a run, report the GPU"
                outcome.add(WARNING, what, value=", ".join(errors), expected=0, fix=fix)
    kind = common_gpu(node.gpu_names)
    has_nvlink = kind is not None and kind.nvlink_bytes_per_second is not None and active > 0
    if has_nvlink and (pairs := _refused_pairs(gpus, PEER_NVLINK)):
        what, fix = "pairs of GPUs without NVLink", "keep tensor parallelism to pairs with NVLink"
        outcome.add(WARNING, what, value=", ".join(pairs), expected="NVLink between all", fix=fix)
    if pairs := _refused_pairs(gpus, PEER_READ):
        what = "pairs of GPUs have no peer access"
        fix = "turn off ACS in the BIOS and IOMMU in the kernel's command line; GeForce cards have none"
        outcome.add(WARNING, what, value=", ".join(pairs), expected="all pairs", fix=fix)
    return outcome


def _refused_pairs(gpus: list[Nvml], capability: int) -> list[str]:
    """`0-3` for each pair that NVML says to lack a capability of peer access."""
    statuses = {
        f"{first.index}-{second.index}": first.read("nvmlDeviceGetP2PStatus", second.handle, capability)
        for first, second in combinations(gpus, 2)
    }
    return [pair for pair, status in statuses.items() if status not in (PEER_OK, None)]
