"""Tables show the columns that some row has, in one unit of bytes."""

from __future__ import annotations

from typing import Any

from results_documents import GIB, Document, html_text, markdown_text, summary_sentence


def test_a_column_that_no_row_has_is_left_out_and_a_table_without_figures_too(results: Document) -> None:
    page = html_text(results)
    assert "MFU" not in page
    assert "peak\ndriver" not in page
    for row in results["rows"]:
        row.update(status="failed")
    assert "<h2>Speed</h2>" not in html_text(results)


def test_rows_of_a_split_model_show_their_layout_and_their_batch(made_up: Document) -> None:
    assert "layout" not in markdown_text(made_up)
    completed = [row for row in made_up["rows"] if row["status"] == "completed"]
    for row in completed:
        row.update(layout=None, per_device_train_batch_size=8)
    completed[-1].update(layout="dp_shard 2 x tp 2", per_device_train_batch_size=16)
    page = markdown_text(made_up)
    header, _, *lines = [line for line in page.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in header.split("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[: len(made_up["rows"])]]
    layout, batch = columns.index("layout"), columns.index("micro- batch")
    found = [(row[layout], row[batch]) for row in cells if row[batch] != "n/a"]
    assert found == [*[("n/a", "8")] * (len(completed) - 1), ("dp_shard 2 x tp 2", "16")]
    assert "a batch is larger by as many ranks" in page


def test_a_batch_search_shows_its_sizes_and_the_failure_of_the_smallest_that_does_not_run(made_up: Document) -> None:
    assert "Largest micro-batch" not in html_text(made_up) + markdown_text(made_up)
    failure: Any = {"kind": "out_of_memory", "phase": "backward", "step": 0, "rank": 0}
    failure |= {"predicted_bytes": 84 * GIB, "measured_bytes": 78 * GIB}
    for row, sizes in zip(made_up["rows"][1:3], ({4: 0, 6: 1, 8: 1}, {4: 0, 8: 0}), strict=True):
        row["per_device_train_batch_size"] = max(size for size, failed in sizes.items() if not failed)
        row["probes"] = [
            {
                "per_device_train_batch_size": size,
                "status": "out_of_memory" if failed else "completed",
                "message": "no room" if failed else None,
                "failure": failure if failed else None,
            }
            for size, failed in sizes.items()
        ]
    lines = markdown_text(made_up).splitlines()
    assert "| zero2 n2 | 4 | 4, 6, 8 | 6 | out_of_memory | backward | 84.00 | 78.00 |" in lines
    assert "| zero3 n2 | 8 | 4, 8 | none |  |  |  |  |" in lines
    assert "the largest micro-batch that runs is 4 (zero2 n2), 8 (zero3 n2)" in summary_sentence(made_up)
