"""TRL's SFTTrainer on the rows of `benchmarks/packing.py`, with each step's seconds and labels written down.

Nothing of the toolkit. TRL counts and measures as it always does; only its own logging is off.
"""

import argparse
import json
import time
from pathlib import Path

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Wall seconds of each step, from the end of the one before."""

    def __init__(self):
        self.seconds = []

    def on_train_begin(self, *_, **__):
        self.started = time.perf_counter()

    def on_step_end(self, *_, **__):
        now = time.perf_counter()
        self.seconds.append(now - self.started)
        self.started = now


class CountingTrainer(SFTTrainer):
    """Keeps the number of tokens and of labels that are learned of each micro-step."""

    counted = ()

    def training_step(self, model, inputs, *args, **kwargs):
        learned = int((inputs["labels"][:, 1:] != -100).sum())
        self.counted = (*self.counted, (inputs["input_ids"].numel(), learned))
        return super().training_step(model, inputs, *args, **kwargs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "data", "output_dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--packing", choices=["true", "false"], required=True)
    given = parser.parse_args()
    arguments = SFTConfig(
        output_dir=str(given.output_dir),
        max_steps=given.max_steps,
        per_device_train_batch_size=given.per_device_train_batch_size,
        gradient_accumulation_steps=given.gradient_accumulation_steps,
        learning_rate=1e-4,
        max_length=512,
        packing=given.packing == "true",
        assistant_only_loss=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        ddp_find_unused_parameters=False,
    )
    clock = Clock()
    rows = datasets.Dataset.from_list([json.loads(line) for line in given.data.read_text().splitlines()])
    trainer = CountingTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        args=arguments,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(given.model),
        callbacks=[clock],
    )
    trainer.train()
    each = given.gradient_accumulation_steps
    steps = [trainer.counted[index * each : (index + 1) * each] for index in range(len(clock.seconds))]
    written = [
        {"seconds": seconds, "tokens": sum(t for t, _ in step), "supervised_tokens": sum(n for _, n in step)}
        for seconds, step in zip(clock.seconds, steps, strict=True)
    ]
    folder = given.output_dir / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{arguments.process_index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
