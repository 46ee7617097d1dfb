"""The numerics of programs: bytes compared with what torch, peft and bitsandbytes hold, and the table of defaults."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from command_line import run_command
from live_bytes import LiveBytes
from model_configs import LLAMA_8B_CONFIG, LLAMA_8B_PARAMS, llama_8b

from toolkit.errors import ToolkitError
from toolkit.models.job_weights import QuantizedBase, job_weights
from toolkit.models.read_model import read_model
from toolkit.models.shape import linear
from toolkit.plan.logits import LOSSES, LossSizes
from toolkit.plan.memory import MemoryPlan, memory_verdict, plan_memory
from toolkit.plan.options import PlanOptions
from toolkit.plan.phases import PhaseMemory
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.programs import PROGRAMS, Numerics
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset
from toolkit.units import GIB
from toolkit.versions import is_importable

needs_bitsandbytes = pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed")


def planned(preset: str = "single", ranks: int = 1, **options: Any) -> MemoryPlan:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    job = PlannedJob.from_options(PlanOptions(**{**sizes, **options}), full_length=True)
    return plan_memory(llama_8b(), load_preset(preset), world_size=ranks, job=job)


def test_without_fp32_masters_weights_gradients_and_states_take_2_bytes_each() -> None:
    for preset, ranks in (("single", 1), ("ddp", 8), ("fsdp2", 8)):
        states = planned(preset, ranks, pure_bf16=True).states
        share = ranks if preset == "fsdp2" else 1
        found = states.parameter_bytes, states.gradient_bytes, states.optimizer_bytes
        assert [part * share / LLAMA_8B_PARAMS for part in found] == [2, 2, 4]
    assert planned("zero2", 8, pure_bf16=True).states == planned("zero2", 8).states  # DeepSpeed has masters


def test_torch_holds_what_is_planned_of_bf16_weights() -> None:
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    held = sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
    small = replace(llama_8b(), layers=(linear("mlp", 64, 64),), outer=(), num_layers=1)
    engine = engine_settings(load_preset("single"), world_size=1, hidden_size=64, pure_bf16=True)
    states = model_states(engine, job_weights(small))
    assert (states.parameter_bytes, states.optimizer_bytes) == (layer.weight.nbytes, held)


@needs_bitsandbytes
@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_holds_the_planned_constants_with_and_without_double_quantization(double: bool) -> None:
    import bitsandbytes
    import torch

    rows, columns = 256, 512
    _, state = bitsandbytes.functional.quantize_4bit(
        torch.ones(rows, columns, dtype=torch.bfloat16), compress_statistics=double, quant_type="nf4"
    )
    tensors = [state.absmax, state.code]
    if double:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    small = replace(llama_8b(), layers=(linear("mlp", rows, columns),), outer=(), num_layers=1)
    weights = job_weights(small, 8, True, base=None if double else QuantizedBase(double_quantization=False))
    assert weights.constant_bytes == sum(tensor.nbytes for tensor in tensors)


@needs_bitsandbytes
def test_bitsandbytes_holds_the_planned_bytes_of_8_bit_weights() -> None:
    import bitsandbytes
    import torch

    rows, columns = 256, 512
    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(torch.ones(rows, columns, dtype=torch.float16))
    small = replace(llama_8b(), layers=(linear("mlp", rows, columns),), outer=(), num_layers=1)
    weights = job_weights(small, 8, base=QuantizedBase(bits=8))
    held = weights.held_bytes(2) - 4 * weights.num_trained
    assert held == codes.nbytes + scales.nbytes


def test_peft_makes_fp32_what_is_planned_of_kbit_training() -> None:
    import torch
    from peft import prepare_model_for_kbit_training
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).to(torch.bfloat16)
    linear_layers = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    quantized = sum(module.weight.numel() for module in linear_layers)
    model.is_loaded_in_4bit = True
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    small = llama_8b()
    weights = job_weights(small, 8, True, base=QuantizedBase(upcast_rest=True))
    rest = small.num_params - sum(tensor.num_elements * count for tensor, count in weights.in_4bit)
    assert weights.num_upcast == rest  # and nothing that is quantized
    assert sum(parameter.numel() for parameter in model.parameters()) > quantized


def test_kbit_training_adds_2_bytes_to_embeddings_and_head_and_doubles_checkpoints() -> None:
    job: dict[str, Any] = {"lora_r": 16, "load_in_4bit": True, "activation_checkpointing": True}
    job |= {"max_seq_length": 4096, "loss": "cut"}
    before, after = planned(**job), planned(**job, kbit_training=True)
    outer = 2 * 128_256 * 4096
    weights = after.states.parameter_bytes - before.states.parameter_bytes
    assert weights == pytest.approx(2 * outer, rel=0.001)  # norms are few
    forwards = [next(each for each in plan.phases if each.phase == "forward") for plan in (before, after)]
    assert forwards[1].activation_bytes - forwards[0].activation_bytes == pytest.approx(2 * 4096 * 4096 * 32, rel=0.05)


def test_a_base_in_fp32_takes_4_bytes_per_parameter_except_under_deepspeed() -> None:
    job: dict[str, Any] = {"lora_r": 16, "activation_checkpointing": True, "max_seq_length": 4096}
    for preset, ranks, more in (("ddp", 8, 2), ("fsdp2", 8, 2 / 8), ("zero2", 8, 0)):
        before, after = planned(preset, ranks, **job), planned(preset, ranks, **job, fp32_base=True)
        assert (after.states.parameter_bytes - before.states.parameter_bytes) / LLAMA_8B_PARAMS == pytest.approx(more)
    of_trl = planned("ddp", 8, **job, program="trl").states.parameter_bytes
    assert of_trl == planned("ddp", 8, **job, fp32_base=True).states.parameter_bytes
    quantized = planned("ddp", 8, **job, load_in_4bit=True, program="trl", double_quantization=True).states
    assert quantized == planned("ddp", 8, **job, load_in_4bit=True).states


@pytest.mark.nightly
def test_trl_loads_the_base_of_adapters_in_fp32() -> None:
    from trl import ModelConfig

    assert ModelConfig().dtype == "float32"


def test_expandable_segments_lower_the_range_only() -> None:
    job: dict[str, Any] = {"max_seq_length": 8192, "loss": "full", "lora_r": 16}
    before, after = planned(**job), planned(**job, expandable_segments=True)
    assert after.peak == before.peak
    assert after.overhead_bytes < before.overhead_bytes - GIB


def test_liger_counts_only_for_architectures_that_it_patches() -> None:
    def peak(model_type: str, **options: Any) -> int:
        job = PlannedJob.from_options(PlanOptions(per_device_train_batch_size=8, **options), full_length=True)
        shape = replace(llama_8b(), model_type=model_type)
        return plan_memory(shape, load_preset("fsdp2"), world_size=8, job=job).peak.logits_bytes

    assert peak("llama", use_liger_kernel=True) < peak("llama", loss="full") // 4
    for unpatched in ("gpt_neox", "stablelm", "phi"):
        assert peak(unpatched, use_liger_kernel=True) == peak(unpatched, loss="full")
    assert peak("llama", program="llama-factory", loss="chunked") == peak("llama")  # a loss that is given wins


def test_each_program_has_a_source_and_plans_the_same_job_as_its_numerics() -> None:
    for name, program in PROGRAMS.items():
        assert bool(program.source) == (name != "toolkit")
        job: dict[str, Any] = {"max_seq_length": 1024, "activation_checkpointing": True}
        assert planned("ddp", 8, program=name, **job).planned_peak_bytes > 0
    axolotl, ours = planned("ddp", 8, program="axolotl"), planned("ddp", 8)
    assert axolotl.states.optimizer_bytes == ours.states.optimizer_bytes / 2  # it trains in bf16
    given = planned("ddp", 8, program="axolotl", pure_bf16=False)  # an option wins
    assert given.states.optimizer_bytes == ours.states.optimizer_bytes
    # accelerate's FSDP2 makes what is trained fp32; axolotl and torchtune shard in their own way.
    for name in ("ms-swift", "trainer"):
        assert planned("fsdp2", 8, program=name).states == planned("fsdp2", 8).states, name
    for name in ("axolotl", "torchtune"):
        assert planned("fsdp2", 8, program=name).states == planned("fsdp2", 8, pure_bf16=True).states, name


def test_trl_prepares_4_bit_models_of_orpo_and_simpo_only() -> None:
    def numerics(method: str) -> Numerics:
        options = PlanOptions(program="trl", method=method, lora_r=16, load_in_4bit=True)
        return PlannedJob.from_options(options, full_length=True).numerics

    assert [numerics(method).kbit_training for method in ("sft", "orpo", "simpo", "dpo")] == [False, True, True, False]


def test_contradictions_are_refused_and_a_gpu_without_bf16_is_planned_in_fp16(capsys: Any) -> None:
    plan = ["plan", str(LLAMA_8B_CONFIG), "--num-processes", "2", "--preset", "ddp", "--gpu"]
    for words, message in (
        (["--program", "axolot"], "--program is 'axolot', expected"),
        (["--load-in-8bit"], "--load-in-8bit needs --lora-r"),
        (["--kbit-training", "--lora-r", "8"], "--kbit-training needs quantized weights"),
    ):
        code, _, err = run_command([*plan, "h100", *words], capsys)
        assert (code, message in err) == (2, True), err
    code, out, _ = run_command([*plan, "t4", "--lora-r", "8", "--load-in-4bit"], capsys)
    assert code == 0
    assert "; fp16; " in out
    assert "n/a" not in out
    words = ["--num-processes", "2", "--gpu", "t4", "--lora-r", "8", "--load-in-4bit"]
    code, out, _ = run_command(["recommend", "Qwen3-4B", *words], capsys)
    assert (code, "--fp16 true" in out) == (0, True)


def test_what_is_too_close_names_what_its_margin_is_made_of_and_two_settings_that_fit(capsys: Any) -> None:
    words = ["--gpu", "rtx-4090", "--num-processes", "1", "--preset", "single", "--per-device-train-batch-size", "2"]
    job = ["--max-seq-length", "3000", "--lora-r", "32", "--load-in-4bit", "--loss", "full"]
    _, out, _ = run_command(["plan", str(LLAMA_8B_CONFIG), *words, *job, "--activation-checkpointing"], capsys)
    first = out.splitlines()[0]
    assert first.startswith("too close to call on 1 x rtx-4090 with `single`: ")
    assert "(margin: everything but model states); it fits with `--loss chunked` or `--expandable-segments`" in first


def test_a_job_of_a_group_that_no_share_is_known_for_has_no_verdict_and_names_no_offload(capsys: Any) -> None:
    words = ["plan", "Qwen2.5-3B", "--program", "trl", "--gpu", "a100-80gb", "--num-processes", "4"]
    first, *lines = run_command([*words, "--method", "dpo"], capsys)[1].splitlines()
    assert first.startswith("no verdict on 4 x a100-80gb with `zero3`: ")
    assert "toolkit rehearse --preset zero3 " in first
    assert next(line for line in lines if line.startswith("zero3 ")).split()[1:3] == ["no", "verdict"]
    assert any(line.startswith("no verdict: ") and "`toolkit rehearse` measures it" in line for line in lines)
    words[words.index("trl")] = "ms-swift"
    assert "--module swift.cli.rlhf " in run_command([*words, "--method", "dpo"], capsys)[1]


@pytest.mark.parametrize(
    ("program", "job", "noted"),
    [
        ("axolotl", "", []),
        ("axolotl", "--lora-r 8", ["Triton"]),
        ("llama-factory", "", []),
        ("llama-factory", "--method reward", ["reward models"]),
    ],
)
def test_a_program_says_what_is_not_planned_of_such_a_job_alone(
    capsys: Any, program: str, job: str, noted: list[str]
) -> None:
    words = f"plan Qwen3-8B --program {program} --gpu a100-80gb --num-processes 4 --preset zero3"
    out = run_command([*words.split(), *job.split()], capsys)[1]
    assert [words for words in ("Triton", "badam", "reward models") if words in out] == noted


def test_a_model_of_images_is_judged_as_one_of_text_where_its_rows_have_none(capsys: Any) -> None:
    job = "--program llama-factory --gpu a100-80gb --num-processes 1 --preset single --lora-r 16 --load-in-4bit"
    words = ["plan", "Qwen/Qwen3.5-9B", *job.split(), "--max-seq-length", "1024", "--activation-checkpointing"]
    open_text, text, images = (
        run_command([*words, *more], capsys)[1] for more in ((), ("--image-tokens", "0"), ("--image-tokens", "500"))
    )
    assert open_text.startswith("no verdict on ")
    assert "of models with images" in open_text.splitlines()[0]
    assert "0 says that there are none" in open_text
    assert text.startswith("fits on ")
    assert "--image-tokens" not in text
    assert images.startswith("no verdict on ")


def test_two_settings_are_named_together_where_neither_makes_a_job_fit_alone(capsys: Any) -> None:
    job = "--program unsloth --gpu rtx-4090 --num-processes 1 --preset single --lora-r 16 --load-in-4bit"
    words = ["plan", "Qwen/Qwen3-8B", *job.split(), "--activation-checkpointing"]
    large = ["--per-device-train-batch-size", "4", "--max-seq-length", "8192"]
    said = run_command([*words, *large], capsys)[1].splitlines()[0]
    assert "it fits with `--per-device-train-batch-size 2` and `--max-seq-length 4096`" in said
    both = ["--per-device-train-batch-size", "2", "--max-seq-length", "4096"]
    verdicts = [
        run_command([*words, *given], capsys)[1] for given in (both, large[:2] + both[2:], both[:2] + large[2:])
    ]
    assert [each.startswith("fits") for each in verdicts] == [True, False, False]


def test_settings_that_are_named_together_fit_when_they_are_typed_though_several_options_are_open(capsys: Any) -> None:
    """Attention and `zero.Init` are open, and each alone would be too much."""
    job = "--program trl --gpu a100-80gb --num-processes 8 --preset zero3 --lora-r 16 --max-seq-length 2048"
    words = ["plan", "Qwen/Qwen3-30B-A3B", *job.split(), "--per-device-train-batch-size", "2"]
    said = run_command(words, capsys)[1].splitlines()[0]
    named = re.findall("`(--[^`]*)`", said.split("it fits with")[1])
    assert len(named) == 2
    assert run_command([*words, *" ".join(named).split()], capsys)[1].startswith("fits on")


OFFLOADED = "--lora-r 16 --preset zero3_cpu_offload"


@pytest.mark.parametrize(
    "job",
    ["trl --method grpo --preset zero3", "trl --preset fsdp2", f"axolotl {OFFLOADED}", f"trainer {OFFLOADED}"],
)
def test_a_job_whose_margin_is_not_known_names_a_rehearsal_that_the_command_line_takes(
    job: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["plan", str(LLAMA_8B_CONFIG), "--gpu", "h100", "--num-processes", "8", "--program", *job.split()]
    said = run_command([*words, "--per-device-train-batch-size", "1"], capsys)[1].splitlines()[0]
    assert "margin: not known" in said
    command = re.findall("`(toolkit rehearse .*?)`", said)[0].split()[1:]
    for file in (tmp_path / "SCRIPT", tmp_path / "axolotl" / "cli" / "train.py"):  # as in an environment that has it
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []

    def rehearse_nothing(planned: Any, **_: Any) -> None:
        started.append(planned)
        raise ToolkitError("enough")

    monkeypatch.setattr("toolkit.rehearse.rehearsal.rehearse_once", rehearse_nothing)
    monkeypatch.setattr("toolkit.doctor.ops.compile_for_run", lambda *_, **__: None)
    assert "enough" in run_command([*command, "--cpu"], capsys)[2]
    assert started[0].preset.name in job.split()
    assert (started[0].is_module, started[0].rehearsed.fake_tensors) == ("trainer" not in job, "fsdp2" in job)


def test_4_bit_weights_in_uint8_are_whole_on_each_gpu_under_fsdp2() -> None:
    """accelerate 1.15 leaves them out of the sharding, so TRL's default holds twice as much on two ranks."""
    job: dict[str, Any] = {"lora_r": 8, "load_in_4bit": True, "program": "trl", "double_quantization": True}
    held = planned("fsdp2", 2, **job).states.parameter_bytes
    sharded = planned("fsdp2", 2, **job, sharded_4bit=True).states.parameter_bytes
    linear_elements = sum(t.num_elements for layer in llama_8b().layers for t in layer if t.is_linear_weight)
    assert held - sharded == pytest.approx(linear_elements / 4, rel=1e-6)  # half a byte each, half of them
    assert planned("ddp", 2, **job).states == planned("ddp", 2, **job, sharded_4bit=True).states


