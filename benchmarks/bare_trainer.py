"""A plain Trainer script: the baseline of `benchmarks/overhead.py`.

Only transformers, peft and accelerate; of the toolkit only what lets accelerate 1.15 run FSDP2 on a CPU. The data are
already tokenised.

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 --main_process_port 0 \\
        benchmarks/bare_trainer.py --model MODEL --data TOKENS --output OUT --max_steps 22
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import datasets
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from toolkit.presets.training_arguments import enable_fsdp_on_cpu


class Clock(TrainerCallback):
    """Wall and CPU seconds of each step, from the end of the step before."""

    def __init__(self):
        self.rows = []

    def restart(self, *_, **__):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    on_train_begin = on_log = restart

    def on_step_end(self, _args, state, _control, **_):
        wall, cpu = self.wall, self.cpu
        self.restart()
        self.rows.append({"seconds": self.wall - wall, "cpu_seconds": self.cpu - cpu})
        if len(self.rows) == 1 and state.is_world_process_zero:
            print(f"step 1/{state.max_steps}", flush=True)


class BareTrainer(Trainer):
    """Trainer that records its losses, to show that both sides train the same."""

    losses = ()

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = (*self.losses, loss)
        return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "data", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=1)
    parser.add_argument("--lora_r", type=int, default=8, help="0 trains all parameters")
    given = parser.parse_args()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # the preset specifies bf16, for GPUs; this trains in fp32 on a CPU
    enable_fsdp_on_cpu()
    training = TrainingArguments(
        output_dir=str(given.output),
        max_steps=given.max_steps,
        per_device_train_batch_size=given.per_device_train_batch_size,
        learning_rate=1e-4,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model.config.use_cache = False
    if given.lora_r:
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=given.lora_r,
            lora_alpha=2 * given.lora_r,
            lora_dropout=0.0,
            target_modules="all-linear",
        )
        model = get_peft_model(model, lora)
    clock = Clock()
    trainer = BareTrainer(
        model=model,
        args=training,
        train_dataset=datasets.load_from_disk(given.data),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[clock],
    )
    trainer.train()
    rows = [row | {"loss": loss.item()} for row, loss in zip(clock.rows, trainer.losses, strict=True)]
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / f"rank{training.process_index}.json").write_text(json.dumps(rows))
    # gloo's threads can wait for each other for ever when the interpreter ends, or when the process group does.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
