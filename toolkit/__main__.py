"""`toolkit`, also `python -m toolkit`."""

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


if __name__ == "__main__":
    main()
