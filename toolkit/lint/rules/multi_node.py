"""Rules about launchers on several nodes, in sbatch files, SkyPilot tasks and other scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.lint.document import SBATCH, SHELL, SKYPILOT, Document
from toolkit.lint.findings import ERROR, WARNING, Match, rule
from toolkit.lint.job_script import JobScript, LauncherCall

SCRIPTS = (SBATCH, SHELL, SKYPILOT)
NODE_COUNT = {"torchrun": "nnodes", "accelerate": "num-machines"}
LOCAL = r"localhost|127\.0\.0\.1"


def calls(doc: Document, *tools: str) -> Iterator[LauncherCall]:
    """Yield the calls of some launchers in a script."""
    for call in [] if doc.script is None else doc.script.launches:
        if call.tool in tools:
            yield call


def on_several_nodes(call: LauncherCall) -> bool:
    """Return True if a launcher is told of more than one node, or of a number that a variable has."""
    count = call.options.get(NODE_COUNT.get(call.tool, ""))
    return count is not None and count not in ("1", "1:1")


def spans_nodes(script: JobScript) -> bool:
    """Return True if the job has several nodes, as the file or a launcher says."""
    return (script.nodes or 1) > 1 or any(map(on_several_nodes, script.launches))


def elastic_range(call: LauncherCall) -> tuple[str, str] | None:
    """Return the lowest and highest number of nodes of an elastic torchrun, None for another one."""
    low, colon, high = (call.options.get("nnodes") or "").partition(":")
    return (low, high) if call.tool == "torchrun" and colon and low != high and "{" not in low else None


def master(call: LauncherCall) -> str | None:
    """Return the option with the head's address that a launcher is given."""
    names = ("rdzv-endpoint", "master-addr", "main-process-ip")
    return next((name for name in names if call.options.get(name)), None)


@rule(
    "head-is-localhost",
    ERROR,
    *SCRIPTS,
    library="torch",
    fix='the first of `scontrol show hostnames "$SLURM_JOB_NODELIST"`, and an error without it',
)
def head_is_localhost(doc: Document) -> Iterator[Match]:
    """Where the head's name is not found, every node takes itself for the head: it waits for the others until it times
    out, or trains alone."""
    if doc.script is None or not spans_nodes(doc.script):
        return
    for found, line in doc.script.find(rf"\|\|\s*echo\s+[\"']?({LOCAL})|:-({LOCAL})\}}"):
        yield Match(
            key=found[0].strip(),
            message="without a head, each node becomes its own",
            fix='`mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")`, and the first of them',
            line=line,
        )


@rule("each-node-alone", ERROR, *SCRIPTS, library="torch", fix="--nnodes, or --num_machines for accelerate")
def each_node_alone(doc: Document) -> Iterator[Match]:
    """Without `--nnodes` torchrun, and without `--num_machines` accelerate, starts a world of one node on each node: as
    many trainings as nodes, which write into the same folder."""
    if doc.script is None or (doc.script.nodes or 1) < 2:
        return
    for call in calls(doc, *NODE_COUNT):
        named = call.options.keys() & {NODE_COUNT[call.tool], "config-file"}
        if not named and not doc.script.mentions(r"\bPET_NNODES="):
            option = NODE_COUNT[call.tool].replace("num-machines", "num_machines")
            yield Match(
                key=call.tool,
                message=f"{doc.script.nodes} nodes start a training each",
                fix=f"`--{option} {doc.script.nodes}`",
                line=call.line,
            )


@rule("no-rendezvous", ERROR, *SCRIPTS, library="torch", fix="--rdzv-backend c10d --rdzv-endpoint HEAD:PORT")
def no_rendezvous(doc: Document) -> Iterator[Match]:
    """torchrun on several nodes without an endpoint meets at 127.0.0.1: each node waits for the others at itself."""
    for call in calls(doc, "torchrun"):
        if on_several_nodes(call) and master(call) is None and "rdzv-conf" not in call.options:
            yield Match(
                key="--rdzv-endpoint",
                message="each node waits for the others at its own 127.0.0.1",
                fix="`--rdzv-backend c10d --rdzv-endpoint HEAD:PORT`",
                line=call.line,
            )


