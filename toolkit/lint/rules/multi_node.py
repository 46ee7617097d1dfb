"""Rules about launchers on several nodes, in sbatch files, SkyPilot tasks and other scripts."""

import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.convert.job_script import DIRECTIVE_NAMES, LauncherCall
from toolkit.lint.commands_in_yaml import GPUS_OF_CONTAINER
from toolkit.lint.document import ACCELERATE, SBATCH, SCRIPTS, SKYPILOT, Document, accelerate_file, launch_settings
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import project_root, project_source, source_of, texts_of
from toolkit.lint.rules.settings import as_enum, as_int, is_deepspeed, shorten

NODE_COUNT = {"torchrun": "nnodes", "accelerate": "num-machines"}
SRUN_ON_EACH = re.compile(r"\bsrun\b(?!.*\s(?:(?:--(?:nodes|ntasks)[= ]|-[Nn] ?)1\b|-w|--nodelist\b))", re.DOTALL)
LOCAL = r"localhost|127\.0\.0\.1"
THIS_NODE = re.compile(rf"{LOCAL}|'\$\(hostname[^)]*\)|0(?:\.0\.0\.0)?|\[?::1?\]?")


def calls(doc: Document, *tools: str) -> Iterator[LauncherCall]:
    """Yield the calls of some launchers in a script."""
    yield from (call for call in doc.script.launches if call.tool in tools)


def on_several_nodes(call: LauncherCall) -> bool:
    """Return True if a launcher is told of more than one node, or of a number that a variable has."""
    count = call.options.get(NODE_COUNT.get(call.tool, ""))
    return count is not None and count not in ("1", "1:1") and not re.search(r":-[\"']?1[\"']?\}$", count)


def several(doc: Document, *tools: str) -> list[LauncherCall]:
    """Return the calls of some launchers on several nodes: where the job has one, or may have, a variable is 1."""
    is_one = doc.script.nodes == 1 or (doc.kind == SBATCH and doc.script.nodes is None)
    calls_of = [call for call in calls(doc, *(tools or NODE_COUNT)) if on_several_nodes(call)]
    return [each for each in calls_of if not (is_one and re.search(r"\$|:", str(each.options[NODE_COUNT[each.tool]])))]


def is_alone(call: LauncherCall) -> bool:
    """Return True for a launcher that srun starts on one node, and that is told of no other."""
    on_one = r"\bsrun\b.*(?:(?:--nodes[= ]|-N ?)1\b|\s-w\b|--nodelist\b)"
    return bool(re.search(on_one, call.before, re.DOTALL)) and not on_several_nodes(call)


def spans_nodes(doc: Document) -> bool:
    """Return True if a training of the job has several nodes, as the file or a launcher says."""
    are_alone = bool(doc.script.launches) and all(map(is_alone, doc.script.launches))
    return ((doc.script.nodes or 1) > 1 and not are_alone) or bool(several(doc))


def is_static(call: LauncherCall) -> bool:
    """Return True for the static rendezvous, in which each node is told its rank."""
    return call.options.get("rdzv-backend") in (None, "static") and "mpirun-hostfile" not in call.options


def master(call: LauncherCall) -> str | None:
    """Return the option with the head's address that a launcher reads: c10d has the endpoint alone."""
    names = ("rdzv-endpoint", "master-addr", "main-process-ip") if is_static(call) else ("rdzv-endpoint",)
    return next((name for name in names if call.options.get(name)), None)


@rule(
    WARNING,
    ACCELERATE,
    *SCRIPTS,
    library="torch",
    fix='the first of `scontrol show hostnames "$SLURM_JOB_NODELIST"`, and an error without it',
)
def head_is_localhost(doc: Document) -> Iterator[Match]:
    """Where the head's address is local or unknown, each node waits or trains alone."""
    of_branch = doc.script.mentions(rf"^[ \t]+(?:export[ \t]+)?\w+=[\"']?(?:{LOCAL})\b")
    of_branch = of_branch and doc.script.mentions("^el|;;")
    # not behind a variable that SLURM sets in every job of several nodes
    pattern = rf"\|\|\s*echo\s+[\"']?({LOCAL})|(?<!SLURM_JOB_NODELIST)(?<!SLURM_NODELIST):-[\"']?({LOCAL})[\"']?\}}"
    address = str(doc.get("main_process_ip"))
    if (as_int(doc.get("num_machines")) or 1) > 1 and THIS_NODE.fullmatch(address):
        level = NOTE if doc.get("machine_rank") == 0 else None  # of the head itself, where each node has its file
        yield Match("main_process_ip", f"{address} is each node itself", "the first node's address", level=level)
    for call in several(doc):
        name, quote = master(call) or "", "'" * (call.before.count("'") % 2)  # in which each node expands for itself
        address = re.sub(r":[\w$]*$", "", call.options.get(name) or "")
        ranks = [each.options.get(option) for each in several(doc) for option in ("node-rank", "machine-rank")]
        is_head = "0" in ranks  # its own, or that of another one that this node starts
        if THIS_NODE.fullmatch(quote * address.startswith("$") + address) and not (is_head or of_branch):
            yield Match(f"--{name}", "each node meets itself", "the first node's address", line=call.line)
    for found, line in doc.script.find(pattern) if spans_nodes(doc) else ():
        fix = '`mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")`, and the first of them'
        level = NOTE if ":-" in found[0] and (doc.script.nodes or 1) == 1 else None  # a platform may set it
        yield Match(found[0].strip(), "without a head, each node becomes its own", fix, line=line, level=level)


@rule(ERROR, *SCRIPTS, library="torch", fix="--nnodes, or --num_machines for accelerate")
def each_node_alone(doc: Document) -> Iterator[Match]:
    """torchrun without `--nnodes`, accelerate without `--num_machines`, and deepspeed without a hostfile, train alone
    on each node."""
    nodes = doc.script.nodes or 1
    for call in calls(doc, "deepspeed") if nodes > 1 else ():
        told = call.options.keys() & {"hostfile", "num-nodes", "launcher", "include"} or is_alone(call)
        if re.search(r"\bsrun\b", call.before) and not told and not doc.script.mentions("hostfile|HOSTFILE"):
            message = f"{nodes} nodes start a training each: it has no hostfile"
            yield Match(call.tool, message, "`srun torchrun --nnodes`", line=call.line, library="deepspeed")
    for call in calls(doc, *NODE_COUNT) if nodes > 1 else ():
        named = call.options.keys() & {NODE_COUNT[call.tool], "config-file", "standalone"} or is_alone(call)
        is_set = doc.script.mentions(r"\bPET_NNODES=")  # which accelerate hands over to torchrun's parser too
        if call.is_complete and not named and not (is_set and call.tool == "torchrun"):
            option = NODE_COUNT[call.tool].replace("num-machines", "num_machines")
            message = f"{nodes} nodes start a training each" + (", where PET_NNODES is not set" if is_set else "")
            level, fix = NOTE if is_set else None, f"`--{option} {nodes}`"
            if doc.kind == SBATCH and doc.script.mentions(STARTERS) and not re.search(STARTERS, call.before):
                fix, level = f"{fix}, with srun in front; nothing for one node alone", NOTE
                message = "starts on the first node alone; behind what starts it on each, each trains alone"
            yield Match(call.tool, message, fix, line=call.line, level=level)


@rule(ERROR, *SCRIPTS, library="torch", fix="--rdzv-backend c10d --rdzv-endpoint HEAD:PORT")
def no_rendezvous(doc: Document) -> Iterator[Match]:
    """Without an endpoint each torchrun waits at its own localhost. c10d reads `--rdzv-endpoint` alone, static also
    `--master-addr`.
    """
    for call in several(doc, "torchrun"):
        named = master(call) or call.options.keys() & {"rdzv-conf", "standalone"} or not call.is_complete
        if not named and not doc.script.mentions(r"\bPET_(?:RDZV_ENDPOINT|MASTER_ADDR)="):
            names = ("master-addr",) if is_static(call) else ("master-addr", "master-port")
            unread = [f"--{name}" for name in names if name in call.options]
            message = "each node waits for the others at its own localhost"
            fix, level = "`--rdzv-backend c10d --rdzv-endpoint HEAD:PORT`", None
            if unread and is_static(call):  # a variable that is empty, to be filled in
                message, level = f"{message}: {unread[0]} is empty", NOTE
            elif unread:
                message += f": {call.options.get('rdzv-backend')} does not read {' and '.join(unread)}"
            elif doc.kind != SBATCH:
                message, level = f"{message}, unless a platform sets PET_MASTER_ADDR", NOTE
            yield Match("--rdzv-endpoint", message, fix, line=call.line, level=level)


@rule(ERROR, *SCRIPTS, library="torch", fix="--rdzv-backend c10d, which gives each node its rank")
def node_rank_missing(doc: Document) -> Iterator[Match]:
    """Under the static rendezvous each node needs its own rank, below their number."""
    names = {"torchrun": "node-rank", "accelerate": "machine-rank"}
    for call in calls(doc, *names):
        static = is_static(call) and call.is_complete and not call.options.keys() & {"config-file", "rdzv-conf"}
        rank = call.options.get(names[call.tool], "")
        is_same = (rank or "").isdigit() and SRUN_ON_EACH.search(call.before)
        told = (rank != "" and not is_same) or doc.script.mentions(r"\bPET_NODE_RANK=")
        nodes = as_int(call.options.get(NODE_COUNT[call.tool]))
        is_too_high = nodes is not None and (as_int(rank) or 0) >= nodes > (call.tool == "accelerate")
        if static and master(call) and (is_too_high or (not told and call in several(doc))):
            message = f"ranks are below {nodes}" if is_too_high else f"every node has rank {rank or 0}"
            fix = "`--rdzv-backend c10d`" if call.tool == "torchrun" else "`--machine_rank`, expanded on each node"
            message += "" if is_too_high or rank or doc.kind == SBATCH else ", unless the environment has PET_NODE_RANK"
            is_local = THIS_NODE.fullmatch(call.options.get(master(call) or "") or "")
            level = NOTE if is_local and nodes is None and doc.kind != SBATCH else None  # of one node, perhaps
            name = names[call.tool].replace("machine-", "machine_")
            yield Match(f"--{name}", message, fix, line=call.line, level=level)


@rule(ERROR, *SCRIPTS, library="accelerate", fix="--machine_rank, expanded on each node")
def rank_of_file(doc: Document) -> Iterator[Match]:
    """Nodes that read the same file take its `machine_rank`: all are rank 0, and wait."""
    is_unsaid = (doc.script.nodes or 1) > 1 and not doc.script.mentions(r"machine_rank(?![= ]+\d)")
    for call in calls(doc, "accelerate") if is_unsaid else ():
        file = accelerate_file(doc, call) if is_static(call) and "srun" in call.before else None
        machines = as_int(call.options.get("num-machines") or file.get("num_machines")) if file else None
        if file and (machines or 1) > 1 and as_enum(file.get("distributed_type")) != "DEEPSPEED":
            message = f"every node has the rank in {call.options['config-file']}"
            yield Match("--machine_rank", message, "`--machine_rank`, expanded on each node", line=call.line)


@rule(ERROR, *SCRIPTS, library="accelerate", fix="--main_process_ip and --main_process_port, or num_machines: 1")
def no_head(doc: Document) -> Iterator[Match]:
    """On several nodes `accelerate launch` meets at `main_process_ip`; without one that is a node named `None`."""
    for call in calls(doc, "accelerate"):
        file = accelerate_file(doc, call)
        machines = as_int(call.options.get("num-machines") or (file.get("num_machines") if file else 1)) or 1
        named = {"main-process-ip", "mpirun-hostfile", "deepspeed-hostfile", "rdzv-conf", "tpu"} & call.options.keys()
        how = call.options.get("deepspeed-multinode-launcher")
        named |= {"use-deepspeed"} & call.options.keys() if how != "standard" else set()  # which asks the hostfile
        own = file is not None and (file.get("main_process_ip") or file.has("mpirun_config") or is_deepspeed(file))
        if machines > 1 and call.is_complete and not (named or own or call.options.get("rdzv-backend")):
            message = f"{machines} nodes, and no address of the first: each waits for a node named None"
            yield Match("--main_process_ip", message, "the first node's address; on one node 1 machine", line=call.line)


