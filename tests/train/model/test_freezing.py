"""Parameters frozen or trained by name patterns."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.train.model.loading import freeze


def tied_model() -> Any:
    import torch

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "layer": torch.nn.Linear(2, 2)})
    model["head"] = torch.nn.Linear(2, 4, bias=False)
    model["head"].weight = model["embed"].weight
    return model


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_patterns_freeze_what_they_name() -> None:
    model = tied_model()
    assert freeze(model, frozen=["layer.b*"], trained=None) == []
    assert trained(model) == {"embed.weight", "layer.weight"}


def test_a_tied_weight_goes_one_way_and_is_said() -> None:
    model = tied_model()
    assert freeze(model, frozen=None, trained=["head.*"]) == [
        "head.weight is tied to embed.weight: the pattern applies to all of them"
    ]
    assert trained(model) == {"embed.weight"}


def test_a_pattern_that_matches_nothing_is_named_with_the_nearest() -> None:
    with pytest.raises(ToolkitError, match=r"'layer.weigth' matches no parameter") as refused:
        freeze(tied_model(), frozen=["layer.weigth"], trained=None)
    assert refused.value.hint == "there is `layer.weight`"
    with pytest.raises(ToolkitError, match="leaves nothing to train"):
        freeze(tied_model(), frozen=["*"], trained=None)