@rule("node-rank-missing", ERROR, *SCRIPTS, library="torch", fix="--rdzv-backend c10d, which gives each node its rank")
def node_rank_missing(doc: Document) -> Iterator[Match]:
    """With the static rendezvous every node has rank 0 unless it is told another one."""
    names = {"torchrun": "node-rank", "accelerate": "machine-rank"}
    for call in calls(doc, *names):
        static = call.options.get("rdzv-backend") in (None, "static") and "config-file" not in call.options
        if on_several_nodes(call) and static and master(call) and names[call.tool] not in call.options:
            yield Match(
                key=f"--{names[call.tool].replace('machine-', 'machine_')}",
                message="every node has rank 0",
                fix="`--rdzv-backend c10d`" if call.tool == "torchrun" else "`--machine_rank`, expanded on each node",
                line=call.line,
            )


@rule(
    "deepspeed-without-standard",
    ERROR,
    *SCRIPTS,
    library="accelerate",
    fix="torchrun, or --deepspeed_multinode_launcher standard",
)
def deepspeed_without_standard(doc: Document) -> Iterator[Match]:
    """`accelerate launch` starts DeepSpeed on several nodes through pdsh and a hostfile, which it takes to be named
    `None`: each node trains a world of its own. With a hostfile, the whole environment, tokens included, is written to
    `.deepspeed_env`, which everybody may read."""
    for call in calls(doc, "accelerate"):
        deepspeed = call.options.keys() & {"use-deepspeed", "deepspeed-config-file", "zero-stage", "deepspeed-hostfile"}
        if on_several_nodes(call) and deepspeed and call.options.get("deepspeed-multinode-launcher") != "standard":
            yield Match(
                key="--deepspeed_multinode_launcher",
                message="DeepSpeed is started through pdsh",
                fix="torchrun on each node, or `--deepspeed_multinode_launcher standard`",
                line=call.line,
            )


@rule("fixed-rendezvous-id", WARNING, SBATCH, SKYPILOT, library="torch", fix="the job's id and its restart count")
def fixed_rendezvous_id(doc: Document) -> Iterator[Match]:
    """A launcher that is left from an earlier attempt, or another job with the same head, joins the rendezvous of the
    same id; without `--rdzv-id` it is `none`."""
    for call in calls(doc, "torchrun"):
        named = call.options.get("rdzv-id")
        if on_several_nodes(call) and "rdzv-backend" in call.options and "$" not in (named or ""):
            value = "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" if doc.kind == SBATCH else "$SKYPILOT_TASK_ID"
            yield Match(
                key="--rdzv-id",
                message=f"the id is {named or 'none'} in every attempt and every job",
                fix=f'`--rdzv-id "{value}"`',
                line=call.line,
            )


@rule("elastic-without-restarts", WARNING, *SCRIPTS, library="torch", fix="--max-restarts above 0")
def elastic_without_restarts(doc: Document) -> Iterator[Match]:
    """A node that is lost makes the collectives of the others fail, which counts as a restart: with `--max-restarts 0`,
    the default, an elastic run ends with its first lost node."""
    for call in calls(doc, "torchrun"):
        if elastic_range(call) and call.options.get("max-restarts", "0") == "0":
            yield Match(
                key="--max-restarts",
                message=f"--nnodes {call.options['nnodes']} ends with the first node that is lost",
                fix="`--max-restarts 3`",
                line=call.line,
            )


