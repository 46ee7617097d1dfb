"""What the process of a rank does around its script: environment, imports, failure report, exit."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.engines.compiled_ops import cache_cpu_info, path_with_ninja, use_cached_extensions
from toolkit.errors import EXIT_DONE
from toolkit.hardware.shared_gpu import nccl_version, rank_variables, sharing_ranks
from toolkit.record.folder import PREPARED_VARIABLE, RunFolder

if TYPE_CHECKING:
    from toolkit.observe.progress import Progress


# Of glibc's malloc.h: free bytes at which a heap's end is given back (-1: never), bytes from which memory is mapped on
# its own instead of lying in a heap, and heaps that threads may have.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
# A bucket of ZeRO-1 and ZeRO-2 is larger: all of it is allocated in each step, and a part is used.
MAPPED_BYTES = 2**27


def prepare_environment() -> None:
    """Set what torch, DeepSpeed and the Hugging Face libraries read when they are imported.

    Raises ToolkitError where several ranks are to share a GPU and cannot.
    """
    if (ranks := sharing_ranks()) is not None:
        os.environ.update(rank_variables(os.environ, nccl=nccl_version()))
    use_cached_extensions()
    cache_cpu_info()
    os.environ["PATH"] = path_with_ninja()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a log file holds lines, not bars
    # Deprecations inside torch and DeepSpeed, printed hundreds of times per run; none is about the user's job.
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"(torch\.distributed|transformers\.modeling_utils)"
    )
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it reports an optional kernel
    import torch
    from torch.utils.file_baton import FileBaton

    if FileBaton.wait.__module__ != __name__:  # a rank may be forked from a process that has been here
        FileBaton.wait = _announced(FileBaton.wait)
    if ranks is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1 / ranks)  # no rank takes another one's share
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def share_one_heap() -> None:
    """Let the threads that are started from now on use one heap, so that one has what another has freed."""
    _set_malloc(M_ARENA_MAX, 1)


def keep_freed_pages() -> None:
    """Let glibc keep the memory of freed tensors for the next step, on a rank whose tensors are in host memory.

    Otherwise the kernel gets it back, and clears every page that it gives out again.
    """
    if _set_malloc(M_MMAP_THRESHOLD, MAPPED_BYTES):
        _set_malloc(M_TRIM_THRESHOLD, -1)


def _set_malloc(option: int, value: int) -> bool:
    """Set an option of glibc's malloc, and return whether it is set.

    It is not with another C library, where the user's own settings are to stay, or where an older glibc refuses a
    threshold above 32 MiB.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))


def _announced(wait: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return torch's wait for another process that compiles an op, which says nothing, with a line before it."""

    def announced_wait(baton: Any) -> None:
        op = os.path.basename(os.path.dirname(baton.lock_file_path))  # noqa: PTH119, PTH120
        if os.environ.get("LOCAL_RANK", "0") in ("0", "1"):  # one of these waits in any case
            print(
                f"waiting for another process that compiles {op}; if there is none: rm {baton.lock_file_path}",
                flush=True,
            )
        wait(baton)

    return announced_wait


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Import without collecting, a fifth of the time, and keep what was imported out of every later collection."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Let peft find no bitsandbytes, which it would import for every run: it compiles its ops through inductor.

    That is 1.3 CPU-seconds and 47 MiB per rank. Afterwards bitsandbytes is found again.
    """
    if "bitsandbytes" in sys.modules:
        yield
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment] # Python's own mark of a module that is not there
    try:
        yield
    finally:
        del sys.modules["bitsandbytes"]
        for module in ("peft.import_utils", "transformers.utils.import_utils"):
            for name in ("is_bnb_available", "is_bnb_4bit_available", "is_bitsandbytes_available"):
                if (check := getattr(sys.modules.get(module), name, None)) is not None:
                    check.cache_clear()


@contextmanager
def rank_imports(progress: Progress, folder: Callable[[], Path | str | None]) -> Iterator[None]:
    """Import what a rank needs. A failure is reported in the run's folder, unless an earlier run's records are there.

    `folder` is called only then.
    """
    try:
        with garbage_collector_off():
            prepare_environment()
            yield
    except Exception:
        with suppress(Exception):  # the arguments are wrong as well
            run = RunFolder(Path(str(folder())))
            if PREPARED_VARIABLE in os.environ or not run.run_json.exists():
                run.make()
                progress.output_dir = run.path
        raise


def run_reporting_failures(run: Callable[[Progress], None]) -> int:
    """Call `run` and return the exit code 0; turn every failure into failure.json, a message and an exit code."""
    from toolkit.observe.failure_report import report_failure
    from toolkit.observe.progress import Progress

    progress = Progress()
    try:
        run(progress)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except BaseException as error:  # every cause must reach failure.json
        code = report_failure(error, progress)
        if progress.swap_folder is not None:  # after the report: a rank without its swap files fails and reports that
            shutil.rmtree(progress.swap_folder, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the other ranks may hang in a collective; their launcher ends them
    return EXIT_DONE


def leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down.

    gloo's threads may still hold tensors of finished collectives; releasing one while the interpreter shuts down
    aborts a rank that was done, even after destroy_process_group (https://github.com/pytorch/pytorch/pull/179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
