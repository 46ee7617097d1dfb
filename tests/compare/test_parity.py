"""Parity: trials in which one thing is changed, each caught by its own check."""

from typing import Any

import pytest
import torch
from comparison_records import DDP, FSDP2_TP, aggregate_rows, comparison, row_beside_ddp, trial

from toolkit.compare.specification import with_own_batches

BATCHES = [[f"{number}0", f"{number}1"] for number in range(8)]
LOSSES = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3]


def step(values: list[Any], number: int, value: Any) -> list[Any]:
    return [*values[: number - 1], value, *values[number:]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem": {"optimizer_dtype": "bfloat16"}}, "optimizer_dtype is bfloat16, expected float32"),
        ({"problem": {"master_dtype": "bfloat16"}}, "master_dtype is bfloat16, expected float32"),
        ({"problem": {"gradient_clipping": 0.0}}, "gradient_clipping is 0.0, 1.0 in ddp on 2 processes"),
        ({"problem": {"seed": 43}}, "seed is 43, 42 in ddp on 2 processes"),
        ({"problem": {"initial_weights_sha256": "b" * 64}}, "initial_weights_sha256 is bbbbbbbbbbbb, aaaaaaaaaaaa in"),
        ({"problem": {"world_size": 1, "ranks": 1}}, "1 ranks attested, expected 2"),
        ({"problem": {"world_size": [2, 1]}}, "world_size is 2, 1 by rank, expected 2"),
        ({"problem": {"engine": "fsdp2"}}, "engine is fsdp2, expected ddp"),
        ({"batch_sha256": step(BATCHES, 3, ["20", "x1"])}, "batch of step 3 on rank 1 is x1, 21 in ddp on 2 processes"),
        ({"batch_sha256": step(BATCHES, 1, ["00"])}, "step 1 has batches of 1 ranks, of 2 in ddp on 2 processes"),
        ({"step_tokens": [150] * 8}, "step 1 has 150 tokens, 200 in ddp on 2 processes"),
        ({"step_non_padding_tokens": [200] * 8}, "step 1 has 200 non-padding tokens, 180 in ddp on 2 processes"),
        ({"step_supervised_tokens": [None] * 8}, "step 1 has n/a supervised tokens, "),
        ({"step_supervised_tokens": [180] * 8}, "step 1 has 180 supervised tokens, 90 in ddp on 2 processes"),
        ({"timed_step_numbers": [3, 4, 5, 6, 7]}, "step 8 is not timed, with untimed_steps 2"),
        ({"timed_step_numbers": [1, 2, 3, 4, 5, 6, 7, 8]}, "step 1 is timed, with untimed_steps 2"),
        ({"losses": step(LOSSES, 1, 2.00003)}, "loss of step 1 is 2.000030, allowed 2.000000 ± 0.000020 of ddp"),
        ({"losses": step(LOSSES, 8, 1.31)}, "loss of step 8 is 1.310000, allowed 1.300000 ± 0.000130 of ddp"),
        ({"grad_norms": [3.1] * 8}, "gradient norm of step 1 is 3.100000, allowed 3.000000 ± 0.003000 of ddp"),
    ],
)
def test_a_trial_of_another_problem_fails_its_own_check_and_has_no_speed(changes: dict[str, Any], message: str) -> None:
    row = row_beside_ddp(**changes)
    assert row.parity == "parity failed"
    assert row.parity_message.startswith(f"repeat 1: {message}")
    speeds = ("tokens_per_second", "ratio_to_reference", "ratio_interval", "difference", "rank", "step_seconds_median")
    assert [getattr(row, key) for key in speeds] == [None] * 6
    assert row.step_seconds == ()


SPLIT = {"engine": "fsdp2", "sharding": "full_shard", "layout": "dp_shard 2 x tp 2", "global_batch_size": 16}


