"""Somebody's scripts whose model is no causal language model, or whose Trainer is no plain one; MODE says which.

python other_trainers.py MODE OUTPUT_DIR
"""

import sys
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(59))]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, hidden):
        return hidden + torch.relu(self.linear(hidden))


class OwnModel(torch.nn.Module):
    """No class of transformers', and no config."""

    def __init__(self, returns=dict):
        super().__init__()
        self.returns = returns
        self.layers = torch.nn.Sequential(Layer(), Layer(), torch.nn.Linear(32, 4))

    def forward(self, features, labels):
        logits = self.layers(features)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.returns is dict else (loss, logits)


class OwnModelWithLayers(OwnModel):
    _no_split_modules = ("Layer",)


class ImagesAndText(OwnModelWithLayers):
    def __init__(self):
        super().__init__()
        self.words, self.patches = torch.nn.Embedding(64, 32), torch.nn.Linear(3 * 16 * 16, 32)

    def forward(self, input_ids, attention_mask, pixel_values, labels):
        mask = attention_mask.unsqueeze(-1)
        text = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        return super().forward(text + self.patches(pixel_values.flatten(1)), labels)


def ids(number, length=8):
    return [5 + (number + n) % 59 for n in range(length)]


def texts(**more):
    return [{"input_ids": ids(n), "attention_mask": [1] * 6 + [0] * 2, **more} for n in range(32)]


def image(number):
    return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(number))


def make(mode):
    """The model and its rows."""
    if mode in ("own", "own_whole", "tuple"):
        kind = OwnModel if mode == "own_whole" else OwnModelWithLayers
        rows = [{"features": torch.full((32,), n / 32), "labels": n % 4} for n in range(32)]
        return kind(tuple if mode == "tuple" else dict), rows
    if mode == "seq2seq":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
        rows = texts(labels=[*ids(0, 4), -100, -100])
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)), rows
    if mode == "tokens":
        rows = texts(labels=[0, 1, 2, 0, 1, 2, -100, -100])
        return transformers.BertForTokenClassification(
            transformers.BertConfig(vocab_size=64, num_labels=3, **SMALL)
        ), rows
    if mode == "vision":
        rows = [{"pixel_values": image(n), "labels": n % 3} for n in range(32)]
        config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SMALL)
        return transformers.ViTForImageClassification(config), rows
    if mode == "images_and_text":
        return ImagesAndText(), [row | {"pixel_values": image(n), "labels": n % 4} for n, row in enumerate(texts())]
    config = transformers.LlamaConfig(vocab_size=64, use_cache=False, **SMALL)
    return transformers.LlamaForCausalLM(config), texts(labels=ids(0))


def sentences(output_dir, given):
    """sentence-transformers' Trainer with its own collator and loss."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = Path(output_dir, "encoder")
    with PartialState().main_process_first():
        if PartialState().is_main_process:
            folder.mkdir(parents=True)
            (folder / "vocab.txt").write_text("\n".join(WORDS))
            transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
            transformers.BertModel(transformers.BertConfig(vocab_size=64, **SMALL)).save_pretrained(folder)
    encoder = Transformer(str(folder))
    model = SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")
    rows = Dataset.from_list([{"anchor": f"w{n} w{n + 1}", "positive": f"w{n + 1} w{n + 2} w3"} for n in range(32)])
    args = SentenceTransformerTrainingArguments(output_dir=output_dir, **given)
    return SentenceTransformerTrainer(
        model=model, args=args, train_dataset=rows, loss=MultipleNegativesRankingLoss(model)
    )


def main(mode, output_dir, *more):
    given = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": "none"}
    given |= {"use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False}
    if mode == "deepspeed":  # the script's own choice
        given["deepspeed"] = more[0]
    if mode == "fsdp":
        given |= {
            "fsdp": True,
            "fsdp_config": {"reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        }
    torch.manual_seed(0)
    if mode == "sentences":
        sentences(output_dir, given).train()
        return
    kind, arguments = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if mode == "seq2seq" else (Trainer, TrainingArguments)
    args = arguments(output_dir=output_dir, **given)
    model, rows = make(mode)
    if mode == "deepspeed":  # whose ZeRO-3 divides a model while it is loaded
        model = type(model).from_pretrained(more[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if mode == "optimizer" else None
    kind(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None)).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
