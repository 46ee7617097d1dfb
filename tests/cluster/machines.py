"""Machines made of namespaces on one Linux host, joined by a switch: their own hostname, address, /proc and /dev/shm.

All machines see the same files, except `/mnt`, which is each machine's own. The switch is a bridge in a network
namespace of its own, so the network of the host is not touched and two harnesses cannot collide. Everything is gone
with the processes that hold the namespaces, and those end with this one. Needs root, util-linux and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

from fork_server import SERVER_VARIABLE

NETWORK, SWITCH, BRIDGE = "10.77.0", "switch", "br0"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
BOOT_SECONDS = 20.0
COMMAND_SECONDS = 60.0
# A machine boots with its own /proc and /dev/shm, the cluster's host names, and a disk of its own in /mnt. The shell
# stays as its init, which waits for its children: a process whose parent was killed does not stay as a zombie.
BOOT = """
mount -t proc proc /proc && mount -t tmpfs -o mode=1777 shm /dev/shm && mount --bind "$FOLDER/hosts" /etc/hosts
mount --bind "$FOLDER/$NAME" /mnt && hostname "$NAME" && ip link set lo up && touch /mnt/booted
sleep infinity & wait
"""


class Machine(NamedTuple):
    """A machine that is switched on."""

    port: str  # the switch's end of its cable
    holder: subprocess.Popen[bytes]  # `unshare`, which created the namespaces
    pid: int  # the machine's init, as the host numbers it


class Machines:
    """Machines that are switched on together; `folder` has their own disks, and is removed at the end."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, list(names)
        self.on: dict[str, Machine] = {}
        self.at_boot: list[Callable[[str], object]] = []
        """What each machine does when it is switched on from now on, given its name: start its daemons."""

    def __enter__(self) -> Machines:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hosts = [f"{self.address(name)} {name}" for name in self.names]
            (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
            self._switch = self._boot(SWITCH)
            self._in_switch("ip", "link", "add", BRIDGE, "type", "bridge")
            self._in_switch("ip", "link", "set", BRIDGE, "up")
            for name in self.names:
                self.power_on(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        switch = [self._switch] if hasattr(self, "_switch") else []
        for machine in [*self.on.values(), *switch]:
            _end(machine)
        self.on.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, name: str) -> str:
        return f"{NETWORK}.{1 + self.names.index(name)}"

    def power_on(self, name: str) -> None:
        """Boot a machine, plug its cable in, and start its daemons."""
        machine = self._boot(name)
        self.on[name] = machine
        end = ["peer", "name", "eth0", "netns", str(machine.pid)]
        self._in_switch("ip", "link", "add", machine.port, "type", "veth", *end)
        self._in_switch("ip", "link", "set", machine.port, "master", BRIDGE, "up")
        self.run(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self.run(name, "ip", "link", "set", "eth0", "up")
        for start in self.at_boot:
            start(name)

    def power_off(self, name: str) -> None:
        """End everything on a machine at once, and tell nobody: its cable is gone before its kernel could answer."""
        machine = self.on.pop(name)
        self._in_switch("ip", "link", "delete", machine.port)  # the kernel may keep the machine's end for minutes
        _end(machine)

    def command(self, name: str, *words: str) -> list[str]:
        """Return the command that runs `words` on a machine, in this process's working directory.

        A machine has no fork server of this host.
        """
        spaces = ["--net", "--uts", "--mount", "--pid", f"--wdns={Path.cwd()}"]
        return ["nsenter", "--target", str(self.on[name].pid), *spaces, "--", "env", "-u", SERVER_VARIABLE, *words]

    def run(self, name: str, *words: str, **more: Any) -> CompletedProcess[str]:
        more.setdefault("timeout", COMMAND_SECONDS)
        ended = subprocess.run(self.command(name, *words), capture_output=True, text=True, check=False, **more)
        assert ended.returncode == 0, f"{name}: {' '.join(words)}\n{ended.stdout}{ended.stderr}"
        return ended

    def _in_switch(self, *words: str) -> None:
        """Run a command with the switch's network, and this host's process ids, by which it knows the machines."""
        command = ["nsenter", "--target", str(self._switch.pid), "--net", "--", *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        assert ended.returncode == 0, f"switch: {' '.join(words)}\n{ended.stderr}"

    def _boot(self, name: str) -> Machine:
        own = self.folder / name
        own.mkdir(exist_ok=True)
        (own / "booted").unlink(missing_ok=True)
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--propagation", "private"]
        with (own / "console").open("wb") as console:
            holder = subprocess.Popen(
                ["unshare", *spaces, "bash", "-c", BOOT],
                env=os.environ | {"NAME": name, "FOLDER": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        wait_until(lambda: (own / "booted").exists() or holder.poll() is not None, f"{name} boots", BOOT_SECONDS)
        assert holder.poll() is None, f"{name} did not boot: {(own / 'console').read_text()}"
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        return Machine(f"to-{name}", holder, int(children[0]))


def _end(machine: Machine) -> None:
    """Kill a machine's init: the kernel ends every process of its namespace, and removes its cable."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(machine.pid, signal.SIGKILL)
    machine.holder.wait(COMMAND_SECONDS)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str, seconds: float, details: Callable[[], str] = str) -> None:
    """Wait until a condition is true; fails with `what` did not happen, and the details then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{details()}"
        time.sleep(0.05)
