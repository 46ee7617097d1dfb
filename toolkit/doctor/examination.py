"""Run the checks of a node and show what was found; compare the reports of several nodes."""

import hashlib
import os
import platform
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.doctor import gpu_checks, host_checks  # noqa: F401  (they register checks)
from toolkit.doctor.checks import CHECKS, ERROR, LEVELS, NOTE, NodeFinding, NodeReadings, Outcome
from toolkit.doctor.environment_report import NCCL_PACKAGES, driver_cuda_version, shown, without_secrets
from toolkit.doctor.options import DoctorOptions
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_json_object, read_table
from toolkit.hardware.disks import existing_folder, mount_of
from toolkit.hardware.node import describe_node, library_versions
from toolkit.presets.preset import list_presets
from toolkit.presets.spec import PresetSpec
from toolkit.units import NOT_AVAILABLE, counted, gib
from toolkit.versions import installed_version, torch_cuda_version

Fact = str | int | float | None
NodeFacts = dict[str, Fact]

MAX_SKEW_SECONDS = 1.0
# The kernel and the firmware take different shares of the same memory.
MEMORY_TOLERANCE = 0.02
CLOCKS = ("clock_offset_seconds", "unix_time")
RULES: dict[str, list[str]] = read_table(__file__, "tables")["differences"]


def node_facts(node: NodeReadings) -> NodeFacts:
    """Return the facts of this node. The time is taken first."""
    now, here = time.time(), describe_node()
    gpus = [] if isinstance(node.nvml, ToolkitError) else node.nvml
    nccl = [f"{name} {version}" for name in NCCL_PACKAGES if (version := installed_version(name))]
    facts: NodeFacts = {
        "hostname": socket.gethostname(),
        "unix_time": round(now, 3),
        "clock_offset_seconds": clock_offset_seconds(existing_folder(node.output_dir)),
        "gpus": _counted(node.gpu_names),
        "vbios": _counted(gpu.read("nvmlDeviceGetVbiosVersion") or "unknown" for gpu in gpus),
        "driver": ", ".join(sorted({str(gpu["driver"]) for gpu in here["gpus"]})) or None,
        "driver_cuda": driver_cuda_version(),
        "torch_cuda": torch_cuda_version(),
        "nccl": ", ".join(nccl) or None,
        "rdma": _counted(f"{port.link_layer} {port.rate}" for port in node.rdma_ports),
        "python": here["python"],
        "kernel": platform.release(),
        "cpu": here["cpu"],
        "cores": here["cpu_count"],
        "host_memory_bytes": here["host_memory_bytes"],
        "preset_files": hash_presets(list_presets()),
    }
    facts |= {f"version {library}": version for library, version in library_versions().items()}
    if node.preset is not None:
        facts[f"preset {node.preset.name}"] = hash_presets([node.preset])
    return facts


def hash_presets(presets: Iterable[PresetSpec]) -> str:
    """Return the first 16 digits of the SHA-256 of the presets' files."""
    files = (f"{name}\n{text}\n" for preset in presets for name, text in preset.texts().items())
    return hashlib.sha256("".join(files).encode()).hexdigest()[:16]


def clock_offset_seconds(folder: Path) -> float | None:
    """Return how far this node's clock is ahead of the file server of a folder, which stamps new files with its own.

    All nodes that share the folder have the same server, so their offsets compare, whenever they were taken. None for
    a local disk and a folder that cannot be written.
    """
    try:
        mount = mount_of(folder)
        if mount is None or mount.kind != "network":
            return None
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-probe-") as probe:
            probe.write(b"\n")
            probe.flush()
            os.fsync(probe.fileno())
            return round(time.time() - os.stat(probe.name).st_mtime, 3)  # noqa: PTH116  (a file's name)
    except OSError:
        return None


def _counted(values: Iterable[str]) -> str | None:
    return ", ".join(f"{count} × {value}" for value, count in sorted(Counter(values).items())) or None


