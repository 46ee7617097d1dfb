"""Job files from templates (templates/*.j2), for SLURM, Kubernetes, SkyPilot and ssh, and submitting a file.

The script of the nodes is the same for all of them. In an sbatch file it is a quoted here-document: nothing in it is
expanded on the first node. SIGTERM goes to the job step, not to the batch shell, early enough for the checkpoint. The
job is requeued only if the run was interrupted, has written a checkpoint in this attempt, and was not cancelled: a run
that failed would fail again. Several presets are `toolkit compare` on the job's nodes (`--nodes 1:2` compares on one
and on two). Before the time limit SLURM signals the batch shell, which requeues the job; the ledger has every finished
trial.

On Kubernetes a JobSet, or a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime, starts one pod per node. The pods
find each other by the headless service of the JobSet: the head is the pod with index 0. A failed pod ends all pods, and
the JobSet starts all of them again; the run then resumes. On SkyPilot a task of several nodes is started with `sky jobs
launch`, which recovers it after a preemption. With ssh, one line starts a script on all nodes of a shared file system.
"""

import json
import os
import re
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

from toolkit.cluster.cluster_job import (
    ClusterJob,
    check_job_arguments,
    check_named_inputs,
    check_secrets,
    check_world_sizes,
    preset_word,
)
from toolkit.cluster.node_setup import ADDRESS_VARIABLE
from toolkit.cluster.options import (
    CPUS_PER_RANK,
    RENDEZVOUS_PORT,
    JobOptions,
    KubernetesOptions,
    NodeMount,
    SkyPilotOptions,
    SlurmOptions,
    SshOptions,
    limit_seconds,
)
from toolkit.entry_point import print_message
from toolkit.errors import RunFailed, ToolkitError, visible
from toolkit.files import write_text
from toolkit.files.paths import user_path
from toolkit.files.secrets import hide_words
from toolkit.job.argument_reading import without_flags
from toolkit.job.argument_values import as_list
from toolkit.job.job import Job
from toolkit.job.job_checks import refuse_arguments_of_comparison
from toolkit.launch.command import NVME_PATH_VARIABLE, torchrun_words
from toolkit.launch.preflight import check_required
from toolkit.presets.preset import load_preset
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
    """Print a job file, write it to `--output`, or give it to `submit`. Raises ToolkitError, or RunFailed."""
    output = options.output
    if options.as_json and submit is not None:
        hint = "`--output FILE --json`, and submit that file"
        raise ToolkitError("--json does not work with --submit: its output is the scheduler's", hint=hint)
    if output is not None:
        try:
            before = output.read_text(errors="replace") if output.is_file() else text
            if before != text and "# Written by: toolkit cluster" not in before:
                raise ToolkitError(
                    f"{output} exists, and `toolkit cluster` did not write it", hint="name another `--output`"
                )
            if before != text:  # of other options, or edited since
                kept = output.replace(output.with_name(f"{output.name}.before"))
                print_message(f"{output} was another one, kept as {kept}")
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
        hint = "run this on a login node, or write the file with `--output FILE` and submit it there"
        raise ToolkitError(f"`{submit[0]}` is not on the PATH: the job was not submitted", hint=hint)
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


# -- SLURM

# SLURM kills a job at its limit: with less than this left after the signal's time it would never train.
MIN_TRAINING_SECONDS = 60
PLACE = Place(head="$HEAD_NODE", port="$HEAD_PORT", peer="$PEER_NODE", checked=True)
# Names of `toolkit.compare`, which starts its runs through this package; a test holds them equal.
COMPARISON_FILE, LEDGER_FILE = "comparison.json", "ledger.jsonl"
# The batch shell of a comparison only has to requeue the job; SLURM may send the signal up to a minute early.
SIGNAL_SECONDS = 60


def job_file(job: ClusterJob, slurm: SlurmOptions) -> str:
    """Return the sbatch file. Raises ToolkitError for a time limit in which the run could only stop."""
    if slurm.time_limit is not None and limit_seconds(slurm.time_limit) < job.signal_seconds + MIN_TRAINING_SECONDS:
        raise ToolkitError(
            f"--time-limit {slurm.time_limit} is too short: the run is stopped {job.signal_seconds} s before its end"
            f" to save ({job.save_time.seconds:g} s, {job.save_time.source})",
            hint="a longer `--time-limit`, or `--save-seconds` as measured",
        )
    # An interrupted run goes back into the queue if it has checkpoints to resume from.
    requeues = slurm.requeue and job.job.saves_checkpoints
    python = python_of(job.options, shares_files=True)
    script = node_script(job, PLACE, python=python)
    values = sbatch_values(job.options, slurm, output_dir=job.output_dir, preset=job.preset)
    return render("slurm.sbatch.j2", job.options, job=job, name=job.name, requeues=requeues, script=script, **values)


