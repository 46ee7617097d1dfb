"""The options and specification of a comparison: its trials, and the file that a resumed one must match."""

import json
from pathlib import Path
from typing import Any

import pytest
from comparison_records import DDP, FSDP2_TP, checked_comparison, comparison

from toolkit.compare.options import CompareOptions
from toolkit.compare.rows import RowKey
from toolkit.compare.specification import ComparisonSpec, make_specification, open_comparison, with_own_batches
from toolkit.errors import ToolkitError
from toolkit.job.global_batch import strong_scaling_batches
from toolkit.job.job import Job


def test_trials_are_interleaved_in_a_new_order_each_round() -> None:
    spec = comparison("ddp", "a", "b", "c", order_seed=1)
    order = [(each.repeat, each.row.preset) for each in spec.trials()]
    assert sorted(order) == sorted((repeat, name) for repeat in range(3) for name in ("ddp", "a", "b", "c"))
    assert [repeat for repeat, _ in order] == [0] * 4 + [1] * 4 + [2] * 4
    rounds = [tuple(name for repeat, name in order if repeat == number) for number in range(3)]
    assert len(set(rounds)) > 1
    assert spec.trials() == spec.trials() != comparison("ddp", "a", "b", "c", order_seed=2).trials()


def test_a_single_ddp_process_is_wrapped_on_a_cpu_and_not_on_a_gpu() -> None:
    rows = [RowKey(preset="ddp", world_size=size) for size in (1, 2)]
    for cpu, engines in {True: ["ddp", "ddp"], False: ["none", "ddp"]}.items():
        assert [comparison("ddp", cpu=cpu).expected_facts(row)["engine"] for row in rows] == engines


def with_split_model(*words: str, **changes: Any) -> ComparisonSpec:
    """`ddp` and `fsdp2_tp` on four and eight processes."""
    expected = {"ddp": DDP, "fsdp2_tp": FSDP2_TP}
    spec = comparison("ddp", "fsdp2_tp", expected=expected, world_sizes=(4, 8), training_arguments=words, **changes)
    return with_own_batches(spec)


def test_a_degree_goes_to_the_presets_that_have_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("tp: 2\nmax_steps: 8\n")
    ddp, split = (RowKey(preset=name, world_size=4) for name in ("ddp", "fsdp2_tp"))
    for given in (["--tp", "2", "--max_steps", "8"], ["--tp=2", "--max_steps", "8"]):
        spec = with_split_model(*given)
        assert spec.own_argv(ddp) == ["--max_steps", "8"]
        assert spec.own_argv(split)[: len(given)] == given
    spec = with_split_model(str(tmp_path / "job.yaml"))
    assert (spec.own_argv(ddp)[1:], spec.layout(ddp)) == (["--tp", "1"], None)
    assert str(spec.layout(split)) == "dp_shard 2 x tp 2"
    no_preset_has_it = with_split_model("--cp", "2")
    assert no_preset_has_it.own_argv(ddp) == ["--cp", "2"]  # which is refused


def test_ranks_that_share_a_batch_have_as_many_sequences_as_all_of_them_would() -> None:
    spec = with_split_model("--tp", "2", "--per_device_train_batch_size", "3")
    assert spec.batches == {f"fsdp2_tp-n{size}": {"per_device_train_batch_size": 6} for size in (4, 8)}
    assert [(row.world_size, spec.sequences_per_accumulation_step(row)) for row in spec.rows()] == [
        *[(4, 12)] * 2,
        *[(8, 24)] * 2,
    ]
    strong = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    scaled = with_split_model("--tp", "2", batches={"fsdp2_tp-n8": strong, "ddp-n8": strong})
    assert scaled.batches["fsdp2_tp-n8"] == strong | {"per_device_train_batch_size": 4}
    own = {"fsdp2_tp": ("--per_device_train_batch_size", "5")}
    assert with_split_model("--tp", "2", extra_arguments=own).batches == {}


