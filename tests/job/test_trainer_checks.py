"""Arguments that transformers refuses, given to it and to our checks: both must answer alike."""

import dataclasses
import gc
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job import trainer_schema as schema
from toolkit.job.argument_fields import TrainerArguments
from toolkit.job.job import Job
from toolkit.job.job_checks import check_trainer_arguments, check_values
from toolkit.job.trainer_schema import SHIPPED, describe_installed, trainer_schema

EVALUATES = "--eval_strategy steps --val_size 8"

# One mistake each, known to `TrainingArguments`, to the Trainer, or to the schedule and the optimizer that it makes.
REFUSED = """\
--optim nope
--optim ADAMW_TORCH
--lr_scheduler_type cosin
--lr_scheduler_type reduce_lr_on_plateau
--lr_scheduler_kwargs '{'
--eval_strategy sometimes
--save_strategy best
--debug 'underflow_overflow nope'
--log_level loud
--train_sampling_strategy nope
--tf32 true
--tf32 maybe
--bf16 true --fp16 true
--logging_steps 0
--logging_steps 1.5
--eval_steps 2.5 EVALUATES
--logging_steps 0 --logging_strategy no EVALUATES
--warmup_steps -1
--learning_rate -1
--learning_rate fast
--adam_beta1 2
--max_steps 1.5
--optim_args a=b=c
--activation_checkpointing_kwargs '{'
--accelerator_config nope.json
--torch_empty_cache_steps 0
--dataloader_prefetch_factor 2
--dataloader_num_workers -1
--seed 4294967296
--load_best_model_at_end true
--load_best_model_at_end true --save_strategy epoch EVALUATES --eval_steps 2
--load_best_model_at_end true --eval_steps 3 --save_steps 4 EVALUATES
--load_best_model_at_end true --eval_steps 0.2 --save_steps 0.5 EVALUATES
--eval_strategy steps
--greater_is_better maybe
--metric_for_best_model loss --save_strategy best --lr_scheduler_type nope
""".replace("EVALUATES", EVALUATES).splitlines()

# Left to transformers, which refuses them when a rank starts.
LEFT_TO_TRANSFORMERS = """\
--lr_scheduler_type cosine_with_min_lr
--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr": 1e-6, "min_lr_rate": 0.1}'
--lr_scheduler_kwargs '{"num_cycles": 1}'
--accelerator_config '{"nope": 1}'
--optim sgd --optim_args momentum=big
""".splitlines()

# What looks like a mistake and is none.
ACCEPTED = """\
--optim sgd --optim_args 'momentum=0.9, nesterov=true'
--optim adafactor
--lr_scheduler_type constant --lr_scheduler_kwargs '{"num_cycles": 2}'
--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}'
--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs '{"num_decay_steps": 4}'
--lr_scheduler_type reduce_lr_on_plateau EVALUATES --eval_steps 2
--lr_scheduler_type reduce_lr_on_plateau --lr_scheduler_kwargs '{"patience": 3}' EVALUATES --eval_steps 2
--logging_strategy no --logging_steps 0
--logging_steps 0.1
--save_strategy best --metric_for_best_model perplexity EVALUATES
--eval_steps 0 EVALUATES
--debug underflow_overflow
--learning_rate 0
--max_steps 1_000
--max_steps １２
--warmup_steps 0.1
--accelerator_config '{"split_batches": true, "even_batches": "false"}'
--gradient_checkpointing true --gradient_checkpointing_kwargs '{"use_reentrant": true}'
--dataloader_num_workers 2 --dataloader_prefetch_factor 4 --dataloader_persistent_workers true
--ddp_timeout 180000000
--seed 4294967295
--load_best_model_at_end true --eval_steps 2 --save_steps 4 EVALUATES
--load_best_model_at_end true --eval_steps 0.1 --save_steps 0.5 EVALUATES
--load_best_model_at_end true --save_strategy best EVALUATES
""".replace("EVALUATES", EVALUATES).splitlines()

# `TrainingArguments` accepts these, and no training does what they say.
MEANINGLESS = f"""\
--save_steps 0
--eval_steps -2 {EVALUATES}
--num_train_epochs 0
--max_steps 0
--learning_rate nan
--warmup_steps nan
--max_grad_norm nan
--label_smoothing_factor 2
--eval_delay nan
--per_device_train_batch_size 0
--gradient_accumulation_steps 0
--max_steps 99999999999999999999
--weight_decay -1
--dataloader_prefetch_factor 0 --dataloader_num_workers 1
--lr_scheduler_kwargs nope
--metric_for_best_model accuracy --load_best_model_at_end true {EVALUATES}
--eval_on_start true
""".splitlines()


def our_answer(words: str) -> ToolkitError | None:
    try:
        return check_values(Job.from_argv(shlex.split(words)), on_cpu=True)
    except ToolkitError as error:
        return error


