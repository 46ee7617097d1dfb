"""What a comparison claims of its rows: on plain trials of which one thing is changed, each caught by its own check."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from toolkit.compare.aggregate import compared
from toolkit.compare.dry_run import dry_run_text
from toolkit.compare.ledger import Ledger
from toolkit.compare.trials import Comparison, Trial

Row = dict[str, Any]
SECONDS = {0: 0.50, 1: 0.505, 2: 0.495}
"""Of a step, by repeat: trials vary by a hundredth."""


def comparison(*presets: str, num_processes: tuple[int, ...] = (2,), **changes: Any) -> Comparison:
    promise = {"engine": "ddp", "sharding": "replicate", "quantises": False}
    return Comparison(
        presets=list(presets),
        preset_files={},
        promises={name: promise for name in presets},
        loads=changes.pop("loads", {}),
        extra_arguments=changes.pop("extra_arguments", {}),
        num_processes=list(num_processes),
        training_arguments=changes.pop("training_arguments", []),
        untimed_steps=2,
        reference="ddp",
        cpu=True,
        **{"repeats": 3, **changes},
    )


def trial(
    preset: str, repeat: int, *, world_size: int = 2, slower: float = 1.0, problem: Row | None = None, **changes: Any
) -> Row:
    facts = {
        "ranks": world_size,
        "world_size": world_size,
        "engine": "ddp",
        "sharding": "replicate",
        "compute_dtype": "float32",
        "master_dtype": "float32",
        "promised_masters": "float32",
        "optimizer_dtype": "float32",
        "gradient_clipping": 1.0,
        "activation_checkpointing": False,
        "num_trainable_params": 10,
        "initial_weights_sha256": "a" * 64,
        "packing": None,
        "global_batch_size": 2 * world_size,
        "learning_rate": 1e-3,
        "seed": 42,
        "max_steps": 8,
    }
    seconds = SECONDS[repeat] * slower
    return {
        "trial": Trial(preset=preset, num_processes=world_size, repeat=repeat).id,
        "preset": preset,
        "world_size": world_size,
        "repeat": repeat,
        "position": 0,
        "status": "completed",
        "message": None,
        "problem": facts | (problem or {}),
        "step_seconds": [9.0, 0.7, *[seconds] * 6],
        "step_tokens": [100 * world_size] * 8,
        "step_non_padding_tokens": [90 * world_size] * 8,
        "step_supervised_tokens": [45 * world_size] * 8,
        "timed_step_numbers": [3, 4, 5, 6, 7, 8],
        "batch_sha256": [[f"{step}{rank}" for rank in range(world_size)] for step in range(8)],
        "losses": [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3],
        "grad_norms": [3.0] * 8,
        "tokens_per_second": 100 * world_size / seconds,
        "tokens_per_cpu_second": 10.0,
        "supervised_tokens_per_second": 10.0,
        "rank_skew": 1.0,
        "wall_seconds": 10.0,
        "timed_seconds": 6 * seconds,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "peak_host_bytes": 1000 + repeat,
        "peak_rank": repeat % 2,
        "parity": None,
        "parity_message": None,
        **changes,
    }


def rows_of(spec: Comparison, *trials: Row, unsupported: dict[str, str] | None = None) -> dict[str, Row]:
    rows, _ = compared({row["trial"]: row for row in trials}, spec, unsupported or {})
    return {row["trial"]: row for row in rows}


def beside_ddp(*, repeats: int = 3, spec: Comparison | None = None, **changes: Any) -> Row:
    """The row of `other`, whose trials have `changes`, beside an unchanged reference."""
    reference = [trial("ddp", repeat) for repeat in range(repeats)]
    others = [trial("other", repeat, **changes) for repeat in range(repeats)]
    return rows_of(spec or comparison("ddp", "other", repeats=repeats), *reference, *others)["other-n2"]


def step(values: list[Any], number: int, value: Any) -> list[Any]:
    """The list with one step's value changed."""
    return [*values[: number - 1], value, *values[number:]]


