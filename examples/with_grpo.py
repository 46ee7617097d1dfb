"""Train with TRL's GRPOTrainer and a reward of your own, under a preset, verified and recorded by one line.

When to use it: you start your TRL script yourself, and want a preset's engine in it and a record of each run.

    torchrun --nproc_per_node 8 examples/with_grpo.py --preset zero2

It needs `pip install trl`. To try it without GPUs, on two processes, give it a small model:

    torchrun --nproc_per_node 2 examples/with_grpo.py --preset zero2 --max_steps 2 --max_completion_length 16 \\
        --model "$(python -m toolkit.demo --model)"
"""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from toolkit import load_preset, observe


def brevity(completions: list, **_: object) -> list[float]:
    """Reward answers of few words."""
    return [-abs(len(completion[0]["content"].split()) - 20) / 20 for completion in completions]


def main() -> None:
    options = read_options()
    preset = load_preset(options.preset)
    # First of all: the trainer then loads the model as the preset shards it.
    args = preset.training_arguments(
        GRPOConfig,
        output_dir=f"{options.output_dir}/checkpoints",
        max_steps=options.max_steps,
        per_device_train_batch_size=4,  # completions; 8 GPUs: 32, of 8 prompts
        num_generations=4,
        max_completion_length=options.max_completion_length,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
    )
    rows = load_dataset("json", data_files=options.dataset, split="train")
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=brevity,
        args=args,
        train_dataset=rows.map(lambda row: {"prompt": row["messages"][:1]}, remove_columns=rows.column_names),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    # The one line: rows per step and rank, and an error after the first step if the preset is not in effect.
    observe(trainer, folder=options.output_dir, require=preset)
    trainer.train()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="zero2", help="see `toolkit presets`")
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a hub id or a folder")
    parser.add_argument("--dataset", default="examples/data.jsonl", help="a JSONL file of conversations")
    parser.add_argument("--output_dir", default="runs/with_grpo", help="the run folder")
    parser.add_argument("--max_completion_length", type=int, default=256)
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps; default: all epochs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