def row_of_split_model(*, problem: dict[str, Any] | None = None, words: tuple[str, ...] = (), **changes: Any) -> Any:
    """`fsdp2_tp` beside `ddp` on four ranks: two groups with 8 sequences each, and four with 4.

    Longer batches of the same sequences have more padding: 480 tokens per step, and 400 under `ddp`.
    """
    spec = comparison(
        "ddp",
        "fsdp2_tp",
        expected={"ddp": DDP, "fsdp2_tp": FSDP2_TP},
        world_sizes=(4,),
        training_arguments=("--tp", "2", "--per_device_train_batch_size", "4"),
        extra_arguments={"fsdp2_tp": words},
    )
    spec = with_own_batches(spec)
    batches = [[f"{step}{rank // 2}" for rank in range(4)] for step in range(8)]
    own = {"problem": SPLIT | (problem or {}), "batch_sha256": batches, "step_tokens": [480] * 8}
    trials = [trial("ddp", r, world_size=4, problem={"global_batch_size": 16}) for r in range(3)]
    trials += [trial("fsdp2_tp", r, world_size=4, **own | changes) for r in range(3)]
    return aggregate_rows(spec, *trials)["fsdp2_tp-n4"]


def test_a_split_model_is_ranked_with_ddp_by_its_tokens_without_padding_unless_it_has_a_batch_of_its_own() -> None:
    row = row_of_split_model()
    assert (row.parity, row.parity_message, row.group) == ("agrees", None, None)
    assert row.ratio_to_reference == pytest.approx(1.0)
    assert row.tokens_per_second == pytest.approx(480 / 0.5, rel=1e-3)
    assert row.difference == "no difference seen"
    own_batch = row_of_split_model(words=("--per_device_train_batch_size", "4"))
    assert own_batch.group == "per_device_train_batch_size 4"


def test_a_split_model_that_trains_another_problem_fails_its_own_check() -> None:
    messages = {
        "layout is dp_shard 4, expected dp_shard 2 x tp 2": {"problem": {"layout": "dp_shard 4"}},
        "compute_dtype is float16, float32 in ddp on 4 processes, repeat 1; `--bf16 true` of a script holds under each"
        " preset": {"problem": {"compute_dtype": "float16"}},
        "global_batch_size is 8, 16 in ddp on 4 processes, repeat 1": {"problem": {"global_batch_size": 8}},
        "step 1 has 361 non-padding tokens, 360 in ddp on 4 processes, repeat 1": {
            "step_non_padding_tokens": [361] * 8
        },
    }
    for message, changes in messages.items():
        assert row_of_split_model(**changes).parity_message == f"repeat 1: {message}"


def test_an_equal_row_agrees_and_keeps_its_speed() -> None:
    row = row_beside_ddp()
    assert (row.parity, row.parity_message, row.repeats) == ("agrees", None, 3)
    assert row.tokens_per_second == pytest.approx(200 / 0.5, rel=1e-3)
    assert (row.difference, row.rank) == ("no difference seen", None)
    assert row.ratio_interval[0] < row.ratio_to_reference == 1.0 < row.ratio_interval[1]


def test_a_loss_may_vary_as_much_as_the_baseline_s_repeats() -> None:
    baseline = [trial("ddp", repeat, losses=step(LOSSES, 8, 1.3 + 0.01 * repeat)) for repeat in range(3)]
    outside = "repeat 1: loss of step 8 is 1.380000, allowed 1.310000 ± 0.060000 of ddp"
    for loss, message in ((1.36, None), (1.38, outside)):
        others = [trial("other", repeat, losses=step(LOSSES, 8, loss)) for repeat in range(3)]
        row = aggregate_rows(comparison("ddp", "other"), *baseline, *others)["other-n2"]
        assert row.parity_message == message


def test_a_loss_that_fsdp2_rounded_to_bf16_is_within_the_band() -> None:
    """The largest rounding errors lie just above a power of two: bf16 keeps 8 significant bits."""
    loss = 1.004
    half, rounded = {"compute_dtype": "bfloat16"}, float(torch.tensor(loss).bfloat16())
    assert rounded != pytest.approx(loss, rel=5e-4), "a case that needs the wider band"
    baseline = [trial("ddp", repeat, problem=half, losses=step(LOSSES, 1, loss)) for repeat in range(3)]
    for found, parity in ((rounded, "agrees"), (loss * 1.006, "parity failed")):
        others = [trial("fsdp2", repeat, problem=half, losses=step(LOSSES, 1, found)) for repeat in range(3)]
        row = aggregate_rows(comparison("ddp", "fsdp2"), *baseline, *others)["fsdp2-n2"]
        assert row.parity == parity, row.parity_message


