"""`toolkit plan` and the plan of a run: presets and limits, the table and the JSON, and requests that are refused."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG
from model_configs import LLAMA_8B_PARAMS, llama_8b

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import custom_gpu, find_gpu
from toolkit.job.job import Job
from toolkit.models import read_model
from toolkit.plan.candidates import best_candidates
from toolkit.plan.options import PlanOptions, RecommendOptions
from toolkit.plan.plan_table import PlanAnswer, are_states_checked, plan_lines, summary
from toolkit.plan.planned_job import PlannedJob, check_planned_job
from toolkit.plan.planner import PlanRequest, best_plan, make_plans, plan_line, plan_request, plan_run, plan_run_here
from toolkit.plan.recommend import recommend, recommend_request
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB

Capsys = pytest.CaptureFixture[str]

LLAMA_8B = str(LLAMA_8B_CONFIG)


def request(*presets: str, world_sizes: tuple[int, ...] = (8,), **how: Any) -> PlanRequest:
    return PlanRequest(
        shape=llama_8b(),
        presets=[load_preset(name) for name in presets] or list_presets(),
        world_sizes=world_sizes,
        job=PlannedJob(max_seq_length=2048, **how),
        gpu=find_gpu("h100-sxm"),
        strict=bool(presets),
    )


def chosen(job: PlannedJob) -> tuple[int, int, bool]:
    return job.per_device_train_batch_size, job.gradient_accumulation_steps, job.activation_checkpointing


def test_without_a_batch_each_preset_is_planned_as_recommend_would_use_it() -> None:
    options = {"gpu": "h100", "max_seq_length": 4096}
    plans = make_plans(plan_request(LLAMA_8B, PlanOptions(num_processes=(8,), **options)))  # type: ignore[arg-type]
    asked = recommend_request(LLAMA_8B, RecommendOptions(num_processes=8, **options))  # type: ignore[arg-type]
    best = {each.preset.name: chosen(each.job) for each in best_candidates(asked, list_presets())}
    found = {plan.preset.name: chosen(plan.job) for plan in plans if plan.preset.name in best}
    assert found == {name: best[name] for name in found}
    assert {recomputes for _, _, recomputes in found.values()} == {False, True}
    choice = recommend(asked, list_presets()).choice
    assert best_plan([plan for plan in plans if plan.fits])[0].preset.name == choice.preset.name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4, 1, False)),
        ({"activation_checkpointing": True}, (4, 1, True)),
        ({"gradient_accumulation_steps": 3}, (4, 3, False)),
        ({"per_device_train_batch_size": 3}, (3, 1, False)),
    ],
)
def test_what_is_given_is_planned_and_the_rest_is_found(given: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    options = PlanOptions(num_processes=(8,), gpu="h100", preset=("fsdp2",), **given)
    (plan,) = make_plans(plan_request(LLAMA_8B, options))
    assert chosen(plan.job) == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_processes": (16,), "gpu": "a100-80gb", "method": "kto"}, "fsdp2_grad_op"),  # zeropp changes the training
        ({"num_processes": (8,), "gpu": "h100", "preset": ("pipeline_1f1b",), "pp": 4}, "pipeline_1f1b"),
    ],
)
def test_a_preset_that_is_never_recommended_is_named_only_where_it_is_asked_for(
    options: dict[str, Any], named: str
) -> None:
    how = plan_request(LLAMA_8B, PlanOptions(**options))
    plans = make_plans(how)
    assert best_plan([plan for plan in plans if plan.fits])[0].preset.name == named
    assert f"with `{named}`" in summary(PlanAnswer(request=how, plans=plans))


def test_the_row_of_a_found_batch_has_it_and_one_that_cannot_fit_says_so(capsys: Capsys) -> None:
    words = ["plan", LLAMA_8B, "--num-processes", "8", "--gpu", "h100"]
    code, out, err = run_command(words, capsys)
    assert (code, err) == (0, "")
    assert "32 sequences per step, with the largest per-GPU batch that fits" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["fsdp2"][1:3] == ["fits", "4"]
    assert rows["ddp"][1:7] == ["does", "not", "fit", "1", "+", "ckpt"]


def test_the_answer_comes_first_then_a_table_of_80_columns_with_the_fastest_first(capsys: Capsys) -> None:
    words = ["plan", LLAMA_8B, "--num-processes", "8", "--gpu", "h100", "--method", "dpo"]
    out = run_command(words, capsys)[1]
    assert out.startswith("fits on 8 x h100-sxm with `")
    table = out.split("\n\n")[1].splitlines()
    assert table[0].split("  ")[0] == "preset"
    assert max(map(len, table)) <= 80
    verdicts = [re.split(r" {2,}", line)[1] for line in table[1:-1]]
    assert verdicts == sorted(verdicts, key=["fits", "too close", "does not fit"].index)
    plans = sorted(json_of(words, capsys)["plans"], key=lambda row: -row["tokens_per_second_per_gpu_estimate"])
    fitting = [row["preset"] for row in plans if row["verdict"] == "fits"]
    assert [line.split()[0] for line in table[1:-1]][: len(fitting)] == fitting
    assert "phase" not in out
    assert len(out.splitlines()) < 30


def test_the_parts_are_of_the_chosen_preset_or_of_those_named(capsys: Capsys) -> None:
    words = ["plan", LLAMA_8B, "--num-processes", "8", "--gpu", "h100", "--method", "dpo", "--parts"]
    chosen, named = (
        run_command([*words, *more], capsys)[1] for more in ([], ["--preset", "zero3", "--preset", "fsdp2"])
    )
    heads = [[line for line in out.splitlines() if "GiB by phase" in line] for out in (chosen, named)]
    assert [len(each) for each in heads] == [1, 2]
    assert re.search(r"^ +load +score +forward +backward +step$", chosen, re.MULTILINE)
    for out in (chosen, named):
        assert max(len(line) for line in out.splitlines() if line.startswith("  ")) <= 80
        assert "0.0 MiB" not in out
        assert "nvidia-smi shows" in out


def test_host_memory_is_assumed_by_the_kind_of_gpu_and_is_part_of_the_verdict(capsys: Capsys) -> None:
    words = ["plan", LLAMA_8B, "--num-processes", "2", "--gpu", "RTX4090", "--preset", "zero3_cpu_offload"]
    assert "Host memory: 128 GiB per node assumed, 64 per GPU" in (out := run_command(words, capsys)[1])
    assert "; it needs 171.2 GiB of host memory per node, which has 128.0" in out.splitlines()[0]
    assert run_command([*words, "--host-memory-gib", "180"], capsys)[1].startswith("fits on 2 x ")


def test_the_largest_micro_batch_and_the_smallest_world_size_fit_and_the_next_ones_do_not() -> None:
    [plan] = make_plans(request("zero3", per_device_train_batch_size=1, activation_checkpointing=True))
    sizes = (plan.largest_micro_batch, plan.largest_micro_batch + 1)
    how = [{"per_device_train_batch_size": size, "activation_checkpointing": True} for size in sizes]
    plans = [make_plans(request("zero3", **each))[0] for each in how]
    assert plans[0].verdict == "fits" != plans[1].verdict
    assert plan.smallest_world_size == 2


def test_a_preset_that_does_not_support_the_world_size_is_left_out_or_if_named_an_error() -> None:
    names = {plan.preset.name for plan in make_plans(request(world_sizes=(1,)))}
    assert "single" in names
    assert not names & {"fsdp2", "zeropp", "fsdp2_hybrid"}
    with pytest.raises(ToolkitError, match="'zeropp' needs at least 8 processes"):
        make_plans(request("zeropp", world_sizes=(2,)))
    with pytest.raises(ToolkitError, match="'zeropp' needs a multiple of 8"):
        make_plans(replace(request("zeropp"), world_sizes=(12,), job=PlannedJob(gpus_per_node=4)))


def test_a_custom_gpu_has_no_speed_unless_its_peak_is_given() -> None:
    unknown, known = (
        make_plans(replace(request("zero2"), gpu=custom_gpu(None, memory_gib=48, tflops=tflops)))[0].as_row()
        for tflops in (None, 300)
    )
    assert (unknown["mfu"], unknown["step_seconds"]) == (None, None)
    assert known["mfu"][0] < known["mfu"][1] < 1


def test_each_key_of_the_json_is_explained_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json_of(["plan", LLAMA_8B, "--num-processes", "8", "--num-processes", "16", "--gpu", "h100"], capsys)
    assert (answer["counted_on"], answer["activations_from"]) == ("arithmetic", "formulas")
    assert {row["world_size"] for row in answer["plans"]} == {8, 16}
    documented = (Path(__file__).parents[2] / "docs" / "concepts" / "plan.md").read_text()
    for row in answer["plans"]:
        assert [key for key in row if f"`{key}`" not in documented] == []
        assert row["verdict"] in ("fits", "does_not_fit", "too_close")
        assert row["num_params"] == LLAMA_8B_PARAMS
        assert row["headroom_bytes"] + row["planned_peak_bytes"] == find_gpu("h100").memory_bytes
        assert len(row["step_seconds"]) == len(row["mfu"]) == 2


@pytest.mark.parametrize(
    ("world_size", "said"),
    [
        (
            2,
            r"fits on 2 x h100-sxm with `fsdp2`: 66\.\d GiB planned, up to .* possible, of 79\.1; no larger batch does",
        ),
        (8, r"fits on 8 x h100-sxm with `\w+`: .* possible, of 79\.1; a per-GPU batch of up to \d+ fits too"),
        (1, r"does not fit on 1 x h100-sxm with `ddp`: 12\d\.\d GiB of 79\.1"),
    ],
)
def test_the_verdict_is_one_line_with_the_fewest_gpus_and_the_next_larger_batch(world_size: int, said: str) -> None:
    named = [] if world_size > 1 else ["ddp"]
    how = request(*named, world_sizes=(world_size,), per_device_train_batch_size=1)
    verdict = summary(PlanAnswer(request=how, plans=make_plans(how)))
    assert re.match(said, verdict), verdict


def test_an_optimizer_that_is_not_adamw_is_named_and_one_gpu_is_one(capsys: Capsys) -> None:
    words = ["plan", "Qwen/Qwen3-8B", "--gpu", "b200", "--num-processes", "8", "--preset", "ddp"]
    _, out, _ = run_command([*words, "--optim", "ademamix"], capsys)
    verdict, job = out.splitlines()[:2]
    assert verdict.startswith("does not fit")
    assert verdict.endswith("`ddp` fits on 1 GPU")
    assert "; optimizer ademamix; " in job
    assert "optimizer" not in run_command(words, capsys)[1].splitlines()[1]


def test_a_chosen_preset_that_is_not_the_fastest_has_the_rule_for_it(capsys: Capsys) -> None:
    words = ["plan", "Qwen/Qwen3-8B", "--num-processes", "8", "--gpu", "h100", "--max-seq-length", "2048"]
    answer, _, rest = run_command(words, capsys)[1].partition("\n")
    fastest = rest.split("\n\n")[1].splitlines()[1].split()[0]
    assert f"it is within 15 % of the fastest (`{fastest}`), and shards least" in answer


def test_many_logits_have_the_flag_that_saves_them(capsys: Capsys) -> None:
    words = ["plan", LLAMA_8B, "--gpu", "4090", "--num-processes", "1", "--lora-r", "16", "--preset", "ddp"]
    words += ["--per-device-train-batch-size", "2", "--max-seq-length", "4096", "--activation-checkpointing"]
    [row] = json_of([*words, "--loss", "full"], capsys)["plans"]
    [saved] = json_of([*words, "--loss", "chunked"], capsys)["plans"]
    (advice,) = row["advice"]
    assert "`--loss chunked`" in advice
    assert f"the peak is {saved['planned_peak_bytes'] / GIB:.1f} GiB" in advice
    assert saved["advice"] == []


def test_a_verdict_of_fits_prefers_presets_that_keep_everything_on_the_gpu() -> None:
    how = request(per_device_train_batch_size=2)
    plans = make_plans(how)
    assert any(plan.verdict == "fits" and "offload" in plan.preset.name for plan in plans)
    assert "offload" not in summary(PlanAnswer(request=how, plans=plans))


def test_the_logits_are_a_share_of_what_torch_allocates() -> None:
    rows = [make_plans(request("zero3", loss=loss, lora_r=8))[0].as_row() for loss in ("chunked", "full")]
    assert rows[0]["logits_fraction"] < 0.1 < 0.15 < rows[1]["logits_fraction"]
    for row in rows:
        assert row["logits_fraction"] == pytest.approx(row["logits_bytes"] / row["allocated_peak_bytes"])
        assert row["allocated_peak_bytes"] + row["overhead_bytes"] == row["planned_peak_bytes"]


def test_the_table_describes_the_job_and_says_what_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-processes", "8", "--gpu", "h100", "--preset", "zero3", "--preset", "ddp", "--parts"]
    code, shown, err = run_command(["plan", LLAMA_8B, *words, "--per-device-train-batch-size", "2"], capsys)
    assert (code, err) == (0, "")
    assert "llama, 8,030,261,248 parameters; full fine-tune" in shown
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert "does not fit" in lines["ddp"]
    assert " fits " in lines["zero3"]
    assert "Model states are exact" in shown
    assert "Compared with one H200, never with several GPUs." in shown
    assert "\x1b" not in shown
    for gpu, is_told in (("h100", False), ("a100-40gb", True)):  # where only offload fits
        _, shown, _ = run_command(["plan", LLAMA_8B, "--num-processes", "2", "--gpu", gpu], capsys)
        assert ("divide layers, sequences or experts: `toolkit recommend`" in shown) == is_told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--verify"], "--gpu is missing, and no GPU is visible on this node"),
        (["--gpu", "h100", "--price-per-gpu-hour", "cheap"], "hour is 'cheap', expected a number below a million"),
        (["--gpu", "h100", "--price-per-gpu-hour", "l40s=1"], "--price-per-gpu-hour has no price of h100-sxm, which"),
        (["--price-per-gpu-hour", "1.8"], "hint: name it, as in `--price-per-gpu-hour h100=1.8`"),
        (["--gpu", "h100", "--price", "1.8"], "hint: it is `--price-per-gpu-hour 1.8`"),
        (["--gpus=2"], "hint: it is `--num-processes 2`"),
        (["--batch-size", "3"], "hint: it is `--per-device-train-batch-size 3`"),
        (["--qlora"], "hint: it is `--lora-r 16 --load-in-4bit`"),
        (["--gpu", "h100", "--max-steps", "0"], "--max-steps is 0, expected 1 or more"),
        (["--gpu", "h100", "--dataset-tokens", "0"], "--dataset-tokens is 0, expected 1 or more"),
        (["--gpu-memory-gib", "0"], "--gpu-memory-gib is 0.0"),
        (["--gpu", "h100", "--num-processes", "0"], "--num-processes is 0, expected 1 or more"),
        (["--gpu", "h100", "--num-processes", "12"], "hint: `--num-processes 8`, or `--gpus-per-node`"),
    ],
)
def test_invalid_input_is_refused_in_two_lines(words: list[str], message: str, capsys: Capsys) -> None:
    given = [] if "--num-processes" in words else ["--num-processes", "8"]
    code, out, err = run_command(["plan", LLAMA_8B, *given, *words], capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) <= 2


@pytest.mark.parametrize("command", ["plan", "recommend"])
def test_an_unknown_model_and_an_unknown_gpu_are_both_reported(command: str, capsys: Capsys) -> None:
    code, out, err = run_command([command, "Qwen/Qwen3-8v", "--num-processes", "8", "--gpu", "h100-smx"], capsys)
    assert (code, out) == (2, "")
    assert "'Qwen/Qwen3-8v' is not a folder here" in err
    assert "unknown GPU 'h100-smx'" in err
    assert "did you mean `Qwen/Qwen3-8B`? " in err
    assert "did you mean `h100-sxm`? " in err
    assert "did you mean" not in run_command([command, "foo/bar", "--num-processes", "8", "--gpu", "h100"], capsys)[2]


@pytest.mark.parametrize("command", ["plan", "recommend"])
def test_a_quantized_checkpoint_is_refused(command: str, tmp_path: Path, capsys: Capsys) -> None:
    fields = json.loads(LLAMA_8B_CONFIG.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    code, out, err = run_command([command, str(tmp_path), "--num-processes", "8", "--gpu", "h100"], capsys)
    assert (code, out) == (2, "")
    assert "already quantized (`quantization_config`, method gptq)" in err
    assert "--load-in-4bit" in err


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_checkpoint_that_training_dequantizes_is_planned_in_bf16_and_says_so(
    method: str, tmp_path: Path, capsys: Capsys
) -> None:
    fields = json.loads(LLAMA_8B_CONFIG.read_text()) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    job = ["--num-processes", "8", "--gpu", "h100", "--preset", "zero3"]
    (_, stored, said), (_, plain, silent) = (
        run_command(["plan", str(model), *job], capsys) for model in (tmp_path, LLAMA_8B_CONFIG)
    )
    assert stored == plain
    assert f"its {method} weights are planned dequantized to bf16, as `toolkit train` loads them" in said
    assert "dequantized" not in silent


def test_only_what_a_test_has_compared_is_called_exact() -> None:
    """A table says which architectures and methods were compared; its own test goes over it."""
    for how in ({"lora_r": 8}, {"lora_r": 8, "lora_target_modules": ("q_proj",)}):
        assert are_states_checked(request("zero2", **how))
    unknown = replace(llama_8b(), model_type="qwen3_moe")  # its QLoRA has not been measured
    qlora = replace(request("zero2", lora_r=8, load_in_4bit=True), shape=unknown)
    text = "\n".join(plan_lines(PlanAnswer(request=qlora, plans=make_plans(qlora)), parts=True))
    assert "Model states are counted from config.json, and not checked for qwen3_moe, QLoRA r=8." in text
    assert "exact" not in text


def test_equal_lengths_need_no_mask() -> None:
    options = PlanOptions(num_processes=(8,), preset=("fsdp2",), gpu="h100")
    padded = [plan_request(LLAMA_8B, replace(options, equal_lengths=equal)).job.is_padded for equal in (False, True)]
    assert padded == [True, False]
    with pytest.raises(ToolkitError, match="--equal-lengths has no effect with --packing"):
        plan_request(LLAMA_8B, replace(options, equal_lengths=True, packing=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"per_device_train_batch_size": 0}, "--per-device-train-batch-size is 0, expected 1 or more"),
        ({"max_seq_length": 10**12}, "expected 134,217,728 or less"),
        ({"lora_r": 9000}, "--lora-r is 9000, expected at most the hidden size 4096"),
        ({"load_in_4bit": True}, "--load-in-4bit needs --lora-r"),
        ({"loss": "fast"}, "--loss is 'fast', expected chunked, full, fused, chunked_output, cut, upcast or bf16"),
        ({"optim": "galore_adamw_layerwise"}, "--optim galore_adamw_layerwise is not planned"),
        ({"optim": "schedule_free"}, "schedule_free_adamw"),
    ],
)
def test_values_out_of_range_are_refused_by_option(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_planned_job(PlannedJob(**how), llama_8b())


def test_training_arguments_become_the_planners_job() -> None:
    words = {"gradient_checkpointing": "true", "lora_r": "8", "optim": "adamw_torch", "use_liger_kernel": "true"}
    job = PlannedJob.of(Job.from_values(words))
    assert job.per_device_train_batch_size == 8  # transformers' default
    assert (job.activation_checkpointing, job.lora_r, job.optim, job.loss) == (True, 8, "adamw_torch", "fused")


H100 = "NVIDIA H100 80GB HBM3"


def arguments(**more: Any) -> Job:
    return Job(model_name_or_path=LLAMA_8B, per_device_train_batch_size=1, max_seq_length=2048, **more)


@pytest.mark.parametrize(
    ("gpus", "preset", "optim", "said"),
    [
        ([H100], "zero2", "galore_adamw", "projects the modules of optim_target_modules, and there are none"),
        ([H100, "A100"], "zero2", "sgd", "not planned: the GPUs of this node are A100, NVIDIA H100 80GB HBM3"),
        ([], "zero2", "sgd", "not planned: the GPUs of this node are not known to nvidia-smi"),
        ([H100, H100], "ddp", "adamw_torch_fused", "): does not fit"),
    ],
)
def test_a_run_that_is_not_planned_or_does_not_fit_says_so(
    gpus: list[str], preset: str, optim: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.plan.planner.gpu_names", lambda: gpus)
    lines: list[str] = []
    row = plan_run_here(load_preset(preset), arguments(optim=optim), world_size=2, say=lines.append)
    assert lines[0].endswith(said)
    assert (row or {}).get("verdict") == (None if preset == "zero2" else "does_not_fit")
    assert len(lines) == (1 if preset == "zero2" else 2)  # with a hint to `toolkit recommend`


def test_more_ranks_than_fit_on_a_gpu_are_refused_with_a_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an H100 holds no half of an 8B's states; its adapters train there, but not 32 times on one GPU."""
    monkeypatch.setattr("toolkit.plan.planner.gpu_names", lambda: [H100])
    job, lines = replace(arguments(), lora_r=16), list[str]()
    shared = {"world_size": 2, "ranks_per_gpu": 2, "say": lines.append}
    row = plan_run_here(load_preset("fsdp2"), job, **shared)
    assert (row or {})["gpu"] == "h100-sxm, 1/2"
    assert (row or {})["step_seconds"] is None
    assert lines[0].startswith("memory of one rank: ")
    with pytest.raises(ToolkitError) as refused:
        plan_run_here(load_preset("fsdp2"), arguments(), **shared)
    assert refused.value.message.startswith("2 ranks do not fit on one h100-sxm: memory of one rank: ")
    assert "smaller model" in (refused.value.hint or "")
    shared |= {"world_size": 32, "ranks_per_gpu": 32}
    with pytest.raises(ToolkitError) as refused:
        plan_run_here(load_preset("fsdp2"), job, **shared)
    assert re.fullmatch(r"`--ranks-per-gpu (\d+) --num-processes \1`", refused.value.hint or "")


