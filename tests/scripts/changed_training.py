"""The training script with one thing changed inside its ranks, to see what notices.

accelerate launch --config_file ... tests/scripts/changed_training.py CHANGE training arguments ...
"""

import functools
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import toolkit.train.__main__ as door
from toolkit.observe.rank_process import prepare_environment

MORE_BYTES_THAN_THERE_ARE = 2**60


def ddp_for_fsdp() -> None:
    """Leave out the shim that makes FSDP2 real on a CPU: accelerate then runs DDP, silently."""
    from toolkit.engines import fsdp2

    fsdp2.enable_fsdp_on_cpu = lambda: None


def defer_reduction() -> None:
    """Forget `sync_each_batch`: FSDP2 keeps whole gradients meanwhile."""
    from transformers import Trainer

    build = Trainer.create_accelerator_and_postprocess

    def forgetful(self) -> None:
        self.args.accelerator_config.gradient_accumulation_kwargs = None
        build(self)

    Trainer.create_accelerator_and_postprocess = forgetful


def count_gradient_storages() -> None:
    """Print before each optimizer step how many storages the gradients are in."""
    from transformers.trainer_callback import CallbackHandler

    handle = CallbackHandler.on_pre_optimizer_step

    def count_and_handle(self, *given, **named):
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        print(f"{len(gradients)} gradients in {len(storages)} storages", flush=True)
        return handle(self, *given, **named)

    CallbackHandler.on_pre_optimizer_step = count_and_handle


def gradients_beside_buckets() -> None:
    """Leave DDP as accelerate makes it: each gradient is in a bucket, and on its own."""
    from transformers import Trainer

    from toolkit.train.trainer import SupervisedTrainer

    SupervisedTrainer.create_accelerator_and_postprocess = Trainer.create_accelerator_and_postprocess
    count_gradient_storages()


def muon_in_fp32() -> None:
    """Run torch's Muon in fp32: it iterates in bf16, and amplifies the rounding."""
    import torch

    setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # noqa: B010  (mypy takes no assignment to a method)


def unsupported_optimizer() -> None:
    """Leave out the rules that refuse an optimizer: the library's own behaviour."""
    import toolkit.presets.support as support

    support.check_supported = lambda *_, **__: None


def rank_0_refuses_late() -> None:
    """Let rank 0 refuse its arguments a second after the other ranks."""
    import toolkit.train.script as script

    parse_args = script.parse_args

    def refuse_late(*given):
        try:
            return parse_args(*given)
        except Exception:
            time.sleep(1 if os.environ["RANK"] == "0" else 0)
            raise

    script.parse_args = refuse_late


def stage_out_of_memory() -> None:
    """Let a pipeline's second rank ask for more memory than there is, in its fourth forward."""
    import torch

    from toolkit.train.engine.pipeline_model import Stage

    forward, calls = Stage.forward, 0

    def forward_and_allocate(stage, inputs, *, micro_batch):
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and calls == 4:
            torch.empty(MORE_BYTES_THAN_THERE_ARE)
        return forward(stage, inputs, micro_batch=micro_batch)

    Stage.forward = forward_and_allocate


def without_fix() -> None:
    """Leave out one of the toolkit's fixes of a library: `TOOLKIT_WITHOUT_FIX` is MODULE:FUNCTION."""
    module, function = os.environ["TOOLKIT_WITHOUT_FIX"].split(":")
    found = importlib.import_module(module)
    assert callable(getattr(found, function))
    setattr(found, function, lambda: None)


def uneven_final_save() -> None:
    """Let rank 0 be late to empty the final model's folder, and then to make it again; ranks 2 and 3 list it then."""
    from toolkit.train import checkpointing

    rmtree, listdir = checkpointing.shutil.rmtree, os.listdir

    def empty_late(path, **how):
        time.sleep(0.5)
        rmtree(path, **how)
        time.sleep(1)

    def list_later(path="."):
        if str(path).endswith(".saving") and int(os.environ["RANK"]) >= 2:
            time.sleep(1)
        return listdir(path)

    checkpointing.shutil.rmtree, os.listdir = empty_late, list_later


def late_listing() -> None:
    """Hide rank 1's files of a checkpoint from rank 0, as a network file system may where they are on two nodes."""
    from transformers import TrainingArguments

    from toolkit.observe import checkpoint_saver

    TrainingArguments.local_process_index = property(lambda _: 0)

    checkpoint_files = checkpoint_saver.checkpoint_files

    def files_of_this_node(folder):
        return [path for path in checkpoint_files(folder) if os.environ["RANK"] == "1" or "_1" not in path.name]

    checkpoint_saver.checkpoint_files = files_of_this_node


def signal_while_writing() -> None:
    """Signal a rank while a checkpoint is written.

    TOOLKIT_SIGNAL is NAME:STEP:MOMENT:RANK...: the signal, the checkpoint, and the ranks that it is sent to. Moments:
    `shards` (the weights are written, the optimizer is not), `checksums` (all files are written), `rename` (the
    manifest is written too, and the folder still has its temporary name).
    """
    from torch.distributed.checkpoint import FileSystemWriter

    from toolkit.observe import checkpoint_saver
    from toolkit.record import checkpoints

    name, step, moment, *ranks = os.environ["TOOLKIT_SIGNAL"].split(":")
    write_data, file_entries, write_json = FileSystemWriter.write_data, checkpoints.file_entries, checkpoints.write_json

    def signal_if_at(path: object) -> None:
        if os.environ["RANK"] in ranks and f"checkpoint-{step}" in str(path):
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(1)  # the ranks' threads take it while all ranks are in the save, also on a busy node

    def write_optimizer(self, *args, **kwargs):
        if "optimizer" in str(self.path):
            signal_if_at(self.path)
        return write_data(self, *args, **kwargs)

    def signal_before_checksums(folder, paths):
        signal_if_at(folder)
        return file_entries(folder, paths)

    def write_and_signal(path, content):
        write_json(path, content)
        signal_if_at(path)

    if moment == "shards":
        FileSystemWriter.write_data = write_optimizer
    elif moment == "checksums":
        checkpoint_saver.file_entries = signal_before_checksums
    else:
        checkpoints.write_json = write_and_signal


def signal_at() -> None:
    """Send SIGTERM to rank 1 when it calls a function for the Nth time; that call and later ones take long.

    TOOLKIT_SIGNAL_AT is MODULE:NAME:CALL:SECONDS. Rank 0 writes run.json as soon as rank 1 has reported its end, or
    after a second.
    """
    from toolkit.observe import observed_run

    describe, run_json = observed_run.describe_node, Path(sys.argv[sys.argv.index("--output_dir") + 1], "run.json")

    def describe_late():
        for _ in range(100):
            if run_json.exists() and "interrupted" in run_json.read_text():
                break
            time.sleep(0.01)
        return describe()

    observed_run.describe_node = describe_late
    module, name, call, seconds = os.environ["TOOLKIT_SIGNAL_AT"].split(":")
    *owners, function = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, function), 0

    @functools.wraps(original)
    def slow(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == int(call) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if calls >= int(call):
            time.sleep(float(seconds))
        return original(*args, **kwargs)

    setattr(owner, function, slow)


def main() -> int:
    change = sys.argv.pop(1)
    prepare_environment()
    globals()[change]()
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())
