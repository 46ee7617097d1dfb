"""The training script, in which a rank kills itself while a checkpoint is written: TOOLKIT_KILL is STEP:RANK:MOMENT.

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

    from toolkit.run import checkpoints

    step, rank, moment = os.environ["TOOLKIT_KILL"].split(":")

    def kill_if_at(path: object) -> None:
        if os.environ["RANK"] == rank and f"checkpoint-{step}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "shards":
        write_data = FileSystemWriter.write_data

        def write_optimizer(self, *args, **kwargs):
            if "optimizer" in str(self.path):
                kill_if_at(self.path)
            return write_data(self, *args, **kwargs)

        FileSystemWriter.write_data = write_optimizer
    elif moment == "checksums":
        file_entries = checkpoints.file_entries

        def die_before_checksums(folder, paths):
            kill_if_at(folder)
            return file_entries(folder, paths)

        checkpoints.file_entries = die_before_checksums
    else:
        write_json = checkpoints.write_json

        def write_and_die(path, content):
            write_json(path, content)
            kill_if_at(path)

        checkpoints.write_json = write_and_die
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())