def test_the_plan_of_a_run_is_that_of_the_plan_command() -> None:
    plan = plan_run(load_preset("fsdp2"), arguments(), world_size=8, gpu=find_gpu("h100"))
    options = {"per_device_train_batch_size": 1, "max_seq_length": 2048, "preset": ("fsdp2",), "gpu": "h100"}
    (planned,) = make_plans(plan_request(LLAMA_8B, PlanOptions(num_processes=(8,), **options)))
    assert planned.as_row() == plan.as_row()
    assert plan_line(plan).startswith("GPU memory: ")


def test_a_plan_of_the_model_with_most_tensors_makes_few_calls() -> None:
    """Names are matched once per tensor, and sums of tensors made once per model."""
    asked, calls = plan_request("microsoft/Phi-4-multimodal-instruct", PlanOptions(gpu="h100", num_processes=(8,))), []
    sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
    try:
        make_plans(asked)
    finally:
        sys.setprofile(None)
    assert len(calls) < 800_000


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("openai/gpt-oss-20b", "mxfp4"),
        ("Qwen/Qwen3-8B-FP8", "fp8"),
        ("deepseek-ai/DeepSeek-V3", "fp8"),
        ("Qwen/Qwen3-8B", ""),
    ],
)
def test_a_hub_id_that_is_stored_in_fewer_bits_is_said_to_be_planned_in_bf16(
    model: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read_model._say_once.cache_clear()
    read_model.check_unquantized(model)
    assert (f"its {method} weights are planned dequantized" in capsys.readouterr().err) == bool(method)


@pytest.mark.parametrize("command", ["plan", "recommend"])
def test_adapters_on_a_model_stored_in_4_bits_are_planned_on_4_bit_weights(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, "unsloth/Qwen3-4B-bnb-4bit", "--gpu", "h100", "--num-processes", "1", "--lora-r", "16"]
    assert "QLoRA r=16" in run_command(words, capsys)[1]
