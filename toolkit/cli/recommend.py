"""`toolkit recommend`: which preset to use on given hardware, and why."""

from __future__ import annotations

import json

from toolkit.cli.options import expand_options
from toolkit.flags import JsonOutput, ModelName
from toolkit.plan.options import RecommendOptions


@expand_options
def recommend(model: ModelName, options: RecommendOptions, as_json: JsonOutput = False) -> None:
    """Recommend a preset and its settings for a model on some GPUs.

    Prints the batch size and activation checkpointing, the reasons, the alternatives and the commands to run. Where no
    preset fits, data x tensor x pipeline parallelism is planned on paper, with what `pipeline_1f1b` can train of it.
    """
    from toolkit.plan.recommend import NothingFits, recommend_request
    from toolkit.plan.recommend import recommend as choose
    from toolkit.plan.recommendation import recommendation_json, recommendation_lines
    from toolkit.presets.preset import list_presets, load_preset
    from toolkit.simulate.stage_plans import best_pipeline_layout, layout_json, layout_lines

    request = recommend_request(model, options)
    presets = [load_preset(name) for name in dict.fromkeys(options.preset)] or list_presets()
    try:
        found = choose(request, presets, objective=options.objective)
    except NothingFits as error:
        layout = None if options.preset else best_pipeline_layout(request)
        if layout is None:
            raise
        values = layout_json(layout, request, model=model, error=error)
        lines = layout_lines(layout, request, model=model, error=error)
    else:
        price = options.price_per_gpu_hour
        values = recommendation_json(found, request, model=model, objective=options.objective, price=price)
        lines = recommendation_lines(found, request, model=model, price=price, scaling=options.scaling)
    print(json.dumps(values, indent=2) if as_json else "\n".join(lines))
