"""Settings of transformers' `TrainingArguments`, which TRL and LLaMA-Factory pass on as they are."""

from __future__ import annotations

from toolkit.convert.conversion import Draft
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.presets.training_arguments import STRATEGY_ARGUMENTS

PRESET_REASON = "decided by the preset: bf16 compute, fp32 master weights; `bf16: false` computes in fp32"
CPU_REASON = "`toolkit train --cpu` trains on the CPU"
CHECKPOINTING_REASON = "the recomputation is never reentrant here; the results are the same"
REMOTE_CODE_REASON = "it runs code from the model's repository: if you trust that, write `trust_remote_code: true`"
PRECISION = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")
# Set by the launcher, or about what only the other tool does.
OTHERS = {"do_eval", "do_predict", "do_train", "local_rank", "resume_from_checkpoint", "use_cpu"}
# Written as activation_checkpointing here.
OLD_NAMES = {"gradient_checkpointing", "gradient_checkpointing_kwargs"}


def shared_settings() -> set[str]:
    """Return the settings of `TrainingArguments` that mean the same here."""
    return set(trainer_argument_names()) - OTHERS - OLD_NAMES - {*STRATEGY_ARGUMENTS, *PRECISION}


def take_warmup(draft: Draft) -> None:
    """Use the one of `warmup_steps` and `warmup_ratio` that counts, as transformers decides it."""
    if draft.get("warmup_steps") and draft.get("warmup_ratio"):
        draft.leave_out("warmup_ratio", "warmup_steps is set")
    elif draft.get("warmup_ratio"):
        draft.drop("warmup_steps")
    else:
        draft.drop("warmup_ratio")


def take_checkpointing_options(draft: Draft) -> None:
    """Use the options of activation checkpointing; reentrant recomputation is listed, as it is off here."""
    options = draft.get("gradient_checkpointing_kwargs")
    if options == {"use_reentrant": False}:
        draft.drop("gradient_checkpointing_kwargs")
    elif isinstance(options, dict) and not options.get("use_reentrant"):
        draft.move("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
