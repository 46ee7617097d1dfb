"""Measure on this node's GPUs in 45 minutes: planned, measured, error, and one file to send.

    make gpu-check                                                # the parts that are left
    python benchmarks/gpu/check.py --output DIR --list            # the parts, and what each teaches
    python benchmarks/gpu/check.py --output DIR --part peaks      # one part again: it resumes, with new time
    python benchmarks/gpu/check.py --output DIR --tiny            # tiny models on a CPU, to try every part
    python benchmarks/gpu/check.py --report DIR/gpu-check.json    # the table of a file

The parts run in the order of what they teach. A finished part is not run again, an interrupted one resumes; what fails
or runs out of memory is a row, and the next part follows. Nothing is downloaded: models have random weights, which
takes the memory and the time of trained ones, and text is made up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "warm_starts"))

from first_parts import FIRST_PARTS
from fork_server import HERE as WARM_STARTS
from fork_server import SERVER_VARIABLE, fork_server
from hot_kernels import table_lines
from parts import LATER_PARTS, Check, Row, Step, unmeasured
from record import ROOT, append_line, circumstances, print_table, read_lines, write_lines

from toolkit.entry_point import exit_code_of
from toolkit.errors import EXIT_INVALID_INPUT, ToolkitError
from toolkit.files.secrets import hide_secrets
from toolkit.hardware.gpus import count_gpus, gpu_names
from toolkit.record.folder import read_json
from toolkit.units import gib

PARTS = FIRST_PARTS | LATER_PARTS
FILE = "gpu-check.json"
CUT_OFF, OVER = "cut off: the same command resumes", "minutes are over"
SEND_TO = "Attach it to an issue of the repository: docs/evidence/gpu.md."
HEARTBEAT_SECONDS, END_SECONDS = 30, 20
# No hub, and no index of packages.
OFFLINE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "PIP_NO_INDEX"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}
ON_A_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
KEPT_OF_NODE = ("cpu", "cpu_count", "host_memory_bytes", "python", "gpus")
TINY_MINUTES = 10  # of each part on a CPU


# -- run the parts


def minutes_of(check: Check, name: str) -> float:
    return TINY_MINUTES if check.tiny else PARTS[name].minutes


def run_part(check: Check, name: str, left_in_all: Callable[[], float]) -> Row:
    """Run a part to its end, its time limit or that of all, and return its line of `parts.jsonl`."""
    part, started = PARTS[name], time.monotonic()
    minutes = minutes_of(check, name)
    deadline = started + min(60 * minutes, left_in_all())
    line: Row = {"part": name, "ended": "done", "rows": []}
    try:
        for group in part.steps(check, minutes):
            for (label, _, read), code in run_group(check, group, deadline, name, left_in_all):
                line["rows"] += read()
                if code is None:
                    over = f"its {minutes:g} {OVER}: `--part {name}` resumes"
                    line["ended"] = CUT_OFF if left_in_all() <= 0 else over
                elif code != 0:
                    # Refused here, with a reason.
                    line["ended"] = line["ended"] if code == EXIT_INVALID_INPUT else "failed"
                    line["rows"] += unmeasured(label, f"exit code {code}: {last_line(check.output / f'{label}.log')}")
    except Exception as error:  # a GPU that the planner does not know, a model that does not fit: the next part follows
        line["ended"] = "failed"
        line["rows"] += unmeasured(name, f"{type(error).__name__}: {error}")
    return line | {"seconds": round(time.monotonic() - started)}


def run_group(
    check: Check, group: Step | list[Step], deadline: float, name: str, left: Callable[[], float]
) -> Iterator[tuple[Step, int | None]]:
    """Run one step, or several at a time: those whose speed is not measured. Yield each with its exit code."""
    steps = group if isinstance(group, list) else [group]
    with ThreadPoolExecutor(len(steps)) as pool:

        def started(step: Step) -> Future[int | None]:
            log = check.output / f"{step[0]}.log"
            return pool.submit(run_until, step[1], log, deadline, f"{name}: {step[0]}", left)

        for step, running in [(step, started(step)) for step in steps]:
            yield step, running.result()


def run_until(command: list[str], log: Path, deadline: float, what: str, left: Callable[[], float]) -> int | None:
    """Run a command with its output in a log; return its exit code, or None where its time was over."""
    if time.monotonic() >= deadline:
        return None
    environment = os.environ | OFFLINE | python_path(str(ROOT))
    streams: Row = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, **streams)
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                try:
                    return process.wait(min(HEARTBEAT_SECONDS, remaining))
                except subprocess.TimeoutExpired:
                    message(f"  {what}: {clock(remaining)} left of the part, {clock(left())} in all")
            return None
        finally:
            end(process)


def python_path(*folders: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])}


def fork_runs_of_steps() -> None:
    """Let what the steps train be forked from a process with all imports: on a CPU they take most of the time."""
    os.environ |= OFFLINE | ON_A_CPU | python_path(str(ROOT), WARM_STARTS)
    os.environ[SERVER_VARIABLE] = fork_server(os.environ)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started: first let it end its ranks itself."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no output")[:200]


def message(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02d}"


# -- the file to send, and its table


def document(check: Check) -> Row:
    """Return everything to send: the rows, and on what they were measured, without names and paths of this node."""
    parts = {part["part"]: part for part in read_lines(check.output / "parts.jsonl")}
    facts, command = circumstances(), "make gpu-check" + (" GPU_CHECK_ARGS=--tiny" if check.tiny else "")
    facts |= {"machine": {key: facts["machine"][key] for key in KEPT_OF_NODE}, "command": command}
    done = [parts[name] for name in PARTS if name in parts]
    for row in (row for part in done for row in part["rows"]):
        row["note"] = anonymous(row.get("note") or "")
    return {"schema_version": 1, "tiny": check.tiny, **facts, "parts": done}


def anonymous(text: str) -> str:
    """Return a text in which paths, secrets, and the names of this node and its user are replaced.

    >>> anonymous("no file /home/someone/model.bin")
    'no file PATH'
    """
    text = re.sub(r"(?<![\w/])~?(?:/[\w.@+=-]+){2,}/?", "PATH", hide_secrets(text))
    host = socket.gethostname()
    names = {host, host.partition(".")[0], os.environ.get("USER", ""), Path.home().name}
    for name in names - {"", "root", "localhost"}:
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w])", "NAME", text)
    return text


SHOWN: dict[str, Callable[[float], str]] = {
    **dict.fromkeys(("states", "allocated", "reserved", "driver", "traced"), gib),
    **dict.fromkeys(("step", "profile"), lambda seconds: f"{1000 * seconds:.1f} ms"),
    "mfu": "{:.3f}".format,
    "tokens/s": "{:,.0f}".format,  # in files of earlier versions
}


def table_rows(found: Row) -> Iterator[list[str]]:
    """Yield the rows of the table; of many cases of a part, the worst of each preset and quantity, with their mean."""
    for part in found["parts"]:
        grouped: dict[tuple[str, str], list[Row]] = {}
        for row in part["rows"]:
            by_preset = part["part"] == "peaks" and row["error"] is not None
            key = (row["preset"], row["quantity"]) if by_preset else (row["case"], row["quantity"])
            grouped.setdefault(key, []).append(row)
        for (case, quantity), rows in grouped.items():
            worst = max(rows, key=lambda row: abs(row["error"] or 0))
            values = [n_a(worst[name], SHOWN.get(quantity, str)) for name in ("planned", "measured")]
            note = worst.get("note") or ""
            if len(rows) > 1 and all(row["error"] is not None for row in rows):
                mean = sum(abs(row["error"]) for row in rows) / len(rows)
                note = f"the worst of {len(rows)} cases; mean {mean:.1%}"
            yield [part["part"], case, quantity, *values, n_a(worst["error"], "{:+.1%}".format), one_line(note)]
        if part["ended"] not in ("done", "left out"):  # files of earlier versions left parts out
            yield [part["part"], "", "", "", "", "", part["ended"]]


def n_a(value: float | None, show: Callable[[float], str]) -> str:
    return "n/a" if value is None else show(value)


def one_line(text: str) -> str:
    return " ".join(text.split())[:100]


def print_report(found: Row) -> None:
    """Print on what was measured, and the table."""
    gpus = [f"{gpu['name']} (driver {gpu['driver']})" for gpu in found["machine"]["gpus"]]
    on = "tiny models on a CPU: these figures say nothing of a GPU" if found["tiny"] else ", ".join(gpus)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    print(f"{on}\n{versions}; commit {found['git_commit']}; {found['date']}")
    print_table(["part", "case", "of", "planned", "measured", "error", "note"], list(table_rows(found)))
    for row in (row for part in found["parts"] for row in part["rows"] if row.get("table")):
        print("\n".join(["", f"profile of {row['case']}", *table_lines(row["table"])]))


def read_document(path: Path) -> Row:
    """Return a file of this check. Raises ToolkitError for another one."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("schema_version") != 1 or "parts" not in found:
        raise ToolkitError(
            f"{path} is not a file of this check", hint=f"expected the {FILE} that `make gpu-check` wrote"
        )
    return found


