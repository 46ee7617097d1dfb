"""The plot is a PNG, whatever the rows are called."""

from __future__ import annotations

from results_documents import Document, plot_png


def test_plot_draws_intervals(made_up: Document) -> None:
    assert plot_png(made_up).startswith(b"\x89PNG\r\n")


def test_plot_is_a_png_for_hostile_names_too(results: Document) -> None:
    results["rows"][0]["preset"] = r"$\frac{ddp$"
    assert plot_png(results).startswith(b"\x89PNG\r\n")
