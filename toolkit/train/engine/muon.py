"""torch's Muon for the weights of hidden layers and AdamW for everything else, as the one optimizer that a Trainer has.

Muon orthogonalises the momentum of a matrix (https://kellerjordan.github.io/posts/muon/); embeddings, heads, norms and
biases are left to AdamW. Both follow `--learning_rate` and `--weight_decay`: Muon's updates are scaled to the size of
AdamW's (https://arxiv.org/abs/2502.16982, section 2.2).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import Trainer

from toolkit.models.optimizers import parse_optimizer_arguments
from toolkit.observe.verify.expected import hidden_matrices

MATCHES_ADAMW = "match_rms_adamw"
Group = dict[str, Any]


class MuonWithAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """Muon for the groups with `use_muon`, AdamW for the others: one optimizer for schedules and engines."""

    def __init__(self, groups: Iterable[Group], *, lr: float) -> None:
        """Give every group the options of its own algorithm; `lr` is for groups without one."""
        # Groups are given to them before each step; torch makes no optimizer without a parameter.
        kinds = {True: torch.optim.Muon, False: torch.optim.AdamW}
        self._parts = {uses_muon: kind([torch.zeros(1, 1)], lr=lr) for uses_muon, kind in kinds.items()}
        super().__init__([{**self._parts[group["use_muon"]].defaults, **group} for group in groups], {"lr": lr})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step both algorithms."""
        loss = None if closure is None else closure()
        for uses_muon, optimizer in self._parts.items():
            optimizer.param_groups = [group for group in self.param_groups if group["use_muon"] is uses_muon]
            optimizer.state = self.state
            optimizer.step()
        return loss


def make_muon(model: Any, *, args: Any) -> MuonWithAdamW:
    """Return the optimizer for a model, under the Trainer's arguments; weight decay as the Trainer gives it."""
    options = parse_optimizer_arguments(args.optim_args)
    muon = {
        "momentum": float(options.get("momentum", 0.95)),
        "nesterov": options.get("nesterov", "true").lower() in ("true", "1", "yes"),
        "ns_steps": int(options.get("ns_steps", 5)),
        "adjust_lr_fn": options.get("adjust_lr_fn", MATCHES_ADAMW),
    }
    adamw = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    matrices, decayed = hidden_matrices(model), set(Trainer.get_decay_parameter_names(None, model))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = []
    for uses_muon, own in ((True, muon), (False, adamw)):
        for decays in (True, False):
            found = [p for name, p in named if (id(p) in matrices) is uses_muon and (name in decayed) is decays]
            decay = args.weight_decay if decays else 0.0
            groups += [{"params": found, "use_muon": uses_muon, "weight_decay": decay, **own}] if found else []
    return MuonWithAdamW(groups, lr=args.learning_rate)
