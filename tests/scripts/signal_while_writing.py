"""The training script, in which a rank is signalled while a checkpoint is written.

TOOLKIT_SIGNAL is NAME:STEP:MOMENT:RANK...: the signal, the checkpoint, and the ranks that it is sent to.

Moments: `shards` (the weights are written, the optimizer is not), `checksums` (all files are written), `rename` (the
manifest is written too, and the folder still has its temporary name).
"""

import os
import signal
import sys

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    from torch.distributed.checkpoint import FileSystemWriter

    from toolkit.observe import checkpoint_saver
    from toolkit.record import checkpoints

    name, step, moment, *ranks = os.environ["TOOLKIT_SIGNAL"].split(":")

    def signal_if_at(path: object) -> None:
        if os.environ["RANK"] in ranks and f"checkpoint-{step}" in str(path):
            os.kill(os.getpid(), signal.Signals[name])

    if moment == "shards":
        write_data = FileSystemWriter.write_data

        def write_optimizer(self, *args, **kwargs):
            if "optimizer" in str(self.path):
                signal_if_at(self.path)
            return write_data(self, *args, **kwargs)

        FileSystemWriter.write_data = write_optimizer
    elif moment == "checksums":
        file_entries = checkpoints.file_entries

        def signal_before_checksums(folder, paths):
            signal_if_at(folder)
            return file_entries(folder, paths)

        checkpoint_saver.file_entries = signal_before_checksums
    else:
        write_json = checkpoints.write_json

        def write_and_signal(path, content):
            write_json(path, content)
            signal_if_at(path)

        checkpoints.write_json = write_and_signal
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())
