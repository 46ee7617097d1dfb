"""Train with transformers' Trainer in a script of your own, under any preset.

When to use it: you have a training script, and want DDP, ZeRO or FSDP2 in it without writing their configuration.

    torchrun --nproc_per_node 8 examples/own_trainer.py --preset zero3

`accelerate launch --multi_gpu --num_processes 8 examples/own_trainer.py --preset zero3` does the same; it needs no
`--config_file`, because the preset configures the engine. To try it without GPUs, on two processes:

    torchrun --nproc_per_node 2 examples/own_trainer.py --preset zero3 --model "$(python -m toolkit.demo --model)"

Afterwards, `toolkit checkpoint export runs/own_trainer/checkpoint-N OUT --base-model MODEL` writes the model of any
preset's checkpoint as a folder for `from_pretrained`.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer

from toolkit import load_preset

MAX_LENGTH = 2048
SETTINGS = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 2,  # sequences per GPU and accumulation step
    "gradient_accumulation_steps": 2,  # global batch on 8 GPUs: 2 x 2 x 8 = 32 sequences
    "activation_checkpointing": True,
    "learning_rate": 1e-5,
    "logging_steps": 1,
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "report_to": "none",
}


def main() -> None:
    options = read_options()
    # First of all: what is loaded later is then loaded as the preset shards it.
    args = load_preset(options.preset).training_arguments(
        output_dir=options.output_dir, max_steps=options.max_steps, **SETTINGS
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # fp32: the weights that are trained. The preset computes in bf16 on GPUs.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.config.use_cache = False

    def tokenize(row: dict) -> dict:
        tokens = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, truncation=True, max_length=MAX_LENGTH
        )
        return {**tokens, "labels": tokens["input_ids"]}

    rows = load_dataset("json", data_files=options.dataset, split="train")
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows.map(tokenize, remove_columns=rows.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads labels with -100, on which there is no loss
        processing_class=tokenizer,
    )
    trainer.train()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="zero3", help="see `toolkit presets`")
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a hub id or a folder")
    parser.add_argument("--dataset", default="examples/data.jsonl", help="a JSONL file of conversations")
    parser.add_argument("--output_dir", default="runs/own_trainer")
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps; default: all epochs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
