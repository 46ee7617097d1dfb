"""A real comparison of `ddp` with a pipeline of two ranks, on the same sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import read, toolkit

pytestmark = pytest.mark.launch
PARAMETERS = 3_219_776
EMBEDDING = 49_152 * 64


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Any]:
    """One trial of each preset; rows have different lengths, and embedding and head are tied."""
    folder = tmp_path_factory.mktemp("pipeline") / "cmp"
    options = ["--num-processes", "2", "--output-dir", str(folder), "--cpu", "--repeats", "1", "--untimed-steps", "1"]
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "96"]
    job += ["--max_steps", "4", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--pp", "2"]
    ended = toolkit("compare", "--preset", "ddp", "--preset", "pipeline_1f1b", *options, "--", *job)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = read(folder / "results.json")
    return found


def test_a_pipeline_is_ranked_as_the_same_problem(results: dict[str, Any]) -> None:
    ddp, pipeline = results["rows"]
    assert (pipeline["parity"], pipeline["parity_message"], pipeline["group"]) == ("agrees", None, None)
    assert (pipeline["layout"], pipeline["per_device_train_batch_size"]) == ("pp 2", 2)
    assert pipeline["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert pipeline["ratio_to_reference"] > 0


def test_a_rank_holds_half_of_the_layers_and_its_copy_of_the_tied_embedding(results: dict[str, Any]) -> None:
    _, pipeline = results["rows"]
    half_of_the_layers = (PARAMETERS - EMBEDDING - 64) // 2
    largest = EMBEDDING + half_of_the_layers + 64  # the last rank has the final norm
    assert pipeline["parameter_bytes"] == 4 * largest
    assert pipeline["optimizer_bytes"] == 8 * largest
