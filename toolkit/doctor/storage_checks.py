"""Checks of disks: space, speed, the hub's cache and token, and what NVMe offload needs."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from toolkit.cache import ASYNC_IO_OPS, COMPILE_ASYNC_IO, INSTALL_LIBAIO
from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, Outcome, node_check
from toolkit.doctor.collectors import compiled_ops, described_disks, hub_home, hub_login, token_file, usual_folders
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
MOVED_BY = {"hub cache": "HF_HOME", "toolkit cache": "TOOLKIT_CACHE", "temporary files": "TMPDIR"}


def _elsewhere(name: str) -> str:
    return f"export {MOVED_BY[name]}=DIR on another disk" if name in MOVED_BY else "`--output_dir` on another disk"


@node_check(
    threshold="below 10 GiB; below 1 GiB, or not writable: an error",
    source=f"{OWN_CHOICE}: a checkpoint of a 0.6B model takes 7 to 12 GB; `toolkit train` checks its own run",
)
def disk_space(node: NodeReadings) -> Outcome:
    """Free space for the run folder (`--output-dir`), the hub's cache, the toolkit's cache, temporary files."""
    outcome = Outcome(described_disks({"run folder": node.output_dir} | usual_folders(os.environ)))
    for name, disk in outcome.measured.items():
        path, free, fix = disk["path"], disk["free_bytes"], _elsewhere(name)
        if not os.access(existing_folder(Path(path)), os.W_OK | os.X_OK):
            is_guess = name == "run folder" and node.options.output_dir is None  # where the user happens to be
            level, what = NOTE if is_guess else ERROR, f"the {name} cannot be written: {path}"
            outcome.add(level, what, value="not writable", expected="writable by this user", fix=fix)
        elif free < SCARCE_BELOW_BYTES:
            level, what = ERROR if free < FULL_BELOW_BYTES else WARNING, f"little space for the {name}: {path}"
            value, expected = f"{gib(free)} free of {gib(disk['total_bytes'])}", f"at least {gib(SCARCE_BELOW_BYTES)}"
            outcome.add(level, what, value=value, expected=expected, fix=fix)
    return outcome


@node_check(
    threshold="below 200 MiB/s: a checkpoint of an 8B model (96 GB in fp32: weights and Adam) takes 7.6 minutes",
    source=f"{OWN_CHOICE}; measured as `toolkit train --nvme-path` does",
    long=True,
)
def disk_speed(node: NodeReadings) -> Outcome:
    """One stream past the page cache, written and read: run folder, hub's cache, `--nvme-path`."""
    folders = {"run folder": node.output_dir, "hub cache": hub_home()}
    if node.options.nvme_path:
        folders["NVMe offload"] = Path(node.options.nvme_path)
    outcome = Outcome({})
    for name, folder in folders.items():
        measured: dict[str, Any] = {"path": str(folder)}
        outcome.measured[name] = measured
        try:
            rates = measure_rates(existing_folder(folder))
        except OSError as error:
            measured["not_measured"] = f"no direct I/O: {error.strerror}"
            continue
        for way, rate in (("writes", rates.write_bytes_per_second), ("reads", rates.read_bytes_per_second)):
            measured[f"{way}_bytes_per_second"] = rate
            if rate < SLOW_BELOW_BYTES_PER_SECOND:
                outcome.add(
                    WARNING,
                    f"the disk of the {name} is slow: {folder}",
                    value=f"{way} {gib(rate)}/s",
                    expected=f"at least {gib(SLOW_BELOW_BYTES_PER_SECOND)}/s",
                    fix=f"{_elsewhere(name)}; fewer saves: `--save_steps`, `--save_only_model true`",
                )
    return outcome


@node_check(
    threshold="missing, for a preset that offloads to NVMe: an error; otherwise a note",
    source="docs/how-to/optimizers.md: what `toolkit train` refuses",
)
def nvme_offload(node: NodeReadings) -> Outcome:
    """libaio and DeepSpeed's async_io; with `--preset` or `--nvme-path` the disk: file system, direct I/O."""
    preset, path = node.preset, node.options.nvme_path
    uses_nvme = preset is not None and "nvme" in (preset.offload_optimizer, preset.offload_param)
    header, compiled = has_libaio_header(), all(compiled_ops().get(op) for op in ASYNC_IO_OPS)
    outcome = Outcome({"libaio_header": header, "async_io_compiled": compiled, "path": path})
    if not compiled:
        what = "DeepSpeed's async_io is not compiled" if header else "libaio's header is missing"
        fix, level = COMPILE_ASYNC_IO if header else INSTALL_LIBAIO, ERROR if uses_nvme else NOTE
        outcome.add(level, f"NVMe offload: {what}", value="missing", expected="present", fix=fix)
    try:
        if preset is not None and uses_nvme:
            check_libaio()
            nvme_path_of(preset, path)
        if path:
            check_folder(Path(path))
            outcome.measured["filesystem"] = check_filesystem(Path(path))
            check_direct_io(Path(path))
    except ToolkitError as error:
        outcome.add_refusal(error, level=ERROR, value=path, expected="a local NVMe disk")
    return outcome


@node_check(
    threshold="no token: a note; a token that others can read; a cache in memory",
    source="https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
)
def hub(_: NodeReadings) -> Outcome:
    """The hub's cache (place, kind of disk), its token (present or not; never read), offline mode."""
    home, login = hub_home(), hub_login()
    mount = mount_of(existing_folder(home))
    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), None)
    kind = mount.kind if mount else None
    outcome = Outcome({"cache": str(home), "disk": kind, "token": login or "none", "offline": offline})
    if login is None and offline is None:
        what, fix = "no hub token: gated and private models are refused", "hf auth login   (or export HF_TOKEN)"
        outcome.add(NOTE, what, value="none", expected="a token, if the model needs one", fix=fix)
    if login == "token file" and (mode := token_file().stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        what, fix = "other users can read the hub's token", f"chmod 600 {token_file()}"
        outcome.add(WARNING, what, value=stat.filemode(mode), expected="-rw-------", fix=fix)
    if kind == "memory":
        what, fix = f"the hub's cache is in memory: {home}", "export HF_HOME=DIR on a disk"
        outcome.add(WARNING, what, value=kind, expected="a disk", fix=fix)
    return outcome
