"""Disks: the mount that a folder is on, direct I/O, and read and write rates.

>>> mount_of(Path("/data/swap"), "/dev/sda1 / ext4 rw 0 0\\n/dev/nvme0n1 /data xfs rw 0 0\\n").filesystem
'xfs'
"""

import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.units import gib

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "afs"}
BLOCK_BYTES = 4096  # alignment of direct I/O on current disks
CHUNK_BYTES = 8 * 2**20
PROBE_BYTES = 256 * 2**20
PROBE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """Mount that a folder is on."""

    filesystem: str
    mount_point: str

    @property
    def kind(self) -> str:
        """`memory`, `network` or `local`."""
        name = self.filesystem
        if name in MEMORY_FILESYSTEMS:
            return "memory"
        return "network" if name in NETWORK_FILESYSTEMS or name.startswith("fuse.") else "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Rates of one stream that bypasses the page cache, in chunks of 8 MiB; other caches still count."""

    write_bytes_per_second: int
    read_bytes_per_second: int


def mount_of(folder: Path, mounts: str | None = None) -> Mount | None:
    """Return the mount of a folder, the last with the longest path above it; `mounts` is the text of /proc/mounts."""
    if mounts is None:
        mounts = Path("/proc/mounts").read_text("utf-8", errors="replace")
    target, found = folder.resolve(), None
    for line in mounts.splitlines():
        _, point, filesystem, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        longer = found is None or len(point) >= len(found.mount_point)
        if longer and target.is_relative_to(point):
            found = Mount(filesystem=filesystem, mount_point=point)
    return found


def existing_folder(folder: Path) -> Path:
    """Return the folder, or where it does not exist yet, its nearest parent that does."""
    return next((path for path in [folder, *folder.absolute().parents] if path.is_dir()), Path("/"))


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write there."""
    return shutil.disk_usage(folder).free


def check_free_space(folder: Path, needed: int, *, user: str, hint: str = "name a folder on another disk") -> None:
    """Raise ToolkitError for a disk with fewer than `needed` bytes free for what messages call `user`."""
    existing = existing_folder(folder)
    if (free := free_bytes(existing)) < needed:
        raise ToolkitError(f"{existing} has {gib(free)} free, {user} needs about {gib(needed)}", hint=hint)


def disk_facts(folder: Path) -> dict[str, Any]:
    """Return file system, size and free space of the disk of an existing folder."""
    usage, filesystem = shutil.disk_usage(folder), None
    with suppress(OSError):
        filesystem = getattr(mount_of(folder), "filesystem", None)
    return {"filesystem": filesystem, "total_bytes": usage.total, "free_bytes": usage.free}


def try_direct_io(folder: Path) -> None:
    """Write one aligned block with direct I/O. Raises OSError if the disk does not support it."""
    with _direct_file(folder) as descriptor, mmap.mmap(-1, BLOCK_BYTES) as block:
        if os.write(descriptor, block) != BLOCK_BYTES:
            raise OSError(None, "a short write")


def measure_rates(folder: Path) -> DiskRates:
    """Measure rates with a temporary file of up to 256 MiB, written and read for about a second each."""
    with _direct_file(folder) as descriptor, mmap.mmap(-1, CHUNK_BYTES) as chunk:
        chunk[:] = os.urandom(CHUNK_BYTES)  # some disks do not store zeros
        started, written = time.monotonic(), 0
        while written < PROBE_BYTES and time.monotonic() - started < PROBE_SECONDS:
            written += os.write(descriptor, chunk)
        os.fdatasync(descriptor)
        write_rate = written / (time.monotonic() - started)
        os.lseek(descriptor, 0, os.SEEK_SET)
        started, read = time.monotonic(), 0
        while read < written and time.monotonic() - started < PROBE_SECONDS:
            read += os.readv(descriptor, [chunk])
        read_rate = read / (time.monotonic() - started)
    return DiskRates(write_bytes_per_second=round(write_rate), read_bytes_per_second=round(read_rate))


@contextmanager
def _direct_file(folder: Path) -> Iterator[int]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".direct-io-probe-") as file:
        descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
