"""The training script; at its end rank 0 writes what it has imported, started, mapped of shared memory, and cleared.

accelerate launch --config_file ... tests/scripts/rank_costs.py training arguments ... --output_dir OUT
"""

import json
import os
import sys
from pathlib import Path

STARTED: list[str] = []
sys.addaudithook(lambda event, given: STARTED.append(str(given[0])) if event == "subprocess.Popen" else None)

from count_faults import faults_of_freed_memory  # noqa: E402

from toolkit.observe.rank_process import leave  # noqa: E402
from toolkit.train.__main__ import main  # noqa: E402

code = main()
if os.environ.get("RANK", "0") == "0":
    written = Path(sys.argv[sys.argv.index("--output_dir") + 1]).with_suffix(".json")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    faults = {"faults_of_freed_memory": faults_of_freed_memory()}
    written.write_text(json.dumps({"modules": sorted(sys.modules), "started": STARTED, "mapped": mapped} | faults))
leave(code)
