"""What several checks look at, each read once: GPUs, RDMA ports, the preset and its plan."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from toolkit.doctor.collectors import RdmaPort, rdma_ports
from toolkit.doctor.options import DoctorOptions
from toolkit.errors import ToolkitError
from toolkit.files.reading import user_path
from toolkit.hardware.gpus import CPU_PROCESSES, count_gpus, gpu_names, installed_gpus
from toolkit.hardware.nvml import Nvml, list_gpus
from toolkit.hardware.system_text import entries_of, text_of
from toolkit.models.read_model import read_model
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import Preset, load_preset
from toolkit.presets.support import check_supported

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller


class NotMeasured(Exception):
    """A check cannot measure anything on this node; the text says why."""


class NodeReadings:
    """This node, and what the user wants it for. Each property is read when it is first used."""

    def __init__(self, options: DoctorOptions, model: str | None = None) -> None:
        self.options = options
        self.model = model

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
        return (
            gpu_names() if isinstance(self.nvml, ToolkitError) else [gpu.read("nvmlDeviceGetName") for gpu in self.nvml]
        )

    @cached_property
    def pci_gpus(self) -> list[Path]:
        """NVIDIA's GPUs on the PCI bus, whether a driver is loaded or not."""
        return [
            device
            for device in entries_of(PCI_DEVICES)
            if text_of(device / "vendor") == NVIDIA_VENDOR
            and (text_of(device / "class") or "").startswith(DISPLAY_CLASSES)
        ]

    @cached_property
    def has_gpu(self) -> bool:
        """True on a node with an NVIDIA GPU, whether it works or not."""
        return bool(self.pci_gpus or self.gpu_names or installed_gpus())

    @cached_property
    def rdma_ports(self) -> list[RdmaPort]:
        """Ports of InfiniBand, RoCE and EFA, as the kernel lists them."""
        return rdma_ports()

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
