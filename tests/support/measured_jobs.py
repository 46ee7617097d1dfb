"""Published jobs with speed or memory (`fixtures/measured_speed.csv`, MosaicML's tables), as the planner takes them."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from published_runs import MPT, mpt

from toolkit.hardware.gpu_table import GIGA, find_gpu
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.shape import ModelShape
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import TrainingSetup
from toolkit.presets import load_preset

FIXTURES = Path(__file__).parents[1] / "fixtures"
# Width, MLP width, layers, heads, key and value heads, vocabulary, tied head. Qwen (1) is Qwen 2 without shared key and
# value heads; PowerLM is a Llama with scaled logits, CodeLlama-34B is the shape of fms-fsdp's 34B.
MODELS: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "Mistral-7B-v0.1": ("llama", 4096, 14336, 32, 32, 8, 32000, False),
    "Llama-2-7B": ("llama", 4096, 11008, 32, 32, 32, 32000, False),
    "Llama-2-13B": ("llama", 5120, 13824, 40, 40, 40, 32000, False),
    "Llama-2-34B": ("llama", 8192, 22016, 48, 64, 8, 32000, False),
    "Llama-2-70B": ("llama", 8192, 28672, 80, 64, 8, 32000, False),
    "Yi-34B-200K": ("llama", 7168, 20480, 60, 56, 8, 64000, False),
    "Llama-3-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Llama-3-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
    "PowerLM-3B": ("llama", 2304, 9216, 40, 36, 36, 49152, True),
    "Qwen-1.8B": ("qwen2", 2048, 5504, 24, 16, 16, 151936, False),
    "Qwen-14B": ("qwen2", 5120, 13696, 40, 40, 40, 152064, False),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064, False),
}
GPU_NAMES = {"A100-SXM-80GB": "a100-80gb", "H100-SXM-80GB": "h100", "H200": "h200", "B200": "b200"}
GPU_NAMES |= {"A800-80GB": "a100-80gb", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb", "h100_80gb": "h100"}
PRESETS = {"single": "single", "fsdp": "fsdp2", "fsdp2": "fsdp2", "hsdp": "fsdp2_hybrid", "zero2": "zero2"}
PRESETS |= {"zero3": "zero3", "zero3 + optimizer cpu offload": "zero3_cpu_offload"}
FLASH_3 = ("flash_attention_3", "flash_attention_4")
NEARLY_FULL_MIB = 81_000  # of 81,920
ATTENTION_ADAPTERS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """One published row, with its setup, or the reason for which its speed is not compared."""

    row: dict[str, str]
    source: str
    name: str
    setup: TrainingSetup | None = None
    interconnect: Interconnect | None = None
    tokens_per_second: float = 0.0
    why_not: str = ""


@cache
def shape_of(model: str) -> ModelShape:
    """Return the shape of a model in `MODELS`."""
    model_type, hidden, mlp, layers, heads, kv_heads, vocab, tied = MODELS[model]
    fields = {"model_type": model_type, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    shape = shape_from_config(ConfigFields(fields | {"tie_word_embeddings": tied}, model))
    assert shape is not None
    return shape


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV fixture without its comments."""
    lines = (FIXTURES / f"{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def has_fused_kernels(row: dict[str, str]) -> bool:
    """Return True for kernels such as Liger's: those of fms-acceleration are called foak."""
    return "foak" in row["notes"] or has_liger(row)


def has_liger(row: dict[str, str]) -> bool:
    """Return True for Liger's cross-entropy."""
    return "liger" in row["notes"].replace("no Liger", "").replace("a100_80gb_liger", "").lower()


def used_mib(row: dict[str, str]) -> int:
    """Return what nvidia-smi showed on average; 0 if the row does not say."""
    found = re.search(r"nvidia-smi (\d+) MiB", row["notes"])
    return int(found[1]) if found else 0


def measured_jobs() -> list[MeasuredJob]:
    """Return all rows of `measured_speed.csv`."""
    return [measured(row) for row in rows("measured_speed")]


def _why_not(row: dict[str, str], *, memory: bool) -> str:
    checkpointing, notes = row["grad_ckpt"], row["notes"]
    if "fp8" in row["precision"] or "float8" in row["precision"]:
        return "trains in 8 bits"
    if "GPTQ" in row["precision"]:
        return "a GPTQ base"
    if checkpointing.startswith("selective"):
        return "checkpoints some layers or operations"
    if row["compile"].startswith("yes"):
        return "compiled"
    if memory:
        return ""
    if "packs taken as full" in notes:
        return "its rows are not known to be full"
    if "baseline-peft-bnb" in notes:
        return "`prepare_model_for_kbit_training` made its residual stream fp32, which ours is not"
    if "zero3 (not stated" in row["strategy"] or "strategy on one GPU not stated" in notes:
        return "its strategy is not stated"
    if used_mib(row) > NEARLY_FULL_MIB:
        return "fills the GPU, so that the allocator frees and asks again"
    if row["gpu"] not in GPU_NAMES:
        return f"no {row['gpu']} in the table of GPUs"
    return ""


def measured(row: dict[str, str], *, memory: bool = False) -> MeasuredJob:
    """Return the job of a row, for the comparison of its speed, or of its memory.

    For memory, only Liger's cross-entropy is a fused one; rows that are not full are as large as full ones, and no
    figure of the GPU matters.
    """
    name = f"{row['model'].split(' (')[0]} {row['method']} {row['strategy'].split(' (')[0]} {row['gpus']}x"
    name = f"{name}{GPU_NAMES.get(row['gpu'], row['gpu'])} {row['micro_batch']}x{row['seq_len']}"
    source, why_not = row["source"].split(" ")[0].partition("/")[0], _why_not(row, memory=memory)
    speed = float(row["tokens_per_s_per_gpu"] or 0)
    if why_not:
        return MeasuredJob(row=row, source=source, name=name, why_not=why_not, tokens_per_second=speed)
    adapters: dict[str, Any] = {}
    if row["lora_r"]:
        adapters = {"lora_r": int(row["lora_r"])}
        adapters |= {"lora_target_modules": ATTENTION_ADAPTERS} if "q_proj" in row["notes"] else {}
    job = PlannedJob(
        per_device_train_batch_size=int(row["micro_batch"]),
        max_seq_length=int(row["seq_len"]),
        gradient_accumulation_steps=int(row["grad_accum"]),
        activation_checkpointing=row["grad_ckpt"].startswith("yes"),
        load_in_4bit=row["method"] == "qlora",
        loss="fused" if (has_liger if memory else has_fused_kernels)(row) else "full",
        lengths_differ=False,
        attn_implementation="flash_attention_3" if row["attention"] in FLASH_3 else None,
        **adapters,
    )
    gpus, strategy = int(row["gpus"]), row["strategy"].split(" (")[0]
    shape, preset = shape_of(row["model"].split(" (")[0]), load_preset(PRESETS[strategy])
    setup = TrainingSetup(shape=shape, preset=preset, world_size=gpus, job=job)
    network = {"network 400 Gb/s": 50 * GIGA, "network 800 Gb/s": 100 * GIGA}
    rate = next((value for words, value in network.items() if words in row["notes"]), None)
    interconnect = Interconnect(
        gpu=find_gpu(GPU_NAMES.get(row["gpu"], "h100")), world_size=gpus, gpus_per_node=8, network_bytes_per_second=rate
    )
    return MeasuredJob(
        row=row, source=source, name=name, setup=setup, interconnect=interconnect, tokens_per_second=speed
    )


def mosaicml_jobs() -> list[MeasuredJob]:
    """Return MosaicML's rows that have a speed, on A100 and H100."""
    published = [*rows("mosaicml_a100_2048"), *rows("mosaicml_speed")]
    return [_mosaicml(row) for row in published]


def _mosaicml(row: dict[str, str]) -> MeasuredJob:
    job = PlannedJob(
        per_device_train_batch_size=int(row["mbs"]),
        max_seq_length=int(row["seq"]),
        gradient_accumulation_steps=int(row["gacc"]),
        activation_checkpointing=row["ac"] == "True",
        loss="full",
        lengths_differ=False,
    )
    gpus, length = int(row["gpus"]), int(row["seq"])
    shape = mpt(*MPT[row["model"]])
    setup = TrainingSetup(shape=shape, preset=load_preset("fsdp2"), world_size=gpus, job=job)
    rate = 200 * GIGA if row["gpu"].startswith("a100") else 400 * GIGA
    return MeasuredJob(
        row=row,
        why_not="mostly attention, in Triton's kernel of 2023" if length > 8192 else "",
        source="llm-foundry",
        name=f"{row['model']} {gpus}x{row['gpu']} {row['mbs']}x{row['seq']}",
        setup=setup,
        interconnect=Interconnect(gpu=find_gpu(GPU_NAMES[row["gpu"]]), world_size=gpus, network_bytes_per_second=rate),
        tokens_per_second=float(row["tok_s_gpu"]),
    )
