"""Planned memory of DPO, KTO, ORPO, SimPO, reward models, GRPO and RLOO, against TRL's defaults."""

import ast
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from launching import LLAMA_8B_CONFIG, ROOT, SCRIPTS, accelerate_launch, nightly, read, succeeded
from model_configs import LLAMA, NUM_PARAMS

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import llama_shape
from toolkit.models.read_model import read_model
from toolkit.plan.logits import LOSSES, TILE_TOKENS, TILE_VOCABULARY, LossSizes
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.method_advice import method_advice
from toolkit.plan.methods import METHODS, Method, check_generations, check_method, not_planned
from toolkit.plan.phases import PhaseMemory
from toolkit.plan.planned_job import PlannedJob, check_planned_job
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB


def job_of(**given: Any) -> PlannedJob:
    """Two rows of 64 tokens."""
    settings = {name: given.pop(name) for name in list(given) if name in Method.__dataclass_fields__}
    sizes = {"per_device_train_batch_size": 2, "max_seq_length": 64, "lengths_differ": False}
    return PlannedJob(method=Method(**settings), **sizes, **given)


def planned(preset: str = "single", world_size: int = 1, **given: Any) -> MemoryPlan:
    return plan_memory(tiny(), load_preset(preset), world_size=world_size, job=job_of(**given))


@cache
def tiny() -> Any:
    return llama_shape("llama", ConfigFields(LLAMA, "config.json"))


def phase(plan: MemoryPlan, name: str) -> PhaseMemory:
    return next(each for each in plan.phases if each.phase == name)


def trl_folder() -> Path:
    found = find_spec("trl")
    return Path(str(found.origin)).parent


@cache
def trl_defaults(module: str) -> dict[str, Any]:
    """Defaults of a configuration's fields, read from its source: importing it takes seconds."""
    tree = ast.parse((trl_folder() / module).read_text())
    defaults: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and isinstance(node.target, ast.Name):
            for keyword in node.value.keywords:
                if keyword.arg == "default":
                    defaults[node.target.id] = ast.literal_eval(keyword.value)
    return defaults


# -- what TRL does, as far as its source says it in one place


@pytest.mark.parametrize("method", ["dpo", "kto", "grpo", "rloo"])
def test_beta_generation_and_precomputing_have_the_defaults_of_trl(method: str) -> None:
    defaults = trl_defaults(f"trainer/{method}_config.py")
    assert METHODS[method].beta == defaults["beta"]
    if method in ("dpo", "kto"):
        assert not defaults["precompute_ref_log_probs"]
        return
    assert METHODS[method].num_generations == defaults["num_generations"]
    assert (defaults["use_vllm"], defaults["vllm_mode"]) == (False, "colocate")
    assert (defaults["vllm_gpu_memory_utilization"], defaults["vllm_enable_sleep_mode"]) == (0.3, False)
    assert defaults["ds3_gather_for_generation"] is True


def test_tiles_of_logits_have_the_size_of_trls() -> None:
    folder = trl_folder()
    assert f"TOKEN_CHUNK_SIZE = {TILE_TOKENS}\n" in (folder / "kernels" / "chunked_logprob.py").read_text()
    assert f"_CHUNKED_LOGPROB_CHUNK_SIZE = {TILE_VOCABULARY}\n" in (folder / "trainer" / "utils.py").read_text()


