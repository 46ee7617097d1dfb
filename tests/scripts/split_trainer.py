"""A user's own script under a preset with dimensions of parallelism: rows of different lengths, accumulated.

    torchrun --nproc_per_node 4 split_trainer.py fsdp2_tp MODEL OUTPUT tp=2

Writes `OUTPUT/log.json`: loss and gradient norm of each step.
"""

import json
import os
import sys
from pathlib import Path

from toolkit import load_preset
from toolkit.observe.rank_process import leave

GLOBAL_BATCH, ACCUMULATION, PIECES = 8, 2, 4


def main(preset_name: str, model_folder: str, output: str, *words: str) -> None:
    degrees = {name: int(degree) for name, _, degree in (word.partition("=") for word in words)}
    preset = load_preset(preset_name)
    layout = preset.layout(int(os.environ.get("WORLD_SIZE", "1")), degrees)
    different_batches = 1 if layout is None else layout.data_parallel_size
    batch = GLOBAL_BATCH // ACCUMULATION // different_batches
    job = {"max_steps": 3, "per_device_train_batch_size": batch, "gradient_accumulation_steps": ACCUMULATION}
    job |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "remove_unused_columns": False}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = preset.training_arguments(output_dir=output, **job, **quiet, **degrees)

    import torch
    from transformers import AutoModelForCausalLM, Trainer

    how = preset.from_pretrained_arguments(**degrees)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa", **how)
    model.config.use_cache = False
    rows = [list(range(7 * n, 7 * n + 9 + 5 * n % 17)) for n in range(1, 4 * GLOBAL_BATCH)]
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=pad)
    trainer.train()
    if args.process_index == 0:
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        Path(output).mkdir(parents=True, exist_ok=True)
        (Path(output) / "log.json").write_text(json.dumps(steps))


def pad(rows: list[list[int]]) -> dict:
    """Pad on the right to a length that every preset here can divide."""
    import torch

    width = -(-max(map(len, rows)) // PIECES) * PIECES
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    positions = torch.arange(width).repeat(len(rows), 1)
    labels = padded.masked_fill(real == 0, -100)
    return {"input_ids": padded, "attention_mask": real, "labels": labels, "position_ids": positions}


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
