"""Train with TRL's DPOTrainer; the toolkit starts, verifies and records the script, which knows nothing of it.

When to use it: you have a TRL script, and want it to run unchanged under any preset.

    toolkit train --preset zero3 --num-processes 8 --script examples/with_dpo.py --output-dir runs/with_dpo

It needs `pip install trl`. To try it without GPUs, on two processes, give it a small model:

    toolkit train --preset zero3 --num-processes 2 --script examples/with_dpo.py --output-dir runs/with_dpo -- \\
        --model "$(python -m toolkit.demo --model)" --max_steps 4

Afterwards, `toolkit checkpoint export runs/with_dpo OUT` writes the adapter of its newest checkpoint.
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer


def main() -> None:
    options = read_options()
    args = DPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        num_train_epochs=3,
        per_device_train_batch_size=2,  # pairs: 4 sequences per GPU and step
        max_length=1024,
        model_init_kwargs={"dtype": options.dtype},
        beta=0.1,
        learning_rate=1e-5,
        use_cpu=not torch.cuda.is_available(),  # bf16, TRL's default, asks for it
        logging_steps=1,
        save_strategy="epoch",
        report_to="none",
    )
    trainer = DPOTrainer(
        model=options.model,
        args=args,
        train_dataset=load_dataset("json", data_files=options.dataset, split="train"),
        # The reference model is the base without its adapter: it costs no memory.
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a hub id or a folder")
    parser.add_argument("--dtype", default="float32", help="of the frozen base; float32 is TRL's default")
    parser.add_argument("--dataset", default="examples/preferences.jsonl", help="rows of prompt, chosen and rejected")
    parser.add_argument("--output_dir", default="runs/with_dpo/checkpoints")
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps; default: all epochs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
