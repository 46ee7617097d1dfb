"""MosaicML's published A100 runs (`fixtures/mosaicml_a100_2048.csv`), and the sizes of its MPT models."""

from __future__ import annotations

import csv
from pathlib import Path

FIXTURE = Path(__file__).parent / "fixtures" / "mosaicml_a100_2048.csv"
# Width and layers of MosaicML's MPT models (llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml).
MPT = {
    **{"125m": (768, 12), "350m": (1024, 24), "760m": (1536, 24), "1b": (2048, 24), "3b": (2560, 32)},
    **{"7b": (4096, 32), "13b": (5120, 40), "30b": (7168, 48), "70b": (8192, 80)},
}


def published() -> list[dict[str, str]]:
    """Return the rows of the table."""
    lines = [line for line in FIXTURE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))
