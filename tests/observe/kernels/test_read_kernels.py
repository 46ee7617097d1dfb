"""Which kernels a first step ran: each deliberate fault is named, and no honest script is."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import SCRIPTS, cpu_environment, nightly, read, run_warm

from toolkit.observe.kernels import read_kernels
from toolkit.observe.kernels.packed_documents import boundary
from toolkit.observe.kernels.read_kernels import LossGraph, kernel_rows
from toolkit.plan import step_parts
from toolkit.plan.logits import LOSSES, LossSizes
from toolkit.record.kernel_table import AS_ASKED, DIFFERS, SLOWER
from toolkit.record.reading import RankReading

sys.path.append(str(SCRIPTS))

# Case of `kernel_cases.py` -> the row that names it, what was asked and what ran, the verdict, and words of the row.
NAMED: dict[str, tuple[str, str | None, str, str, str]] = {
    "attention_dropout": ("attention", "sdpa", "math", SLOWER, "no dropout"),
    "values_of_another_size": ("attention", "sdpa", "math", SLOWER, "heads and values of one size"),
    "eager_attention": ("attention", "eager", "eager", SLOWER, "attn_implementation='sdpa'"),
    "no_sdpa_for_this_model": ("attention", "eager", "eager", SLOWER, "kernels-community"),
    "flash_attention_that_falls_back": ("attention", "flash_of_a_package", "eager", DIFFERS, "of scores"),
    "experts_in_a_loop": ("experts", "eager", "loop", SLOWER, "experts_implementation='grouped_mm'"),
    "experts_in_a_list": ("experts", "eager", "loop", SLOWER, "of launches"),
    "no_grouped_matrix_product": ("experts", "grouped_mm", "loop in torch", SLOWER, "torch 2.9"),
    "linear_attention_without_its_package": ("mixers", None, "torch loop", SLOWER, "flash-linear-attention"),
    "mamba_without_its_package": ("mixers", None, "torch loop", SLOWER, "mamba-ssm"),
    "convolutions_without_their_package": ("mixers", None, "torch loop", SLOWER, "pip install causal-conv1d"),
    "liger_for_an_unknown_model": ("liger", "use_liger_kernel", "nothing", DIFFERS, "that Liger knows"),
    "liger_after_the_model_was_made": ("liger", "patched classes", "nothing", DIFFERS, "before the model is made"),
    "use_kernels_without_effect": ("hub_kernels", "use_kernels", "nothing", DIFFERS, "no use_kernels"),
    "one_block_not_checkpointed": ("recomputed_blocks", "all", "1 of 2", DIFFERS, "not model.layers.1"),
    "a_flagged_block_in_evaluation_mode": ("recomputed_blocks", "2 flagged", "1 of 2", DIFFERS, "model.layers.0"),
    "checkpointing_switched_off_again": ("recomputed_blocks", "all", "0 of 2", DIFFERS, "model.layers.0"),
    "not_compiled": ("compiled", "torch_compile", "nothing", DIFFERS, ""),
    "an_optimizer_one_by_one": ("optimizer_path", "fused", "one by one", DIFFERS, "adamw_torch_fused"),
    "packed_rows_with_a_mask": ("documents", "isolated", "mixed", DIFFERS, "layers.0.self_attn (LlamaAttention)"),
    "packed_rows_of_a_state_space": ("documents", "isolated", "mixed", DIFFERS, "layers.0.mixer (Mamba2Mixer)"),
}
QUICK = (*("flash_attention_that_falls_back", "one_block_not_checkpointed", "packed_rows_with_a_mask", "packed"),)


def run_cases(folder: Path, names: tuple[str, ...]) -> Path:
    command = [sys.executable, str(SCRIPTS / "kernel_cases.py"), str(folder), *names]
    ended = run_warm(command, cpu_environment())
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.mark.launch
@pytest.mark.parametrize("names", [QUICK, *nightly(())])
def test_each_fault_is_named_and_no_honest_script_is(names: tuple[str, ...], tmp_path: Path) -> None:
    import kernel_cases

    run_cases(tmp_path, names)
    tables = {run.name: read(run / "attestation.json")["kernels"] for run in tmp_path.iterdir()}
    assert tables.keys() == (set(names) or kernel_cases.FAULTS.keys() | kernel_cases.HONEST.keys())
    for case, table in tables.items():
        rows = {row["name"]: row for row in table}
        differing = {row["name"] for row in table if row["verdict"] == DIFFERS}
        if case in kernel_cases.HONEST:
            assert not differing, (case, table)
            continue
        name, *named, words = NAMED[case]
        assert [rows[name][key] for key in ("asked", "ran", "verdict")] == named, (case, table)
        assert words in " ".join((rows[name]["detail"], rows[name]["costs"], rows[name]["repair"])), (case, table)
        assert differing == ({name} if rows[name]["verdict"] == DIFFERS else set()), (case, table)


def test_what_torch_dispatches_has_a_node_in_the_graph_with_its_dtype_heads_and_mask() -> None:
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    attend = torch.nn.functional.scaled_dot_product_attention

    def graph(output: torch.Tensor) -> tuple[dict[str, int], tuple[int, ...], str, str]:
        found = LossGraph(output.sum(), reads_saved=True)
        return dict(found.attention), found.shape, found.dtype, found.mask

    assert graph(attend(query, query, query, is_causal=True)) == ({"flash": 1}, (2, 4, 16, 8), "float32", "no mask")
    masked = graph(attend(query.bfloat16(), query.bfloat16(), query.bfloat16(), attn_mask=mask))
    assert masked == ({"flash": 1}, (2, 4, 16, 8), "bfloat16", "with a mask")
    assert graph(attend(query, query, query, dropout_p=0.1))[0] == {"math": 1}
    assert graph((query @ query.mT).softmax(-1) @ query)[:2] == ({"eager": 1}, (2, 4, 16, 16))
    router = torch.randn(16, 4, requires_grad=True)
    assert graph(router.softmax(-1))[0] == {}
    assert LossGraph(torch.tensor(1.0), reads_saved=True).nodes == {}


# Operations of torch's profiler -> what is read of them.
DISPATCHED = {"_scaled_dot_product_flash": "flash", "_scaled_dot_product_efficient": "efficient"}
DISPATCHED |= {"_scaled_dot_product_cudnn": "cudnn", "_scaled_dot_product_attention_math": "math"}
DISPATCHED |= {"_safe_softmax": "math"}
INPUTS: dict[str, dict[str, Any]] = {
    "half precision": {"dtype": torch.bfloat16},
    "float32": {},
    "with a mask": {"mask": True},
    "heads of 288": {"head": 288},
    "values of another size": {"head": 96, "values": 64},
    "dropout": {"dropout": 0.1},
}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("case", INPUTS)
def test_the_attention_that_is_read_is_the_one_that_torchs_profiler_saw(case: str, device: str) -> None:
    sizes = {"head": 64, "values": INPUTS[case].get("head", 64), "dtype": torch.float32, "mask": False, "dropout": 0.0}
    given = sizes | INPUTS[case]
    query, key, value = (
        torch.randn(2, 4, 256, size, device=device, dtype=given["dtype"], requires_grad=True)
        for size in (given["head"], given["head"], given["values"])
    )
    mask = torch.ones(256, 256, dtype=torch.bool, device=device).tril() if given["mask"] else None
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.autograd.profiler.profile(use_cpu=True) as profiled:
        attended = attend(query, key, value, mask, given["dropout"], is_causal=mask is None)
    names = {event.name.removeprefix("aten::") for event in profiled.function_events}
    ran = {kind for name in names for start, kind in DISPATCHED.items() if name.startswith(start)}
    assert len(ran) == 1
    assert set(LossGraph(attended.sum(), reads_saved=True).attention) == ran


@DEVICES
def test_a_grouped_product_of_experts_is_read(device: str) -> None:
    rows, weights = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((64, 32), (4, 32, 32)))
    ends = torch.arange(1, 5, device=device, dtype=torch.int32) * 16
    product = torch._grouped_mm(rows.requires_grad_(), weights, offs=ends)
    assert LossGraph(product.sum(), reads_saved=True).has("GroupedMm")


def test_a_float32_input_is_named_on_a_gpu_where_no_flash_kernel_takes_it() -> None:
    """torch takes the memory-efficient kernel there, whose node a CPU cannot make."""
    graph = LossGraph(None, reads_saved=True)
    graph.attention["efficient"], graph.shape, graph.dtype = 2, (1, 8, 128, 64), "float32"
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    args = SimpleNamespace(device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(args=args, optimizer=optimizer, model_wrapped=model)
    reading = RankReading(torch_compile=False)
    forwards: Any = SimpleNamespace(recomputes=None, reached=set(), recomputed=set())
    rows = {r["name"]: r for r in kernel_rows(graph, trainer, model, reading, forwards, own_optimizer=True)}
    assert (rows["attention"]["ran"], rows["attention"]["verdict"]) == ("efficient", SLOWER)
    assert "half precision" in rows["attention"]["repair"]
    assert (rows["optimizer_path"]["ran"], rows["optimizer_path"]["verdict"]) == ("one by one", AS_ASKED)


def test_costs_are_in_the_plans_terms() -> None:
    """The observer knows nothing of the plan, as it may run where none is made."""
    assert step_parts.CALIBRATION.host_seconds == read_kernels.HOST_SECONDS
    assert step_parts.CALIBRATION.liger_share == read_kernels.LIGER_SHARE
    assert step_parts.WHOLE_BYTES + step_parts.SPLIT_BYTES == read_kernels.LAYER_BYTES
    assert (step_parts.PASSES, step_parts.RECOMPUTED_PASSES) == (read_kernels.PASSES, read_kernels.RECOMPUTED_PASSES)
    assert max(LOSSES["full"](LossSizes(tokens=2, vocab_size=5, hidden_size=1))) == 2 * 5 * read_kernels.LOGIT_BYTES


def test_documents_are_known_by_positions_that_restart() -> None:
    def of(positions: list[int], **more: Any) -> tuple[int, int, int] | None:
        rows = torch.tensor([list(range(len(positions))), positions])
        return boundary({"input_ids": torch.ones_like(rows), "position_ids": rows, **more})

    assert of([0, 1, 0, 1, 2, 0, 1]) == (1, 0, 2)
    assert of([0, 1, 2, 3, 4, 5, 6]) is None
    assert of([0, 1, 2, 3, 0, 0, 0]) is None  # padding
    assert of([0, 1, 0, 1, 2, 0, 1], pixel_values=torch.ones(1)) is None
    assert boundary([{"input_ids": [1]}]) is None
