"""Observe somebody's script: `python -m toolkit.observe [options] script.py ...`, under any launcher or alone."""

import os
import sys
import threading

from toolkit.entry_point import exit_code_of
from toolkit.hardware.shared_gpu import RANKS_PER_GPU_VARIABLE
from toolkit.observe.progress import Progress
from toolkit.observe.rank_process import leave, rank_imports, run_reporting_failures
from toolkit.observe.words import Words, check_transformers
from toolkit.versions import installed_version


def main() -> int:
    """Run the script, and return its exit code."""
    words = Words.read(sys.argv[1:])
    check_transformers(installed_version("transformers"))
    if words.ranks_per_gpu is not None:
        os.environ[RANKS_PER_GPU_VARIABLE] = str(words.ranks_per_gpu)

    def load(progress: Progress) -> None:
        with rank_imports(progress, lambda: words.output_dir):
            import toolkit.observe.foreign_script  # noqa: F401

    run_reporting_failures(load)
    from toolkit.observe.foreign_script import ScriptRun

    return ScriptRun(words).run()


if __name__ == "__main__":
    code = exit_code_of(main)
    # Threads of the script, as Python itself waits for them.
    threading._shutdown()  # type: ignore[attr-defined]
    leave(code)
