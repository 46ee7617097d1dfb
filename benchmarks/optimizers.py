"""Which optimizer works under DDP and FSDP2, without the rules that refuse any: two CPU ranks, saved and resumed.

    python benchmarks/optimizers.py --work DIR          # resumes: each finished pair is a line of DIR/pairs.jsonl

Each pair trains a random Llama of 3.2 M parameters for four steps, saves after two, and resumes. The result has the
optimizer's class, the dtypes and bytes of its states as rank 0 reads them back, how they differ from the specification,
the losses, and whether the resumed run repeats them; or the error. `toolkit/presets/support.py` refuses the pairs that
differ, fail or do not resume, and the script ends with 1 if it refuses others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from comm_hooks import small_model
from record import print_table, write_result, write_table

from toolkit.demo.assets import default_data_file
from toolkit.presets import load_preset
from toolkit.presets.compatibility import Method
from toolkit.presets.support import unsupported

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from launching import ROOT, accelerate_launch, fork_server, losses, read

from toolkit.launch.warm_start import SOCKET_VARIABLE

PRESETS = ("ddp", "fsdp2")
# One of each kind: the 8-bit and paged ones of a library are one code.
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "muon", "adafactor", "adamw_torch_8bit")
OPTIMIZERS += ("adagrad", "sgd")
DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence" / "optimizers.md"
TABLE = "optimizers"
HEADER = ("preset", "`--optim`", "class", "dtypes", "bytes per rank", "loss of step 4", "differs in", "outcome")
WIDTH = 120


def run_pair(preset: str, optim: str, model: Path, work: Path) -> dict[str, Any]:
    """Train and resume one pair, and return what it was."""
    whole, resumed = work / "whole", work / "resumed"
    for folder in (whole, resumed):
        shutil.rmtree(folder, ignore_errors=True)
    job = {"model_name_or_path": model, "dataset": default_data_file("faq-en-alpaca.jsonl"), "optim": optim}
    job |= {"max_steps": 4, "max_seq_length": 64, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    job |= {"weight_decay": 0.1, "save_model": "false", "save_steps": 2}
    found: dict[str, Any] = {"preset": preset, "optim": optim, "class": None, "dtype": None, "bytes": None}
    found |= {"differences": [], "losses": None, "resumes": None, "error": None}
    ended = launch(preset, job | {"save_strategy": "steps", "output_dir": whole})
    if (whole / "attestation.json").is_file():
        attestation = read(whole / "attestation.json")
        rank = attestation["ranks"][0]
        found |= {"class": rank["optimizer_class"], "dtype": rank["optimizer_dtype"], "bytes": rank["optimizer_bytes"]}
        found["differences"] = sorted({difference["fact"] for difference in attestation["differences"]})
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error")]
        return found | {"error": (lines or ["no message"])[0][:300]}
    found["losses"] = losses(whole)
    checkpoint = whole / "checkpoint-2"
    ended = launch(preset, job | {"save_strategy": "no", "output_dir": resumed, "resume_from_checkpoint": checkpoint})
    return found | {"resumes": ended.returncode == 0 and losses(resumed) == found["losses"][2:]}


def launch(preset: str, job: dict[str, Any]) -> Any:
    words = [word for name, value in job.items() for word in (f"--{name}", str(value))]
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    return accelerate_launch(config, *words, script="unsupported_optimizer.py")


def works(found: dict[str, Any]) -> bool:
    return bool(found["resumes"]) and not found["differences"]


def table_rows(found: dict[str, Any]) -> list[list[object]]:
    return [row(pair) for pair in found["pairs"]]


def row(pair: dict[str, Any]) -> list[object]:
    size = "n/a" if pair["bytes"] is None else f"{pair['bytes']:,}"
    outcome = pair["error"] or ("resumes" if pair["resumes"] else "does not resume")
    outcome = re.sub(r"^error \(rank \d+, phase (\w+), step \d+\): ", r"\1: ", outcome).replace("|", "/")
    last = "n/a" if pair["losses"] is None else f"{pair['losses'][-1]:.6f}"
    names = [pair["preset"], f"`{pair['optim']}`", pair["class"] or "n/a", pair["dtype"] or "n/a"]
    return [*names, size, last, ", ".join(pair["differences"]) or "–", outcome[:WIDTH]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Which optimizer works under which preset.")
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    ledger = arguments.work / "pairs.jsonl"
    pairs = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    if len(pairs) < len(PRESETS) * len(OPTIMIZERS):
        os.environ[SOCKET_VARIABLE] = fork_server().socket_path
    model = small_model(arguments.work / "model")
    for preset in PRESETS:
        for optim in OPTIMIZERS:
            if (preset, optim) not in [(pair["preset"], pair["optim"]) for pair in pairs]:
                pairs.append(run_pair(preset, optim, model, arguments.work))
                with ledger.open("a") as file:
                    file.write(json.dumps(pairs[-1]) + "\n")
    pairs.sort(key=lambda pair: (PRESETS.index(pair["preset"]), OPTIMIZERS.index(pair["optim"])))
    print_table(HEADER, table_rows({"pairs": pairs}))
    refused = {
        (pair["preset"], pair["optim"]): unsupported(load_preset(pair["preset"]), Method(optim=pair["optim"]))
        for pair in pairs
    }
    wrong = [pair for pair in pairs if works(pair) and refused[pair["preset"], pair["optim"]] is not None]
    wrong += [pair for pair in pairs if not works(pair) and refused[pair["preset"], pair["optim"]] is None]
    for pair in wrong:
        print(f"the rules say otherwise: {pair['optim']} under {pair['preset']}")
    write_result("optimizers", {"pairs": pairs})
    write_table(DOCUMENT, TABLE, HEADER, table_rows({"pairs": pairs}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