# -- one node


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The result of `toolkit doctor`."""

    node_facts: NodeFacts
    checks: dict[str, Outcome]

    @property
    def failed(self) -> bool:
        """True if a finding is an error."""
        return any(outcome.status == ERROR for outcome in self.checks.values())

    @property
    def findings(self) -> list[tuple[str, NodeFinding]]:
        """Name of the check and finding, the worst first."""
        found = [(name, finding) for name, outcome in self.checks.items() for finding in outcome.findings]
        return sorted(found, key=lambda row: LEVELS.index(row[1].level))

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints: `findings`, `checks` and `node_facts`, without secrets."""
        findings = [{"check": name} | asdict(finding) for name, finding in self.findings]
        keys = ("status", "seconds", "measured", "skipped")
        rows = [{"check": name} | {key: getattr(each, key) for key in keys} for name, each in self.checks.items()]
        return dict(without_secrets({"findings": findings, "checks": rows, "node_facts": self.node_facts}))

    def lines(self, *, verbose: bool) -> list[str]:
        """Return the findings, the worst first, and how many checks ran and why others did not; without secrets.

        `verbose` adds what each check measured, and names those that did not run.
        """
        lines: list[str] = []
        for name, finding in self.findings:
            value = "" if finding.value is None else f": {finding.value}"
            expected = "" if finding.expected is None else f"; expected: {finding.expected}"
            lines += [f"{finding.level}: {finding.what}{value}{expected} [{name}]", f"  fix: {finding.fix}"]
        not_run: dict[str, list[str]] = {}
        for name, outcome in self.checks.items():
            if outcome.skipped:
                not_run.setdefault(outcome.skipped, []).append(name)
            elif verbose:
                lines.append(f"{outcome.status:8} {name:16} {shown('', outcome.measured)}".rstrip())
        counts = Counter(finding.level for _, finding in self.findings)
        levels = [counted(counts[level], level) for level in LEVELS if counts[level]]
        examined = len(self.checks) - sum(map(len, not_run.values()))
        more = "" if verbose else " (all: --verbose)"
        lines.append(f"{examined} of {len(self.checks)} checks: {', '.join(levels) or 'nothing is wrong'}{more}")
        if not_run:
            reasons = (f"{', '.join(names) if verbose else len(names)} ({why})" for why, names in not_run.items())
            lines.append(f"not run: {', '.join(reasons)}")
        return list(without_secrets(lines))


def examine_node(options: DoctorOptions, model: str | None) -> Examination:
    """Run every check. Raises ToolkitError, before, for invalid options."""
    for name, value in (("--gpus-per-node", options.gpus_per_node), ("--num-processes", options.num_processes)):
        if value is not None and value < 1:
            raise ToolkitError(f"{name} is {value}, expected 1 or more")
    node = NodeReadings(options, model)
    if model is not None and node.preset is None:
        raise ToolkitError("a MODEL has no effect without --preset", hint="toolkit doctor --preset NAME MODEL")
    _ = node.planned_host_bytes
    facts = node_facts(node)
    return Examination(node_facts=facts, checks={name: check.run(node) for name, check in CHECKS.items()})


# -- differences between reports


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDifference:
    """One fact in which nodes differ."""

    level: str
    fact: str
    why: str
    values: dict[str, Fact]  # by node
    fix: str

    def lines(self) -> list[str]:
        """Return the difference as text: what, each value with its nodes, and what to do."""
        by_value: dict[str, list[str]] = {}
        for node, value in self.values.items():
            text = gib(value) if self.fact.endswith("_bytes") and isinstance(value, int) else value
            by_value.setdefault(NOT_AVAILABLE if text is None else str(text), []).append(node)
        values = [f"  {value}: {', '.join(names)}" for value, names in by_value.items()]
        return [f"{self.level}: {self.fact} differs: {self.why}", *values, f"  fix: {self.fix}"]


def read_reports(paths: Sequence[Path]) -> dict[str, NodeFacts]:
    """Return the facts of each node, by its name. Raises ToolkitError without a report, and for what is none."""
    if not paths:
        hint = "on each node `toolkit doctor --json > $(hostname).json`, then `toolkit doctor --compare *.json`"
        raise ToolkitError("--compare needs the reports of the nodes, and none is given", hint=hint)
    reports: dict[str, NodeFacts] = {}
    for path in paths:
        facts: Any = read_json_object(path).get("node_facts")
        valid = isinstance(facts, dict) and all(isinstance(value, Fact | None) for value in facts.values())
        if not valid or not {"hostname", "unix_time"} <= facts.keys():
            what = f"{path} is not a report of `toolkit doctor --json`: it has no valid `node_facts`"
            raise ToolkitError(what, hint=f"toolkit doctor --json > {path.name}")
        name = str(facts["hostname"])
        reports[name if name not in reports else f"{name} ({path})"] = facts
    return reports


def compare_facts(nodes: Mapping[str, NodeFacts]) -> list[NodeDifference]:
    """Return the differences, errors first; clocks by their common file server, if there is one."""
    has_server = all(isinstance(facts.get("clock_offset_seconds"), int | float) for facts in nodes.values())
    left_out = {"hostname", "unix_time" if has_server else "clock_offset_seconds"}
    differences = []
    for name in dict.fromkeys(name for facts in nodes.values() for name in facts if name not in left_out):
        values = {node: facts.get(name) for node, facts in nodes.items()}
        if not _agree(name, list(values.values())):
            rules = (rule for begin, rule in RULES.items() if name.startswith(begin))
            level, why, fix = next(rules, [NOTE, "it may matter", "look at it"])
            differences.append(NodeDifference(level=level, fact=name, why=why, values=values, fix=fix))
    return sorted(differences, key=lambda difference: LEVELS.index(difference.level))


def _agree(name: str, values: Sequence[Fact]) -> bool:
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values):
        return len(set(values)) == 1
    relative, absolute = MEMORY_TOLERANCE * name.endswith("_bytes"), MAX_SKEW_SECONDS * (name in CLOCKS)
    return max(numbers) - min(numbers) <= relative * max(numbers) + absolute
