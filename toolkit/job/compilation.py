"""`--torch_compile`: which backend and mode, checked before a launch. No torch.

>>> Compilation.chosen(False, backend=None, mode="max-autotune")
Compilation(backend='inductor', mode='max-autotune')
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.versions import is_importable

# Backends of torch 2.13 that train (`torch._dynamo.list_backends()`, and `aot_eager`, for debugging). The others are
# for inference (tensorrt, onnxrt, tvm), for other devices (openxla, hpu_backend, neuron), or are gone (nvfuser).
BACKENDS = ("inductor", "cudagraphs", "aot_eager", "eager")
# `torch._inductor.list_mode_options()`; inductor's alone: torch passes a mode to no other backend.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DEFAULT_BACKEND = "inductor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """How the decoder layers are compiled."""

    backend: str
    mode: str | None

    @classmethod
    def chosen(cls, compiles: bool, *, backend: str | None, mode: str | None) -> Compilation | None:
        """Return how a job compiles; None where it does not. A backend or a mode alone switches it on."""
        if not compiles and backend is None and mode is None:
            return None
        return cls(backend=backend or DEFAULT_BACKEND, mode=mode)


def check_compilation(compilation: Compilation | None) -> None:
    """Raise ToolkitError for a backend or mode that torch does not have."""
    if compilation is None:
        return
    backend, mode = compilation.backend, compilation.mode
    if backend not in BACKENDS:
        raise ToolkitError(
            f"--torch_compile_backend is {shown(backend)}, expected one of {', '.join(BACKENDS)}",
            hint=did_you_mean(backend, BACKENDS, otherwise=f"`--torch_compile_backend {DEFAULT_BACKEND}`"),
        )
    if mode is not None and mode not in MODES:
        raise ToolkitError(
            f"--torch_compile_mode is {shown(mode)}, expected one of {', '.join(MODES)}",
            hint=did_you_mean(mode, MODES, otherwise=f"`--torch_compile_mode {MODES[0]}`"),
        )
    if mode is not None and backend != DEFAULT_BACKEND:
        raise ToolkitError(
            f"--torch_compile_mode is inductor's, and --torch_compile_backend is {backend}",
            hint="leave `--torch_compile_mode` out",
        )


def missing_compiler(compilation: Compilation | None, *, on_cpu: bool) -> ToolkitError | None:
    """Return an error if this node lacks what inductor generates code with: g++ for a CPU, Triton for a GPU."""
    if compilation is None or compilation.backend != DEFAULT_BACKEND:
        return None
    if not on_cpu:
        missing = None if is_importable("triton") else ("Triton", "pip install triton")
    else:
        compiler = os.environ.get("CXX") or "g++"  # `torch._inductor.config.cpp.cxx`
        missing = None if shutil.which(compiler) else (f"the C++ compiler {compiler!r}", "apt-get install g++")
    if missing is None:
        return None
    return ToolkitError(f"--torch_compile needs {missing[0]} for its kernels", hint=missing[1])
