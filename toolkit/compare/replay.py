"""Run one row of a comparison again, and report if its speed lands where the row's repeats predict one more run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolkit.compare.console_progress import ConsoleProgress
from toolkit.compare.ledger import LEDGER_FILE, Ledger, trials_of
from toolkit.compare.options import CompareOptions
from toolkit.compare.rows import RowKey, RunRecord
from toolkit.compare.run_record import read_run_record
from toolkit.compare.runner import Runner
from toolkit.compare.significance import common_steps, prediction_interval, speeds_of
from toolkit.compare.specification import SPEC_FILE, ComparisonSpec, Trial
from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.secrets import HIDDEN, hidden_names, hide_secrets
from toolkit.hardware.node import git_commit, library_versions
from toolkit.job.job import Job
from toolkit.launch.nvme import check_nvme
from toolkit.presets import load_preset
from toolkit.record.folder import RunFolder
from toolkit.record.run_files import read_run
from toolkit.units import number


def replay_row(options: CompareOptions, spec: ComparisonSpec, *, progress: ConsoleProgress) -> str:
    """Run the row once more in `replays/`, started warm or cold as its first repeat, and return the verdict as text.

    `options.training_arguments` are those of the job that are secrets, which the specification does not have.

    Raises ToolkitError for an unknown row, for a preset whose files have changed, and for a secret that is missing.
    """
    spec = with_secrets(spec, options.training_arguments)
    rows, folder = {row.name: row for row in spec.rows()}, options.folder
    name = options.row or ""
    if name not in rows:
        raise ToolkitError(f"--row {name} is not in the comparison: {', '.join(rows)}", hint=did_you_mean(name, rows))
    row = rows[name]
    preset = load_preset(spec.preset_sources[row.preset])
    if hide_secrets(preset.texts()) != spec.preset_files[row.preset]:
        raise ToolkitError(
            f"the files of preset {row.preset!r} are not those that {row.name} ran with",
            hint=f"{folder / SPEC_FILE} holds their text under preset_files",
        )
    disk = check_nvme(preset, nvme_path=options.nvme_path, job=spec.job(row), cpu=spec.cpu)
    first = Trial(row=row, repeat=0)
    before = read_run(RunFolder(folder / "trials" / first.id))
    name = f"{row.name}-{len(list((folder / 'replays').glob(f'{row.name}-*')))}"
    progress.start(name)
    runner = Runner(
        spec=spec,
        folder=folder,
        timeout_seconds=60 * options.trial_timeout_minutes,
        nvme={row.preset: disk},
        progress=progress,
        warm_start=before.warm_start,
        allocation=spec.allocation(),
    )
    run_folder = runner.start_run(row, folder / "replays" / name)
    again = read_run_record(first, run_folder, folder, untimed_steps=spec.untimed_steps)
    progress.finish(again.updated(trial=name))
    repeats = [trial for trial in trials_of(Ledger(folder / LEDGER_FILE).read(), row) if trial.completed]
    now = {**library_versions(), "commit": git_commit(Path(__file__).parent)}
    then = {**(before.versions or {}), "commit": before.git_commit}
    changed = [f"{name} {then.get(name)} -> {value}" for name, value in now.items() if then.get(name) != value]
    return verdict(row, again, repeats) + (f"\nchanged since: {', '.join(changed)}" if changed else "")


def with_secrets(spec: ComparisonSpec, given: Sequence[str]) -> ComparisonSpec:
    """Return a recorded specification with the secrets of its job, which it has as `***`.

    Raises ToolkitError for one that is missing, and for any other argument.
    """
    names = Job.from_argv(given).given
    hidden = {name for row in spec.rows() for name in hidden_names(spec.job(row).given_values)}
    for name in names:
        if name not in hidden:
            raise ToolkitError(f"--{name}: a replay trains the job as it is recorded", hint=f"leave --{name} out")
    for name in sorted(hidden - set(names)):
        raise ToolkitError(
            f"--{name} is recorded as {HIDDEN}, because it is a secret", hint=f"add it: `-- --{name} {name.upper()}`"
        )
    return spec.model_copy(update={"training_arguments": (*spec.training_arguments, *given)})


def verdict(row: RowKey, again: RunRecord, repeats: Sequence[RunRecord]) -> str:
    """Return where the new run's speed lands, over the steps that it and all repeats have timed."""
    if not again.completed:
        return f"{row.name} ended as {again.status} this time: {again.message}"
    if not repeats:
        return f"{row.name} completed this time; none of its repeats did"
    speed, *known = speeds_of([again, *repeats], common_steps([again, *repeats]))
    interval = prediction_interval(known)
    if interval is None:
        return f"{row.name} ran at {number(speed, 1)} tokens/s, {number(known[0], 1)} before; one run has no interval"
    low, high = interval
    where = "inside" if low <= speed <= high else "outside"
    return (
        f"{row.name} ran at {number(speed, 1)} tokens/s, {where} {number(low, 1)} to {number(high, 1)}, where its"
        f" {len(known)} repeats predict one more run (95 %)"
    )
