"""Which optimizer works under DDP and FSDP2, without the rules that refuse any: two CPU ranks, saved and resumed.

    python benchmarks/optimizers.py --work DIR          # resumes: each finished pair is a line of DIR/pairs.jsonl

Each pair trains a random Llama of 3.2 M parameters for four steps, saves after two, and resumes. The result has the
optimizer's class, the dtypes and bytes of its states as rank 0 reads them back, how they differ from the specification,
the losses, and whether the resumed run repeats them; or the error. `toolkit/presets/support.py` refuses the pairs that
differ, fail or do not resume, and the script ends with 1 if it refuses others.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import EVIDENCE, ROOT, append_line, print_table, read_lines, write_result, write_table
from small_job import small_model, words

from toolkit.job.job import Job
from toolkit.presets import load_preset
from toolkit.presets.support import unsupported

sys.path.append(str(ROOT / "tests"))
from launching import accelerate_launch, losses, read

PRESETS = ("ddp", "fsdp2")
# One of each kind: the 8-bit and paged ones of a library are one code.
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "muon", "adafactor", "adamw_torch_8bit")
OPTIMIZERS += ("adagrad", "sgd")
PAIRS = [(preset, optim) for preset in PRESETS for optim in OPTIMIZERS]
DOCUMENT, TABLE = EVIDENCE / "speed-and-memory.md", "optimizers"
HEADER = ("preset", "`--optim`", "class", "dtypes", "bytes per rank", "loss of step 4", "differs in", "outcome")
WIDTH = 120


def run_pair(preset: str, optim: str, work: Path) -> dict[str, Any]:
    """Train and resume one pair, and return the outcome."""
    whole, resumed = work / "whole", work / "resumed"
    for folder in (whole, resumed):
        shutil.rmtree(folder, ignore_errors=True)
    job = {"model_name_or_path": small_model(work / "model"), "optim": optim, "max_steps": 4, "save_steps": 2}
    job |= {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "weight_decay": 0.1, "save_model": "false"}
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"

    def launch(**changed: Any) -> Any:
        return accelerate_launch(config, *words(**job, **changed), script="unsupported_optimizer.py")

    pair: dict[str, Any] = {"preset": preset, "optim": optim, "class": None, "dtype": None, "bytes": None}
    pair |= {"differences": [], "losses": None, "resumes": None, "error": None}
    ended = launch(save_strategy="steps", output_dir=whole)
    if (whole / "attestation.json").is_file():
        attestation = read(whole / "attestation.json")
        pair |= {name: attestation["ranks"][0][f"optimizer_{name}"] for name in ("class", "dtype", "bytes")}
        pair["differences"] = sorted({difference["fact"] for difference in attestation["differences"]})
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error")]
        return pair | {"error": (lines or ["no message"])[0][:300]}
    pair["losses"] = losses(whole)
    ended = launch(save_strategy="no", output_dir=resumed, resume_from_checkpoint=whole / "checkpoint-2")
    return pair | {"resumes": ended.returncode == 0 and losses(resumed) == pair["losses"][2:]}


def table_rows(_: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> list[list[object]]:
    return [cells(pair) for pair in pairs]


def cells(pair: dict[str, Any]) -> list[object]:
    size = "n/a" if pair["bytes"] is None else f"{pair['bytes']:,}"
    outcome = pair["error"] or ("resumes" if pair["resumes"] else "does not resume")
    outcome = re.sub(r"^error \(rank \d+, phase (\w+), step \d+\): ", r"\1: ", outcome).replace("|", "/")
    last = "n/a" if pair["losses"] is None else f"{pair['losses'][-1]:.6f}"
    names = [pair["preset"], f"`{pair['optim']}`", pair["class"] or "n/a", pair["dtype"] or "n/a"]
    return [*names, size, last, ", ".join(pair["differences"]) or "–", outcome[:WIDTH]]


def is_judged_wrong(pair: dict[str, Any]) -> bool:
    """Return True if the rules refuse a pair that works, or allow one that does not."""
    works = bool(pair["resumes"]) and not pair["differences"]
    refused = unsupported(load_preset(pair["preset"]), Job(optim=pair["optim"])) is not None
    return works == refused


def main() -> int:
    parser = argparse.ArgumentParser(description="Which optimizer works under which preset.")
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    ledger = given.work / "pairs.jsonl"
    done = {(pair["preset"], pair["optim"]) for pair in read_lines(ledger)}
    for preset, optim in (pair for pair in PAIRS if pair not in done):
        append_line(ledger, run_pair(preset, optim, given.work))
    pairs = sorted(read_lines(ledger), key=lambda pair: PAIRS.index((pair["preset"], pair["optim"])))
    print_table(HEADER, table_rows({}, pairs))
    wrong = [pair for pair in pairs if is_judged_wrong(pair)]
    for pair in wrong:
        print(f"the rules say otherwise: {pair['optim']} under {pair['preset']}")
    write_result("optimizers", {}, pairs)
    write_table(DOCUMENT, TABLE, HEADER, table_rows({}, pairs))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
