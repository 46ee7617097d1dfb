"""Shard bytes of the real engines, rank by rank, for tiny models of eight architectures; the plan must equal them.

    python benchmarks/shard_bytes.py --minutes 3

Each case is what `toolkit rehearse` runs: the training script with a fake process group, one step, in a process forked
from one that has imported everything. Cases that are already in the record are skipped, so the same command resumes.
`--cases FILE --output FILE` runs those of a JSON list instead, as the tests do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forked_rehearsals import log_tail, prepare, rehearse
from record import read_result, write_result

# Three layers, and sizes that few world sizes divide, so that padding shows.
SIZES = {"hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3, "vocab_size": 517}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
NAMED = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32"}
LLAMA = {**SIZES, **HEADS, **NAMED, "model_type": "llama"}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 64, "vocab_size": 517}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama_tied": LLAMA | TIED,
    "llama_untied": LLAMA | UNTIED,
    "qwen2": LLAMA | TIED | {"model_type": "qwen2"},
    "qwen3": LLAMA | UNTIED | {"model_type": "qwen3", "head_dim": 16},
    "gemma2": LLAMA | TIED | {"model_type": "gemma2", "head_dim": 16},
    "mistral": LLAMA | UNTIED | {"model_type": "mistral", "head_dim": 10},
    "mixtral": LLAMA | UNTIED | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt2": GPT2 | TIED | {"bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"},
}
EVERY_SIZE, SOME_SIZES, EVEN_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 32, 64), (2, 3, 8, 64), (4, 6, 8, 64)
WORLD_SIZES = {
    **{"single": (1,), "ddp": (1, 2, 64), "zero1": EVERY_SIZE, "zero2": EVERY_SIZE, "zero3": EVERY_SIZE},
    **{"fsdp2": EVERY_SIZE[1:], "fsdp2_grad_op": SOME_SIZES, "fsdp2_hybrid": EVEN_SIZES},
    **{name: SOME_SIZES for name in ("zero2_cpu_offload", "zero3_cpu_offload", "fsdp2_cpu_offload")},
}
LORA = ["--lora_r", "4"]
LORA_SIZES = {"ddp": (2,), "zero2": (2, 7), "zero3": (2, 7), "fsdp2": (2, 7)}
STEP = ["--max_steps", "1", "--per_device_train_batch_size", "1", "--max_seq_length", "16"]
PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "num_params", "num_trainable_params")
TIMEOUT_SECONDS = 120
Case = dict[str, Any]


def all_cases() -> list[Case]:
    """Return all cases, in an order that covers every preset and architecture early."""
    cases = [
        {"architecture": architecture, "preset": preset, "world_size": world_size, "rank": rank, "arguments": []}
        for architecture in ARCHITECTURES
        for preset, sizes in WORLD_SIZES.items()
        for world_size in sizes
        for rank in sorted({0, world_size - 1} | ({world_size // 2} if preset.startswith("fsdp2") else set()))
        if preset != "ddp" or rank == 0
    ]
    cases += [
        {"architecture": "llama_untied", "preset": preset, "world_size": world_size, "rank": 0, "arguments": LORA}
        for preset, sizes in LORA_SIZES.items()
        for world_size in sizes
    ]
    return sorted(cases, key=lambda case: (case["world_size"] not in (2, 8, 64), case["rank"] != 0))


def key(case: Case) -> str:
    """Return what identifies a case."""
    return json.dumps([case[name] for name in ("architecture", "preset", "world_size", "rank", "arguments")])


def record_rows(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Return the rows of a record, one per model, preset and arguments, with the bytes of each world size and rank."""
    rows: dict[str, dict[str, Any]] = {}
    for case in cases:
        group = {name: case[name] for name in ("architecture", "preset", "arguments", *PARTS[3:])}
        row = rows.setdefault(json.dumps(group), group | {"bytes": {}})
        row["bytes"][f"{case['world_size']} {case['rank']}"] = [case[name] for name in PARTS[:3]]
    return list(rows.values())


