"""Somebody's trainings of several kinds of models: checkpoints after steps 1 and 2, and the trained model by itself."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    BertConfig,
    BertForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
IDS = list(range(1, 9))
PREFERENCES = [{"prompt": f"Question {n}?", "chosen": f" Yes, {n}.", "rejected": f" No {n}."} for n in range(16)]
COMPLETIONS = [{"prompt": f"Question {n}?", "completion": f" Yes, {n}."} for n in range(16)]


class Own(PreTrainedModel):
    """A model class that no library knows."""

    config_class = type("OwnConfig", (PretrainedConfig,), {"model_type": "own"})

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Plain(torch.nn.Module):
    """A module of torch alone."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)

    forward = Own.forward


def main(kind, model, output_dir):
    torch.manual_seed(0)
    given = {"output_dir": output_dir, "max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2}
    given |= {"use_cpu": True, "bf16": False, "report_to": "none", "learning_rate": 1e-2, "disable_tqdm": True}
    lora = LoraConfig(r=4, target_modules="all-linear") if kind.endswith("-lora") else None
    rows = Dataset.from_list([{"input_ids": IDS, "labels": [n % 2] * 8} for n in range(16)])
    if kind.startswith("sft"):
        rows = Dataset.from_list(COMPLETIONS)
        trainer = SFTTrainer(model=model, args=SFTConfig(**given), train_dataset=rows, peft_config=lora)
    elif kind.startswith(("dpo", "reward")):
        config, make = (DPOConfig, DPOTrainer) if kind.startswith("dpo") else (RewardConfig, RewardTrainer)
        if lora is not None and make is RewardTrainer:
            lora.task_type = "SEQ_CLS"
        args, rows = config(**given), Dataset.from_list(PREFERENCES)
        trainer = make(model=model, args=args, train_dataset=rows, peft_config=lora)
    elif kind == "seq2seq":
        args = Seq2SeqTrainingArguments(**given)
        trainer = Seq2SeqTrainer(T5ForConditionalGeneration(T5Config(vocab_size=64, **T5)), args, train_dataset=rows)
    else:
        args = TrainingArguments(**given)
        made = {"own": lambda: Own(Own.config_class(hidden_size=16)), "plain": Plain}.get(
            kind, lambda: BertForTokenClassification(BertConfig(vocab_size=64, num_labels=3, **SIZES))
        )()
        trainer = Trainer(made, args, train_dataset=rows)
    trainer.train()
    if trainer.is_fsdp_enabled:  # otherwise `save_model` writes nothing
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(Path(output_dir) / "trained"))


if __name__ == "__main__":
    main(*sys.argv[1:])
