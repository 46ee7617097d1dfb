"""The summary claims an order only where the comparison does."""

from __future__ import annotations

import copy

from results_documents import Document, html_text, notes, summary_sentence


def test_summary_ranks_only_rows_that_completed_and_trained_the_same_problem(results: Document) -> None:
    assert summary_sentence(results) == (
        "On 2 CPU processes, the 2 of 4 presets that can be compared ran at 300 (zero2) to 400 tokens/s (ddp) in"
        " single runs, unranked; zero2 holds 38 % fewer model-state bytes than ddp at 0.75 times its speed;"
        " 1 did not complete (zero3: out_of_memory); 1 did not train the same problem (fsdp2);"
        " CPU speeds (gloo) say nothing about GPU speeds."
    )


def repeat(results: Document, *presets: str, ranked: bool = True) -> Document:
    """Rows with intervals of 10 % to each side; with `ranked` the comparison says that they are separated."""
    rows = [row for row in results["rows"] if row["preset"] in presets]
    for rank, row in enumerate(rows, 1):
        middle = row["tokens_per_second"] or 0.0
        row.update(repeats=3, tokens_per_second_interval=[middle * 0.9, middle * 1.1], rank=rank if ranked else None)
        row["difference"] = "reference" if row["preset"] == "ddp" else "no difference seen"
    return results


def test_summary_calls_one_fastest_only_where_the_comparison_ranks_it(results: Document) -> None:
    assert "fastest" not in summary_sentence(results)
    ranked = summary_sentence(repeat(copy.deepcopy(results), "ddp", "zero2"))
    assert (
        "ddp is the fastest that fits (400 tokens/s); zero2 holds 38 % fewer model-state bytes than ddp for 25 %"
        in ranked
    )
    unranked = summary_sentence(repeat(results, "ddp", "zero2", ranked=False))
    assert "no difference in speed is seen between ddp and zero2, the fastest of the 2 of 4" in unranked
    assert "zero2 holds 38 % fewer model-state bytes than ddp with no difference seen in speed" in unranked
    results["rows"][1]["difference"] = "slower"  # separated from the reference, and there are only two
    assert "for 25 % less speed" in summary_sentence(results)


def test_summary_ranks_nothing_when_the_baseline_failed(results: Document) -> None:
    results["rows"][0].update(status="failed", parity=None)
    results["rows"][1]["parity"] = None
    sentence = summary_sentence(results)
    assert "none of 4 presets can be ranked" in sentence
    assert "2 did not complete (ddp: failed, zero3: out_of_memory)" in sentence
    assert "1 could not be checked against the baseline (zero2)" in sentence
    assert "fastest" not in sentence


def test_summary_names_what_differs_by_design(results: Document) -> None:
    results["rows"][1].update(group="ddp_comm_hook int8", parity=None)
    assert "1 not ranked here, different by design (zero2 (ddp_comm_hook int8))" in summary_sentence(results)
    assert "could not be checked" not in summary_sentence(results)


def test_an_empty_comparison_is_reported_as_such(results: Document) -> None:
    results["rows"] = []
    assert summary_sentence(results) == "Nothing was compared: there are no rows."
    assert "Nothing was measured." in html_text(results)


def test_summary_of_repeated_gpus_says_what_is_fastest_and_what_less_memory_costs(made_up: Document) -> None:
    assert summary_sentence(made_up) == (
        "On 2 × NVIDIA H100 80GB HBM3, zero2 is the fastest that fits (27,000 tokens/s); fsdp2 uses 31 % less"
        " memory than zero2 for 8 % less speed; on 4 × NVIDIA H100 80GB HBM3, zero2 is the fastest of 3 presets (50,220"
        " tokens/s); fsdp2 uses 44 % less memory than zero2 for 5 % less speed; from 2 to 4 processes zero2"
        " becomes 1.86 times as fast (93 % of ideal); 1 did not complete (ddp: out_of_memory);"
        " 1 did not train the same problem (zero1)."
    )


def test_notes_of_gpus_say_what_mfu_counts_the_price_and_throttling(made_up: Document) -> None:
    said = notes(made_up)
    assert "Cost: per million non-padding tokens, at 2.5 per GPU-hour." in said
    assert any(note.startswith("MFU counts all parameters and causal attention, padding included") for note in said)
    held = "GPU clocks were reduced during timed steps: zero2 n2 (software power cap), zero2 n4 (software power cap)."
    assert held in said
