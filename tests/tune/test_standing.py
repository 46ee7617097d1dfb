"""Where a search stands, replayed from records that no process ran; its formula by hand, and its rate of errors."""

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from comparison_records import comparison, trial

from toolkit.compare.ledger import LedgerRecord
from toolkit.compare.significance import student_t
from toolkit.tune.commands import result_json, result_lines
from toolkit.tune.field import YOURS, Field, NotTried, Setting
from toolkit.tune.options import TuneOptions
from toolkit.tune.standing import ERROR, Standing, after_round, mean_interval, noise, ratio_interval, spent, stand

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
        " --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --output_dir out/trained"
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
    assert content["command"].endswith("--per_device_train_batch_size 4 --output_dir out/trained")


def test_the_confidence_of_a_round_shares_the_error_among_settings_and_rounds() -> None:
    figures = {"a": [0.0, 0.0, 0.01], "b": [0.3, 0.32, 0.31]}
    confidence = 1 - 2 * ERROR / 11 * (4 - 1) / 49  # of the second of seven looks, each end
    race = after_round(figures, num_settings=12, num_rounds=8)
    assert race.ratios == {"b": ratio_interval(figures, "b", "a", confidence=confidence)}


@pytest.mark.parametrize("num_rounds", [2, 3, 8, 50])
def test_the_rounds_spend_the_whole_error_and_the_first_none_of_it(num_rounds: int) -> None:
    shares = [spent(number, num_rounds) for number in range(1, num_rounds + 1)]
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)


def test_the_noise_is_what_is_left_without_settings_and_rounds() -> None:
    # Two settings and two rounds: (a2 - a1) - (b2 - b1) = 0.02 has one degree of freedom and variance 4 s²
    figures = {"a": [0.0, 1.01], "b": [5.0, 5.99]}
    variance, freedom = noise(figures)
    assert freedom == 1
    assert variance == pytest.approx(0.02**2 / 4)
    assert noise({"a": [0.0, 1.0]}) == (0.0, 0)


def test_a_shift_of_a_whole_round_changes_no_ratio() -> None:
    figures = {"a": [0.0, 0.01, 0.02], "b": [0.3, 0.33, 0.29], "c": [0.1, 0.08, 0.11]}
    shifted = {name: [value + at for at, value in enumerate(values)] for name, values in figures.items()}
    one, other = (ratio_interval(each, "b", "a", confidence=0.99) for each in (figures, shifted))
    assert one == pytest.approx(other)


def test_the_interval_is_student_t_around_the_mean_of_the_rounds_of_both() -> None:
    figures = {"a": [0.0, 0.0], "b": [0.3, 0.32], "c": [0.1, 0.09]}
    variance, freedom = noise(figures)
    low, high = ratio_interval(figures, "b", "a", confidence=0.99) or (0.0, 0.0)
    half = student_t(0.99, freedom) * math.sqrt(2 * variance / 2)
    assert (math.log(low), math.log(high)) == pytest.approx((0.31 - half, 0.31 + half))


def test_a_setting_that_varies_more_than_the_others_is_judged_by_its_own_variance() -> None:
    quiet = {f"quiet{number}": [0.0, 0.001 * number, 0.0] for number in range(10)}
    figures = quiet | {"loud": [0.1, 0.5, -0.2]}
    race = after_round(figures, num_settings=11, num_rounds=8)
    low, high = race.ratios["loud"] if race.leader != "loud" else (0.0, 2.0)
    assert low < 1 < high


def test_one_setting_that_is_slower_leaves_and_the_equal_ones_settle_only_when_the_noise_allows_it() -> None:
    race = after_round({"a": [0.0, 0.001], "b": [0.7, 0.7], "c": [0.0, 0.0]}, num_settings=3, num_rounds=8)
    assert sorted(race.slower) == ["b"]
    exact = after_round({"a": [0.0] * 3, "b": [0.0, 1e-5, 0.0], "c": [1e-5, 0.0, 0.0]}, num_settings=3, num_rounds=8)
    assert exact.slower == {}
    assert exact.settled
    noisy = after_round(
        {"a": [0.0, 0.1, 0.0], "b": [0.1, 0.0, 0.1], "c": [0.0, 0.1, 0.1]}, num_settings=3, num_rounds=8
    )
    assert not noisy.settled


def test_single_trials_have_no_interval() -> None:
    assert after_round({"a": [0.0], "b": [0.7]}, num_settings=2, num_rounds=8).ratios == {}
    assert mean_interval({"a": [0.0], "b": [0.7]}, "a") is None


def test_the_mean_has_the_interval_of_the_noise_of_all_settings() -> None:
    low, high = mean_interval({"a": [0.0, 0.2], "b": [1.0, 1.2]}, "a") or (0.0, 0.0)
    half = student_t(0.95, 2) * math.sqrt(0.04 / 2 / 2)
    assert (math.log(low), math.log(high)) == pytest.approx((0.1 - half, 0.1 + half))


# -- simulated searches: twelve settings; those on recorded trials were measured once (docs/evidence/tune.md)

NUM_SETTINGS, ROUNDS, APART = 12, 8, 0.011


def search(chance: random.Random, fastest_noise: float, other_noise: float, drift: float) -> tuple[bool, float]:
    """Simulate one search. Return True if it eliminated the fastest setting, and by how much the winner is slower.

    The fastest has a noise of its own, all others are slower by the same, and rounds drift together.
    """
    true = {f"s{number}": APART * (number > 0) for number in range(NUM_SETTINGS)}
    figures: dict[str, list[float]] = {name: [] for name in true}
    left = list(true)
    for number in range(ROUNDS):
        shift = chance.gauss(0.0, drift)
        for name in left:
            figures[name].append(true[name] + shift + chance.gauss(0.0, other_noise if true[name] else fastest_noise))
        if number == 0:
            continue
        race = after_round(figures, num_settings=NUM_SETTINGS, num_rounds=ROUNDS)
        left = [name for name in left if name not in race.slower]
        if len(left) == 1 or race.settled:
            break
    return "s0" not in left, true[min(left, key=lambda name: statistics.fmean(figures[name]))]


@pytest.mark.parametrize("drift", [0.0, 0.1])
@pytest.mark.parametrize("noise", [(0.005, 0.005), (0.05, 0.05), (0.05, 0.005)])
def test_searches_eliminate_the_fastest_no_more_often_than_stated(noise: tuple[float, float], drift: float) -> None:
    chance = random.Random(f"{noise} {drift}")
    results = [search(chance, *noise, drift) for _ in range(200)]
    assert sum(is_wrong for is_wrong, _ in results) <= 17  # 10 of 200, and two standard deviations
    assert noise != (0.005, 0.005) or statistics.fmean(lost for _, lost in results) < APART / 10
