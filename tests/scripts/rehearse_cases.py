"""Rehearse a rank for each case of a JSON list, and write the bytes that it holds, or its error.

    python tests/scripts/rehearse_cases.py CASES.json FOUND.json

Each runs as `toolkit rehearse` does, in a process forked from one that has imported everything.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from forked_rehearsals import log_tail, prepare, rehearse

STEP = ["--max_steps", "1", "--per_device_train_batch_size", "1", "--max_seq_length", "16"]
PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "num_params", "num_trainable_params", "dp_shard_size")
TIMEOUT_SECONDS = 120


def rehearsed(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    words = ["--model_name_or_path", case["architecture"], *STEP, *case["arguments"]]
    place = {name: case[name] for name in ("preset", "world_size", "rank")}
    rehearse(**place, words=words, folder=folder, timeout_seconds=TIMEOUT_SECONDS)
    path = folder / "attestation.json"
    if not path.is_file():
        return case | {"status": "failed", "message": log_tail(folder)}
    attestation = json.loads(path.read_text())
    rank = attestation["ranks"][0]
    return case | {"status": attestation["verdict"], **{name: rank.get(name) for name in PARTS}}


def main(cases: str, found: str) -> None:
    prepare(cpu=True)
    with tempfile.TemporaryDirectory() as work:
        rows = [
            rehearsed(case, Path(work) / str(number)) for number, case in enumerate(json.loads(Path(cases).read_text()))
        ]
    for row in rows:
        if row["status"] != "attested":
            print(json.dumps(row), file=sys.stderr, flush=True)
    Path(found).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
