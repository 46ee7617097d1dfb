"""The training script, top to bottom: arguments, data, model, Trainer, attestation, save.

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 -m toolkit.train \\
        --model_name_or_path MODEL --dataset rows.jsonl --output_dir out
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PrinterCallback, set_seed

from toolkit.presets.cpu_fsdp import enable_fsdp_on_cpu
from toolkit.runs.arguments import ModelArguments
from toolkit.runs.checkpoints import Checkpoint, check_goes_on, check_same_layout
from toolkit.runs.folder import RunFolder
from toolkit.runs.rows import streaming_buffer_size
from toolkit.train.arguments import parse
from toolkit.train.attest.attestation import Attestation
from toolkit.train.checkpointing import live_answer, manifest_facts, resume_point
from toolkit.train.enough import EnoughSteps
from toolkit.train.evaluation import Evaluations
from toolkit.train.failure import Progress, report_failure, report_hang
from toolkit.train.meter import Meter
from toolkit.train.methods import Methods
from toolkit.train.modelling import load_model, load_tokenizer
from toolkit.train.nvme import name_swap_folder, prepare_nvme
from toolkit.train.packing import check_model_packs
from toolkit.train.promise import Promise, find_promise
from toolkit.train.reading import Data, collator, read_data
from toolkit.train.rehearsal.inputs import rehearsal_data, rehearsal_model
from toolkit.train.rehearsal.phase_peaks import RehearsedTrainer
from toolkit.train.rehearsal.recording import (
    FakeWorld,
    RehearsedAttestation,
    RehearsedMeter,
    close_rehearsal,
    close_trace,
)
from toolkit.train.rehearsal.stage import set_the_stage
from toolkit.train.run import (
    PREPARED_VARIABLE,
    Run,
    close_folder,
    open_folder,
    remove_swap_files,
    write_nvme_facts,
)
from toolkit.train.saving import save_final_model
from toolkit.train.stopping import Stopping
from toolkit.train.stream_loading import resume_stream
from toolkit.train.trainer import MeasuredTrainer
from toolkit.train.universal import prepare_universal
from toolkit.train.watchdog import Watchdog


def run(argv: Sequence[str], progress: Progress) -> None:
    """Train as the arguments say. Raises what went wrong; `toolkit.train.__main__` reports it."""
    asked = prepare(argv, progress)
    stopping = watch_over(asked)
    set_seed(asked.training.seed)
    if asked.rehearsed is not None and asked.rehearsed.fake_tensors:
        from toolkit.train.rehearsal.fake_tensors import trace

        close_trace(asked.folder, asked.rehearsed, trace(asked.arguments, asked.promise), progress)
        return
    progress.enter("data")
    if asked.rehearsed is None:
        tokenizer = load_tokenizer(asked.model, chat_template=asked.data.chat_template)
        data = read_data(tokenizer, asked.data, asked.training)
    else:
        tokenizer, data = rehearsal_data(asked.model, asked.data, asked.training)
    progress.enter("load")
    nvme = prepare_nvme(asked.training, asked.model)
    model = load_model(asked.model) if asked.rehearsed is None else rehearsal_model(asked.model)
    if asked.data.packing:
        check_model_packs(model)
    progress.enter("engine")
    trainer = build_trainer(asked, model, tokenizer, data)
    methods = Methods(trainer, asked.arguments, asked.folder)
    enough = stop_early(trainer, asked.model)
    trainer.callback_handler.callbacks.insert(0, stopping)  # before the meter, which looks at a step that is saved
    train(asked, trainer, data)
    stopping.raise_if_stopped()
    if asked.rehearsed is not None:
        close_rehearsal(asked.folder, asked.rehearsed, trainer, asked.model, progress)
        return
    keep(asked, trainer, tokenizer)
    if nvme is not None:
        write_nvme_facts(asked, nvme)
    methods.write_facts()
    if enough is not None and enough.stopped_after is not None and asked.writes:
        asked.folder.update_run(stopped_after=enough.stopped_after)
    close_folder(asked, trainer.saves)
    remove_swap_files(asked)
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads abort a process that just exits


def prepare(argv: Sequence[str], progress: Progress) -> Run:
    """From the arguments to an open run folder: what is refused is refused before any data is read."""
    progress.enter("arguments")
    promise = find_promise()
    quiet_libraries()
    rehearsed = set_the_stage(promise)
    enable_fsdp_on_cpu()
    progress.swap_folder = name_swap_folder()
    arguments = parse(argv, promise)
    _, data_arguments, training = arguments
    asked = Run(
        argv=argv,
        promise=promise,
        arguments=arguments,
        folder=RunFolder(Path(training.output_dir)),
        progress=progress,
        resumed=find_checkpoint(training, promise, streaming_buffer_size(asdict(data_arguments))),
        rehearsed=rehearsed,
    )
    open_folder(asked)
    progress.output_dir, progress.dataset = asked.folder.path, data_arguments.dataset
    if asked.writes:
        print("".join(f"{line}\n" for line in training.notes), end="", flush=True)  # the log is open now
    return asked


def quiet_libraries() -> None:
    """A log file holds lines, not progress bars."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()