def test_other_programs_hold_whole_4_bit_weights_beside_the_shards_until_all_are_sharded() -> None:
    """`original_sd` refers to the loaded weights to the end, which are on the GPU if bitsandbytes quantized them."""
    source = inspect.getsource(fsdp2_prepare_model)
    assert "incompatible_params4bit" in source
    kept, sharded = source.index("original_sd = model.state_dict()"), source.index("fully_shard(module")
    assert kept < sharded
    assert "del original_sd" not in source
    job: dict[str, Any] = {"lora_r": 8, "load_in_4bit": True, "program": "axolotl"}
    axolotl, ours = planned("fsdp2", 2, **job), planned("fsdp2", 2, lora_r=8, load_in_4bit=True)
    loading = [plan.phases[0].allocated_bytes for plan in (axolotl, ours)]
    assert loading[0] > 2.5 * axolotl.states.parameter_bytes
    assert loading[1] < 2 * ours.states.parameter_bytes
    weights = job_weights(llama_8b(), 8, True)
    fsdp1 = planned("fsdp2", 2, **job, fsdp1=True).phases[0].allocated_bytes  # whole once, and no shards beside it
    assert fsdp1 == pytest.approx(weights.held_bytes(2), rel=0.01)


def test_transformers_leaves_fused_experts_in_bf16_which_the_toolkit_quantizes() -> None:
    model, kind = read_model("mistralai/Mixtral-8x7B-v0.1"), QuantizedBase(experts=False)
    experts = sum(t.num_elements for layer in model.layers for t in layer if t.is_fused_experts)
    all_of_it, linear_alone = job_weights(model, 8, True), job_weights(model, 8, True, base=kind)
    difference = linear_alone.held_bytes(2) - all_of_it.held_bytes(2)
    assert difference / experts == pytest.approx(2 - 0.5 - 1 / 64, rel=0.01)
    program = PlanOptions(program="trl", lora_r=8, load_in_4bit=True, preset=("single",), num_processes=(1,))
    assert not PlannedJob.from_options(program, full_length=True).numerics.experts_in_4bit