BATCHES = [[f"{number}0", f"{number}1"] for number in range(8)]
LOSSES = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problem": {"optimizer_dtype": "bfloat16"}}, "optimizer_dtype is bfloat16, promised float32"),
        ({"problem": {"master_dtype": "bfloat16"}}, "master_dtype is bfloat16, promised float32"),
        ({"problem": {"gradient_clipping": 0.0}}, "gradient_clipping is 0.0, 1.0 in ddp-n2-r0"),
        ({"problem": {"seed": 43}}, "seed is 43, 42 in ddp-n2-r0"),
        ({"problem": {"learning_rate": 2e-3}}, "learning_rate is 0.002, 0.001 in ddp-n2-r0"),
        ({"problem": {"global_batch_size": 8}}, "global_batch_size is 8, 4 in ddp-n2-r0"),
        ({"problem": {"num_trainable_params": 9}}, "num_trainable_params is 9, 10 in ddp-n2-r0"),
        ({"problem": {"activation_checkpointing": True}}, "activation_checkpointing is True, False in ddp-n2-r0"),
        (
            {"problem": {"initial_weights_sha256": "b" * 64}},
            "initial_weights_sha256 is bbbbbbbbbbbb, aaaaaaaaaaaa in ddp-n2-r0",
        ),
        ({"problem": {"world_size": 1, "ranks": 1}}, "1 ranks attested, 2 were asked for"),
        ({"problem": {"world_size": [2, 1]}}, "world_size is 2, 1 by rank, promised 2"),
        ({"problem": {"engine": "fsdp2"}}, "engine is fsdp2, promised ddp"),
        (
            {"batch_sha256": step(BATCHES, 3, ["20", "x1"])},
            "batch of step 3 on rank 1 is x1, 21 in ddp-n2-r0",
        ),
        ({"batch_sha256": step(BATCHES, 1, ["00"])}, "step 1 has batches of 1 ranks, of 2 in ddp-n2-r0"),
        ({"step_tokens": [150] * 8}, "step 1 has 150 tokens, 200 in ddp-n2-r0"),
        ({"step_tokens": [0] * 8}, "step 1 has 0 tokens, 200 in ddp-n2-r0"),
        ({"step_non_padding_tokens": [200] * 8}, "step 1 has 200 non-padding tokens, 180 in ddp-n2-r0"),
        ({"step_supervised_tokens": [180] * 8}, "step 1 has 180 supervised tokens, 90 in ddp-n2-r0"),
        ({"step_tokens": [150] * 8, "batch_sha256": step(BATCHES, 2, ["x0", "x1"])}, "batch of step 2 on rank 0 is x0"),
        ({"timed_step_numbers": [3, 4, 5, 6, 7]}, "step 8 is not timed, with untimed_steps 2"),
        ({"losses": step(LOSSES, 1, 2.00003)}, "loss of step 1 is 2.000030, allowed 2.000000 ± 0.000020 of ddp"),
        ({"losses": step(LOSSES, 8, 1.31)}, "loss of step 8 is 1.310000, allowed 1.300000 ± 0.000130 of ddp"),
        ({"grad_norms": [3.1] * 8}, "gradient norm of step 1 is 3.100000, allowed 3.000000 ± 0.003000 of ddp"),
    ],
)
def test_another_problem_is_caught_by_its_own_check_and_its_speed_withheld(changes: Row, said: str) -> None:
    row = beside_ddp(**changes)
    assert row["parity"] == "parity failed"
    assert row["parity_message"].startswith(f"repeat 0: {said}")
    speeds = ("tokens_per_second", "ratio_to_reference", "ratio_interval", "difference", "rank", "step_seconds_median")
    assert [row[key] for key in speeds] == [None] * 6
    assert row["step_seconds"] == []


def test_an_unchanged_row_agrees_and_keeps_its_speed() -> None:
    row = beside_ddp()
    assert (row["parity"], row["parity_message"], row["repeats"]) == ("agrees", None, 3)
    assert row["tokens_per_second"] == pytest.approx(200 / 0.5, rel=1e-3)
    assert (row["difference"], row["rank"]) == ("no difference seen", None)
    assert row["ratio_interval"][0] < row["ratio_to_reference"] == 1.0 < row["ratio_interval"][1]


def test_one_repeat_in_three_that_trained_something_else_is_enough() -> None:
    reference = [trial("ddp", repeat) for repeat in range(3)]
    others = [trial("other", repeat, problem={"seed": 43} if repeat == 2 else None) for repeat in range(3)]
    row = rows_of(comparison("ddp", "other"), *reference, *others)["other-n2"]
    assert row["parity_message"] == "repeat 2: seed is 43, 42 in ddp-n2-r0"


def test_a_loss_may_vary_as_the_references_own_repeats_do() -> None:
    reference = [trial("ddp", repeat, losses=step(LOSSES, 8, 1.3 + 0.01 * repeat)) for repeat in range(3)]
    inside = [trial("other", repeat, losses=step(LOSSES, 8, 1.36)) for repeat in range(3)]
    assert rows_of(comparison("ddp", "other"), *reference, *inside)["other-n2"]["parity"] == "agrees"
    outside = [trial("other", repeat, losses=step(LOSSES, 8, 1.38)) for repeat in range(3)]
    row = rows_of(comparison("ddp", "other"), *reference, *outside)["other-n2"]
    assert row["parity_message"] == "repeat 0: loss of step 8 is 1.380000, allowed 1.310000 ± 0.060000 of ddp"


