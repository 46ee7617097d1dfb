"""TRL's SFTTrainer on the rows of `benchmarks/packing.py`, recording the seconds and labels of each step.

Nothing of the toolkit. TRL counts and measures as usual; only its logging is off.
"""

import argparse
import json
import time
from pathlib import Path

import datasets
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

COUNTED = ("tokens", "supervised_tokens", "loss")


class Clock(TrainerCallback):
    """Wall and CPU seconds of each step, from the end of the step before."""

    def __init__(self):
        self.steps = []

    def on_train_begin(self, *_, **__):
        self.started = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_, **__):
        now = (time.perf_counter(), time.process_time())
        seconds, cpu_seconds = (after - before for after, before in zip(now, self.started, strict=True))
        self.steps.append({"seconds": seconds, "cpu_seconds": cpu_seconds})
        self.started = now


class CountingTrainer(SFTTrainer):
    """Trainer that records tokens, supervised labels and loss of each accumulation step."""

    counted = ()

    def training_step(self, model, inputs, *args, **kwargs):
        learned = int((inputs["labels"][:, 1:] != -100).sum())
        loss = super().training_step(model, inputs, *args, **kwargs)
        facts = {"tokens": inputs["input_ids"].numel(), "supervised_tokens": learned, "loss": loss.item()}
        self.counted = (*self.counted, facts)
        return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "data", "output_dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    counts = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "seed", "lora_r")
    for name in counts:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--packing", choices=["true", "false"], required=True)
    given = parser.parse_args()
    arguments = SFTConfig(
        output_dir=str(given.output_dir),
        max_steps=given.max_steps,
        per_device_train_batch_size=given.per_device_train_batch_size,
        gradient_accumulation_steps=given.gradient_accumulation_steps,
        learning_rate=given.learning_rate,
        max_length=given.max_length,
        seed=given.seed,
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
    rows = datasets.load_dataset("json", data_files=str(given.data), split="train")
    trainer = CountingTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        args=arguments,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(given.model),
        peft_config=LoraConfig(r=given.lora_r, lora_alpha=2 * given.lora_r, target_modules="all-linear"),
        callbacks=[clock],
    )
    trainer.train()
    each = given.gradient_accumulation_steps
    written = [
        clocked | {name: sum(facts[name] for facts in trainer.counted[index * each :][:each]) for name in COUNTED}
        for index, clocked in enumerate(clock.steps)
    ]
    folder = given.output_dir / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{arguments.process_index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
