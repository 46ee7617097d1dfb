"""The process of one rank: `-m toolkit.train`."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import warnings
from typing import NoReturn

from toolkit.cache import ask_processor_once, path_with_ninja, use_cached_extensions
from toolkit.errors import EXIT_DONE


def prepare_environment() -> None:
    """What torch and DeepSpeed read when they are imported."""
    use_cached_extensions()
    ask_processor_once()
    os.environ["PATH"] = path_with_ninja()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a log file holds lines, not bars
    # Deprecations inside torch and DeepSpeed, printed hundreds of times a run; none is about the user's job.
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"(torch\.distributed|transformers\.modeling_utils)"
    )
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main(argv: list[str] | None = None) -> int:
    """Run the script; every failure becomes failure.json, one message and an exit code."""
    gc.disable()  # imports free little: collecting meanwhile costs a fifth of their time
    prepare_environment()
    from toolkit.train.failure import Progress, report_failure
    from toolkit.train.script import run

    gc.freeze()  # what was imported stays: the exit need not look through it, which took a second
    gc.enable()
    progress = Progress()
    try:
        run(sys.argv[1:] if argv is None else argv, progress)
    except SystemExit as leaving:  # --help
        return int(leaving.code or 0)
    except BaseException as error:  # every cause must reach failure.json
        code = report_failure(error, progress)
        if (
            progress.swap_folder is not None
        ):  # after the report: without its files another rank fails, and tells of that
            shutil.rmtree(progress.swap_folder, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the other ranks may hang in a collective; their launcher ends them
    return EXIT_DONE


def leave(code: int) -> NoReturn:
    """End without tearing the interpreter down.

    gloo's threads may still hold tensors of finished collectives; letting go of one while the interpreter ends aborts
    a rank that was done, destroyed process group or not (https://github.com/pytorch/pytorch/pull/179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
