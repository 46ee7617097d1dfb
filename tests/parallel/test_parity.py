"""Every layout trains the problem of one process: losses, gradient norms, and what its ranks read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import read
from split_runs import RUNS, losses_and_norms, split_runs

pytestmark = pytest.mark.launch

SPLIT = split_runs()


@pytest.mark.parametrize("name", [run for run in SPLIT if "bf16" not in run.id])
def test_losses_and_gradient_norms_are_those_of_one_process(name: str, run_folder: Callable[[str], Path]) -> None:
    losses, norms = losses_and_norms(run_folder(name))
    expected_losses, expected_norms = losses_and_norms(run_folder(RUNS[name].baseline))
    assert len(losses) == RUNS[name].steps
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)


@pytest.mark.parametrize("name", SPLIT)
def test_every_rank_reads_its_layout_back_and_holds_a_part_of_the_model_states(
    name: str, run_folder: Callable[[str], Path]
) -> None:
    """`tests/plan/test_split_memory.py` has the exact bytes."""
    attestation, run = read(run_folder(name) / "attestation.json"), RUNS[name]
    assert (attestation["verdict"], attestation.get("differences")) == ("attested", [])
    assert len(attestation["ranks"]) == run.num_ranks
    for rank in attestation["ranks"]:
        assert {dimension: size for dimension, size in rank["layout"].items() if size > 1} == run.layout
        assert set(rank["byte_limits"]) == {"parameter", "gradient", "optimizer"}
        for part, (_, most) in rank["byte_limits"].items():
            assert 0 < rank[f"{part}_bytes"] <= most
            shares = run.preset in ("cp", "ulysses") or run.words[:1] == ("--lora_r",)
            assert most < rank["whole_bytes"][part] or shares


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "baseline"), [("tp-without-norm-fix", "qwen3"), ("ulysses-without-token-weights", "llama")]
)
def test_without_its_fix_a_library_trains_another_problem(
    name: str, baseline: str, run_folder: Callable[[str], Path]
) -> None:
    """A fix goes when this fails. Every rank reads the same layout back: only the gradient shows the difference."""
    _, norms = losses_and_norms(run_folder(name))
    _, expected = losses_and_norms(run_folder(baseline))
    assert norms != pytest.approx(expected, rel=1e-5)
