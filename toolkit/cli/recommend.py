"""`toolkit recommend`: which preset to use on given hardware, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from toolkit.cli.options import expand_options
from toolkit.flags import JsonOutput, ModelName
from toolkit.plan.options import RecommendOptions

if TYPE_CHECKING:
    from toolkit.plan.candidates import RecommendRequest
    from toolkit.plan.recommend import NothingFits


@expand_options
def recommend(model: ModelName, options: RecommendOptions, as_json: JsonOutput = False) -> None:
    """Recommend a preset and its settings for a model on some GPUs.

    Prints the batch size and activation checkpointing, the reasons, the alternatives and the commands to run. Where no
    preset fits, data x tensor x pipeline parallelism is planned on paper, with what `pipeline_1f1b` can train of it.
    """
    from toolkit.plan.recommend import NothingFits, recommend_request
    from toolkit.plan.recommend import recommend as choose
    from toolkit.plan.recommendation import recommendation_json, recommendation_lines
    from toolkit.presets import list_presets, load_preset

    request = recommend_request(model, options)
    presets = [load_preset(name) for name in dict.fromkeys(options.preset)] or list_presets()
    try:
        found = choose(request, presets, objective=options.objective)
    except NothingFits as error:
        if options.preset:
            raise
        _plan_on_paper(model, request, error, as_json=as_json)
        return
    price = options.price_per_gpu_hour
    if as_json:
        row = recommendation_json(found, request, model=model, objective=options.objective, price=price)
        print(json.dumps(row, indent=2))
        return
    print("\n".join(recommendation_lines(found, request, model=model, price=price, scaling=options.scaling)))


def _plan_on_paper(model: str, request: RecommendRequest, error: NothingFits, *, as_json: bool) -> None:
    """Print a layout with pipeline parallelism; raise the error again where none fits either."""
    from toolkit.simulate.pipeline_layouts import best_pipeline_layout, layout_json, layout_lines

    layout = best_pipeline_layout(request)
    if layout is None:
        raise error
    if as_json:
        print(json.dumps(layout_json(layout, request, model=model, error=error), indent=2))
    else:
        print("\n".join(layout_lines(layout, request, model=model, error=error)))
