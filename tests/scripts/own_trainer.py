"""A user's own script: their model, their rows, their subclass of transformers' Trainer, and a preset in Python.

    torchrun --nproc_per_node 2 own_trainer.py PRESET MODEL OUTPUT

One line observes it, so that what is in effect is read by the code that reads it in a run of the toolkit's own.
"""

import sys

from toolkit import load_preset
from toolkit.observe.rank_process import leave


def main(preset_name: str, model_folder: str, output: str) -> None:
    preset = load_preset(preset_name)
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = preset.training_arguments(output_dir=output, max_steps=1, per_device_train_batch_size=1, **quiet)

    import torch
    from transformers import AutoModelForCausalLM, Trainer

    from toolkit.observe.observer import observe

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.config.use_cache = False
    rows = [{"input_ids": list(range(n, n + 16)), "labels": list(range(n, n + 16))} for n in range(8)]
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    observe(trainer, folder=output, require=preset)
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
