"""Any Trainer is observed by one line, whoever wrote its script."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import read, torchrun

from toolkit.observe.batches import BATCH_FACTS, ObservedCollator, label_shift_of, take_facts, tensor_facts
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A script that knows no argument of the toolkit, with a Trainer class of its own, on two ranks."""
    folder = tmp_path_factory.mktemp("observed")
    ended = torchrun("observed_trainer.py", "zero2", str(folder), num_processes=2)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return RunFolder(folder / "run")


@pytest.mark.launch
def test_each_rank_has_a_row_for_each_step_with_its_own_batches(observed: RunFolder) -> None:
    first, second = (read_rows(observed.rank_rows(rank)) for rank in (0, 1))
    assert [row.step for row in first] == [row.step for row in second] == [1, 2, 3]
    assert all(row.tokens == 2 * 2 * 8 and row.supervised_tokens == 2 * 2 * 7 for row in (*first, *second))
    assert all(row.non_padding_tokens is None for row in first)  # its batches have no mask
    digests = [row.batch_sha256 for row in (*first, *second)]
    assert len(set(digests)) == len(digests) == 6
    assert all(row.own_seconds and row.grad_norm for row in first)
    # The script's own class doubles the loss: a random model of 64 words starts near 2 * log(64).
    assert first[0].loss == pytest.approx(8.3, abs=0.2)


@pytest.mark.launch
def test_what_is_in_effect_is_read_from_the_live_objects_and_the_run_is_completed(observed: RunFolder) -> None:
    attestation = read(observed.attestation_json)
    assert (attestation["verdict"], attestation["differences"]) == ("no_preset", [])
    for rank, reading in enumerate(attestation["ranks"]):
        assert (reading["rank"], reading["world_size"]) == (rank, 2)
        assert (reading["engine"], reading["sharding"]) == ("deepspeed", "shard_grad_op")
        assert (reading["accumulate"], reading["clipped"]) == ("sharded", True)
        assert reading["optimizer_class"].endswith("Adam") or reading["optimizer_class"].endswith("AdamW")
    assert len({reading["initial_weights_sha256"] for reading in attestation["ranks"]}) == 1
    assert len({reading["first_rows_sha256"] for reading in attestation["ranks"]}) == 2
    run = read(observed.run_json)
    assert (run["status"], run["exit_code"], run["world_size"]) == ("completed", 0, 2)
    assert run["measured"]["timed_steps"] == 1
    assert run["measured"]["tokens_per_second"] > 0
    assert 0 < run["goodput"]["fraction"] < 1


def test_the_same_rows_have_the_same_digest_and_a_model_never_sees_it() -> None:
    collator = ObservedCollator(lambda rows: {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)})
    flat, tall, again = collator([[1, 2, 3, 4]]), collator([[1, 2], [3, 4]]), collator([[1, 2, 3, 4]])
    assert flat[BATCH_FACTS] == again[BATCH_FACTS]
    assert flat[BATCH_FACTS].sha256 != tall[BATCH_FACTS].sha256
    assert take_facts(flat) is not None
    assert set(flat) == {"input_ids", "labels"}
    assert take_facts([[1, 2]]) is None  # a collator that returns rows


def test_what_a_batch_does_not_show_is_not_counted() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0]])
    mask, labels, images = (ids > 0).long(), torch.where(ids > 0, ids, -100), torch.ones(2, 3)

    def counts(batch: dict[str, Any], shift: int | None = None) -> tuple[int | None, ...]:
        facts = tensor_facts((), batch, label_shift=shift)
        return facts.tokens, facts.non_padding_tokens, facts.supervised_tokens

    text = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    assert (counts(text), counts(text, 0), counts(text, 1)) == ((8, 4, None), (8, 4, 4), (8, 4, 2))
    assert counts({"pixel_values": images, "labels": torch.tensor([1, 2])}, 0) == (None, None, None)  # of an image
    # masks of something else, and token ids without a mask
    assert counts(text | {"pixel_attention_mask": images}, 0) == (8, 4, 4)
    assert counts(text | {"decoder_input_ids": ids}, 0) == (16, None, 4)
    # batches in any shape have a digest of their own
    nested = [{"images": [images]}, {"images": images}, [images, ids], (ids, images)]
    assert len({tensor_facts((), batch).sha256 for batch in nested}) == 4


def test_labels_are_shifted_by_causal_language_models_only() -> None:
    names = {
        "LlamaForCausalLM": 1,
        "GPT2LMHeadModel": 1,
        "BertForTokenClassification": 0,
        "ViTForImageClassification": None,
    }
    assert {name: label_shift_of(type(name, (), {})()) for name in names} == names
    seq2seq = SimpleNamespace(is_encoder_decoder=True)
    assert label_shift_of(type("T5ForConditionalGeneration", (), {"config": seq2seq})()) == 0
