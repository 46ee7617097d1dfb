"""Job files from templates (templates/*.j2): the script that every engine runs on each node, and submitting a file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.cluster.cluster_job import ClusterJob, preset_word
from toolkit.cluster.node_setup import ADDRESS_VARIABLE
from toolkit.cluster.options import JobOptions
from toolkit.cluster.platform_options import RENDEZVOUS_PORT
from toolkit.entry_point import print_message
from toolkit.errors import RunFailed, ToolkitError, visible
from toolkit.files import write_text
from toolkit.files.secrets import hide_words
from toolkit.launch.command import NVME_PATH_VARIABLE, torchrun_words
from toolkit.presets.spec import PresetSpec

SUBMIT_SECONDS = 600.0
PREFLIGHT_SECONDS = 600  # nodes of one job start minutes apart where images are pulled


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an engine's variables tell a node its place, as words for the shell; `$ATTEMPT` is no other attempt's."""

    head: str
    port: str = str(RENDEZVOUS_PORT)
    peer: str | None = None  # another node than the head
    checked: bool = False  # the engine's file runs the preflight checks itself


def render(template: str, options: JobOptions, **values: Any) -> str:
    """Return a job file, whose comment names the command that it was written by."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # bash has ${#nodes[@]}
        comment_end_string="#>",
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["continued"] = lambda words: " \\\n    ".join(words)
    environment.filters["yaml"] = yaml_text
    written_by = visible(shlex.join(["toolkit", *hide_words(sys.argv[1:])]))
    return environment.get_template(template).render(written_by=written_by, options=options, **values)


class _Dumper(yaml.SafeDumper):
    """Writes scripts as literal blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def yaml_text(value: Any) -> str:
    """Return a value as YAML for people to read.

    >>> print(yaml_text({"run": "a\\nb\\n", "n": 2}))
    run: |
      a
      b
    n: 2
    """
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=False)
    return text.removesuffix("\n")


def node_script(job: ClusterJob, place: Place, *, python: str) -> str:
    """Return the script of each node; its last command is torchrun, which gets the engine's signals."""
    options = job.options
    endpoint, per_node = f"{place.head}:{place.port}", options.gpus_per_node
    torchrun = [
        *torchrun_words(nnodes=options.nodes, processes_per_node=per_node, attempt="$ATTEMPT", endpoint=endpoint),
        *([] if options.max_nodes == 1 else [f'--local-addr "${ADDRESS_VARIABLE}"']),
        f"--max-restarts {options.restarts} --shutdown-timeout {job.save_time.grace_seconds}",
        "-m toolkit.train",
        *group_arguments(job.training_argv),
    ]
    doctor = doctor_command(options, python, output_dir=job.output_dir, preset=job.preset)
    values = {"job": job, "place": place, "python": python, "torchrun": torchrun, "doctor": doctor}
    return render("node_script.sh.j2", options, preflight_seconds=PREFLIGHT_SECONDS, **values)


def doctor_command(options: JobOptions, python: str, *, output_dir: Path, preset: PresetSpec | None) -> str:
    """Return the command that checks a node, without the model: `doctor` plans the memory of one node's ranks."""
    words = [f"{python} -m toolkit doctor --json --output-dir {shlex.quote(str(output_dir))}"]
    words += [f"--num-processes {options.gpus_per_node}"]
    words += [] if options.cpu else [f"--gpus-per-node {options.gpus_per_node}"]
    if preset is not None:
        words += [f"--preset {shlex.quote(preset_word(preset))}"]
        words += [f"--nvme-path {shlex.quote(options.variables[NVME_PATH_VARIABLE])}"] if preset.uses_nvme else []
    return " ".join(words)


def python_of(options: JobOptions, *, shares_files: bool) -> str:
    """Return the Python of the nodes, quoted: as given; this one where they see its files; or the first on the PATH."""
    if options.python is not None:
        return shlex.quote(options.python)
    return shlex.quote(os.path.abspath(sys.executable) if shares_files and options.container is None else "python")  # noqa: PTH100


def group_arguments(words: Sequence[str]) -> list[str]:
    """Return training arguments for the shell, each flag together with its values.

    >>> group_arguments(["--bf16", "true", "--dataset", "a.jsonl", "b.jsonl"])
    ['--bf16 true', '--dataset a.jsonl b.jsonl']
    """
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    return [" ".join(group) for group in groups]


def deliver(
    text: str,
    options: JobOptions,
    *,
    submit: Sequence[str] | None,
    suffix: str,
    warnings: Sequence[str] = (),
    grace_seconds: int | None = None,
) -> None:
    """Print a job file, or write it to `--output`; with `submit`, give it to that command as its last word.

    Raises ToolkitError where the file cannot be written or the command is not installed, RunFailed where it fails.
    """
    output = options.output
    if options.as_json and submit is not None:
        hint = "`--output FILE --json`, and submit that file"
        raise ToolkitError("--json does not work with --submit: its output is the scheduler's", hint=hint)
    if output is not None:
        try:
            if output.is_file() and "# Written by: toolkit cluster" not in output.read_text(errors="replace"):
                raise ToolkitError(
                    f"{output} exists, and `toolkit cluster` did not write it", hint="name another `--output`"
                )
            write_text(output, text)
        except OSError as error:
            raise ToolkitError(f"{output} cannot be written: {error.strerror}", hint="`--output FILE`") from None
        print_message(f"wrote {output}")
    elif submit is None and not options.as_json:
        print(text, end="")
    if options.as_json:
        file = None if output is None else str(output)
        facts = {"file": file, "text": text, "warnings": list(warnings), "grace_seconds": grace_seconds}
        print(json.dumps(facts, indent=2))
    if submit is None:
        return
    if shutil.which(submit[0]) is None:
        raise ToolkitError(
            f"`{submit[0]}` is not on the PATH: the job was not submitted",
            hint="run this on a login node, or write the file with `--output FILE` and submit it there",
        )
    with tempfile.TemporaryDirectory(prefix="toolkit-job-") as folder:
        path = output or Path(folder, f"job{suffix}")
        if output is None:
            path.write_text(text)
        words = [*submit, str(path)]
        print_message(shlex.join(words))
        try:
            done = subprocess.run(words, timeout=SUBMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"`{submit[0]}` did not answer in {SUBMIT_SECONDS / 60:g} minutes") from None
    if done.returncode != 0:
        raise RunFailed(f"`{shlex.join(submit)}` failed with exit code {done.returncode}; its message is above")
