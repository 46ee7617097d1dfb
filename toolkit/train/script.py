"""The training script, top to bottom: arguments, data, model, Trainer, attestation, save.

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 -m toolkit.train \\
        --model_name_or_path MODEL --dataset rows.jsonl --output_dir out
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PrinterCallback, set_seed

from toolkit.hardware.machine import describe_machine, git_commit, library_versions
from toolkit.presets.cpu_fsdp import enable_fsdp_on_cpu
from toolkit.runs import status
from toolkit.runs.arguments import ModelArguments
from toolkit.runs.checkpoints import Checkpoint, check_goes_on, check_same_layout, remove_unfinished
from toolkit.runs.folder import MEASUREMENT_VERSION, RunFolder, start_facts
from toolkit.runs.rehearsals import Rehearsed
from toolkit.runs.rows import streaming_buffer_size
from toolkit.runs.steps import PER_STEP, measure, read_steps
from toolkit.train.arguments import Arguments, parse
from toolkit.train.attest.attestation import Attestation
from toolkit.train.checkpointing import live_answer, manifest_facts, resume_point
from toolkit.train.enough import EnoughSteps
from toolkit.train.evaluation import Evaluations
from toolkit.train.failure import Progress, report_failure, report_hang
from toolkit.train.meter import Meter
from toolkit.train.methods import Methods
from toolkit.train.modelling import load_model, load_tokenizer
from toolkit.train.nvme import name_swap_folder, prepare_nvme, swap_bytes
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
from toolkit.train.saving import save_final_model
from toolkit.train.stopping import Stopping
from toolkit.train.stream_loading import resume_stream
from toolkit.train.trainer import MeasuredTrainer
from toolkit.train.universal import prepare_universal
from toolkit.train.watchdog import Watchdog
from toolkit.units import number

PREPARED_VARIABLE = "TOOLKIT_RUN_PREPARED"


def run(argv: Sequence[str], progress: Progress) -> None:
    """Train as the arguments say. Raises what went wrong; `toolkit.train.__main__` reports it."""
    progress.enter("arguments")
    promise = find_promise()
    quiet_libraries()
    rehearsed = set_the_stage(promise)
    enable_fsdp_on_cpu()
    progress.swap_folder = name_swap_folder()
    arguments = parse(argv, promise)
    model_arguments, data_arguments, training = arguments
    folder = RunFolder(Path(training.output_dir))
    resumed = find_checkpoint(training, promise, streaming_buffer_size(asdict(data_arguments)))
    open_folder(folder, argv, promise, arguments, resumed, rehearsed)
    progress.output_dir, progress.dataset = folder.path, data_arguments.dataset
    if training.process_index == 0:
        print("".join(f"{line}\n" for line in training.notes), end="", flush=True)  # the log is open now
    stopping = watch_over(progress, folder, training, alone=rehearsed is not None)
    set_seed(training.seed)
    if rehearsed is not None and rehearsed.fake_tensors:
        from toolkit.train.rehearsal.fake_tensors import trace

        close_trace(folder, rehearsed, trace(arguments, promise), progress)
        return
    progress.enter("data")
    if rehearsed is None:
        tokenizer = load_tokenizer(model_arguments, chat_template=data_arguments.chat_template)
        data = read_data(tokenizer, data_arguments, training)
    else:
        tokenizer, data = rehearsal_data(model_arguments, data_arguments, training)
    progress.enter("load")
    nvme = prepare_nvme(training, model_arguments)
    model = load_model(model_arguments) if rehearsed is None else rehearsal_model(model_arguments)
    if data_arguments.packing:
        check_model_packs(model)
    progress.enter("engine")
    if resumed is not None:
        resume_stream(data.train, resumed.path, step=resumed.step, training=training)
    packing = data_arguments.packing
    trainer = build_trainer(
        model, tokenizer, data, training, folder, promise, progress, resumed, rehearsed=rehearsed, packing=packing
    )
    methods = Methods(trainer, arguments, folder)
    enough = stop_early(trainer, model_arguments)
    prepare_universal(trainer, None if resumed is None else resumed.path)
    trainer.callback_handler.callbacks.insert(0, stopping)  # before the meter, which looks at a step that is saved
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed.path))
    stopping.raise_if_stopped()
    if rehearsed is not None:
        close_rehearsal(folder, rehearsed, trainer, model_arguments, progress)
        return
    progress.enter("save")
    if model_arguments.save_model:
        save_final_model(trainer, tokenizer, folder.path)
        if training.process_index == 0:
            print(
                f"saved: {'adapter' if model_arguments.lora_r else 'model'} and tokenizer in {folder.path}", flush=True
            )
    if nvme is not None:
        write_nvme_facts(folder, training, nvme)
    methods.write_facts()
    if enough is not None and enough.stopped_after is not None and training.process_index == 0:
        folder.update_run(stopped_after=enough.stopped_after)
    close_folder(folder, training, model_arguments.untimed_steps, progress, trainer.saves)
    remove_swap_files(progress, training)
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads abort a process that just exits


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


def open_folder(
    folder: RunFolder,
    argv: Sequence[str],
    promise: Promise,
    arguments: Arguments,
    resumed: Checkpoint | None,
    rehearsed: Rehearsed | None,
) -> None:
    """Refuse a finished run's folder on every rank before any rank writes, then let rank 0 write run.json.

    In a rehearsal there is one rank to write, whichever it is.
    """
    training = arguments[2]
    writes = training.process_index == 0 or rehearsed is not None
    if PREPARED_VARIABLE not in os.environ:
        folder.check_unused(resume=resumed is not None)
        barrier()
        if writes:
            folder.hold()
            folder.prepare(resume=resumed is not None)
            write_log(folder.log)
    barrier()
    if writes:
        started = {} if PREPARED_VARIABLE in os.environ else start_facts()
        came_from = None if resumed is None else {"path": str(resumed.path), "step": resumed.step}
        here = {} if rehearsed is None else {"rehearsal": asdict(rehearsed)}
        folder.update_run(**started, **first_facts(argv, promise, arguments), resumed_from=came_from, **here)
        remove_unfinished(folder.path)


def watch_over(progress: Progress, folder: RunFolder, training: Any, *, alone: bool) -> Stopping:
    """From here on the rank shows signs of life, and answers signals; `alone`, it asks no other rank."""
    rank = training.process_index
    ranks = folder.rank_rows(rank).parent
    Watchdog(progress, ranks=ranks, rank=rank, on_hang=lambda failure: report_hang(failure, progress)).start()
    stopping = Stopping(
        progress,
        rank=rank,
        world_size=1 if alone else training.world_size,
        report=lambda error: report_failure(error, progress),
    )
    stopping.listen()
    return stopping


def first_facts(argv: Sequence[str], promise: Promise, arguments: Arguments) -> dict[str, Any]:
    """What run.json says of a run before its first step."""
    training = arguments[2]
    preset = promise.preset
    return {
        "status": status.RUNNING,
        "exit_code": None,
        "preset": None if preset is None else preset.name,
        "preset_files": {} if preset is None else preset.texts(),
        "world_size": training.world_size,
        "training_arguments": list(argv),
        "spec": {
            "model": asdict(arguments[0]),
            "data": asdict(arguments[1]),
            "seed": training.seed,
            "max_steps": training.max_steps,
            "num_train_epochs": training.num_train_epochs,
            "learning_rate": training.learning_rate,
            "lr_scaling": None if training.scaled_rate is None else asdict(training.scaled_rate),
            "per_device_train_batch_size": training.per_device_train_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "global_batch_size": training.per_device_train_batch_size
            * training.gradient_accumulation_steps
            * training.world_size,
            "device": training.device.type,
            "mixed_precision": training.mixed_precision,
        },
        "seed": training.seed,
        "plan": None,
        "argv": sys.argv,
        "versions": library_versions(),
        "hardware": describe_machine(),
        "git_commit": git_commit(Path(__file__).parent),
        "measurement_version": MEASUREMENT_VERSION,
    }


def build_trainer(
    model: Any,
    tokenizer: Any,
    data: Data,
    training: Any,
    folder: RunFolder,
    promise: Promise,
    progress: Progress,
    resumed: Checkpoint | None,
    *,
    rehearsed: Rehearsed | None,
    packing: bool,
) -> MeasuredTrainer:
    """The Trainer with its meter and its attestation; the meter's clock starts after attesting, not before."""
    of_a_run, of_a_rehearsal = (
        (Meter, Attestation, MeasuredTrainer),
        (RehearsedMeter, RehearsedAttestation, RehearsedTrainer),
    )
    meter_class, attestation_class, trainer_class = of_a_run if rehearsed is None else of_a_rehearsal
    meter = meter_class(
        folder.rank_rows(training.process_index),
        rank=training.process_index,
        device=training.device,
        progress=progress,
        resumed_step=0 if resumed is None else resumed.step,
    )
    attestation = attestation_class(
        folder.attestation_json, promise, precision=training.mixed_precision, progress=progress
    )
    trainer = trainer_class(
        model=model,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        data_collator=collator(tokenizer, model, training, packing=packing),
        processing_class=tokenizer,
        callbacks=[meter, attestation],
        meter=meter,
        progress=progress,
    )
    if data.evaluation is not None:
        trainer.add_callback(Evaluations(folder))
    if rehearsed is not None:
        trainer.add_callback(FakeWorld(trainer))
    trainer.remove_callback(PrinterCallback)  # the meter prints instead
    attestation.trainer = trainer
    attestation.after = meter.restart_clock
    preset = None if promise.preset is None else promise.preset.name
    trainer.manifest_facts = lambda: manifest_facts(trainer, attestation.own, preset=preset)
    trainer.live_answer = lambda: live_answer(trainer, attestation.own)
    return trainer


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


