"""A bare Trainer on rows of text, or of tokens and labels: the baseline of `benchmarks/peers.py` and `overhead.py`.

Only transformers, peft and datasets.

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 benchmarks/peer_jobs/bare.py \\
        --model MODEL --data ROWS.jsonl --max_length 128 --output_dir OUT --max_steps 30
"""

from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class JobArguments:
    model: str
    data: str
    """A JSONL of text, or a folder that `datasets` saved, with tokens and labels."""
    max_length: int
    lora_r: int = 0


def main():
    job, training = HfArgumentParser((JobArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.config.use_cache = False
    if job.lora_r:
        lora = LoraConfig(task_type="CAUSAL_LM", r=job.lora_r, lora_alpha=2 * job.lora_r, target_modules="all-linear")
        model = get_peft_model(model, lora)

    def tokenize(batch):
        texts = [text + tokenizer.eos_token for text in batch["text"]]
        encoded = tokenizer(texts, truncation=True, max_length=job.max_length)
        return encoded | {"labels": encoded["input_ids"]}

    with training.main_process_first():
        if Path(job.data).is_dir():
            rows = datasets.load_from_disk(job.data)
        else:
            rows = datasets.load_dataset("json", data_files=job.data, split="train")
            rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
    collator = DataCollatorForSeq2Seq(tokenizer)
    trainer = Trainer(model=model, args=training, train_dataset=rows, data_collator=collator)
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