@rule("elastic-shared-store", WARNING, *SCRIPTS, library="torch", fix="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
def elastic_shared_store(doc: Document) -> Iterator[Match]:
    """torchrun gives the ranks the store of its rendezvous, with the keys of the attempt before: a node that joins
    again waits forever."""
    for call in calls(doc, "torchrun"):
        variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        if elastic_range(call) and doc.script is not None and not doc.script.mentions(rf"{variable}=[\"']?1"):
            yield Match(
                key=variable,
                message="a node that joins again meets the keys of the attempt before",
                fix=f"`export {variable}=1`",
                line=call.line,
            )


# -- sbatch files: what runs on which node, what a signal reaches, what a requeue needs

TASK_VARIABLE = re.compile(r"\$\{?(SLURM_(?:PROCID|NODEID|LOCALID))\b")
STARTERS = r"\b(srun|mpirun|mpiexec|pdsh|clush|ssh|parallel-ssh)\b"
FIXED_PORT = re.compile(r"(?:.*:)?[0-9]{2,5}")
PORT_OPTIONS = ("rdzv-endpoint", "master-port", "main-process-port")


def trains(doc: Document) -> JobScript | None:
    """Return the script of an sbatch file that starts a launcher."""
    return doc.script if doc.script is not None and doc.script.launches else None


@rule(
    "rank-of-first-node",
    ERROR,
    SBATCH,
    library="slurm",
    fix="single quotes around srun's command, or torchrun, which needs no rank",
)
def rank_of_first_node(doc: Document) -> Iterator[Match]:
    """The batch script runs once, on the first node: it expands `$SLURM_PROCID` to 0 before srun copies the command, so
    every node becomes rank 0 (accelerate#2816)."""
    script = doc.script
    if script is None:
        return
    for found in TASK_VARIABLE.finditer(script.text):
        start = script.text.rfind("\n", 0, found.start()) + 1
        reports = re.match(r"\s*(echo|printf)\b", script.text[start : found.start()])
        if script.expands_at(found.start()) and not reports:
            yield Match(
                key=f"${found[1]}",
                message=f"${found[1]} is expanded on the first node: every node gets 0",
                fix=f"`srun bash -c '... ${found[1]} ...'` in single quotes, or torchrun with --rdzv-backend c10d",
                line=script.line_at(found.start()),
            )


@rule("only-first-node", WARNING, SBATCH, library="slurm", fix="srun before the launcher")
def only_first_node(doc: Document) -> Iterator[Match]:
    """SLURM runs the batch script on the first node only; the launchers of the others are never started."""
    script = trains(doc)
    if script is not None and (script.nodes or 1) > 1 and not script.mentions(STARTERS):
        call = script.launches[0]
        yield Match(
            key=call.tool,
            message=f"one of {script.nodes} nodes starts a launcher",
            fix=f"`srun --ntasks-per-node=1 {call.tool} ...`",
            line=call.line,
        )


@rule("launcher-per-gpu", WARNING, SBATCH, library="slurm", fix="#SBATCH --ntasks-per-node=1")
def launcher_per_gpu(doc: Document) -> Iterator[Match]:
    """A launcher starts one rank per GPU itself. srun with a task per GPU starts it as often, so that each GPU gets as
    many ranks as the node has GPUs."""
    script = trains(doc)
    if script is None or "ntasks-per-node" not in script.directives:
        return
    count, line = script.directives["ntasks-per-node"]
    if count.isdigit() and int(count) > 1 and not script.mentions(r"srun\b.*--ntasks(-per-node)?[= ]"):
        yield Match(
            key="--ntasks-per-node",
            message=f"srun starts {script.launches[0].tool} {count} times on each node",
            fix="`#SBATCH --ntasks-per-node=1`",
            line=line,
        )


@rule("fixed-port", WARNING, SBATCH, library="torch", fix="a port from the job's id")
def fixed_port(doc: Document) -> Iterator[Match]:
    """Two jobs that share a node with the same port: the second one fails, or joins the first."""
    for call in calls(doc, "torchrun", "accelerate"):
        for name in PORT_OPTIONS:
            value = call.options.get(name) or ""
            if on_several_nodes(call) and FIXED_PORT.fullmatch(value) and value.rpartition(":")[2] != "0":
                yield Match(
                    key=f"--{name}",
                    message=f"every job uses port {value.rpartition(':')[2]}",
                    fix="`PORT=$((20000 + SLURM_JOB_ID % 10000))`",
                    line=call.line,
                )


@rule(
    "killed-at-limit", WARNING, SBATCH, library="slurm", fix="#SBATCH --signal=TERM@SECONDS, above the time of a save"
)
def killed_at_limit(doc: Document) -> Iterator[Match]:
    """At the time limit SLURM sends SIGTERM and, 30 s later (KillWait), SIGKILL: what was trained since the last
    checkpoint is lost unless a save fits into that time."""
    script = trains(doc)
    if script is not None and "signal" not in script.directives:
        yield Match(
            key="--signal",
            message="nothing is saved before the time limit",
            fix="`#SBATCH --signal=TERM@300`, or more than a save takes",
            line=script.directives.get("time", ("", script.launches[0].line))[1],
        )


@rule("signal-to-batch-shell", WARNING, SBATCH, library="slurm", fix="--signal=TERM@SECONDS without B:")
def signal_to_batch_shell(doc: Document) -> Iterator[Match]:
    """`--signal=B:...` goes to the batch shell alone, which ends without telling the ranks unless a trap does."""
    script = trains(doc)
    value, line = script.directives.get("signal", ("", 0)) if script is not None else ("", 0)
    if script is not None and value.startswith("B:") and not script.mentions(r"^\s*trap\b"):
        yield Match(
            key="--signal",
            message=f"{value} never reaches the ranks",
            fix=f"`#SBATCH --signal={value.removeprefix('B:')}`, or a `trap` that passes it on",
            line=line,
        )


@rule("never-requeued", WARNING, SBATCH, library="slurm", fix="#SBATCH --requeue, and scontrol requeue after a signal")
def never_requeued(doc: Document) -> Iterator[Match]:
    """The run saves when the signal comes, and nothing starts it again."""
    script = trains(doc)
    if script is not None and "signal" in script.directives and not _requeues(script):
        wanted = "no-requeue" in script.directives
        if not wanted:
            yield Match(
                key="--requeue",
                message="the job ends after its signal, and is not put back into the queue",
                fix='`#SBATCH --requeue` and `scontrol requeue "$SLURM_JOB_ID"`; `--no-requeue` if that is meant',
                line=script.directives["signal"][1],
            )


def _requeues(script: JobScript) -> bool:
    return "requeue" in script.directives or script.mentions(r"\bscontrol\s+requeue\b")


@rule("requeued-from-start", WARNING, SBATCH, library="slurm", fix="--resume_from_checkpoint latest")
def requeued_from_start(doc: Document) -> Iterator[Match]:
    """A job that is requeued runs its script again from the first line: without an argument that resumes, training
    starts again at step 0."""
    script = trains(doc)
    if script is not None and _requeues(script) and not script.mentions(r"resume|\bcheckpoint-|--ckpt|--load\b"):
        yield Match(
            key="--resume_from_checkpoint",
            message="a requeued job trains again from step 0",
            fix="`--resume_from_checkpoint latest`",
            line=script.launches[0].line,
        )


@rule("short-shutdown", WARNING, SBATCH, library="torch", fix="--shutdown-timeout above the time of a save")
def short_shutdown(doc: Document) -> Iterator[Match]:
    """torchrun kills its ranks 30 s after its own SIGTERM, in the middle of a longer save."""
    script = trains(doc)
    if script is None or "signal" not in script.directives:
        return
    for call in calls(doc, "torchrun"):
        if "shutdown-timeout" not in call.options:
            yield Match(
                key="--shutdown-timeout",
                message="ranks have 30 s to save after the signal",
                fix="`--shutdown-timeout 240`, less than the seconds of `--signal`",
                line=call.line,
            )


@rule("waits-for-lost-node", WARNING, SBATCH, library="slurm", fix="srun --kill-on-bad-exit=1")
def waits_for_lost_node(doc: Document) -> Iterator[Match]:
    """A launcher that fails on one node leaves those of the others waiting for a collective: the job pays for all nodes
    until a timeout."""
    script = trains(doc)
    if script is None or not spans_nodes(script) or script.mentions(r"--kill-on-bad-exit|\bsrun\b.*\s-K"):
        return
    for _, line in script.find(r"\bsrun\b"):
        yield Match(
            key="srun",
            message="the other nodes wait after one has failed",
            fix="`srun --kill-on-bad-exit=1`",
            line=line,
        )
        return
