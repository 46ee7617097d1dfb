"""The `toolkit` command line: one module per command, registered in `program`.

A command module parses options and prints; the work is imported inside the command, so that `toolkit --help` answers in
a fraction of a second and no light command imports torch.
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit. A Ctrl-C while the program is still being imported is reported like any other."""
    try:
        from toolkit.cli import program

        program.main(argv)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        sys.exit(1)


__all__ = ["main"]
