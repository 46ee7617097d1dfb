"""Let programs that are alive at the same time train in turns, a step each: what slows the node down slows all of them.

A node's speed changes within minutes, so runs that follow each other differ by more than their programs do. Here the
hook of each rank (`hook/sitecustomize.py`) waits after every step, beginning with the last untimed one, until the
others have done theirs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

HOST = "127.0.0.1"

Run = TypeVar("Run")


def run_in_turns(starts: Sequence[Callable[[int], Run]], *, ranks: int, rounds: int) -> list[Run]:
    """Run programs to their end; return what each start returns, in their order.

    Each is started with the port on which its ranks wait, once all ranks of the one before wait: it starts up alone.
    One that ends early is left out of the rounds that are left. Every second round is in the opposite order.
    """
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(len(starts)) as pool:
        server.settimeout(0.5)
        runs: list[Future[Run]] = []
        waiting: list[list[socket.socket]] = []
        try:
            for start in starts:
                runs.append(pool.submit(start, server.getsockname()[1]))
                waiting.append(admitted(server, ranks, runs[-1]))
            for number in range(rounds):
                for connections in waiting if number % 2 == 0 else reversed(waiting):
                    let_one_step(connections)
        finally:
            for connections in waiting:
                hang_up(connections)  # the ranks go on to their end without waiting
    return [run.result() for run in runs]


def admitted(server: socket.socket, ranks: int, run: Future[Run]) -> list[socket.socket]:
    """Return a connection to each rank once all of them wait for their turn; none if the run ends before."""
    connections: list[socket.socket] = []
    while len(connections) < ranks and not run.done():
        with contextlib.suppress(TimeoutError):
            connection, _ = server.accept()
            connection.settimeout(None)
            connection.recv(1)
            connections.append(connection)
    if len(connections) < ranks:
        hang_up(connections)
    return connections


def let_one_step(connections: list[socket.socket]) -> None:
    """Let every rank of a program train a step, and wait until all have; leave it alone if one ended instead."""
    try:
        for connection in connections:
            connection.sendall(b"\0")
        ended = not all([connection.recv(1) for connection in connections])
    except OSError:
        ended = True
    if ended:
        hang_up(connections)


def hang_up(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()
