"""Results that the tests of the report change."""

from __future__ import annotations

import pytest
from results_documents import FIXTURES, GIB, Document, read


@pytest.fixture
def results() -> Document:
    """ddp 400 tokens/s and 16 MiB; zero2 300 and 10 MiB; zero3 out of memory; fsdp2 differs."""
    return read(FIXTURES / "results_small.json")


@pytest.fixture
def gpu_results(results: Document) -> Document:
    """The same on two GPUs, a thousand times larger."""
    results["environment"].update(device="cuda", gpus=[{"name": "NVIDIA H100", "memory_bytes": 80 * GIB}] * 2)
    for row in results["rows"]:
        if row["status"] == "completed":
            row.update(peak_allocated_bytes=40 * GIB, peak_reserved_bytes=48 * GIB, parameter_bytes=4 * GIB)
    return results


@pytest.fixture
def made_up() -> Document:
    """Two and four H100s with every figure there is, invented: no GPU measured them."""
    return read(FIXTURES / "results_made_up_gpus.json")