def test_losses_in_bf16_have_a_wider_floor() -> None:
    half = {"compute_dtype": "bfloat16"}
    reference = [trial("ddp", repeat, problem=half) for repeat in range(3)]
    others = [trial("other", repeat, problem=half, losses=step(LOSSES, 1, 2.0015)) for repeat in range(3)]
    assert rows_of(comparison("ddp", "other"), *reference, *others)["other-n2"]["parity"] == "agrees"


def test_the_floor_of_a_curve_grows_with_a_long_run() -> None:
    """1e-4 up to step 30, 2e-4 at step 60."""
    long = {"losses": [2.0] * 60, "step_tokens": [200] * 60}
    for last, parity in ((2.0003, "agrees"), (2.0005, "parity failed")):
        changed = long | {"losses": [2.0] * 59 + [last]}
        trials = [trial("ddp", 0, **long), trial("other", 0, **changed)]
        assert rows_of(comparison("ddp", "other", repeats=1), *trials)["other-n2"]["parity"] == parity


def test_steps_that_only_one_side_ran_are_not_held_against_it() -> None:
    short = {
        "losses": LOSSES[:7],
        "batch_sha256": BATCHES[:7],
        "step_tokens": [200] * 7,
        "step_seconds": [9.0, 0.7, *[0.5] * 5],
        "timed_step_numbers": [3, 4, 5, 6, 7],
    }
    row = beside_ddp(**short)
    assert (row["parity"], row["timed_steps"]) == ("agrees", 5)


def test_every_speed_counts_the_same_steps() -> None:
    """The reference ran a slow step more: it is not part of its speed beside a row that ended before it."""
    short = [trial("other", 0, step_seconds=[9.0, 0.7, *[0.5] * 4], timed_step_numbers=[3, 4, 5, 6])]
    slow_end = [trial("ddp", 0, step_seconds=[9.0, 0.7, 0.5, 0.5, 0.5, 0.5, 5.0, 5.0])]
    rows = rows_of(comparison("ddp", "other", repeats=1), *slow_end, *short)
    assert rows["ddp-n2"]["tokens_per_second"] == pytest.approx(400)
    assert rows["other-n2"]["ratio_to_reference"] == pytest.approx(1.0)


def test_a_first_step_left_in_the_timing_is_caught() -> None:
    """However slow it is: the steps to be timed are known."""
    for first in (9.0, 0.5):
        row = beside_ddp(step_seconds=[first, *[0.5] * 7], timed_step_numbers=[1, 2, 3, 4, 5, 6, 7, 8])
        assert row["parity"] == "parity failed"
        assert row["parity_message"] == "repeat 0: step 1 is timed, with untimed_steps 2"


def test_a_timed_step_that_is_slow_in_every_repeat_belongs_to_the_untimed() -> None:
    row = beside_ddp(step_seconds=[9.0, 0.7, 9.0, *[0.5] * 5])
    assert row["parity"] == "parity failed"
    assert row["parity_message"] == (
        "step 3, the first timed, took 9.000 s, the median of the others 0.500 s: raise untimed_steps"
    )


def test_a_single_slow_step_in_one_repeat_is_noise() -> None:
    noisy = trial("other", 0, step_seconds=[9.0, 0.7, 2.0, *[0.5] * 5])
    trials = [*(trial("ddp", repeat) for repeat in range(3)), noisy, *(trial("other", r) for r in (1, 2))]
    assert rows_of(comparison("ddp", "other"), *trials)["other-n2"]["parity"] == "agrees"


def test_activation_checkpointing_that_changes_with_the_world_size_is_caught() -> None:
    spec = comparison("ddp", num_processes=(1, 2))
    small = [trial("ddp", repeat, world_size=1) for repeat in range(3)]
    large = [trial("ddp", repeat, problem={"activation_checkpointing": True}) for repeat in range(3)]
    rows = rows_of(spec, *small, *large)
    assert rows["ddp-n1"]["parity"] == "reference"
    assert rows["ddp-n2"]["parity_message"] == "repeat 0: activation_checkpointing is True, False in ddp-n1-r0"


