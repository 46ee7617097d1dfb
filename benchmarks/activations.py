"""Activation bytes that layers save for their backward pass, planned and measured, by architecture, dtype and padding.

    python benchmarks/activations.py

Measured are the storages that a forward pass saves on a CPU (`tests/models/test_activations.py`), as the difference
between a model and one with a layer less.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

from record import print_table, write_result

sys.path.extend(str(Path(__file__).parent.parent / "tests" / folder) for folder in ("", "models", "plan"))
import test_activations as activations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-type", nargs="+", default=list(activations.MODELS))
    rows = []
    warnings.simplefilter("ignore")
    for model_type in parser.parse_args().model_type:
        for autocast in (False, True):
            for padded in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    how = {"autocast": autocast, "padded": padded}
                    measured = activations.layer_bytes(Path(folder), model_type, **how)
                    planned = activations.planned_layer_bytes(Path(folder), **how)
                rows.append({"model_type": model_type, **how, "planned": planned, "measured": measured})
    print_table(
        ["model", "compute", "padded", "planned", "measured"],
        [
            (
                row["model_type"],
                "autocast" if row["autocast"] else "bf16",
                row["padded"],
                row["planned"],
                row["measured"],
            )
            for row in rows
        ],
    )
    errors = [abs(row["planned"] / row["measured"] - 1) for row in rows]
    figures = {"mean_error": sum(errors) / len(errors), "largest_error": max(errors)}
    print(f"bytes a token; mean error {figures['mean_error']:.2%}, largest {figures['largest_error']:.2%}")
    print(write_result("activations", figures | {"rows": rows}))


if __name__ == "__main__":
    main()
