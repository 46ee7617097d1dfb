"""Results that the tests of the report change."""

import pytest
from results_documents import FIXTURES, Document, read


@pytest.fixture
def results() -> Document:
    """ddp 400 tokens/s and 16 MiB; zero2 300 and 10 MiB; zero3 out of memory; fsdp2 differs."""
    return read(FIXTURES / "results_small.json")


@pytest.fixture
def made_up() -> Document:
    """Two and four H100s with every figure there is, invented: no GPU measured them."""
    return read(FIXTURES / "results_made_up_gpus.json")
