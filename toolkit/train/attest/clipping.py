"""Whether gradients are clipped: the norm that the Trainer tells of the first step, and that of what is optimized with.

Every rank reads its own part, without a collective; `clipping_differences` puts the parts of all ranks together.
The first step's gradient may be too small to tell, so `tried_norm` has one clipped that is not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from toolkit.runs.steps import grad_norm
from toolkit.train.attest.tensors import local
from toolkit.train.meter import grad_norm_facts

Facts = dict[str, Any]

# Both norms are of fp32 gradients; DeepSpeed and torch add 1e-6 to the divisor.
TOLERANCE = 1e-2
AT_OPTIMIZER, TRIED = "optimizer_norm", "tried_norm"
TRIED_TIMES = 10
"""The threshold: what is tried is that much too large."""
AT_THE_OPTIMIZER, WHEN_TRIED = "gradient norm at the optimizer", "norm of a large gradient, clipped"


class GradientNorms:
    """Watches the first step: `facts` has both norms as this rank knows them, its own share of a sharded one."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.hooks: list[Any] = []
        self.facts: Facts = grad_norm_facts(None) | {AT_OPTIMIZER: None, TRIED: None}

    def watch(self, trainer: Any) -> None:
        """Look at what the Trainer tells and at what reaches the optimizer, until `close`."""
        if dist.is_initialized() and dist.get_backend() == "fake":
            return  # in a rehearsal no norm is added up over ranks
        told = trainer._get_grad_norm

        def tell(*args: Any, **kwargs: Any) -> Any:
            norm = told(*args, **kwargs)
            self.facts |= grad_norm_facts(norm)
            return norm

        self.trainer, self.trainer._get_grad_norm = trainer, tell
        self.hooks = [optimizer.register_step_pre_hook(self._look) for optimizer in inner_optimizers(trainer)]

    def close(self) -> None:
        """Take both looks away again, and have a large gradient clipped."""
        if self.trainer is None:
            return
        del self.trainer._get_grad_norm
        for hook in self.hooks:
            hook.remove()
        self.facts[TRIED] = tried_norm(self.trainer)

    def _look(self, optimizer: Any, *_: Any) -> None:
        """DeepSpeed calls its inner optimizer once a group of parameters: their norms add up as squares."""
        gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(get_total_norm([gradient for gradient in gradients if gradient.numel()]))
        self.facts[AT_OPTIMIZER] = math.hypot(self.facts[AT_OPTIMIZER] or 0.0, norm)


def inner_optimizers(trainer: Any) -> list[Optimizer]:
    """torch's optimizers, below what accelerate and DeepSpeed put around them; partial offloading has one more."""
    wrapped = trainer.model_wrapped
    outer = wrapped.optimizer if hasattr(wrapped, "zero_optimization_stage") else trainer.optimizer
    found = (getattr(outer, "optimizer", outer), getattr(outer, "backup_optimizer", None))
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def tried_norm(trainer: Any) -> float | None:
    """What is left of a gradient ten times too large; None without clipping, or where it cannot be tried.

    Every rank must call it: under FSDP2 ranks agree on the norm.
    """
    threshold, scaled = trainer.args.max_grad_norm, trainer.args.fp16  # fp16's scaler takes a second look amiss
    if not threshold or scaled:
        return None
    if hasattr(trainer.model_wrapped, "zero_optimization_stage"):
        return _tried_by_deepspeed(trainer.model_wrapped.optimizer, threshold)
    return _tried_by_trainer(trainer, threshold)


def _tried_by_trainer(trainer: Any, threshold: float) -> float:
    """With a gradient of the smallest trained parameter alone."""
    trained = (p for p in trainer.model_wrapped.parameters() if p.requires_grad and p.numel())
    smallest = min(trained, key=lambda p: p.numel())
    element = TRIED_TIMES * threshold / math.sqrt(smallest.numel())
    smallest.grad = torch.full_like(smallest, element)
    trainer._clip_grad_norm(trainer.model_wrapped)
    kept, smallest.grad = local(smallest.grad), None
    return threshold if not kept.numel() else TRIED_TIMES * threshold * float(kept.flatten()[0]) / element


def _tried_by_deepspeed(zero: Any, threshold: float) -> float | None:
    """ZeRO-1 and 2 clip what they are given; ZeRO-3 only its own gradients, which are gone after the step."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return None
    tried = torch.tensor([TRIED_TIMES * threshold], device=zero.device)
    zero.unscale_and_clip_grads([tried], tried.clone())
    return float(tried)


def clipping_differences(ranks: list[Facts], threshold: float) -> list[Facts]:
    """A norm at the optimizer that is not the one told, clipped; nothing where a norm is unknown."""
    found = _difference(AT_THE_OPTIMIZER, grad_norm(ranks), _at_optimizer(ranks), threshold, rank=None)
    tried = [] if found else [(facts["rank"], facts[TRIED]) for facts in ranks]
    large = TRIED_TIMES * threshold
    return found + [d for rank, kept in tried for d in _difference(WHEN_TRIED, large, kept, threshold, rank=rank)]


def _difference(
    fact: str, before: float | None, after: float | None, threshold: float, *, rank: int | None
) -> list[Facts]:
    if before is None or after is None or not math.isfinite(before):
        return []
    promised = min(before, threshold or math.inf)
    if math.isclose(after, promised, rel_tol=TOLERANCE):
        return []
    said = f"{promised:.4f} ({before:.4f}, clipped at {threshold:g})"
    return [{"fact": fact, "rank": rank, "promised": said, "found": f"{after:.4f}"}]


def without_norms(ranks: list[Facts], threshold: float) -> list[Facts]:
    """Norms differ from run to run in their last digits: what is kept is whether there was anything to clip."""
    before = grad_norm(ranks)
    bites = None if before is None else bool(0 < threshold < before)
    norms = GradientNorms().facts
    return [{name: fact for name, fact in facts.items() if name not in norms} | {"clipped": bites} for facts in ranks]


def _at_optimizer(ranks: list[Facts]) -> float | None:
    """Over all ranks; each replica of the model has all of the gradient."""
    shares = [facts[AT_OPTIMIZER] for facts in ranks]
    if None in shares:
        return None
    whole = ranks[0]["sharding"] == "replicate"
    replicas = len(ranks) if whole else len(ranks) // (ranks[0].get("dp_shard_size") or len(ranks))
    return math.hypot(*shares) / math.sqrt(replicas)