def test_trainers_that_make_logits_hold_what_is_planned_per_logit() -> None:
    """LLaMA-Factory's `concatenated_forward` and `get_batch_logps`, of one pair on a CPU."""
    hidden = torch.zeros(2, 65, 8, dtype=torch.bfloat16, requires_grad=True)
    head, labels = torch.nn.Linear(8, 4096, bias=False, dtype=torch.bfloat16), torch.zeros(2, 64, 1, dtype=torch.long)
    number = 2 * 65 * 4096
    with LiveBytes() as bytes_of:
        logits = head(hidden).to(torch.float32)
        log_probabilities = logits[:, :-1, :].log_softmax(-1).gather(2, labels)
        kept = bytes_of.live / number
        del logits  # was kept for metrics until the loss was there
        bytes_of.peak = 0
        log_probabilities.sum().backward()
    planned_bytes = LOSSES["log_softmax"](LossSizes(tokens=2 * 65, vocab_size=4096, hidden_size=8))
    assert (kept, bytes_of.peak / number) == pytest.approx([each / number for each in planned_bytes], rel=0.03)


def test_a_loop_whose_loss_stays_in_bf16_holds_what_is_planned_per_logit() -> None:
    """Logits, kept by the loop, are copied without the last row of each sequence; a pair of rows on a CPU."""
    hidden = torch.zeros(2, 65, 8, dtype=torch.bfloat16, requires_grad=True)
    head, labels = torch.nn.Linear(8, 4096, bias=False, dtype=torch.bfloat16), torch.zeros(2 * 64, dtype=torch.long)
    number = 2 * 65 * 4096
    with LiveBytes() as bytes_of:
        logits = head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 4096), labels)
        computing, bytes_of.peak = bytes_of.peak / number, 0
        loss.backward()
    planned_bytes = LOSSES["bf16"](LossSizes(tokens=2 * 65, vocab_size=4096, hidden_size=8))
    assert (computing, bytes_of.peak / number) == pytest.approx([each / number for each in planned_bytes], rel=0.03)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_earlier_trainers_of_methods_hold_what_is_planned_per_logit_of_a_completion(rows: int) -> None:
    """TRL 0.17's `_get_per_token_logps`, which ms-swift has too: 32 of 65 tokens are scored."""
    hidden = torch.zeros(rows, 65, 8, dtype=torch.bfloat16, requires_grad=True)
    head, labels = torch.nn.Linear(8, 4096, bias=False, dtype=torch.bfloat16), torch.zeros(rows, 32, 1).long()
    number = rows * 32 * 4096
    with LiveBytes() as bytes_of:
        logits = head(hidden[:, -33:])[:, :-1] / 0.9
        scores = torch.stack([row.log_softmax(-1).gather(1, label) for row, label in zip(logits, labels, strict=True)])
        kept = bytes_of.live / number
        del logits
        bytes_of.peak = 0
        scores.sum().backward()
    sizes = LossSizes(tokens=rows * 65, vocab_size=4096, hidden_size=8, scored=rows * 32, rows=rows, output_bytes=2)
    planned_bytes = [each / number for each in LOSSES["completions"](sizes)]
    assert (kept, bytes_of.peak / number) == pytest.approx(planned_bytes, rel=0.05)


def test_a_method_of_an_earlier_trl_makes_logits() -> None:
    """fp32 of all tokens in 2024, of what is scored in 2025; today of none, and ms-swift's GRPO as then."""
    job: dict[str, Any] = {"max_seq_length": 4096, "activation_checkpointing": True, "method": "grpo", "vllm": "server"}

    def logits(**options: Any) -> int:
        phases = planned("zero3", 8, **({"program": "trl", "max_completion_length": 2048} | job | options)).phases
        return next(phase.logits_bytes for phase in phases if phase.phase == "forward")

    number = 4096 * 128256
    assert logits(loss="full") == logits(program="ms-swift") == 2 * number  # half of the tokens, 4 bytes each
    assert logits() < number / 4
    of_2024 = {"method": "dpo", "loss": "upcast", "vllm": None, "max_completion_length": None}
    assert logits(**of_2024) >= 2 * 8 * number


def test_accelerates_file_has_deepspeeds_own_buckets() -> None:
    """A bucket of 5e8 elements of bf16 and its copy, where `auto` has hidden x hidden."""
    trl, others = (planned("zero3", 8, program=program, loss="full") for program in ("trl", "llama-factory"))
    more = trl.phases[-1].buffer_bytes - others.phases[-1].buffer_bytes
    assert more == 2 * (500_000_000 - 4096**2)