def find_checkpoint(training: Any, promise: Promise, buffer_size: int) -> Checkpoint | None:
    """What this run resumes from, held against what it is; said once."""
    checkpoint = resume_point(training, verified=PREPARED_VARIABLE in os.environ)
    if checkpoint is None:
        return None
    preset = promise.preset
    if preset is not None:
        check_same_layout(
            checkpoint,
            engine=preset.engine,
            sharding=preset.sharding,
            world_size=training.world_size,
        )
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "max_steps")
    check_goes_on(checkpoint, **{name: getattr(training, name) for name in batch}, streaming_buffer_size=buffer_size)
    if training.process_index == 0:
        print(f"resume: from {checkpoint.path}, after step {checkpoint.step}", flush=True)
    return checkpoint


def watch_over(asked: Run) -> Stopping:
    """From here on the rank shows signs of life, and answers signals; in a rehearsal it asks no other rank."""
    progress, rank = asked.progress, asked.rank
    ranks = asked.folder.rank_rows(rank).parent
    Watchdog(progress, ranks=ranks, rank=rank, on_hang=lambda failure: report_hang(failure, progress)).start()
    stopping = Stopping(
        progress,
        rank=rank,
        world_size=asked.training.world_size if asked.rehearsed is None else 1,
        report=lambda error: report_failure(error, progress),
    )
    stopping.listen()
    return stopping


def build_trainer(asked: Run, model: Any, tokenizer: Any, data: Data) -> MeasuredTrainer:
    """The Trainer with its meter and its attestation; the meter's clock starts after attesting, not before."""
    training, progress, rehearses = asked.training, asked.progress, asked.rehearsed is not None
    meter_class, attestation_class, trainer_class = (
        (RehearsedMeter, RehearsedAttestation, RehearsedTrainer) if rehearses else (Meter, Attestation, MeasuredTrainer)
    )
    meter = meter_class(
        asked.folder.rank_rows(asked.rank),
        rank=asked.rank,
        device=training.device,
        progress=progress,
        resumed_step=0 if asked.resumed is None else asked.resumed.step,
    )
    attestation = attestation_class(
        asked.folder.attestation_json, asked.promise, precision=training.mixed_precision, progress=progress
    )
    trainer = trainer_class(
        model=model,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        data_collator=collator(tokenizer, model, training, packing=asked.data.packing),
        processing_class=tokenizer,
        callbacks=[meter, attestation],
        meter=meter,
        progress=progress,
    )
    if data.evaluation is not None:
        trainer.add_callback(Evaluations(asked.folder))
    if rehearses:
        trainer.add_callback(FakeWorld(trainer))
    trainer.remove_callback(PrinterCallback)  # the meter prints instead
    connect(trainer, attestation, asked.promise)
    return trainer


def connect(trainer: MeasuredTrainer, attestation: Attestation, promise: Promise) -> None:
    """What the parts of a run know of each other once all of them are there."""
    attestation.trainer = trainer
    attestation.after = trainer.meter.restart_clock
    preset = None if promise.preset is None else promise.preset.name
    trainer.manifest_facts = lambda: manifest_facts(trainer, attestation.own, preset=preset)
    trainer.live_answer = lambda: live_answer(trainer, attestation.own)


def train(asked: Run, trainer: MeasuredTrainer, data: Data) -> None:
    """From the start, or on from the checkpoint."""
    resumed = asked.resumed
    if resumed is not None:
        resume_stream(data.train, resumed.path, step=resumed.step, training=asked.training)
    prepare_universal(trainer, None if resumed is None else resumed.path)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed.path))


def keep(asked: Run, trainer: MeasuredTrainer, tokenizer: Any) -> None:
    """The trained weights, as a folder that `from_pretrained` reads."""
    asked.progress.enter("save")
    if not asked.model.save_model:
        return
    save_final_model(trainer, tokenizer, asked.folder.path)
    if asked.writes:
        what = "adapter" if asked.model.lora_r else "model"
        print(f"saved: {what} and tokenizer in {asked.folder.path}", flush=True)


def stop_early(trainer: MeasuredTrainer, given: ModelArguments) -> EnoughSteps | None:
    """End the run before its last step where the arguments say when; the meter counts the timed steps."""
    trainer.meter.untimed_steps = given.untimed_steps
    within, minutes = given.stop_when_steps_within, given.stop_after_minutes
    if within is None and minutes is None:
        return None
    enough = EnoughSteps(
        trainer.meter,
        within=within,
        minutes=minutes,
        world_size=trainer.args.world_size,
        evaluates=trainer.eval_dataset is not None,
    )
    trainer.add_callback(enough)
    return enough
