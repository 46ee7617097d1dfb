"""Every optimizer of the installed transformers is planned with the states that it makes, or refused by name."""

from typing import Any

import pytest
import torch
from transformers.trainer_utils import check_target_module_exists
from transformers.training_args import OptimizerNames

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.job.job_checks import check_values
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.job_weights import job_weights
from toolkit.models.optimizers import MUON, OF_SCRIPTS, OPTIMIZERS, UpdatedTensor, optimizer_spec, why_not_planned
from toolkit.plan.options import PlanOptions
from toolkit.plan.planner import make_plans, plan_request
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset
from toolkit.presets.support import unsupported

NAMES = [name.value for name in OptimizerNames]
BITSANDBYTES = [name for name, spec in OPTIMIZERS.items() if spec.class_name.startswith("bitsandbytes.")]
SHAPES = ((96, 80), (64,))  # 30 blocks of 256 elements, and fewer than are quantized


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 2}


def planned_states(
    preset: str, ranks: int, optim: str, optim_args: str | None, targets: Any = None, *, tied: bool = False
) -> int:
    fields = ConfigFields({"model_type": "llama", "tie_word_embeddings": tied} | SIZES, "config.json")
    shape, spec = shape_from_config(fields), optimizer_spec(optim, optim_args, targets)
    engine = engine_settings(load_preset(preset), world_size=ranks, hidden_size=64)
    return model_states(engine, job_weights(shape), spec).optimizer_bytes


@pytest.mark.parametrize("optim", [*NAMES, *OF_SCRIPTS, "adam_mini"])
def test_an_optimizer_is_planned_or_refused_with_a_reason(optim: str) -> None:
    if optim in OPTIMIZERS:
        assert why_not_planned(optim) is None
        return
    with pytest.raises(ToolkitError, match=f"--optim {optim} is not planned"):
        make_plans(plan_request("Qwen/Qwen3-0.6B", PlanOptions(gpu="h200", num_processes=(1,), optim=optim)))


def test_no_planned_name_is_unknown_to_transformers() -> None:
    assert set(OPTIMIZERS) - {MUON, *OF_SCRIPTS} <= set(NAMES)


@pytest.mark.parametrize("optim", BITSANDBYTES)
def test_states_are_those_that_bitsandbytes_makes(optim: str) -> None:
    spec = OPTIMIZERS[optim]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    import bitsandbytes.optim

    make: Any = getattr(bitsandbytes.optim, spec.class_name.partition(".")[2])
    optimizer = make(parameters, lr=0.1, optim_bits=8 if "8bit" in optim else 32)
    for index, parameter in enumerate(parameters):
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
    live = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in live}
    assert sum(storages.values()) == spec.state_bytes([UpdatedTensor(shape=shape) for shape in SHAPES])


# Bytes that schedulefree 1.4.1 made for `SHAPES`; and galore-torch 1.0 and apollo-torch 1.0.3 for a norm of 64 elements
# and a matrix of 96 x 24, 24 x 96 or 6 x 40. The rank, 8, is more than an SVD finds in the last; a random projection
# has it.
SCHEDULE_FREE = {"schedule_free_adamw": 61_952, "schedule_free_radam": 61_952, "schedule_free_sgd": 30_976}
LOW_RANK = [
    ("galore_adamw", "std", [7424, 7424, 2576]),
    ("galore_adamw", "right", [7424, 5120, 1760]),
    ("galore_adamw", "left", [5120, 7424, 2576]),
    ("galore_adafactor", "std", [1440, 1440, 584]),
    ("apollo_adamw", "std", [7424, 7424, 3264]),
]


def test_states_are_those_that_schedulefree_made() -> None:
    shapes = [UpdatedTensor(shape=shape) for shape in SHAPES]
    found = {name: OPTIMIZERS[name].state_bytes(shapes) for name in OPTIMIZERS if name.startswith("schedule_free")}
    assert found == SCHEDULE_FREE


@pytest.mark.parametrize(("optim", "proj_type", "made"), LOW_RANK)
def test_states_of_projections_are_those_that_galore_and_apollo_made(
    optim: str, proj_type: str, made: list[int]
) -> None:
    spec, norm = optimizer_spec(optim, f"rank=8,proj_type={proj_type}", "all-linear"), UpdatedTensor(shape=(64,))
    matrices = [UpdatedTensor(shape=shape, is_projected=True) for shape in ((96, 24), (24, 96), (6, 40))]
    assert [spec.state_bytes([matrix, norm]) for matrix in matrices] == made


