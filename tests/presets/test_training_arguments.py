"""`Preset.training_arguments` puts the same strategy in effect in a user's script as accelerate's launcher does."""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launching import CPU_PRESETS, cpu_environment, nightly, nightly_launch, read, run_warm, succeeded, torchrun

from toolkit.errors import ToolkitError
from toolkit.job.argument_values import LOSS_CHUNK_TOKENS
from toolkit.presets import Preset, load_preset, training_arguments


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Path]:
    """A plain Trainer script with a preset under torchrun, no accelerate launcher and no YAML; its folder."""
    folder = tmp_path_factory.mktemp("own")

    @functools.cache
    def run(script: str, preset: str, ranks: int, *degrees: str) -> Path:
        succeeded(torchrun(script, preset, str(tiny_model), str(folder / preset), *degrees, num_processes=ranks))
        return folder / preset

    return run


# Each engine, its offload, and a mesh; the others differ from these in values that a file alone holds.
@pytest.mark.launch
@pytest.mark.parametrize("preset", nightly("ddp", "fsdp2_hybrid", "zero3_cpu_offload", "fsdp2_cpu_offload"))
def test_the_verified_facts_equal_those_of_a_run_under_accelerates_launcher(
    preset: str, trained: Callable[..., Path], preset_runs: dict[str, Path]
) -> None:
    folders = trained("own_trainer.py", preset, CPU_PRESETS[preset]), preset_runs[preset]
    own, launched = (read(folder / "attestation.json") for folder in folders)
    assert own["verdict"] == launched["verdict"] == "attested"
    assert len(own["ranks"]) == CPU_PRESETS[preset]
    facts = {"engine", "sharding", "world_size", "parameter_bytes", "gradient_bytes", "optimizer_bytes"}
    facts |= {"compute_dtype", "master_dtype", "optimizer_dtype", "reduce_dtype", "initial_weights_sha256"}
    assert facts <= set(own["ranks"][0])
    for rank in launched["ranks"]:  # what only our training script has, and reads
        assert (rank.pop("loss"), rank.pop("loss_chunk_tokens")) == ("chunked", LOSS_CHUNK_TOKENS)
        assert rank.pop("ddp_comm_hook") is rank.pop("packing") is None
        assert rank.pop("activation_checkpointing_selective") is False
    for rank in (*own["ranks"], *launched["ranks"]):  # other rows, another loss and rate
        for name in ("batch_size", "first_rows_sha256", "kernels", "learning_rates", "loss_path"):
            rank.pop(name)
        rank["whole_bytes"].pop("gradient")  # under ZeRO nobody knows what a script of somebody's leaves without one
    assert own["ranks"] == launched["ranks"]


# The same rows with each kind of dimension; tensor parallelism beside data parallelism. Layers that are split are
# trained every day by the script of tests/test_examples.py.
SPLIT = {"fsdp2_tp": (4, "tp=2"), "cp": (2, "cp=2"), "ulysses": (2, "sp=2")}


@nightly_launch
@pytest.mark.parametrize("preset", ["cp", "fsdp2_tp", "ulysses"])
def test_a_script_with_a_degree_of_parallelism_trains_as_one_process_does(
    preset: str, trained: Callable[..., Path]
) -> None:
    ours = read(trained("split_trainer.py", preset, *SPLIT[preset]) / "log.json")
    alone = read(trained("split_trainer.py", "single", 1) / "log.json")
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in alone], rel=1e-6)
    # torch's CPU kernel of a norm is off by 1e-4 on the embedding's 49,152 rows
    assert [step["grad_norm"] for step in ours] == pytest.approx([step["grad_norm"] for step in alone], rel=1e-3)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*training_arguments.ENGINE_VARIABLES, "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(training_arguments, "_presets_in_effect", {})
    if (state := sys.modules.get("accelerate.state")) is not None:  # an earlier test may have made an Accelerator
        monkeypatch.setattr(state.AcceleratorState, "_shared_state", {})
        monkeypatch.setattr(state.PartialState, "_shared_state", {})