def write_nvme_facts(folder: RunFolder, training: Any, nvme: dict[str, Any]) -> None:
    """Beside what the launcher measured of the disk: the buffers in force, and what lay on the disk at the end."""
    barrier()
    if training.process_index == 0:
        measured = (folder.read_run() or {}).get("nvme") or {}
        folder.update_run(nvme=measured | nvme | {"swap_bytes": swap_bytes(nvme)})


def remove_swap_files(progress: Progress, training: Any) -> None:
    """They are of no use after a run. Called after the last barrier of a run that went well."""
    barrier()
    if progress.swap_folder is not None and training.local_process_index == 0:
        shutil.rmtree(progress.swap_folder, ignore_errors=True)


def close_folder(
    folder: RunFolder, training: Any, untimed_steps: int, progress: Progress, saves: list[dict[str, Any]]
) -> None:
    """After every rank has written its rows: the summary, rank 0's phases, and the status."""
    barrier()
    if training.process_index != 0:
        return
    measured = measure(read_steps(folder), untimed_steps=untimed_steps)
    summary = {name: value for name, value in asdict(measured).items() if name not in PER_STEP}
    summary |= {"first_loss": measured.losses[0], "last_loss": measured.losses[-1]} if measured.losses else {}
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    progress.enter("end")
    folder.update_run(
        status=status.COMPLETED,
        exit_code=0,
        finished=finished,
        measured=summary,
        saves=saves,
        phases=progress.phases,
    )
    speed = f"{number(measured.tokens_per_second, 0)} tokens/s over {measured.timed_steps} timed"
    if measured.tokens_per_second is None:
        speed = f"none timed: untimed_steps is {untimed_steps}"
    loss = f"loss {measured.losses[0]:.4f} to {measured.losses[-1]:.4f}; " if measured.losses else ""
    print(f"done: {measured.steps} steps, {loss}{speed}; {folder.path}", flush=True)


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def write_log(path: Path) -> None:
    """Copy this process's stdout and stderr into train.log, when no launcher does it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        copy = subprocess.Popen(
            ["tee", "-a", str(path)], stdin=subprocess.PIPE, stdout=stream.fileno(), start_new_session=True
        )
        assert copy.stdin is not None
        os.dup2(copy.stdin.fileno(), stream.fileno())