@pytest.mark.parametrize("targets", ["all-linear", r".*mlp.*", ["q_proj", "mlp"], r"model\.layers\.0\..*"])
def test_the_modules_that_are_projected_are_those_that_transformers_chooses(targets: Any) -> None:
    spec = optimizer_spec("galore_adamw", None, targets)
    for name in ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "lm_head"):
        theirs = targets == "all-linear" or bool(check_target_module_exists(targets, name))
        assert spec.projects(name) == theirs


@pytest.mark.parametrize(
    ("tied", "targets", "made"),
    [
        (False, "all-linear", 172_544),
        (False, ["attn", "mlp"], 227_840),
        (False, r".*mlp\..*", 379_392),
        (True, "all-linear", 162_304),  # it has the head too, unless it is the embedding's weight
        (True, ["attn", "mlp"], 162_304),
        (True, r".*mlp\..*", 313_856),
    ],
)
def test_states_of_a_model_are_those_of_the_groups_that_the_trainer_made(tied: bool, targets: Any, made: int) -> None:
    assert planned_states("single", 1, "galore_adamw", "rank=8", targets, tied=tied) == made


# Bytes per rank that the classes made for this model, after two steps of each rank, by microsoft/dion at 0a059a4.
# Q under FSDP2, rank_fraction 0.25, per layer: 32 x 16 (q), twice 16 x 8 (k, v), 32 x 16 (o), twice 48 x 16 (gate, up),
# 32 x 16 (down): 3,328 elements. Whole, each has the shorter side for rows: 5,632.
@pytest.mark.parametrize(
    ("preset", "ranks", "optim", "optim_args", "made"),
    [
        ("single", 1, "dion", "rank_fraction=0.25", 424_448),
        ("single", 1, "dion", None, 559_616),
        ("single", 1, "dion", "rank_fraction=0.3,mu=0.9", 435_712),
        ("fsdp2", 2, "dion", "rank_fraction=0.25", 216_320),
        ("fsdp2", 2, "dion", "rank_fraction=0.3,rank_multiple_of=8", 230_656),
        ("fsdp2", 2, "dion2", None, 189_696),
        ("fsdp2", 2, "dion2", "algorithm=lion", 189_696 - 33_408),
        ("fsdp2", 2, "dion3", None, 191_488),
        ("fsdp2", 2, "normuon", None, 191_488),
    ],
)
def test_states_are_those_that_dion_made(preset: str, ranks: int, optim: str, optim_args: Any, made: int) -> None:
    assert planned_states(preset, ranks, optim, optim_args) == made


@pytest.mark.parametrize(
    "words", ["rank_fraction=0", "rank_fraction=1.5", "rank_multiple_of=0", "momentum_dtype=bfloat16"]
)
def test_options_of_dion_that_are_not_planned_are_refused(words: str) -> None:
    assert optimizer_spec("dion", words) is None


@pytest.mark.parametrize("optim", OF_SCRIPTS)
def test_training_with_an_optimizer_that_the_trainer_has_not_says_how_a_script_gets_it(optim: str) -> None:
    with pytest.raises(ToolkitError, match="for `toolkit plan` alone") as refused:
        check_values(Job().with_values(optim=optim), on_cpu=True)
    assert f"a dion.{OF_SCRIPTS[optim]} in the `create_optimizer`" in str(refused.value.hint)


@pytest.mark.parametrize("preset", ["fsdp2", "zero1", "zero3", "fsdp2_cpu_offload"])
@pytest.mark.parametrize("optim", ["galore_adamw", "apollo_adamw", "dion"])
def test_projections_of_shards_are_refused(preset: str, optim: str) -> None:
    if (preset, optim) == ("fsdp2", "dion"):
        assert unsupported(load_preset(preset), Job(optim=optim), purpose="plan") is None
        return
    reason = unsupported(load_preset(preset), Job(optim=optim), purpose="plan")
    assert f"--optim {optim} does not work under preset '{preset}'" in reason.message
