"""Verify gradient clipping: compare the norm that the Trainer reports with the norm that reaches the optimizer.

Each rank reads its own part of the first step, without a collective; `clipping_differences` combines the parts. The
first gradient may be below the threshold, so a synthetic gradient above it is clipped as well.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from toolkit.engines.live_engine import live_engine
from toolkit.engines.tensors import local, local_values
from toolkit.engines.torch_live import is_shard
from toolkit.observe.verify.differences import Difference, Readings
from toolkit.parallel.layout import ParallelLayout
from toolkit.record.measurements import StepRow, grad_norm
from toolkit.record.reading import Values

# Both norms are of fp32 gradients; DeepSpeed and torch add 1e-6 to the divisor.
RELATIVE_TOLERANCE = 1e-2
# torch adds the squares of a tensor on a CPU in fp32: of 298 million elements it misses 3 % of the norm.
ACCURATE_ELEMENTS = 2**20
AT_OPTIMIZER = "gradient norm at the optimizer"
CHANGED_AFTER_CLIPPING = f"{AT_OPTIMIZER}, after what the script does to clipped gradients"
SYNTHETIC_NORM = 10  # norm of the synthetic gradient, as a multiple of the threshold


class NormReader:
    """Records the norms of the first step in `reading`, None where the engine does not show one.

    Those of `grad_norm_facts` are the Trainer's; `clipped_norm` is that of the model's gradients after clipping,
    `optimizer_norm` that of the gradients that this rank's optimizer steps with, `synthetic_norm` that of a gradient of
    `SYNTHETIC_NORM` times the threshold, after clipping.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self.layout: ParallelLayout | None = None
        self.hooks: list[Any] = []
        unknown = dict.fromkeys(("clipped_norm", "optimizer_norm", "synthetic_norm"))
        self.reading: Values = {"rank": 0, **grad_norm_facts(None), **unknown}

    def start(self, trainer: Any, layout_at_load: ParallelLayout | None = None) -> None:
        """Hook the step of torch's optimizers inside accelerate's and DeepSpeed's; partial offload has a second one."""
        if dist.is_initialized() and dist.get_backend() == "fake":
            return  # no norm is reduced in a rehearsal
        self.trainer, self.layout = trainer, layout_at_load
        self.reading["rank"] = trainer.args.process_index
        wrapped = trainer.model_wrapped
        outer = live_engine(wrapped).optimizer(trainer)
        for optimizer in (getattr(outer, "optimizer", outer), getattr(outer, "backup_optimizer", None)):
            if isinstance(optimizer, Optimizer):
                self.hooks.append(optimizer.register_step_pre_hook(self._on_step))

    def add_grad_norm(self, grad_norm: Any) -> None:
        """Note the Trainer's norm of the first step, before clipping, right after it has clipped."""
        if self.trainer is None:
            return
        self.reading |= grad_norm_facts(grad_norm)
        wrapped = self.trainer.model_wrapped
        if not live_engine(wrapped).reduces_itself:
            self.reading["clipped_norm"] = self._norm(wrapped.parameters())

    def stop(self, *, tries_clipping: bool) -> None:
        """Remove the hooks, then clip a synthetic gradient. Every rank must call it."""
        for hook in self.hooks:
            hook.remove()
        trainer, self.trainer = self.trainer, None
        if trainer is not None and tries_clipping:
            self.reading["synthetic_norm"] = clip_synthetic_gradient(trainer)

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        """DeepSpeed calls its inner optimizer once per parameter group: their norms add up as squares."""
        norm = self._norm(p for group in optimizer.param_groups for p in group["params"])
        self.reading["optimizer_norm"] = math.hypot(self.reading["optimizer_norm"] or 0.0, norm)

    def _norm(self, parameters: Iterable[Any]) -> float:
        gradients = [local_values(p.grad) / math.sqrt(self._copies(p)) for p in parameters if p.grad is not None]
        if live_engine(self.trainer.model_wrapped).reduces_itself:  # flat, and with offload in host memory
            gradients = [part for gradient in gradients for part in gradient.flatten().split(ACCURATE_ELEMENTS)]
        return float(get_total_norm([gradient for gradient in gradients if gradient.numel()]))

    def _copies(self, parameter: Any) -> int:
        """The ranks that hold the same part of a parameter's gradient, where layers are split; otherwise 1."""
        if hasattr(self.trainer, "gradient_copies"):
            return int(self.trainer.gradient_copies(parameter))
        if self.layout is None or self.layout.tp == self.layout.ep == 1:
            return 1
        placements = getattr(parameter.grad, "placements", ())
        sizes = zip(placements, map(int, parameter.grad.device_mesh.shape), strict=True) if placements else ()
        return int(dist.get_world_size()) // math.prod(size for placement, size in sizes if is_shard(placement))