def recorded_cases() -> Iterator[Case]:
    """Yield the cases of the record."""
    for row in read_result("shard_bytes")[1]:
        for place, sizes in row.pop("bytes").items():
            world_size, rank = map(int, place.split())
            yield {**row, "world_size": world_size, "rank": rank, **dict(zip(PARTS[:3], sizes, strict=True))}


def found_by(case: Case, model: Path, work: Path) -> Case:
    """Run one case in a forked process; return its bytes, or its error."""
    folder = work / f"{case['preset']}-{case['world_size']}-{case['rank']}-{time.monotonic_ns()}"
    words = ["--model_name_or_path", str(model), *STEP, *case["arguments"]]
    place = {name: case[name] for name in ("preset", "world_size", "rank")}
    rehearse(**place, words=words, folder=folder, timeout_seconds=TIMEOUT_SECONDS)
    attested = folder / "attestation.json"
    if not attested.is_file():
        return case | {"status": "failed", "message": log_tail(folder)}
    attestation = json.loads(attested.read_text())
    own = attestation["ranks"][0]
    return case | {"status": attestation["verdict"], **{name: own.get(name) for name in ("dp_shard_size", *PARTS)}}


def model_file(name: str, work: Path) -> Path:
    """Return the path of the architecture's config.json, or a path that is given instead."""
    if name not in ARCHITECTURES:
        return Path(name)
    path = work / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ARCHITECTURES[name]))
    return path


def planned(case: Case, model: Path) -> Case:
    """Return the planned bytes of a case, by the same names; in fp32, as in the rehearsal."""
    from toolkit.models.job_weights import job_weights
    from toolkit.models.read_model import read_model
    from toolkit.plan.engine_settings import engine_settings
    from toolkit.plan.model_states import model_states
    from toolkit.presets import load_preset

    shape = read_model(str(model))
    place = {"world_size": case["world_size"], "rank": case["rank"], "hidden_size": shape.hidden_size}
    engine = engine_settings(load_preset(case["preset"]), mixed_precision="no", **place)
    weights = job_weights(shape, int(LORA[1]) if case["arguments"] == LORA else None, False)
    states = model_states(engine, weights)
    numbers = (weights.num_trained + weights.num_frozen, weights.num_trained)
    return {name: getattr(states, name) for name in PARTS[:3]} | dict(zip(PARTS[3:], numbers, strict=True))


def differing(cases: Iterable[Case], work: Path) -> list[Case]:
    """Return the cases whose bytes differ from the plan, with the plan; nothing is rehearsed."""
    with_plan = [case | {"planned": planned(case, model_file(case["architecture"], work))} for case in cases]
    return [case for case in with_plan if any(case[name] != value for name, value in case["planned"].items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", type=Path, help="a JSON list of cases to run instead")
    parser.add_argument("--output", type=Path, help="file for the results of --cases")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no case after this long")
    given = parser.parse_args()
    started, wanted = time.monotonic(), json.loads(given.cases.read_text()) if given.cases else all_cases()
    cases = {} if given.cases else {key(case): case for case in recorded_cases()}
    missing = [case for case in wanted if key(case) not in cases]
    if missing:
        prepare(cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for case in missing:
            if time.monotonic() - started > given.minutes * 60:
                break
            measured = found_by(case, model_file(case["architecture"], work), work)
            if measured["status"] != "attested":
                print(json.dumps(measured), file=sys.stderr, flush=True)
            if given.cases or "num_params" in measured:
                cases[key(case)] = measured
        if given.cases:
            given.output.write_text(json.dumps({"cases": list(cases.values())}))
            return
        wrong = differing(cases.values(), work)
    print(f"{len(wrong)} of {len(cases)} cases hold other bytes than planned", *wrong[:3], sep="\n")
    ordered = [cases[key(case)] for case in wanted if key(case) in cases]
    print(write_result("shard_bytes", {"device": "cpu, fp32", "training_arguments": STEP}, record_rows(ordered)))
    print(f"{len(wanted) - len(ordered)} cases are left, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
