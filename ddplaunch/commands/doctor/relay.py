"""Every node but node 0, started by hand: it looks for node 0, and answers it by a process of its own.

Only our questions go in and only answers come out. Variables and the current folder are this node's own, whatever
node 0 says: who passes for node 0 has nothing run here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.commands.doctor.channels import Connection, Process
from ddplaunch.commands.doctor.meeting import Hello, Seat, Welcome, hear, say
from ddplaunch.commands.doctor.questions import MARK, End, Look, read_question, write_question
from ddplaunch.control.route import resolve, unresolvable
from ddplaunch.dataclass import replace
from ddplaunch.errors import LaunchError, UsageError, shown
from ddplaunch.plan.command import DOCTOR, python_command
from ddplaunch.wire import proof

RETRY = 0.3  # seconds between two tries
_CONNECT_PATIENCE = 2.0  # seconds for each of node 0's addresses; what is lost the next try makes up for
_ALIKE = "give all nodes the same --nnodes and the same DDPLAUNCH_TOKEN, and each its own --node-rank"


def answer(address: str, port: int, me: Hello, token: str | None, seconds: float, tell: Callable[[str], None]) -> int:
    """Take part until node 0 says that was all; return its exit code. ``tell`` gets what people should know.

    Raises LaunchError where node 0 does not answer in so many seconds, refuses us or goes away.
    """
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    connection = _seek(address, port, where, me, token, seconds, tell)
    tell(f"node {me.node_rank} of {me.nnodes} answers node 0 at {where}, which prints the page")
    process = Process(python_command(sys.executable, DOCTOR))
    threading.Thread(target=_pass_on, args=(process, connection), daemon=True).start()
    try:
        while line := connection.line(None):
            order = read_question(line)
            if isinstance(order, End):
                return order.code
            own = replace(order, cwd=os.getcwd(), environ={}) if isinstance(order, Look) else order
            process.send(write_question(own))
    except ValueError:
        raise LaunchError(f"{where} asks what ddplaunch cannot read", "use the same version on all nodes") from None
    finally:
        process.close()
        connection.end()
    raise LaunchError(f"node 0 ({where}) closed the connection before its page was complete", "see what it says there")


def _pass_on(process: Process, connection: Connection) -> None:
    """Send the answers; node 0 sees at once when the process ends."""
    with suppress(OSError, ValueError):  # closed, as we end
        while line := process.line(None):
            if line.startswith(MARK):
                connection.send(line)
        connection.finish()


def _seek(
    address: str, port: int, where: str, me: Hello, token: str | None, seconds: float, tell: Callable[[str], None]
) -> Connection:
    until = time.monotonic() + seconds
    told = ""
    while True:
        found = _try(address, port, me, token)
        if isinstance(found, Connection):
            return found
        if time.monotonic() + RETRY > until:
            what = f"node 0 was not reached in {seconds:g} s (--join-timeout): {where}: {found}"
            hint = "is the same command running there with --node-rank 0, and does a firewall let this port pass?"
            raise LaunchError(what, hint)
        if found != told:
            told = found
            tell(f"waiting for node 0 ({seconds:g} s at most): {where}: {found}")
        time.sleep(RETRY)


def _try(address: str, port: int, me: Hello, token: str | None) -> Connection | str:
    """Connect and say who we are; or return why not. Raises UsageError where that will not change."""
    try:
        resolve(address)
    except OSError:
        raise unresolvable(address) from None
    try:
        connection = Connection(_connect(address, port))
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    welcome = hear(connection, Welcome)
    if welcome:
        nonces = (welcome.nonce, proof.nonce())
        ours = proof.prove(token, proof.MEMBER, nonces) if token else None
        say(connection, replace(me, nonce=nonces[1], proof=ours))
        seat = hear(connection, Seat)
        if seat and seat.refused:
            raise UsageError(f"node 0 refuses this node: {shown(seat.refused)}", _ALIKE)
        if seat and token and not proof.proves(seat.proof, token, proof.NODE_ZERO, nonces):
            raise UsageError("node 0 does not know the token", "give every node the same DDPLAUNCH_TOKEN")
        if seat:
            return connection
    connection.end()
    return "it accepts the connection, and does not answer as the doctor of node 0"


def _connect(address: str, port: int) -> socket.socket:
    sock = socket.create_connection((address, port), _CONNECT_PATIENCE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # a node 0 that has lost its power is noticed in half a minute, elsewhere in two hours
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock
