"""Arguments that transformers refuses, given to it and to our checks: both must answer alike."""

from __future__ import annotations

import gc
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.job.job_checks import check_values
from toolkit.job.trainer_checks import check_trainer_arguments

EVALUATES = "--eval_strategy steps --val_size 8"

# One mistake each, known to `TrainingArguments`, to the Trainer, or to the schedule and the optimizer that it makes.
REFUSED = """\
--optim nope
--optim ADAMW_TORCH
--lr_scheduler_type cosin
--lr_scheduler_type reduce_lr_on_plateau
--lr_scheduler_type cosine_with_min_lr
--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr": 1e-6, "min_lr_rate": 0.1}'
--lr_scheduler_kwargs '{"num_cycles": 1}'
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
--accelerator_config '{"nope": 1}'
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
        check_values(Job.from_argv(shlex.split(words)), on_cpu=True)
    except ToolkitError as error:
        return error
    return None


@pytest.fixture(autouse=True, scope="module")
def _models_are_gone() -> Iterator[None]:
    """A preset is not put into effect in a process that holds a model, and other tests of this process do that."""
    yield
    gc.collect()


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def library_answer(words: str, folder: Path, *, builds: bool = True) -> Exception | None:
    """What transformers raises: for the arguments, or with `builds` for the Trainer and all that a first step needs."""
    from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

    class Parser(HfArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    given = shlex.split(words)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16
    held_out = None
    if "--val_size" in given:  # our own argument
        at = given.index("--val_size")
        given, held_out = given[:at] + given[at + 2 :], rows
    argv = [*given, "--output_dir", str(folder), "--use_cpu", "true"]
    try:
        [arguments] = Parser((TrainingArguments,)).parse_args_into_dataclasses(argv)
        if builds:
            set_seed(arguments.seed)
            trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=rows, eval_dataset=held_out)
            trainer.create_optimizer_and_scheduler(num_training_steps=10)
            trainer.get_train_dataloader()
    except (ValueError, TypeError, KeyError, OSError, OverflowError) as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", REFUSED)
def test_what_transformers_refuses_is_refused_before_the_launch(words: str, tmp_path: Path) -> None:
    assert library_answer(words, tmp_path) is not None, "transformers accepts it now: so must we"
    error = our_answer(words)
    assert error is not None
    assert len(str(error).splitlines()) <= 2
    assert any(word.removeprefix("--") in error.message for word in words.split())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", ACCEPTED)
def test_what_transformers_accepts_is_accepted(words: str, tmp_path: Path) -> None:
    assert library_answer(words, tmp_path) is None
    assert our_answer(words) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", MEANINGLESS)
def test_what_only_training_would_show_is_refused_before_the_launch(words: str, tmp_path: Path) -> None:
    assert library_answer(words, tmp_path, builds=False) is None, "known to TrainingArguments: belongs in REFUSED"
    assert our_answer(words) is not None


def test_a_mapping_of_a_yaml_file_is_checked_like_json() -> None:
    check_trainer_arguments(Job(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2}))
    with pytest.raises(ToolkitError, match="linear has no 'num_cycles'"):
        check_trainer_arguments(Job(lr_scheduler_kwargs={"num_cycles": 2}))
    with pytest.raises(ToolkitError, match="nested more than"):
        Job.from_values({"lr_scheduler_kwargs": '{"a":' * 5000})


# Accepted by transformers, which then reads it not at all, or fails in the first step.
@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--optim adamw_torch --optim_args beta1=0.95", "--optim adamw_torch reads no 'beta1'", "`--adam_beta1`"),
        ("--optim adamw_bnb_8bit --optim_args min_8bit_size=1", "reads no 'min_8bit_size'", "leave it out"),
        ("--optim sgd --optim_args momentm=0.9", "--optim sgd reads no 'momentm'", "did you mean `momentum`?"),
        ("--optim sgd --optim_args momentum=big", "momentum is 'big', expected a number", "`momentum=0`"),
        ("--optim ademamix --optim_args t_alpha=0.5", "t_alpha is '0.5', expected a whole number", "`t_alpha=0`"),
        ("--optim adamw_torch_8bit --optim_args block_size=128", "passes it to torchao as text", "leave it out"),
    ],
)
def test_an_option_that_the_optimizer_does_not_read_is_refused(words: str, message: str, hint: str) -> None:
    with pytest.raises(ToolkitError, match=re.escape(message)) as refused:
        check_trainer_arguments(Job.from_argv(shlex.split(words)))
    assert hint in str(refused.value.hint)
