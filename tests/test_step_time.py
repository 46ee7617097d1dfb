"""The interval of a step's time against published runs, and its parts and curves worked by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from test_flops import MPT, published

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu, gpu_by_hand
from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.plan.links import Cluster
from toolkit.plan.scaling import doubled, failure_loss, pipeline_bubble, scaling_curve, young_daly_seconds
from toolkit.plan.step_time import StepTime, efficiency, job_flops, step_time
from toolkit.plan.traffic import TrafficJob
from toolkit.presets import load_preset

VOCABULARY = 50_368


def mpt(name: str) -> ModelShape:
    """MosaicML's models: learned positions, biases, a tied head, no gate (llm-foundry)."""
    width, layers = MPT[name]
    shapes = {"norm_1": (width,), "Wqkv": (3 * width, width), "out_proj": (width, width), "norm_2": (width,)}
    shapes |= {"up_proj": (4 * width, width), "down_proj": (width, 4 * width)}
    weights = tuple(Tensor(name=f"{part}.weight", shape=size) for part, size in shapes.items())
    biases = tuple(Tensor(name=f"{part}.bias", shape=size[:1]) for part, size in shapes.items())
    layer: Layer = weights + biases
    outer = {"wte": (VOCABULARY, width), "wpe": (2048, width)}
    norms = (Tensor(name="norm_f.weight", shape=(width,)), Tensor(name="norm_f.bias", shape=(width,)))
    return ModelShape(
        model_type="mpt",
        num_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        num_kv_heads=width // 64,
        head_dim=64,
        vocab_size=VOCABULARY,
        gated_mlp=False,
        activation="gelu",
        tied_embeddings=True,
        layers=(layer,) * layers,
        outer=(*(Tensor(name=f"{part}.weight", shape=size) for part, size in outer.items()), *norms),
    )


def speed_of(row: dict[str, str]) -> StepTime:
    job = TrafficJob(
        preset=load_preset("fsdp2"),
        shape=mpt(row["model"]),
        world_size=int(row["gpus"]),
        gradient_accumulation_steps=int(row["gacc"]),
        activation_checkpointing=row["ac"] == "True",
    )
    cluster = Cluster(gpu=find_gpu(row["gpu"]), world_size=job.world_size)
    speed = step_time(job, cluster, per_device_train_batch_size=int(row["mbs"]), seq_length=int(row["seq"]))
    assert speed is not None
    return speed


def test_published_speeds_lie_in_the_interval_and_it_is_not_boundless() -> None:
    """None of its constants was taken from these rows."""
    rows = published()
    assert all(mpt(row["model"]).num_params == int(row["params"]) for row in rows)
    inside, widths = 0, []
    for row in rows:
        low, high = speed_of(row).tokens_per_second_per_gpu
        inside += low <= float(row["tok_s_gpu"]) <= high
        widths.append(high / low)
    assert inside == len(rows) == 41
    assert statistics.median(widths) < 2.7
    assert max(widths) < 3.6


def test_mfu_of_the_interval_counts_what_the_published_one_does() -> None:
    row = published()[4]  # 7b on 8 GPUs
    speed = speed_of(row)
    low, high = speed.mfu
    assert low < float(row["mfu"]) / 100 < high
    tokens = speed.tokens_per_second_per_gpu
    assert high / low == pytest.approx(tokens[1] / tokens[0])


JOB = TrafficJob(preset=load_preset("ddp"), shape=mpt("125m"), world_size=8)
A100 = Cluster(gpu=find_gpu("a100-80gb"), world_size=8)


def timed(job: TrafficJob, cluster: Cluster = A100, **changes: int) -> StepTime:
    speed = step_time(job, cluster, **({"per_device_train_batch_size": 4, "seq_length": 1024} | changes))
    assert speed is not None
    return speed


def preset_job(name: str) -> TrafficJob:
    return replace(JOB, preset=load_preset(name))


def test_what_overlaps_at_best_and_nothing_does_at_worst() -> None:
    speed = timed(JOB)
    assert speed.step_seconds[0] == pytest.approx(
        max(speed.compute_seconds[0], speed.communication_seconds[0]) + speed.optimizer_seconds[0]
    )
    parts = (speed.compute_seconds, speed.communication_seconds, speed.offload_seconds, speed.optimizer_seconds)
    assert speed.step_seconds[1] == pytest.approx(sum(part[1] for part in parts))
    serial = timed(preset_job("zero1"))  # deepspeed does not overlap below stage 3
    assert serial.step_seconds[0] >= serial.compute_seconds[0] + serial.communication_seconds[0]


