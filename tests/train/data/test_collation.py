"""Order of rows, padded batches, and packs whose documents do not attend to each other."""

import copy
import hashlib
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from launching import accelerate_launch, nightly_launch, rank_rows, read, succeeded
from torch.utils.data import DataLoader, RandomSampler
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from toolkit.errors import AttestationFailed, ToolkitError
from toolkit.job.job import Job
from toolkit.models.attention import needs_no_mask
from toolkit.observe.batches import BATCH_FACTS, IGNORED, BatchFacts, ObservedCollator
from toolkit.observe.verify.differences import differences
from toolkit.record.reading import RankReading
from toolkit.train.data import collation
from toolkit.train.data.collation import Collator, SeededLengthGroups, batch_facts, keep_order
from toolkit.train.model.varlen_attention import register
from toolkit.train.trainer import expected_readings

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "row": 4},
    {"input_ids": [8, 9], "labels": [8, 9], "row": 2},
]


def test_a_batch_is_padded_on_the_right_and_its_contents_are_recorded(tokenizer: Any) -> None:
    before = copy.deepcopy(tokenizer.init_kwargs), tokenizer.padding_side, tokenizer.pad_token
    pad = tokenizer.pad_token_id
    batch = ObservedCollator(Collator(tokenizer), batch_facts)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, pad]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, 9, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    content = torch.tensor([[5, 6, 7, 8, 9, pad], [IGNORED, 6, 7, 8, 9, IGNORED]]).numpy().tobytes()
    assert batch[BATCH_FACTS] == BatchFacts(
        tokens=6,
        non_padding_tokens=5,
        supervised_tokens=3,  # 6, 7 and 9: nothing predicts the first token of a row
        sha256=hashlib.sha256(content).hexdigest(),
        rows=(4, 2),
    )
    assert before == (tokenizer.init_kwargs, tokenizer.padding_side, tokenizer.pad_token)


NUM_ROWS, GLOBAL_BATCH, SEED = 21, 4, 42
LENGTHS = [index % 50 + 1 for index in range(200)]


def test_length_groups_are_every_row_once_in_an_order_of_seed_and_epoch() -> None:
    sampler = SeededLengthGroups(4, LENGTHS, seed=1)
    torch.manual_seed(0)
    first = list(sampler)
    torch.manual_seed(99)  # another rank's random state
    assert list(sampler) == first
    assert sorted(first) == list(range(200))
    sampler.set_epoch(1)
    assert list(sampler) != first
    padded = sum(4 * max(LENGTHS[index] for index in first[start : start + 4]) for start in range(0, 200, 4))
    assert sum(LENGTHS) / padded > 0.9  # observed: 0.93; random batches of these lengths: 0.64


