"""Variants, as typed after `--variant`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.compare.commands import check_comparison
from toolkit.compare.options import CompareOptions
from toolkit.compare.specification import load_variants, parse_variant
from toolkit.errors import ToolkitError


def test_a_variant_has_a_name_a_preset_and_extra_arguments() -> None:
    variant = parse_variant("ddp_int8=ddp --ddp_comm_hook int8")
    assert (variant.name, variant.preset.name, variant.extra_arguments) == (
        "ddp_int8",
        "ddp",
        ("--ddp_comm_hook", "int8"),
    )
    for words in ("ddp", "=ddp", "a b=ddp", "../x=ddp", "a="):
        with pytest.raises(ToolkitError, match="expected a name of letters"):
            parse_variant(words)
    with pytest.raises(ToolkitError, match="unknown argument --ddp_com_hook"):
        parse_variant("a=ddp --ddp_com_hook int8")


def test_a_name_can_be_compared_once() -> None:
    with pytest.raises(ToolkitError, match="--preset ddp is given twice"):
        load_variants(["ddp"], ["ddp=zero2"])


@pytest.mark.parametrize("text", ["a=ddp --optim 'sgd", "a=ddp \\"])
def test_an_unclosed_quotation_is_refused(text: str) -> None:
    with pytest.raises(ToolkitError, match=r"--variant .*: no (closing quotation|escaped character)") as caught:
        parse_variant(text)
    assert caught.value.hint == '`--variant "NAME=PRESET --argument value"`'


def comparison(faq_alpaca: Path, tiny_model: Path, *variants: str, repeats: int = 3) -> CompareOptions:
    words = ("--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_steps", "8")
    return CompareOptions(
        preset=("ddp",),
        variant=variants,
        num_processes=("2",),
        output_dir=Path("out"),
        training_arguments=words,
        repeats=repeats,
        cpu=True,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optim nope", "--optim is 'nope', expected "),
        ("--model_name_or_path /nope", "model '/nope' is neither a folder nor a hub id"),
        ("--dataset /nope.jsonl", "no such data file: /nope.jsonl"),
    ],
)
def test_a_mistake_in_a_variant_is_no_row_that_is_not_supported(
    arguments: str, message: str, faq_alpaca: Path, tiny_model: Path
) -> None:
    with pytest.raises(ToolkitError) as caught:
        check_comparison(comparison(faq_alpaca, tiny_model, f"mine=ddp {arguments}"))
    assert caught.value.message.startswith(message)


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
    presets: tuple[str, ...], arguments: tuple[str, ...], message: str | None, faq_alpaca: Path, tiny_model: Path
) -> None:
    job = comparison(faq_alpaca, tiny_model)
    job = replace(job, preset=presets, num_processes=("6",), training_arguments=(*job.training_arguments, *arguments))
    if message is None:  # a row of its own says why: the other preset can run
        assert check_comparison(job).unsupported.keys() == {"cp-n6"}
        return
    with pytest.raises(ToolkitError) as caught:
        check_comparison(job)
    assert caught.value.message.startswith(message)


def test_more_trials_than_a_day_has_time_for_are_refused(faq_alpaca: Path, tiny_model: Path) -> None:
    variants = [f"v{seed}=ddp --seed {seed}" for seed in range(400)]
    with pytest.raises(ToolkitError, match="the rows and --repeats make 1,203 trials, expected 1,000 or fewer"):
        check_comparison(comparison(faq_alpaca, tiny_model, *variants))
    assert len(check_comparison(comparison(faq_alpaca, tiny_model, repeats=1000)).spec.trials()) == 1000