def test_adam_moves_28_bytes_a_parameter_of_the_gpu_s_share() -> None:
    params = JOB.shape.num_params
    assert timed(JOB).optimizer_seconds[0] == pytest.approx(28 * params / (2039e9 * 0.95))
    assert timed(preset_job("zero1")).optimizer_seconds[0] == pytest.approx(28 * params / 8 / (2039e9 * 0.95))


def test_recomputation_costs_time_but_is_no_needed_operation() -> None:
    plain, again = timed(JOB), timed(replace(JOB, activation_checkpointing=True))
    assert again.flops_per_token == plain.flops_per_token
    assert again.compute_seconds[1] == pytest.approx(4 / 3 * plain.compute_seconds[1])


def test_offload_and_disk_only_slow_down() -> None:
    speeds = [timed(preset_job(name)) for name in ("zero3", "zero3_cpu_offload", "zero3_nvme_offload")]
    assert speeds[0].offload_seconds == (0.0, 0.0)
    assert speeds[0].step_seconds[1] < speeds[1].step_seconds[1] < speeds[2].step_seconds[1]
    assert speeds[1].offload_efficiency is not None
    low, high = speeds[1].offload_efficiency
    assert 0 < low < high < 1
    assert speeds[0].offload_efficiency is None


def test_efficiency_is_zero_infinity_s_formula() -> None:
    """Batch 2 at length 1024 over 70 GB/s beside 70 TFLOP/s: 2,048 operations a byte keep two thirds."""
    intensity, bandwidth, peak, moved = 2 * 1024, 70e9, 70e12, 1e9
    kept = efficiency(compute_seconds=intensity * moved / peak, transfer_seconds=moved / bandwidth)
    assert kept == pytest.approx(intensity * bandwidth / (intensity * bandwidth + peak))
    assert round(kept, 2) == 0.67


def test_a_gpu_without_the_dtype_has_no_time() -> None:
    v100 = Cluster(gpu=find_gpu("v100-32gb"), world_size=8)
    assert step_time(JOB, v100, per_device_train_batch_size=1, seq_length=512) is None
    unknown = gpu_by_hand(None, memory_gib=24)
    assert step_time(JOB, replace(v100, gpu=unknown), per_device_train_batch_size=1, seq_length=512) is None


def test_adapters_spare_the_frozen_gradients() -> None:
    adapters = ((Tensor(name="q.lora_A.weight", shape=(8, 768)),),) * 12
    flops = job_flops(replace(JOB, adapters=adapters), 1024)
    assert flops.dense_backward == 2 * (JOB.shape.num_params + 12 * 8 * 768) + 2 * 12 * 8 * 768


def test_scaling_is_measured_from_the_first_point() -> None:
    def speed(size: int) -> StepTime:
        return timed(replace(preset_job("fsdp2"), world_size=size), Cluster(gpu=find_gpu("a100-80gb"), world_size=size))

    points = scaling_curve(speed, doubled(8))
    assert [point.world_size for point in points] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert points[0].scaling_efficiency == (1.0, 1.0)
    assert points[-1].scaling_efficiency[0] < 0.6  # a 125M model over a slow network
    assert points[-1].failure_loss > points[0].failure_loss > 0


@pytest.mark.parametrize(
    ("schedule", "chunks", "idle"),
    [("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved", 2, (3 / 16) / (1 + 3 / 16)), ("zbv", 1, 0.0)],
)
def test_bubbles_follow_their_papers(schedule: str, chunks: int, idle: float) -> None:
    assert pipeline_bubble(stages=4, micro_batches=8, schedule=schedule, chunks=chunks) == pytest.approx(idle)


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ToolkitError, match="no pipeline schedule 'dapple'"):
        pipeline_bubble(stages=4, micro_batches=8, schedule="dapple")


def test_young_and_daly() -> None:
    """A minute to save, a day between failures: every √(2·60·86400) - 60 s."""
    assert young_daly_seconds(save_seconds=60, mean_seconds_to_failure=86_400) == pytest.approx(3159.94, abs=0.01)
    assert failure_loss(save_seconds=60, mean_seconds_to_failure=86_400, restart_seconds=0) == pytest.approx(
        60 / 3219.94 + 3159.94 / 2 / 86_400, rel=1e-4
    )
