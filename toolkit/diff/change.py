"""Compare the configuration files of a git commit with those of the working tree."""

import contextlib
import difflib
import fnmatch
import math
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.lint.check import LintResult, lint_paths
from toolkit.lint.document import ENGINE_FILES, LINTED_SUFFIXES, SUFFIXES, load_document
from toolkit.lint.findings import Finding
from toolkit.lint.named_files import JUDGED_BY, forget_projects
from toolkit.plan.config_file import configured_plan
from toolkit.plan.options import PlanOptions
from toolkit.plan.planner import make_plans, plan_request
from toolkit.units import gib

PlanRow = dict[str, Any]
SHOWN_LINES = 6
PLANNED = ("preset", "world_size", "gpu", "verdict", "planned_peak_bytes", "headroom_bytes", "step_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """One changed file: what is new in it, and what its job takes."""

    file: str
    status: str  # `added`, `changed` or `removed`, or `affected` by another file that changed
    new: list[Finding]
    gone: list[Finding]
    lines: tuple[int, ...] = ()
    """Numbers of the changed lines, in the file as it is now; of a removal the line before which it was."""
    before: PlanRow | None = None
    now: PlanRow | None = None
    not_planned: str = ""
    """Why there is no plan of what the file is now; empty where there is one, or where it is no job."""

    @property
    def stops_fitting(self) -> bool:
        """True if more is planned now than the GPU has, and was not, or the job was not there before."""
        return self.now is not None and _is_over(self.now) and (self.before is None or not _is_over(self.before))

    def plan_line(self) -> str:
        """Return what became of the plan: `was 61.0 GiB, now 83.0 GiB: does not fit h100; lines 4, 9`."""
        if self.now is None:
            return f"not planned: {self.not_planned}" if self.not_planned else ""
        words = {"fits": "fits", "does_not_fit": "does not fit", "too_close": "is too close to call on"}
        if _is_over(self.now):
            words["too_close"] = "if its rows are not shorter, does not fit"
        now, gpu = self.now["planned_peak_bytes"], self.now["gpu"].partition(",")[0]
        verdict = f"{words[self.now['verdict']]} {gpu} × {self.now['world_size']} under `{self.now['preset']}`"
        was = "" if self.before is None else f"was {gib(self.before['planned_peak_bytes'])}, "
        if self.before is not None and self.before["planned_peak_bytes"] == now:
            was = "unchanged, "
        shown = ", ".join(map(str, self.lines[:SHOWN_LINES])) + ", ..." * (len(self.lines) > SHOWN_LINES)
        lines = f"; line{'s' * (len(self.lines) > 1)} {shown}" if was.startswith("was") and self.lines else ""
        return f"{was}now {gib(now)}: {verdict}{lines}"

    def as_row(self) -> dict[str, Any]:
        """Return the change as `toolkit diff --json` prints it."""
        return {
            "file": self.file,
            "status": self.status,
            "new": list(map(asdict, self.new)),
            "gone": list(map(asdict, self.gone)),
            "lines": list(self.lines),
            "stops_fitting": self.stops_fitting,
            "not_planned": self.not_planned or None,
            "before": self.before,
            "now": self.now,
        }


def changes(base: str, options: PlanOptions, paths: Sequence[Path] = ()) -> list[FileChange]:
    """Return every changed configuration below the working directory, against the common ancestor with `base`.

    Files are planned where `--config` can read them. Raises ToolkitError outside of a repository, and for a base that
    git does not know, or a GPU that nobody knows.
    """
    if options.gpu is not None:
        find_gpu(options.gpu)  # an unknown one is refused where nothing is planned too
    ancestor = _git("merge-base", base, "HEAD").strip()
    limits = [str(path) for path in paths] or ["."]
    for limit in (each for each in limits if not Path(each).exists()):
        # a pattern of git's, or what was removed since
        if not _git("ls-files", "--", limit) and not _git("ls-tree", "--name-only", ancestor, "--", limit):
            raise ToolkitError(f"no such file or folder here, or in {base}: {limit}")
    listed = _git("diff", "--name-status", "--no-renames", "-z", "--relative", ancestor, "--", *limits).split("\0")
    untracked = _git("ls-files", "--others", "--exclude-standard", "-z", "--", *limits).split("\0")
    words = {"A": "added", "D": "removed"}
    status = {name: words.get(letter, "changed") for letter, name in zip(listed[::2], listed[1::2], strict=False)}
    status |= {name: "added" for name in untracked if name}
    names = sorted(name for name in status if name.endswith(LINTED_SUFFIXES))
    if not names:
        return []
    forget_projects()
    affected = dict.fromkeys(_naming(names, limits), "affected")
    status |= affected
    names = sorted([*names, *affected])
    found = []
    with files_of(ancestor) as old:
        for name in names:
            before, now = _linted(old / name, old), _linted(Path(name), Path())
            if before is None and now is None:
                continue
            was, here = ({_key(each): each for each in found or ()} for found in (before, now))
            # What a file that this one names has by itself is old, or that file's own change.
            others = {each.file for each in here.values()} - {name}
            alone = {_key(each) for other in others for each in _linted(Path(other), Path()) or ()}
            plans, why = _plans(Path(name), options)
            earlier, _ = _plans(old / name, options)
            shown = min(plans.values(), key=_fastest_that_fits, default=None)
            change = FileChange(
                file=name,
                status=status[name],
                new=[each for key, each in here.items() if key not in was and key not in alone],
                gone=[each for key, each in was.items() if key not in here],
                lines=_changed_lines(old / name, Path(name)),
                before=_same_of(earlier, shown),
                now=shown,
                not_planned=why,
            )
            if change.status != "affected" or change.new or change.gone or change.before != change.now:
                found.append(change)
    return found


def _naming(changed: Sequence[str], limits: Sequence[str]) -> Iterator[str]:
    """Yield the files that have not changed and name one that has: a job and its DeepSpeed JSON."""
    words = {Path(name).name for name in changed if name.endswith(SUFFIXES)}
    places = {Path(name).resolve() for name in changed}
    for name in _git("ls-files", "-z", "--", *limits).split("\0"):
        file = Path(name)
        if name in changed or not name.endswith(LINTED_SUFFIXES) or not file.is_file():
            continue
        text = file.read_text(errors="replace")
        if any(word in text for word in words):
            with contextlib.suppress(ToolkitError):
                if places & {Path(each.path).resolve() for each in load_document(file).linted}:
                    yield name


@contextlib.contextmanager
def files_of(commit: str) -> Iterator[Path]:
    """Give the working directory as it was in a commit: its configurations and the files that these are judged by."""
    top, below = (_git("rev-parse", word).strip() for word in ("--show-toplevel", "--show-prefix"))
    listed = _git("ls-tree", "-r", "-z", "--full-tree", "--name-only", commit).split("\0")
    tracked = {name.rpartition("/")[2] for name in listed}
    # Patterns, not names: a repository may have more of them than a command line takes.
    wanted = (*(f"*{suffix}" for suffix in LINTED_SUFFIXES), *JUDGED_BY)
    patterns = [f":(glob)**/{pattern}" for pattern in wanted if fnmatch.filter(tracked, pattern)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as packed:
        if patterns:
            subprocess.run(["git", "archive", commit, "--", *patterns], stdout=packed, check=True, cwd=top)
            packed.seek(0)
            with tarfile.open(fileobj=packed) as archive:
                archive.extractall(folder, filter=_inside)
        Path(folder, ".git").touch()  # the project ends here
        yield Path(folder, below)


def _inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


def _changed_lines(before: Path, now: Path) -> tuple[int, ...]:
    old, new = (file.read_text(errors="replace").splitlines() if file.is_file() else [] for file in (before, now))
    blocks = difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    changed = [range(start, max(start + 1, end)) for kind, _, _, start, end in blocks if kind != "equal"]
    return tuple(min(number + 1, len(new)) for lines in changed for number in lines if new)


def _linted(file: Path, root: Path) -> list[Finding] | None:
    if not file.is_file():
        return None
    try:
        result: LintResult = lint_paths([file], forgets=False)
    except ToolkitError:
        return None
    if root == Path():
        return result.findings
    prefix = f"{root}{os.sep}"
    return [
        replace(each, file=each.file.removeprefix(prefix), message=each.message.replace(prefix, ""))
        for each in result.findings
    ]


def _key(finding: Finding) -> tuple[str, str, str, str]:
    """What makes a finding the same after lines have moved."""
    return finding.file, finding.rule, finding.key, finding.message


def _plans(file: Path, options: PlanOptions) -> tuple[dict[tuple[str, int], PlanRow], str]:
    """The plans of a job's file by preset and number of GPUs; or why there is none."""
    try:
        if load_document(file).kind in ENGINE_FILES:  # how to train, and not what
            return {}, ""
        model, configured, _ = configured_plan(file, None, options, given=("gpu", "num_processes"))
        rows = [plan.as_row() for plan in make_plans(plan_request(model, configured))]
    except ToolkitError as error:
        return {}, error.message if file.is_file() else ""
    return {(row["preset"], row["world_size"]): {name: row[name] for name in PLANNED} for row in rows}, ""


def _same_of(earlier: Mapping[tuple[str, int], PlanRow], shown: PlanRow | None) -> PlanRow | None:
    """Return the earlier plan of the same preset and GPUs, or where the file has another preset now, the fastest."""
    if shown is None:
        return None
    fastest = min(earlier.values(), key=_fastest_that_fits, default=None)
    return earlier.get((shown["preset"], shown["world_size"]), fastest)


def _is_over(row: PlanRow) -> bool:
    return bool(row["verdict"] == "does_not_fit" or row["headroom_bytes"] < 0)


def _fastest_that_fits(row: PlanRow) -> tuple[int, float, int]:
    seconds = row["step_seconds"]
    rank = ("fits", "too_close", "does_not_fit").index(row["verdict"]) + _is_over(row)
    return rank, sum(seconds) if seconds else math.inf, row["planned_peak_bytes"]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["git failed"])[-1].removeprefix("fatal: ")
        hint = "run it in a repository, with a commit or branch that is there: `toolkit diff origin/main`"
        raise ToolkitError(f"git {words[0]}: {why}", hint=hint)
    return done.stdout


def markdown(found: Sequence[FileChange]) -> str:
    """Return the changes as a comment for a pull request."""
    lines = ["### What this change does to training configurations", ""]
    for change in found:
        plan = change.plan_line()
        lines.append(f"- **{change.file}** ({change.status}){': ' + plan if plan else ''}")
        for finding in change.new:
            place = "" if finding.line is None else f", line {finding.line}"
            place += "" if finding.file == change.file else f" of {finding.file}"
            key = f" `{finding.key}`:" if finding.key else ""
            lines.append(f"  - {finding.level} `{finding.rule}`{place}:{key} {finding.message}. Fix: {finding.fix}")
        if change.gone:
            lines.append(f"  - {len(change.gone)} finding{'s' * (len(change.gone) > 1)} gone")
    if len(lines) == 2:
        lines.append("No training configuration and no launcher was changed.")
    return "\n".join(lines) + "\n"
