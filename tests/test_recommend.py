"""What is recommended as GPUs get smaller, why, and what is refused.

python tests/test_recommend.py    # writes the table of docs/recommend.md again
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, toolkit
from test_house import HEAVY, loaded_after

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu, gpu_by_hand
from toolkit.models.read import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.candidates import Ask, candidates, largest
from toolkit.plan.job import Job
from toolkit.plan.recommend import NO_DIFFERENCE, Recommendation, recommend
from toolkit.plan.recommend_door import Hardware, make_ask
from toolkit.plan.recommendation import as_json, compare_command, dollars_per_million_tokens, train_command
from toolkit.plan.recommendation_text import lines_of
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB

H100 = find_gpu("h100-sxm")
DOCS = Path(__file__).parent.parent / "docs" / "recommend.md"
MEMORIES = (400, 200, 180, 150, 100, 70, 60, 50, 45, 40, 36, 28, 24, 20, 10)
BLOCK = ("<!-- generated: by memory -->\n", "<!-- /generated -->")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(LLAMA_8B_CONFIG.parent, tmp_path_factory.mktemp("models") / "llama-8b")


@pytest.fixture(scope="module")
def shape(model: Path) -> ModelShape:
    return read_model(str(model))


def ask(shape: ModelShape, *, memory_gib: float = 79.14, **changes: Any) -> Ask:
    gpu = gpu_by_hand(H100, memory_gib=memory_gib)
    asked = Ask(shape=shape, gpu=gpu, world_size=8, global_batch_size=64, job=Job(max_seq_length=2048))
    return replace(asked, **changes)


def found(asked: Ask, wish: str = "fastest") -> Recommendation:
    return recommend(asked, list_presets(), wish=wish)


def by_memory(shape: ModelShape) -> str:
    """The table of the docs: what is recommended, what the rule of thumb says, and what that would cost."""
    lines = ["| GiB a GPU | recommended | the rule | what the rule would cost |", "| ---: | :--- | :--- | :--- |"]
    for memory_gib in MEMORIES:
        answer = found(ask(shape, memory_gib=memory_gib))
        job, thumb = answer.choice.job, answer.rule_of_thumb
        recomputes = ", recomputing" if job.activation_checkpointing else ""
        cost = "" if thumb == answer.choice.preset.name else answer.why_not[thumb]
        chosen = f"`{answer.choice.preset.name}`, micro-batch {job.per_device_train_batch_size}{recomputes}"
        lines.append(f"| {memory_gib} | {chosen} | `{thumb}` | {cost} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_the_docs_is_what_is_recommended(shape: ModelShape) -> None:
    block = DOCS.read_text().split(BLOCK[0])[1].split(BLOCK[1])[0]
    assert block == by_memory(shape), "write it again: python tests/test_recommend.py"


@pytest.mark.parametrize(
    ("memory_gib", "expected"),
    [(400, {"ddp"}), (200, {"ddp"}), (120, {"zero1"}), (36, {"zero3", "fsdp2"}), (16, {"zero3_cpu_offload"})],
)
def test_the_rule_of_thumb_where_it_is_right(shape: ModelShape, memory_gib: float, expected: set[str]) -> None:
    """Fits: replicate. The optimizer does not: shard it. Nothing does: shard all. Not even so: offload."""
    answer = found(ask(shape, memory_gib=memory_gib))
    assert answer.choice.preset.name in expected
    assert answer.rule_of_thumb in expected


def test_where_it_differs_from_the_rule_of_thumb_it_says_by_how_much(shape: ModelShape) -> None:
    differing = 0
    for memory_gib in (400, 300, 200, 180, 150, 100, 79, 60, 50, 45, 40, 36, 24, 16):
        answer = found(ask(shape, memory_gib=memory_gib))
        if answer.choice.preset.name == answer.rule_of_thumb:
            continue
        differing += 1
        (said,) = [reason for reason in answer.reasons if "rule of thumb" in reason]
        assert answer.rule_of_thumb in said
        assert "times the seconds" in said
        thumb = next(one for one in candidates(ask(shape, memory_gib=memory_gib), [load_preset(answer.rule_of_thumb)]))
        assert max(thumb.times(answer.choice)) > NO_DIFFERENCE
    assert 0 < differing < 7


def test_barely_is_zero2_for_the_thumb_and_full_sharding_for_the_numbers(shape: ModelShape) -> None:
    """At 45 GiB gradients must be shared. ZeRO-2 all-reduces them in every micro-step, so sharding all is faster."""
    answer = found(ask(shape, memory_gib=45))
    assert answer.rule_of_thumb == "zero2"
    assert "parameter" in answer.choice.preset.sharded_parts
    assert answer.why_not["zero2"].startswith("1.")


def test_the_largest_micro_batch_that_fits_is_taken(shape: ModelShape) -> None:
    asked = ask(shape)
    one = largest(asked, load_preset("fsdp2"), checkpointing=True)
    size = one.job.per_device_train_batch_size
    assert one.fits
    assert size * one.job.gradient_accumulation_steps == 8
    assert size == 8 or not largest(replace(asked, global_batch_size=8 * 2 * size), one.preset, checkpointing=True).fits


def test_what_cannot_be_is_named_with_its_reason(shape: ModelShape) -> None:
    why_not = found(ask(shape)).why_not
    assert why_not["single"] == "trains in one process"
    assert why_not["zero3_nvme_offload"].startswith("needs a local NVMe disk")
    assert "another problem" in why_not["zeropp"]
    assert why_not["ddp"].startswith("does not fit: ")
    assert "GiB of 79.14 GiB (micro-batch 1" in why_not["ddp"]
    names = {preset.name for preset in list_presets()}
    assert names - why_not.keys() == {found(ask(shape)).choice.preset.name}


def test_least_memory_is_another_wish(shape: ModelShape) -> None:
    answer = found(ask(shape), wish="least-memory")
    peaks = [one.memory.planned_peak_bytes for one in candidates(ask(shape), list_presets()) if one.fits]
    assert answer.choice.memory.planned_peak_bytes == min(peaks)


def test_one_gpu_gets_the_preset_without_ranks(shape: ModelShape) -> None:
    assert found(ask(shape, memory_gib=200, world_size=1)).choice.preset.name == "single"


def test_adapters_of_a_model_that_fits_are_trained_replicated(shape: ModelShape) -> None:
    asked = ask(shape, job=Job(max_seq_length=2048, lora_r=16))
    assert found(asked).choice.preset.name == "ddp"


def test_4_bit_weights_are_neither_sharded_nor_offloaded(shape: ModelShape) -> None:
    asked = ask(shape, memory_gib=24, job=Job(max_seq_length=1024, lora_r=16, load_in_4bit=True))
    answer = found(asked)
    assert answer.choice.preset.sharded_parts in ((), ("optimizer",), ("gradient", "optimizer"))
    assert answer.why_not["fsdp2"] == "does not shard or offload 4-bit weights"


def test_nothing_fits_names_the_smallest_and_the_way_out(shape: ModelShape) -> None:
    presets = [load_preset("fsdp2"), load_preset("zero3")]
    with pytest.raises(
        ToolkitError, match=r"nothing fits on 8 × h100-sxm.*does not fit: .* GiB of 20.00 GiB"
    ) as refused:
        recommend(ask(shape, memory_gib=20), presets)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("`--world-size ")
    with pytest.raises(ToolkitError, match="nothing fits") as refused:
        recommend(ask(shape, memory_gib=2), presets)
    assert refused.value.hint == "`--lora-r 16`, a shorter `--max-seq-length`, or a larger GPU"


def test_a_host_that_is_too_small_rules_offload_out(shape: ModelShape) -> None:
    asked = ask(shape, memory_gib=24, host_memory_bytes=64 * GIB)
    with pytest.raises(ToolkitError, match="nothing fits"):
        recommend(asked, [load_preset("zero3_cpu_offload")])
    assert (
        "of host memory a machine, which has 64.00 GiB" in found(replace(asked, gpu=H100)).why_not["zero3_cpu_offload"]
    )


def test_offload_names_the_host_memory_that_nobody_gave(shape: ModelShape) -> None:
    said = found(ask(shape, memory_gib=16)).reasons
    assert any("--host-memory-gib" in reason for reason in said)
    assert not any("--host-memory-gib" in reason for reason in found(ask(shape)).reasons)


def test_a_gpu_without_bf16_has_no_preset(shape: ModelShape) -> None:
    with pytest.raises(ToolkitError, match=r"no preset is for 8 × v100-32gb: .*has no units"):
        recommend(ask(shape, gpu=find_gpu("v100-32gb")), [load_preset("ddp")])


def test_without_a_peak_the_least_sharding_that_fits_is_chosen_and_no_speed_is_claimed(shape: ModelShape) -> None:
    answer = found(ask(shape, gpu=gpu_by_hand(None, memory_gib=80)))
    assert answer.choice.preset.name == "zero1"
    assert answer.choice.speed is None
    assert answer.why_not["zero2"].startswith("fits too, and shards or offloads more: ")
    assert any("--gpu-tflops" in line for line in lines_of(answer, ask(shape), model="m"))


def test_the_global_batch_must_be_divisible(shape: ModelShape) -> None:
    with pytest.raises(ToolkitError, match="--global-batch-size 30 is not divisible by 8 GPUs") as refused:
        ask(shape, global_batch_size=30)
    assert refused.value.hint == "`--global-batch-size 32`"
    with pytest.raises(ToolkitError, match="--global-batch-size is 0, expected 1 or more"):
        make_ask(shape, Hardware(gpu="h100", world_size=8), Job(), 0)
    with pytest.raises(ToolkitError, match="--network-gb-per-second is -1, expected more than 0"):
        make_ask(shape, Hardware(gpu="h100", world_size=8, network_gb_per_second=-1), Job(), None)


def test_the_default_batch_is_32_or_the_next_multiple_of_the_gpus(shape: ModelShape) -> None:
    assert make_ask(shape, Hardware(gpu="h100", world_size=8), Job(), None).global_batch_size == 32
    assert make_ask(shape, Hardware(gpu="h100", world_size=24), Job(), None).global_batch_size == 48


def test_dollars_come_from_tokens_and_hours(shape: ModelShape) -> None:
    speed = found(ask(shape)).choice.speed
    assert speed is not None
    cheap, dear = dollars_per_million_tokens(3.6, speed) or (0.0, 0.0)
    slow, fast = speed.tokens_per_second_per_gpu
    assert (cheap, dear) == pytest.approx((1000 / fast, 1000 / slow))
    assert dollars_per_million_tokens(None, speed) is None


def test_the_commands_say_what_was_planned(shape: ModelShape, model: Path) -> None:
    asked = ask(shape, memory_gib=45)
    answer = found(asked)
    words = shlex.split(train_command(answer.choice, asked, str(model / "config.json")))
    job = answer.choice.job
    assert words[:6] == ["toolkit", "train", "--preset", answer.choice.preset.name, "--num-processes", "8"]
    assert words[words.index("--model_name_or_path") + 1] == str(model)
    assert words[words.index("--per_device_train_batch_size") + 1] == str(job.per_device_train_batch_size)
    assert ("--activation_checkpointing" in words) == job.activation_checkpointing
    compared = compare_command([answer.choice, *answer.others], asked, str(model))
    assert compared is not None
    assert compared.count("--preset ") == 3


def test_several_machines_are_launched_by_accelerate(shape: ModelShape) -> None:
    asked = ask(shape, world_size=32, network_bytes_per_second=50 * 10**9)
    (hybrid,) = candidates(asked, [load_preset("fsdp2_hybrid")])
    command = train_command(hybrid, asked, "org/model")
    assert "--num_machines 4 " in command
    assert "--parallelism_config_dp_shard_size 16 " in command
    assert compare_command([hybrid], asked, "org/model") is None


def test_programs_get_numbers(shape: ModelShape) -> None:
    asked = ask(shape)
    answer = json.loads(json.dumps(as_json(found(asked), asked, model="m", wish="fastest", price=2.0)))
    assert answer["choice"]["planned_peak_bytes"] + answer["choice"]["headroom_bytes"] == asked.gpu.memory_bytes
    assert len(answer["choice"]["step_seconds"]) == 2
    assert [other["preset"] for other in answer["others"]] == list(dict.fromkeys(o["preset"] for o in answer["others"]))
    assert all(other["why_not"] for other in answer["others"])
    assert [point["world_size"] for point in answer["scaling"]] == [8, 16, 32, 64, 128, 256, 512, 1024]


def test_the_printed_command_is_accepted_up_to_the_data_that_it_leaves_open(model: Path) -> None:
    (model / "model.safetensors").touch()
    asked = toolkit("recommend", str(model), "--gpu", "h100", "--world-size", "2", "--lora-r", "8", "--json")
    assert asked.returncode == 0, asked.stderr
    words = shlex.split(json.loads(asked.stdout)["command"])
    refused = toolkit(*words[1:4], "--cpu", *words[4:])
    assert refused.returncode == 2
    assert "DATASET" in refused.stderr


def test_the_command_line_answers_without_torch(model: Path, tmp_path: Path) -> None:
    words = ["recommend", str(model), "--gpu", "h100", "--world-size", "8", "--scaling"]
    assert not loaded_after(f"import toolkit.cli; toolkit.cli.main({words!r})", cwd=tmp_path) & HEAVY
    refused = toolkit("recommend", str(model), "--gpu", "h100", "--world-size", "8", "--wish", "cheapest")
    assert refused.returncode == 2
    assert "--wish is 'cheapest', expected fastest or least-memory" in refused.stderr


if __name__ == "__main__":
    head, _, rest = DOCS.read_text().partition(BLOCK[0])
    table = by_memory(read_model(str(LLAMA_8B_CONFIG)))
    DOCS.write_text(head + BLOCK[0] + table + BLOCK[1] + rest.partition(BLOCK[1])[2])
