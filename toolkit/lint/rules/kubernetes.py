"""What Kubernetes and kubeflow's operator refuse in the file of a job, and commands that no container finds."""

import re
from collections.abc import Iterator

import yaml

from toolkit.convert.job_script import in_comment
from toolkit.files.documents import YAML_TAG
from toolkit.lint.commands_in_yaml import GPU, KUBERNETES, documents_of, node_at, word_at
from toolkit.lint.document import Document
from toolkit.lint.findings import WARNING, Match
from toolkit.lint.rules.settings import shorten

OF_GPU = re.compile(r"nvidia(?:\.com)?/gpus?|gpus?")
WITHOUT_SHELL = re.compile(r"(?:.*/)?(?:torchrun|accelerate|deepspeed|python[\d.]*)")


def refusals(doc: Document) -> Iterator[Match]:
    """Yield what is refused in each document of a file, at its line."""
    roots = [*documents_of(doc.text)] if KUBERNETES.search(doc.text) else []
    for root in roots:
        kind = word_at(root, "kind")
        services = {word_at(each, "metadata", "name") for each in roots if word_at(each, "kind") == "Service"}
        if (found := _unknown_host(root, doc.text)) and found[0] not in services:
            message, fix = "has no address: the others wait for it", "`subdomain`, and a headless Service of that name"
            yield _match(found[0], message, fix, doc.text.count("\n", 0, found.start()) + 1)
        master = node_at(root, "spec", "pytorchReplicaSpecs", "Master", "replicas")
        if isinstance(master, yaml.ScalarNode) and master.value != "1":
            message = f"{shorten(master.value)} masters are refused"
            yield _match("replicas", message, "1, and the others as Worker", master.start_mark.line + 1)
        for node in _mappings(root, set()):
            if isinstance(node_at(node, "containers"), yaml.SequenceNode):
                yield from _refused_pod(node, kind)


def _unknown_host(root: yaml.Node, text: str) -> re.Match[str] | None:
    """Return where an Indexed Job names its first pod, as the others cannot reach it."""
    pod, name = node_at(root, "spec", "template", "spec"), word_at(root, "metadata", "name")
    is_indexed = word_at(root, "spec", "completionMode") == "Indexed" and word_at(root, "spec", "parallelism") != "1"
    has_names = word_at(pod, "subdomain") or word_at(pod, "hostNetwork") if pod is not None else True
    first = re.compile(rf"(?<![\w./-]){re.escape(name)}-0(?![\w-])")
    found = first.search(text, root.start_mark.index, root.end_mark.index) if is_indexed and name else None
    return None if has_names or found is None or in_comment(text, found.start()) else found


def _refused_pod(pod: yaml.Node, kind: str) -> Iterator[Match]:
    containers, volumes = _items(pod, "containers"), {word_at(each, "name") for each in _items(pod, "volumes")}
    policy, line = word_at(pod, "restartPolicy"), pod.start_mark.line + 1
    if kind in ("Job", "CronJob") and policy in ("", "Always") and all(word_at(each, "image") for each in containers):
        yield _match("restartPolicy", f"{policy or 'Always, its default,'} is refused in a Job", "`Never`", line)
    if kind == "PyTorchJob" and all(word_at(each, "name") not in ("", "pytorch") for each in containers):
        yield _match("name", "the operator refuses a replica without a container of that name", "`pytorch`", line)
    for container in containers:
        yield from _refused_container(container)
        mounts = {word_at(each, "name"): each.start_mark.line + 1 for each in _items(container, "volumeMounts")}
        for name in sorted(mounts.keys() - volumes) if volumes and kind != "StatefulSet" else ():
            message = "is mounted, and is no volume of the pod: refused"
            yield _match(name, message, "a volume of that name", mounts[name])
        paths = {word_at(each, "mountPath") for each in _items(container, "volumeMounts")}
        gpus = word_at(container, "resources", "limits", GPU)
        if gpus.isdigit() and int(gpus) > 1 and "/dev/shm" not in paths and word_at(pod, "hostIPC") != "true":
            message = "a container has 64 MiB of it, which NCCL and data loaders exceed"
            fix = "a volume `emptyDir: {medium: Memory}`"
            yield _match("/dev/shm", message, fix, container.start_mark.line + 1, level=WARNING)


def _refused_container(container: yaml.Node) -> Iterator[Match]:
    request = node_at(container, "resources", "requests", GPU)
    if request is not None and word_at(container, "resources", "limits", GPU) != request.value:
        message = f"{shorten(request.value)} are requested, and the limit is another, or none: refused"
        yield _match(GPU, message, "the same limit", request.start_mark.line + 1)
    for block in ("limits", "requests"):
        node = node_at(container, "resources", block)
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if OF_GPU.fullmatch(str(key.value)) and key.value != GPU:
                yield _match(key.value, "no node has it: the pod waits", f"`{GPU}`", key.start_mark.line + 1)
    for each in _items(container, "env"):
        value = node_at(each, "value")
        if isinstance(value, yaml.ScalarNode) and value.tag not in (YAML_TAG + "str", YAML_TAG + "null"):
            message = f"{shorten(value.value)} is no text: refused"
            yield _match(word_at(each, "name"), message, f'`"{value.value}"`', value.start_mark.line + 1)
    words = [each for name in ("command", "args") for each in _items(container, name)]
    first = words[0].value if words and node_at(container, "command") is not None else ""
    if isinstance(first, str) and re.fullmatch(r"\w\S*(?: +\S+)+", first):
        message = "is one word: there is no program of that name"
        yield _match(shorten(first), message, "`[bash, -c, ...]`, or a word each", words[0].start_mark.line + 1)
    for each in words if WITHOUT_SHELL.fullmatch(str(first)) and len(words) > 1 else ():
        if found := re.search(r"\$\{?([A-Za-z_]\w*)\}?", str(each.value)):
            yield _match(found[0], "stays as it is: no shell runs", f"`$({found[1]})`", each.start_mark.line + 1)


def _match(key: str, message: str, fix: str, line: int, level: str | None = None) -> Match:
    return Match(key, message, fix, line=line, library="kubernetes", level=level)


def _mappings(node: yaml.Node, seen: set[int]) -> Iterator[yaml.Node]:
    """Yield each mapping below a node once, though aliases name it again."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield node
    for item in node.value:
        yield from _mappings(item[1] if isinstance(item, tuple) else item, seen)


def _items(node: yaml.Node, name: str) -> list[yaml.Node]:
    found = node_at(node, name)
    return found.value if isinstance(found, yaml.SequenceNode) else []
