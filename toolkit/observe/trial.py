"""Somebody's script as a trial of a comparison: its first training alone, which leaves nothing outside of its folder.

Every `TrainingArguments` that the script makes gets a folder of the trial's own, whatever flags the script has, and
reports and uploads nothing. Nothing is saved and nothing is evaluated: a comparison counts steps. The script ends when
its first `train()` returns, so that what follows it, such as saving a model, does not run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

OUTPUT_FOLDER = "trainer_output"


def change_training_arguments(run_folder: Path) -> None:
    """Change all `TrainingArguments` that are made from now on, before the script sees them; subclasses too."""
    make = TrainingArguments.__post_init__

    @functools.wraps(make)
    def post_init(args: Any) -> None:
        change(args, run_folder)
        make(args)

    TrainingArguments.__post_init__ = post_init


def change(args: Any, run_folder: Path) -> None:
    """Give training arguments the trial's folder, and switch off what reaches beyond it."""
    args.output_dir = str(run_folder.absolute() / OUTPUT_FOLDER)
    args.report_to, args.push_to_hub, args.eval_on_start = [], False, False


class StepsAlone(TrainerCallback):  # type: ignore[misc]
    """Keeps the Trainer from saving and evaluating; its arguments stay: callbacks of a script may require them."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_evaluate = False

    on_epoch_end = on_step_end
