"""GPUs of this node, as the driver and nvidia-smi report them."""

import pytest

from toolkit.hardware.gpus import Nvml, read_gpu_row, visible_gpus


def test_a_line_of_nvidia_smi_describes_one_gpu() -> None:
    line = ["NVIDIA H100 80GB HBM3", "81559", "570.86.15", "700.00", "1980", "2619"]
    assert read_gpu_row(line) == {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 81559 * 2**20,
        "driver": "570.86.15",
        "power_limit_watts": 700.0,
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 2619,
    }
    assert read_gpu_row(["A GPU", "[N/A]", "1", "[Not Supported]", "[N/A]", "[N/A]"])["power_limit_watts"] is None


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        ("0,7,1", 1),  # CUDA stops at the first that is not there
        ("GPU-8932f937,GPU-1d2a3f4b", 2),
        ("MIG-1", 1),
        ("0,1,2,GPU-8932f937", 3),
    ],
)
def test_visible_gpus_follow_cudas_rule(variable: str | None, count: int) -> None:
    assert visible_gpus(["0", "1", "2"], cuda_visible_devices=variable) == count
    assert visible_gpus([], cuda_visible_devices=variable) == 0


def test_without_nvml_every_reading_is_unknown() -> None:
    nvml = Nvml("no-such-uuid")
    assert (nvml.process_bytes(1), nvml.energy_joules(), nvml.throttle_reasons()) == (None, None, None)
