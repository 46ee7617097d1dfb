"""Packing of rows into sequences, and the losses of packed rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from launching import ROOT, accelerate_launch, read

from toolkit.errors import ToolkitError
from toolkit.observe.batches import IGNORED
from toolkit.train.data.collation import Collator, PackCollator
from toolkit.train.data.packing import OpenPacks, PackedRows, best_fit, check_model_packs, joined


def row(number: int, length: int) -> dict[str, Any]:
    """A row with tokens of its own, supervised from its second token."""
    tokens = [100 * (number + 1) + place for place in range(length)]
    return {"input_ids": tokens, "labels": tokens, "length": length, "row": number}


ROWS = [row(0, 3), row(1, 5), row(2, 2), row(3, 4)]


# -- which rows share a pack


def test_each_row_goes_into_the_fullest_pack_with_room() -> None:
    assert best_fit([3, 5, 2, 4], max_tokens=7) == [[1, 2], [3, 0]]
    assert best_fit([7, 7], max_tokens=7) == [[0], [1]]


def test_every_row_is_in_one_pack_and_no_pack_is_too_long() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 512) for _ in range(2000)]
    packs = best_fit(lengths, max_tokens=512)
    assert sorted(index for pack in packs for index in pack) == list(range(2000))
    assert max(sum(lengths[index] for index in pack) for pack in packs) <= 512
    assert len(packs) <= 1.02 * sum(lengths) / 512  # observed: 1.004


def test_a_pack_concatenates_its_rows() -> None:
    packed = PackedRows(datasets.Dataset.from_list(ROWS), max_tokens=7)
    assert packed.packs == [[1, 2], [3, 0]]
    assert packed.fill_fraction == 1.0
    assert packed[0] == joined([ROWS[1], ROWS[2]])
    assert packed[0]["documents"] == [5, 2]
    assert packed[0]["rows"] == [1, 2]


def test_open_packs_lose_no_row_of_a_stream() -> None:
    rng = random.Random(0)
    rows = [row(number, rng.randint(1, 40)) for number in range(300)]
    stream = OpenPacks(max_tokens=64, at_most=4)
    given = [pack for pack in map(stream.add, rows) if pack is not None]
    packs = [joined(pack) for pack in [*given, *(pack.rows for pack in stream.packs)]]
    assert sorted(number for pack in packs for number in pack["rows"]) == list(range(300))
    assert max(len(pack["input_ids"]) for pack in packs) <= 64
    fill = sum(len(pack["input_ids"]) for pack in packs) / (64 * len(packs))
    assert fill > 0.9  # observed: 0.95


# -- losses


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=request.param, dtype=torch.float32)
    model.config.use_cache = False  # as load_model does; with a cache transformers ignores document boundaries
    return model


def token_losses(model: Any, batch: dict[str, Any]) -> list[float]:
    """The loss of each supervised token, row by row."""
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return [float(loss) for loss in losses[labels.flatten() != IGNORED]]


def test_each_token_has_the_same_loss_packed_and_alone(model: Any, tokenizer: Any, faq_alpaca: Path) -> None:
    from toolkit.train.data.tokenization import load_rows, tokenize

    rows, data_format = load_rows(str(faq_alpaca), "train")
    tokenized = tokenize(
        rows.select(range(12)), tokenizer=tokenizer, data_format=data_format, max_seq_length=256, loss_on=None
    )
    packed = PackedRows(tokenized.dataset, max_tokens=256)
    assert len(packed) < 12
    together = token_losses(model, PackCollator(tokenizer)([packed[index] for index in range(len(packed))]))
    order = [index for pack in packed.packs for index in pack]
    alone = [loss for index in order for loss in token_losses(model, Collator(tokenizer)([tokenized.dataset[index]]))]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(together) == tokenized.stats.supervised_tokens


def test_a_state_space_model_is_refused_with_the_alternative() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ToolkitError, match="MambaForCausalLM cannot isolate packed rows") as caught:
        check_model_packs(model)
    assert "--train_sampling_strategy group_by_length" in str(caught.value)


# -- a run


def run_packed(folder: Path, tiny_model: Path, faq_alpaca: Path, *options: str) -> Path:
    rows = folder.parent / "rows.jsonl"
    rows.write_text("".join(faq_alpaca.read_text().splitlines(keepends=True)[:42]))
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--output_dir", str(folder)]
    words += ["--packing", "true", "--max_seq_length", "256", "--per_device_train_batch_size", "1"]
    words += ["--num_train_epochs", "1", "--eval_dataset", str(rows), "--save_strategy", "no", "--save_model", "false"]
    ended = accelerate_launch(ROOT / "accelerate_configs" / "zero3.yaml", *words, *options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def packed_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Path:
    return run_packed(tmp_path_factory.mktemp("packed") / "run", tiny_model, faq_alpaca)


@pytest.mark.launch
def test_a_packed_evaluation_is_over_every_supervised_token(packed_run: Path) -> None:
    evaluations = read(packed_run / "run.json")["evaluations"]
    assert [row["supervised_tokens"] for row in evaluations] == [2409]


@pytest.mark.launch
def test_a_packed_run_is_isolated_and_counts_every_supervised_token_once(packed_run: Path) -> None:
    run, attestation = read(packed_run / "run.json"), read(packed_run / "attestation.json")
    assert [rank["packing"] for rank in attestation["ranks"]] == ["isolated", "isolated"]
    assert max(rank["packing_loss_difference"] for rank in attestation["ranks"]) < 1e-5
    steps = [
        json.loads(line)
        for rank in (0, 1)
        for line in (packed_run / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()
    ]
    packs = run["data"]["packs"]
    assert packs % 2 == 0, "otherwise accelerate repeats packs to fill the last step, and the sums below differ"
    assert sum(step["supervised_tokens"] for step in steps) == run["data"]["supervised_tokens"] == 2409
    assert sum(step["non_padding_tokens"] for step in steps) == run["data"]["tokens"]
    assert run["data"]["pack_fill_fraction"] == pytest.approx(run["data"]["tokens"] / (packs * 256))


@pytest.mark.launch
def test_a_packed_run_makes_no_mask_and_has_the_losses_of_one_with_a_mask(
    packed_run: Path, tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    masked_run = run_packed(tmp_path / "masked", tiny_model, faq_alpaca, "--attn_implementation", "sdpa")
    readings = []
    for folder in (packed_run, masked_run):
        ranks = read(folder / "attestation.json")["ranks"]
        readings.append({(rank["attn_implementation"], rank["packing_mask_bytes"] > 0) for rank in ranks})
    assert readings == [{("sdpa_varlen", False)}, {("sdpa", True)}]
    assert "packed rows: attention sdpa_varlen, no mask" in (packed_run / "train.log").read_text()
    assert read(packed_run / "run.json")["spec"]["model"]["attn_implementation"] == "sdpa_varlen"
    ours, masked = (read(folder / "run.json")["evaluations"][-1]["eval_loss"] for folder in (packed_run, masked_run))
    assert ours == pytest.approx(masked, abs=1e-5)
    losses = [
        [json.loads(line)["loss"] for line in (folder / "ranks" / "rank0.jsonl").read_text().splitlines()]
        for folder in (packed_run, masked_run)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