@pytest.fixture(autouse=True, scope="module")
def _models_are_gone() -> Iterator[None]:
    """A preset is not put into effect in a process that holds a model, and other tests of this process do that."""
    yield
    gc.collect()


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def library_answer(words: str, folder: Path, *, builds: bool = True) -> BaseException | None:
    """What transformers raises: for the arguments, or with `builds` for the Trainer and all that a first step needs."""
    from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

    given = shlex.split(words.replace("--val_size 8", ""))  # our own argument
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16
    held_out = rows if "--val_size" in words else None
    argv = [*given, "--output_dir", str(folder), "--use_cpu", "true"]
    try:
        [arguments] = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(argv)
        if builds:
            set_seed(arguments.seed)
            trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=rows, eval_dataset=held_out)
            trainer.create_optimizer_and_scheduler(num_training_steps=10)
            trainer.get_train_dataloader()
    except (SystemExit, ValueError, TypeError, KeyError, OSError, OverflowError) as error:
        return error
    return None


ANSWERS = [*((words, True, True) for words in REFUSED), *((words, False, False) for words in ACCEPTED)]
ANSWERS += [(words, False, True) for words in MEANINGLESS]
ANSWERS += [(words, True, False) for words in LEFT_TO_TRANSFORMERS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("words", "theirs", "ours"), ANSWERS)
def test_a_mistake_is_refused_before_the_launch_as_transformers_would_refuse_it(
    words: str, theirs: bool, ours: bool, tmp_path: Path
) -> None:
    answer = library_answer(words, tmp_path, builds=theirs or not ours)
    assert (answer is not None) is theirs, "transformers accepts or refuses it now: so must we"
    error = our_answer(words)
    assert (error is not None) is ours
    if theirs and ours:
        assert error is not None
        assert len(str(error).splitlines()) <= 2
        assert any(word.removeprefix("--") in error.message for word in words.split())


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ToolkitError, match="nested more than"):
        Job.from_values({"lr_scheduler_kwargs": '{"a":' * 5000})


# Accepted by transformers, which then reads it not at all, or fails in the first step.
@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--optim adamw_torch --optim_args beta1=0.95", "--optim adamw_torch reads no 'beta1'", "`--adam_beta1`"),
        ("--optim adamw_bnb_8bit --optim_args min_8bit_size=1", "reads no 'min_8bit_size'", "leave it out"),
        ("--optim sgd --optim_args momentm=0.9", "--optim sgd reads no 'momentm'", "did you mean `momentum`?"),
    ],
)
def test_an_option_that_the_optimizer_does_not_read_is_refused(words: str, message: str, hint: str) -> None:
    with pytest.raises(ToolkitError, match=re.escape(message)) as refused:
        check_trainer_arguments(Job.from_argv(shlex.split(words)))
    assert hint in str(refused.value.hint)


# -- what transformers accepts, as the package ships it and as a process of its own describes it


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Another transformers than the package describes; the cache folder."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(schema, "installed_version", lambda library: "99.0" if library == "transformers" else None)
    trainer_schema.cache_clear()
    yield tmp_path / "trainer_schema" / "99.0.json"
    trainer_schema.cache_clear()


@pytest.mark.nightly
def test_the_package_describes_the_pinned_transformers_as_it_describes_itself() -> None:
    assert describe_installed() == SHIPPED.read_text()


def test_our_fields_have_the_defaults_of_the_trainer() -> None:
    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    ours = {field.name: field.default for field in dataclasses.fields(TrainerArguments)}
    assert {name: getattr(theirs[name], "value", theirs[name]) for name in ours} == ours


@pytest.mark.parametrize("cached", [None, '{"transformers": '], ids=["no cache", "a damaged one"])
def test_another_version_is_described_once_and_then_read_from_the_cache(
    cached: str | None, another_version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached is not None:
        another_version.parent.mkdir()
        another_version.write_text(cached)
    content = json.loads(SHIPPED.read_text()) | {"transformers": "99.0", "trackers": ["new_tracker"]}
    monkeypatch.setattr(schema, "describe_installed", lambda: json.dumps(content))
    assert trainer_schema().trackers == ("new_tracker",)
    assert json.loads(another_version.read_text()) == content
    trainer_schema.cache_clear()
    monkeypatch.setattr(schema, "describe_installed", lambda: pytest.fail("the cache has it"))
    assert trainer_schema().trackers == ("new_tracker",)


@pytest.mark.usefixtures("another_version")
def test_a_transformers_that_cannot_be_imported_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: no torch' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ToolkitError, match=r"transformers 99\.0 cannot be imported: ImportError: no torch"):
        trainer_schema()


def test_without_transformers_arguments_are_checked_as_the_version_does_that_the_toolkit_was_made_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schema, "installed_version", lambda _: None)
    assert trainer_schema.__wrapped__().fields == trainer_schema().fields  # without its cache
