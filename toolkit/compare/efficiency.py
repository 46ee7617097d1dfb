"""MFU, HFU and cost of a row, from its speed, the model's shape, the GPU's peak and the price.

>>> cost_per_million_tokens(1000.0, 2, 1.8)
1.0
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from toolkit.compare.results import Environment
from toolkit.compare.rows import FlopsPerToken, Row, RunRecord
from toolkit.hardware.gpu_table import common_gpu
from toolkit.models.flops import TokenFlops, flops_of, mfu
from toolkit.models.shape import ModelShape
from toolkit.units import SECONDS_PER_HOUR

GPU_TABLE_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def with_efficiency(
    row: Row, trials: Sequence[RunRecord], *, shape: ModelShape | None, environment: Environment
) -> Row:
    """Return the row with its FLOPs per token and their shares of the GPU's peak; what is unknown is None.

    The sequence length and the activation checkpointing are those of its first trial with timed steps.
    """
    trial = next((trial for trial in trials if trial.timed_step_numbers and trial.step_tokens), None)
    seq_length = None if trial is None else mean_seq_length(trial)
    if shape is None or trial is None or seq_length is None or row.num_params is None:
        return row
    flops = flops_per_token(
        shape,
        num_params=row.num_params,
        num_trainable_params=row.num_trainable_params,
        seq_length=seq_length,
        activation_checkpointing=bool(trial.problem and trial.problem.activation_checkpointing),
    )
    peak, speed = peak_flops(environment, trial.compute_dtype), row.tokens_per_second_per_gpu
    shares: dict[str, float | None] = {}
    if speed is not None:
        counted = {"mfu": flops.causal, "mfu_full_attention": flops.full_attention, "hfu": flops.hardware}
        shares = {
            name: mfu(tokens_per_second_per_gpu=speed, flops_per_token=of_token, peak_flops=peak)
            for name, of_token in counted.items()
        }
    return row.updated(flops_per_token=flops, **shares)


def flops_per_token(
    shape: ModelShape,
    *,
    num_params: int,
    num_trainable_params: int | None,
    seq_length: int,
    activation_checkpointing: bool,
) -> FlopsPerToken:
    """Return the operations of one token in each way of counting. The parameter counts include adapters."""
    trainable = None if num_trainable_params == num_params else num_trainable_params
    adapters = max(0, num_params - shape.num_params) if trainable is not None else 0

    def counted(*, causal: bool = True, embeddings: bool = True) -> TokenFlops:
        return flops_of(
            shape,
            seq_length=seq_length,
            num_trainable_params=trainable,
            num_adapter_params=adapters,
            causal=causal,
            recompute=activation_checkpointing,
            count_embeddings=embeddings,
        )

    return FlopsPerToken(
        num_params=shape.num_active_params + adapters,
        seq_length=seq_length,
        causal=counted().model_flops,
        full_attention=counted(causal=False).model_flops,
        without_embeddings=counted(embeddings=False).model_flops,
        hardware=counted().hardware_flops,
    )


def peak_flops(environment: Environment, compute_dtype: str | None) -> float | None:
    """Return the dense peak of one GPU in the compute dtype; None on a CPU, and for unlisted or mixed GPUs."""
    gpu = None if environment.device == "cpu" else common_gpu(gpu.name for gpu in environment.gpus)
    dtype = GPU_TABLE_DTYPES.get(compute_dtype or "")
    return None if gpu is None or dtype is None else gpu.peak_flops(dtype)


def mean_seq_length(trial: RunRecord) -> int | None:
    """Return the tokens of the timed steps, padding included, over their sequences, rounded."""
    tokens = [trial.step_tokens[number - 1] or 0 for number in trial.timed_step_numbers]
    sequences = trial.problem.global_batch_size if trial.problem else None
    return round(statistics.fmean(tokens) / sequences) if tokens and isinstance(sequences, int) and sequences else None


def row_cost(row: Row, *, on_cpu: bool, price_per_gpu_hour: float) -> float | None:
    """Return the cost of a million tokens without padding; None without a speed, and on a CPU: no GPU is rented."""
    speed = row.non_padding_tokens_per_second
    return None if on_cpu or not speed else cost_per_million_tokens(speed, row.world_size, price_per_gpu_hour)


def cost_per_million_tokens(tokens_per_second: float, world_size: int, price_per_gpu_hour: float) -> float:
    """Return the cost of a million tokens at this speed of all ranks, with one GPU per rank."""
    return price_per_gpu_hour * world_size / SECONDS_PER_HOUR / tokens_per_second * 10**6
