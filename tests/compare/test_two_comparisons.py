"""Two comparisons side by side: claims only where intervals separate, and only for one job."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from command_line import run_command
from results_documents import FIXTURES, Document, before_and_after, read


@pytest.fixture
def after(made_up: Document) -> Document:
    """Another torch: zero2 n2 at 1.1 times its speed, the others as before."""
    results = copy.deepcopy(made_up)
    results["environment"]["versions"]["torch"] = "2.14.0"
    row = results["rows"][1]
    low, high = row["tokens_per_second_interval"] or (0.0, 0.0)
    row.update(tokens_per_second=29_700.0, tokens_per_second_interval=[low * 1.1, high * 1.1])
    return results


def test_what_became_faster_is_claimed_only_where_intervals_separate(made_up: Document, after: Document) -> None:
    paired = before_and_after(made_up, after)
    assert paired.summary == (
        "Of 8 rows in both, 1 became faster (zero2-n2: 1.10), 0 became slower, no difference is seen in 5."
    )
    assert paired.pairs[1].interval == pytest.approx((1.1 * 26_838 / 27_162, 1.1 * 27_162 / 26_838))


def test_single_runs_support_no_claim() -> None:
    results = read(FIXTURES / "results_small.json")
    assert before_and_after(results, results).summary == (
        "4 rows are in both; nothing is claimed of 2 single runs (ddp-n2, zero2-n2)."
    )


def test_a_row_that_failed_after_the_upgrade_is_named(made_up: Document, after: Document) -> None:
    after["rows"][2].update(status="out_of_memory", tokens_per_second=None, tokens_per_second_interval=None)
    after["rows"].pop()
    said = before_and_after(made_up, after).summary
    assert "zero3-n2: completed before, out_of_memory after" in said
    assert "only before: fsdp2-n4" in said


def test_a_table_holds_both_values_and_what_differs_in_the_environment(made_up: Document, after: Document) -> None:
    after["environment"]["gpus"][0]["driver"] = "580.1"
    both = before_and_after(made_up, after)
    lines = both.rendered("md").splitlines()
    row = "| zero2-n2 | 27,000 | 29,700 | 1.100 | 1.087–1.113 | faster | 55.00 | 55.00 | 1.3999 | 1.3999 |"
    assert {row, "| torch | 2.13.0 | 2.14.0 |"} <= set(lines)
    (_, gpus_before, gpus_after), _ = both.environment
    assert ("570.86.15" in gpus_before, "580.1" in gpus_after) == (True, True)


def test_the_command_reports_one_job_and_refuses_others(
    made_up: Document, after: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, results in (("a", made_up), ("b", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    code, out, err = run_command(["report", str(tmp_path / "a"), str(tmp_path / "b")], capsys)
    assert code == 0, err
    assert "torch: 2.13.0 -> 2.14.0" in out
    assert (tmp_path / "b" / "before-and-after.html").is_file()
    after["job"].update(seed=7, training_arguments=["--max_steps", "99"])
    (tmp_path / "b" / "results.json").write_text(json.dumps(after))
    code, _, err = run_command(["report", str(tmp_path / "a"), str(tmp_path / "b")], capsys)
    assert code == 2
    assert "do not train the same job: seed 42 and 7; training arguments " in err


def test_a_report_again_can_be_given_a_price(
    made_up: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(made_up))
    code, _, err = run_command(["report", str(tmp_path), "--price-per-gpu-hour", "5"], capsys)
    assert code == 0, err
    again = read(tmp_path)
    assert again["price_per_gpu_hour"] == 5
    cost = again["rows"][1]["cost_per_million_tokens"]
    assert cost == pytest.approx(5 * 2 / 3600 / (27_000 * 0.88) * 1e6)