def test_a_strongly_scaled_batch_that_grew_is_caught() -> None:
    trials = [trial("ddp", repeat, world_size=n) for n in (1, 2) for repeat in range(3)]
    weak = rows_of(comparison("ddp", num_processes=(1, 2), scaling="weak"), *trials)
    assert weak["ddp-n2"]["parity"] == "reference"
    strong = rows_of(comparison("ddp", num_processes=(1, 2), scaling="strong"), *trials)
    assert strong["ddp-n2"]["parity_message"] == "repeat 0: global_batch_size is 4, 2 in ddp-n1-r0"


def test_scaling_is_against_the_fewest_processes() -> None:
    spec = comparison("ddp", num_processes=(1, 2), scaling="weak")
    rows = rows_of(
        spec, *(trial("ddp", r, world_size=n, slower=1.25 if n == 2 else 1) for n in (1, 2) for r in range(3))
    )
    assert (rows["ddp-n1"]["speed_up"], rows["ddp-n1"]["scaling_efficiency"]) == (1.0, 1.0)
    assert rows["ddp-n2"]["speed_up"] == pytest.approx(1.6)
    assert rows["ddp-n2"]["scaling_efficiency"] == pytest.approx(0.8)


def test_a_preset_with_one_number_of_processes_has_no_scaling_among_others_that_have() -> None:
    """fsdp2 needs two processes: beside ddp with one and two it is no 100 % of ideal."""
    spec = comparison("ddp", "fsdp2", num_processes=(1, 2), scaling="weak")
    trials = [trial("ddp", r, world_size=n) for n in (1, 2) for r in range(3)]
    rows = rows_of(spec, *trials, *(trial("fsdp2", r) for r in range(3)))
    assert (rows["fsdp2-n2"]["speed_up"], rows["fsdp2-n2"]["scaling_efficiency"]) == (None, None)
    assert rows["ddp-n2"]["scaling_efficiency"] == pytest.approx(1.0)


def test_rows_are_ranked_only_where_intervals_separate_them() -> None:
    trials = [trial("ddp", repeat) for repeat in range(3)]
    trials += [trial("slow", repeat, slower=1.5) for repeat in range(3)]
    rows = rows_of(comparison("ddp", "slow"), *trials)
    assert [(row["rank"], row["difference"]) for row in rows.values()] == [(1, "reference"), (2, "slower")]
    trials += [trial("alike", repeat, slower=1.001) for repeat in range(3)]
    rows = rows_of(comparison("ddp", "slow", "alike"), *trials)
    assert [row["rank"] for row in rows.values()] == [None, 3, None]
    assert rows["alike-n2"]["difference"] == "no difference seen"


def test_single_runs_claim_nothing() -> None:
    row = beside_ddp(repeats=1, slower=2.0)
    assert row["ratio_to_reference"] == pytest.approx(0.5)
    claims = ("ratio_interval", "difference", "rank", "tokens_per_second_interval", "step_seconds_interval")
    assert [row[key] for key in claims] == [None] * 5


def test_one_rank_slowed_is_reported_as_skew() -> None:
    from toolkit.runs.steps import rank_skew

    steps = [[{"own_seconds": 0.1}, {"own_seconds": 0.1 * slow}] for slow in (2.0, 2.1, 1.9, 9.0, 2.0)]
    assert rank_skew(steps) == pytest.approx(2.0)
    assert beside_ddp(rank_skew=2.0)["rank_skew"] == pytest.approx(2.0)


def test_a_row_is_as_failed_as_its_worst_repeat() -> None:
    failure = {"kind": "out_of_memory", "phase": "backward", "measured_bytes": 7}
    changes = {"status": "out_of_memory", "message": "no room", "failure": failure, "tokens_per_second": None}
    trials = [trial("ddp", r) for r in range(3)] + [trial("other", 0), trial("other", 1, **changes)]
    row = rows_of(comparison("ddp", "other"), *trials)["other-n2"]
    assert (row["status"], row["repeats"], row["parity"], row["ratio_to_reference"]) == ("out_of_memory", 1, None, None)
    assert row["message"] == "1 of 2 repeats completed; no room"
    assert row["failure"] == failure


def test_a_row_that_cannot_run_here_says_why_and_ranks_nobody() -> None:
    spec = comparison("ddp", "zeropp")
    rows = rows_of(spec, *(trial("ddp", r) for r in range(3)), unsupported={"zeropp-n2": "needs CUDA kernels"})
    row = rows["zeropp-n2"]
    assert (row["status"], row["message"], row["failure"]["kind"]) == (
        "not_supported",
        "needs CUDA kernels",
        "not_supported",
    )
    assert rows["ddp-n2"]["rank"] is None  # nobody to be ranked with