@rule(ERROR, *SCRIPTS, library="torch", fix="--rdzv-backend and --rdzv-endpoint, without --standalone")
def standalone_on_several(doc: Document) -> Iterator[Match]:
    """`--standalone` sets the rendezvous to c10d at the node's own localhost, whatever address is named."""
    for call in several(doc, "torchrun"):
        if "standalone" in call.options:
            level = WARNING if "$" in str(call.options["nnodes"]) else None
            fix = "`--rdzv-backend c10d --rdzv-endpoint HEAD:PORT` instead"
            message = "each node waits for the others at its own localhost"
            message += f", where {call.options['nnodes']} is above 1" if level else ""
            yield Match("--standalone", message, fix, line=call.line, level=level)


@rule(ERROR, *SCRIPTS, library="accelerate", fix="torchrun, or --deepspeed_multinode_launcher standard")
def deepspeed_without_standard(doc: Document) -> Iterator[Match]:
    """`accelerate launch` starts DeepSpeed on several nodes through pdsh. Without a hostfile each node trains alone.
    With one, the environment, tokens included, goes into `.deepspeed_env`, which everybody may read. DeepSpeed's MPI
    launchers refuse the `--num_gpus` that accelerate passes.
    """
    for call in several(doc, "accelerate"):
        told = launch_settings(doc, call)
        how = str(told.get("deepspeed_config.deepspeed_multinode_launcher", "pdsh") if told else "").lower()
        if told is not None and is_deepspeed(told) and how != "standard":
            level = NOTE if told.has("deepspeed_config.deepspeed_hostfile") else None  # which is chosen, and works
            message = f"{how} starts DeepSpeed"
            fix = "torchrun on each node, or `--deepspeed_multinode_launcher standard`"
            if how in ("openmpi", "mvapich", "mpich"):
                message, level = f"accelerate passes --num_gpus, or a filter, which DeepSpeed refuses for {how}", ERROR
            yield Match("--deepspeed_multinode_launcher", message, fix, line=call.line, level=level)


@rule(WARNING, SBATCH, SKYPILOT, library="torch", fix="the job's id and its restart count")
def fixed_rendezvous_id(doc: Document) -> Iterator[Match]:
    """A launcher of an earlier attempt, or of another job, joins this rendezvous."""
    for call in several(doc, "torchrun"):
        named = call.options.get("rdzv-id")
        port = (call.options.get("rdzv-endpoint") or "").rpartition(":")[2]
        name = re.escape(port.strip("${}")) or "\0"
        changes = "RANDOM" in port or doc.script.mentions(rf"\b{name}=.*(?:RANDOM|shuf|rand)")
        if "rdzv-backend" in call.options and "$" not in (named or "") and not changes:
            value = "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" if doc.kind == SBATCH else "$SKYPILOT_TASK_ID"
            fix = f'`--rdzv-id "{value}"`'
            message = f"the id is {named or 'none'} in every attempt and every job"
            requeues = "requeue" in doc.script.directives or doc.script.mentions(r"\bscontrol\s+requeue\b")
            level = None if requeues or doc.kind == SKYPILOT else NOTE
            yield Match("--rdzv-id", message, fix, line=call.line, level=level)


# -- sbatch files: what runs on which node, what a signal reaches, what a requeue needs

TASK_VARIABLE = re.compile(r"\$\{?(SLURM_(?:PROCID|NODEID|LOCALID))\b")
# Not what asks a node for its address: `$(srun ... hostname)`.
STARTERS = r"(?<!\$\()(?<!`)\b(srun|mpirun|mpiexec|pdsh|clush|ssh|parallel-ssh)\b"
PYTHON = r"^[ \t]*(?:\w+=\S+ )*python[\d.]*[ \t]+(?:-[umB][ \t]+)*([\w./][\w./-]*)"
STARTS_OTHERS = re.compile(r"\b(?:srun|ssh|subprocess|submitit|ray|Popen)\b")

