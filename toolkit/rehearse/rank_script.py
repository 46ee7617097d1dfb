"""The training script of a rehearsal: one process that is rank r of N, with a fake process group around it.

It is `toolkit.train.script` with other parts: the same arguments, run folder, engine and Trainer; synthetic data where
none is given, random weights where there are none, and a summary of what this rank held instead of a trained model.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoConfig, Trainer, set_seed

from toolkit.engines.tensors import compute_dtype
from toolkit.models.fake_tensors import LiveMemory, on_fake_tensors
from toolkit.observe.parts import ExpectedRun
from toolkit.observe.progress import Progress
from toolkit.presets.spec import PresetSpec
from toolkit.rehearse.rehearsal import RehearsedRank, has_local_weights
from toolkit.rehearse.stand_ins import (
    REHEARSAL_PARTS,
    join_fake_world,
    measured_facts,
    model_from_config,
    rehearsal_data,
    rehearsal_model,
)
from toolkit.rehearse.trace import Facts, prepare, trace_step
from toolkit.train.active_run import ActiveRun, open_run
from toolkit.train.arguments import Arguments, LaunchContext, parse_args, set_up_libraries
from toolkit.train.engine.layers import prepare_checkpoints
from toolkit.train.model.chunked_loss import apply_loss
from toolkit.train.model.loading import from_pretrained
from toolkit.train.trainer import build_trainer

WITH_EXPERTS = "how many tokens other ranks send to the experts of this one: here as many as it sends itself"
WITH_PACKING = "whether the rows of a pack are isolated from each other (that takes the weights of all ranks)"


def main(rehearsed: RehearsedRank, preset: PresetSpec, argv: Sequence[str], progress: Progress) -> None:
    """Rehearse the rank with the training arguments `argv`. Raises whatever went wrong."""
    progress.enter("arguments")
    join_fake_world(rehearsed, preset)
    set_up_libraries(progress)
    launch = replace(LaunchContext.of_preset(preset, rehearsed.world_size), folder_prepared=True)
    args = parse_args(argv, launch)
    facts = asdict(rehearsed)
    with open_run(args, launch, progress, single_process=True, rehearsal=facts) as run:
        run.start_health_checks()
        set_seed(args.training.seed)
        if rehearsed.fake_tensors:
            run.write_completion(rehearsal=facts | trace_job(args, launch) | {"random_weights": True})
            return
        progress.enter("data")
        tokenizer, data = rehearsal_data(args)
        progress.enter("load")
        model = rehearsal_model(args.job, compute_dtype=compute_dtype(args.training), layout_at_load=run.layout_at_load)
        trainer = build_trainer(run, model, tokenizer, data, REHEARSAL_PARTS)
        trainer.train()
        run.write_completion(rehearsal=rehearsal_facts(run, rehearsed, trainer))


def rehearsal_facts(run: ActiveRun, rehearsed: RehearsedRank, trainer: Any) -> dict[str, Any]:
    """Return run.json's `rehearsal`: the bytes that this rank held, read back after its first step, and its peaks."""
    job, layout = run.arguments.job, run.arguments.layout
    facts = measured_facts(run, rehearsed, trainer.observer, untimed_steps=job.untimed_steps)
    more = [*([WITH_EXPERTS] if layout is not None and layout.ep > 1 else []), *([WITH_PACKING] if job.packing else [])]
    facts["not_measured"] += more
    return facts | {"random_weights": not has_local_weights(str(job.model_name_or_path))}


def trace_job(args: Arguments, launch: LaunchContext) -> Facts:
    """Trace an optimizer step of our own training script, on rows without padding."""
    assert launch.preset is not None
    vocabulary = from_pretrained(AutoConfig, args.job).get_text_config().vocab_size
    memory = LiveMemory(vocab_size=vocabulary)
    with on_fake_tensors(memory, gathers_layers=launch.preset.traits.gathers_layers):
        model = model_from_config(args.job, compute_dtype=compute_dtype(args.training))
        with unset_fake_temporarily():  # a hybrid mesh is made here, and reads its ranks
            trainer = Trainer(model=model, args=args.training)
            trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # as `SupervisedTrainer`
            apply_loss(trainer, args.job)
        expected = ExpectedRun(preset=launch.preset, world_size=launch.world_size, dp_shard_size=launch.dp_shard_size)
        prepare(trainer, memory)
        prepare_checkpoints(trainer.model_wrapped, selective=args.job.activation_checkpointing_selective)
        rows, length = args.training.per_device_train_batch_size, args.job.max_seq_length
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        # Without positions a model reads the values of the mask.
        batch["position_ids"] = torch.arange(length).expand(rows, length)
        return trace_step(trainer, memory, [batch] * args.training.gradient_accumulation_steps, expected)
