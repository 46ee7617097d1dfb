"""Python imports this module in each process of a test: those that start runs fork them from the session's server."""

import os

if "TOOLKIT_FORK_SERVER" in os.environ:
    from warm_popen import fork_runs

    fork_runs()
