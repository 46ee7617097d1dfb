"""The environment of a rank and the state of its interpreter, as JSON: equal in a cold start and in a forked one."""

import gc
import json
import locale
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any


def process_state() -> dict[str, Any]:
    import accelerate.state
    import deepspeed.accelerator
    import numpy
    import torch

    return {
        "environment": dict(os.environ),
        "environment_of_a_child": os.popen("printf %s $RANK-$OMP_NUM_THREADS").read(),
        "path": sys.path,
        "folder": str(Path.cwd()),
        "umask": os.umask(0o022),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_NOFILE", "RLIMIT_DATA")},
        "processors": sorted(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
        "leads_its_session": os.getsid(0) == os.getpid(),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "signals": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if number < 32},
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": [thread.name for thread in threading.enumerate()],
        "warning_filters": sorted({str(entry) for entry in warnings.filters}),
        "locale": locale.setlocale(locale.LC_ALL),
        "encoding": [sys.stdout.encoding, sys.stderr.encoding, sys.getfilesystemencoding()],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "torch_threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch_seed": torch.initial_seed(),
        "torch_modes": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_float32_matmul_precision()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cuda_initialised": torch.cuda.is_initialized(),
        "process_group": torch.distributed.is_initialized(),
        "accelerate_state": dict(accelerate.state.PartialState._shared_state),
        "deepspeed_device": deepspeed.accelerator.get_accelerator().device_name(),
        # Each process draws its own, so this alone must differ between any two.
        "random": [random.random(), float(numpy.random.random())],
    }


def write_process_state(prefix: str) -> None:
    Path(f"{prefix}{os.environ.get('RANK', '0')}.json").write_text(json.dumps(process_state(), default=str))
