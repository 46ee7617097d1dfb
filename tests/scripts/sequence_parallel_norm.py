"""The gradient norm of one step under DeepSpeed's sequence parallelism, beside that of one process.

    torchrun --nproc_per_node 2 sequence_parallel_norm.py STAGE

The Trainer, accelerate and DeepSpeed as they are installed, without this toolkit.
"""

import os
import sys
import tempfile

os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"}

import deepspeed
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
ROW = {"input_ids": list(range(16)), "labels": list(range(16)), "position_ids": list(range(16))}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, use_cache=False, attn_implementation="sdpa", **SIZES)
    return LlamaForCausalLM(config).float()


def norm_alone() -> float:
    model = small_llama()
    model(**{name: torch.tensor([values]) for name, values in ROW.items()}).loss.backward()
    return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


def norm_in_parts(stage: int) -> float:
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        deepspeed={"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"},
        parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler),
        per_device_train_batch_size=1,
        max_steps=1,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
    )
    trainer = Trainer(model=small_llama(), args=args, train_dataset=[ROW] * 4)
    trainer.train()
    return float(trainer.model_wrapped.get_global_grad_norm())


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    alone, parts = norm_alone(), norm_in_parts(int(sys.argv[1]))
    if torch.distributed.get_rank() == 0:
        print("NORMS", alone, parts)