def test_the_band_of_losses_grows_with_the_number_of_steps() -> None:
    """1e-4 up to step 30, 2e-4 at step 60."""
    long = {"losses": [2.0] * 60, "step_tokens": [200] * 60}
    for last, parity in ((2.0003, "agrees"), (2.0005, "parity failed")):
        changed = long | {"losses": [2.0] * 59 + [last]}
        trials = [trial("ddp", 0, **long), trial("other", 0, **changed)]
        assert aggregate_rows(comparison("ddp", "other", repeats=1), *trials)["other-n2"].parity == parity


def test_a_first_timed_step_that_is_slow_in_every_repeat_fails_parity_and_in_one_is_noise() -> None:
    row = row_beside_ddp(step_seconds=[9.0, 0.7, 9.0, *[0.5] * 5])
    slow = "step 3, the first timed, took 9.000 s, the median of the others 0.500 s: raise untimed_steps"
    assert (row.parity, row.parity_message) == ("parity failed", slow)
    noisy = trial("other", 0, step_seconds=[9.0, 0.7, 2.0, *[0.5] * 5])
    trials = [*(trial("ddp", repeat) for repeat in range(3)), noisy, *(trial("other", r) for r in (1, 2))]
    assert aggregate_rows(comparison("ddp", "other"), *trials)["other-n2"].parity == "agrees"


@pytest.mark.parametrize(
    ("scaling", "changes", "message"),
    [
        ("weak", {}, None),
        (
            "weak",
            {"activation_checkpointing": True},
            "activation_checkpointing is True, False in ddp on 1 process, repeat 1",
        ),
        ("strong", {}, "global_batch_size is 4, 2 in ddp on 1 process, repeat 1"),
    ],
)
def test_the_baseline_trains_one_problem_with_every_number_of_processes(
    scaling: str, changes: dict[str, Any], message: str | None
) -> None:
    trials = [trial("ddp", r, world_size=n, problem=changes if n == 2 else {}) for n in (1, 2) for r in range(3)]
    rows = aggregate_rows(comparison("ddp", world_sizes=(1, 2), scaling=scaling), *trials)
    assert rows["ddp-n1"].parity == "reference"
    assert rows["ddp-n2"].parity_message == (message and f"repeat 1: {message}")


def test_nothing_is_compared_with_a_failed_baseline() -> None:
    failed = trial("ddp", 0, status="out_of_memory", message="no room", tokens_per_second=None)
    row = aggregate_rows(comparison("ddp", "other", repeats=1), failed, trial("other", 0))["other-n2"]
    assert (row.parity, row.ratio_to_reference, row.tokens_per_second) == (None, None, pytest.approx(400))


@pytest.mark.parametrize("words", [("--optim_args", "rank=8"), ("--optim_target_modules", "attn")])
def test_arguments_and_targets_of_an_optimizer_are_part_of_the_problem(words: tuple[str, ...]) -> None:
    every = ("--optim", "galore_adamw", "--optim_args", "rank=4", "--optim_target_modules", "mlp")
    spec = comparison("ddp", "other", training_arguments=every, extra_arguments={"other": words})
    assert row_beside_ddp(spec=spec, losses=[9.0] * 8).group == "optim galore_adamw"
    spec = comparison("ddp", "other", training_arguments=every)
    assert row_beside_ddp(spec=spec).group is None


@pytest.mark.parametrize(
    ("words", "group"),
    [
        (("--ddp_comm_hook", "bf16"), "ddp_comm_hook bf16"),
        (("--optim", "adamw_bnb_8bit"), "optim adamw_bnb_8bit"),
        (("--optim", "adafactor"), "optim adafactor"),  # its states are fp32, and not AdamW's
        (("--optim", "paged_adamw_32bit"), None),  # AdamWs with fp32 states are one optimizer
    ],
)
def test_a_row_that_differs_by_design_forms_its_own_group(words: tuple[str, ...], group: str | None) -> None:
    spec = comparison("ddp", "other", extra_arguments={"other": words})
    row = row_beside_ddp(spec=spec, losses=LOSSES if group is None else [9.0] * 8, slower=0.5)
    assert (row.group, row.difference, row.ratio_to_reference) == (group, "faster", pytest.approx(2.0))
    assert (row.parity, row.rank) == (("agrees", 1) if group is None else (None, None))
    assert row_beside_ddp(spec=spec, problem={"seed": 1}).parity == "parity failed"
    expected = {"ddp": DDP, "other": DDP.model_copy(update={"quantises": True})}
    assert row_beside_ddp(spec=comparison("ddp", "other", expected=expected)).group == "quantised communication"