def open_folder(given: argparse.Namespace) -> Check:
    """Return the check of a folder. Raises ToolkitError for another check's folder, and without a GPU."""
    if not given.tiny and count_gpus() == 0:
        raise ToolkitError(
            "no GPU is visible, expected one or more NVIDIA GPUs",
            hint="`make gpu-check GPU_CHECK_ARGS=--tiny` tries every part on a CPU",
        )
    check = Check(output=given.output.resolve(), tiny=given.tiny)
    setting, made = {"tiny": check.tiny, "gpus": [] if check.tiny else gpu_names()}, check.output / "setting.json"
    check.output.mkdir(parents=True, exist_ok=True)
    if made.is_file() and read_json(made) != setting:
        raise ToolkitError(f"{given.output} was begun on {made.read_text()}", hint="another folder: `--output DIR`")
    made.write_text(json.dumps(setting))
    return check


def list_parts(output: Path) -> None:
    done = {part["part"]: part["ended"] for part in read_lines(output / "parts.jsonl")}
    rows = [[name, f"{part.minutes:g}", part.teaches, done.get(name, "")] for name, part in PARTS.items()]
    print_table(["part", "minutes", "teaches", "ended"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), help="folder of the check; it resumes there")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="run these parts, also if they ended")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long, and resume there later")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, to try every part")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--report", type=Path, metavar="FILE", help=f"print the table of a {FILE}; run nothing")
    given = parser.parse_args()
    if given.list or given.report:
        list_parts(given.output) if given.list else print_report(read_document(given.report))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended too
    check = open_folder(given)
    if given.tiny:
        fork_runs_of_steps()
    ledger, file = check.output / "parts.jsonl", check.output / FILE
    ended = read_lines(ledger)
    write_lines(ledger, ended)  # without an incomplete last line
    done = {part["part"]: part["ended"] for part in ended}
    left = [name for name in PARTS if done.get(name, CUT_OFF) == CUT_OFF]
    if given.minutes < math.inf:  # and what its own time was too short for
        left += [name for name in PARTS if OVER in done.get(name, "")]
    names = given.part or left
    began, budget = time.monotonic(), 60 * min(given.minutes, sum(minutes_of(check, name) for name in names))
    for number, name in enumerate(names, 1):
        if time.monotonic() - began >= budget:
            break
        message(f"[{number}/{len(names)}] {name}: {PARTS[name].teaches}; at most {minutes_of(check, name):g} min")
        append_line(ledger, run_part(check, name, lambda: began + budget - time.monotonic()))
        written = file.with_suffix(".part")
        written.write_text(json.dumps(document(check), indent=1) + "\n")
        written.replace(file)
    print_report(read_document(file))
    message(f"{shlex.quote(str(file))}  {SEND_TO}")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
