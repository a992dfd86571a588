"""The far end of an ssh: looks whether the job can run here, then runs this host's launcher and guards it.

It says that it is there, and is then told everything on its stdin, first one line of JSON, then single bytes. It lives
by it: at its end, or when nothing has come for the heartbeat timeout, the launcher has the grace to stop its ranks.
Nothing else would end it:
without a terminal sshd kills nothing when a connection closes, and of a network that falls silent it hears nothing
(ClientAliveInterval of sshd_config(5) is 0 where nobody sets it).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ddplaunch import __version__
from ddplaunch.control.hello import own_versions
from ddplaunch.control.messages import Versions
from ddplaunch.control.route import resolve
from ddplaunch.errors import EXIT_SIGNAL, EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, UsageError
from ddplaunch.loop import Loop
from ddplaunch.plan.calling import called
from ddplaunch.rank import processes
from ddplaunch.target.target import find

_MARK = b"\x1eddplaunch "

HELLO = _MARK + b"here "
"""Begins our first word, before which we are sent nothing: a login shell may read what is meant for us."""


def mark(nonce: str) -> bytes:
    """What begins a line of ours among those of ranks, who do not know the nonce of the job and cannot forge one."""
    return _MARK + nonce.encode() + b" "


@dataclass(frozen=True)
class Facts:
    """What a host says of itself before the job starts."""

    problems: tuple[str, ...]
    versions: Versions

    @classmethod
    def read(cls, text: bytes) -> Facts:
        """Read what the far end has written.

        Raises:
            ValueError: these are no facts.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(type(error).__name__) from None


GO, BEAT = b"G", b"."
SIGNALS = {
    b"I": signal.SIGINT,
    b"T": signal.SIGTERM,
    b"H": signal.SIGHUP,
    b"Q": signal.SIGQUIT,
    b"1": signal.SIGUSR1,
    b"2": signal.SIGUSR2,
    b"X": signal.SIGXCPU,
}
"""The bytes that follow the line: begin; we are there; and signals for the launcher."""

PATIENCE = 120.0
"""Seconds to wait for the line, and then for the word to begin, which comes when all hosts have answered."""

KILL_AFTER = 5.0
"""Seconds beyond the grace that the launcher has for its own end."""

ZYGOTE_PATIENCE = 1.0
"""Seconds that the zygote of a launcher which was killed has to end its ranks and to remove their files."""

LOST = EXIT_UNAVAILABLE


def main() -> int:
    """Do as told on stdin; the exit code is the launcher's."""
    try:
        return _serve()
    except Exception as error:  # the near end shows what is said here
        os.write(2, f"a bug of ddplaunch there: {type(error).__name__}: {error}\n".encode(errors="replace"))
        return EXIT_SOFTWARE


def _serve() -> int:
    processes.die_with_parent(signal.SIGTERM)
    # On a line of its own whatever a login shell has printed, also behind a progress bar of it.
    os.write(1, b"\n" + HELLO + __version__.encode() + b"\n")
    line = _read_line()
    while line is not None and not line.startswith(b"{"):  # our command, for a shell in place of the login shell
        line = _read_line()
    if line is None:
        return LOST
    settings = json.loads(line)
    os.environ.pop("PYTHONSAFEPATH", None)  # ours, so that nothing in the home folder was taken for a module
    os.environ.update(settings["environ"])
    facts = Facts(tuple(_problems(settings)), own_versions(torch=not settings["target"]["no_python"]))
    os.write(1, mark(settings["nonce"]) + msgspec.json.encode(facts) + b"\n")
    if _read(PATIENCE) != GO:
        return LOST if not facts.problems else EXIT_USAGE
    return Guard(settings).run()


def _read(seconds: float, size: int = 1) -> bytes:
    """Read bytes that are no heartbeats; none is the end, or silence for so long."""
    data = BEAT
    while data == BEAT:
        data = os.read(0, size) if select.select([0], [], [], seconds)[0] else b""
    return data


