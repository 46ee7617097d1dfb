"""A rehearsal of rank r of N holds what that rank holds in a real run, and is never mistaken for one."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from command_line import check_answer
from comparison_records import comparison, comparison_runner
from launching import CPU_PRESETS, ROOT, SCRIPTS, cpu_environment, read, run_warm, toolkit
from model_configs import LLAMA

from toolkit.compare.runner import write_report_again
from toolkit.errors import ToolkitError
from toolkit.presets import load_preset
from toolkit.record.folder import RunFolder
from toolkit.rehearse.rehearsal import check_rehearsal, plan_rehearsal

PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
# One preset per engine; the others are rehearsed in `make test-nightly`.
ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
REAL = [(preset, size, rank) for preset, size in CPU_PRESETS.items() for rank in sorted({0, size - 1})]
# Elements of the tiny Llama, and those of its parameters, gradients and optimizer states that rank 63 of 64 holds.
TINY_LLAMA = 336_192
OF_64 = {
    "ddp": (TINY_LLAMA, TINY_LLAMA, TINY_LLAMA),
    "zero2": (TINY_LLAMA, 5_254, 5_254),
    "zero3_cpu_offload": (5_253 + 320, 5_253, 5_253),  # the norms' 320 elements stay gathered
    # Of each layer 1 row of q, o and down and 2 of gate and up, but none of the 32 rows of k and v.
    "fsdp2": (5_125, 5_125, 5_125),
    "fsdp2_hybrid": (10_506, 10_506, 10_506),
}
Key = tuple[str, int, int]
"""Preset, world size, rank."""

# A vocabulary that splits evenly. A layer has 36,864 elements in matrices (q and o 64 x 64, k and v 32 x 64, gate, up
# and down 128 x 64), embedding and head have 65,536 each, and the five norms 64 each.
SPLIT_LLAMA = LLAMA | {"vocab_size": 1024}
MATRICES, NORMS, EMBEDDING = 2 * 36_864 + 2 * 65_536, 5 * 64, 65_536
# Attention has 12,288 elements per layer; its norms, those of queries and keys, and the router 672, the experts 49,152.
SPLIT_MOE = SPLIT_LLAMA | {
    **{"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32},
}
EXPERTS, ATTENTION_AND_EMBEDDINGS, REPLICATED = 2 * 49_152, 2 * 12_288 + 2 * 65_536, 2 * 672 + 64
# Its training arguments, and the elements of its parameters.
SPLIT = {
    ("tp", 2, 1): (["--tp", "2"], MATRICES // 2 + NORMS),
    ("fsdp2_tp", 4, 3): (["--tp", "2"], MATRICES // 4 + NORMS // 2),
    ("hsdp_tp", 8, 5): (["--tp", "2"], MATRICES // 4 + NORMS // 2),
    ("cp", 4, 3): (["--cp", "2"], (MATRICES + NORMS) // 4),
    ("ulysses", 4, 1): (["--sp", "2"], (MATRICES + NORMS) // 4 + NORMS),  # DeepSpeed gathers small weights for good
    # Of each layer 1 row of q, 2 rows of o, gate, up and down, 2 elements of a norm; ranks 0 to 31 have k and v alone.
    ("fsdp2_tp", 64, 37): (["--tp", "2"], 2 * (64 + 64 + 3 * 128 + 4) + 2 + 2 * 16 * 64),
    ("ep", 4, 2): (["--ep", "2"], (EXPERTS + ATTENTION_AND_EMBEDDINGS + REPLICATED) // 4),
    ("ep_tp", 4, 3): (
        ["--tp", "2", "--ep", "2", "--packing", "true"],
        (EXPERTS + ATTENTION_AND_EMBEDDINGS) // 4 + REPLICATED // 2,
    ),
}


DAILY = {*((name, 2, 1) for name in ENGINES), ("fsdp2_hybrid", 64, 63), ("fsdp2_tp", 64, 37), ("ep_tp", 4, 3)}


def keys(found: Iterable[Key]) -> list[Any]:
    return [key if key in DAILY else pytest.param(key, marks=pytest.mark.nightly) for key in found]


# -- refused before torch is imported


@pytest.mark.parametrize(
    ("preset", "world_size", "rank", "message"),
    [
        ("zero3", 4, 4, "--rank is 4, and a world of 4 has ranks 0 to 3"),
        ("fsdp2_hybrid", 7, 0, "preset 'fsdp2_hybrid' needs a multiple of 2 processes"),
        ("zero2", 100_000_000, 0, "--num-processes is 100000000, expected 131,072 or less"),
        ("zero3_nvme_offload", 4, 0, "cannot be rehearsed: its swap files belong to a real run"),
        ("zeropp", 8, 0, "cannot be rehearsed: zero_quantized_weights runs CUDA kernels"),
    ],
)
def test_a_world_that_cannot_be_rehearsed_is_refused(preset: str, world_size: int, rank: int, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_rehearsal(load_preset(preset), world_size=world_size, rank=rank)


REHEARSED = [("--dataset none.jsonl", "no such data file: none.jsonl")]
REHEARSED += [("--model_name_or_path broken.json", "is not a JSON object")]
REHEARSED += [("--resume_from_checkpoint latest", "trains nothing to resume")]
REHEARSED += [("--ddp_comm_hook bf16", "--ddp_comm_hook cannot be rehearsed")]
REHEARSED += [("--lora_r 4 --load_in_4bit", "there are none here to quantize")]
TRACED = [("zero3", "", "--fake-tensors does not work with preset 'zero3': DeepSpeed reads the values")]
TRACED += [("fsdp2_cpu_offload", "", "--fake-tensors does not work with preset 'fsdp2_cpu_offload': offloaded and")]
TRACED += [("fsdp2_tp", "--tp 2", "preset 'fsdp2_tp': fake tensors were never run where layers or sequences are")]
TRACED += [("fsdp2", "--dataset broken.json", "--dataset is not traced")]
TRACED += [("ddp", "--packing", "--packing is not traced")]


@pytest.mark.parametrize(
    ("fake_tensors", "preset", "words", "message"),
    [*((False, "ddp", *case) for case in REHEARSED), *((True, *case) for case in TRACED)],
)
def test_a_job_that_cannot_be_rehearsed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_tensors: bool, preset: str, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("[1")
    Path("config.json").write_text(json.dumps(LLAMA))
    argv, how = ["--model_name_or_path", ".", *words.split()], {"cpu": True, "fake_tensors": fake_tensors}
    with pytest.raises(ToolkitError, match=message):
        plan_rehearsal(load_preset(preset), world_size=4, rank=0, training_argv=argv, **how)
    with pytest.raises(ToolkitError, match="--model_name_or_path is missing"):
        plan_rehearsal(load_preset("ddp"), world_size=4, rank=0, training_argv=[], **how)


def test_a_configuration_file_suffices_and_rows_are_synthetic_unless_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = ["--model_name_or_path", str(tmp_path / "config.json"), "--max_steps", "5", "--save_strategy", "steps"]
    argv = plan_rehearsal(load_preset("zero3"), world_size=64, rank=63, training_argv=words, cpu=True).training_argv
    assert argv[: len(words)] == words
    assert argv[len(words) :][:2] == ["--dataset", "synthetic"]
    assert argv.count("--max_steps") == 1
    forced = "--save_model false --save_strategy no --eval_strategy no --report_to none"
    assert argv[-8:] == forced.split()


def test_a_comparison_and_a_report_refuse_a_rehearsal(tmp_path: Path) -> None:
    spec = comparison("ddp", repeats=1)
    (trial,) = spec.trials()
    for folder in (tmp_path / "trials" / trial.id, tmp_path):
        RunFolder(folder).update_run(status="completed", rehearsal={"world_size": 8, "rank": 3})
    runner = comparison_runner(spec, tmp_path)
    refused = r"is a rehearsal \(rank 3 of 8\): it has no speed and no loss"
    with pytest.raises(ToolkitError, match=refused):
        runner.run()
    with pytest.raises(ToolkitError, match=refused):
        write_report_again(tmp_path, price_per_gpu_hour=None)


# -- compared with real runs


@pytest.fixture(scope="module")
def rehearsed(request: pytest.FixtureRequest, tmp_path_factory: Any, tiny_model: Path) -> dict[Key, dict[str, Any]]:
    """What the chosen tests read, each rehearsed in a process forked from one that has imported everything."""
    folder, cases = tmp_path_factory.mktemp("rehearsals"), []
    for name, fields in {"llama": SPLIT_LLAMA, "moe": SPLIT_MOE}.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    readers = [item for item in request.session.items if "rehearsed" in getattr(item, "fixturenames", ())]
    for key in {item.callspec.params["key"]: None for item in readers if not item.get_closest_marker("skip")}:
        words, _ = SPLIT.get(key, ([], 0))
        split = folder / ("moe.json" if key[0].startswith("ep") else "llama.json")
        model = split if words else tiny_model / "config.json"
        named = dict(zip(("preset", "world_size", "rank"), key, strict=True))
        cases.append({"architecture": str(model), **named, "arguments": words})
    (folder / "cases.json").write_text(json.dumps(cases))
    paths = [str(folder / name) for name in ("cases.json", "found.json")]
    command = [sys.executable, str(SCRIPTS / "rehearse_cases.py"), *paths]
    ended = run_warm(command, cpu_environment())
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {(case["preset"], case["world_size"], case["rank"]): case for case in read(folder / "found.json")}


@pytest.mark.launch
@pytest.mark.parametrize("key", keys(REAL), ids=str)
def test_a_rehearsed_rank_holds_exactly_the_bytes_of_a_real_run(
    key: Key, rehearsed: dict[Key, dict[str, Any]], preset_runs: dict[str, Path]
) -> None:
    real = next(rank for rank in read(preset_runs[key[0]] / "attestation.json")["ranks"] if rank["rank"] == key[2])
    assert rehearsed[key]["status"] == "attested"
    assert {part: rehearsed[key][part] for part in PARTS} == {part: real[part] for part in PARTS}


@pytest.mark.launch
@pytest.mark.parametrize("key", keys((preset, 64, 63) for preset in OF_64), ids=str)
def test_one_of_64_ranks_is_rehearsed_in_one_process(key: Key, rehearsed: dict[Key, dict[str, Any]]) -> None:
    """In fp32: 4 bytes of each parameter and gradient, and AdamW's 8; under DeepSpeed 4 more of a master weight."""
    found, held = rehearsed[key], OF_64[key[0]]
    assert (found["status"], found["num_params"]) == ("attested", TINY_LLAMA)
    state_bytes = 12 if key[0].startswith("zero") else 8
    expected = [size * elements for size, elements in zip((4, 4, state_bytes), held, strict=True)]
    assert [found[part] for part in PARTS] == expected


