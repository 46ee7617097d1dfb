"""The process of one rank: `python -m toolkit.train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from toolkit.entry_point import exit_code_of
from toolkit.errors import EXIT_DONE
from toolkit.job.argument_reading import help_text
from toolkit.observe.rank_process import (
    garbage_collector_off,
    leave,
    prepare_environment,
    run_reporting_failures,
    without_bitsandbytes,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training script and return the exit code; a failure ends the process."""
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        print(help_text())
        return EXIT_DONE
    with garbage_collector_off(), without_bitsandbytes():
        prepare_environment()
        from toolkit.train import script
    return run_reporting_failures(lambda progress: script.main(words, progress))


if __name__ == "__main__":
    leave(exit_code_of(main))
