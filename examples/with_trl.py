"""Train with TRL's SFTTrainer under any preset; replace SFT by DPO for preference training.

When to use it: you want TRL's trainers, and the engine and settings of a preset.

    torchrun --nproc_per_node 8 examples/with_trl.py --preset zero2

It needs `pip install trl`. A TRL script that you do not want to change runs under a preset's file as well, from any
directory: `accelerate launch --config_file CLONE/accelerate_configs/zero2.yaml --num_processes 8 script.py`.
To try this one without GPUs, on two processes:

    torchrun --nproc_per_node 2 examples/with_trl.py --preset zero2 --model "$(python -m toolkit.demo --model)"
"""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from toolkit import load_preset


def main() -> None:
    options = read_options()
    # First of all: the trainer then loads the model as the preset shards it.
    args = load_preset(options.preset).training_arguments(
        SFTConfig,
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        max_length=2048,
        num_train_epochs=3,
        per_device_train_batch_size=4,  # global batch on 8 GPUs: 4 x 8 = 32 sequences
        learning_rate=2e-4,
        logging_steps=1,
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=options.model,
        args=args,
        train_dataset=load_dataset("json", data_files=options.dataset, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="zero2", help="see `toolkit presets`")
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a hub id or a folder")
    parser.add_argument("--dataset", default="examples/data.jsonl", help="a JSONL file of conversations")
    parser.add_argument("--output_dir", default="runs/with_trl")
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps; default: all epochs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
