"""Checks of disks: space, speed, the hub's cache and token, and what NVMe offload needs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from toolkit.cache import ASYNC_IO_OPS, COMPILE_ASYNC_IO, INSTALL_LIBAIO, are_compiled
from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, NodeFinding, Outcome, finding_of, node_check
from toolkit.doctor.collectors import described_disks, hub_home, hub_login, token_file, usual_folders
from toolkit.doctor.node_readings import NodeReadings
from toolkit.doctor.ops import has_libaio_header
from toolkit.errors import ToolkitError
from toolkit.hardware.disks import existing_folder, measure_rates, mount_of
from toolkit.launch.nvme import (
    check_direct_io,
    check_filesystem,
    check_folder,
    check_libaio,
    nvme_path_of,
)
from toolkit.units import GIB, MIB, gib

FULL_BELOW_BYTES, SCARCE_BELOW_BYTES = GIB, 10 * GIB
SLOW_BELOW_BYTES_PER_SECOND = 200 * MIB
HUB_VARIABLES = "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables"


def _folders(node: NodeReadings) -> dict[str, Path]:
    return {"run folder": node.output_dir} | usual_folders(os.environ)


@node_check(
    "disk-space",
    looks_at="free space for the run folder (`--output-dir`), the hub's cache, the toolkit's cache, temporary files",
    threshold="below 10 GiB; below 1 GiB, or not writable: an error",
    source=f"{OWN_CHOICE}: a checkpoint of a 0.6B model takes 7 to 12 GB; `toolkit train` checks its own run",
)
def disk_space(node: NodeReadings) -> Outcome:
    """Find disks that a run would fill."""
    disks, found = described_disks(_folders(node)), []
    for name, disk in disks.items():
        folder = existing_folder(Path(disk["path"]))
        if not os.access(folder, os.W_OK | os.X_OK):
            is_guess = name == "run folder" and node.options.output_dir is None  # where the user happens to be
            found.append(_unwritable(name, disk["path"], NOTE if is_guess else ERROR))
        elif disk["free_bytes"] < SCARCE_BELOW_BYTES:
            found.append(
                NodeFinding(
                    level=ERROR if disk["free_bytes"] < FULL_BELOW_BYTES else WARNING,
                    what=f"little space for the {name}: {disk['path']}",
                    value=f"{gib(disk['free_bytes'])} free of {gib(disk['total_bytes'])}",
                    expected=f"at least {gib(SCARCE_BELOW_BYTES)}",
                    fix=_elsewhere(name),
                )
            )
    return Outcome(measured=disks, findings=tuple(found))


def _unwritable(name: str, path: str, level: str) -> NodeFinding:
    return NodeFinding(
        level=level,
        what=f"the {name} cannot be written: {path}",
        value="not writable",
        expected="writable by this user",
        fix=_elsewhere(name),
    )


def _elsewhere(name: str) -> str:
    variables = {"hub cache": "HF_HOME", "toolkit cache": "TOOLKIT_CACHE", "temporary files": "TMPDIR"}
    return f"export {variables[name]}=DIR on another disk" if name in variables else "`--output_dir` on another disk"


@node_check(
    "disk-speed",
    looks_at="one stream past the page cache, written and read: run folder, hub's cache, `--nvme-path`",
    threshold="below 200 MiB/s: a checkpoint of an 8B model (96 GB in fp32: weights and Adam) takes 7.6 minutes",
    source=f"{OWN_CHOICE}; measured as `toolkit train --nvme-path` does",
    long=True,
)
def disk_speed(node: NodeReadings) -> Outcome:
    """Measure the disks that a run reads and writes."""
    folders = {name: folder for name, folder in _folders(node).items() if name in ("run folder", "hub cache")}
    if node.options.nvme_path:
        folders["NVMe offload"] = Path(node.options.nvme_path)
    measured: dict[str, dict[str, int | str]] = {}
    found = []
    for name, folder in folders.items():
        try:
            rates = measure_rates(existing_folder(folder))
        except OSError as error:
            measured[name] = {"path": str(folder), "not_measured": f"no direct I/O: {error.strerror}"}
            continue
        speeds = {"writes": rates.write_bytes_per_second, "reads": rates.read_bytes_per_second}
        measured[name] = {"path": str(folder)} | {f"{way}_bytes_per_second": rate for way, rate in speeds.items()}
        found += [
            NodeFinding(
                level=WARNING,
                what=f"the disk of the {name} is slow: {folder}",
                value=f"{way} {gib(rate)}/s",
                expected=f"at least {gib(SLOW_BELOW_BYTES_PER_SECOND)}/s",
                fix=f"{_elsewhere(name)}; fewer saves: `--save_steps`, `--save_only_model true`",
            )
            for way, rate in speeds.items()
            if rate < SLOW_BELOW_BYTES_PER_SECOND
        ]
    return Outcome(measured=measured, findings=tuple(found))


@node_check(
    "nvme-offload",
    looks_at="libaio and DeepSpeed's async_io; with `--preset` or `--nvme-path` the disk: file system, direct I/O",
    threshold="missing, for a preset that offloads to NVMe: an error; otherwise a note",
    source="docs/how-to/optimizers.md: what `toolkit train` refuses",
)
def nvme_offload(node: NodeReadings) -> Outcome:
    """Find what NVMe offload would be refused for."""
    preset = node.preset
    uses_nvme = preset is not None and "nvme" in (preset.offload_optimizer, preset.offload_param)
    header, compiled = has_libaio_header(), are_compiled(ASYNC_IO_OPS)
    measured = {"libaio_header": header, "async_io_compiled": compiled, "path": node.options.nvme_path}
    level = ERROR if uses_nvme else NOTE
    found = []
    if not header and not compiled:
        found.append(_missing(level, "libaio's header is missing", INSTALL_LIBAIO))
    elif not compiled:
        found.append(_missing(level, "DeepSpeed's async_io is not compiled", COMPILE_ASYNC_IO))
    try:
        if uses_nvme:
            assert preset is not None
            check_libaio()
            nvme_path_of(preset, node.options.nvme_path)
        if node.options.nvme_path:
            path = Path(node.options.nvme_path)
            check_folder(path)
            measured["filesystem"] = check_filesystem(path)
            check_direct_io(path)
    except ToolkitError as error:
        found.append(finding_of(error, level=ERROR, value=str(node.options.nvme_path), expected="a local NVMe disk"))
    return Outcome(measured=measured, findings=tuple(found))


def _missing(level: str, what: str, fix: str) -> NodeFinding:
    return NodeFinding(level=level, what=f"NVMe offload: {what}", value="missing", expected="present", fix=fix)


@node_check(
    "hub",
    looks_at="the hub's cache (place, kind of disk), its token (present or not; never read), offline mode",
    threshold="no token: a note; a token that others can read; a cache in memory",
    source=HUB_VARIABLES,
)
def hub(_: NodeReadings) -> Outcome:
    """Find why a model would not be downloaded, or downloaded by every node."""
    home, login = hub_home(), hub_login()
    mount = mount_of(existing_folder(home))
    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), None)
    kind = None if mount is None else mount.kind
    measured = {"cache": str(home), "disk": kind, "token": login or "none", "offline": offline}
    found = [*_token_findings(login, offline=offline is not None)]
    if kind == "memory":
        found.append(
            NodeFinding(
                level=WARNING,
                what=f"the hub's cache is in memory: {home}",
                value=mount.filesystem if mount else "",
                expected="a disk",
                fix="export HF_HOME=DIR on a disk",
            )
        )
    return Outcome(measured=measured, findings=tuple(found))


def _token_findings(login: str | None, *, offline: bool) -> Iterator[NodeFinding]:
    if login is None and not offline:
        yield NodeFinding(
            level=NOTE,
            what="no hub token: gated and private models are refused",
            value="none",
            expected="a token, if the model needs one",
            fix="hf auth login   (or export HF_TOKEN)",
        )
    if login == "token file" and token_file().stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield NodeFinding(
            level=WARNING,
            what="other users can read the hub's token",
            value=stat.filemode(token_file().stat().st_mode),
            expected="-rw-------",
            fix=f"chmod 600 {token_file()}",
        )
