"""How ranks are divided is read back, and a run whose ranks are divided otherwise fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.observe.attest.clipping import gradient_replicas
from toolkit.observe.attest.differences import differences, expected_values
from toolkit.observe.attest.read_layout import first_rows_sha256, largest_part, layout_differences, split_shapes
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets import load_preset

LAYOUT = ParallelLayout(dp_shard=2, tp=2)
PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "layers.*.q_proj": "colwise",
    "layers.*.o_proj": "rowwise",
    "layers.*.q_norm": "replicated_with_grad_allreduce",
}


def readings() -> list[dict[str, Any]]:
    """Four ranks in two groups, each with rows of its own."""
    groups, rows = [[0, 1], [0, 1], [2, 3], [2, 3]], "aabb"
    return [{"rank": rank, "batch_group": groups[rank], "first_rows_sha256": rows[rank]} for rank in range(4)]


def named(ranks: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    return [(difference.name, difference.rank) for difference in layout_differences(ranks, LAYOUT)]


def test_ranks_of_a_group_train_on_rows_that_no_other_group_has() -> None:
    assert named(readings()) == []
    assert layout_differences(readings(), None) == []


def test_a_rank_with_rows_of_its_own_is_named() -> None:
    ranks = readings()
    ranks[3]["first_rows_sha256"] = "c"
    assert named(ranks) == [("first_rows_sha256 (equal to rank 2's)", 3)]


def test_two_groups_with_the_same_rows_are_named() -> None:
    ranks = readings()
    for reading in ranks:
        reading["first_rows_sha256"] = "a"
    assert named(ranks) == [("first_rows_sha256 (other than rank 0's)", rank) for rank in (2, 3)]


def test_a_rank_in_another_group_is_named() -> None:
    ranks = readings()
    ranks[1]["batch_group"] = [1, 3]
    assert named(ranks) == [("batch_group", 1)]


def test_another_degree_than_the_expected_one_is_a_difference() -> None:
    expected = expected_values(load_preset("fsdp2_tp"), 4, compute_dtype="float32", settings={}, layout=LAYOUT)
    found = {"rank": 0, **expected, "layout": ParallelLayout(dp_shard=4).degrees()}
    assert [difference.name for difference in differences(expected, [found])] == ["layout"]
    assert differences(expected, [{"rank": 0, **expected}]) == []


def test_the_order_of_batches_is_part_of_their_digest() -> None:
    assert first_rows_sha256(["one", "two"]) != first_rows_sha256(["two", "one"])


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [(None, 4), (ParallelLayout(dp_replicate=2, tp=2).degrees(), 1), (ParallelLayout(dp_shard=4, ep=2).degrees(), 1)],
)
def test_where_layers_are_split_each_rank_has_divided_its_norm_by_its_copies(layout: Any, replicas: int) -> None:
    assert gradient_replicas([{"sharding": "replicate", "layout": layout}] * 4) == replicas  # type: ignore[list-item]


# -- expected bytes


class SplitModel(torch.nn.Module):
    """A layer of each style, and adapters as peft names them."""

    def __init__(self, *, adapters: bool = False) -> None:
        super().__init__()
        self.tp_plan, self.ep_plan = PLAN, {"layers.*.experts": "grouped_gemm"}
        self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(12, 4)})
        wide = {"q_proj": torch.nn.Linear(4, 8), "o_proj": torch.nn.Linear(8, 4)}
        if adapters:
            wide = {name: _adapted(layer) for name, layer in wide.items()}
        others = {"q_norm": torch.nn.LayerNorm(4, bias=False), "experts": torch.nn.Linear(6, 4, bias=False)}
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({**wide, **others})])

    def get_input_embeddings(self) -> Any:
        return self.model["embed_tokens"]

    def divided(self, layout: ParallelLayout, *, part: str = "parameter") -> dict[str, int]:
        """The ranks over which each parameter is divided."""
        names = [name.removeprefix("layers.0.") for name, _ in self.named_parameters()]
        shapes = split_shapes(self, layout, list(self.parameters()), part=part)
        return {name: ranks for name, (_, ranks) in zip(names, shapes, strict=True)}


def _adapted(layer: torch.nn.Linear) -> torch.nn.Module:
    first = torch.nn.Linear(layer.in_features, 2, bias=False)
    second = torch.nn.Linear(2, layer.out_features, bias=False)
    factors = {"lora_A": torch.nn.ModuleDict({"default": first}), "lora_B": torch.nn.ModuleDict({"default": second})}
    return torch.nn.ModuleDict({"base_layer": layer, **factors})


def test_a_plan_s_styles_decide_over_how_many_ranks_a_parameter_is_divided() -> None:
    assert SplitModel().divided(LAYOUT) == {
        "model.embed_tokens.weight": 4,
        "q_proj.weight": 4,
        "q_proj.bias": 4,
        "o_proj.weight": 4,
        "o_proj.bias": 2,  # added after the sum over ranks, so each has it whole
        "q_norm.weight": 2,
        "experts.weight": 2,
    }


def test_experts_are_divided_over_all_ranks_that_share_them() -> None:
    divided = SplitModel().divided(ParallelLayout(dp_shard=4, ep=2))
    assert (divided["experts.weight"], divided["q_proj.weight"]) == (4, 4)


def test_without_fsdp2_the_gradient_of_the_embedding_is_whole() -> None:
    alone = ParallelLayout(tp=2)
    assert SplitModel().divided(alone)["model.embed_tokens.weight"] == 2
    assert SplitModel().divided(alone, part="gradient")["model.embed_tokens.weight"] == 1
    assert SplitModel().divided(LAYOUT, part="gradient")["model.embed_tokens.weight"] == 4


def test_adapters_are_divided_by_tensor_parallelism_alone_in_the_matrix_that_meets_the_divided_side() -> None:
    divided = SplitModel(adapters=True).divided(LAYOUT)
    assert {name: ranks for name, ranks in divided.items() if "lora" in name} == {
        "q_proj.lora_A.default.weight": 1,
        "q_proj.lora_B.default.weight": 2,
        "o_proj.lora_A.default.weight": 2,
        "o_proj.lora_B.default.weight": 1,
    }
    assert (divided["q_proj.base_layer.weight"], divided["o_proj.base_layer.weight"]) == (4, 4)


def test_one_row_more_may_be_on_a_rank_where_rows_do_not_divide() -> None:
    assert largest_part([((8, 4), 4)]) == 8
    assert largest_part([((9, 4), 4)]) == 9 + 4
    assert largest_part([((8, 4), 1), ((8,), 2)]) == 32 + 4


def test_the_model_inside_peft_is_read() -> None:
    inner = SplitModel(adapters=True)
    outer = SimpleNamespace(get_base_model=lambda: inner)
    assert split_shapes(outer, LAYOUT, [inner.layers[0]["q_norm"].weight], part="parameter") == [((4,), 2)]
