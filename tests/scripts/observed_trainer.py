"""Somebody's own script: a Trainer subclass, random rows, a random Llama, and one line that observes it.

torchrun --nproc_per_node 2 observed_trainer.py PRESET FOLDER
"""

import sys

from toolkit import load_preset, observe
from toolkit.observe.rank_process import leave


def main(preset_name: str, folder: str) -> None:
    job = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = load_preset(preset_name).training_arguments(output_dir=f"{folder}/checkpoints", **job, **quiet)

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    class DoublingTrainer(Trainer):
        """Overrides what the observer overrides too."""

        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    rows = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(32)]
    trainer = DoublingTrainer(model=model, args=args, train_dataset=rows)
    observe(trainer, folder=f"{folder}/run")
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
