"""Two comparisons side by side: claims only where intervals separate, and only for one job."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from results_documents import FIXTURES, Document, before_and_after, read

from toolkit.errors import ToolkitError
from toolkit.report.tables import rich_table


@pytest.fixture
def before() -> Document:
    """Two and four H100s, invented figures."""
    return read(FIXTURES / "results_made_up_gpus.json")


@pytest.fixture
def after(before: Document) -> Document:
    """Another torch: zero2 n2 at 1.1 times its speed, the others as before."""
    results = copy.deepcopy(before)
    results["environment"]["versions"]["torch"] = "2.14.0"
    row = results["rows"][1]
    low, high = row["tokens_per_second_interval"] or (0.0, 0.0)
    row.update(tokens_per_second=29_700.0, tokens_per_second_interval=[low * 1.1, high * 1.1])
    return results


def test_what_became_faster_is_claimed_only_where_intervals_separate(before: Document, after: Document) -> None:
    paired = before_and_after(before, after)
    assert paired.summary == (
        "Of 8 rows in both, 1 became faster (zero2-n2: 1.10), 0 became slower, no difference is seen in 5."
    )
    zero2 = paired.pairs[1]
    assert zero2.ratio_interval == pytest.approx((1.1 * 26_838 / 27_162, 1.1 * 27_162 / 26_838))
    assert {pair.name: pair.difference for pair in paired.pairs if pair.difference is None} == {
        "ddp-n2": None,
        "zero1-n2": None,
    }


def test_single_runs_support_no_claim() -> None:
    results = read(FIXTURES / "results_small.json")
    faster = copy.deepcopy(results)
    faster["rows"][0]["tokens_per_second"] = 4000.0
    assert before_and_after(results, faster).summary == (
        "4 rows are in both; nothing is claimed of 2 single runs (ddp-n2, zero2-n2)."
    )


def test_a_row_that_failed_after_the_upgrade_is_named(before: Document, after: Document) -> None:
    after["rows"][2].update(status="out_of_memory", tokens_per_second=None, tokens_per_second_interval=None)
    after["rows"].pop()
    said = before_and_after(before, after).summary
    assert "zero3-n2: completed before, out_of_memory after" in said
    assert "only before: fsdp2-n4" in said


def test_differences_in_the_environment_are_listed(before: Document, after: Document) -> None:
    after["environment"]["gpus"][0]["driver"] = "580.1"
    found = {name: (old, new) for name, old, new in before_and_after(before, after).environment}
    assert found["torch"] == ("2.13.0", "2.14.0")
    assert "570.86.15" in found["gpus"][0]
    assert "580.1" in found["gpus"][1]
    assert set(found) == {"torch", "gpus"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"per_device_train_batch_size": 16}, "per_device_train_batch_size 8 and 16"),
        ({"training_arguments": ["--max_steps", "99"]}, "training arguments .* and --max_steps 99"),
    ],
)
def test_other_jobs_are_not_compared(before: Document, after: Document, changes: dict[str, Any], said: str) -> None:
    after["job"].update(changes)
    with pytest.raises(ToolkitError, match=f"do not train the same job: {said}"):
        before_and_after(before, after)


def test_markdown_and_page_hold_both_values(before: Document, after: Document, tmp_path: Path) -> None:
    paired = before_and_after(before, after)
    lines = paired.rendered("before_and_after.md.j2").splitlines()
    assert (
        "| zero2-n2 | 27,000 | 29,700 | 1.100 | 1.087–1.113 | faster | 55.00 | 55.00 | 1.3999 | 1.3999 | 34.3 %"
        " | 34.3 % |"
    ) in lines
    assert "| torch | 2.13.0 | 2.14.0 |" in lines
    page = paired.rendered("before_and_after.html.j2")
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", page.replace("// Clicking", ""))
    assert page.count("<table") == 2
    files = paired.write(tmp_path)
    assert sorted(path.name for path in files) == [
        "before-and-after.html",
        "before-and-after.md",
    ]


def test_the_console_table_fits_100_columns(before: Document, after: Document) -> None:
    from rich.console import Console

    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(rich_table(before_and_after(before, after).table(narrow=True)))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "zero2-n2 27,000 29,700 1.100 faster 55.00 55.00 1.3999 1.3999" in lines
    assert "ddp-n2 out_of_memory out_of_memory n/a n/a 74.10 74.10 n/a n/a" in lines


def test_the_command_reports_one_job_and_refuses_others(
    before: Document, after: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, results in (("a", before), ("b", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    code, out, err = run_command(["report", str(tmp_path / "a"), str(tmp_path / "b")], capsys)
    assert code == 0, err
    assert "torch: 2.13.0 -> 2.14.0" in out
    assert (tmp_path / "b" / "before-and-after.html").is_file()
    after["job"]["seed"] = 7
    (tmp_path / "b" / "results.json").write_text(json.dumps(after))
    code, _, err = run_command(["report", str(tmp_path / "a"), str(tmp_path / "b")], capsys)
    assert code == 2
    assert "do not train the same job: seed 42 and 7" in err


def test_a_report_again_can_be_given_a_price(
    before: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(before))
    code, _, err = run_command(["report", str(tmp_path), "--price-per-gpu-hour", "5"], capsys)
    assert code == 0, err
    again = read(tmp_path)
    assert again["price_per_gpu_hour"] == 5
    cost = again["rows"][1]["cost_per_million_tokens"]
    assert cost == pytest.approx(5 * 2 / 3600 / (27_000 * 0.88) * 1e6)
