"""`toolkit recommend`: which preset to use on given hardware, and why."""

from __future__ import annotations

import json

from toolkit.cli.options import expand_options
from toolkit.flags import JsonOutput, ModelName
from toolkit.plan.options import RecommendOptions


@expand_options
def recommend(model: ModelName, options: RecommendOptions, as_json: JsonOutput = False) -> None:
    """Recommend a preset and its settings for a model on some GPUs.

    Prints the batch size and activation checkpointing, the reasons, the alternatives and the commands to run.
    """
    from toolkit.plan.recommend import recommend as choose
    from toolkit.plan.recommend import recommend_request
    from toolkit.plan.recommendation import recommendation_json, recommendation_lines
    from toolkit.presets import list_presets, load_preset

    request = recommend_request(model, options)
    presets = [load_preset(name) for name in dict.fromkeys(options.preset)] or list_presets()
    found = choose(request, presets, objective=options.objective)
    price = options.price_per_gpu_hour
    if as_json:
        row = recommendation_json(found, request, model=model, objective=options.objective, price=price)
        print(json.dumps(row, indent=2))
        return
    print("\n".join(recommendation_lines(found, request, model=model, price=price, scaling=options.scaling)))
