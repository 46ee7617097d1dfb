"""The process of one rank: `python -m toolkit.train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from toolkit.train.rank_process import garbage_collector_off, leave, prepare_environment, run_reporting_failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training script and return the exit code; a failure ends the process."""
    with garbage_collector_off():
        prepare_environment()
        from toolkit.train import script
    return run_reporting_failures(lambda progress: script.main(sys.argv[1:] if argv is None else argv, progress))


if __name__ == "__main__":
    leave(main())
