"""The field of `toolkit tune`: which settings are tried, which are not, and why."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

from toolkit.compare.specification import make_specification
from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.tune import field as field_module
from toolkit.tune.commands import compare_options
from toolkit.tune.field import YOURS, Field, make_field
from toolkit.tune.options import TuneOptions

LLAMA_8B = str(ROOT / "tests" / "fixtures" / "llama-8b")
SMALL = str(ROOT / "tests" / "fixtures" / "qwen3-0.6b")


def options(*words: str, model: str = SMALL, **given: Any) -> TuneOptions:
    job = ("--model_name_or_path", model, "--dataset", "rows.jsonl", "--max_seq_length", "64", *words)
    return TuneOptions(
        **{"output_dir": Path("out"), "num_processes": 2, "cpu": True, "training_arguments": job} | given
    )


def on_h100s(*words: str, processes: int = 8, **given: Any) -> TuneOptions:
    lengths = ("--max_seq_length", "4096", "--per_device_train_batch_size", "1")
    more = {"num_processes": processes, "cpu": None, "gpu": "h100", "dry_run": True, "model": LLAMA_8B}
    return options(*lengths, *words, **more | given)


def names(field: Field) -> list[str]:
    return [setting.name for setting in field.settings]


def kinds(field: Field) -> Counter[str]:
    return Counter(each.kind for each in field.not_tried)


BATCH_4 = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")


def test_the_users_own_setting_comes_first_then_those_with_the_fewest_changes() -> None:
    field = make_field(options(*BATCH_4, preset=("ddp", "zero2"), keep=("compile", "loss", "attention")), "ddp")
    assert names(field)[:8] == [
        YOURS,
        *("ddp_b1x8", "ddp_b2x4", "ddp_b8x1", "ddp_b4x2_checkpointing", "ddp_b4x2_checkpointing_selective"),
        *("zero2_b4x2", "ddp_b1x8_checkpointing"),
    ]
    assert len(field.settings) == 12
    assert kinds(field) == {"invalid": 1, "not among the first": 12}  # 2 presets x 4 batches x 3, without 12


def test_every_setting_keeps_the_sequences_of_a_step_and_everything_but_its_parts() -> None:
    chosen = options(*BATCH_4, "--learning_rate", "3e-4", max_settings=100)
    field = make_field(chosen, "ddp")
    own = Job.from_argv(chosen.training_arguments)
    free = {"per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "loss"}
    free |= {"activation_checkpointing_offload", "activation_checkpointing_selective", "attn_implementation"}
    free |= {"use_liger_kernel", "torch_compile"}
    assert len(set(names(field))) == len(field.settings) == 100
    for setting in field.settings:
        job = Job.from_argv([*chosen.training_arguments, *setting.words])
        assert job.per_device_train_batch_size * job.gradient_accumulation_steps == 8
        assert {name: job.value(name) for name in own.given if name not in free} == {
            name: own.value(name) for name in own.given if name not in free
        }
        assert set(setting.changes) <= free


def test_a_global_batch_size_is_kept_with_other_batches() -> None:
    words = ("--global_batch_size", "16", "--per_device_train_batch_size", "2")
    field = make_field(options(*words, keep=("preset", "checkpointing", "attention", "loss", "compile")), "ddp")
    assert names(field) == [YOURS, "ddp_b1x8", "ddp_b4x2", "ddp_b8x1"]
    spec = make_specification(compare_options(options(*words), field))
    for row in spec.rows():
        job = spec.job(row)
        assert job.per_device_train_batch_size * job.gradient_accumulation_steps * 2 == 16


def test_on_a_cpu_what_needs_a_gpu_is_invalid_and_presets_that_need_degrees_are_too() -> None:
    field = make_field(options(*BATCH_4), "ddp")
    invalid = {each.name: each.why for each in field.not_tried if each.kind == "invalid"}
    assert {"liger", "checkpointing_offload", "tp", "zeropp", "zero3_nvme_offload", "single"} <= set(invalid)
    assert "needs a GPU" in invalid["liger"]
    assert not any(setting.preset in ("tp", "zeropp") for setting in field.settings)


def test_attention_is_searched_among_what_the_gpu_runs() -> None:
    """Flash attention 3 is built for Hopper, 2 for Ampere and later."""

    def values(gpu: str, *words: str) -> tuple[set[str], dict[str, str]]:
        others = ("preset", "batch", "checkpointing", "loss", "compile")
        field = make_field(on_h100s(*words, model=SMALL, gpu=gpu, keep=others), "ddp")
        assert {name for setting in field.settings for name in setting.changes} <= {"attn_implementation"}
        refused = {each.name: each.why for each in field.not_tried}
        return {setting.changes["attn_implementation"] for setting in field.settings[1:]}, refused

    tried, refused = values("h200")
    assert tried == {"flash_attention_2", "flash_attention_3"}
    assert set(refused) == {"sdpa_varlen", "eager"}
    tried, refused = values("a100-80gb")
    assert tried == {"flash_attention_2"}
    assert refused["flash_attention_3"] == "flash_attention_3 has no kernels for this GPU"
    assert "sdpa" in values("h200", "--packing", "true")[0]  # whose own is a function without a mask


def test_what_does_not_fit_on_a_named_gpu_is_not_tried_and_what_is_too_close_is() -> None:
    field = make_field(on_h100s("--gradient_accumulation_steps", "8", keep=("compile",), max_settings=100), "zero3")
    assert kinds(field)["does not fit"] > 20
    refused = {each.name: each.why for each in field.not_tried if each.kind == "does not fit"}
    assert any(name.startswith("ddp_") for name in refused)  # 16 bytes for each of 8 billion parameters
    assert "GiB of 79.1" in refused["zero3_b8x1"]
    assert {setting.verdict for setting in field.settings} == {"fits", "too_close"}
    assert field.settings[0].verdict == "fits"


def test_what_cannot_win_on_a_known_gpu_is_not_tried() -> None:
    """Few tokens per step: offloaded states of 596 million parameters take longer to move than the step computes."""
    words = ("--per_device_train_batch_size", "1", "--max_seq_length", "128")
    chosen = options(*words, num_processes=8, cpu=None, gpu="h100", dry_run=True, keep=("compile", "loss"))
    field = make_field(chosen, "ddp")
    slow = {each.name: each.why for each in field.not_tried if each.kind == "cannot win"}
    assert slow["zero3_cpu_offload_b1x1"].endswith("at worst")
    assert not any("cpu_offload" in setting.preset for setting in field.settings)


def test_the_users_own_setting_stays_where_the_plan_says_that_it_does_not_fit() -> None:
    field = make_field(on_h100s("--gradient_accumulation_steps", "8", keep=("compile",)), "ddp")
    assert (field.settings[0].name, field.settings[0].verdict) == (YOURS, "does_not_fit")


def test_on_a_cpu_model_states_that_exceed_the_host_memory_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-0.6B has 596 million parameters: 9 GB of states in fp32 for each rank that replicates them."""
    monkeypatch.setattr(field_module, "usable_memory_bytes", lambda: 12 * 2**30)
    field = make_field(options(*BATCH_4, keep=("batch", "checkpointing", "loss", "compile")), "zero3")
    refused = {each.name for each in field.not_tried if each.kind == "does not fit"}
    assert "ddp_b4x2" in refused
    assert "fsdp2_b4x2" not in refused