OTHER_STARTERS = (
    r"\b(?:ray|dask|submitit|aprun|flux|singularity|apptainer|horovodrun|sbatch|bash|sh|parallel)\b|HOSTFILE="
)
TASKS = ("ntasks-per-node", "ntasks-per-gpu", "ntasks")
SRUN_OPTION = re.compile(r"\s--?([a-z-]+|N)(?:=|[ \t]*)[\"']?([^\s\"'=]+)")
GRANTED = re.compile(r"(?:gpu:)?(?:[a-zA-Z][\w.-]*:)?(\d+)")  # `gpu:a100:4`, `a100:4`, `4`
COUNTS = ("nproc-per-node", "num-processes", "num-gpus")
PORT_OPTIONS = ("rdzv-endpoint", "master-port", "main-process-port")
# How a script asks for its own folder, and how one shows that it knows where SLURM runs it.
_RESOLVED = r"(?:\$\((?:realpath|readlink[ \t]+-\w+)[ \t]+(?:--[ \t]+)?[\"']?)?"
OWN_FOLDER = rf"dirname[ \t]+(?:--[ \t]+)?[\"']?{_RESOLVED}\$\{{?(?:0|BASH_SOURCE)\b"
KNOWS_COPY = r"SLURM_SUBMIT_DIR|\bscontrol[ \t]+show[ \t]+job\b|\bsbatch\b"


@rule(ERROR, SBATCH, library="slurm", fix="single quotes around srun's command, or torchrun, which needs no rank")
def rank_of_first_node(doc: Document) -> Iterator[Match]:
    """The batch script expands `$SLURM_PROCID` on the first node, to 0: every node becomes rank 0 (accelerate#2816)."""
    script = doc.script
    on_many = spans_nodes(doc) or script.directives.get("ntasks", ("1", 0))[0] != "1"
    agreed = script.launches and not any(map(is_static, script.launches))
    has_launcher = script.mentions(r"\b(?:torchrun|accelerate launch|torch\.distributed\.(?:run|launch))\b")
    for found in TASK_VARIABLE.finditer(script.text) if on_many and not agreed else ():
        start = script.text.rfind("\n", 0, found.start()) + 1
        before = script.text[start : found.start()]
        is_set_anew = has_launcher and re.search(r"\bLOCAL_RANK=\S*$", before)  # by it, for each rank
        reports = is_set_anew or re.match(r"\s*(echo|printf)\b", before)
        if script.expands_at(found.start()) and not reports:
            message = f"${found[1]} is expanded on the first node: every node gets 0"
            fix = f"`srun bash -c '... ${found[1]} ...'` in single quotes, or torchrun with --rdzv-backend c10d"
            yield Match(f"${found[1]}", message, fix, line=script.line_at(found.start()))


@rule(WARNING, SBATCH, library="slurm", fix="the directive above the first command")
def directive_behind_command(doc: Document) -> Iterator[Match]:
    """sbatch reads directives up to the first command: it does not see one below, and does not say so."""
    script, first = doc.script, 0
    for start, end in script.commands:
        text = script.text[start:end].strip()
        if text and text[0] != "#":
            first = first or script.line_at(start + len(script.text[start:end]) - len(script.text[start:end].lstrip()))
        elif first and (found := re.match(r"#SBATCH\s+(--[\w-]+|-[A-Za-z])", text)):
            at = script.text.index("#", start)
            message = f"sbatch does not read it: a command stands above, in line {first}"
            yield Match(found[1], message, "above the first command", line=script.line_at(at))


@rule(WARNING, *SCRIPTS, library="slurm", fix="as many of both")
def more_processes_than_granted(doc: Document) -> Iterator[Match]:
    """A rank takes the GPU of its number: where a node, or a container, has fewer, CUDA raises. Nodes that the job does
    not have are waited for.
    """
    library = None if doc.kind == SBATCH else "torch"
    for call in doc.script.launches if "array" not in doc.script.directives else ():
        told = launch_settings(doc, call) if call.tool == "accelerate" and "cpu" not in call.options else None
        processes, nodes = as_int(told.get("num_processes")) if told else None, doc.script.nodes or 0
        machines = as_int(told.get("num_machines") if told else call.options.get(NODE_COUNT.get(call.tool, ""))) or 1
        processes = processes // machines if processes else None
        option = {"torchrun": "nproc-per-node", "deepspeed": "num-gpus"}.get(call.tool, "num_processes")
        processes, count = as_int(call.options.get(option)) or processes, _granted(doc, call)
        if processes and count and processes > count:
            message = f"{processes} processes on a node, and the job has {count} of its GPUs"
            yield Match(f"--{option}", message, "as many of both", line=call.line, library=library)
        if machines > nodes > (doc.kind != SKYPILOT):
            message = f"{machines} nodes are waited for, and the job has {nodes}"
            yield Match(f"--{NODE_COUNT[call.tool]}", message, "as many of both", line=call.line, library=library)


