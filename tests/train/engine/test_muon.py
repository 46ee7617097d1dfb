"""Muon trains hidden matrices and AdamW the rest, each as torch's own optimizer would, through one optimizer."""

from types import SimpleNamespace
from typing import Any

import torch
from model_configs import LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.train.engine.muon import MuonWithAdamW, make_muon

ARGS = SimpleNamespace(
    learning_rate=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8, optim_args=None
)


def model_and_optimizer() -> tuple[Any, MuonWithAdamW]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    return model, make_muon(model, args=ARGS)


def test_two_steps_are_those_of_torchs_own_optimizers() -> None:
    model, optimizer = model_and_optimizer()
    reference, _ = model_and_optimizer()
    matrices = [p for name, p in reference.named_parameters() if name.endswith("proj.weight")]
    others = [p for name, p in reference.named_parameters() if not name.endswith("proj.weight")]
    decayed = [p for p in others if p.ndim == 2]
    own = [torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
    own += [torch.optim.AdamW(decayed, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99))]
    own += [torch.optim.AdamW([p for p in others if p.ndim == 1], lr=1e-2, weight_decay=0.0, betas=(0.9, 0.99))]
    tokens = torch.arange(8).reshape(1, 8)
    for _ in range(2):
        for each, steps in ((model, [optimizer]), (reference, own)):
            each(input_ids=tokens, labels=tokens).loss.backward()
            for step in steps:
                step.step()
                step.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