def test_strong_scaling_keeps_the_global_batch() -> None:
    for batches in ([(4, 1), (2, 1), (1, 1)], [(3, 4), (3, 2), (3, 1)]):
        job = Job(per_device_train_batch_size=batches[0][0], gradient_accumulation_steps=batches[0][1])
        assert [tuple(own.values()) for own in strong_scaling_batches(job, [1, 2, 4]).values()] == batches
        with pytest.raises(ToolkitError, match="sequences cannot be shared by 7 processes"):
            strong_scaling_batches(job, [1, 7])


def options(*words: str, **given: Any) -> CompareOptions:
    """The options of a comparison of `ddp` on two processes with these training arguments."""
    known = {"preset": ("ddp",), "num_processes": ("2",), "output_dir": Path("out"), "cpu": True}
    return CompareOptions(training_arguments=words, **known | given)


def specification(*words: str, **given: Any) -> ComparisonSpec:
    return make_specification(options(*words, **given))


def test_a_global_batch_size_is_kept_by_every_row() -> None:
    words = ("--per_device_train_batch_size", "2", "--global_batch_size", "8")
    scaled = specification(*words, num_processes=("1,2,4",))
    assert scaled.scaling == "strong"
    assert [batch["gradient_accumulation_steps"] for batch in scaled.batches.values()] == [4, 2, 1]
    single = specification(*words)
    assert (single.scaling, single.batches) == (None, {"ddp-n2": {"gradient_accumulation_steps": 2}})
    assert specification(num_processes=("1,2",)).scaling == "weak"
    with pytest.raises(ToolkitError, match="numbers of processes that keep it: 1, 2, 4"):
        specification(*words, num_processes=("3",))
    for given in ({"find_max_batch": 8}, {"scaling": "weak", "num_processes": ("1,2",)}):
        with pytest.raises(ToolkitError, match="does not go with --global_batch_size"):
            specification(*words, **given)


def test_only_an_equal_comparison_is_resumed_and_a_damaged_one_never_overwritten(tmp_path: Path) -> None:
    written = comparison("ddp", "zero2", world_sizes=(1, 2), scaling="weak", find_max_batch=8)
    open_comparison(tmp_path, written, resume=False)
    open_comparison(tmp_path, written, resume=True)
    with pytest.raises(ToolkitError, match="already holds a comparison"):
        open_comparison(tmp_path, written, resume=False)
    another = written.model_copy(update={"untimed_steps": 5})
    with pytest.raises(ToolkitError, match=r"untimed_steps is 2, now 5\n  hint: `--untimed-steps 2` resumes it; or"):
        open_comparison(tmp_path, another, resume=True)
    for repeats in (9, 1):  # more, or fewer of those that are there
        open_comparison(tmp_path, written.model_copy(update={"repeats": repeats}), resume=True)
        assert json.loads((tmp_path / "comparison.json").read_text())["repeats"] == repeats

    (tmp_path / "comparison.json").write_text("garbage")
    for resume in (False, True):
        with pytest.raises(ToolkitError, match=r"comparison\.json"):
            open_comparison(tmp_path, comparison("ddp"), resume=resume)
    assert (tmp_path / "comparison.json").read_text() == "garbage"


def test_a_comparison_is_written_without_its_token_and_resumed_with_another(tmp_path: Path) -> None:
    for token in ("correct-horse-battery", "another-token"):
        open_comparison(tmp_path, comparison("ddp", training_arguments=("--hub_token", token)), resume=True)
    assert '"--hub_token",\n    "***"' in (tmp_path / "comparison.json").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ddp", "expected a name of letters"),
        ("../x=ddp", "expected a name of letters"),
        ("a=", "expected a name of letters"),
        ("a=ddp --ddp_com_hook int8", "unknown argument --ddp_com_hook"),
        ("a=ddp --optim 'sgd", "no closing quotation"),
        ("ddp=zero2", "--preset ddp is given twice"),
    ],
)
def test_a_text_that_is_no_variant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        specification(variant=(text,))