def test_fsdp1_with_offload_loads_no_whole_4bit_model() -> None:
    """peft's guide trains Llama 2 70B on two GPUs of 24 GB, of which 19.6 are used."""
    job: dict[str, Any] = {"lora_r": 8, "load_in_4bit": True, "program": "trl", "sharded_4bit": True, "fsdp1": True}
    loads = {name: planned(name, 2, **job).phases[0].allocated_bytes for name in ("fsdp2", "fsdp2_cpu_offload")}
    assert loads["fsdp2_cpu_offload"] < loads["fsdp2"] / 2


def test_preference_jobs_of_llama_factory_and_ms_swift_have_logits_and_trls_have_none() -> None:
    job: dict[str, Any] = {"method": "dpo", "max_seq_length": 4096, "activation_checkpointing": True}
    logits = {name: planned("zero3", 8, program=name, **job).peak.logits_bytes for name in PROGRAMS}
    number = 2 * 4096 * 128256
    # while the reference scores, beside those of the policy
    assert logits["llama-factory"] == 16 * number
    assert logits["ms-swift"] == 4 * number
    assert max(logits["trl"], logits["toolkit"]) < number


def test_a_job_of_another_program_fits_up_to_the_share_of_a_gpu_that_its_group_of_public_jobs_earns() -> None:
    for preset, ranks, share in (("zero3", 8, 0.80), ("ddp", 8, 0.65), ("single", 1, 0.65)):
        other = planned(preset, ranks, program="ms-swift")
        assert other.possible_peak_bytes == pytest.approx(other.planned_peak_bytes / share)
    fsdp1 = planned("fsdp2", 8, fsdp1=True, save_on_gpu=False)
    assert fsdp1.possible_peak_bytes == pytest.approx(fsdp1.planned_peak_bytes / 0.65)


