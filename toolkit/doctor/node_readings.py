"""What several checks look at, each read once: nvidia-smi's outputs, RDMA ports, the kernel log, the preset."""

from __future__ import annotations

import shutil
import subprocess
from functools import cached_property
from pathlib import Path

from toolkit.doctor.collectors import entries_of, output_of, text_of
from toolkit.doctor.infiniband import RdmaPort, parse_ibstat, ports_in_sysfs
from toolkit.doctor.nvidia_smi import GpuQuery, GpuState, Topology, parse_query, parse_topology
from toolkit.doctor.options import DoctorOptions
from toolkit.doctor.speed_probe import NodeSpeed, measure_speed
from toolkit.doctor.xid import read_kernel_log
from toolkit.errors import ToolkitError
from toolkit.files.reading import user_path
from toolkit.hardware.gpus import CPU_PROCESSES, count_gpus, gpu_topology
from toolkit.models.read_model import read_model
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import Preset, load_preset
from toolkit.presets.support import check_supported

PCI_DEVICES = Path("/sys/bus/pci/devices")
SMI_SECONDS = 60  # with a driver that has to be loaded first
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller


class NotMeasured(Exception):
    """A check cannot measure anything on this node; the text says why."""


class NodeReadings:
    """This node, and what the user wants it for. Each property is read when it is first used."""

    def __init__(self, options: DoctorOptions, model: str | None = None) -> None:
        self.options = options
        self.model = model

    @property
    def gpu_query(self) -> GpuQuery | None:
        """`nvidia-smi -q -x`; None if nvidia-smi is not installed or fails."""
        return self._smi[0]

    @property
    def smi_failure(self) -> str | None:
        """Why nvidia-smi gives no answer; None if it does, or is not installed."""
        return self._smi[1]

    @cached_property
    def _smi(self) -> tuple[GpuQuery | None, str | None]:
        if shutil.which("nvidia-smi") is None:
            return None, None
        command = ["nvidia-smi", "-q", "-x"]
        try:
            ended = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", timeout=SMI_SECONDS, check=False
            )
            if ended.returncode == 0:
                return parse_query(ended.stdout), None
        except subprocess.TimeoutExpired:
            return None, f"it does not answer within {SMI_SECONDS} s"
        except OSError as error:
            return None, str(error.strerror)
        except ToolkitError as error:
            return None, error.message
        printed = (ended.stdout + ended.stderr).strip() or f"exit code {ended.returncode}"
        return None, printed.splitlines()[0]

    def gpus(self) -> tuple[GpuState, ...]:
        """Return the GPUs that nvidia-smi lists. Raises NotMeasured where there are none."""
        query = self.gpu_query
        if query is None or not query.gpus:
            raise NotMeasured("nvidia-smi fails" if self.smi_failure else "no NVIDIA GPU")
        return query.gpus

    @cached_property
    def pci_gpus(self) -> list[str]:
        """PCI addresses of NVIDIA's GPUs, whether a driver is loaded or not."""
        return [
            device.name
            for device in entries_of(PCI_DEVICES)
            if text_of(device / "vendor") == NVIDIA_VENDOR
            and (text_of(device / "class") or "").startswith(DISPLAY_CLASSES)
        ]

    @cached_property
    def driver_gpus(self) -> list[str]:
        """PCI addresses of the GPUs that the driver drives; a container may hide them."""
        return [entry.name for entry in entries_of(DRIVER_GPUS)]

    @property
    def has_gpu(self) -> bool:
        """True on a node with an NVIDIA GPU, whether it works or not."""
        return bool(self.pci_gpus or (self.gpu_query and self.gpu_query.gpus))

    @cached_property
    def topology(self) -> Topology:
        """`nvidia-smi topo -m`; without connections where it fails."""
        return parse_topology(gpu_topology() or "")

    @cached_property
    def rdma_ports(self) -> list[RdmaPort]:
        """RDMA ports as the kernel lists them, or as ibstat does in a container without the kernel's files."""
        return ports_in_sysfs() or parse_ibstat(output_of("ibstat") or "")

    @cached_property
    def kernel_log(self) -> str | None:
        """The kernel log since boot; None if this user may not read it."""
        return read_kernel_log()

    @cached_property
    def preset(self) -> Preset | None:
        """The preset that the node is checked for."""
        return None if self.options.preset is None else load_preset(self.options.preset)

    @property
    def processes(self) -> int:
        """Ranks that a job starts on this node."""
        return self.options.num_processes or count_gpus() or CPU_PROCESSES

    @property
    def output_dir(self) -> Path:
        """Folder of the run, which may not exist yet."""
        return user_path(self.options.output_dir or ".").absolute()

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

    @cached_property
    def speed(self) -> NodeSpeed:
        """Matmul and all-reduce of all GPUs at once, or of two processes on the CPU: takes a minute."""
        return measure_speed(self.gpu_query.gpus[0].name if self.gpu_query and self.gpu_query.gpus else None)
