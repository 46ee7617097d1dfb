"""Mounts and rates of local disks."""

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.hardware import disks
from toolkit.hardware.disks import Mount, check_free_space, measure_rates, mount_of

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
/dev/nvme0n1 /data xfs rw 0 0
tmpfs /data/scratch tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /mnt/with\\040space ext4 rw 0 0
sshfs /far fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "filesystem", "kind"),
    [
        ("/data/swap", "xfs", "local"),
        ("/database", "ext4", "local"),
        ("/data/scratch/here", "tmpfs", "memory"),
        ("/home/me", "nfs4", "network"),
        ("/far", "fuse.sshfs", "network"),
        ("/mnt/with space/x", "ext4", "local"),
    ],
)
def test_the_longest_mount_point_above_a_folder_is_its_mount(folder: str, filesystem: str, kind: str) -> None:
    mount = mount_of(Path(folder), MOUNTS)
    assert (mount.filesystem, mount.kind) == (filesystem, kind)
    over_it = Mount(filesystem="tmpfs", mount_point="/data")  # a later mount covers an earlier one
    assert mount_of(Path("/data"), MOUNTS + "tmpfs /data tmpfs rw 0 0\n") == over_it


def test_rates_are_measured_and_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "PROBE_BYTES", 16 * 2**20)
    rates = measure_rates(tmp_path)
    assert rates.write_bytes_per_second > 2**20
    assert rates.read_bytes_per_second > 2**20
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_enough_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=f"{tmp_path} has .* free, the run needs about 931322574.62 GiB"):
        check_free_space(tmp_path / "not" / "yet" / "there", 10**18, user="the run")
    check_free_space(tmp_path, 1, user="the run")
