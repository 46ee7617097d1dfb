"""Checkpoints of every engine, run folders, model folders and tokenizers: what real runs have written, mutated."""

import hashlib
import json
import time
from pathlib import Path

from file_mutations.attempts import call, command
from file_mutations.formats import DRY_RUN, JOB, JOB_FILES, Format, content_of
from toolkit.compare.ledger import read_run_record
from toolkit.compare.rows import RowKey, Trial
from toolkit.data.formats import Sample
from toolkit.record.checkpoints import MANIFEST, list_checkpoints
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import read_heartbeats, stalled_seconds, suspects, unresponsive_reason

RUN, MODEL = "run", "base"


def files_below(folder: Path, name: str, *, leave_out: tuple[str, ...] = ()) -> dict[str, bytes | Path]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not any(map(path.match, leave_out))]
    return {f"{name}/{path.relative_to(folder).as_posix()}": path for path in paths}


def sealed(files: dict[str, bytes | Path], changed: str) -> dict[str, bytes | Path]:
    """Return the files with a manifest that agrees with the changed one, as whoever changed it would write it."""
    path = next((name for name in files if name.endswith(f"/{MANIFEST}")), None)
    if path is None:
        return files
    try:
        manifest = json.loads(content_of(files[path]))
        content, relative = content_of(files[changed]), changed.removeprefix(path.removesuffix(MANIFEST))
        for entry in manifest["files"]:
            if entry["path"] == relative:
                entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return files | {path: json.dumps(body | {"sha256": seal}, indent=2).encode()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):  # a mutated manifest that has no seal
        return files


# What is mutated -> its patterns, the runs that have such files, and the share.
CHECKPOINT_FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "checkpoint manifest": (("checkpoint-*/manifest.json",), ("ddp", "zero2", "zero3", "fsdp2", "fsdp2-lora"), 1),
    "trainer_state.json": (("checkpoint-*/trainer_state.json",), ("ddp", "zero2"), 2),
    "latest": (("latest",), ("zero2", "zero3-lora"), 1),
    "safetensors": (("checkpoint-*/*.safetensors",), ("ddp", "zero2", "zero3-lora"), 2),
    "config.json of a checkpoint": (("checkpoint-*/config.json",), ("ddp", "fsdp2"), 1),
    "adapter_config.json": (("adapter_config.json",), ("zero3-lora", "fsdp2-lora"), 2),
    "optimizer.pt": (("optimizer.pt", "scheduler.pt", "rng_state_*.pth"), ("ddp",), 6),
    "DeepSpeed states": (("*_states.pt",), ("zero2", "zero3", "zero3-lora"), 4),
    "DCP metadata": ((".metadata",), ("fsdp2", "fsdp2-lora"), 6),
    "DCP shards": (("*.distcp",), ("fsdp2", "fsdp2-lora"), 2),
}


def checkpoint_format(name: str, case: str, run: Path, model: Path) -> Format:
    """Return a kind of file of the newest checkpoint in `run`; `model` is the run's base model."""
    patterns, _, share = CHECKPOINT_FILES[name]
    path = list_checkpoints(run)[0].path
    here, based = f"{RUN}/{path.name}", ("--base-model", MODEL)
    convert = ("checkpoint", "convert", here, "out", *based, "--num-processes", "2", "--preset")
    return Format(
        name=f"{name} ({case})",
        seeds=[{**files_below(model, MODEL), **files_below(path, here)}],
        mutated=patterns,
        commands=[
            command("checkpoint", "inspect", here),
            command("checkpoint", "inspect", RUN, "--json"),
            command("checkpoint", "verify", here, *based),
            command("checkpoint", "export", here, "out", *based),
            command(*convert, "fsdp2"),
            command(*convert, "zero2"),
        ],
        share=share,
        adjust=sealed,
    )


def exported_formats(folder: Path) -> list[Format]:
    seeds = [{**JOB_FILES, **files_below(folder, "exported")}]
    job = command(*DRY_RUN, "--model_name_or_path", "exported", *JOB[2:])
    verify, tokenized = command("checkpoint", "verify", "exported"), call(tokenize)
    return [
        Format(name=name, seeds=seeds, mutated=mutated, commands=commands, share=share)
        for name, mutated, commands, share in (
            ("safetensors index", ["*.index.json"], [verify, job], 5),
            ("safetensors shard", ["exported/*.safetensors"], [verify], 5),
            ("fingerprint.json", ["fingerprint.json"], [verify], 3),
            ("tokenizer files", ["tokenizer_config.json", "tokenizer.json"], [tokenized], 3),
            ("chat template", ["chat_template.jinja"], [tokenized], 8),
        )
    ]


def tokenize() -> None:
    """load_tokenizer on exported, and encode_chat"""
    from toolkit.job.argument_fields import ModelArguments
    from toolkit.train.data.tokenization import encode_chat
    from toolkit.train.model.loading import load_tokenizer

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hej"}]
    sample = Sample(messages=messages * 2)
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path="exported"), chat_template=None)
    encode_chat(sample, tokenizer, supervise_all=False, max_seq_length=None)


def run_format(run: Path) -> Format:
    """Return the files of a run folder: what a comparison, a resumed run and a diagnosis read of it."""
    leave_out = ("checkpoint-*/*", "*.safetensors", "tokenizer*", "*.lock")
    failure = {"kind": "failed", "phase": "load", "step": 0, "rank": 1, "message": "no", "peak_bytes": None}
    files = {**JOB_FILES, **files_below(run, RUN, leave_out=leave_out)}
    finished = {**files, f"{RUN}/failure.json": json.dumps(failure).encode()}
    interrupted = json.loads((run / "run.json").read_text()) | {"status": "interrupted"}
    again = (*DRY_RUN, *JOB[:4], "--output_dir", RUN)
    return Format(
        name="run folder",
        seeds=[finished, {**finished, f"{RUN}/run.json": json.dumps(interrupted).encode()}],
        mutated=["run/run.json", "attestation.json", "rank*.jsonl", "failure.json", "rank*.heartbeat"],
        commands=[
            call(read_run),
            call(read_pulses),
            command(*again, "--overwrite_output_dir", "true"),
            command(*again, "--max_steps", "8", "--resume_from_checkpoint", "latest"),
        ],
    )


def read_run() -> None:
    """read_run_record on the run folder run"""
    trial = Trial(row=RowKey(preset="ddp", world_size=2), repeat=0)
    read_run_record(trial, RunFolder(Path(RUN)), Path(), untimed_steps=2).model_dump_json()


def read_pulses() -> None:
    """read_heartbeats on run/ranks, without a signal to any process"""
    heartbeats, now = read_heartbeats(Path(RUN) / "ranks"), time.time()
    reasons = {pulse.rank: why for pulse in heartbeats if (why := unresponsive_reason(pulse, now=now))}
    suspects(heartbeats, unresponsive=reasons, stacks={})
    stalled_seconds(heartbeats, now=now)