def _granted(doc: Document, call: LauncherCall) -> int | None:
    """Return the GPUs of a node in the job, or of the container that a launch is in; None where nothing says it."""
    directives = doc.script.directives
    if doc.kind == SBATCH:
        names = ("gpus-per-node", "gres", *(["gpus", "G"] if (doc.script.nodes or 1) == 1 else []))
        granted = [found for name in names if (found := GRANTED.fullmatch(directives.get(name, ("", 0))[0]))]
    elif doc.kind == SKYPILOT:
        named = doc.get("resources.accelerators")  # `H100:8`, or {H100: 8}, where several are a choice
        named = ", ".join(f"{key}:{value}" for key, value in named.items()) if isinstance(named, dict) else str(named)
        granted = [*re.finditer(r"^[A-Za-z][\w-]*:(\d+)$", named)]
    else:
        granted = [found for found, line in doc.script.find(rf"{GPUS_OF_CONTAINER}=(\d*)") if line <= call.line][-1:]
    return as_int(granted[0][1]) if granted else None


@rule(ERROR, SBATCH, library="slurm", fix="$SLURM_GPUS_ON_NODE, which is a number")
def count_of_slurm(doc: Document) -> Iterator[Match]:
    """`$SLURM_GPUS_PER_NODE` is what `--gpus-per-node` says, `a100:4` too, and unset without it (a warning); so are
    `$SLURM_GPUS` and `$SLURM_GPUS_PER_TASK`."""
    directives = doc.script.directives
    for call in doc.script.launches:
        for name in COUNTS:
            text = call.options.get(name) or ""
            variable = re.fullmatch(r"\$(\w+)", text)  # which is computed, perhaps, from SLURM's
            made = variable and next(doc.script.find(rf"^[ \t]*(?:export[ \t]+)?{variable[1]}=\S*\$\(\(.*\)\)"), None)
            text, line = (made[0][0], made[1]) if made else (text, call.line)
            found = re.search(r"(?<!\w)SLURM_(GPUS(?:_PER_NODE|_PER_TASK)?)(?![\w:])", text)
            option = found[1].lower().replace("_", "-") if found else ""
            value = directives.get(option, directives.get("G" if option == "gpus" else "", ("", 0)))[0]
            if found and not value.isdigit():
                why = f"{value}, which is no number" if value else f"unset, unless sbatch is told --{option}"
                message, level = f"${found[0]} is {why}", None if value else WARNING
                yield Match(f"--{name.replace('-', '_')}", message, "`$SLURM_GPUS_ON_NODE`", line=line, level=level)