def _read_line() -> bytes | None:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1) if select.select([0], [], [], PATIENCE)[0] else b""
        if not data:
            return None
        line += data
    return bytes(line)


def _problems(settings: dict[str, Any]) -> Iterator[str]:
    """What keeps the job from running here."""
    cwd = settings["cwd"]
    try:
        os.chdir(cwd)
    except OSError as error:
        yield f"{cwd}: {error.strerror}"
    else:
        if settings["log_dir"] is not None:
            yield from _unwritable(settings["log_dir"])
        target = settings["target"]
        try:
            find(target["typed"], (), as_module=target["module"], as_program=target["no_python"], cwd=cwd)
        except UsageError as error:
            yield error.message
    address = settings["address"]
    if address:
        try:
            resolve(address)
        except OSError:
            yield f"--master-addr {address} does not resolve there"
    for port in settings["ports"]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                yield f"port {port}: {error.strerror}"


def _unwritable(log_dir: str) -> Iterator[str]:
    """Tell where no folder can be made: each host writes its own, of its own ranks."""
    there = os.path.abspath(log_dir)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        yield f"--log-dir {log_dir}: {there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"--log-dir {log_dir}: {there} cannot be written to"


class Guard:
    """One launcher, as long as somebody is there who wants it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._words: list[str] = settings["words"]
        self._mark = mark(settings["nonce"])
        self._heartbeat: float = settings["heartbeat"]
        self._grace: float = settings["grace"]
        self._warning: int | None = settings["warning"]
        self._loop = Loop()
        self._alone = self._killed = False

    def run(self) -> int:
        """Run the launcher to its end and say how it ended, if there is anybody to hear it."""
        processes.adopt_orphans()
        caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        self._loop.catch(caught, self._signalled)
        us = os.getpid()

        def begin() -> None:
            processes.die_with_parent(signal.SIGTERM)
            if os.getppid() != us:
                os._exit(LOST)
            if self._warning is not None:  # until the launcher listens
                signal.pthread_sigmask(signal.SIG_BLOCK, [self._warning])

        self._launcher = subprocess.Popen(
            [*called(sys.executable), *self._words],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=begin,
        )
        self._silence = self._loop.after(self._heartbeat, self._lost)
        self._loop.watch(0, self._told)
        while self._launcher.poll() is None and not self._killed:
            self._loop.step()
        code = self._launcher.returncode
        self._clear()
        code = LOST if code is None else EXIT_SIGNAL - code if code < 0 else code
        if not self._alone:
            os.write(2, self._mark + str(code).encode() + b"\n")
        return code

    def _clear(self) -> None:
        """Let nothing stay; what a launcher leaves that was killed, its zygote removes, files too, within a moment."""
        self._loop.forget(0)
        if self._launcher.returncode is None:
            self._launcher.kill()
        over = time.monotonic() + ZYGOTE_PATIENCE
        self._loop.after(ZYGOTE_PATIENCE, lambda: None)
        while processes.descendants(os.getpid()) and time.monotonic() < over:
            self._loop.step()
        processes.kill_all_below(os.getpid())

    def _told(self) -> None:
        data = os.read(0, 4096)
        if not data:
            self._lost()
            return
        self._silence.cancel()
        self._silence = self._loop.after(self._heartbeat, self._lost)
        for byte in data:
            number = SIGNALS.get(bytes([byte]))
            if number is not None:
                processes.send(self._launcher.pid, number)

    def _signalled(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._lost()

    def _lost(self) -> None:
        """Nobody is there any more."""
        if self._alone:
            return
        self._alone = True
        self._loop.forget(0)
        self._silence.cancel()
        processes.send(self._launcher.pid, signal.SIGTERM)
        self._loop.after(self._grace + KILL_AFTER, self._kill)

    def _kill(self) -> None:
        self._killed = True