@pytest.mark.parametrize(
    ("preset", "options", "group"),
    [
        ("zero3_cpu_offload", {}, "with offload"),
        ("fsdp2", {}, "under FSDP2"),
        ("single", {"method": "dpo", "lora_r": 8}, "with dpo"),
    ],
)
def test_a_job_of_another_program_whose_group_tells_nothing_is_too_close_on_any_gpu(
    preset: str, options: dict[str, Any], group: str
) -> None:
    ours, theirs = (planned(preset, 8, program=program, **options) for program in (None, "llama-factory"))
    assert theirs.possible_peak_bytes is None
    assert f"llama-factory {group}" in theirs.margin.reason
    assert [memory_verdict(plan, memory_bytes=2**50) for plan in (ours, theirs)] == ["fits", "too_close"]


def test_a_job_of_another_program_does_not_fit_only_where_its_reading_with_least_memory_does_not() -> None:
    """Half the rows, Unsloth's checkpoints on the host, sharded gradients, and 15 % less than planned."""
    job = {"max_seq_length": 16384, "lora_r": 8, "activation_checkpointing": True, "program": "unsloth"}
    options = PlanOptions(per_device_train_batch_size=1, gradient_accumulation_steps=8, **job)
    cut, full = (PlannedJob.from_options(options, full_length=full) for full in (False, True))
    plans = [plan_memory(llama_8b(), load_preset("single"), world_size=1, job=each) for each in (cut, full)]
    memory = plans[0].lowest_peak_bytes
    assert memory < plans[1].lowest_peak_bytes < plans[1].least_peak_bytes
    assert [memory_verdict(plan, memory_bytes=memory) for plan in plans] == ["too_close", "does_not_fit"]
    assert memory_verdict(plans[0], memory_bytes=memory - 1) == "does_not_fit"
    least = cut.least_reading()
    assert (least.max_seq_length, least.activation_checkpointing_offload) == (8192, True)
    assert full.least_reading().max_seq_length == 16384
    waiting = {"program": "trainer", "gradient_accumulation_steps": 8, "pure_bf16": False}
    whole = planned("fsdp2", 8, **waiting)
    assert whole.lowest_peak_bytes < planned("fsdp2", 8, **waiting, accumulate="sharded").least_peak_bytes