def steps_of(
    ranks: int, micro_batch: int, *, epoch: int, skipped: int = 0, by_length: bool = False, drop_last: bool = False,
    whole: bool = True,
) -> list[set[int]]:  # fmt: skip
    """The rows of each step of an epoch over all ranks, after `skipped` steps, as the Trainer takes them."""
    accumulation, rows = GLOBAL_BATCH // ranks // micro_batch, list(range(NUM_ROWS))
    steps: dict[int, set[int]] = {}
    for rank in range(ranks):
        sampler = SeededLengthGroups(GLOBAL_BATCH, LENGTHS[:NUM_ROWS], seed=SEED) if by_length else RandomSampler(rows)
        whole_rows = DataLoader(rows, batch_size=micro_batch, sampler=sampler, drop_last=drop_last)
        place = {"num_processes": ranks, "process_index": rank, "data_seed": SEED}
        loader = prepare_data_loader(whole_rows, use_seedable_sampler=True, **place)
        keep_order(loader, global_batch_size=GLOBAL_BATCH if whole else None)
        if skipped:
            loader = skip_first_batches(loader, skipped * accumulation)
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            steps.setdefault(number // accumulation, set()).update(batch.tolist())
    return list(steps.values())


@pytest.mark.parametrize("order", [{}, {"by_length": True}, {"drop_last": True}])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_division_of_the_batch_has_the_same_rows_in_every_step(order: dict[str, bool], epoch: int) -> None:
    alone = steps_of(1, 1, epoch=epoch, **order)
    assert len(alone) == (5 if order.get("drop_last") else 6)
    assert alone != steps_of(1, 1, epoch=epoch + 1, **order)
    assert all(len(step) == GLOBAL_BATCH for step in alone)
    for ranks, micro_batch in [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]:
        assert steps_of(ranks, micro_batch, epoch=epoch, **order) == alone
        assert steps_of(ranks, micro_batch, epoch=epoch, skipped=2, **order) == alone[2:]


@pytest.mark.parametrize("by_length", [True, False])
def test_a_run_that_resumes_in_the_second_epoch_takes_that_epochs_order(by_length: bool) -> None:
    order = {"by_length": by_length, "whole": False}
    assert steps_of(2, 2, epoch=1, skipped=2, **order) == steps_of(2, 2, epoch=1, **order)[2:]


register()


def row(number: int, length: int) -> dict[str, Any]:
    tokens = [100 * (number + 1) + place for place in range(length)]
    return {"input_ids": tokens, "labels": tokens, "length": length, "row": number}


DOCUMENTS = [row(0, 3), row(1, 5), row(2, 2), row(3, 4)]


def test_every_row_is_in_one_pack_and_no_pack_is_too_long() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 512) for _ in range(2000)]
    packs = collation.best_fit(lengths, max_seq_length=512)
    assert sorted(index for pack in packs for index in pack) == list(range(2000))
    assert max(sum(lengths[index] for index in pack) for pack in packs) <= 512
    assert len(packs) <= 1.02 * sum(lengths) / 512  # observed: 1.004
    assert collation.best_fit([7, 7], max_seq_length=7) == [[0], [1]]
    # A pack concatenates its rows.
    packed = collation.PackedRows(datasets.Dataset.from_list(DOCUMENTS), max_seq_length=7)
    assert (packed.packs, packed.fill_fraction) == ([[1, 2], [3, 0]], 1.0)
    assert packed[0] == collation.joined([DOCUMENTS[1], DOCUMENTS[2]])
    assert (packed[0]["documents"], packed[0]["rows"]) == ([5, 2], [1, 2])


@pytest.mark.parametrize("one_row", [False, True])
def test_positions_restart_with_each_document_whose_first_token_is_not_a_target(tokenizer: Any, one_row: bool) -> None:
    packs = [collation.joined([DOCUMENTS[0], DOCUMENTS[2]]), collation.joined([DOCUMENTS[2]])]
    batch = ObservedCollator(collation.PackCollator(tokenizer, one_row=one_row), collation.batch_facts)(packs)
    positions, labels = [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]], [[IGNORED, 101, 102, IGNORED, 301], [IGNORED, 301]]
    if one_row:  # lengths, and no padding
        positions, labels = [[0, 1, 2, 0, 1, 0, 1]], [labels[0] + labels[1]]
        assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 7]
    assert batch["position_ids"].tolist() == positions
    assert batch["labels"].tolist() == [row + [IGNORED] * (len(positions[0]) - len(row)) for row in labels]
    assert "attention_mask" not in batch
    facts = batch[BATCH_FACTS]
    assert (facts.tokens, facts.non_padding_tokens, facts.supervised_tokens) == (7 if one_row else 10, 7, 4)
    assert facts.rows == (0, 2, 2)


def test_open_packs_lose_no_row_of_a_stream() -> None:
    rng = random.Random(0)
    rows = [row(number, rng.randint(1, 40)) for number in range(300)]
    stream = collation.OpenPacks(max_seq_length=64, at_most=4)
    given = [pack for pack in map(stream.add, rows) if pack is not None]
    packs = [collation.joined(pack) for pack in [*given, *stream.packs]]
    assert sorted(number for pack in packs for number in pack["rows"]) == list(range(300))
    assert max(len(pack["input_ids"]) for pack in packs) <= 64
    fill = sum(len(pack["input_ids"]) for pack in packs) / (64 * len(packs))
    assert fill > 0.9  # observed: 0.95


def test_a_state_space_model_is_refused_with_the_alternative() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ToolkitError, match="MambaForCausalLM cannot isolate packed rows") as caught:
        collation.check_model_packs(model)
    assert "--train_sampling_strategy group_by_length" in str(caught.value)


class Leaky(collation.PackCollator):
    """Positions that do not restart, and no lengths: one document per pack."""

    def __call__(self, packs: Any) -> Any:
        batch = super().__call__(packs)
        batch = {name: value for name, value in batch.items() if not name.startswith(("cu_seq", "max_length"))}
        return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}


@pytest.fixture(params=["sdpa", "eager", "sdpa_varlen"])
def model(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=request.param, dtype=torch.float32)
    model.config.use_cache = False  # as load_model does; with a cache transformers looks for no documents
    return model


