"""Where a search stands, replayed from ledger records that no process ran."""

from pathlib import Path
from typing import Any

import pytest
from comparison_records import comparison, trial

from toolkit.compare.ledger import LedgerRecord
from toolkit.tune.field import YOURS, Field, NotTried, Setting
from toolkit.tune.options import TuneOptions
from toolkit.tune.report import result_json, result_lines
from toolkit.tune.standing import Standing, stand

NAMES = (YOURS, "fast", "slow", "alike")
SETTINGS = tuple(Setting(name=name, preset="ddp", family=(name,), batch=4) for name in NAMES)
SPEC = comparison(*NAMES, reference=YOURS, repeats=3)
SLOWER = {YOURS: 1.5, "fast": 1.0, "slow": 3.0, "alike": 1.0}
NOISE = {0: 1.002, 1: 0.9995, 2: 1.0}  # of `alike`, by repeat


def ran(*repeats: int, settings: tuple[str, ...] = NAMES, **changes: dict[str, Any]) -> dict[str, LedgerRecord]:
    """Trials of settings in rounds; `changes` are those of a setting's trials, by its name."""
    made = [
        trial(name, repeat, **({"slower": _slower(name, repeat)} | changes.get(name, {})))
        for repeat in repeats
        for name in settings
    ]
    return {record.trial: record for record in made}


def _slower(name: str, repeat: int) -> float:
    return SLOWER.get(name, 1.0) * (NOISE[repeat] if name == "alike" else 1.0)


def outcomes(standing: Standing) -> dict[str, tuple[str, int | None]]:
    return {each.setting.name: (each.outcome, each.round) for each in standing.measured}


def test_the_first_round_begins_with_the_users_own_setting_and_a_later_one_is_shuffled() -> None:
    first = stand(SETTINGS, SPEC, {})
    assert [setting.name for setting in first.missing] == list(NAMES)
    assert first.winner is None
    orders = {
        tuple(each.name for each in stand(SETTINGS, SPEC.model_copy(update={"order_seed": seed}), ran(0)).missing)
        for seed in range(8)
    }
    assert len(orders) > 1


def test_a_round_eliminates_what_is_slower_and_a_search_ends_when_one_setting_is_left() -> None:
    after_one = stand(SETTINGS, SPEC, ran(0))
    assert (after_one.round, len(after_one.missing)) == (2, 4)
    three = SETTINGS[:3]
    ended = stand(three, SPEC, ran(0, 1, settings=NAMES[:3], slow={"slower": 3.001}))
    assert outcomes(ended) == {YOURS: ("eliminated", 2), "fast": ("left", None), "slow": ("eliminated", 2)}
    assert (ended.missing, ended.ended) == ((), "one setting is left")
    assert ended.winner is not None
    assert ended.winner.setting.name == "fast"


def test_settings_that_cannot_differ_by_two_per_cent_end_a_search() -> None:
    ended = stand(SETTINGS, SPEC, ran(0, 1))
    assert ended.ended == "no setting that is left can be more than 2 % faster"
    assert [each.setting.name for each in ended.left] == ["fast", "alike"]


def test_the_ratio_to_the_users_setting_has_an_interval_from_the_second_round_on() -> None:
    ratio, interval = stand(SETTINGS, SPEC, ran(0)).ratio_to_yours("fast") or (0.0, None)
    assert ratio == pytest.approx(1 / 1.5)
    assert interval is None
    ratio, interval = stand(SETTINGS, SPEC, ran(0, 1)).ratio_to_yours("fast") or (0.0, None)
    assert ratio == pytest.approx(1 / 1.5)
    assert interval is not None
    assert interval[0] <= ratio <= interval[1] < 1


def test_out_of_memory_is_a_row_and_a_larger_batch_of_the_same_setting_is_not_tried() -> None:
    sizes = [Setting(name=f"b{size}", preset="ddp", family=("zero2",), batch=size) for size in (8, 2, 4)]
    settings = (SETTINGS[0], *sizes)
    spec = comparison(YOURS, "b8", "b2", "b4", reference=YOURS)
    failed = {"status": "out_of_memory", "message": "CUDA out of memory"}
    records = ran(0, settings=(YOURS, "b2", "b4"), b4=failed)
    standing = stand(settings, spec, records)
    assert [setting.name for setting in standing.missing] == ["b8"]  # it came first in the round
    standing = stand((SETTINGS[0], *sizes[1:], sizes[0]), spec, records)
    assert outcomes(standing)["b4"] == ("out_of_memory", 1)
    assert outcomes(standing)["b8"] == ("not_tried", None)
    assert {setting.name for setting in standing.missing} == {YOURS, "b2"}


