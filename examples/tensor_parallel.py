"""Train with transformers' Trainer in a script of your own, with each layer split over neighbouring GPUs.

When to use it: you have a training script, and a layer or its activations are too large for one GPU.

    torchrun --nproc_per_node 8 examples/tensor_parallel.py --preset fsdp2_tp --tp 2

`tp`, `hsdp_tp`, `ep` and `ep_tp` work the same way; `--ep` is the degree of the last two.

transformers shards the model while it loads it, so the preset adds arguments to `from_pretrained` as well. The Trainer
cannot resume such a model, so this script writes the trained model alone; `toolkit train --preset fsdp2_tp` saves
checkpoints and resumes.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer

from toolkit import load_preset

MAX_LENGTH = 2048
SETTINGS = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 4,  # sequences per pair of GPUs and accumulation step
    "gradient_accumulation_steps": 2,  # global batch on 8 GPUs with `--tp 2`: 4 x 2 x 8 / 2 = 32 sequences
    "activation_checkpointing": True,
    "learning_rate": 1e-5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def main() -> None:
    options = read_options()
    degrees = {name: degree for name in ("tp", "ep") if (degree := getattr(options, name)) is not None}
    preset = load_preset(options.preset)
    # First of all: the model is then loaded as these degrees shard it.
    args = preset.training_arguments(output_dir=options.output_dir, max_steps=options.max_steps, **SETTINGS, **degrees)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # fp32: the weights that are trained. The preset computes in bf16 on GPUs.
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, **preset.from_pretrained_arguments()
    )
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
    trainer.save_model()  # every rank calls it: the shards are gathered
    trainer.save_state()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="fsdp2_tp", help="see `toolkit presets`")
    parser.add_argument("--tp", type=int, help="GPUs that share each layer; they are neighbours")
    parser.add_argument("--ep", type=int, help="GPUs that share the experts")
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a hub id or a folder")
    parser.add_argument("--dataset", default="examples/data.jsonl", help="a JSONL file of conversations")
    parser.add_argument("--output_dir", default="runs/tensor_parallel")
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps; default: all epochs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
