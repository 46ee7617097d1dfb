"""Observe somebody's script: `python -m toolkit.observe [options] script.py ...`, under any launcher or alone."""

from __future__ import annotations

import os
import sys
import threading

from toolkit.entry_point import exit_code_of
from toolkit.hardware.shared_gpu import RANKS_PER_GPU_VARIABLE
from toolkit.observe.rank_process import garbage_collector_off, leave, prepare_environment
from toolkit.observe.words import Words, check_transformers
from toolkit.versions import installed_version


def main() -> int:
    """Run the script, and return its exit code."""
    words = Words.read(sys.argv[1:])
    check_transformers(installed_version("transformers"))
    if words.ranks_per_gpu is not None:
        os.environ[RANKS_PER_GPU_VARIABLE] = str(words.ranks_per_gpu)
    with garbage_collector_off():
        prepare_environment()
        from toolkit.observe.foreign_script import ScriptRun
    return ScriptRun(words).run()


if __name__ == "__main__":
    code = exit_code_of(main)
    # Threads of the script, as Python itself waits for them.
    threading._shutdown()  # type: ignore[attr-defined]
    leave(code)
