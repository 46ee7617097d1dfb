"""The `toolkit` command line: one module per command, registered in `program`.

    $ toolkit presets
    $ toolkit train --preset zero2 --num-processes 2 -- --model_name_or_path M --dataset D --output_dir O

A command module parses options and prints; the work is imported inside the command, so that `toolkit --help` answers in
a fraction of a second and no light command imports torch.
"""

from toolkit.cli.program import app, main

__all__ = ["app", "main"]
