"""Time the kernels that fast paths choose among: attention, experts, loss and norm; one JSON line for each.

python benchmarks/gpu/kernels.py            # on a GPU in bf16; without one a few tiny ones, to try the script
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def main() -> None:
    for name, run in KERNELS.items():
        line = {"kernel": name, "seconds": None, "note": ""}
        try:
            line["seconds"] = run()
        except Exception as error:  # a kernel that this GPU, or this torch, does not have
            line["note"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        print(json.dumps(line), flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