def test_nothing_is_compared_with_a_reference_that_failed() -> None:
    failed = trial("ddp", 0, status="out_of_memory", message="no room", tokens_per_second=None)
    row = rows_of(comparison("ddp", "other", repeats=1), failed, trial("other", 0))["other-n2"]
    assert (row["parity"], row["ratio_to_reference"], row["tokens_per_second"]) == (None, None, pytest.approx(400))


def test_a_communication_hook_is_a_group_of_its_own() -> None:
    spec = comparison("ddp", "ddp_int8", extra_arguments={"ddp_int8": ["--ddp_comm_hook", "int8"]})
    trials = [trial("ddp", r) for r in range(3)] + [
        trial("ddp_int8", r, losses=[9.0] * 8, slower=0.5) for r in range(3)
    ]
    row = rows_of(spec, *trials)["ddp_int8-n2"]
    assert (row["group"], row["parity"], row["rank"]) == ("ddp_comm_hook int8", None, None)
    assert re.match(r"differs by design: ddp_comm_hook int8", row["parity_message"])
    assert (row["difference"], row["ratio_to_reference"]) == ("faster", pytest.approx(2.0))


def test_a_group_is_still_held_to_the_same_data() -> None:
    spec = comparison("ddp", "ddp_int8", extra_arguments={"ddp_int8": ["--ddp_comm_hook", "int8"]})
    trials = [trial("ddp", r) for r in range(3)]
    trials += [trial("ddp_int8", r, problem={"seed": 1}) for r in range(3)]
    assert rows_of(spec, *trials)["ddp_int8-n2"]["parity"] == "parity failed"


def test_quantised_communication_is_a_group_of_its_own() -> None:
    spec = comparison("ddp", "zeropp")
    spec.promises["zeropp"] = spec.promises["ddp"] | {"quantises": True}
    rows = rows_of(spec, *(trial(name, r) for name in ("ddp", "zeropp") for r in range(3)))
    assert rows["zeropp-n2"]["group"] == "quantised communication"


def test_peaks_are_the_largest_of_all_repeats() -> None:
    row = beside_ddp()
    assert (row["peak_host_bytes"], row["peak_rank"]) == (1002, 0)


def test_trials_are_interleaved_in_an_order_of_their_own_each_round() -> None:
    spec = comparison("ddp", "a", "b", "c", order_seed=1)
    order = [(each.repeat, each.preset) for each in spec.trials()]
    assert sorted(order) == sorted((repeat, name) for repeat in range(3) for name in ("ddp", "a", "b", "c"))
    assert [repeat for repeat, _ in order] == [0] * 4 + [1] * 4 + [2] * 4
    rounds = [tuple(name for repeat, name in order if repeat == number) for number in range(3)]
    assert len(set(rounds)) > 1
    assert order == [(each.repeat, each.preset) for each in spec.trials()]
    other = comparison("ddp", "a", "b", "c", order_seed=2)
    assert order != [(each.repeat, each.preset) for each in other.trials()]


def test_a_dry_run_multiplies_what_the_ledger_took_by_the_price(tmp_path: Path) -> None:
    """Two trials of 90 s are in the ledger; the other of each row takes as long on two GPUs at 4 an hour."""
    spec = comparison("ddp", "zero2", repeats=2)
    spec.loads.update(ddp="ddp", zero2="zero2")
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for preset in ("ddp", "zero2"):
        ledger.append(trial(preset, 0, wall_seconds=90.0))
    last = dry_run_text(spec, tmp_path, {}, price_per_gpu_hour=4.0).splitlines()[-1]
    assert last == "2 of 4 trials to run, in 3 min 00 s, at 0.40; nothing was started"


def test_the_bars_of_a_terminal_follow_one_trial_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.compare.screen import Screen

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(2)
    assert screen.bars is not None
    with screen:
        for name in ("ddp-n2-r0", "zero2-n2-r0"):
            screen.start(name)
            screen.line("step 3/8  on rank 0: loss 2.0")
            steps = screen.bars.tasks[-1]
            assert (steps.description, steps.completed, steps.total) == (name, 3, 8)
            screen.finish(name, {"status": "failed", "message": "m", "wall_seconds": 1.0}, False)
    assert screen.bars.tasks[0].completed == 2


def test_one_process_of_ddp_is_wrapped_on_a_cpu_and_not_on_a_gpu() -> None:
    from dataclasses import replace

    on_cpu = comparison("ddp")
    assert [on_cpu.promised("ddp", n)["engine"] for n in (1, 2)] == ["ddp", "ddp"]
    on_gpu = replace(on_cpu, cpu=False)
    assert [on_gpu.promised("ddp", n)["engine"] for n in (1, 2)] == ["none", "ddp"]
