"""The plot is a PNG, whatever the rows are called."""

from __future__ import annotations

from results_documents import Document, plot_png


def test_plot_draws_intervals(made_up: Document) -> None:
    assert plot_png(made_up).startswith(b"\x89PNG\r\n")


def test_plot_is_a_png_for_hostile_names_too(results: Document) -> None:
    results["rows"][0]["preset"] = r"$\frac{ddp$"
    assert plot_png(results).startswith(b"\x89PNG\r\n")


def test_plot_draws_the_first_of_many_rows_with_shortened_names(results: Document) -> None:
    """Half an inch for each of 500 rows would be a picture of 27,000 pixels."""
    row = results["rows"][0]
    results["rows"] += [row | {"preset": f"{'p' * 250}{index}"} for index in range(496)]
    height = int.from_bytes(plot_png(results)[20:24])
    assert height == round(110 * (1.4 + 0.5 * 60))