@pytest.mark.parametrize(
    ("preset", "ranks", "expected"),
    [
        ("single", 1, 4 * NUM_PARAMS),
        ("ddp", 4, 4 * NUM_PARAMS),
        ("zero1", 4, 2 * NUM_PARAMS),
        ("zero2", 4, 2 * NUM_PARAMS),
        # all of its tensors are below DeepSpeed's default threshold, so each is whole beside its shard
        ("zero3", 4, 2 * (NUM_PARAMS // 4) + 2 * NUM_PARAMS),
        # 253 of 1009 rows of embedding and head, a quarter of the rest
        ("fsdp2", 4, 4 * (NUM_PARAMS // 4 + 2 * (253 * 4 - 1009) * 64 // 4)),
    ],
)
def test_a_reference_is_whole_under_ddp_and_zero2_and_sharded_under_zero3_and_fsdp2(
    preset: str, ranks: int, expected: int
) -> None:
    assert phase(planned(preset, ranks, method="dpo"), "step").reference_bytes == expected


PRECOMPUTED = {"method": "dpo", "precompute_ref_log_probs": True}


@pytest.mark.parametrize("given", [{"method": "dpo", "beta": 0.0}, {"method": "grpo", "beta": 0.1}, {"method": "rloo"}])
def test_a_reference_is_held_wherever_its_scores_are_used_and_nowhere_else(given: dict[str, Any]) -> None:
    assert phase(planned(**given), "step").reference_bytes == 4 * NUM_PARAMS
    of_methods: list[dict[str, Any]] = [{"method": name} for name in ("sft", "orpo", "reward", "grpo")]
    for none in (*of_methods, {"method": "dpo", "lora_r": 4}, PRECOMPUTED, {"method": "rloo", "beta": 0.0}):
        assert phase(planned(**none), "step").reference_bytes == 0, none


def test_a_bf16_reference_is_half_as_large_and_autocast_copies_none_of_it() -> None:
    whole, half = (phase(planned(method="dpo", ref_dtype=dtype), "score") for dtype in (None, "bfloat16"))
    assert whole.reference_bytes == 2 * half.reference_bytes
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    assert whole.buffer_bytes - half.buffer_bytes == 2 * linear


def test_fsdp2_gathers_a_reference_as_one_unit() -> None:
    score = phase(planned("fsdp2", 4, method="dpo"), "score")
    assert score.buffer_bytes >= 2 * 2 * NUM_PARAMS


def test_a_preference_pair_is_two_rows() -> None:
    rows = {name: PlannedJob(method=Method(method=name), per_device_train_batch_size=2).rows for name in METHODS}
    pairs = dict.fromkeys(("dpo", "orpo", "simpo", "reward"), 4)
    assert rows == dict.fromkeys(("sft", "kto", "grpo", "rloo"), 2) | pairs


@pytest.mark.parametrize(
    ("loss", "autocast", "expected"),
    [("orpo", True, (8, 12)), ("orpo", False, (4, 6)), ("simpo", True, (6, 8)), ("simpo", False, (2, 4))],
)
def test_orpo_and_simpo_hold_these_bytes_per_token_and_vocabulary_entry(
    loss: str, autocast: bool, expected: tuple[int, int]
) -> None:
    """Slopes of traced peaks (docs/evidence/plan-accuracy.md)."""
    output = 4 if autocast else 2
    found = LOSSES[loss](LossSizes(tokens=10, vocab_size=7, hidden_size=3, output_bytes=output))
    assert found == tuple(10 * 7 * each for each in expected)


def test_log_probabilities_need_no_logits_of_prompts() -> None:
    """Rows of hidden states of the scored tokens, and their fp32 gradient: nothing grows with the vocabulary."""
    sizes = LossSizes(tokens=8192, vocab_size=50_000, hidden_size=64)
    more, fewer = (LOSSES["log_probs"](replace(sizes, scored=scored))[1] for scored in (8192, 4096))
    assert more - fewer == 4096 * 64 * (2 + 4 + 2)


def test_colocated_vllm_is_there_in_every_phase_unless_it_sleeps() -> None:
    on_gpu = {"method": "grpo", "vllm": "colocate", "gpu_memory_bytes": 10 * GIB, "max_completion_length": 32}
    awake, asleep = (planned(**on_gpu, vllm_enable_sleep_mode=sleeps) for sleeps in (False, True))
    assert [phase(awake, name).generation_bytes for name in ("generate", "backward")] == [3 * GIB, 3 * GIB]
    assert [phase(asleep, name).generation_bytes for name in ("generate", "backward")] == [3 * GIB, 0]
    assert phase(planned(**on_gpu | {"vllm": "server"}), "generate").generation_bytes == 0


def test_zero3_gathers_all_weights_to_generate() -> None:
    assert phase(planned("zero3", 4, method="grpo"), "generate").buffer_bytes >= 2 * NUM_PARAMS


def test_precomputing_is_a_phase_before_the_optimizer_exists() -> None:
    before = phase(planned("zero2", 4, method="dpo", precompute_ref_log_probs=True), "precompute")
    assert (before.parameter_bytes, before.optimizer_bytes, before.gradient_bytes) == (2 * NUM_PARAMS, 0, 0)


def advice(preset: str, ranks: int, **given: Any) -> str:
    plan, job = planned(preset, ranks, **given), job_of(**given)
    return "\n".join(method_advice(tiny(), load_preset(preset), world_size=ranks, job=job, memory=plan))


def test_precomputing_is_advised_for_full_fine_tuning_and_not_for_adapters() -> None:
    assert "`--precompute-ref-log-probs` lowers the peak by" in advice("zero2", 4, method="dpo")
    assert "precomputing saves no memory" in advice("zero2", 4, method="dpo", lora_r=4)
    assert "saves no memory with adapters" in advice("zero2", 4, method="dpo", lora_r=4, precompute_ref_log_probs=True)


def test_zero3_is_advised_where_fsdp2_gathers_the_reference() -> None:
    assert "`--preset zero3`" in advice("fsdp2", 4, method="dpo")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"method": "dop"}, "did you mean `dpo`?"),
        ({"method": "sft", "beta": 0.1}, "leave it out, or `--method dpo`"),
        ({"method": "orpo", "precompute_ref_log_probs": True}, "leave it out, or `--method dpo`"),
        ({"method": "dpo", "vllm": "colocate"}, "leave it out, or `--method grpo`"),
        ({"method": "grpo", "vllm_gpu_memory_utilization": 0.5}, "add `--vllm colocate`"),
        ({"method": "grpo", "vllm": "server", "vllm_enable_sleep_mode": True}, "add `--vllm colocate`"),
        (
            {"method": "grpo", "vllm": "colocate", "vllm_gpu_memory_utilization": 1.0},
            "`--vllm-gpu-memory-utilization 0.3`, TRL's default",
        ),
        ({"method": "grpo", "max_completion_length": 64}, "`--max-seq-length 128`"),
    ],
)
def test_settings_of_another_method_and_contradictions_are_refused(given: dict[str, Any], hint: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        check_method(Method(**given), rows=2, row_tokens=64, lora=False)
    assert refused.value.hint == hint


def test_a_loss_of_earlier_trl_is_refused_where_it_changes_nothing() -> None:
    job = PlannedJob(method=Method(method="reward"), per_device_train_batch_size=2, max_seq_length=64, loss="full")
    with pytest.raises(ToolkitError, match="reward has a loss of its own"):
        check_planned_job(job, tiny())


def test_kto_needs_two_rows_and_generations_need_whole_groups() -> None:
    with pytest.raises(ToolkitError) as refused:
        check_method(Method(method="kto"), rows=1, row_tokens=64, lora=False)
    assert refused.value.hint == "`--per-device-train-batch-size 2`"
    with pytest.raises(ToolkitError) as refused:
        check_generations(Method(method="grpo"), 12, num_processes=1)
    assert refused.value.hint == "`--num-generations 6`"
    with pytest.raises(ToolkitError) as refused:
        check_generations(Method(method="grpo", num_generations=7), 64, num_processes=8)
    assert "or `--num-processes 7` where vLLM has a GPU of its own" in str(refused.value.hint)


def test_every_preset_of_data_parallelism_is_planned() -> None:
    refused = {preset.name for preset in list_presets() if not_planned(Method(method="dpo"), preset)}
    assert refused == {preset.name for preset in list_presets() if preset.parallel or preset.engine == "pipeline"}


def test_dpo_is_planned_with_its_phases_and_recommended_with_trls_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    words = [LLAMA_8B_CONFIG, "--gpu", "h100", "--num-processes", "8", "--method", "dpo"]
    code, shown, _ = run_command(["plan", *words, "--preset", "zero2", "--parts"], capsys)
    assert code == 0
    assert "the reference model takes 14.96 GiB, whole on each GPU" in shown
    assert "  score " in shown
    code, shown, _ = run_command(["recommend", *words], capsys)
    assert (code, "--module trl.scripts.dpo -- --model_name_or_path" in shown.replace(" \\\n   ", "")) == (0, True)


@pytest.mark.launch
@pytest.mark.parametrize("preset", nightly("ddp", "zero2", "zero3", "fsdp2"))
def test_real_ranks_hold_the_planned_reference_and_model_states(preset: str, tiny_model: Path, tmp_path: Path) -> None:
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    script = str(SCRIPTS / "dpo_with_reference.py")
    words = ["--output-dir", str(tmp_path / "run"), script, str(tiny_model), str(tmp_path)]
    succeeded(accelerate_launch(config, *words, module="toolkit.observe"))
    job = PlannedJob(method=Method(method="dpo"), per_device_train_batch_size=1, max_seq_length=32)
    shape = read_model(str(tiny_model / "config.json"))
    plan = plan_memory(shape, load_preset(preset), world_size=2, job=job)
    held = max(int(read(tmp_path / f"reference{rank}.json")) for rank in range(2))  # type: ignore[call-overload]
    assert held == phase(plan, "step").reference_bytes
    attested = read(tmp_path / "run" / "attestation.json")["ranks"][0]
    states = plan.states
    parts = {f"{part}_bytes": getattr(states, f"{part}_bytes") for part in ("parameter", "gradient", "optimizer")}
    assert {name: attested[name] for name in parts} == parts
