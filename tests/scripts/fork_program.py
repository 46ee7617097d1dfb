"""Run a Python program as `fork_program.py -m toolkit ...`, forked from the session's server; its stdin is empty."""

import os
import sys

from fork_server import SERVER_VARIABLE, fork_process

if __name__ == "__main__":
    started = fork_process(
        os.environ[SERVER_VARIABLE], [sys.executable, *sys.argv[1:]], environment=os.environ, stdout=1, stderr=2
    )
    sys.exit(started.wait())
