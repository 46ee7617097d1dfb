"""Which GPUs, and how many of each, a job needs: `toolkit plan MODEL` on a node without a GPU."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import GPUS, Gpu
from toolkit.plan.candidates import LARGEST_WORLD_SIZE, Candidate
from toolkit.plan.finish import Cost
from toolkit.plan.planner import Plan, PlanRequest, best_plan, check_request, plan_of, smallest_plan, why_unsupported
from toolkit.presets.spec import PresetSpec


def gpus_for(request: PlanRequest, costs: Cost) -> list[Plan]:
    """Return a plan for each GPU of the table that the job fits on, with the fewest of them, the cheapest first.

    Each has the simplest of the fastest presets that fit; those that offload to the host count only where presets are
    named. With prices, only GPUs that have one are compared; without, those with the least memory in all come first.
    Raises ToolkitError as `make_plans` does, and where no number of any of them is enough.
    """
    gpus = [gpu for gpu in GPUS if gpu.peak_flops("bf16") and (gpu.name in costs.prices or not costs.prices)]
    plans = [
        best_plan([plan_of(replace(request, gpu=gpu), preset, size, size) for preset in presets])[0]
        for gpu, size, presets in fewest_of_each(request, gpus)
    ]

    def cost(plan: Plan) -> tuple[float, int]:
        dollars, hourly = costs.per_million_tokens(plan), costs.per_hour(plan) or 0.0
        dollars = hourly * plan.world_size if dollars is None else dollars
        return dollars, plan.world_size * plan.request.gpu.memory_bytes

    if not plans:
        presets, sizes = _presets(request), _sizes(request)
        reasons = [why_unsupported(request, preset, size) for preset in presets for size in sizes]
        if reasons and (why := reasons[-1]) is not None and all(reasons):
            raise ToolkitError(why.message, hint=why.hint)
        kinds = ", ".join(sorted(costs.prices)) or "any GPU"
        hint = "`--activation-checkpointing`, `--lora-r 16`, or a smaller `--per-device-train-batch-size`"
        raise ToolkitError(f"nothing fits on up to {max(sizes):,} of {kinds}", hint=hint)
    return sorted(plans, key=cost)


def fewest_of_each(request: PlanRequest, gpus: Iterable[Gpu]) -> Iterator[tuple[Gpu, int, list[PresetSpec]]]:
    """Yield each GPU that the job fits on, with the fewest of them, and the presets that fit there."""
    check_request(request)
    presets, sizes = _presets(request), _sizes(request)

    @cache
    def smallest(preset: PresetSpec, size: int) -> Candidate | None:
        return None if why_unsupported(request, preset, size) else smallest_plan(request, preset, size)

    def fits(gpu: Gpu, preset: PresetSpec, size: int) -> bool:
        planned = smallest(preset, size)
        return planned is not None and replace(planned, request=replace(planned.request, gpu=gpu)).fits

    for gpu in gpus:
        fitting = ((size, [preset for preset in presets if fits(gpu, preset, size)]) for size in sizes)
        if (found := next((each for each in fitting if each[1]), None)) is not None:
            yield gpu, *found


def _presets(request: PlanRequest) -> list[PresetSpec]:
    degrees = set(request.job.degrees)
    return [p for p in request.presets if request.strict or (not p.offloads and degrees <= set(p.parallel))]


def _sizes(request: PlanRequest) -> list[int]:
    return list(request.world_sizes) or [1 << power for power in range(LARGEST_WORLD_SIZE.bit_length())]