def test_a_variant_is_tried_and_its_name_must_be_free() -> None:
    variant = "mine=zero1 --per_device_train_batch_size 8 --gradient_accumulation_steps 1"
    field = make_field(options(*BATCH_4, variant=(variant,), max_settings=2), "ddp")
    assert names(field) == [YOURS, "mine"]
    with pytest.raises(ToolkitError, match="has the name of your own setting"):
        make_field(options(*BATCH_4, variant=("yours=ddp",)), "ddp")


def test_a_script_is_tried_under_its_presets_and_variants_alone() -> None:
    script = str(ROOT / "tests" / "scripts" / "somebodys.py")
    given = {"script": script, "preset": ("ddp", "zero2"), "variant": ("other=ddp drifts",), "output_dir": Path("out")}
    field = make_field(TuneOptions(**given, num_processes=2, cpu=True), "ddp")
    assert names(field) == [YOURS, "other", "zero2"]


def test_trials_are_short_and_leave_out_what_a_user_runs_beside_steps() -> None:
    words = ("--max_steps", "5000", "--output_dir", "runs/mine", "--save_strategy", "epoch")
    words += ("--eval_strategy", "steps", "--eval_steps", "9", "--val_size", "0.1")
    chosen = options(*BATCH_4, *words, trial_steps=20)
    compared = compare_options(chosen, make_field(chosen, "ddp"))
    job = Job.from_argv(compared.training_arguments)
    assert job.max_steps == 22
    assert {"output_dir", "eval_strategy", "save_strategy"}.isdisjoint(job.given)
    short = options(*BATCH_4, "--max_steps", "8")
    assert Job.from_argv(compare_options(short, make_field(short, "ddp")).training_arguments).max_steps == 8


def test_invalid_jobs_are_refused() -> None:
    with pytest.raises(ToolkitError, match="--tp"):
        make_field(options(*BATCH_4), "tp")
    with pytest.raises(ToolkitError, match="unknown argument --max_stepz"):
        make_field(options("--max_stepz", "3"), "ddp")
    with pytest.raises(ToolkitError, match="offloads to a disk"):
        make_field(options(), "zero3_nvme_offload")
    for given in ({"keep": ("colour",)}, {"budget_minutes": 0.0}, {"rounds": 1}, {"trial_steps": 2}, {"gpu": "h100"}):
        with pytest.raises(ToolkitError):
            options(**given)
