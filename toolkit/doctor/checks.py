"""A check of a node: what it looks at, the source of its threshold, what it measured, and what is wrong.

A check is a function named like the check; its docstring says what it looks at:

    @node_check("https://...")
    def shared_memory(node: NodeReadings, outcome: Outcome) -> None: ...

The list in docs/how-to/doctor.md is generated from the registered checks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.doctor.environment_report import RdmaPort, rdma_ports
from toolkit.doctor.options import DoctorOptions
from toolkit.errors import ToolkitError
from toolkit.files.paths import user_path
from toolkit.hardware.gpus import CPU_PROCESSES, Nvml, count_gpus, gpu_names, installed_gpus, list_gpus
from toolkit.hardware.system_text import entries_of, text_of
from toolkit.models.read_model import read_model
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets.preset import load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_supported

LEVELS = ERROR, WARNING, NOTE = "error", "warning", "note"
OK, SKIPPED = "ok", "skipped"
OWN_CHOICE = "our choice"
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller


class NotMeasured(Exception):
    """A check cannot measure anything on this node; the text says why."""


class NodeReadings:
    """This node, and what the user wants it for. What several checks look at is read when it is first used."""

    def __init__(self, options: DoctorOptions, model: str | None = None) -> None:
        self.options = options
        self.model = model
        self.preset: PresetSpec | None = None if options.preset is None else load_preset(options.preset)
        self.rdma_ports: list[RdmaPort] = rdma_ports()
        self.output_dir = user_path(options.output_dir or ".").absolute()  # of the run, which may not exist yet

    @cached_property
    def nvml(self) -> list[Nvml] | ToolkitError:
        """GPUs that NVML lists, or why it does not answer."""
        try:
            return list_gpus()
        except ToolkitError as error:
            return error

    def gpus(self) -> list[Nvml]:
        """Return the GPUs that NVML lists. Raises NotMeasured where there are none, or no NVML."""
        if not self.has_gpu:
            raise NotMeasured("no NVIDIA GPU")
        if isinstance(self.nvml, ToolkitError):
            raise NotMeasured(f"{self.nvml.message}: {self.nvml.hint}")
        return self.nvml

    @cached_property
    def gpu_names(self) -> list[str]:
        """Names of the GPUs that the driver lists to this process: by NVML, or by nvidia-smi without its package."""
        if isinstance(self.nvml, ToolkitError):
            return gpu_names()
        return [gpu.read("nvmlDeviceGetName") for gpu in self.nvml]

    @cached_property
    def pci_gpus(self) -> list[Path]:
        """NVIDIA's GPUs on the PCI bus, whether a driver is loaded or not."""
        cards = [device for device in entries_of(PCI_DEVICES) if text_of(device / "vendor") == NVIDIA_VENDOR]
        return [card for card in cards if (text_of(card / "class") or "").startswith(DISPLAY_CLASSES)]

    @cached_property
    def has_gpu(self) -> bool:
        """True on a node with an NVIDIA GPU, whether it works or not."""
        return bool(self.pci_gpus or self.gpu_names or installed_gpus())

    @cached_property
    def processes(self) -> int:
        """Ranks that a job starts on this node."""
        return self.options.num_processes or count_gpus() or CPU_PROCESSES

    @cached_property
    def planned_host_bytes(self) -> int | None:
        """Host memory of the preset's ranks on this node, by the planner; None without a preset and a model.

        Raises ToolkitError for a model or a number of processes that the preset does not train.
        """
        if self.preset is None or self.model is None:
            return None
        check_supported(self.preset, world_size=self.processes, purpose="plan")
        job = PlannedJob(gpus_per_node=self.processes)
        return plan_memory(read_model(self.model), self.preset, world_size=self.processes, job=job).host.peak_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFinding:
    """One thing that is wrong with a node."""

    level: str
    """`error`: jobs fail or a part must be replaced; `warning`: slower, or fails in some jobs; `note`: good to know."""
    what: str
    value: str | None  # None where `what` says it, and so for `expected`
    expected: str | None
    fix: str  # the line to type, or what to ask for


@dataclass(slots=True)
class Outcome:
    """What a check measured, and what is wrong with it."""

    measured: dict[str, Any] = field(default_factory=dict)
    findings: list[NodeFinding] = field(default_factory=list)
    skipped: str | None = None  # why nothing was measured
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """The worst level of its findings, `ok`, or `skipped`."""
        return SKIPPED if self.skipped else min((each.level for each in self.findings), key=LEVELS.index, default=OK)

    def add(
        self, level: str, what: str, value: Any, expected: Any, fix: str, *, gpu: Nvml | None = None, when: Any = True
    ) -> None:
        """Add a finding, when it is one: of the node, or of one GPU, whose index replaces `{index}` in the fix."""
        if gpu is not None:
            what, fix = f"{gpu.label}: {what}", fix.format(index=gpu.index)
        if when:
            texts = [None if each is None else str(each) for each in (value, expected)]
            self.findings.append(NodeFinding(level=level, what=what, value=texts[0], expected=texts[1], fix=fix))

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Add what another part of the toolkit refuses as an error, with its hint as the fix."""
        try:
            yield
        except ToolkitError as error:
            self.add(ERROR, error.message, None, None, error.hint or "see above")


Examine = Callable[[NodeReadings, Outcome], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheck:
    """A registered check."""

    source: str  # where the threshold comes from: an address, or `our choice` with the reason
    examine: Examine  # adds what it measured, and what is wrong

    def run(self, node: NodeReadings) -> Outcome:
        """Examine a node. Whatever a broken one answers becomes a skipped check with the reason, never a traceback."""
        outcome, started = Outcome(), time.monotonic()
        try:
            self.examine(node, outcome)
        except NotMeasured as reason:
            outcome = Outcome(skipped=str(reason))
        except Exception as error:  # nobody expected such a node, and its other checks matter the more
            outcome = Outcome(skipped=f"cannot be read: {type(error).__name__}: {error}")
        outcome.findings.sort(key=lambda finding: LEVELS.index(finding.level))
        outcome.seconds = round(time.monotonic() - started, 3)
        return outcome


CHECKS: dict[str, NodeCheck] = {}  # every check by its name, once `toolkit.doctor.examination` is imported


def node_check(source: str) -> Callable[[Examine], Examine]:
    """Register a function as the check of its name."""

    def register(examine: Examine) -> Examine:
        CHECKS[examine.__name__.replace("_", "-")] = NodeCheck(source=source, examine=examine)
        return examine

    return register