def clip_synthetic_gradient(trainer: Any) -> float | None:
    """Return the norm of a synthetic gradient after clipping; None without clipping or where it cannot be tried.

    Every rank must call it: under FSDP2 ranks reduce the norm.
    """
    threshold, wrapped = trainer.args.max_grad_norm, trainer.model_wrapped
    if not threshold or trainer.args.fp16:  # fp16's loss scaler would count the second look as an overflow check
        return None
    live = live_engine(wrapped)
    if live.reduces_itself:
        return live.clip_synthetic_gradient(SYNTHETIC_NORM * threshold)
    # The smallest trained parameter alone gets a gradient: on each rank of a pipeline another one, a part of it. A loop
    # may look at those that it has.
    held = [(p, p.grad) for p in wrapped.parameters() if p.grad is not None]
    for p, _ in held:
        p.grad = None
    smallest = min((p for p in wrapped.parameters() if p.requires_grad and p.numel()), key=lambda p: p.numel())
    element = SYNTHETIC_NORM * threshold / math.sqrt(getattr(trainer, "gradient_parts", 1) * smallest.numel())
    smallest.grad = torch.full_like(smallest, element)
    trainer._clip_grad_norm(wrapped)
    clipped, smallest.grad = local(smallest.grad), None
    for p, gradient in held:
        p.grad = gradient
    kept = float(clipped.flatten()[0]) / element if clipped.numel() else 1 / SYNTHETIC_NORM
    return float(SYNTHETIC_NORM * threshold * kept)


def clipping_differences(norms: Sequence[Values], threshold: float, *, replicas: int) -> list[Difference]:
    """Return norms at the optimizer that are not the reported norm, clipped; none where a norm is unknown.

    `replicas` is the number of complete copies of the gradient among the ranks.
    """

    def of_all_ranks(name: str) -> float | None:
        shares = [norm[name] for norm in norms if norm.get(name) is not None]
        return math.hypot(*shares) / math.sqrt(replicas) if len(shares) == len(norms) else None

    def unclipped(name: str, rank: int | None, before: float | None, after: float | None) -> list[Difference]:
        if before is None or after is None or not math.isfinite(before):
            return []
        expected = min(before, threshold or math.inf)
        clipped = f"{expected:.4f} ({before:.4f}, clipped at {threshold:g})"
        is_clipped = math.isclose(after, expected, rel_tol=RELATIVE_TOLERANCE)
        return [] if is_clipped else [Difference(name=name, rank=rank, expected=clipped, found=f"{after:.4f}")]

    synthetic, large = SYNTHETIC_NORM * threshold, "norm of a large gradient, clipped"
    clipped, stepped, reported = of_all_ranks("clipped_norm"), of_all_ranks("optimizer_norm"), _reported_norm(norms)
    found = unclipped(AT_OPTIMIZER, None, reported, clipped)
    if len({norm["grad_norm"] for norm in norms}) > 1:  # a script that reduces gradients itself, after they are clipped
        each_rank = ((norm["rank"], norm["grad_norm"], norm.get("clipped_norm")) for norm in norms)
        found = [each for rank, before, after in each_rank for each in unclipped(AT_OPTIMIZER, rank, before, after)]
    found = found or unclipped(AT_OPTIMIZER if clipped is None else CHANGED_AFTER_CLIPPING, None, reported, stepped)
    return found + [
        each for norm in norms for each in unclipped(large, norm["rank"], synthetic, norm["synthetic_norm"])
    ]


def was_clipped(norms: Sequence[Values], threshold: float) -> bool | None:
    """Return True if the first gradient was above the threshold; None if its norm is unknown.

    `attestation.json` records this instead of the norms, whose last digits differ from run to run.
    """
    before = _reported_norm(norms)
    return None if before is None else bool(0 < threshold < before)


def _reported_norm(norms: Sequence[Values]) -> float | None:
    return grad_norm([StepRow.model_construct(**norm) for norm in norms])


def gradient_replicas(ranks: Readings) -> int:
    """Return the number of complete copies of the gradient among the ranks.

    Where layers are split, each rank has divided its part by its own number of copies already.
    """
    first = ranks[0]
    layout = first.layout or {}
    if max(layout.get(name, 1) for name in ("tp", "ep", "pp")) > 1:
        return 1
    if first.sharding == "replicate":
        return len(ranks)
    return len(ranks) // (first.dp_shard_size or len(ranks))


def grad_norm_facts(grad_norm: Any) -> dict[str, Any]:
    """Return the norm over all ranks, or under FSDP2 this rank's share of it, which readers combine.

    Reading the value of a sharded norm would add a collective to every step.
    """
    facts: dict[str, Any] = {"grad_norm": None, "local_grad_norm": None, "grad_norm_ranks": None}
    if grad_norm is None:
        return facts
    norm = float(getattr(grad_norm, "to_local", lambda: grad_norm)())
    placements = enumerate(getattr(grad_norm, "placements", ()))
    shared_by = [grad_norm.device_mesh.size(dim) for dim, placement in placements if placement.is_partial()]
    shared = {"local_grad_norm": norm, "grad_norm_ranks": math.prod(shared_by)}
    return facts | (shared if shared_by else {"grad_norm": norm})