def started_in(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def refusal(name: str, **given: Any) -> ToolkitError:
    with pytest.raises(ToolkitError) as caught:
        load_preset(name).training_arguments(output_dir="unused", **given)
    return caught.value


def test_what_the_preset_decides_and_a_script_without_a_launcher_are_refused() -> None:
    for name in training_arguments.STRATEGY_ARGUMENTS:
        refused = refusal("zero3", **{name: {"stage": 2}}).message
        assert refused.startswith(f"{name} is set by the preset: 'zero3'")
    error = refusal("fsdp2")
    assert error.message == "preset 'fsdp2' needs a launcher: no LOCAL_RANK is in the environment"
    assert error.hint == "`torchrun --nproc_per_node 2 script.py`, or `accelerate launch`"


def test_a_changed_copy_of_the_arguments_leaves_the_preset_as_its_file_is() -> None:
    preset = load_preset("zero3")
    training_arguments.trainer_arguments(preset, precision="bf16")["deepspeed"]["zero_optimization"]["stage"] = 1
    assert (
        training_arguments.trainer_arguments(preset, precision="bf16")["deepspeed"]["zero_optimization"]["stage"] == 3
    )


@pytest.mark.parametrize(
    ("name", "ranks", "given", "message", "hint"),
    [
        ("fsdp2", 1, {}, "preset 'fsdp2' needs at least 2 processes, this script was started in 1",
         "`torchrun --nproc_per_node 2 script.py`"),
        ("zeropp", 8, {"use_cpu": True}, "preset 'zeropp' does not run on a CPU: zero_quantized", "`--preset zero3`"),
        ("zero2_cpu_offload", 2, {"optim": "adamw_bnb_8bit"},
         "--optim adamw_bnb_8bit does not work under preset 'zero2_cpu_offload'", "`--optim adamw_torch`, or"),
        ("tp", 2, {}, "preset 'tp' needs tp: the number of GPUs for tensor parallelism", "add `tp=2`"),
        ("ep_tp", 4, {"tp": 2, "ep": 3}, "ep=3 is no multiple of tp=2", "`ep=2`"),
        ("tp", 2, {"tp": 2},
         "preset 'tp' shards the model while it is loaded, and the Trainer cannot resume such a model: it saves no",
         '`save_strategy="no"`, or `save_only_model=True`; runs of `toolkit train` resume'),
    ],
)  # fmt: skip
def test_what_would_not_train_is_refused(
    name: str, ranks: int, given: dict[str, Any], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_in(monkeypatch, ranks)
    refused = refusal(name, **given)
    assert refused.message.startswith(message)
    assert str(refused.hint).startswith(hint)


def put_in_effect(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, **degrees: int) -> Preset:
    preset = load_preset(name)
    layouts = {preset.accelerate_config_path: preset.layout(ranks, degrees)}
    monkeypatch.setattr(training_arguments, "_presets_in_effect", layouts)
    return preset


def test_arguments_of_from_pretrained_are_those_of_the_ranks_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolkitError, match="'fsdp2_tp' is not in effect yet in this process") as caught:
        load_preset("fsdp2_tp").from_pretrained_arguments(tp=2)
    assert caught.value.hint == '`load_preset("fsdp2_tp").training_arguments(...)` comes first'
    preset = put_in_effect(monkeypatch, "fsdp2_tp", 8, tp=2)
    with pytest.raises(ToolkitError, match="tp is 4 here and 2 in `training_arguments`"):
        preset.from_pretrained_arguments(tp=4)
    for precision, half in (("bf16", True), ("no", False)):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        config = preset.from_pretrained_arguments(tp=2)["distributed_config"]
        assert (config.tp_size, config.fsdp_size, config.fsdp_mixed_precision) == (2, 4, half)
    assert put_in_effect(monkeypatch, "zero3", 2).from_pretrained_arguments() == {}
    assert put_in_effect(monkeypatch, "cp", 2, cp=2).from_pretrained_arguments(cp=2) == {}


def test_only_the_engine_that_shards_the_model_is_configured() -> None:
    at_load = training_arguments.trainer_arguments(load_preset("fsdp2_tp"), precision="bf16")
    assert (at_load["bf16"], "fsdp" in at_load, "accelerator_config" in at_load) == (True, False, True)
    variables = training_arguments.strategy_variables(load_preset("fsdp2_tp"), precision="bf16")
    assert variables == {"ACCELERATE_MIXED_PRECISION": "bf16"}


def test_a_launcher_with_an_engine_of_its_own_and_a_second_preset_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started_in(monkeypatch, 2)
    for name in training_arguments.ENGINE_VARIABLES:
        with monkeypatch.context() as changed:
            changed.setenv(name, "true")
            assert refusal("zero2").message.startswith(f"{name} is set: this script was started by `accelerate launch`")
    monkeypatch.setattr(training_arguments, "_presets_in_effect", [load_preset("zero2").accelerate_config_path])
    assert refusal("zero3").message == "preset 'zero2' is in effect in this process, so 'zero3' cannot be"


def run_program(program: str, folder: Path, *words: str) -> CompletedProcess[str]:
    """Run a few lines in a process of their own: what they leave behind would be in effect for every later test."""
    (folder / "program.py").write_text(program)
    return run_warm([sys.executable, str(folder / "program.py"), *words], cpu_environment())


GROUP = "import torch.distributed as dist; dist.init_process_group('gloo', init_method='file://' + sys.argv[1]"
GROUP += ", rank=0, world_size=1)"
ACCELERATOR = "import os, accelerate; os.environ.pop('LOCAL_RANK'); accelerate.Accelerator(cpu=True)"
MODEL = "import transformers as t; model = t.LlamaForCausalLM(t.LlamaConfig(vocab_size=8, hidden_size=8,\
 intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("before", "preset", "why"),
    [
        (MODEL, "zero3", "a complete model is loaded already in every process; 'zero3' shards it while it is loaded"),
        pytest.param(GROUP, "zero3", "a process group exists already", marks=pytest.mark.nightly),
        pytest.param(ACCELERATOR, "ddp", "an Accelerator exists already", marks=pytest.mark.nightly),
        pytest.param(MODEL, "ddp", None, marks=pytest.mark.nightly),
        pytest.param(f"{MODEL}; del model", "zero3", None, marks=pytest.mark.nightly),
    ],
)
def test_what_was_made_before_the_preset_is_refused_where_it_matters(
    before: str, preset: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_in(monkeypatch, 1)
    monkeypatch.setenv("RANK", "0")
    program = f"import sys\n{before}\nfrom toolkit.presets import Preset, load_preset, training_arguments\n"
    program += f"training_arguments._refuse_late_call(load_preset({preset!r}))"
    ended = run_program(program, tmp_path, str(tmp_path / "rendezvous"))
    assert ended.returncode == (0 if why is None else 1), ended.stderr
    assert why is None or f"ToolkitError: {why}" in ended.stderr


@pytest.mark.launch
def test_a_cpu_computes_in_fp32_by_default(tmp_path: Path) -> None:
    program = "from toolkit import load_preset\nfor given in ({}, {'bf16': True}):\n"
    program += "    args = load_preset('single').training_arguments(output_dir='out', report_to='none', **given)\n"
    program += "    print('READ', args.bf16, args.mixed_precision, args.use_cpu, args.n_gpu)"
    ended = succeeded(run_program(program, tmp_path))
    assert re.findall("READ (.*)", ended.stdout) == ["False no True 0", "True bf16 True 0"]
