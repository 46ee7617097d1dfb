"""The table of fast paths: what is a difference, and which words a person reads."""

from toolkit.observe.verify.differences import kernel_differences
from toolkit.record.kernel_table import kernels_summary, merged_rows, reading_of, row, table_lines
from toolkit.record.reading import RankReading


def test_only_what_was_asked_for_and_did_not_run_is_a_difference() -> None:
    rows = [row("attention", "sdpa", "math", detail="float32", costs="1.5 GiB of scores", repair="bf16=True")]
    rows += [row("experts", "grouped_mm", "grouped_mm"), row("liger", "use_liger_kernel", "", repair="drop it")]
    rank = RankReading(rank=1) | reading_of(rows)
    assert (rank.attention, rank.experts, "liger" in rank.to_json()) == ("math", "grouped_mm", False)
    assert list(map(str, kernel_differences([rank]))) == ["liger on rank 1 is nothing, expected use_liger_kernel"]
    assert kernel_differences([RankReading()]) == []  # nothing was read
    assert table_lines(merged_rows([rank])) == [
        "kernels      asked             ran",
        "  liger      use_liger_kernel  nothing     not as asked; repair: drop it",
        "  attention  sdpa              math        slower path; float32; 1.5 GiB of scores; repair: bf16=True",
        "  experts    grouped_mm        grouped_mm",
    ]
    assert table_lines([]) == []


def test_a_kernel_that_one_node_lacks_is_in_the_tables_row() -> None:
    repair = "pip install mamba-ssm"
    first = reading_of([row("mixers", None, "kernel")])
    second = reading_of([row("mixers", None, "torch loop", repair=repair)])
    merged = merged_rows([first, second])
    assert [(each["ran"], each["repair"]) for each in merged] == [("torch loop", repair)]
    assert kernels_summary(merged) == "mixers torch loop"
    assert kernels_summary([]) is None