def test_a_node_that_lacks_only_page_locked_memory_is_too_close_for_another_programs_job() -> None:
    """20 bytes per parameter: master weights, AdamW's states, gradients in fp32 and fp16, and flat parameters."""
    ours, theirs = (planned("zero3_cpu_offload", 1, program=program) for program in (None, "trainer"))
    least = theirs.least_host_bytes
    assert least == pytest.approx(20 * LLAMA_8B_PARAMS, rel=0.01)
    verdicts = [memory_verdict(plan, memory_bytes=2**50, host_bytes=least) for plan in (ours, theirs)]
    assert verdicts == ["does_not_fit", "too_close"]
    assert memory_verdict(theirs, memory_bytes=2**50, host_bytes=least - 1) == "does_not_fit"


def test_a_plan_above_the_gpu_that_may_fit_all_the_same_says_from_what_it_is_possible(capsys: Any) -> None:
    words = "Llama-2-7b-hf --program trainer --gpu rtx-3090 --num-processes 1 --preset single --lora-r 8"
    job = "--per-device-train-batch-size 4 --max-seq-length 1024 --no-activation-checkpointing"
    said = [run_command(["plan", *words.split(), *job.split(), *more], capsys)[1] for more in ([], ["--equal-lengths"])]
    assert "GiB planned, from " in said[0].splitlines()[0]
    assert "with shorter rows, unless `--equal-lengths`" in said[0]
    assert said[0].startswith("too close")
    assert said[1].startswith("does not fit")


def test_expandable_segments_save_nothing_in_the_step_under_deepspeed() -> None:
    plans = [planned("zero3", 8, expandable_segments=expandable) for expandable in (False, True)]
    reserved = [plan.overhead_bytes - plan.driver_bytes for plan in plans]
    assert reserved[1] > 0.05 * plans[1].phases[-1].allocated_bytes
    assert reserved[0] > reserved[1]


ALPACA = {"fsdp1": True, "loss": "upcast", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}


def test_fsdp_gathers_fp32_weights_on_each_gpu_to_save_them_unless_told_otherwise() -> None:
    """stanford_alpaca#65: 35.54 GiB allocated on one of 8 A100s, and 502 MiB of the head still to be cloned."""
    job = {"max_seq_length": 512, "activation_checkpointing": False, "attn_implementation": "eager", **ALPACA}
    llama = read_model("Llama-2-7b-hf")
    plans = [
        plan_memory(llama, load_preset("fsdp2"), world_size=8, job=PlannedJob.from_options(options, full_length=False))
        for options in (PlanOptions(**job, save_on_gpu=True), PlanOptions(**job, save_on_gpu=False), PlanOptions(**job))
    ]
    on_gpu, on_host, not_said = plans
    assert on_gpu.peak.phase == "save"
    assert on_gpu.peak.allocated_bytes / GIB == pytest.approx(35.54 + 502 / 1024, rel=0.02)
    assert [phase.phase for phase in on_host.phases][-1] == "step"
    assert on_host.planned_peak_bytes == not_said.planned_peak_bytes
    assert not_said.other == (on_gpu.planned_peak_bytes, "--no-save-on-gpu")