@rule(WARNING, SBATCH, library="slurm", fix="a folder that is there before sbatch")
def folder_made_too_late(doc: Document) -> Iterator[Match]:
    """SLURM opens a job's output before the script begins: where the folder is missing, the job ends at once."""
    root, script = project_root(doc.folder), doc.script
    around = [each for each in doc.folder.parents if root and each.is_relative_to(root)]
    places = (Path.cwd(), doc.folder, *(around or doc.folder.parents[:2]))
    own = {script.line_at(start) for start, _ in script.commands if script.text[start : start + 1] == "#"}
    entered = "|".join(["SLURM_SUBMIT_DIR", *re.findall(r"(?m)^[ \t]*cd[ \t]+\W*(\w+)", script.text)])
    for name, (value, line) in script.directives.items():  # of this job, and not of one that a here-document writes
        folder = value.rpartition("/")[0] if name in ("output", "error", "e") and line in own else ""
        makes = rf"(?m)\bmkdir\b.*[ \"'](?:\./?|/|\$\{{?(?:{entered})\}}?/)?{re.escape(folder)}(?:[\s\"';&]|/?$)"
        made = folder and "%" not in folder and doc.script.mentions(makes)
        submits = doc.script.mentions(r"\bsbatch\b.*\$\{?(?:0|BASH_SOURCE)\b")  # itself, once the folder is there
        if not made or any((each / folder).is_dir() for each in places):
            continue
        near, name_of_job = {doc.folder, project_root(doc.folder) or doc.folder}, re.escape(Path(doc.path).name)
        before = [each for place in near for kind in ("*.sh", "README*", "*/README*") for each in place.glob(kind)]
        text = texts_of([each for each in before if each.name != Path(doc.path).name])
        submits &= not re.search(rf"(?<!\S)sbatch[ \t](?:[^\n]|\\\n)*(?<!\w){name_of_job}", text)
        if not (submits or re.search(makes, text)):
            message = f"the job makes {folder} too late: without it SLURM ends the job before it begins"
            level = NOTE if folder.startswith(("/", "~")) else None  # it may well be there
            key, fix = "-e" if name == "e" else f"--{name}", f"`mkdir -p {folder}` before sbatch"
            yield Match(key, message, fix, line=line, level=level)


@rule(ERROR, SBATCH, library="slurm", fix="$SLURM_SUBMIT_DIR, the folder in which sbatch was started")
def folder_of_copy(doc: Document) -> Iterator[Match]:
    """SLURM runs a copy of the script, beside which no file of the project is."""
    script = doc.script
    own = [each for each in script.find(OWN_FOLDER) if script.expands_at(each[0].start())]
    for found, line in own[:1] if not script.mentions(KNOWS_COPY) else ():
        pattern, is_default = OWN_FOLDER, False
        for _ in range(3):  # variables that are made of it, and of these
            made = [each for each, _ in script.find(rf"^[ \t]*(?:\w+[ \t]+)?(\w+)=[^\n]*?(?:{pattern})")]
            pattern = "|".join([OWN_FOLDER, *(rf"\$\{{?{each[1]}\b" for each in made)])
            is_default |= any(":-" in each[0] for each in made)  # which the environment may have
        used = rf"^[ \t]*(?:cd|pushd|source|\.)[ \t][^\n]*?(?:{pattern})"
        used += rf"|(?:{pattern})[^\s;]*/[\w./-]+\.(?:py|sh|ya?ml|json)\b"
        if script.mentions(used) and not script.mentions(rf"-[def][ \t]+[\"']?(?:{pattern})"):
            message = "SLURM runs a copy of the script from its spool folder: beside it is nothing of the project"
            fix, level = "`$SLURM_SUBMIT_DIR`, the folder in which sbatch is started", WARNING if is_default else None
            yield Match(found[0].strip("\"'"), message, fix, line=line, level=level)


@rule(WARNING, SBATCH, library="slurm", fix="srun before the launcher")
def only_first_node(doc: Document) -> Iterator[Match]:
    """SLURM runs the batch script on the first node only; nothing starts on the others."""
    script = doc.script
    if (script.nodes or 1) < 2 or script.mentions(STARTERS):
        return
    alone = next((each for each in script.find(PYTHON) if not script.mentions(OTHER_STARTERS)), None)
    # With a hostfile deepspeed and accelerate start the others themselves.
    others = ("deepspeed", "accelerate") if script.mentions("(?i)hostfile|--launcher") else ()
    here = [each for each in script.launches if each.tool not in others]
    if here:
        call = script.launches[0]
        fix = f"`srun --ntasks-per-node=1 {call.tool} ...`" if call.tool != "deepspeed" else "`--hostfile FILE`"
        yield Match(call.tool, f"one of {script.nodes} nodes starts a launcher", fix, line=call.line)
    elif not script.launches and alone is not None:
        source = source_of(alone[0][1], doc.path)[0]  # which may start the others
        starts = STARTS_OTHERS.search(source or "ssh") or "srun" in project_source(doc.folder)
        level = NOTE if starts else None
        message = f"one of {script.nodes} nodes starts {alone[0][1]}"
        yield Match("python", message, "`srun python ...`", line=alone[1], level=level)


