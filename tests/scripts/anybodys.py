"""A loop on accelerate, or a Trainer, of somebody who has never heard of the toolkit; writes what is in effect.

accelerate launch --config_file zero2.yaml --num_processes 2 anybodys.py loop|trainer FOLDER [ARGUMENTS]
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = LlamaConfig(vocab_size=64, use_cache=False, **SIZES)
ROWS = [{"input_ids": torch.arange(n, n + 8), "labels": torch.arange(n, n + 8)} for n in range(16)]


def loop():
    accelerator = Accelerator()
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ROWS, 2))
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model


def trainer(arguments):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
    trainer = Trainer(model=LlamaForCausalLM(CONFIG), args=args, train_dataset=ROWS)
    trainer.train()
    return trainer.accelerator, trainer.model_wrapped


def in_effect(accelerator, model):
    facts = {"ranks": accelerator.num_processes, "engine": accelerator.distributed_type.value}
    facts |= {"wrapper": type(model).__name__, "precision": accelerator.mixed_precision}
    if facts["engine"] == "DEEPSPEED":
        blocks = model.zero_offload_optimizer(), model.zero_offload_param()
        facts["offload"] = [None if block is None else block.device for block in blocks]
        facts |= {"stage": model.zero_optimization_stage(), "bf16": model.bfloat16_enabled()}
        facts |= {"bucket": model.zero_reduce_bucket_size(), "clipping": model.gradient_clipping()}
    if facts["engine"] == "FSDP":
        group = model.model.layers[0]._get_fsdp_state()._fsdp_param_group
        facts |= {"reshard": group.post_forward_mesh_info is not None, "mesh": group.mesh_info.mesh.ndim}
        facts |= {"offload": type(group.offload_policy).__name__, "compute": str(group.mp_policy.param_dtype)}
    return facts


if __name__ == "__main__":
    how, folder, *words = sys.argv[1:]
    done = in_effect(*(loop() if how == "loop" else trainer(words)))
    rank = Accelerator().process_index
    Path(folder, f"rank{rank}.json").write_text(json.dumps(done))
    Accelerator().end_training()