def test_gradients_of_other_programs_wait_whole_between_accumulation_steps_under_fsdp() -> None:
    """The Trainer runs all but the last of these steps under accelerate's `no_sync`; the toolkit does not."""
    ours = planned("fsdp2", 8, gradient_accumulation_steps=8)
    for program in ({"program": "trainer", "pure_bf16": False}, {"fsdp1": True, "save_on_gpu": False}):
        theirs = planned("fsdp2", 8, gradient_accumulation_steps=8, **program)
        root = 2 * 128_256 * 4096 if "fsdp1" in program else 0  # FSDP1's has the embedding too
        more = _of(theirs, "forward").buffer_bytes - _of(ours, "forward").buffer_bytes
        assert more == 2 * LLAMA_8B_PARAMS + root
        one_step = planned("fsdp2", 8, gradient_accumulation_steps=1, **program)
        assert _of(one_step, "forward").buffer_bytes == _of(ours, "forward").buffer_bytes + root
        assert (
            planned("fsdp2", 8, gradient_accumulation_steps=8, accumulate="sharded", **program).phases != theirs.phases
        )


def _of(plan: MemoryPlan, name: str) -> PhaseMemory:
    return next(phase for phase in plan.phases if phase.phase == name)


def test_zero3_gathers_all_weights_at_once_to_merge_adapters_for_vllm() -> None:
    options = {"method": "grpo", "vllm": "server", "num_generations": 8}
    full, adapters = (_of(planned("zero3", 8, lora_r=r, **options), "generate") for r in (None, 8))
    assert adapters.buffer_bytes - full.buffer_bytes == pytest.approx(2 * LLAMA_8B_PARAMS, rel=0.01)


@pytest.mark.parametrize(
    ("job", "option"),
    [
        (
            f"{LLAMA_8B_CONFIG} --program trl --lora-r 8 --max-seq-length 16384 --gpu a100-80gb --num-processes 1 "
            "--preset single",
            "--attn-implementation sdpa",
        ),
        (
            "Llama-3.1-70B --program ms-swift --lora-r 8 --attn-implementation sdpa --gpu h100 --num-processes 16 "
            "--preset zero3",
            "--zero3-init",
        ),
    ],
)
def test_what_fits_in_one_reading_of_a_job_alone_is_too_close_and_names_the_option_that_decides(
    job: str, option: str, capsys: Any
) -> None:
    words = ["plan", *job.split(), "--activation-checkpointing", "--per-device-train-batch-size", "1"]
    said = run_command(words, capsys)[1]
    assert said.startswith("too close to call")
    assert f"unless `{option}`" in said
    assert f"it fits with `{option}`" in said
    assert run_command([*words, *option.split()], capsys)[1].startswith("fits on")


def test_eager_attention_is_planned_where_there_are_formulas_and_else_said_to_be_missing(capsys: Any) -> None:
    words = "--gpu h100 --num-processes 1 --preset single --per-device-train-batch-size 1 --attn-implementation eager"
    said = [
        run_command(["plan", model, *words.split()], capsys)[1] for model in ("zai-org/glm-4-9b-hf", "Llama-2-7b-hf")
    ]
    assert ["what eager attention saves" in text for text in said] == [True, False]


def test_a_long_row_that_is_refused_names_the_offload_that_fits_when_typed(capsys: Any) -> None:
    words = ["plan", "Qwen/Qwen3-8B", "--gpu", "h100", "--preset", "cp", "--cp", "8", "--num-processes", "8"]
    words += ["--max-seq-length", "1048576"]
    first = run_command(words, capsys)[1].splitlines()[0]
    named = "--activation-checkpointing --activation-checkpointing-offload"
    assert first.startswith("does not fit")
    assert f"it fits with `{named}`" in first
    assert run_command([*words, *named.split()], capsys)[1].startswith("fits")
