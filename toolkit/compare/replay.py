"""Run one row of a comparison again, and say whether its speed lands where the row's repeats expect one more.

print(replay_row(comparison, folder, "zero2-n2", telling=telling, timeout_seconds=None, nvme_path=None))
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.compare.claims import common_steps, speeds_of
from toolkit.compare.intervals import next_interval
from toolkit.compare.ledger import LEDGER_FILE, Ledger
from toolkit.compare.rows import row_of
from toolkit.compare.run import Runner, Telling
from toolkit.compare.trials import Comparison, Trial, row_name
from toolkit.errors import ToolkitError, did_you_mean
from toolkit.hardware.machine import git_commit, library_versions
from toolkit.launch.nvme import check_nvme
from toolkit.presets import load_preset
from toolkit.runs import status
from toolkit.runs.folder import RunFolder
from toolkit.units import number

Row = dict[str, Any]


def replay_row(
    comparison: Comparison,
    folder: Path,
    row: str,
    *,
    telling: Telling,
    timeout_seconds: float | None,
    nvme_path: str | None,
) -> str:
    """One more run in `replays/`, and the verdict as a sentence. Raises ToolkitError for a row that is not there."""
    trial = _trial(comparison, row)
    preset = load_preset(comparison.loads[trial.preset])
    if preset.texts() != comparison.preset_files[trial.preset]:
        raise ToolkitError(
            f"the files of preset {trial.preset!r} are not those that {row} ran with",
            hint=f"{folder / 'comparison.json'} holds their text under preset_files",
        )
    arguments = comparison.arguments(trial.preset, trial.num_processes)
    disk = check_nvme(preset, nvme_path=nvme_path, arguments=arguments, cpu=comparison.cpu)
    runner = Runner(
        comparison=comparison,
        folder=folder,
        timeout_seconds=timeout_seconds,
        nvme={trial.preset: disk},
        telling=telling,
    )
    place = len(list((folder / "replays").glob(f"{row}-*")))
    name = f"{row}-{place}"
    telling.start(name)
    run_folder = runner.train(trial, folder / "replays" / name)
    again = row_of(trial, run_folder, folder, untimed_steps=comparison.untimed_steps, position=0)
    telling.finish(name, again, False)
    return verdict(row, again, _repeats(folder, trial)) + _changes(folder, trial)


def verdict(row: str, again: Row, repeats: list[Row]) -> str:
    """Where the new run lands, over the steps that it and the repeats have all timed."""
    if again["status"] != status.COMPLETED:
        return f"{row} ended as {again['status']} this time: {again['message']}"
    if not repeats:
        return f"{row} completed this time; none of its repeats did"
    steps = common_steps([again, *repeats])
    speed, *known = speeds_of([again, *repeats], steps)
    low, high = next_interval(known) or (None, None)
    if low is None or high is None:
        return f"{row} ran at {number(speed, 1)} tokens/s, {number(known[0], 1)} before; one run has no interval"
    where = "inside" if low <= speed <= high else "outside"
    return (
        f"{row} ran at {number(speed, 1)} tokens/s, {where} {number(low, 1)} to {number(high, 1)}, where its"
        f" {len(known)} repeats expect one more run (95 %)"
    )


def _trial(comparison: Comparison, row: str) -> Trial:
    names = {row_name(preset, n): Trial(preset=preset, num_processes=n, repeat=0) for preset, n in comparison.rows()}
    if row not in names:
        raise ToolkitError(f"--row {row} is not in the comparison: {', '.join(names)}", hint=did_you_mean(row, names))
    return names[row]


def _repeats(folder: Path, trial: Trial) -> list[Row]:
    found = Ledger(folder / LEDGER_FILE).read()
    rows = (found.get(replace(trial, repeat=repeat).id) for repeat in range(len(found)))
    return [row for row in rows if row is not None and row["status"] == status.COMPLETED]


def _changes(folder: Path, trial: Trial) -> str:
    """Versions or code that are not those of the first repeat."""
    run = RunFolder(folder / "trials" / trial.id).read_run() or {}
    now = {**library_versions(), "commit": git_commit(Path(__file__).parent)}
    then = {**run.get("versions", {}), "commit": run.get("git_commit")}
    changed = [f"{name} {then.get(name)} -> {value}" for name, value in now.items() if then.get(name) != value]
    return f"\nchanged since: {', '.join(changed)}" if changed else ""
