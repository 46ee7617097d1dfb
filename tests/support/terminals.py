"""Commands on a real pseudo-terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import termios


def on_a_terminal(command: list[str], environment: dict[str, str], *, columns: int) -> str:
    """Run a command with its streams on a terminal of some columns, and return what it wrote there."""
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {name: value for name, value in environment.items() if name != "COLUMNS"}
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=variables):
        os.close(child)
        written = b""
        while True:
            try:
                written += os.read(terminal, 2**16)
            except OSError:  # the command has ended
                break
    os.close(terminal)
    return written.decode()
