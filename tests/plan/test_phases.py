"""Moments of a job beside its steps, and what engines hold in them: compared with the libraries on a CPU."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run_command
from live_bytes import LiveBytes
from model_configs import LLAMA_8B_CONFIG, LLAMA_8B_PARAMS, llama_8b
from planned_commands import planned_command
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import EvalLoopContainer

from toolkit.errors import ToolkitError
from toolkit.models.job_weights import job_weights
from toolkit.models.read_model import read_model
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.options import PlanOptions
from toolkit.plan.phases import PhaseMemory
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset
from toolkit.presets.support import check_supported
from toolkit.units import GIB

VOCABULARY, HIDDEN = 128_256, 4_096
KERNEL = "kernels-community/vllm-flash-attn3"


def planned(preset: str = "single", ranks: int = 1, **options: Any) -> MemoryPlan:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_seq_length": 2048}
    given = {**sizes, "activation_checkpointing": True, **options}
    job = PlannedJob.from_options(PlanOptions(**given), full_length=True)
    return plan_memory(llama_8b(), load_preset(preset), world_size=ranks, job=job)


def phase(name: str, *job: Any, **options: Any) -> PhaseMemory:
    return next(each for each in planned(*job, **options).phases if each.phase == name)


def test_fsdp1s_root_unit_has_the_embedding_and_stays_whole_from_forward_to_backward() -> None:
    """Torch gathers the embedding, the head and the final norm as one unit, until the backward ends."""
    of_fsdp1, of_fsdp2 = (phase("forward", "fsdp2", 8, lora_r=8, fsdp1=fsdp1) for fsdp1 in (True, False))
    assert of_fsdp1.buffer_bytes - of_fsdp2.buffer_bytes == 2 * VOCABULARY * HIDDEN
    assert phase("step", "fsdp2", 8, fsdp1=True) == phase("step", "fsdp2", 8)


@pytest.mark.parametrize(("lora_r", "name", "traced_gib"), [(8, "forward", 4.95), (None, "backward", 10.93)])
def test_fsdp2_gathers_an_untied_embedding_beside_the_first_layer(
    tmp_path: Path, lora_r: int | None, name: str, traced_gib: float
) -> None:
    """Traced once: `toolkit rehearse --preset fsdp2 --num-processes 8 --fake-tensors`, with four wide layers."""
    wide = {"num_hidden_layers": 4, "intermediate_size": 40_000, "vocab_size": 200_000}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(LLAMA_8B_CONFIG.read_text()) | wide))
    options: dict[str, Any] = {"max_seq_length": 256, "lora_r": lora_r, "activation_checkpointing": True}
    job = PlannedJob.from_options(PlanOptions(per_device_train_batch_size=1, **options), full_length=True)
    plan = plan_memory(read_model(str(path)), load_preset("fsdp2"), world_size=8, job=job)
    found = next(each.allocated_bytes for each in plan.phases if each.phase == name)
    assert found / GIB == pytest.approx(traced_gib, rel=0.02)


@pytest.mark.parametrize(("optim", "copies"), [("adamw_torch", 1), ("adamw_torch_fused", 0)])
def test_zeros_step_has_the_copy_that_torchs_foreach_kernels_make(optim: str, copies: int) -> None:
    """One flat tensor, as DeepSpeed gives it to the optimizer; beside it are its fp32 gradient and AdamW's states."""
    flat = torch.nn.Parameter(torch.zeros(1 << 16))
    optimizer = torch.optim.AdamW([flat], foreach=bool(copies), fused=not copies)
    flat.grad = torch.ones_like(flat)
    optimizer.step()
    with LiveBytes() as bytes_of:
        optimizer.step()
    assert bytes_of.peak // flat.nbytes == copies
    assert bytes_of.peak % flat.nbytes < 1024

    def step_bytes(preset: str) -> int:
        engine, weights = engine_settings(load_preset(preset), world_size=8, hidden_size=4096), job_weights(llama_8b())
        job = PlannedJob(optim=optim)
        return engine.traits.buffers(engine, weights, model_states(engine, weights, job.optimizer), job).step_bytes

    # ZeRO-3 keeps its bf16 partition of the gradients; ZeRO-2 has freed the gradients, which the plan counts apart.
    assert step_bytes("zero3") == (8 if copies else 6) * min(LLAMA_8B_PARAMS // 8, 10**9)
    assert step_bytes("zero2") == 6 * (LLAMA_8B_PARAMS // 8)


def test_an_evaluation_makes_the_logits_of_its_batch_without_activations_or_gradients() -> None:
    """transformers' loss, as in training: bf16 logits, their fp32 copy and log-probabilities."""
    hidden, labels = torch.zeros(4, 65, 8, dtype=torch.bfloat16), torch.zeros(4, 65, dtype=torch.long)
    head, number = torch.nn.Linear(8, 4096, bias=False, dtype=torch.bfloat16), 4 * 65 * 4096
    with torch.no_grad(), LiveBytes() as bytes_of:
        logits = head(hidden)  # which the model returns
        ForCausalLMLoss(logits, labels, vocab_size=4096)
    assert bytes_of.peak / number == pytest.approx(10, rel=0.01)
    job: dict[str, Any] = {"loss": "full", "per_device_eval_batch_size": 8}
    evaluated = phase("evaluate", "zero2", 8, **job)
    assert evaluated.logits_bytes == 10 * 8 * 2048 * VOCABULARY
    assert (evaluated.gradient_bytes, evaluated.activation_bytes) == (0, 0)
    # ZeRO-3's partition of the gradients stays
    assert phase("evaluate", "zero3", 8, **job).gradient_bytes == phase("step", "zero3", 8, **job).gradient_bytes
    assert "evaluate" not in [each.phase for each in planned("zero2", 8, loss="full").phases]


def test_ligers_loss_makes_all_logits_in_an_evaluation() -> None:
    job: dict[str, Any] = {"per_device_eval_batch_size": 2}
    fused, full = (phase("evaluate", **job, use_liger_kernel=liger, loss="full") for liger in (True, False))
    assert fused.logits_bytes == full.logits_bytes
    job |= {"use_liger_kernel": True, "loss": "fused", "lora_r": 8}
    assert phase("forward", **job).logits_bytes < phase("evaluate", **job).logits_bytes / 8


def test_data_parallel_gathers_the_logits_of_all_replicas_on_its_first_gpu() -> None:
    of_one = 4 * 2048 * VOCABULARY
    job: dict[str, Any] = {"lora_r": 8, "loss": "upcast"}
    alone, of_8 = phase("forward", **job), phase("forward", **job, data_parallel=8)
    # its own log-probabilities and logits, and those of all eight
    assert (alone.logits_bytes, of_8.logits_bytes) == (14 * of_one // 4, (1 + 1 + 8) * of_one)
    assert of_8.gradient_bytes == alone.gradient_bytes


def test_zero3_moves_a_model_that_was_not_sharded_while_it_loaded_to_each_gpu() -> None:
    whole, sharded = (planned("zero3", 64, lora_r=8, zero3_init=init).phases[0] for init in (False, True))
    assert whole.parameter_bytes == pytest.approx(2 * LLAMA_8B_PARAMS, rel=0.01)  # and adapters
    assert sharded.parameter_bytes < whole.parameter_bytes / 16
    assert planned("zero2", 8, zero3_init=False) == planned("zero2", 8)


def test_bitsandbytes_optimizers_run_under_fsdp1_whose_parameters_are_plain_tensors() -> None:
    def job(**numerics: Any) -> PlannedJob:
        options = PlanOptions(optim="adamw_8bit", per_device_train_batch_size=1, **numerics)
        return PlannedJob.from_options(options, full_length=True)

    preset = load_preset("fsdp2")
    check_supported(preset, job(fsdp1=True).as_trained, world_size=8, purpose="plan")
    with pytest.raises(ToolkitError, match="take no DTensors"):
        check_supported(preset, job().as_trained, world_size=8, purpose="plan")
    assert job(fsdp1=True).optimizer.class_name.startswith("bitsandbytes")


def test_a_file_that_evaluates_is_planned_with_its_evaluation(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "full.yaml"
    text = "model_name_or_path: Llama-3.2-3B\nstage: sft\nfinetuning_type: full\nbf16: true\ndo_train: true\n"
    text += "dataset: identity\ntemplate: llama3\ncutoff_len: 1024\nper_device_train_batch_size: 1\n"
    evaluation = "val_size: 0.1\nper_device_eval_batch_size: 4\neval_strategy: steps\neval_steps: 100\n"
    words = ["plan", "--gpu", "h200", "--num-processes", "1", "--preset", "single", "--parts", "--config", str(file)]
    for more in ("", evaluation):
        file.write_text(text + more)
        _, said, _ = run_command(words, capsys)
        assert ("  evaluate" in said) is bool(more)
        assert "per_device_eval_batch_size" not in said


def test_an_evaluation_with_metrics_keeps_the_logits_of_all_its_rows_and_appends_them_to_a_copy() -> None:
    """transformers' own container; the Trainer fills it where `compute_metrics` or `preprocess_logits` is given."""
    kept = EvalLoopContainer()
    with LiveBytes() as bytes_of:
        for _ in range(6):
            kept.add(torch.zeros(2, 8, 96))
    assert bytes_of.live == 12 * 8 * 96 * 4
    assert bytes_of.peak == 2 * bytes_of.live
    job: dict[str, Any] = {"loss": "full", "per_device_eval_batch_size": 1, "eval_rows": 40}
    fp32, bf16 = (phase("evaluate", preset, 8, **job).logits_bytes for preset in ("ddp", "zero2"))
    assert fp32 == 2 * 40 * 2048 * VOCABULARY * 4  # accelerate's `convert_outputs_to_fp32`
    assert bf16 == 2 * 40 * 2048 * VOCABULARY * 2
    without = phase("evaluate", "ddp", 8, loss="full", per_device_eval_batch_size=1)
    assert without.logits_bytes == 10 * 2048 * VOCABULARY
    # a loss without logits needs them there
    assert phase("evaluate", eval_rows=1).logits_bytes > phase("evaluate", eval_rows=1, loss="full").logits_bytes / 2


def test_what_compute_metrics_would_keep_is_a_line_where_another_program_evaluates(capsys: Any) -> None:
    words = ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "a100-80gb", "--num-processes", "1", "--preset", "single"]
    words += ["--per-device-train-batch-size", "1", "--max-seq-length", "2048", "--lora-r", "8"]
    words += ["--per-device-eval-batch-size", "1"]
    line = f"{2 * 4 * 2048 * VOCABULARY / 2**30:.2f} GiB per row evaluated (`--eval-rows`)"

    def printed(*more: str) -> str:
        return " ".join(run_command([*words, *more], capsys)[1].split())

    assert line in printed("--program", "trainer")
    assert line not in printed("--program", "trainer", "--eval-rows", "4")
    assert line not in printed()  # `toolkit train` keeps losses alone


def test_unsloths_evaluation_makes_all_logits() -> None:
    """Its `prediction_step` sets UNSLOTH_RETURN_LOGITS, whatever is needed."""
    job: dict[str, Any] = {"program": "unsloth", "lora_r": 8, "per_device_eval_batch_size": 4}
    assert phase("evaluate", **job).logits_bytes == 10 * 4 * 2048 * VOCABULARY
    assert phase("forward", **job).logits_bytes < 2048 * VOCABULARY


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_8_bit_weights_are_decoded_in_the_dtype_of_an_input_that_they_keep() -> None:
    """Autocast leaves the fp32 rows of `prepare_model_for_kbit_training` to bitsandbytes: twice what 4 bits save."""
    import bitsandbytes
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(torch.randn(512, 256).half())
    state = MatmulLtState()
    state.CB, state.SCB, state.has_fp16_weights, state.threshold = codes, scales, False, 6.0
    saved, decoded = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(64, 256, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = MatMul8bitLt.apply(rows, codes, None, None, state)
        saved[dtype] = output.dtype, output.grad_fn.tensors[2].dtype
        gradient = torch.ones_like(output)
        with LiveBytes() as bytes_of:
            output.backward(gradient)
        decoded[dtype] = (bytes_of.peak - 64 * 256 * dtype.itemsize) / codes.numel()
    assert saved == {dtype: (dtype, dtype) for dtype in saved}
    assert decoded[torch.float32] == pytest.approx(4, rel=0.02)
    assert decoded[torch.bfloat16] == pytest.approx(2, rel=0.02)
    job: dict[str, Any] = {"lora_r": 8, "kbit_training": True, "loss": "cut", "activation_checkpointing": False}
    in_8bit, in_4bit = (phase("forward", **job, **{bits: True}) for bits in ("load_in_8bit", "load_in_4bit"))
    # per layer: the inputs of its projections, and the gated MLP's four rows
    more = 32 * 2048 * 2 * (2 * HIDDEN + 4 * 14_336)
    assert in_8bit.activation_bytes - in_4bit.activation_bytes == more
    assert in_8bit.buffer_bytes - in_4bit.buffer_bytes == 2 * 14_336 * HIDDEN


@pytest.mark.parametrize(
    ("job", "limit"),
    [  # allocated GiB; eager attention would save 64 heads' scores, and a parabola of the counts is no growth
        (f"openai/gpt-oss-20b --lora-r 16 --max-seq-length 16384 --attn-implementation {KERNEL}", 17),
        ("zai-org/GLM-4-32B-0414 --max-seq-length 32768", 90),
    ],
)
def test_long_rows_of_counted_models_need_what_grows_with_their_tokens(job: str, limit: float) -> None:
    of_gpu = "--gpu h200 --num-processes 8 --preset fsdp2 --per-device-train-batch-size 1 --activation-checkpointing"
    phases = planned_command(f"{job} {of_gpu}").memory.phases
    allocated = max(each.allocated_bytes for each in phases) / GIB
    assert 0.8 * limit < allocated < limit


@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_a_layers_backward_takes_as_much_per_token_as_a_count_without_the_weights_gradients(length: int) -> None:
    """GLM-4's 9B under autocast: 90,108 bytes in counts of 8 x 512, 2 x 2,048 and 1 x 8,192 tokens, and longer rows."""
    words = "zai-org/GLM-4-9B-0414 --gpu h200 --num-processes 1 --preset single --activation-checkpointing --loss cut"
    rows = f"--equal-lengths --max-seq-length {length} --per-device-train-batch-size {8192 // length}"
    [backward] = (each for each in planned_command(f"{words} {rows}").memory.phases if each.phase == "backward")
    assert backward.activation_bytes == 8192 * (283_280 + 90_108)  # what the first layer saves, and its backward