def live(model: Any, tokenizer: Any, kind: type[collation.PackCollator] = collation.PackCollator) -> Any:
    """The parts of a Trainer that are read: one process, no engine."""
    collator = kind(tokenizer, one_row=needs_no_mask(model.config._attn_implementation))
    return SimpleNamespace(
        args=SimpleNamespace(mixed_precision="no"),
        model_wrapped=model,
        data_collator=ObservedCollator(collator),
        accelerator=SimpleNamespace(unwrap_model=lambda model, **_: model),
        _prepare_inputs=lambda inputs: inputs,
        compute_loss_context_manager=nullcontext,
    )


def test_documents_of_a_pack_are_isolated_in_the_live_model_and_its_masks_counted(model: Any, tokenizer: Any) -> None:
    reading = collation.verify_packing(live(model, tokenizer))
    assert reading.packing == "isolated"
    assert 0 <= (reading.packing_loss_difference or 0) < 1e-5
    assert reading.packing_neighbour_difference == 0
    # two rows of 45 tokens: a byte, or 4, per pair of positions
    bytes_of = {"sdpa": 2 * 45**2, "eager": 4 * 2 * 45**2, "sdpa_varlen": 0}
    assert reading.packing_mask_bytes == bytes_of[model.config._attn_implementation]


@pytest.mark.parametrize("model", ["sdpa"], indirect=True)
def test_a_mask_in_place_of_document_lengths_is_a_difference(model: Any, tokenizer: Any) -> None:
    """transformers can fall back to another function than the one that was asked for."""
    job = Job(attn_implementation="sdpa_varlen", packing=True)
    training = SimpleNamespace(neftune_noise_alpha=None, seed=1)
    parsed: Any = SimpleNamespace(job=job, training=training, pipeline=None)
    reading = collation.verify_packing(live(model, tokenizer))
    rank = reading | RankReading(attn_implementation=model.config._attn_implementation)
    names = ("packing_mask_bytes", "attn_implementation")
    expected = {name: value for name, value in expected_readings(parsed).items() if name in names}
    assert sorted(map(str, differences(expected, [rank]))) == [
        "attn_implementation on rank 0 is sdpa, expected sdpa_varlen",
        "packing_mask_bytes on rank 0 is 4050, expected 0",
    ]


def test_documents_that_attend_to_each_other_end_the_run(model: Any, tokenizer: Any) -> None:
    with pytest.raises(AttestationFailed, match="packed rows are not isolated") as caught:
        collation.verify_packing(live(model, tokenizer, Leaky))
    assert "group_by_length" in str(caught.value)
    if not needs_no_mask(model.config._attn_implementation):  # a cache makes transformers ignore the documents
        model.config.use_cache = True
        with pytest.raises(AttestationFailed, match="packed rows are not isolated"):
            collation.verify_packing(live(model, tokenizer))


@nightly_launch
def test_a_packed_run_counts_each_supervised_token_once(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> None:
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text("".join(faq_alpaca.read_text().splitlines(keepends=True)[:22]))
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--output_dir", str(folder)]
    words += ["--packing", "true", "--max_seq_length", "256", "--per_device_train_batch_size", "1"]
    words += ["--num_train_epochs", "1", "--eval_dataset", str(rows), "--save_strategy", "no", "--save_model", "false"]
    succeeded(accelerate_launch("zero3", *words))
    run = read(folder / "run.json")
    for rank in read(folder / "attestation.json")["ranks"]:
        assert (rank["packing"], rank["packing_mask_bytes"]) == ("isolated", 0)
        assert rank["attn_implementation"] == run["spec"]["model"]["attn_implementation"] == "sdpa_varlen"
    assert "packed rows: attention sdpa_varlen, no mask" in (folder / "train.log").read_text()
    assert [row["supervised_tokens"] for row in run["evaluations"]] == [1191]
    steps = [*rank_rows(folder, 0), *rank_rows(folder, 1)]
    packs = run["data"]["packs"]
    assert packs % 2 == 0, "otherwise accelerate repeats packs to fill the last step, and the sums below differ"
    assert sum(step["supervised_tokens"] for step in steps) == run["data"]["supervised_tokens"] == 1191
    assert sum(step["non_padding_tokens"] for step in steps) == run["data"]["tokens"]
    assert run["data"]["pack_fill_fraction"] == pytest.approx(run["data"]["tokens"] / (packs * 256))
