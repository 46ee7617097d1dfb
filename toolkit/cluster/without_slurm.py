"""Nodes without SLURM: `toolkit cluster kubernetes`, `skypilot` and `ssh`.

On Kubernetes a JobSet, or a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime, starts one pod per node. The pods
find each other by the headless service of the JobSet: the head is the pod with index 0. A failed pod ends all pods, and
the JobSet starts all of them again; the run then resumes. On SkyPilot a task of several nodes is started with `sky jobs
launch`, which recovers it after a preemption. With ssh, one line starts a script on all nodes of a shared file system.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from toolkit.cluster.cluster_job import ClusterJob
from toolkit.cluster.job_files import Place, node_script, python_of, render
from toolkit.cluster.options import limit_seconds
from toolkit.cluster.platform_options import KubernetesOptions, NodeMount, SkyPilotOptions, SshOptions
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import as_list

# What Kubernetes replaces in a command: a variable in $(NAME), and two dollar signs by one.
_EXPANDED = re.compile(r"\$(?=\([A-Za-z_][-\w.]*\))|\$\$+")


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


# -- Kubernetes


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


# -- SkyPilot


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
        raise ToolkitError(
            f"--nodes {options.nodes} needs {options.max_nodes} --host, got {len(ssh.host)}",
            hint=" ".join(f"--host node{number + 1}" for number in range(min(options.max_nodes, 8))),
        )
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
