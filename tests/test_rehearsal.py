"""A rehearsal of rank r of N holds what that rank holds in a real run, and is never taken for one.

The real side are the runs of `preset_runs`: two ranks, `single` one, `fsdp2_hybrid` four.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import CPU_PRESETS, ROOT, read, toolkit

from toolkit.compare.door import write_report_again
from toolkit.compare.run import Runner, Telling
from toolkit.compare.trials import plan_comparison
from toolkit.errors import ToolkitError
from toolkit.launch.rehearsable import check_rehearsal
from toolkit.launch.rehearsal_lines import part_rows
from toolkit.launch.rehearse import plan_rehearsal
from toolkit.presets import load_preset
from toolkit.runs.folder import RunFolder

PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
LARGE = 64
OF_64 = ("ddp", "zero2", "zero3_cpu_offload", "fsdp2", "fsdp2_hybrid")


# -- what is refused, without torch


@pytest.mark.parametrize(
    ("preset", "world_size", "rank", "message", "hint"),
    [
        ("zero3", 0, 0, "--world-size is 0, expected 1 or more", None),
        ("zero3", 4, 4, "--rank is 4, and a world of 4 has ranks 0 to 3", "`--rank 0`"),
        ("zero3", 4, -1, "--rank is -1, and a world of 4 has ranks 0 to 3", "`--rank 0`"),
        ("fsdp2", 1, 0, "preset 'fsdp2' needs at least 2 processes, --world-size is 1", "`--world-size 2`"),
        ("fsdp2_hybrid", 7, 0, "preset 'fsdp2_hybrid' needs a multiple of 2 processes, --world-size is 7", "size 8`"),
        ("single", 2, 0, "preset 'single' trains in one process, --world-size is 2", "`--preset ddp` for several"),
        ("zero3_nvme_offload", 4, 0, "cannot be rehearsed: its swap files belong to a real run", "`toolkit plan`"),
        ("zeropp", 8, 0, "cannot be rehearsed: zero_quantized_weights runs CUDA kernels", "`toolkit plan`"),
    ],
)
def test_a_world_that_cannot_be_rehearsed_is_refused(
    preset: str, world_size: int, rank: int, message: str, hint: str | None
) -> None:
    with pytest.raises(ToolkitError) as told:
        check_rehearsal(load_preset(preset), world_size=world_size, rank=rank)
    assert message in told.value.message
    assert told.value.hint == hint or str(hint) in str(told.value.hint)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model_name_or_path is missing"),
        (["--model_name_or_path", "{folder}"], "has no config.json"),
        (["--model_name_or_path", "{folder}/broken.json"], "is not a JSON object"),
        (["--model_name_or_path", "{folder}/nothing.json"], "neither a folder, a config.json nor a hub id"),
        (["--model_name_or_path", "{model}", "--resume_from_checkpoint", "latest"], "nothing that could go on"),
        (["--model_name_or_path", "{model}", "--ddp_comm_hook", "bf16"], "--ddp_comm_hook cannot be rehearsed"),
        (["--model_name_or_path", "{model}", "--max_stepz", "2"], "unknown argument --max_stepz"),
        (["--model_name_or_path", "{model}", "--dataset", "{folder}/none.jsonl"], "none.jsonl"),
    ],
)
def test_a_job_that_cannot_be_rehearsed_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "broken.json").write_text("[1")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    argv = [word.format(folder=tmp_path, model=model) for word in words]
    with pytest.raises(ToolkitError, match=message):
        plan_rehearsal(load_preset("ddp"), world_size=2, rank=0, training_argv=argv, cpu=True)


def test_a_configuration_file_is_enough_and_rows_are_synthetic_unless_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = ["--model_name_or_path", str(tmp_path / "config.json"), "--max_steps", "5", "--save_strategy", "steps"]
    argv = plan_rehearsal(load_preset("zero3"), world_size=64, rank=63, training_argv=words, cpu=True).training_argv
    assert argv[: len(words)] == words
    assert argv[len(words) :][:2] == ["--dataset", "synthetic"]
    assert argv.count("--max_steps") == 1
    assert argv[-8:] == [
        "--save_model",
        "false",
        "--save_strategy",
        "no",
        "--eval_strategy",
        "no",
        "--report_to",
        "none",
    ]


def test_parts_add_up() -> None:
    assert part_rows({"parameter_bytes": 1, "gradient_bytes": 2, "optimizer_bytes": 4})[-1] == ("together", 7)


def test_a_comparison_and_a_report_refuse_a_rehearsal(tmp_path: Path) -> None:
    job: dict[str, Any] = {"num_processes": [2], "training_arguments": [], "untimed_steps": 1, "reference": "ddp"}
    job |= {"cpu": True, "extra_arguments": {}}
    comparison = plan_comparison({"ddp": load_preset("ddp")}, loads={"ddp": "ddp"}, **job)
    (trial,) = comparison.trials()
    for folder in (tmp_path / "trials" / trial.id, tmp_path):
        RunFolder(folder).update_run(status="completed", rehearsal={"world_size": 8, "rank": 3})
    telling = Telling(start=print, line=print, finish=print, skip=print, probe=print)
    runner = Runner(comparison=comparison, folder=tmp_path, timeout_seconds=None, nvme={}, telling=telling)
    refused = r"is a rehearsal \(rank 3 of 8\): it has no speed and no loss"
    with pytest.raises(ToolkitError, match=refused):
        runner.run({}, retry_failed=False)
    with pytest.raises(ToolkitError, match=refused):
        write_report_again(tmp_path, price_per_gpu_hour=None)


# -- against real runs


def rehearsal(preset: str, world_size: int, rank: int, model: Path, *arguments: str) -> dict[str, Any]:
    words = {"preset": preset, "world_size": world_size, "rank": rank}
    return {"architecture": str(model), **words, "arguments": list(arguments)}


@pytest.fixture(scope="module")
def rehearsed(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path
) -> dict[tuple[str, int, int], dict[str, Any]]:
    """First and last rank of the real runs, one of 64 under a preset of each kind, and one with the real rows."""
    folder = tmp_path_factory.mktemp("rehearsals")
    config = tiny_model / "config.json"
    cases = [rehearsal(p, size, rank, config) for p, size in CPU_PRESETS.items() for rank in {0, size - 1}]
    cases += [rehearsal(p, LARGE, LARGE - 1, config) for p in OF_64]
    cases += [
        rehearsal("zero2", 3, 1, tiny_model, "--dataset", str(faq_alpaca), "--max_seq_length", "256", "--packing")
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    words = ["--cases", str(folder / "cases.json"), "--output", str(folder / "found.json")]
    command = [sys.executable, str(ROOT / "benchmarks" / "rehearsal_sizes.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {(case["preset"], case["world_size"], case["rank"]): case for case in read(folder / "found.json")["cases"]}


@pytest.mark.launch
@pytest.mark.parametrize("preset", CPU_PRESETS)
def test_a_rank_holds_to_the_byte_what_it_holds_in_a_real_run(
    preset: str, rehearsed: dict[tuple[str, int, int], dict[str, Any]], preset_runs: dict[str, Path]
) -> None:
    ranks = read(preset_runs[preset] / "attestation.json")["ranks"]
    for real in (ranks[0], ranks[-1]):
        alone = rehearsed[preset, CPU_PRESETS[preset], real["rank"]]
        assert alone["status"] == "attested"
        assert {part: alone[part] for part in PARTS} == {part: real[part] for part in PARTS}


@pytest.mark.launch
@pytest.mark.parametrize("preset", OF_64)
def test_one_of_64_ranks_is_rehearsed_in_one_process(
    preset: str, rehearsed: dict[tuple[str, int, int], dict[str, Any]]
) -> None:
    """The last rank; the tiny Llama's embedding has 49,152 x 64 elements of its 3,219,776."""
    found = rehearsed[preset, LARGE, LARGE - 1]
    assert found["status"] == "attested"
    sharded, masters = load_preset(preset).sharded_parts, 12 if preset.startswith("zero") else 8
    share = 1 / (LARGE if preset != "fsdp2_hybrid" else LARGE // 2)
    whole = {"parameter": 4 * found["num_params"], "gradient": 4 * found["num_params"]}
    for part, total in (whole | {"optimizer": masters * found["num_params"]}).items():
        held = total * share if part in sharded else total
        assert found[f"{part}_bytes"] == pytest.approx(held, rel=0.01), part


@pytest.mark.launch
def test_real_rows_and_weights_are_rehearsed_where_they_are_given(
    rehearsed: dict[tuple[str, int, int], dict[str, Any]],
) -> None:
    assert rehearsed["zero2", 3, 1]["status"] == "attested"


@pytest.mark.launch
def test_the_command_says_what_it_found_and_its_folder_says_what_it_is(tmp_path: Path, tiny_model: Path) -> None:
    words = ["--model_name_or_path", str(tiny_model), "--max_seq_length", "32", "--output_dir", str(tmp_path / "out")]
    command = ["rehearse", "--preset", "fsdp2", "--world-size", "8", "--rank", "3", "--cpu", "--json", "--", *words]
    ended = toolkit(*command)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["world_size"], found["rank"], found["parameter_bytes"]) == (8, 3, 4 * 3_219_776 // 8)
    assert found["compute_step_seconds"] is None
    run = read(tmp_path / "out" / "run.json")
    assert (run["status"], run["rehearsal"]["rank"], run["rehearsal"]["random_weights"]) == ("completed", 3, False)
    assert "measured" not in run
    page = (ROOT / "docs" / "run-folder.md").read_text()
    assert [key for key in run["rehearsal"] if f"`{key}`" not in page] == []
    rows = [json.loads(line) for line in (tmp_path / "out" / "ranks" / "rank3.jsonl").read_text().splitlines()]
    assert [(row["rehearsed"], row["loss"], row["grad_norm"]) for row in rows] == [(True, None, None)] * 3
    assert not list((tmp_path / "out").glob("*.safetensors"))
    again = toolkit(*command)
    assert (again.returncode, "already holds a finished run" in again.stderr) == (2, True)


# -- fake tensors


LLAMA = {
    **{"model_type": "llama", "vocab_size": 1009, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
# Embedding and head 1009 x 64 each; a layer has q and o 64 x 64, k and v 32 x 64, gate, up and down 128 x 64, 2 norms.
P = 2 * 1009 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64) + 64


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """16 rows of 256 tokens under FSDP2, so that logits outweigh everything else."""
    path = tmp_path_factory.mktemp("traced") / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ["--model_name_or_path", str(path), "--max_seq_length", "256", "--per_device_train_batch_size", "16"]
    ended = toolkit("rehearse", "--preset", "fsdp2", "--world-size", "4", "--fake-tensors", "--json", "--", *words)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.launch
def test_fake_tensors_hold_the_states_of_this_rank_and_no_others(traced: dict[str, Any]) -> None:
    """The first of four ranks holds 253 of 1009 rows of the embedding and the head, and a quarter of the rest."""
    held = P // 4 + 2 * (253 * 4 - 1009) * 64 // 4
    assert traced["num_params"] == P
    assert {part: traced[part] for part in PARTS} == {
        "parameter_bytes": 4 * held,
        "gradient_bytes": 4 * held,
        "optimizer_bytes": 8 * held,
    }
    step = traced["peaks"]["step"]["parts"]
    assert (step["parameter"], step["gradient"], step["optimizer"]) == (4 * held, 4 * held, 8 * held)


@pytest.mark.launch
def test_fake_tensors_count_the_logits_and_their_copies(traced: dict[str, Any]) -> None:
    """bf16 logits, their fp32 copy and its log-softmax are alive when the loss is taken; in backward one more."""
    logits = 16 * 256 * 1009
    assert traced["peaks"]["forward"]["parts"]["logits"] == (2 + 4 + 4) * logits
    assert traced["peaks"]["backward"]["parts"]["logits"] >= (4 + 4) * logits
    total = traced["peaks"]["forward"]
    assert total["total_bytes"] == sum(total["parts"].values())


@pytest.mark.parametrize(
    ("preset", "words", "message"),
    [
        ("zero3", [], "--fake-tensors does not work with preset 'zero3': DeepSpeed looks into"),
        ("fsdp2_cpu_offload", [], "--fake-tensors does not work with preset 'fsdp2_cpu_offload': what is offloaded"),
        ("fsdp2", ["--dataset", "rows.jsonl"], "--dataset is not traced"),
        ("ddp", ["--packing"], "--packing is not traced"),
    ],
)
def test_what_fake_tensors_cannot_trace_is_refused(tmp_path: Path, preset: str, words: list[str], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    argv = ["--model_name_or_path", str(tmp_path), *(str(tmp_path / w) if w.endswith(".jsonl") else w for w in words)]
    with pytest.raises(ToolkitError, match=message):
        plan_rehearsal(load_preset(preset), world_size=4, rank=0, training_argv=argv, cpu=True, fake_tensors=True)


# -- beside a plan


@pytest.mark.launch
def test_a_plan_is_verified_part_by_part_and_says_what_it_cannot_verify(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    presets = ["--preset", "zero2", "--preset", "zero3_nvme_offload"]
    words = [str(tmp_path), *presets, "--world-size", "8", "--gpu", "h100", "--max-seq-length", "32"]
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
def test_a_gpu_tells_the_peak_of_each_phase_and_the_seconds_of_a_step(tmp_path: Path, preset: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["--model_name_or_path", str(tmp_path / "config.json"), "--max_seq_length", "256"]
    ended = toolkit("rehearse", "--preset", preset, "--world-size", "8", "--no-cpu", "--json", "--", *words)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    states = sum(found[part] for part in PARTS)
    assert set(found["phase_peaks"]) == {"load", "forward", "backward", "step"}
    assert all(p["peak_reserved_bytes"] >= p["peak_allocated_bytes"] > 0 for p in found["phase_peaks"].values())
    assert found["peak_allocated_bytes"] == max(p["peak_allocated_bytes"] for p in found["phase_peaks"].values())
    assert found["peak_allocated_bytes"] > states
    assert found["compute_step_seconds"] > 0
