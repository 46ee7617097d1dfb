"""Planned model states against real engines, to the byte: every preset that runs on a CPU, 1 to 64 ranks.

    python benchmarks/engine_bytes.py --world-size 1 2 8 64

Each case is a real engine in one process with torch's `fake` process group (`tests/scripts/engine_bytes.py`), full
fine-tuning and LoRA, on rank 0 and the last rank; ZeRO-3 on rank 0 only, since it checks that the other ranks agree
(all ranks hold equal bytes).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import print_table, write_result

from toolkit.presets import load_preset
from toolkit.presets.support import supports_world_size

sys.path.extend(str(Path(__file__).parent.parent / "tests" / folder) for folder in ("", "models", "plan"))
import test_engine_bytes as engines

PRESETS = ["ddp", *engines.PRESETS]


def cases(sizes: list[int], presets: list[str], folder: Path) -> list[dict[str, Any]]:
    """Return the cases grouped by world size and rank, as the script takes them."""
    return [
        case
        for size in sizes
        for rank in sorted({0, size - 1})
        for case in engines.all_cases(
            folder,
            [
                (name, size, rank, usable(presets, size, rank), lora_r)
                for name in engines.MODELS
                for lora_r in (None, 4)
            ],
        )
    ]


def usable(presets: list[str], size: int, rank: int) -> list[str]:
    """Return the presets that support this world size, and can run as this rank."""
    found = [name for name in presets if supports_world_size(load_preset(name), size)]
    return [name for name in found if rank == 0 or "zero3" not in name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, nargs="+", default=[1, 2, 8, 64])
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = cases(options.world_size, options.preset, Path(folder))
        rows = [
            {key: case[key] for key in ("preset", "world_size", "rank", "lora_r")}
            | {"model": Path(case["config"]).parent.name, "planned": engines.planned(case), "held": real}
            for case, real in zip(asked, engines.held(asked), strict=True)
        ]
    different = [row for row in rows if row["planned"] != row["held"]]
    counted = [
        (name, sum(row["preset"] == name for row in rows), sum(row["preset"] == name for row in different))
        for name in options.preset
    ]
    print_table(["preset", "cases", "different"], counted)
    summary = {name: {"cases": number, "different": wrong} for name, number, wrong in counted}
    print(write_result("engine_bytes", {"presets": summary, "different": different}))


if __name__ == "__main__":
    main()
