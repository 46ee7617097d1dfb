"""MFU, HFU and cost of a row: arithmetic on its speed, the model's shape, the GPU's peak and the price.

>>> cost_per_million_tokens(tokens_per_second=1000.0, world_size=2, price_per_gpu_hour=1.8)
1.0
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import common_gpu
from toolkit.models.flops import flops_of, mfu
from toolkit.models.read import read_model
from toolkit.models.shape import ModelShape
from toolkit.units import SECONDS_PER_HOUR

Facts = dict[str, Any]
PEAK_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def shape_of_model(model: str) -> ModelShape | None:
    """The model's shape; None where its configuration cannot be read or is of an unknown kind."""
    with contextlib.suppress(ToolkitError, OSError, ImportError):
        return read_model(model)
    return None


def flops_per_token(
    shape: ModelShape,
    *,
    num_params: int,
    num_trainable_params: int,
    seq_length: int,
    recompute: bool,
) -> Facts:
    """Operations of one token in each way of counting. The counts are the live model's, adapters included."""
    trainable = None if num_trainable_params == num_params else num_trainable_params
    adapters = max(0, num_params - shape.num_params) if trainable is not None else 0

    def counted(*, causal: bool = True, embeddings: bool = True) -> Any:
        return flops_of(
            shape,
            seq_length=seq_length,
            num_trainable_params=trainable,
            num_adapter_params=adapters,
            causal=causal,
            recompute=recompute,
            count_embeddings=embeddings,
        )

    return {
        "num_params": shape.num_active_params + adapters,
        "seq_length": seq_length,
        "causal": counted().model_flops,
        "full_attention": counted(causal=False).model_flops,
        "without_embeddings": counted(embeddings=False).model_flops,
        "hardware": counted().hardware_flops,
    }


def peak_flops(environment: Mapping[str, Any], compute_dtype: str | None) -> float | None:
    """Dense peak of one GPU in the compute dtype; None on a CPU, for an unlisted GPU, or for GPUs that differ."""
    gpu = common_gpu(gpu["name"] for gpu in environment["gpus"]) if environment["device"] != "cpu" else None
    dtype = PEAK_OF_DTYPE.get(compute_dtype or "")
    return None if gpu is None or dtype is None else gpu.peak_flops(dtype)


def mean_seq_length(trial: Mapping[str, Any]) -> int | None:
    """Tokens of the timed steps, padding included, over their sequences, rounded."""
    tokens = [trial["step_tokens"][number - 1] for number in trial["timed_step_numbers"]]
    sequences = (trial.get("problem") or {}).get("global_batch_size")
    return round(statistics.fmean(tokens) / sequences) if tokens and sequences else None


def efficiency(
    row: Mapping[str, Any],
    trials: Sequence[Mapping[str, Any]],
    *,
    shape: ModelShape | None,
    environment: Mapping[str, Any],
    price_per_gpu_hour: float | None,
) -> Facts:
    """A row's operations, shares of the peak, and cost; what is unknown is None."""
    facts: Facts = dict.fromkeys(("flops_per_token", "mfu", "mfu_full_attention", "hfu"))
    facts["cost_per_million_tokens"] = cost_of(row, environment, price_per_gpu_hour)
    trial = next((trial for trial in trials if trial["timed_step_numbers"] and trial["step_tokens"]), None)
    length = None if trial is None else mean_seq_length(trial)
    if shape is None or trial is None or length is None or row["num_params"] is None:
        return facts
    flops = flops_per_token(
        shape,
        num_params=row["num_params"],
        num_trainable_params=row["num_trainable_params"],
        seq_length=length,
        recompute=bool((trial.get("problem") or {}).get("activation_checkpointing")),
    )
    peak = peak_flops(environment, trial.get("compute_dtype"))
    speed = row["tokens_per_second_per_gpu"]

    def share(counted: str) -> float | None:
        if speed is None:
            return None
        return mfu(tokens_per_second_per_gpu=speed, flops_per_token=flops[counted], peak_flops=peak)

    return facts | {
        "flops_per_token": flops,
        "mfu": share("causal"),
        "mfu_full_attention": share("full_attention"),
        "hfu": share("hardware"),
    }


def cost_of(row: Mapping[str, Any], environment: Mapping[str, Any], price_per_gpu_hour: float | None) -> float | None:
    """A row's cost; there is none where no GPU is rented."""
    if environment["device"] == "cpu":
        return None
    return cost_per_million_tokens(
        tokens_per_second=row["non_padding_tokens_per_second"],
        world_size=row["world_size"],
        price_per_gpu_hour=price_per_gpu_hour,
    )


def cost_per_million_tokens(
    *, tokens_per_second: float | None, world_size: int, price_per_gpu_hour: float | None
) -> float | None:
    """What a million tokens cost at this speed of all ranks, one GPU a rank."""
    if not tokens_per_second or price_per_gpu_hour is None:
        return None
    return price_per_gpu_hour * world_size / SECONDS_PER_HOUR / tokens_per_second * 10**6
