"""The reading of a rank is written, and read again, as it was: with the keys that it has, in their order."""

import json
from pathlib import Path

import pytest

from toolkit.record.reading import RankReading

ATTESTED = Path(__file__).parents[1] / "fixtures" / "attested_ranks.jsonl"
"""Rank 1 under DDP, ZeRO-2, ZeRO-3, FSDP2, with packed LoRA, and of a loop, as runs on two CPU ranks wrote it."""


@pytest.mark.parametrize("line", ATTESTED.read_text().splitlines())
def test_a_rank_is_written_as_it_was_before_its_reading_had_a_type(line: str) -> None:
    assert json.dumps(RankReading.model_validate_json(line).to_json()) == line


def test_what_is_read_later_is_added_and_what_was_not_read_stays_absent() -> None:
    engine, gradients = RankReading(engine="ddp", sharding="replicate"), RankReading(gradient_dtype="float32")
    reading = engine | gradients | RankReading(engine="pipeline", frozen_dtype=None)
    known = {"engine": "pipeline", "sharding": "replicate", "frozen_dtype": None, "gradient_dtype": "float32"}
    assert list(reading.to_json().items()) == list(known.items())
    assert engine.to_json() == {"engine": "ddp", "sharding": "replicate"}
