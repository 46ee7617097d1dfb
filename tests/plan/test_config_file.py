"""`toolkit plan --config FILE`: the job of a file of another tool or of ours, and flags that win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG

from toolkit.errors import ToolkitError
from toolkit.plan.config_file import configured_plan
from toolkit.plan.options import PlanOptions

AXOLOTL = """base_model: MODEL
datasets: [{path: rows.jsonl, type: chat_template}]
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
adapter: lora
lora_r: 8
gradient_checkpointing: true
deepspeed: {zero_optimization: {stage: 3}}
"""
LLAMA_FACTORY = """model_name_or_path: MODEL
stage: sft
finetuning_type: lora
lora_rank: 8
template: qwen3
dataset: identity
cutoff_len: 512
per_device_train_batch_size: 2
enable_liger_kernel: true
"""
TRL = """accelerate launch --config_file zero2.yaml --num_processes 4 sft.py --model_name_or_path MODEL
 --dataset_name trl-lib/Capybara --max_length 512 --per_device_train_batch_size 2"""
OURS = "model_name_or_path: MODEL\nmax_seq_length: 512\nper_device_train_batch_size: 2\nlora_r: 8\n"


def planned(folder: Path, name: str, text: str, *given: str, **options: object) -> PlanOptions:
    file = folder / name
    file.write_text(text.replace("\n --", " --"))
    found = configured_plan(file, None, PlanOptions(**options), given=given)  # type: ignore[arg-type]
    assert found.model == "MODEL"
    return found.options


@pytest.mark.parametrize(
    ("name", "text", "preset", "lora_r", "checkpointing", "loss"),
    [
        ("axolotl.yaml", AXOLOTL, ("zero3",), 8, True, "full"),
        ("factory.yaml", LLAMA_FACTORY, ("ddp",), 8, True, "fused"),
        ("trl.sh", TRL, ("zero2",), None, True, "chunked"),
        ("ours.yaml", OURS, (), 8, False, "chunked"),
    ],
)
def test_model_method_batch_lengths_strategy_and_loss_come_from_the_file(
    name: str, text: str, preset: tuple[str, ...], lora_r: int | None, checkpointing: bool, loss: str, tmp_path: Path
) -> None:
    options = planned(tmp_path, name, text)
    assert (options.max_seq_length, options.per_device_train_batch_size) == (512, 2)
    assert (options.preset, options.lora_r, options.activation_checkpointing) == (preset, lora_r, checkpointing)
    assert options.loss == loss  # axolotl and LLaMA-Factory compute all logits at once unless Liger does not
    assert options.gradient_as_bucket_view is (None if name == "ours.yaml" else False)


def test_the_number_of_processes_and_the_epochs_come_from_the_file(tmp_path: Path) -> None:
    assert planned(tmp_path, "trl.sh", TRL).num_processes == (4,)
    assert planned(tmp_path, "axolotl.yaml", AXOLOTL).num_train_epochs == 2


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("trl dpo --use_peft --beta 0.2", {"method": "dpo", "beta": 0.2, "lora_r": 16, "vllm": None}),
        ("trl kto --precompute_ref_log_probs", {"method": "kto", "precompute_ref_log_probs": True, "lora_r": None}),
        (
            "accelerate launch --num_processes 2 trl/scripts/grpo.py --num_generations 4 --use_vllm"
            " --vllm_gpu_memory_utilization 0.5",
            {"method": "grpo", "num_generations": 4, "vllm": "colocate", "vllm_gpu_memory_utilization": 0.5},
        ),
    ],
)
def test_a_trl_command_has_its_method_and_what_decides_its_memory(
    command: str, expected: dict[str, object], tmp_path: Path
) -> None:
    options = planned(tmp_path, "trl.sh", f"{command} --model_name_or_path MODEL --per_device_train_batch_size 2")
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.per_device_train_batch_size == 2


def test_a_trl_yaml_is_of_the_method_that_the_command_line_names(tmp_path: Path) -> None:
    text = "model_name_or_path: MODEL\ndataset_name: trl-lib/ultrafeedback_binarized\nbeta: 0.0\n"
    options = planned(tmp_path, "rloo.yaml", text, "method", method="rloo")
    assert (options.method, options.beta) == ("rloo", 0.0)


def test_a_number_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="beta is 'much', expected a number"):
        planned(tmp_path, "trl.sh", "trl dpo --model_name_or_path MODEL --beta much")


def test_flags_of_the_command_line_win(tmp_path: Path) -> None:
    options = planned(tmp_path, "trl.sh", TRL, "max_seq_length", "preset", max_seq_length=64, preset=("fsdp2",))
    assert (options.max_seq_length, options.preset, options.num_processes) == (64, ("fsdp2",), (4,))


def test_a_file_is_planned_like_the_same_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ours.yaml").write_text(OURS.replace("MODEL", str(LLAMA_8B_CONFIG)))
    where = ["--gpu", "h100", "--num-processes", "8", "--preset", "zero3", "--max-seq-length", "1024"]
    flags = ["--per-device-train-batch-size", "2", "--lora-r", "8", "--num-train-epochs", "3"]
    code, out, err = run_command(["plan", "--config", str(tmp_path / "ours.yaml"), *where, "--json"], capsys)
    assert (code, err) == (0, f"{tmp_path / 'ours.yaml'}: our training arguments\n")
    assert json.loads(out) == json_of(["plan", str(LLAMA_8B_CONFIG), *where, *flags], capsys)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ours.yaml", "max_seq_length: 512\n", "names no model"),
        ("rl.yaml", AXOLOTL + "rl: ebft\n", "trains with 'ebft', which is not planned"),
        ("preset.yaml", "distributed_type: FSDP\n", "is not recognised"),
        ("ours.yaml", OURS + "max_seq_lenght: 5\n", "max_seq_lenght"),
    ],
)
def test_a_file_without_a_model_or_of_something_else_is_refused(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError, match=message):
        planned(tmp_path, name, text)
