"""Somebody's script whose ranks hold the same weights, or do not; its first word says why.

python apart.py MODE OUTPUT_DIR
"""

import os
import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    """Buffers of its batch norm differ by rank, as they may."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, features, labels):
        logits = self.layers(features)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class NeverSynced(Trainer):
    def training_step(self, model, *args, **kwargs):
        with model.no_sync():
            return super().training_step(model, *args, **kwargs)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, self.args.train_batch_size, shuffle=True)


class Changes(TrainerCallback):
    """What one rank, or the script, does to the weights of its own."""

    def __init__(self, mode):
        self.mode = mode

    def on_step_end(self, _args, state, _control, model=None, **_):
        weight = next(model.parameters())
        if self.mode == "drifts" and state.global_step == 2 and os.environ["RANK"] == "1":
            weight.data[0, 0] += 1e-6
        if self.mode == "freezes" and state.global_step == 2:
            weight.requires_grad_(False)

    def on_train_end(self, _args, _state, _control, model=None, **_):
        if self.mode == "averages" and os.environ["RANK"] == "0":  # its own copy of the weights, to save it
            for parameter in model.parameters():
                parameter.data.mul_(0.5)


def main(mode, output_dir):
    torch.manual_seed(0)
    rows = [{"features": torch.randn(16), "labels": n % 4} for n in range(64)]
    args = TrainingArguments(
        output_dir=output_dir, use_cpu=True, disable_tqdm=True, report_to="none", per_device_train_batch_size=4,
        max_steps=4, save_strategy="steps" if "saves" in mode else "no", save_steps=3, learning_rate=1e-2,
        ddp_find_unused_parameters=True, ddp_broadcast_buffers=mode != "buffers", warmup_steps=2 * ("warm" in mode),
    )  # fmt: skip
    kind = {"never_synced": NeverSynced, "never_synced_warm": NeverSynced, "own_loader": OwnLoader}.get(mode, Trainer)
    callback = Changes(mode.removesuffix("_saves"))
    kind(model=Model(), args=args, train_dataset=rows, callbacks=[callback]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