def sbatch_values(
    options: JobOptions, slurm: SlurmOptions, *, output_dir: Path, preset: PresetSpec | None
) -> dict[str, Any]:
    """Return what every sbatch template needs; `inside` precedes a command that runs in an apptainer container."""
    python = python_of(options, shares_files=True)
    doctor = doctor_command(options, python, output_dir=output_dir, preset=preset)
    inside = ""
    if options.container is not None and slurm.container_runtime == "apptainer":
        gpus = "" if options.cpu else "--nv "
        inside = f"apptainer exec {gpus}--bind {slurm.mounts} {shlex.quote(options.container)} "
    return {
        "slurm": slurm,
        "doctor": "; ".join([*options.setup, f"exec {doctor}"]),
        "compare_nodes": "; ".join([*options.setup, f'exec {python} -m toolkit doctor --compare "$@"']),
        "inside": inside,
        "cpus_per_task": slurm.cpus_per_task or options.gpus_per_node * (1 if options.cpu else CPUS_PER_RANK),
    }


def comparison_file(options: JobOptions, slurm: SlurmOptions) -> str:
    """Return the sbatch file of a comparison. Raises ToolkitError for a preset that cannot train on some nodes."""
    argv = [*options.training_arguments]
    check_secrets(argv)
    job = Job.from_argv(argv)
    check_required(job, ("model_name_or_path", "dataset", "output_dir", "max_steps"))
    check_named_inputs(job)
    refuse_arguments_of_comparison(job.without("output_dir"))
    for preset in map(load_preset, options.preset):
        if preset.uses_nvme:
            raise ToolkitError(
                f"preset {preset.name!r} offloads to a disk of each node, which a comparison checks on one node only",
                hint=f"compare it on one node; a job of its own takes `--env {NVME_PATH_VARIABLE}=...`",
            )
        check_world_sizes(options, preset, job)
        check_job_arguments(options, preset, argv)
    if options.container is not None:
        raise ToolkitError(
            "--container with several presets: a comparison starts srun itself, which containers do not have",
            hint="leave it out, and use `--setup` or `--module`; or one `--preset`",
        )
    output_dir = user_path(str(job.output_dir))
    compare = [
        f"{python_of(options, shares_files=True)} -m toolkit compare",
        " ".join(f"--preset {shlex.quote(preset_word(load_preset(preset)))}" for preset in options.preset),
        f"--nproc-per-node {options.gpus_per_node} --num-processes {','.join(map(str, options.world_sizes))}",
        *([] if slurm.repeats is None else [f"--repeats {slurm.repeats}"]),
        *(["--cpu"] if options.cpu else []),
        '--output-dir "$output_dir" "${resume[@]}" --',
        *group_arguments(without_flags(argv, ["output_dir"])),
    ]
    return render(
        "comparison.sbatch.j2",
        options,
        name=options.name or "compare",
        output_dir=output_dir,
        compare=compare,
        comparison_file=COMPARISON_FILE,
        ledger_file=LEDGER_FILE,
        signal_seconds=SIGNAL_SECONDS,
        **sbatch_values(options, slurm, output_dir=output_dir, preset=None),
    )


# -- Kubernetes and SkyPilot


def check_mounted(job: ClusterJob, mounts: Sequence[NodeMount], *, example: str, workdir: str | None = None) -> None:
    """Raise ToolkitError where the run folder is in no mount, or a model or file is where only this node sees it.

    A mounted folder may exist here too; SkyPilot copies `workdir` to every node, and training starts in it.
    """
    output_dir = job.output_dir
    if not output_dir.is_absolute() or not any(output_dir.is_relative_to(mount.path) for mount in mounts):
        shown = ", ".join(str(mount.path) for mount in mounts) or "none"
        raise ToolkitError(
            f"--output_dir {output_dir} is in no folder that all nodes mount ({shown}): each would write its own",
            hint=f"`{example}`, and `--output_dir /runs/NAME`",
        )
    for name in job.job.given if job.options.check_files else ():
        for path in (Path(str(each)).expanduser() for each in as_list(job.job.value(name)) if name != "output_dir"):
            mounted = path.is_absolute() and any(path.is_relative_to(mount.path) for mount in mounts)
            copied = workdir is not None and not path.is_absolute() and os.path.exists(Path(workdir) / path)  # noqa: PTH110
            if os.path.exists(path) and not mounted and not copied:  # noqa: PTH110  (`Path.exists` fails for long names)
                raise ToolkitError(
                    f"--{name} {path} is on this node, where the nodes of the job will not see it",
                    hint="a hub id; a folder of `--mount`; `--workdir .` and a relative path (SkyPilot); or, "
                    "if the image has it, `--no-check-files`",
                )


# What Kubernetes replaces in a command: a variable in $(NAME), and two dollar signs by one.
_EXPANDED = re.compile(r"\$(?=\([A-Za-z_][-\w.]*\))|\$\$+")


