"""`toolkit tune`: the fastest setting of a job that fits."""

from __future__ import annotations

from dataclasses import replace

from toolkit.cli.options import expand_options
from toolkit.cli.train import default_preset_of
from toolkit.flags import JsonOutput
from toolkit.launch.options import TrainOptions
from toolkit.tune.options import TuneOptions


@expand_options
def tune(options: TuneOptions, as_json: JsonOutput = False) -> None:
    """Find the fastest setting of a job that fits: preset, per-GPU batch, checkpointing, loss, compilation.

    The problem stays: sequences per step, length, optimizer, dtypes. Plans rule out what does not fit; trials of the
    rest run in rounds, and after each round what is slower than the fastest is eliminated.

    After `--`: the job, as for `toolkit train`.
    """
    from toolkit.convert.conversion import recognising
    from toolkit.demo.assets import with_demo_inputs
    from toolkit.tune.commands import run_tune

    with recognising(*options.preset, *options.training_arguments[:1]):
        words = with_demo_inputs(options.training_arguments, runs_script=options.runs_script)
        options = replace(options, training_arguments=words)
        preset = options.baseline or next(iter(options.preset), None)
        if preset is None:
            same = ("num_processes", "cpu", "gpu", "dry_run", "script", "module", "training_arguments")
            preset = default_preset_of(TrainOptions(**{name: getattr(options, name) for name in same}))[0]
        run_tune(options, preset, as_json=as_json)
