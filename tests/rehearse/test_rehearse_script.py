"""Somebody's script is rehearsed unchanged: as one rank of N, or traced on fake tensors without weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, ROOT, SCRIPTS, nightly_launch, read, toolkit
from model_configs import LLAMA
from trl_jobs import TRL_ROWS, trl_words

from toolkit.errors import ToolkitError
from toolkit.models.read_model import read_model
from toolkit.plan.memory import plan_memory
from toolkit.plan.methods import Method
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows
from toolkit.rehearse.rehearsal import plan_script_rehearsal

SCRIPT = SCRIPTS / "somebodys.py"
# Of its Llama: two matrices of 64 x 32 for tokens, and in each of two layers 4 of 32 x 32, 3 of 32 x 64 and two norms.
NORMS = 5 * 32
NUM_PARAMS = 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64) + NORMS


def rehearse(*words: str, script: str | Path, arguments: list[str], cwd: Path = ROOT) -> dict[str, Any]:
    """The facts that `toolkit rehearse --json` prints."""
    named = ["--script", str(script)] if str(script).endswith(".py") else ["--module", str(script)]
    ended = toolkit("rehearse", *words, *named, "--cpu", "--json", "--", *arguments, cwd=cwd)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(json.loads(ended.stdout))


# -- on real tensors


@pytest.mark.launch
def test_a_rank_of_a_script_holds_exactly_its_share_and_leaves_no_output(tmp_path: Path) -> None:
    """Under ZeRO-3 in fp32, with norms that stay gathered; the second training of the script is not reached."""
    kept = ["--output-dir", str(tmp_path / "run"), "--stop-after-steps", "2"]
    world = ["--preset", "zero3", "--num-processes", "4", "--rank", "2"]
    found = rehearse(*world, *kept, script=SCRIPT, arguments=["two", str(tmp_path / "out")])
    share = NUM_PARAMS // 4
    held = {"parameter_bytes": 4 * (share + NORMS), "gradient_bytes": 4 * share, "optimizer_bytes": 12 * share}
    assert {part: found[part] for part in held} == held
    assert (found["rank"], found["world_size"], found["num_params"], found["steps"]) == (2, 4, NUM_PARAMS, 2)
    rows = read_rows(RunFolder(tmp_path / "run").rank_rows(2))
    assert [(row.step, row.loss) for row in rows] == [(1, None), (2, None)]
    run = read(tmp_path / "run" / "run.json")
    assert (run["status"], run["rehearsal"]["script"]) == ("completed", str(SCRIPT))
    assert {each.name for each in tmp_path.iterdir()} == {"run"}
    assert not (tmp_path / "run" / "training-2").exists()


@nightly_launch
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("script", ["sft", "dpo", "grpo"])
def test_trls_scripts_are_rehearsed_as_a_rank_of_four(
    script: str, preset: str, tiny_model: Path, tmp_path: Path
) -> None:
    given = trl_arguments(script, tiny_model, tmp_path)
    found = rehearse("--preset", preset, "--num-processes", "4", script=f"trl.scripts.{script}", arguments=given)
    shards = {"ddp": 1, "zero2": 1, "zero3": 4, "fsdp2": 4}[preset]
    gathered = 5 * 64 if preset == "zero3" else 0  # norms, for good
    value_bytes = 2 if preset.startswith("zero") else 4  # DeepSpeed holds bf16 weights
    assert found["parameter_bytes"] == value_bytes * (found["num_params"] // shards + gathered)
    assert list(found["other_model_bytes"]) == (["ref_model"] if script == "dpo" else [])


@nightly_launch
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("nothing", "error: failed: no Trainer was made; nothing was observed"),
        ("untrained", "error: failed: a Trainer was made, and train() was not called; nothing was observed"),
        ("before", "LookupError: what the script could not find"),
    ],
)
def test_a_script_without_a_training_ends_with_its_own_error(mode: str, said: str, tmp_path: Path) -> None:
    words = ["--preset", "ddp", "--num-processes", "2", "--script", str(SCRIPT), "--cpu", "--", mode]
    words += [str(tmp_path / "x")]
    ended = toolkit("rehearse", *words)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ('File "' in ended.stderr) == (mode == "before")


# -- refused before torch is imported


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"script": "no-such.py"}, "script no-such.py does not exist"),
        ({"preset": "tp"}, "preset 'tp' divides the model inside our training script"),
        (
            {"preset": "zero3", "fake_tensors": True},
            "--fake-tensors does not work with preset 'zero3': DeepSpeed reads",
        ),
        ({"rank": 4}, "--rank is 4, and a world of 4 has ranks 0 to 3"),
    ],
)
def test_a_script_that_cannot_be_rehearsed_is_refused(given: dict[str, Any], message: str) -> None:
    options = {"preset": "fsdp2", "world_size": 4, "script": str(SCRIPT), "cpu": True} | given
    with pytest.raises(ToolkitError, match=message):
        plan_script_rehearsal(load_preset(options.pop("preset")), **options)


# -- on fake tensors

LONG = " ".join(str(number) for number in range(100))


def trl_arguments(script: str, model: Path, folder: Path, **columns: str) -> list[str]:
    """Two steps of rows of 100 numbers, and of 64 tokens where a script generates."""
    long = {"dpo": {"chosen": LONG}, "reward": {"chosen": LONG}, "grpo": {}}.get(script, {"completion": LONG})
    words = [*trl_words(script, model, folder, **long | columns), "--max_steps", "2"]
    return words + (["--max_completion_length", "64"] if script == "grpo" else [])


def without_weights(model: Path, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """The model's folder, with its tokenizer, its configuration or another one, and without weights."""
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    if config is not None:
        (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


TRACED = [(script, preset) for script in TRL_ROWS if script != "rloo" for preset in ("single", "ddp", "fsdp2")]


@nightly_launch
@pytest.mark.parametrize(("script", "preset"), TRACED)
def test_the_step_of_trls_trainers_is_traced_with_its_models_alone_by_part(
    script: str, preset: str, tiny_model: Path, tmp_path: Path
) -> None:
    """In the optimizer step a rank holds fp32 parameters, gradients, two states and reference models, and no more."""
    given = trl_arguments(script, without_weights(tiny_model, tmp_path), tmp_path)
    size = "1" if preset == "single" else "4"
    world = ["--preset", preset, "--num-processes", size, "--fake-tensors"]
    found = rehearse(*world, script=f"trl.scripts.{script}", arguments=given)
    params = 336_192 + (64 if script == "reward" else 0)  # its head has one row of 64, in place of the tied one
    share = params // 4 if preset == "fsdp2" else params
    if (script, preset) == ("reward", "fsdp2"):
        share += 48  # rank 0 holds the whole row of the head
    parts = {"parameter": 4 * share, "gradient": 4 * share, "optimizer": 8 * share}
    if script in ("dpo", "kto"):
        parts["other_models"] = 4 * share
        assert found["other_model_bytes"] == {"ref_model": 4 * share}
    if preset == "ddp":
        parts["buckets"] = 4 * params
    step = found["peaks"]["step"]["parts"]
    assert {part: step.get(part) for part in parts} == parts
    # What else is alive: the batch, a few scalars, and buffers of the model.
    assert found["peaks"]["step"]["total_bytes"] - sum(parts.values()) < 32_000
    assert (
        found["peaks"]["backward"]["total_bytes"] > found["peaks"]["forward"]["total_bytes"] > sum(parts.values()) / 2
    )
    lines = [what for what in found["made_up"] if not what.startswith("64 tokens for each completion")]
    assert all(f"trl/trainer/{script}_trainer.py:" in line or "trl/trainer/utils.py:" in line for line in lines), lines
    assert not (tmp_path / "out").exists()


@nightly_launch
@pytest.mark.parametrize(("preset", "size"), [("single", 1), ("fsdp2", 8)])
def test_an_8b_and_its_reference_model_are_traced_without_weights(
    preset: str, size: int, tiny_model: Path, tmp_path: Path
) -> None:
    config = read(LLAMA_8B_CONFIG) | {"architectures": ["LlamaForCausalLM"]}
    model = without_weights(tiny_model, tmp_path, config)
    given = trl_arguments("dpo", model, tmp_path)
    world = ["--preset", preset, "--num-processes", str(size), "--fake-tensors"]
    found = rehearse(*world, script="trl.scripts.dpo", arguments=given)
    assert found["num_params"] == 8_030_261_248
    assert found["parameter_bytes"] == found["other_model_bytes"]["ref_model"] == 4 * 8_030_261_248 // size
    assert found["peaks"]["step"]["total_bytes"] == pytest.approx(20 * 8_030_261_248 / size, rel=0.001)


@nightly_launch
@pytest.mark.parametrize(
    ("method", "preset", "size"), [("dpo", "single", 1), ("dpo", "fsdp2", 8), ("kto", "single", 1)]
)
def test_the_planned_peak_of_a_method_is_that_of_trls_own_step(
    method: str, preset: str, size: int, tiny_model: Path, tmp_path: Path
) -> None:
    """Qwen3-1.7B on two rows that are cut to 512 tokens, all of the completion but one word."""
    config = ROOT / "tests" / "fixtures" / "qwen3-1.7b" / "config.json"
    full = " ".join(LONG for _ in range(10))
    columns = {"completion": full} if method == "kto" else {"chosen": full, "rejected": full}
    given = trl_arguments(method, without_weights(tiny_model, tmp_path, read(config)), tmp_path, **columns)
    given += ["--max_length", "512", "--gradient_checkpointing", "false"]
    world = ["--preset", preset, "--num-processes", str(size), "--fake-tensors"]
    found = rehearse(*world, script=f"trl.scripts.{method}", arguments=given)
    job = PlannedJob(
        method=Method(method=method), per_device_train_batch_size=2, max_seq_length=512, lengths_differ=False
    )
    plan = plan_memory(read_model(str(config)), load_preset(preset), world_size=size, job=job)
    planned = max(phase.allocated_bytes for phase in plan.phases if phase.phase in {"score", *found["peaks"]})
    assert planned == pytest.approx(max(each["total_bytes"] for each in found["peaks"].values()), rel=0.05)


PLAIN_SCRIPT = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.float32)
tokens = list(range(64))
rows = [{"input_ids": tokens, "labels": tokens, "position_ids": tokens} for _ in range(32)]
args = TrainingArguments(output_dir="out", bf16=True, per_device_train_batch_size=4)
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # as our own
trainer.train()
"""


@nightly_launch
@pytest.mark.parametrize(("preset", "size"), [("single", "1"), ("ddp", "4"), ("fsdp2", "4")])
def test_a_plain_trainer_is_traced_like_our_own_script_on_the_same_job(preset: str, size: str, tmp_path: Path) -> None:
    """All but the batch, of which ours has one tensor for tokens and labels, and the scalar that the loss is divided by
    (the number of tokens)."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "plain.py").write_text(PLAIN_SCRIPT)
    world = ["--preset", preset, "--num-processes", size, "--fake-tensors"]
    found = rehearse(*world, script=tmp_path / "plain.py", arguments=[str(tmp_path)], cwd=tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--max_seq_length", "64", "--per_device_train_batch_size", "4"]
    ended = toolkit("rehearse", *world, "--json", "--", *words, "--loss", "full")
    assert ended.returncode == 0, ended.stderr[-3000:]
    own = json.loads(ended.stdout)
    for phase in ("forward", "backward", "step"):
        script, ours = (
            {part: size for part, size in facts["peaks"][phase]["parts"].items() if part not in ("batch", "load")}
            for facts in (found, own)
        )
        assert script == pytest.approx(ours, abs=8), phase
    assert found["made_up"] == {}
