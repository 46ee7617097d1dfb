"""Which modules a piece of code imports, in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launching import ROOT

# Libraries that take seconds to import; no light command may load them.
HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "peft", "datasets"}


def loaded_after(code: str, cwd: Path = ROOT) -> set[str]:
    """Return the names in sys.modules of a fresh interpreter after `code`, whatever its exit code."""
    tail = "finally:\n    print('\\nLOADED', *sorted(sys.modules), flush=True)"
    program = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n{tail}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Traceback" not in done.stderr
    return set(done.stdout.rpartition("\nLOADED ")[2].split())