@pytest.mark.launch
@pytest.mark.parametrize("key", keys(SPLIT), ids=str)
def test_one_rank_of_a_split_model_is_rehearsed_in_one_process(key: Key, rehearsed: dict[Key, dict[str, Any]]) -> None:
    """In fp32: 4 bytes of each parameter and gradient, 8 of AdamW's states; under ZeRO-3 4 more of a master weight."""
    found, (_, elements) = rehearsed[key], SPLIT[key]
    assert found["status"] == "attested", found
    gradient, states = elements, 8 * elements
    if key[0] == "tp":  # without FSDP2 the gradient of the embedding is whole on every rank
        gradient += EMBEDDING // 2
    if key[0] == "ulysses":
        gradient, states = elements - NORMS, 12 * (elements - NORMS)
    held = {"parameter_bytes": 4 * elements, "gradient_bytes": 4 * gradient, "optimizer_bytes": states}
    assert {part: found[part] for part in PARTS} == held


@pytest.mark.launch
def test_the_command_rehearses_real_rows_and_weights_and_marks_its_folder_as_a_rehearsal(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "256"]
    # Determinism fills uninitialised memory with NaN: whatever is computed with gathered weights is NaN too.
    words += ["--packing", "--full_determinism", "true", "--output_dir", str(tmp_path / "out")]
    command = ["rehearse", "--preset", "fsdp2", "--num-processes", "8", "--rank", "3", "--cpu", "--json", "--", *words]
    ended = toolkit(*command)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    check_answer("rehearse", found)
    assert (found["world_size"], found["rank"], found["gradient_bytes"]) == (8, 3, 4 * TINY_LLAMA // 8)
    assert found["compute_step_seconds"] is None
    assert found["not_measured"][-1].startswith("whether the rows of a pack are isolated")
    run = read(tmp_path / "out" / "run.json")
    assert (run["status"], run["rehearsal"]["rank"], run["rehearsal"]["random_weights"]) == ("completed", 3, False)
    assert "measured" not in run
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text()
    assert [key for key in run["rehearsal"] if f"`{key}`" not in page] == []
    rows = [json.loads(line) for line in (tmp_path / "out" / "ranks" / "rank3.jsonl").read_text().splitlines()]
    assert [(row["rehearsed"], row["loss"], row["grad_norm"]) for row in rows] == [(True, None, None)] * 3
    assert not list((tmp_path / "out").glob("*.safetensors"))
    again = toolkit(*command)
    assert (again.returncode, "already holds a finished run" in again.stderr) == (2, True)


# -- verification of a plan


@pytest.mark.launch
def test_a_plan_is_verified_part_by_part_and_names_what_it_cannot_verify(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    presets = ["--preset", "zero2", "--preset", "zero3_nvme_offload"]
    words = [str(tmp_path), *presets, "--num-processes", "8", "--gpu", "h100", "--max-seq-length", "32"]
    ended = toolkit("plan", *words, "--verify", "--cpu", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    zero2, nvme = found["verified"]
    assert (zero2["preset"], zero2["world_size"], zero2["rehearsed_on"]) == ("zero2", 8, "cpu")
    assert [part["part"] for part in zero2["parts"]] == ["parameter", "gradient", "optimizer"]
    assert all(part["planned_bytes"] == part["rehearsed_bytes"] > 0 for part in zero2["parts"])
    assert nvme["parts"] == []
    assert nvme["why_not"].endswith("its swap files belong to a real run on a real disk")


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.launch
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_gpu_measures_the_peak_of_each_phase_and_the_seconds_of_a_step(tmp_path: Path, preset: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["--model_name_or_path", str(tmp_path / "config.json"), "--max_seq_length", "256"]
    ended = toolkit("rehearse", "--preset", preset, "--num-processes", "8", "--no-cpu", "--json", "--", *words)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(found["phase_peaks"]) == {"load", "forward", "backward", "step"}
    assert all(p["peak_reserved_bytes"] >= p["peak_allocated_bytes"] > 0 for p in found["phase_peaks"].values())
    assert found["peak_allocated_bytes"] == max(p["peak_allocated_bytes"] for p in found["phase_peaks"].values())
    assert found["peak_allocated_bytes"] > sum(found[part] for part in PARTS)
    assert found["compute_step_seconds"] > 0
