"""`toolkit recommend`: read the model, plan every preset, say which to use and why.

$ toolkit recommend MODEL --gpu h100 --world-size 8 --max-seq-length 4096 --global-batch-size 64
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.hardware.gpu_table import GIGA, Gpu, find_gpu, gpu_by_hand
from toolkit.models.read import check_unquantized, read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.candidates import Ask
from toolkit.plan.job import Job, check_job, check_size, check_world_size
from toolkit.plan.recommend import WISHES, recommend
from toolkit.plan.recommendation import as_json
from toolkit.plan.recommendation_text import lines_of
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB

DEFAULT_GLOBAL_BATCH = 32  # sequences; rounded up to a multiple of the GPUs
LARGEST_GLOBAL_BATCH = 2**20


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What is rented, as the options give it."""

    gpu: str | None
    world_size: int
    gpus_per_machine: int = 8
    gpu_memory_gib: float | None = None
    gpu_tflops: float | None = None
    gpu_link_gb_per_second: float | None = None
    network_gb_per_second: float | None = None
    nvme_gb_per_second: float | None = None
    host_memory_gib: float | None = None
    price_per_gpu_hour: float | None = None

    def the_gpu(self) -> Gpu:
        """Of the table, given by hand, or of the table with numbers replaced."""
        base = None if self.gpu is None else find_gpu(self.gpu)
        by_hand = (self.gpu_memory_gib, self.gpu_tflops, self.gpu_link_gb_per_second)
        if base is not None and by_hand == (None, None, None):
            return base
        return gpu_by_hand(
            base,
            memory_gib=self.gpu_memory_gib,
            tflops=self.gpu_tflops,
            link_gb_per_second=self.gpu_link_gb_per_second,
        )


def run_recommend(
    model: str,
    *,
    hardware: Hardware,
    job: Job,
    presets: Sequence[str],
    global_batch_size: int | None,
    wish: str,
    scaling: bool,
    json_wanted: bool,
) -> None:
    """Print the recommendation."""
    if wish not in WISHES:
        raise ToolkitError(f"--wish is {wish!r}, expected {' or '.join(WISHES)}", hint=did_you_mean(wish, WISHES))
    check_unquantized(model)
    shape = read_model(model)
    ask = make_ask(shape, hardware, job, global_batch_size)
    chosen = [load_preset(name) for name in dict.fromkeys(presets)] or list_presets()
    found = recommend(ask, chosen, wish=wish)
    price = hardware.price_per_gpu_hour
    if json_wanted:
        print(json.dumps(as_json(found, ask, model=model, wish=wish, price=price), indent=2))
        return
    print("\n".join(lines_of(found, ask, model=model, price=price, scaling=scaling)))


def make_ask(shape: ModelShape, hardware: Hardware, job: Job, global_batch_size: int | None) -> Ask:
    """Raises ToolkitError for a size that is none, and for a global batch that the GPUs do not divide."""
    check_job(job, shape)
    check_world_size(hardware.world_size)
    if global_batch_size is not None:
        check_size("--global-batch-size", global_batch_size, LARGEST_GLOBAL_BATCH)
    size = hardware.world_size
    return Ask(
        shape=shape,
        gpu=hardware.the_gpu(),
        world_size=size,
        global_batch_size=global_batch_size or -(-DEFAULT_GLOBAL_BATCH // size) * size,
        job=job,
        network_bytes_per_second=_scaled("--network-gb-per-second", hardware.network_gb_per_second, GIGA),
        nvme_bytes_per_second=_scaled("--nvme-gb-per-second", hardware.nvme_gb_per_second, GIGA),
        host_memory_bytes=_scaled("--host-memory-gib", hardware.host_memory_gib, GIB),
    )


def _scaled(option: str, value: float | None, unit: int) -> int | None:
    if value is None:
        return None
    if not 0 < value < 10**6:
        raise ToolkitError(f"{option} is {value}, expected more than 0 and below a million")
    return round(value * unit)
