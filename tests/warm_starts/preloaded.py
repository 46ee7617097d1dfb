"""Everything that a rank imports, for the server that ranks are forked from: it computes nothing, and has no thread."""

import contextlib
import ctypes
import errno
import os
import random
import resource
import sys
import threading
import weakref
from multiprocessing import reduction
from pathlib import Path
from socket import socket

from toolkit.engines.zero_process import import_muon_uncompiled
from toolkit.observe.rank_process import garbage_collector_off, prepare_environment, without_bitsandbytes

_before = set(os.environ)
# Without NVML, the check for GPUs initialises the CUDA driver, which forked processes could not use any more.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
with garbage_collector_off(), without_bitsandbytes():
    prepare_environment()
    import numpy
    import torch
    from transformers import conversion_mapping

    with contextlib.suppress(ImportError):  # older libraries, in the environment of somebody's script
        import toolkit.train.script  # noqa: F401
    from toolkit.job.argument_reading import argument_words

    if not torch.cuda.is_available():  # DeepSpeed selects its device when it is imported
        import cpuinfo

        import_muon_uncompiled()
        cpuinfo.get_cpu_info()  # takes 1 s; `prepare_environment` caches the result
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # cached, as all below: 0.2 s of each rank
    argument_words()

SET_BY_IMPORTS = {name: value for name, value in os.environ.items() if name not in _before}
"""Variables that the imports have set."""
LIBRARY_PATH = [entry for entry in sys.path if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
"""`sys.path` without PYTHONPATH, which is each program's own; multiprocessing sets the path of who asks for it."""
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    if (alive := finalizer.peek()) and alive[1] is torch.library._del_library:
        finalizer.atexit = False  # a process that ends takes its operators with it
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1

_receive_descriptors = reduction.recvfds


def _receive_request(sock: socket, size: int) -> list[int]:
    """A client that is killed as it asks for a process ends its request alone: multiprocessing's server would end."""
    try:
        return _receive_descriptors(sock, size)
    except (EOFError, ConnectionError):
        raise OSError(errno.ECONNABORTED, "the client ended before it sent its request") from None


reduction.recvfds = _receive_request


def _resident_file_pages() -> list[tuple[int, int]]:
    """Address and length in bytes of every range of file-backed memory that is resident in this process."""
    page, ranges = resource.getpagesize(), []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if inode != "0" and "r" in access:
            start, end = (int(address, 16) // page for address in addresses.split("-"))
            entries = numpy.fromfile("/proc/self/pagemap", numpy.uint64, end - start, offset=8 * start)
            edges = numpy.flatnonzero(numpy.diff(entries >> 63 == 1, prepend=False, append=False)).reshape(-1, 2)
            ranges += [((start + first) * page, (last - first) * page) for first, last in edges.tolist()]
    return ranges


RESIDENT = _resident_file_pages()


def start_like_a_new_process() -> None:
    """Set what Python and torch set when they start: random generators, threads, and the memory that imports touch.

    Pages of files are not resident after a fork: a forked rank would report 130 MiB less host memory than a cold one.
    """
    reduction.recvfds = _receive_descriptors
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address, length in RESIDENT:
        libc.madvise(address, length, 22)  # MADV_POPULATE_READ of linux/mman.h, since Linux 5.14
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
