"""The console table is legible at 100 columns, and shows text as text."""

from __future__ import annotations

from results_documents import Document, console_lines


def test_console_table_is_exact_at_100_columns(results: Document) -> None:
    lines = console_lines(results)
    assert [" ".join(line.split()) for line in lines[4:8]] == [
        "ddp completed 400 0.500 4.0 4.0 8.0 1,500 2.0000 1.00",
        "zero2 completed 300 0.667 4.0 2.0 4.0 1,600 2.0000 0.75",
        "zero3 out_of_memory n/a n/a n/a n/a n/a n/a n/a n/a",
        "fsdp2 parity failed n/a n/a 2.0 2.0 4.0 1,550 2.2000 n/a",
    ]
    assert [line.split()[0] for line in lines[:1]] == ["peak"]
    assert "RSS" in lines[1]
    assert max(map(len, lines)) <= 100


def test_console_table_names_the_allocator_on_a_gpu(gpu_results: Document) -> None:
    lines = console_lines(gpu_results)
    assert "alloc." in lines[1]
    assert " ".join(lines[4].split()) == "ddp completed 400 0.500 4.00 <0.01 <0.01 40.00 2.0000 1.00"


def test_longest_preset_and_status_fit_on_one_line(results: Document) -> None:
    results["rows"][2].update(preset="zero3_cpu_offload", status="host_out_of_memory")
    results["rows"][0].update(parameter_bytes=513 * 2**20, optimizer_bytes=1026 * 2**20)
    assert any(line.startswith("zero3_cpu_offload  host_out_of_memory  ") for line in console_lines(results))


def test_console_shows_hostile_text_as_text(results: Document) -> None:
    results["rows"][2]["message"] = "[red]not markup[/red]\x1b[31m"
    results["reference"] = "[b]"
    assert "zero3: out_of_memory: [red]not markup[/red]\\x1b[31m" in console_lines(results)