@pytest.fixture
def job(faq_alpaca: Path, tiny_model: Path) -> tuple[str, ...]:
    return "--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_steps", "8"


def test_a_mistake_in_a_variant_is_no_row_that_is_not_supported(job: tuple[str, ...]) -> None:
    for words, message in (("--optim nope", "--optim is 'nope'"), ("--dataset /nope.jsonl", "no such data file")):
        with pytest.raises(ToolkitError, match=message):
            checked_comparison(options(*job, variant=(f"mine=ddp {words}",)))


@pytest.mark.parametrize(
    ("presets", "arguments", "message"),
    [
        (("ddp", "fsdp2_tp"), (), "preset 'fsdp2_tp' needs --tp: the number of GPUs for tensor parallelism"),
        (("ddp", "fsdp2"), ("--tp", "2"), "--tp 2 does not work under preset 'ddp': it has no tensor parallelism"),
        (("ddp", "fsdp2_tp"), ("--tp", "3"), "--tp 3 does not work for this model: 3 does not divide its 4 attention"),
        (("ddp", "cp"), ("--cp", "2", "--packing"), None),
    ],
)
def test_a_degree_that_is_missing_or_that_no_preset_or_model_has_is_refused(
    presets: tuple[str, ...], arguments: tuple[str, ...], message: str | None, job: tuple[str, ...]
) -> None:
    given = options(*job, *arguments, preset=presets, num_processes=("6",))
    if message is None:  # a row of its own says why: the other preset can run
        assert checked_comparison(given).unsupported.keys() == {"cp-n6"}
        return
    with pytest.raises(ToolkitError) as caught:
        checked_comparison(given)
    assert caught.value.message.startswith(message)


def test_more_trials_than_a_day_has_time_for_are_refused(job: tuple[str, ...]) -> None:
    with pytest.raises(ToolkitError, match="the rows and --repeats make 2,000 trials, expected 1,000 or fewer"):
        checked_comparison(options(*job, preset=("ddp", "zero2"), repeats=1000))


def test_world_sizes_are_separate_or_with_commas() -> None:
    for given, sizes in {("2",): (2,), ("1,2,4",): (1, 2, 4), ("1", "2"): (1, 2), ("2, 2", "1"): (2, 1)}.items():
        assert options(num_processes=given).world_sizes == sizes


@pytest.mark.parametrize(
    ("option", "value"), [("profile", True), ("price_per_gpu_hour", 2.0), ("target_interval", 0.01)]
)
def test_what_needs_speeds_is_refused_where_ranks_share_a_gpu(option: str, value: Any) -> None:
    with pytest.raises(ToolkitError, match="needs speeds, and ranks that share a GPU have none"):
        options(ranks_per_gpu=2, **{option: value})
    shared = make_specification(options(ranks_per_gpu=2, preset=("ddp",), cpu=False, num_processes=("2",)))
    assert (shared.ranks_per_gpu, shared.target_interval) == (2, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_processes", ("1,two",), "--num-processes is 'two', expected whole numbers: `--num-processes 1,2,4`"),
        ("num_processes", ("0",), "--num-processes is 0, expected 1 or more"),
        ("repeats", 1_000_000, "--repeats is 1000000, expected 1,000 or less"),
        ("trial_minutes", float("inf"), "--trial-minutes is inf, expected 527,040 or less"),
        ("price_per_gpu_hour", float("nan"), "--price-per-gpu-hour is nan, expected 0 or more"),
        ("target_interval", float("nan"), "--target-interval is nan, expected a fraction from 0 to below 1"),
        ("gpu", "h100", "--gpu needs --dry-run: trials run on the GPUs of this node"),
    ],
)
def test_a_value_that_makes_no_comparison_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        options(**{name: value})
    assert caught.value.message == message
