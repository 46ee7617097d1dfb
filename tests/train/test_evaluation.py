"""Evaluation: which rows are held out, and a loss that does not depend on batches and ranks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations import tokenized
from launching import read
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.observe.batches import IGNORED
from toolkit.train.data.collation import Collator, batch_facts
from toolkit.train.data.dataset import EvaluationRows, held_out
from toolkit.train.data.tokenization import load_rows
from toolkit.train.trainer import evaluation_figures


def test_held_out_rows_depend_on_the_seed_and_nothing_else() -> None:
    assert held_out(100, 0.05, seed=42) == held_out(100, 5, seed=42)
    assert held_out(100, 0.05, seed=42) != held_out(100, 0.05, seed=43)
    assert [len(held_out(100, size, seed=42)) for size in (0.05, 0.001)] == [5, 1]


def test_the_loss_is_weighted_by_tokens_and_not_by_batches(tokenizer: Any) -> None:
    batches = [(torch.tensor(1.0), 3), (torch.tensor(5.0), 1), (torch.tensor(math.nan), 0)]  # of fill rows
    assert evaluation_figures(batches, "cpu") == {"loss": 2.0, "perplexity": math.exp(2.0), "supervised_tokens": 4}
    # Fill rows have no supervised tokens.
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "row": 0}, {"input_ids": [8, 9], "labels": [8, 9], "row": 1}]
    filled = EvaluationRows(rows, multiple=4)
    made = [filled[index] for index in range(len(filled))]
    facts = batch_facts(made, Collator(tokenizer)(made))
    assert (len(filled), facts.supervised_tokens) == (4, 3)


@pytest.mark.launch
def test_two_ranks_and_one_process_agree_with_a_manual_sum(
    start: Callable[..., Path], tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(faq_alpaca.read_text().splitlines(keepends=True)[:40]))
    job = ["--dataset", str(rows), "--max_seq_length", "128", "--max_steps", "2", "--val_size", "7"]
    job += ["--learning_rate", "0", "--save_model", "false"]
    steps = ["--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "2"]
    steps += ["--train_sampling_strategy", "group_by_length", "--per_device_train_batch_size", "1"]
    two = read(start("ddp", *job, *steps) / "run.json")
    one = read(start("single", *job, "--per_device_eval_batch_size", "3", num_processes=1) / "run.json")
    assert [row["step"] for row in two["evaluations"]] == [1, 2]
    assert [row["step"] for row in one["evaluations"]] == [2]
    assert (one["data"]["rows"], one["eval_data"]["rows"]) == (33, 7)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    loaded, data_format = load_rows(str(rows), "train")
    every, _ = tokenized(loaded, tokenizer, data_format)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total, tokens = 0.0, 0
    for number in held_out(40, 7, seed=42):
        batch = Collator(tokenizer)([every[number]])
        supervised = int((batch["labels"][:, 1:] != IGNORED).sum())
        with torch.no_grad():
            total += float(model(**batch).loss) * supervised
        tokens += supervised
    for row in (*two["evaluations"], *one["evaluations"]):
        assert row["supervised_tokens"] == tokens
        assert row["eval_loss"] == pytest.approx(total / tokens, abs=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-6)
