"""What the cases share: a tiny Llama in fp32 and rows of random tokens."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def model(**kw):
    set_seed(0)
    cfg = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(LlamaConfig(**(cfg | kw)))


class Rows(Dataset):
    def __init__(self, n=64, length=16):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randint(3, 128, (n, length), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones_like(self.x[i]), "labels": self.x[i].clone()}


def args(out, **kw):
    base = dict(
        output_dir=out,
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return TrainingArguments(**(base | kw))
