"""The choice between sharded and whole gradients: who makes it, and what it becomes in `accelerator_config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.accumulation import chosen_accumulate
from toolkit.job.job import Job
from toolkit.presets import list_presets, load_preset
from toolkit.presets.spec import default_accumulate
from toolkit.presets.support import unsupported
from toolkit.presets.training_arguments import trainer_arguments

SYNC: dict[str, Any] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def test_gradients_stay_sharded_under_each_preset_that_shards_them() -> None:
    whole = {preset.name for preset in list_presets() if default_accumulate(preset) == "whole"}
    assert whole == {"single", "ddp", "zero1", "pipeline_1f1b"}


def test_only_fsdp2_has_a_choice() -> None:
    def accepted(accumulate: str) -> set[str]:
        method = Job(accumulate=accumulate)
        return {preset.name for preset in list_presets() if unsupported(preset, method) is None}

    fsdp2 = {preset.name for preset in list_presets() if preset.engine == "fsdp2"}
    assert accepted("whole") & accepted("sharded") == fsdp2
    assert accepted("whole") == fsdp2 | {"single", "ddp", "zero1", "pipeline_1f1b"}


def test_sync_each_batch_of_the_user_is_the_same_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SYNC))
    for given in (SYNC, json.dumps(SYNC), str(tmp_path / "config.json")):
        assert Job.from_values({"accelerator_config": given}).chosen_accumulate == "sharded"
    assert Job(accelerator_config={"even_batches": False}).chosen_accumulate is None


def test_two_choices_that_contradict_each_other_are_refused() -> None:
    assert chosen_accumulate("sharded", SYNC) == "sharded"
    with pytest.raises(ToolkitError) as refused:
        chosen_accumulate("whole", SYNC)
    assert refused.value.message == (
        "accumulate is whole, but accelerator_config has sync_each_batch: true, which means sharded"
    )
    assert refused.value.hint == "leave one of them out"


def test_the_trainer_arguments_of_fsdp2_alone_carry_the_default() -> None:
    carried = {p.name for p in list_presets() if "accelerator_config" in trainer_arguments(p, precision="no")}
    assert carried == {preset.name for preset in list_presets() if preset.engine == "fsdp2"}
    assert trainer_arguments(load_preset("fsdp2"), precision="no")["accelerator_config"] == SYNC
