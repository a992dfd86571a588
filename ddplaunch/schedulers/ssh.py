"""One host reached with the OpenSSH client, which brings the user's configuration, keys and known hosts along."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddplaunch.agent.lines import Lines
from ddplaunch.errors import UsageError
from ddplaunch.loop import Loop
from ddplaunch.schedulers.remote import MARK

CONNECT_TIMEOUT = 15
"""Seconds for a connection where the user's configuration has none: TCP alone takes two minutes."""

_NEEDED_TO_START = ("LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables without which the interpreter there may not start or not find ddplaunch."""


@dataclass(frozen=True)
class Way:
    """What ssh makes of a host's name."""

    address: str
    patient: bool
    """Whether the user's configuration limits the time for a connection."""


def look_up(name: str) -> Way:
    """Ask the ssh client what its configuration says of a host; nothing is connected to.

    Raises:
        UsageError: there is no client, or its configuration makes no sense.
    """
    if shutil.which("ssh") is None:
        raise UsageError("--hosts needs ssh, and there is none on PATH", "install the OpenSSH client")
    asked = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise UsageError(f"{name}: {asked.stderr.strip() or 'ssh -G failed'}", f"ssh -G {name} should succeed")
    found = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
    return Way(found.get("hostname", name), found.get("connecttimeout", "none") not in ("none", "0"))


def command(name: str, way: Way, python: str, environ: Mapping[str, str], heartbeat: float) -> list[str]:
    """The command that starts our far end on a host.

    ``exec``, so that it is sshd's own child; no terminal, or stdin would be one. ssh ends by itself where the host is
    silent for the heartbeat timeout. A master of connections that runs is used, for it may be the only way in (one-time
    passwords); ours become none (ControlPersist), or they would stay when the job ends.
    """
    options = ["-T", "-o", "BatchMode=yes", "-o", "RemoteCommand=none", "-o", "ControlMaster=no"]
    options += ["-o", f"ServerAliveInterval={max(1, round(heartbeat / 3))}", "-o", "ServerAliveCountMax=3"]
    if not way.patient:
        options += ["-o", f"ConnectTimeout={CONNECT_TIMEOUT}"]
    variables = ["PYTHONSAFEPATH=1"]
    for variable in _NEEDED_TO_START:
        if variable in environ:
            folders = [os.path.abspath(each) if each else each for each in environ[variable].split(os.pathsep)]
            variables.append(f"{variable}={os.pathsep.join(folders)}")
    words = ["env", *variables, python, "-m", "ddplaunch.schedulers.remote"]
    return ["ssh", *options, "--", name, f"exec {shlex.join(words)}"]


@dataclass
class Stream:
    """One of the outputs of an ssh."""

    number: int
    fd: int
    lines: Lines = field(default_factory=Lines)


class Connection:
    """A running ssh. ``answered`` when the host has looked, ``printed`` for each line that is not ours."""

    def __init__(self, loop: Loop, name: str, words: list[str], settings: dict[str, Any]) -> None:
        self.name = name
        self.facts: dict[str, Any] | None = None
        self.code: int | None = None
        self.over = False
        self.complaint = ""
        self.heard = 0.0  # the last time that something came, on the clock of time.monotonic
        self.answered: Callable[[], None] = lambda: None
        self.printed: Callable[[Connection, int, bytes], None] = lambda *_: None
        self._loop = loop
        self._waiting = bytearray()
        # A session of its own: Ctrl-C is for us alone, who pass it on.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._stdin = self._process.stdin.fileno()
        self._streams = [Stream(1, self._process.stdout.fileno()), Stream(2, self._process.stderr.fileno())]
        for fd in (self._stdin, *(stream.fd for stream in self._streams)):
            os.set_blocking(fd, False)
        self.read_on()
        self.send(json.dumps(settings).encode() + b"\n")

    @property
    def reached(self) -> bool:
        """Whether its host was, now that it is over; ssh(1) has an exit status of its own for everything else."""
        return self._process.returncode != 255

    @property
    def trouble(self) -> str:
        """Why it has ended before the host had looked, as far as it has said."""
        if re.search("No module named '?ddplaunch", self.complaint):
            return "ddplaunch is not installed there, for the same Python (--remote-python names another)"
        if self._process.returncode in (126, 127):  # of env(1), or of a shell
            return f"{self.complaint} (--remote-python names another Python)"
        return self.complaint or "ssh ended without a word"

    def send(self, data: bytes) -> None:
        """Send bytes to the host, when it takes them."""
        if self._stdin < 0:
            return
        self._waiting += data
        try:
            done = os.write(self._stdin, self._waiting)
        except BlockingIOError:
            done = 0
        except OSError:  # it has ended, which is noticed elsewhere
            done = len(self._waiting)
        del self._waiting[:done]
        if self._waiting:
            self._loop.watch(self._stdin, lambda: self.send(b""), write=True)
        else:
            self._loop.forget(self._stdin)

    def pause(self) -> None:
        """Read no further, so that the host has to wait, and its ranks in the end."""
        for stream in self._streams:
            self._loop.forget(stream.fd)

    def read_on(self) -> None:
        for stream in self._streams:
            self._loop.watch(stream.fd, partial(self._readable, stream))

    def hang_up(self) -> None:
        """Let the host see the end of what we say, after which it ends everything."""
        if self._stdin >= 0:
            self._loop.forget(self._stdin)
            assert self._process.stdin
            self._process.stdin.close()
            self._stdin = -1

    def kill(self) -> None:
        """End the ssh itself."""
        self._process.kill()

    def check(self) -> bool:
        """Whether the ssh has ended just now; then all that it has said has been given out."""
        if self.over or self._process.poll() is None:
            return False
        for stream in list(self._streams):
            while stream in self._streams and self._read(stream):
                pass
            self._close(stream)  # a master of connections (ControlPersist) may keep it open
        self.hang_up()
        self.over = True
        return True

    def _readable(self, stream: Stream) -> None:
        self._read(stream)

    def _read(self, stream: Stream) -> bool:
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.heard = time.monotonic()
            self._give_out(stream, stream.lines.feed(data))
        else:
            self._close(stream)
        return bool(data)

    def _close(self, stream: Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
            self._loop.forget(stream.fd)
            self._give_out(stream, stream.lines.close())
            pipe = self._process.stdout if stream.number == 1 else self._process.stderr
            assert pipe
            pipe.close()

    def _give_out(self, stream: Stream, lines: bytes) -> None:
        for line in re.findall(rb"[^\n]*\n", lines):
            text, mark, ours = line.partition(MARK)
            if text:
                if stream.number == 2 and text.strip():
                    self.complaint = text.decode(errors="replace").strip()
                self.printed(self, stream.number, text if not mark else text + b"\n")
            if mark and stream.number == 1:
                self.facts = json.loads(ours)
                self.answered()
            elif mark:
                self.code = int(ours)
