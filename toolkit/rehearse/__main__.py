"""The process of one rehearsed rank: `python -m toolkit.rehearse`, started by `toolkit rehearse`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from toolkit.observe.rank_process import garbage_collector_off, leave, prepare_environment, run_reporting_failures
from toolkit.presets.preset import load_preset
from toolkit.rehearse.rehearsal import RehearsedRank


def main(argv: Sequence[str]) -> int:
    """Rehearse one rank and return the exit code. What follows `--` are the training arguments."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.rehearse")
    parser.add_argument("--preset", required=True, help="a preset's name, or its accelerate configuration file")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--fake-tensors", action="store_true")
    split = list(argv).index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    rehearsed = RehearsedRank(world_size=options.world_size, rank=options.rank, fake_tensors=options.fake_tensors)
    with garbage_collector_off():
        prepare_environment()
        from toolkit.rehearse import rank_script
    preset, training_argv = load_preset(options.preset), argv[split + 1 :]
    return run_reporting_failures(lambda progress: rank_script.main(rehearsed, preset, training_argv, progress))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
