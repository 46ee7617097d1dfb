"""The job that every program runs: a model, rows of text of equal length, and the settings of the training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PRESETS = ("single", "ddp", "zero2", "zero3", "fsdp2")
METHODS = ("full", "lora")
LORA_R = 8
SEED = 42
# A Llama whose vocabulary takes a fifth of its parameters, as in models of 1 to 8 billion; no tied embeddings.
VOCAB_SIZE = 8192
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
}
HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Numbers of a job that decide its work, each an option of `benchmarks/peers.py`; those of a record are equal."""

    size: str = "tiny"
    steps: int = 30
    untimed_steps: int = 5
    batch_size: int = 2  # rows per rank and step
    max_length: int = 128  # tokens of every row
    ranks: int = 2  # of the jobs with several processes
    threads: int = 1  # per rank
    device: str = "cpu"
    precision: str = "fp32"
    learning_rate: float = 1e-3

    @property
    def timed_steps(self) -> int:
        return self.steps - self.untimed_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One cell of the table: a method under a preset."""

    preset: str
    method: str
    setting: Setting
    model: Path
    rows: Path
    """JSONL with a key `text`; with its end-of-text token each row has `max_length` tokens."""

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.method}"

    @property
    def ranks(self) -> int:
        return 1 if self.preset == "single" else self.setting.ranks

    @property
    def lora(self) -> bool:
        return self.method == "lora"

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks pass through the model in an optimizer step."""
        return self.ranks * self.setting.batch_size * self.setting.max_length

    @property
    def cpu(self) -> bool:
        return self.setting.device == "cpu"

    @property
    def bf16(self) -> bool:
        return self.setting.precision == "bf16"


def prepare(folder: Path, setting: Setting) -> tuple[Path, Path]:
    """Write the model and its rows once; return their paths. Raises SystemExit if the folder has another job's."""
    folder.mkdir(parents=True, exist_ok=True)
    record, model, rows = folder / "setting.json", folder / "model", folder / "rows" / "train.jsonl"
    if record.exists():
        if json.loads(record.read_text()) != asdict(setting):
            raise SystemExit(f"{folder} was made with other settings; choose another --work")
        return model, rows
    from toolkit.demo.assets import default_data_file, prepare_default_model

    texts = [" ".join(map(str, json.loads(line).values())) for line in default_data_file().read_text().splitlines()]
    tokenizer = make_tokenizer(prepare_default_model(), texts)
    make_model(model, tokenizer, setting)
    rows.parent.mkdir(exist_ok=True)
    needed = setting.steps * setting.batch_size * setting.ranks
    made = make_rows(texts, tokenizer, needed, setting.max_length)
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in made))
    record.write_text(json.dumps(asdict(setting)))
    return model, rows


def make_tokenizer(source: Path, texts: list[str]) -> Any:
    """Return the demo model's tokenizer, trained again for a small vocabulary, with a padding token of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source).train_new_from_iterator(texts, VOCAB_SIZE)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    if tokenizer.eos_token == tokenizer.pad_token:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)
    return tokenizer


def make_model(folder: Path, tokenizer: Any, setting: Setting) -> None:
    """Write a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(SEED)
    sizes = SIZES[setting.size]
    heads = sizes["hidden_size"] // HEAD_DIM
    attention = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), "head_dim": HEAD_DIM}
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    words = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, **tokens}
    config = LlamaConfig(**sizes, **attention, **words, max_position_embeddings=max(512, setting.max_length))
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_rows(texts: list[str], tokenizer: Any, number: int, max_length: int) -> list[str]:
    """Return texts that have `max_length` tokens with the end-of-text token, and are tokenised back to them."""
    tokens = tokenizer(" ".join(texts), add_special_tokens=False, verbose=False).input_ids
    rows: list[str] = []
    begin, wanted = 0, max_length - 1
    while len(rows) < number:
        if begin + wanted > len(tokens):
            begin = begin % wanted + 1  # another pass, from another token
        text = tokenizer.decode(tokens[begin : begin + wanted])
        if len(tokenizer(text).input_ids) == wanted:
            rows.append(text)
            begin += wanted
        else:
            begin += 1
    return rows
