"""The process of one rank: `python -m toolkit.train`."""

import sys
from collections.abc import Sequence

from toolkit.entry_point import exit_code_of
from toolkit.errors import EXIT_DONE
from toolkit.job.argument_reading import help_text
from toolkit.job.job import Job
from toolkit.observe.progress import Progress
from toolkit.observe.rank_process import leave, rank_imports, run_reporting_failures, without_bitsandbytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training script and return the exit code; a failure ends the process."""
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        print(help_text())
        return EXIT_DONE

    def train(progress: Progress) -> None:
        with rank_imports(progress, lambda: Job.from_argv(words).output_dir), without_bitsandbytes():
            from toolkit.train import script
        script.main(words, progress)

    return run_reporting_failures(train)


if __name__ == "__main__":
    leave(exit_code_of(main))
