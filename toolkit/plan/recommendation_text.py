"""A recommendation as people read it: lines that are legible without colour.

>>> print("\\n".join(lines_of(found, ask, model="meta-llama/Llama-3.1-8B")))
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.plan.candidates import Ask, Candidate
from toolkit.plan.recommend import Recommendation
from toolkit.plan.recommendation import compare_command, dollars_per_million_tokens, scaling_of, train_command
from toolkit.plan.scaling import ScalingPoint
from toolkit.units import gib, seconds


def lines_of(
    found: Recommendation, ask: Ask, *, model: str, price: float | None = None, scaling: bool = False
) -> list[str]:
    """The whole answer."""
    method = f"LoRA of rank {ask.job.lora_r}" if ask.job.lora_r else "full fine-tune"
    method = f"QLoRA of rank {ask.job.lora_r}" if ask.job.load_in_4bit else method
    lines = [
        f"{model}: {ask.shape.num_params:,} parameters, {method}, {ask.job.max_seq_length:,} tokens, "
        f"{ask.global_batch_size} sequences a step, on {ask.world_size} × {ask.gpu.name}",
        "",
        f"  use       {found.choice.preset.name}: {found.choice.settings}",
        *_facts(found.choice, ask, price),
        *(f"  because   {reason}" for reason in found.reasons),
        "",
        *(f"  next      {one.preset.name}: {found.why_not[one.preset.name]}" for one in found.others),
    ]
    named = {found.choice.preset.name, *(other.preset.name for other in found.others)}
    lines += [f"  not       {name}: {reason}" for name, reason in found.why_not.items() if name not in named]
    lines += ["", *_scaling_lines(scaling_of(found.choice, ask))] if scaling else []
    lines += ["", "run it:", f"  {train_command(found.choice, ask, model)}"]
    compared = compare_command([found.choice, *found.others], ask, model)
    if compared is None:
        return [*lines, "", "No figure above is measured; `toolkit compare` measures on one machine."]
    return [*lines, "", "No figure above is measured; this measures:", f"  {compared}"]


def _facts(choice: Candidate, ask: Ask, price: float | None) -> list[str]:
    memory, speed = choice.memory, choice.speed
    left = gib(ask.gpu.memory_bytes - memory.planned_peak_bytes)
    disk = f", {gib(memory.host.disk_bytes)} on its disk" if memory.host.disk_bytes else ""
    lines = [
        f"  memory    {gib(memory.planned_peak_bytes)} of {gib(ask.gpu.memory_bytes)} a GPU, {left} left; "
        f"{gib(memory.host.peak_bytes)} of host memory a machine{disk}"
    ]
    if speed is None:
        return [*lines, "  speed     n/a: the GPU's peak is not known (`--gpu-tflops`)"]
    low, high = speed.tokens_per_second_per_gpu
    lines.append(
        f"  speed     {low:,.0f} to {high:,.0f} tokens/s a GPU, MFU {speed.mfu[0]:.0%} to {speed.mfu[1]:.0%}, "
        f"{seconds(speed.step_seconds[0])} to {seconds(speed.step_seconds[1])} a step"
    )
    sent = speed.communication_bytes_per_step
    if sent:
        lines.append(
            f"  traffic   {sent / 1e9:,.1f} GB a step and GPU: {seconds(speed.communication_seconds[0])} to "
            f"{seconds(speed.communication_seconds[1])} if nothing overlaps it"
        )
    if speed.offload_efficiency is not None:
        worst, best = speed.offload_efficiency
        lines.append(f"  offload   leaves {worst:.0%} to {best:.0%} of the time to the GPU where nothing overlaps")
    dollars = dollars_per_million_tokens(price, speed)
    if dollars is not None:
        lines.append(f"  price     ${dollars[0]:.3f} to ${dollars[1]:.3f} a million tokens at ${price:.2f} a GPU-hour")
    return lines


def _scaling_lines(points: Sequence[ScalingPoint]) -> list[str]:
    lines = ["  GPUs   tokens/s of all (low to high)   efficiency     lost to failures"]
    for point in points:
        low, high = point.tokens_per_second
        worst, best = sorted(point.scaling_efficiency)
        lines.append(
            f"  {point.world_size:>5}  {f'{low:,.0f} to {high:,.0f}':<30}  {f'{worst:.0%} to {best:.0%}':<13}  "
            f"{point.failure_loss:.1%}"
        )
    return lines
