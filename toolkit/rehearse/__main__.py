"""The process of one rehearsed rank: `python -m toolkit.rehearse`, started by `toolkit rehearse`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.files.secrets import restore_secrets
from toolkit.observe.rank_process import garbage_collector_off, leave, prepare_environment, run_reporting_failures
from toolkit.observe.words import Words
from toolkit.presets.preset import load_preset
from toolkit.rehearse.rehearsal import RehearsedRank

UNTIMED_STEPS = 1  # of a script; the first step makes the optimizer's states


def main(argv: Sequence[str]) -> int:
    """Rehearse one rank and return the exit code. What follows `--` are the training arguments."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.rehearse")
    parser.add_argument("--preset", required=True, help="a preset's name, or its accelerate configuration file")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--fake-tensors", action="store_true")
    parser.add_argument("--script", help="somebody's script instead of ours")
    parser.add_argument("--module")
    parser.add_argument("--output-dir", type=Path, help="the run folder of a script")
    parser.add_argument("--steps", type=int)
    split = list(argv).index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    rehearsed = RehearsedRank(world_size=options.world_size, rank=options.rank, fake_tensors=options.fake_tensors)
    preset, training_argv = load_preset(options.preset), argv[split + 1 :]
    if options.output_dir is not None:
        words = Words(
            target=options.script or options.module,
            is_module=options.script is None,
            arguments=tuple(restore_secrets(training_argv)),
            output_dir=options.output_dir,
            stop_after_steps=options.steps,
            untimed_steps=UNTIMED_STEPS,
            require_preset=preset,
            trial=True,
        )
        with garbage_collector_off():
            prepare_environment()
            from toolkit.rehearse.script_rank import RehearsedScript
        return RehearsedScript(words, rehearsed).run()
    with garbage_collector_off():
        prepare_environment()
        from toolkit.rehearse import rank_script
    return run_reporting_failures(lambda progress: rank_script.main(rehearsed, preset, training_argv, progress))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