@rule(ERROR, SBATCH, library="slurm", fix="#SBATCH --ntasks-per-node=1")
def launcher_per_gpu(doc: Document) -> Iterator[Match]:
    """A launcher starts a rank per GPU itself. With a task per GPU, srun starts it as often."""
    script = doc.script
    call = next((call for call in script.launches if "srun" in call.before), None)
    if call is None or (call.options.get("nproc-per-node") == "1" and on_several_nodes(call)):
        return  # a launcher for each GPU
    own = {DIRECTIVE_NAMES.get(name, name): (value, call.line) for name, value in SRUN_OPTION.findall(call.before)}
    if not own.keys() & TASKS and re.search(r"\bsrun(?:\s+-\S+(?:\s+[^-$\s]\S*)?)*\s+[\"']?\$", call.before):
        return  # a variable with options of its own
    said = own if own.keys() & TASKS else script.directives
    name = next((name for name in TASKS if name in said), "")
    count, line = said.get(name, ("", 0))
    if count.isdigit() and name == "ntasks":  # without a number of nodes SLURM chooses one
        count = str(int(count) // (as_int(own.get("nodes", ("",))[0]) or script.nodes or int(count) or 1))
    is_per_gpu = name == "ntasks-per-gpu" and re.search(r"\bgpus?\b\S*[=:]([2-9]|\d\d)\b", script.text)
    if is_per_gpu or (count.isdigit() and int(count) > 1):
        message = f"srun starts {call.tool} {'once per GPU' if is_per_gpu else f'{count} times on each node'}"
        has_others = re.search(r"\bsrun\b.*\b(?:if|else|for|while|case)\b", call.before, re.DOTALL)
        fix = f"`srun --ntasks-per-node=1` for {call.tool} alone" if has_others else "`#SBATCH --ntasks-per-node=1`"
        yield Match(f"--{name}", message, fix, line=line)


@rule(ERROR, ACCELERATE, *SCRIPTS, library="torch", fix="a number below 65536")
def no_such_port(doc: Document) -> Iterator[Match]:
    """Ports end at 65535: the launcher raises."""
    named: list[tuple[str, object, int | None]] = [("main_process_port", doc.get("main_process_port"), None)]
    named += [
        (f"--{name}", call.options.get(name), call.line)
        for call in doc.script.launches
        for name in PORT_OPTIONS
        if name != "master-port" or (is_static(call) and "standalone" not in call.options)
    ]
    for key, value, line in named:
        if (as_int(str(value).rpartition(":")[2]) or 0) > 65535:
            yield Match(key, f"{shorten(value)} is no port", "at most 65535", line=line)


@rule(WARNING, SBATCH, library="slurm", fix="a trap that passes SIGTERM on to srun, or no B:")
def signal_to_batch_shell(doc: Document) -> Iterator[Match]:
    """`--signal=B:...` goes to the batch shell alone, and reaches the ranks through a trap. Other signals than TERM end
    ranks without a handler.
    """
    value, line = doc.script.directives.get("signal", ("", 0))
    if doc.script.launches and value.startswith("B:") and not doc.script.mentions(r"^\s*trap\b"):
        fix = '`trap \'kill -TERM "$PID"; wait "$PID"\' USR1`, with `srun ... & PID=$!; wait`; or `--signal=TERM@300`'
        is_sourced = doc.script.mentions(r"^\s*(?:source|\.)\s")  # where a trap may be
        message = f"{value} never reaches the ranks" + (", unless a sourced file has a trap" if is_sourced else "")
        yield Match("--signal", message, fix, line=line, level=NOTE if is_sourced else None)


@rule(NOTE, SBATCH, library="slurm", fix="srun --kill-on-bad-exit=1")
def waits_for_lost_node(doc: Document) -> Iterator[Match]:
    """Where a launcher fails on one node, the others wait."""
    if not spans_nodes(doc) or doc.script.mentions(r"--kill-on-bad-exit|\bsrun\b.*\s-K"):
        return
    started = [call for call in doc.script.launches if re.search(r"\bsrun\b", call.before) and not is_alone(call)]
    for call in started[:1]:
        yield Match("srun", "the other nodes wait after one has failed", "`srun --kill-on-bad-exit=1`", line=call.line)