def test_a_setting_that_trains_another_problem_has_no_speed() -> None:
    other = {"problem": {"initial_weights_sha256": "b" * 64}}
    batch = {"problem": {"global_batch_size": 64}}
    standing = stand(SETTINGS, SPEC, ran(0, fast=other, slow={"losses": [2.5] * 8}, alike=batch))
    found = {each.setting.name: each for each in standing.measured}
    assert {name for name, each in found.items() if each.outcome == "another_problem"} == {"fast", "slow", "alike"}
    assert found["fast"].logs == ()
    assert "initial_weights_sha256" in (found["fast"].why or "")
    assert "loss of step 1" in (found["slow"].why or "")
    checkpointing = stand(SETTINGS, SPEC, ran(0, fast={"problem": {"activation_checkpointing": True}}))
    assert outcomes(checkpointing)["fast"] == ("left", None)


def test_without_a_completed_baseline_the_others_race_on() -> None:
    failed = {"status": "out_of_memory", "message": "CUDA out of memory"}
    records = {**ran(0, yours=failed), **ran(1, settings=NAMES[1:])}
    standing = stand(SETTINGS, SPEC, records)
    assert standing.winner is not None
    assert standing.winner.setting.name == "fast"
    assert standing.ratio_to_yours("fast") is None


def test_a_later_trial_changes_nothing_that_a_round_has_decided() -> None:
    """It stopped early, so that fewer steps are common; the eliminated settings stay so."""
    short = {"step_seconds": [9.0, 0.7, 0.5, 0.5], "timed_step_numbers": [3, 4]}
    before = outcomes(stand(SETTINGS, SPEC, ran(0, 1)))
    after = outcomes(stand(SETTINGS, SPEC, {**ran(0, 1), **ran(2, settings=("fast",), fast=short)}))
    assert {name for name, (how, _) in before.items() if how == "eliminated"} == {
        name for name, (how, _) in after.items() if how == "eliminated"
    }


# -- the report


def options(**given: Any) -> TuneOptions:
    words = ("--model_name_or_path", "m", "--dataset", "d", "--per_device_train_batch_size", "4")
    known = {"output_dir": Path("out"), "num_processes": 2, "cpu": True, "training_arguments": words}
    return TuneOptions(**known | given)


FIELD = Field(
    settings=(
        SETTINGS[0],
        Setting(
            name="fast",
            preset="zero2",
            changes={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            family=("zero2",),
            batch=2,
        ),
    ),
    not_tried=tuple(NotTried(name=f"zero3_{number}", kind="does not fit", why="90 GiB of 80") for number in range(5)),
)


def test_the_report_has_the_winner_its_ratio_and_the_command_to_copy() -> None:
    spec = comparison(YOURS, "fast", reference=YOURS, repeats=2)
    standing = stand(FIELD.settings, spec, ran(0, 1, settings=NAMES[:2]))
    content = result_json(FIELD, standing, options())
    assert content["winner"] == "fast"
    assert content["command"] == (
        "toolkit train --preset zero2 --num-processes 2 --cpu -- --model_name_or_path m --dataset d"
        " --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    )
    assert content["ratio_to_yours"] == pytest.approx(1 / 1.5)
    assert [each["name"] for each in content["settings"]] == [YOURS, "fast"]
    assert len(content["not_tried"]) == 5
    lines = result_lines(content)
    assert "not tried, does not fit: 5" in lines
    assert any(line.startswith("fastest   fast: 0.667 times the seconds per step of your setting") for line in lines)
    assert sum("zero3_" in line for line in lines) == 2


def test_a_search_that_ended_in_its_first_round_says_what_it_did_not_try() -> None:
    standing = stand(FIELD.settings, comparison(YOURS, "fast", reference=YOURS), ran(0, settings=(YOURS,)))
    content = result_json(FIELD, standing, options())
    assert [(each["outcome"], each["trials"]) for each in content["settings"]] == [("left", 1), ("not_tried", 0)]
    assert content["winner"] == YOURS
    assert content["command"].endswith("--per_device_train_batch_size 4")
