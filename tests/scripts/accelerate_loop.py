"""Somebody's training loop on accelerate alone, with one line that observes it.

accelerate launch ... accelerate_loop.py MODE FOLDER
"""

import sys

import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader

from toolkit import observe


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, hidden):
        return hidden + torch.relu(self.linear(hidden))


class Classifier(torch.nn.Module):
    """No class of transformers'."""

    _no_split_modules = ("Layer",)  # what accelerate's FSDP2 gathers one by one

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.Sequential(Layer(), Layer())
        self.out = torch.nn.Linear(32, 4)

    def forward(self, input_ids):
        return self.out(self.layers(self.embedding(input_ids).mean(1)))


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 4}


def main(mode, folder):
    if mode == "three":  # one after the other, in one process
        for each in ("plain", "late", "skips"):
            observed(each, f"{folder}/{each}")
    else:
        observed(mode, folder)
    Accelerator().end_training()


def observed(mode, folder):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    if mode == "whole":
        del Classifier._no_split_modules
    model, rows = Classifier(), [{"input_ids": list(range(n, n + 8))} for n in range(32)]
    if mode == "stays":
        model.layers.append(torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    workers = {"num_workers": 2, "persistent_workers": True} if mode == "workers" else {}
    size = 2 + (mode == "other_size" and accelerator.process_index)
    loader, held_out = DataLoader(rows, size, collate_fn=collate, **workers), DataLoader(rows, 2, collate_fn=collate)
    model, optimizer, held_out = accelerator.prepare(model, optimizer, held_out)
    loader = loader if mode == "own_loader" else accelerator.prepare(loader)
    observer = observe(accelerator=accelerator, model=model, optimizer=optimizer, folder=folder)
    if mode == "open":
        return
    with observer:
        train(mode, accelerator, model, optimizer, skip_first_batches(loader, 4) if mode == "skips" else loader)
        model.eval()
        with torch.no_grad():
            correct = sum((model(batch["input_ids"]).argmax(-1) == batch["labels"]).sum() for batch in held_out)
        print(f"{int(correct)} correct")
        model.train(not mode.startswith("stays"))
        if mode in ("late", "workers", "stays", "stays_alike"):  # an epoch later
            train(mode, accelerator, model, optimizer, loader)
    if mode in ("late", "workers"):
        assert all(batch.keys() == {"input_ids", "attention_mask", "labels"} for batch in loader)


def train(mode, accelerator, model, optimizer, loader):
    batches = iter(loader)
    if mode == "late":  # all of them are there before the first is trained on
        batches = iter(list(batches))
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
            loss = loss / accelerator.gradient_accumulation_steps if mode == "twice" else loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and mode != "unclipped":
                accelerator.clip_grad_norm_(model.parameters(), 0.5 if mode == "contradicts" else 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if mode == "fails" and number == 5:
            raise LookupError("what the loop could not find")


if __name__ == "__main__":
    main(*sys.argv[1:])
