"""Time the kernels that fast paths choose among: attention, experts, loss and norm; one JSON line for each.

Then, for inputs of each kind, which attention torch dispatches, and whether the verification of a run reads the same.

python benchmarks/gpu/kernel_times.py            # on a GPU in bf16; without one a few tiny ones, to try the script
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from toolkit.observe.kernels.read_kernels import LossGraph

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
LENGTH, WIDTH, HEADS, VOCAB = (4096, 4096, 32, 128_256) if ON_GPU else (64, 64, 4, 1000)
EXPERTS, TOKENS = (64, 16_384) if ON_GPU else (4, 256)
REPEATS = 5


def tensor(*size: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE, dtype=DTYPE, requires_grad=grad)


def seconds_of(run: Callable[[], torch.Tensor]) -> float:
    """Return the median seconds of a forward and its backward, after two that are not timed."""
    taken, gradient = [], torch.ones_like(run())
    for _ in range(2 + REPEATS):
        started = time.perf_counter()
        run().backward(gradient)
        if ON_GPU:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def attention(backend: SDPBackend) -> float:
    query, key, value = (tensor(1, HEADS, LENGTH, WIDTH // HEADS) for _ in range(3))

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return seconds_of(run)


def experts(*, grouped: bool) -> float:
    """Return the seconds of one projection of all experts, each for as many tokens: in one kernel, or one by one."""
    width = WIDTH // 4
    rows, weights = tensor(TOKENS, width), tensor(EXPERTS, width, width)
    ends = torch.arange(1, EXPERTS + 1, device=DEVICE, dtype=torch.int32) * (TOKENS // EXPERTS)

    def run() -> torch.Tensor:
        if grouped:
            return torch._grouped_mm(rows, weights, offs=ends)
        parts = rows.chunk(EXPERTS)
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    return seconds_of(run)


def loss(*, liger: bool) -> float:
    hidden, head = tensor(LENGTH, WIDTH), tensor(VOCAB, WIDTH)
    labels = torch.randint(0, VOCAB, (LENGTH,), device=DEVICE)
    if liger:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        return seconds_of(lambda: fused(head, hidden, labels))
    return seconds_of(lambda: functional.cross_entropy((hidden @ head.T).float(), labels))


def norm(*, liger: bool) -> float:
    hidden, weight = tensor(LENGTH, WIDTH), tensor(WIDTH)
    if liger:
        from liger_kernel.transformers.functional import liger_rms_norm

        return seconds_of(lambda: liger_rms_norm(hidden, weight, 1e-6))
    return seconds_of(lambda: functional.rms_norm(hidden, (WIDTH,), weight, 1e-6))


KERNELS: dict[str, Callable[[], float]] = {
    "attention, flash": lambda: attention(SDPBackend.FLASH_ATTENTION),
    "attention, cudnn": lambda: attention(SDPBackend.CUDNN_ATTENTION),
    "attention, math": lambda: attention(SDPBackend.MATH),
    "experts, grouped": lambda: experts(grouped=True),
    "experts, one by one": lambda: experts(grouped=False),
    "linear cross-entropy, Liger": lambda: loss(liger=True),
    "linear cross-entropy, torch": lambda: loss(liger=False),
    "RMSNorm, Liger": lambda: norm(liger=True),
    "RMSNorm, torch": lambda: norm(liger=False),
}


# Operations of torch's profiler -> what the verification calls them.
DISPATCHED = {
    **{"_scaled_dot_product_flash": "flash", "_scaled_dot_product_efficient": "efficient"},
    **{"_scaled_dot_product_cudnn": "cudnn", "_scaled_dot_product_attention_math": "math", "_safe_softmax": "math"},
}


def read_attention(
    *, dtype: torch.dtype = DTYPE, head: int = 64, values: int | None = None, mask: bool = False, dropout: float = 0.0
) -> str:
    """Return the attention that the loss's graph shows. Raises ValueError where torch's profiler saw another."""
    sizes = (head, head, values or head)
    query, key, value = (tensor(2, HEADS, 256, size).detach().to(dtype).requires_grad_() for size in sizes)
    seen = torch.ones(256, 256, dtype=torch.bool, device=DEVICE).tril() if mask else None
    with profile(use_cpu=True) as profiled:
        attended = functional.scaled_dot_product_attention(query, key, value, seen, dropout, is_causal=not mask)
    names = {event.name.removeprefix("aten::") for event in profiled.function_events}
    ran = {kind for name in names for start, kind in DISPATCHED.items() if name.startswith(start)}
    graph = LossGraph(attended.sum(), reads_saved=True)
    words = f"{'+'.join(sorted(graph.attention))}, {graph.dtype}, {graph.mask or 'mask unknown'}"
    if set(graph.attention) != ran:
        raise ValueError(f"read {words}; torch ran {'+'.join(sorted(ran))}")
    return words


READINGS: dict[str, Callable[[], str]] = {
    "attention read, half precision": lambda: read_attention(dtype=torch.bfloat16),
    "attention read, float32": lambda: read_attention(dtype=torch.float32),
    "attention read, with a mask": lambda: read_attention(mask=True),
    "attention read, heads of 288": lambda: read_attention(head=288),
    "attention read, values of another size": lambda: read_attention(head=96, values=64),
    "attention read, dropout": lambda: read_attention(dropout=0.1),
    "experts read": lambda: read_experts(),
}


def read_experts() -> str:
    rows, weights = tensor(64, 32), tensor(4, 32, 32)
    ends = torch.arange(1, 5, device=DEVICE, dtype=torch.int32) * 16
    graph = LossGraph(torch._grouped_mm(rows, weights, offs=ends).sum(), reads_saved=True)
    if not graph.has("GroupedMm"):
        raise ValueError(f"no node of a grouped product among {', '.join(sorted(graph.nodes))}")
    return "grouped_mm"


def main() -> None:
    for name, run in (READINGS | KERNELS).items():
        line: dict[str, Any] = {"kernel": name, "seconds": None, "note": ""}
        try:
            line["note" if name in READINGS else "seconds"] = run()
        except Exception as error:  # a kernel that this GPU, or this torch, does not have; or another was read
            line["note"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(line), flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
