"""Commands in YAML files of Kubernetes, Compose and workflows, as one script on the lines of the file.

>>> script = script_of("apiVersion: v1\\ncontainers:\\n- command: [torchrun, --standalone, train.py]\\n")
>>> script.launches[0].script, script.launches[0].line
('train.py', 3)
"""

import contextlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from toolkit.convert.job_script import JobScript, read_script
from toolkit.files.documents import CONFIGURATION, LOADER, check_yaml

KUBERNETES = re.compile(r"^apiVersion[ ]*:", re.MULTILINE)
_JOB_FILE = re.compile(r"^(?:apiVersion|services|jobs)[ ]*:", re.MULTILINE)
_COMMANDS = ("entrypoint", "command", "args", "run")  # in the order in which a container joins them
GPU = "nvidia.com/gpu"  # the resource
GPUS_OF_CONTAINER = "GPUS_OF_CONTAINER"  # the variable with which the script says a container's limit
_SHELL_OPTION = re.compile(r"-\w*c")
# kubeflow's operators set torchrun's own variables, the one for PyTorchJob since 1.6.
_SET_BY_OPERATOR = ("PyTorchJob", "TrainJob")


def script_of(text: str) -> JobScript | None:
    """Return the commands of a job file; None for another file, and for one of workflows that starts no launcher."""
    if not _JOB_FILE.search(text):
        return None
    lines, nodes, is_set = [""] * (text.count("\n") + 2), 1, False
    for root in documents_of(text):
        with contextlib.suppress(Exception):  # an empty document, or the fields of a template
            data = yaml.SafeLoader("").construct_document(root)
            for each in data.get("items", [data]):  # of `kind: List`
                is_set |= each.get("kind") in _SET_BY_OPERATOR
                nodes = max(nodes, _nodes(each))
        for line, words in _commands(root, set()):
            for offset, part in enumerate(words.split("\n")):
                at = min(line + offset, len(lines) - 1)
                lines[at] += (" ; " if lines[at] else "") + part
    if is_set:
        lines[0] = "export PET_NNODES= PET_NODE_RANK= PET_MASTER_ADDR="
    script = read_script("\n".join(lines), nodes=nodes)
    return script if script.calls or KUBERNETES.search(text) else None


def documents_of(text: str) -> Iterator[yaml.Node]:
    """Yield the root of each YAML document of a text, up to what is no YAML: a template, for one."""
    with contextlib.suppress(Exception):  # PyYAML raises many kinds
        check_yaml(text, "job file", CONFIGURATION)
        yield from yaml.compose_all(text, Loader=LOADER)


def _nodes(data: dict[str, Any]) -> int:
    """Return the pods that train together, as the kinds of Kubernetes' jobs count them."""
    spec = data.get("spec", {})
    counts = [each.get("replicas", 1) for each in spec.get("pytorchReplicaSpecs", {}).values()]
    counts += [each.get("replicas", 0) for each in spec.get("tasks", ())]  # Volcano's
    is_indexed = spec.get("completionMode") == "Indexed" or data.get("kind") == "StatefulSet"
    others = [spec.get("parallelism", spec.get("replicas"))] if is_indexed else []
    others += [spec.get("trainer", {}).get("numNodes"), spec.get("leaderWorkerTemplate", {}).get("size")]
    return int(max(1, sum(counts), *filter(None, others)))


def _commands(node: yaml.Node, seen: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the first line of each command below a node, and its text, in which each word has the line it had."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _commands(item, seen)
    elif isinstance(node, yaml.MappingNode):
        values = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        name, value = values.get("name"), values.get("value")
        if isinstance(value, yaml.ScalarNode) and isinstance(name, yaml.ScalarNode) and name.value.isidentifier():
            yield value.start_mark.line, f"export {name.value}={shlex.quote(value.value)}"
        if values.keys() & {"image", "resources"}:
            yield node.start_mark.line, f"export {GPUS_OF_CONTAINER}={word_at(node, 'resources', 'limits', GPU)}"
        lists = [each.value if isinstance(each, yaml.SequenceNode) else [each] for each in map(values.get, _COMMANDS)]
        items = [item for each in lists for item in each if isinstance(item, yaml.ScalarNode)]
        if items and not items[0].value.startswith("-"):  # options alone are of the image's own command
            is_argv = not re.search(r"\s", items[0].value) and not any("\n" in each.value for each in items)
            is_argv |= any(_SHELL_OPTION.fullmatch(each.value) for each in items)
            yield from map(_joined, [items] if is_argv else [[each] for each in items])  # commands of their own
        for value in values.values():
            yield from _commands(value, seen)


def node_at(node: yaml.Node | None, *names: str) -> yaml.Node | None:
    """Return the node at a path of keys below another one, None where there is none."""
    for name in names:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        node = next((value for key, value in pairs if key.value == name), None)
    return node


def word_at(node: yaml.Node, *names: str) -> str:
    """Return the text of a single value at a path of keys, empty where there is none."""
    found = node_at(node, *names)
    return str(found.value) if isinstance(found, yaml.ScalarNode) else ""


def _joined(items: list[yaml.ScalarNode]) -> tuple[int, str]:
    """Return a command's first line and its words; of `bash -c SCRIPT` the script."""
    first, options = items[0], [index for index, item in enumerate(items) if _SHELL_OPTION.fullmatch(item.value)]
    if options and options[0] + 1 < len(items) and items[0].value.endswith("sh"):
        items = items[options[0] + 1 : options[0] + 2]
        first = items[0]
    if len(items) == 1:
        return first.start_mark.line + (first.style in ("|", ">")), first.value
    text, line = "", first.start_mark.line
    for item in items:
        text += " \\\n" * (item.start_mark.line - line) + " "
        text, line = text + _word(item.value), item.start_mark.line
    return first.start_mark.line, text


def _word(value: str) -> str:
    """Return a word as a shell would take it; `$(NAME)` is a variable of the container."""
    value = re.sub(r"\$\((\w+)\)", r"${\1}", value.replace("\n", " "))
    return shlex.quote(value) if "$" not in value else f'"{value}"' if " " in value and '"' not in value else value
