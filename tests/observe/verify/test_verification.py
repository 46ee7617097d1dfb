"""The verification's own decisions: whose arguments are expected, and what our script adds to them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.engines.tensors import num_trainable_params
from toolkit.errors import AttestationFailed
from toolkit.job.job import Job
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.verify import verification
from toolkit.observe.verify.differences import Difference, differences
from toolkit.record.reading import RankReading
from toolkit.train.engine.comm_hooks import hook_name
from toolkit.train.trainer import observer_parts

TRAINING = SimpleNamespace(max_grad_norm=1.0, gradient_checkpointing=False, seed=43, neftune_noise_alpha=None)


def test_a_rank_whose_own_seed_is_another_is_the_one_that_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank expects its own arguments; those of rank 0 are decisive on all."""
    as_expected = RankReading(gradient_clipping=1.0, activation_checkpointing=False, sharding="replicate")
    first, second = (RankReading(rank=rank, seed=42 + rank) for rank in (0, 1))

    def of_both_ranks(own: Any, **_: Any) -> list[Any]:
        _, norms, expected = own
        return [(as_expected | first, norms, expected | {"seed": 42}), own]

    monkeypatch.setattr(verification, "gather_from_ranks", of_both_ranks)
    run: Any = SimpleNamespace(progress=None, single_process=False, writes=False, rank=1)
    run.folder = SimpleNamespace(attestation_json=tmp_path / "attestation.json")
    parts = ObserverParts(expected=ExpectedRun(settings={"seed": 43}))
    timer: Any = None
    of_rank_1 = verification.Verification(run, parts, timer, trainer=SimpleNamespace(args=TRAINING))
    with pytest.raises(AttestationFailed, match=r"arguments: seed on rank 1 is 43, expected 42\n"):
        of_rank_1.verify(as_expected | second)


def test_parameters_that_are_frozen_after_loading_are_a_difference_on_our_script() -> None:
    model = torch.nn.Linear(4, 4)
    trainer: Any = SimpleNamespace(model=model, counts_tokens=True, read_methods=None, save_states=None)
    arguments = SimpleNamespace(job=Job(), training=TRAINING, pipeline=None, layout=None)
    launch = SimpleNamespace(preset=None, world_size=2, dp_shard_size=None)
    run: Any = SimpleNamespace(arguments=arguments, launch=launch, layout_at_load=None)
    expected = observer_parts(run, trainer).expected.settings
    model.bias.requires_grad_(False)
    rank = RankReading(**expected | {"num_trainable_params": num_trainable_params(model)})
    assert list(map(str, differences(expected, [rank]))) == ["num_trainable_params on rank 0 is 16, expected 20"]


def test_a_communication_hook_that_is_not_ours_is_read_by_its_name() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = SimpleNamespace(_comm_hooks=[(bf16_compress_hook, None)])
    assert (hook_name(model), hook_name(torch.nn.Linear(1, 1))) == ("bf16_compress_hook", None)


def test_fp16_that_accelerate_leaves_out_on_a_cpu_is_the_scripts_own() -> None:
    fp32 = Difference(name="compute_dtype", rank=0, expected="float16", found="float32")
    parts = ObserverParts(expected=ExpectedRun(of_script=True))
    run: Any = SimpleNamespace(progress=None, single_process=True, rank=0)
    timer: Any = None
    for device, is_own in (("cpu", True), ("cuda", False)):
        trainer = SimpleNamespace(args=SimpleNamespace(device=torch.device(device)))
        assert verification.Verification(run, parts, timer, trainer=trainer).is_of_script(fp32) == is_own


def test_a_weight_of_which_fsdp1_leaves_a_rank_nothing_is_not_without_a_gradient() -> None:
    """With `use_orig_params` a rank has no elements, and no gradient, of what another rank holds."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = torch.nn.Parameter(torch.empty(0))
    run: Any = SimpleNamespace(progress=None, single_process=True, rank=0)
    timer: Any = None
    accelerator = SimpleNamespace(unwrap_model=lambda model, **_: model)
    trainer = SimpleNamespace(accelerator=accelerator, model_wrapped=model)
    parts = ObserverParts(expected=ExpectedRun(of_script=True))
    checked = verification.Verification(run, parts, timer, trainer=trainer)
    checked.reached = set(map(id, model[0].parameters()))
    lines = checked._lines_of_training(RankReading(optimizer_steps=1))
    assert lines == ["note: trained, without a gradient in the first step (1): 1.bias"]
