"""`toolkit plan`, `recommend` and `rehearse`: a job before it runs, on paper or with one of its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from toolkit.cli.options import expand_options
from toolkit.entry_point import print_failure, print_failure_json, print_message
from toolkit.errors import EXIT_RUN_FAILED, ToolkitError
from toolkit.flags import CpuFlag, JsonOutput, ModelName, OptionalModelName, PresetName, TrainingArguments
from toolkit.hardware.gpus import trains_on_cpu, visible_world_size
from toolkit.job.argument_values import Range, check_range
from toolkit.launch.options import ScriptOptions
from toolkit.plan.options import JobAndGpuOptions, PlanOptions, RecommendOptions
from toolkit.screen_text import print_lines

if TYPE_CHECKING:  # loaded by the command that needs it
    from toolkit.plan.candidates import PlannedModel
    from toolkit.plan.measured_run import ComparedRun

Options = TypeVar("Options", bound=JobAndGpuOptions)
Request = TypeVar("Request", bound="PlannedModel")


@expand_options
def plan(
    context: typer.Context,
    model: OptionalModelName = None,
    *,
    options: PlanOptions,
    cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", help="device that --verify rehearses on")] = None,
    as_json: JsonOutput = False,
) -> None:
    """Plan memory, communication, speed and cost of a job, before it runs.

    Shows for each preset what fits. Without a GPU here and without --gpu: which GPUs, and how many, the job needs.
    """
    from toolkit.plan.finish import Cost, read_prices, work_of
    from toolkit.plan.plan_table import PlanAnswer, plan_lines, print_json
    from toolkit.plan.planner import asks_which_gpus, make_plans, plan_request
    from toolkit.plan.which_gpus import gpus_for

    is_of_file = model is None
    if options.config is not None:
        from toolkit.plan.config_file import configured_plan

        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        model, options, described = configured_plan(options.config, model, options, given=given)
        print_message(described)
    if model is None:
        raise ToolkitError("MODEL is missing", hint="a hub id, a folder or a config.json; or `--config FILE`")
    model = _with_demo(model)
    try:
        request, compared = _calibrated(partial(plan_request, model), _as_stored(model, options))
    except ToolkitError as error:
        if is_of_file and model in error.message:
            error.hint = f"{error.hint}; `toolkit plan MODEL --config {options.config}` plans another model"
        raise
    any_gpu, prices = compared is None and asks_which_gpus(options), read_prices(options.price_per_gpu_hour)
    cost = Cost(work=work_of(options, request.job, model), prices=prices)
    cost.check(None if any_gpu else request.gpu.name.partition(",")[0])
    plans = gpus_for(request, cost) if any_gpu else make_plans(request)
    answer = PlanAnswer(request=request, plans=plans, any_gpu=any_gpu, cost=cost)
    if not as_json:
        print_lines(plan_lines(answer, parts=options.parts))
        print_lines([] if compared is None else compared.lines())
    verified = []
    if options.verify:
        from toolkit.plan.plan_vs_rehearsal import verify_plans

        for verification in verify_plans(model, plans, cpu=trains_on_cpu(cpu), say=print_message):
            verified.append(verification)
            if not as_json:  # each when its rehearsal of rank 0 ends
                print_lines(["", *verification.lines()])
    if as_json:
        more: dict[str, Any] = {} if compared is None else {"measured": compared.as_row()}
        more |= {"verified": [verification.as_row() for verification in verified]} if options.verify else {}
        print_json(model, answer, **more)
    if any(verification.failed for verification in verified):
        raise typer.Exit(EXIT_RUN_FAILED)


@expand_options
def recommend(model: ModelName, options: RecommendOptions, as_json: JsonOutput = False) -> None:
    """Recommend a preset and its settings for a model on some GPUs.

    Prints the batch size and activation checkpointing, the reasons, the alternatives and the commands to run. Where no
    preset fits, data x tensor x pipeline parallelism is planned on paper, with what `pipeline_1f1b` can train of it.
    """
    from toolkit.plan.candidates import NothingFits
    from toolkit.plan.finish import ANY_GPU, Cost, work_of
    from toolkit.plan.recommend import recommend as choose
    from toolkit.plan.recommend import recommend_request
    from toolkit.plan.recommendation import recommendation_json, recommendation_lines
    from toolkit.presets.preset import list_presets, load_preset
    from toolkit.simulate.stage_plans import best_pipeline_layout, layout_json, layout_lines

    model = _with_demo(model)
    request, compared = _calibrated(partial(recommend_request, model), _as_stored(model, options))
    presets = [load_preset(name) for name in dict.fromkeys(options.preset)] or list_presets()
    price = options.price_per_gpu_hour
    cost = Cost(work=work_of(options, request.job, model), prices={} if price is None else {ANY_GPU: price})
    try:
        found = choose(request, presets, objective=options.objective)
    except NothingFits as error:
        layout = None if options.preset else best_pipeline_layout(request)
        if layout is None:
            raise
        values = layout_json(layout, request, model=model, error=error)
        lines = layout_lines(layout, request, model=model, error=error)
    else:
        values = recommendation_json(found, request, model=model, objective=options.objective, cost=cost)
        shown = {"scaling": options.scaling, "show_all": options.show_all}
        lines = recommendation_lines(found, request, model=model, cost=cost, **shown)
    if compared is not None:
        values["measured"], lines = compared.as_row(), [*lines, "", *compared.lines()]
    if as_json:
        return print(json.dumps(values, indent=2))
    print_lines(lines)


def _with_demo(model: str) -> str:
    if model != "demo":
        return model
    from toolkit.demo.assets import with_demo_inputs

    return with_demo_inputs(("--model_name_or_path", model))[1]


def _as_stored(model: str, options: Options) -> Options:
    from toolkit.models.read_model import stored_in_4bit

    is_given = options.load_in_4bit or getattr(options, "load_in_8bit", None)
    is_trained = options.lora_r is not None and not is_given and stored_in_4bit(model)
    return replace(options, load_in_4bit=True) if is_trained else options


def _calibrated(request_of: Callable[[Options], Request], options: Options) -> tuple[Request, ComparedRun | None]:
    if options.measured is None:
        return request_of(options), None
    from toolkit.plan.measured_run import MeasuredRun  # reads run folders, which a browser cannot

    run = MeasuredRun.read(options.measured)
    request = request_of(run.on_its_gpu(options))
    compared = run.compared(request.shape, request.job, request.gpu)
    return replace(request, measured=compared.step), compared


@dataclass(frozen=True, kw_only=True)
class RehearseOptions(ScriptOptions):
    """One rank to rehearse, and its training arguments."""

    preset: PresetName
    num_processes: Annotated[
        int | None,
        typer.Option(help="ranks to rehearse, whose GPUs are not needed; by default as many as GPUs are visible"),
    ] = None
    training_arguments: TrainingArguments = ()
    rank: Annotated[int, typer.Option(help="the rank to run")] = 0
    cpu: CpuFlag = None
    fake_tensors: Annotated[
        bool,
        typer.Option("--fake-tensors", help="memory by part for a model that does not fit here (FSDP2 and DDP only)"),
    ] = False
    stop_after_steps: Annotated[int, typer.Option(help="with --script: optimizer steps to run")] = 3
    output_dir: Annotated[
        Path | None, typer.Option(help="with --script: keep the run folder here; without it, no files are kept")
    ] = None

    def __post_init__(self) -> None:
        self.check_script(self.output_dir)
        check_range("--stop-after-steps", self.stop_after_steps, Range(lowest=1))

    @property
    def world_size(self) -> int:
        """Number of ranks: as given, or one per visible GPU. Raises ToolkitError without a GPU."""
        return visible_world_size() if self.num_processes is None else self.num_processes


@expand_options
def rehearse(options: RehearseOptions, as_json: JsonOutput = False) -> None:
    """Run one rank of a larger job here, and measure its memory.

    Training script and engine are the real ones. The other ranks are simulated.

    After `--`: at least --model_name_or_path (a config.json is enough), or the arguments of --script or --module.
    Without --dataset, rows are random tokens. Without --output_dir, no files are kept.
    """
    from toolkit.demo.assets import with_demo_inputs
    from toolkit.doctor.ops import compile_for_run
    from toolkit.launch.preflight import check_libraries
    from toolkit.presets.preset import load_preset
    from toolkit.rehearse.rehearsal import (
        plan_rehearsal,
        plan_script_rehearsal,
        rehearse_once,
        result_facts,
        result_lines,
    )

    on_cpu = trains_on_cpu(options.cpu)
    preset, place = load_preset(options.preset), {"world_size": options.world_size, "rank": options.rank}
    check_libraries(preset, runs_script=options.runs_script)
    words = with_demo_inputs(options.training_arguments, runs_script=options.runs_script)
    if not options.runs_script:
        planned = plan_rehearsal(preset, **place, training_argv=words, cpu=on_cpu, fake_tensors=options.fake_tensors)
    else:
        planned = plan_script_rehearsal(
            preset,
            **place,
            script=options.script,
            module=options.module,
            arguments=words,
            cpu=on_cpu,
            fake_tensors=options.fake_tensors,
            steps=options.stop_after_steps,
            output_dir=options.output_dir,
        )
    if on_cpu and options.cpu is None and not options.fake_tensors:
        print_message("no GPU is visible: rehearsing on the CPU")
    compile_for_run([preset], on_cpu=on_cpu and not options.fake_tensors)
    result, run = rehearse_once(planned, on_line=print_message)
    if result.failure is not None:
        print_failure(result.status, result.failure)
        if as_json:
            print_failure_json(
                f"{result.status}: {result.failure['message']}", result.failure.get("hint"), result.exit_code
            )
        raise typer.Exit(result.exit_code)
    print(json.dumps(result_facts(run), indent=2) if as_json else "\n".join(result_lines(run)))
