"""Everything that a rank imports, for the server that ranks are forked from (`toolkit.launch.warm_start`).

The server computes nothing, starts no thread and never initialises CUDA, so that a forked process can.
"""

from __future__ import annotations

import array
import ctypes
import os
import random
import resource
import sys
import threading
from pathlib import Path

from toolkit.train.rank_process import garbage_collector_off, prepare_environment

MADV_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"

_before = set(os.environ)
# Without NVML, the check for GPUs initialises the CUDA driver, which forked processes could not use any more.
os.environ[NVML_CHECK] = "1"
with garbage_collector_off():
    prepare_environment()
    import numpy
    import torch
    from transformers import conversion_mapping

    import toolkit.train.script  # noqa: F401
    from toolkit.job.argument_reading import argument_words

    if not torch.cuda.is_available():  # DeepSpeed selects its device when it is imported
        import cpuinfo
        import deepspeed  # noqa: F401

        cpuinfo.get_cpu_info()  # takes 1 s; `prepare_environment` caches the result
    # Tables that depend on the installed libraries alone: 0.2 s of each rank.
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    argument_words()

SET_BY_IMPORTS = {name: value for name, value in os.environ.items() if name not in _before}
"""Variables that the imports have set."""
LIBRARY_PATH = [entry for entry in sys.path if entry not in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))]
"""`sys.path` without the program's folder and PYTHONPATH, which are each program's own."""
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1


def resident_file_pages() -> list[tuple[int, int]]:
    """Return address and length in bytes of every range of file-backed memory that is resident in this process."""
    page = resource.getpagesize()
    stretches: list[tuple[int, int]] = []
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for line in maps:
            addresses, access, _, _, inode, *_ = line.split()
            if inode == "0" or "r" not in access:
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            entries = array.array("Q", os.pread(pagemap.fileno(), (end - start) // page * 8, start // page * 8))
            for address, entry in zip(range(start, end, page), entries, strict=True):
                if entry >> 63:  # present
                    joins = bool(stretches) and sum(stretches[-1]) == address
                    first, length = stretches.pop() if joins else (address, 0)
                    stretches.append((first, length + page))
    return stretches


RESIDENT = resident_file_pages()


def start_like_a_new_process(omp_num_threads: str) -> None:
    """Set what Python and torch set when they start: random generators, threads, and the memory that imports touch.

    Pages of files are not resident after a fork: a forked rank would report 130 MiB less host memory than a cold one.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address, length in RESIDENT:
        libc.madvise(address, length, MADV_POPULATE_READ)
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    if omp_num_threads.isdigit() and int(omp_num_threads) != torch.get_num_threads():
        torch.set_num_threads(int(omp_num_threads))
