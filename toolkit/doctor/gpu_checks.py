"""Checks of NVIDIA GPUs by what nvidia-smi and the kernel log say. Nothing here uses a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, NodeFinding, Outcome, node_check
from toolkit.doctor.node_readings import NodeReadings, NotMeasured
from toolkit.doctor.nvidia_smi import GpuState
from toolkit.doctor.xid import CATALOG, UNKNOWN, XIDS, parse_xids

MEMORY_ERRORS = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"
DEBUG_GUIDE = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/nvidia/debug.md"
SMI_MANUAL = "https://docs.nvidia.com/deploy/nvidia-smi/"
# "If you have more than 4, that's usually a reason to RMA that GPU" (DEBUG_GUIDE, uncorrectable ECC error).
MAX_LIFETIME_SRAM_ERRORS = 4
# A clock or power limit that is lower by less than this is rounding.
LIMIT_TOLERANCE = 0.02
FindOn = Callable[[GpuState], Iterator[NodeFinding]]
HARDWARE_THROTTLES = ("hardware slowdown", "hardware thermal slowdown", "hardware power brake")


def gpu_check(
    name: str, *, looks_at: str, threshold: str, source: str, measures: Callable[[GpuState], dict[str, Any]]
) -> Callable[[FindOn], FindOn]:
    """Register a check of each GPU that nvidia-smi lists: what it `measures` on one, and a generator of findings."""

    def register(find: FindOn) -> FindOn:
        def examine(node: NodeReadings) -> Outcome:
            gpus = node.gpus()
            found = tuple(finding for gpu in gpus for finding in find(gpu))
            return Outcome(measured={str(gpu.index): measures(gpu) for gpu in gpus}, findings=found)

        node_check(name, looks_at=looks_at, threshold=threshold, source=source)(examine)
        return find

    return register


@node_check(
    "gpu-count",
    looks_at="GPUs on the PCI bus, with the driver, in nvidia-smi, and asked for with `--gpus-per-node`",
    threshold="nvidia-smi fails; fewer GPUs with the driver than on the bus; fewer listed than asked for; a "
    "note if a job sees only some",
    source=f"{DEBUG_GUIDE}#how-to-detect-if-a-node-is-missing-gpus",
)
def gpu_count(node: NodeReadings) -> Outcome:
    """Compare the numbers of GPUs that different places know."""
    names = [gpu.name for gpu in node.gpu_query.gpus] if node.gpu_query else []
    measured = {"pci": len(node.pci_gpus), "driver": len(node.driver_gpus), "listed": len(names), "names": names}
    if node.smi_failure:
        return Outcome(measured=measured | {"nvidia_smi": node.smi_failure}, findings=(_smi_fails(node.smi_failure),))
    found = count_findings(
        pci=len(node.pci_gpus), driver=len(node.driver_gpus), listed=len(names), wanted=node.options.gpus_per_node
    )
    return Outcome(measured=measured, findings=tuple(found))


def _smi_fails(why: str) -> NodeFinding:
    return NodeFinding(
        level=ERROR,
        what="nvidia-smi fails: no process can use a GPU",
        value=why,
        expected="a list of GPUs",
        fix="`dmesg | grep -i nvrm` tells why; load the driver (`modprobe nvidia`) or reboot the node",
    )


def count_findings(*, pci: int, driver: int, listed: int, wanted: int | None) -> Iterator[NodeFinding]:
    """Yield what is wrong with the GPUs on the bus, with the driver, and in nvidia-smi, which a job may restrict."""
    if 0 < driver < pci:
        yield NodeFinding(
            level=ERROR,
            what="GPUs on the PCI bus that the driver does not drive",
            value=f"{driver} with the driver",
            expected=f"{pci}, all on the bus",
            fix="`dmesg | grep -i nvrm` and Xid 79 tell why; reboot the node, then return it to its provider",
        )
    if listed < (wanted or 0) or (pci and not listed):
        yield NodeFinding(
            level=ERROR,
            what="GPUs are missing",
            value=f"{listed} in nvidia-smi",
            expected=f"{wanted}, as --gpus-per-node says" if wanted else f"{pci}, all on the bus",
            fix="SLURM: --gpus-per-node; docker run --gpus all; without a driver: install NVIDIA's",
        )
    elif 0 < listed < pci and driver in (0, pci):
        yield NodeFinding(
            level=NOTE,
            what="this job sees only some of the node's GPUs",
            value=str(listed),
            expected=f"{pci}, unless the job was given only these",
            fix="SLURM: --gpus-per-node; docker run --gpus all",
        )


@node_check(
    "gpu-persistence",
    looks_at="persistence mode",
    threshold="it is off: the driver is unloaded between jobs, and its limits and counters are lost",
    source="https://docs.nvidia.com/deploy/driver-persistence/",
)
def gpu_persistence(node: NodeReadings) -> Outcome:
    """Find GPUs whose driver is unloaded when no process uses them."""
    off = [gpu for gpu in node.gpus() if gpu.persistence_mode is False]
    found = [
        NodeFinding(
            level=WARNING,
            what="persistence mode is off",
            value=", ".join(gpu.label for gpu in off),
            expected="on",
            fix="systemctl enable --now nvidia-persistenced   (or `nvidia-smi -pm 1`)",
        )
    ]
    return Outcome(measured={"off": [gpu.index for gpu in off]}, findings=tuple(found if off else ()))


@gpu_check(
    "gpu-ecc",
    looks_at="ECC mode, uncorrectable errors since the driver was loaded and in the GPU's life",
    threshold="any uncorrectable error since the driver was loaded; more than 4 in SRAM in its life, or the driver's "
    "own threshold: replace the GPU; ECC off or about to change",
    source=f"{DEBUG_GUIDE}#uncorrectable-ecc-error-encountered, {CATALOG} (Xid 48)",
    measures=lambda gpu: {
        "enabled": gpu.ecc_enabled,
        "correctable": gpu.ecc.correctable,
        "uncorrectable": gpu.ecc.uncorrectable,
        "lifetime_sram_uncorrectable": gpu.ecc.lifetime_sram_uncorrectable,
        "lifetime_dram_uncorrectable": gpu.ecc.lifetime_dram_uncorrectable,
    },
)
def gpu_ecc(gpu: GpuState) -> Iterator[NodeFinding]:
    """Find memory errors that end jobs."""
    lifetime = gpu.ecc.lifetime_sram_uncorrectable
    if gpu.ecc.sram_threshold_exceeded or (lifetime or 0) > MAX_LIFETIME_SRAM_ERRORS:
        yield NodeFinding(
            level=ERROR,
            what=f"{gpu.label}: uncorrectable SRAM errors in its life",
            value=f"{lifetime}{', above the threshold of the driver' if gpu.ecc.sram_threshold_exceeded else ''}",
            expected=f"at most {MAX_LIFETIME_SRAM_ERRORS}",
            fix="replace this GPU: `nvidia-bug-report.sh` writes what its vendor asks for",
        )
    if gpu.ecc.uncorrectable:
        yield NodeFinding(
            level=ERROR,
            what=f"{gpu.label}: uncorrectable ECC errors since the driver was loaded",
            value=str(gpu.ecc.uncorrectable),
            expected="0",
            fix=f"nvidia-smi -r -i {gpu.index}   (with no process on it, or reboot)",
        )
    yield from _ecc_mode(gpu)


def _ecc_mode(gpu: GpuState) -> Iterator[NodeFinding]:
    if gpu.ecc_enabled is not None and gpu.ecc_enabled != gpu.ecc_after_reboot and gpu.ecc_after_reboot is not None:
        yield NodeFinding(
            level=WARNING,
            what=f"{gpu.label}: the ECC mode changes at the next reboot",
            value="on" if gpu.ecc_enabled else "off",
            expected="on" if gpu.ecc_after_reboot else "off",
            fix="reboot the node, so that its GPUs have the same memory and speed",
        )
    elif gpu.ecc_enabled is False:
        yield NodeFinding(
            level=WARNING,
            what=f"{gpu.label}: ECC is off, so memory errors change results unnoticed",
            value="off",
            expected="on",
            fix=f"nvidia-smi -e 1 -i {gpu.index}   (and reboot)",
        )


@gpu_check(
    "gpu-row-remap",
    looks_at="memory rows that were replaced by spare ones (before Ampere: retired pages)",
    threshold="a remapping failed: replace the GPU; one is pending: reset the GPU",
    source=f"{MEMORY_ERRORS}error-recovery-and-response-flags.html",
    measures=lambda gpu: {"correctable": gpu.rows.correctable, "uncorrectable": gpu.rows.uncorrectable},
)
def gpu_row_remap(gpu: GpuState) -> Iterator[NodeFinding]:
    """Find GPUs that run out of spare memory rows, or wait for a reset."""
    if gpu.rows.failed:
        yield NodeFinding(
            level=ERROR,
            what=f"{gpu.label}: a memory row could not be remapped",
            value="failed",
            expected="no failure",
            fix="replace this GPU: `nvidia-bug-report.sh` writes what its vendor asks for",
        )
    if gpu.rows.pending:
        yield NodeFinding(
            level=WARNING,
            what=f"{gpu.label}: a memory row waits to be remapped",
            value="pending",
            expected="none pending",
            fix=f"nvidia-smi -r -i {gpu.index}   (with no process on it, or reboot)",
        )


@gpu_check(
    "gpu-recovery",
    looks_at="recovery action that the driver asks for; NVSwitch fabric",
    threshold="an action other than None; the fabric is not initialised: CUDA fails with error 802",
    source=f"{MEMORY_ERRORS}error-recovery-and-response-flags.html, "
    "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
    measures=lambda gpu: {"action": gpu.recovery_action, "fabric": gpu.fabric_state},
)
def gpu_recovery(gpu: GpuState) -> Iterator[NodeFinding]:
    """Find GPUs that the driver wants reset, and an NVSwitch fabric that is not running."""
    if gpu.recovery_action not in (None, "None"):
        reboot = "reboot" in str(gpu.recovery_action).lower()
        yield NodeFinding(
            level=ERROR,
            what=f"{gpu.label}: the driver asks for a recovery",
            value=str(gpu.recovery_action),
            expected="None",
            fix="reboot the node" if reboot else f"end all processes on it, then `nvidia-smi -r -i {gpu.index}`",
        )
    if gpu.fabric_state in ("Not Started", "In Progress") or gpu.fabric_status not in (None, "Success"):
        yield NodeFinding(
            level=ERROR,
            what=f"{gpu.label}: the NVSwitch fabric is not initialised",
            value=f"{gpu.fabric_state}, {gpu.fabric_status}",
            expected="Completed, Success",
            fix="systemctl restart nvidia-fabricmanager   (of the driver's version), then look at its log",
        )


@node_check(
    "gpu-xid",
    looks_at="Xid errors in the kernel log since boot",
    threshold="by the catalog's action: a reset or reboot is an error, a restart of the job a warning, else a note",
    source=CATALOG,
)
def gpu_xid(node: NodeReadings) -> Outcome:
    """Find what the driver has logged."""
    log = node.kernel_log
    if log is None:
        raise NotMeasured("this user may not read the kernel log: `sudo dmesg | grep Xid`")
    events, found = parse_xids(log), []
    for event in events:
        meaning = XIDS.get(event.code, UNKNOWN)
        found.append(
            NodeFinding(
                level=meaning.level,
                what=f"Xid {event.code} of {event.bus_id}: {meaning.meaning}",
                value=f"{event.count} ×, last: {event.last[:120] or 'no text'}",
                expected="none",
                fix=meaning.action,
            )
        )
    codes = [{"code": event.code, "bus_id": event.bus_id, "count": event.count} for event in events]
    return Outcome(measured={"log_lines": len(log.splitlines()), "xids": codes}, findings=tuple(found))


@gpu_check(
    "gpu-throttling",
    looks_at="reasons for which clocks are reduced now, temperature",
    threshold="a hardware reason: an error; heat or the power limit: a warning",
    source="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
    measures=lambda gpu: {"reasons": list(gpu.throttle_reasons), "celsius": gpu.temperature_celsius},
)
def gpu_throttling(gpu: GpuState) -> Iterator[NodeFinding]:
    """Find GPUs that are slowed down while the node is idle."""
    if gpu.throttle_reasons:
        hardware = any(reason in HARDWARE_THROTTLES for reason in gpu.throttle_reasons)
        yield NodeFinding(
            level=ERROR if hardware else WARNING,
            what=f"{gpu.label}: its clocks are reduced",
            value=f"{', '.join(gpu.throttle_reasons)}, at {gpu.temperature_celsius} °C",
            expected="no reason",
            fix="check cooling and power supply (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`)",
        )


@gpu_check(
    "gpu-clocks",
    looks_at="power limits, application clocks and highest clocks",
    threshold="below the GPU's default by more than 2 %",
    source=f"{OWN_CHOICE}; defaults: {SMI_MANUAL}",
    measures=lambda gpu: {"power_limit_watts": gpu.power_limit_watts, "max_sm_clock_mhz": gpu.max_sm_clock_mhz},
)
def gpu_clocks(gpu: GpuState) -> Iterator[NodeFinding]:
    """Find GPUs that were limited and not set back."""
    if is_below(gpu.power_limit_watts, gpu.default_power_limit_watts):
        yield NodeFinding(
            level=WARNING,
            what=f"{gpu.label}: the power limit is below its default",
            value=f"{gpu.power_limit_watts:g} W",
            expected=f"{gpu.default_power_limit_watts:g} W",
            fix=f"nvidia-smi -i {gpu.index} -pl {gpu.default_power_limit_watts:g}",
        )
    if is_below(gpu.application_sm_clock_mhz, gpu.max_sm_clock_mhz):
        yield NodeFinding(
            level=NOTE,
            what=f"{gpu.label}: the application clock is below the highest",
            value=f"{gpu.application_sm_clock_mhz} MHz",
            expected=f"{gpu.max_sm_clock_mhz} MHz",
            fix=f"nvidia-smi -i {gpu.index} -rac, and `-rgc` for locked clocks",
        )


@node_check(
    "gpu-alike",
    looks_at="kinds, power limits and highest clocks of the node's GPUs",
    threshold="different between the GPUs of the node",
    source=OWN_CHOICE,
)
def gpu_alike(node: NodeReadings) -> Outcome:
    """Find GPUs that are slower than the others of their node."""
    gpus = node.gpus()
    return Outcome(measured={"kinds": sorted({gpu.name for gpu in gpus})}, findings=tuple(_unequal(gpus)))


def _unequal(gpus: Iterable[GpuState]) -> Iterator[NodeFinding]:
    for what, fix, values in (
        ("GPUs of different kinds", "use GPUs of one kind: `CUDA_VISIBLE_DEVICES`", {gpu.name for gpu in gpus}),
        ("power limits differ", "nvidia-smi -pl WATTS", {f"{gpu.power_limit_watts} W" for gpu in gpus}),
        ("highest clocks differ", "nvidia-smi -rgc", {f"{gpu.max_sm_clock_mhz} MHz" for gpu in gpus}),
    ):
        if len(values) > 1:
            yield NodeFinding(
                level=WARNING,
                what=f"{what}: the slowest GPU sets the pace of all",
                value=", ".join(sorted(values)),
                expected="the same on all GPUs",
                fix=fix,
            )


def is_below(value: float | None, normal: float | None) -> bool:
    """Return True for a value that is lower than normal by more than rounding."""
    return value is not None and normal is not None and value < normal * (1 - LIMIT_TOLERANCE)