def manifest(job: ClusterJob, kubernetes: KubernetesOptions) -> str:
    """Return the objects. Raises ToolkitError for what they cannot express."""
    if job.options.container is None:
        raise ToolkitError("--container is missing: a pod runs an image", hint="`--container my-registry/image:tag`")
    if kubernetes.kind == "trainjob" and job.options.elastic:
        raise ToolkitError(
            f"--nodes {job.options.nodes} with --kind trainjob: Kubeflow Trainer v2 has a fixed number of nodes",
            hint="`--kind jobset`",
        )
    check_mounted(job, kubernetes.mounts, example="--mount my-claim=/runs")
    # The names of the first two pods in the headless service of the JobSet.
    head, peer = (f"{job.name}-node-0-{index}.{job.name}" for index in (0, 1))
    place = Place(head=head, peer=peer if job.options.min_nodes > 1 else None)
    script = f'export ATTEMPT="{job.name}-$RESTART_ATTEMPT"\n'
    script += node_script(job, place, python=python_of(job.options, shares_files=False))
    gpus = {} if job.options.cpu else {"nvidia.com/gpu": str(job.options.gpus_per_node)}
    resources = {name: amount for name, _, amount in (text.rpartition("=") for text in kubernetes.resource)}
    return render(
        "kubernetes.yaml.j2",
        job.options,
        job=job,
        kubernetes=kubernetes,
        command={"command": ["bash", "-c", literal(script)]},
        limits=gpus | resources,
        deadline=None if kubernetes.time_limit is None else limit_seconds(kubernetes.time_limit),
    )


def literal(text: str) -> str:
    """Return a text that Kubernetes gives a container unchanged.

    >>> literal("echo $(HOME) $HOME $(hostname -i) $$")
    'echo $$(HOME) $HOME $(hostname -i) $$$$'
    """
    return _EXPANDED.sub(lambda found: found[0] * 2, text)


def task_file(job: ClusterJob, sky: SkyPilotOptions) -> str:
    """Return the task. Raises ToolkitError for an elastic job, and for a run folder that no mount holds."""
    if job.options.elastic:
        raise ToolkitError(
            f"--nodes {job.options.nodes} on SkyPilot: a task has a fixed number of nodes, and is recovered as a whole",
            hint=f"`--nodes {job.options.max_nodes}`",
        )
    if sky.gpu is None and not job.options.cpu:
        raise ToolkitError("--gpu is missing: SkyPilot chooses the instance by its GPU", hint="`--gpu H100`")
    check_mounted(job, sky.mounts, example="--mount s3://my-bucket=/runs", workdir=sky.workdir)
    # The task's id stays after a recovery: the number of the job on its cluster and the head's address change.
    place = Place(head="$HEAD_NODE", peer="$PEER_NODE")
    resources = {
        "infra": sky.infra,
        "accelerators": None if job.options.cpu else {str(sky.gpu): job.options.gpus_per_node},
        "use_spot": sky.spot or None,
        "image_id": None if job.options.container is None else f"docker:{job.options.container}",
        "job_recovery": {"max_restarts_on_errors": sky.job_restarts} if sky.job_restarts else None,
    }
    return render(
        "skypilot.yaml.j2",
        job.options,
        job=job,
        sky=sky,
        resources={name: value for name, value in resources.items() if value is not None},
        script=node_script(job, place, python=python_of(job.options, shares_files=False)),
    )


# -- ssh


def script_file(job: ClusterJob, ssh: SshOptions) -> str:
    """Return the script that runs on every node. Raises ToolkitError unless there is one host for each node."""
    options = job.options
    if len(ssh.host) != options.max_nodes:
        hint = " ".join(f"--host node{number + 1}" for number in range(min(options.max_nodes, 8)))
        raise ToolkitError(f"--nodes {options.nodes} needs {options.max_nodes} --host, got {len(ssh.host)}", hint=hint)
    hosts = [host.rpartition("@")[2] for host in ssh.host]
    place = Place(head=hosts[0], port=str(ssh.port), peer=hosts[1] if len(hosts) > 1 else None)
    return render(
        "ssh.sh.j2",
        options,
        start_line=start_line(ssh, str(options.output or "job.sh")),
        folder=Path.cwd(),
        output_dir=job.output_dir,
        script=node_script(job, place, python=python_of(options, shares_files=True)),
    )


def start_line(ssh: SshOptions, file: str) -> str:
    """Return one line of shell that starts the script on every node, and waits for all of them."""
    path = os.path.abspath(file)  # noqa: PTH100  (the file need not exist yet)
    loop = f'for host in {" ".join(ssh.host)}; do ssh -n $host "bash {shlex.quote(path)} $attempt" & done; wait'
    return f"attempt=$(date +%s); {loop}"
