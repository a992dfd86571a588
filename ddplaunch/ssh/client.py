"""One host, reached with the OpenSSH client: the user's configuration, keys and known hosts apply."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddplaunch import __version__
from ddplaunch.dataclass import dataclass, field
from ddplaunch.errors import UsageError, shown
from ddplaunch.loop import Loop
from ddplaunch.output.lines import Lines
from ddplaunch.plan.command import REMOTE, python_command
from ddplaunch.ssh.remote import HELLO, HostFacts, HostJob, mark

CONNECT_TIMEOUT = 15  # seconds to connect, unless the user's configuration has a limit: TCP's own is two minutes
LONGEST_COMPLAINT = 300  # characters of a line from a host, its login shell or ssh that a message of ours quotes
_MAX_SAID = 30  # lines that are kept; a banner may come before the one that matters

# What ssh prints when another try may help (sshd's MaxStartups, a restart), when none does, and when the line explains
# nothing: it only follows from what a jump host has said.
_REFUSED = re.compile(r"closed by|reset by|Connection refused|Broken pipe|MaxStartups|Not allowed at this time")
_FINAL = re.compile(r"ermission denied|verification failed|open failed|authentication failures|timed out|not resolve")
_HOLLOW = re.compile(
    r"UNKNOWN port|stdio forwarding failed|^(kex|ssh)_exchange_identification|^Warning: Permanently added"
)

_NEEDED_TO_START = ("LD_LIBRARY_PATH", "PYTHONPATH")
"""Without these variables the interpreter there may not start, or not find ddplaunch."""

_OVERRIDDEN = {
    "BatchMode": "yes",
    "RequestTTY": "no",  # a terminal would change what we write to stdin
    "RemoteCommand": "none",
    "ControlMaster": "no",
    "PermitLocalCommand": "no",  # its output would mix with the host's
    "ClearAllForwardings": "yes",  # a second connection cannot forward the same ports, and may fail
    "ForwardX11": "no",
    "Tunnel": "no",
    "LogLevel": "INFO",  # ssh's own default, at which it says why it ends
}
"""Settings of a user's configuration that suit a shell and would break a job."""

_OVERRIDDEN_WHERE_KNOWN = {"SessionType": "default", "StdinNull": "no", "ForkAfterAuthentication": "no"}
"""More of them, new in OpenSSH 8.7; an older client would refuse them."""


@dataclass(frozen=True)
class SshWay:
    """How ssh reaches a host, by its configuration."""

    address: str
    first: str  # the machine that we connect to: the host itself, or a jump host
    options: tuple[str, ...]  # options of ssh that overrule the user's configuration


def look_up(name: str) -> SshWay:
    """Ask the ssh client what its configuration says about a host; nothing connects.

    Raises UsageError if there is no client, or it refuses its configuration.
    """
    if shutil.which("ssh") is None:
        raise UsageError("--hosts needs ssh, which is not on PATH", "install the OpenSSH client")
    asked = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, check=False, errors="replace")
    if asked.returncode:
        said = shown(asked.stderr, 400) or "ssh -G failed"
        raise UsageError(f"{name}: {said}", f"fix your ssh configuration until this succeeds: ssh -G {name}")
    found = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
    address = found.get("hostname", name)
    jump, proxy = (found.get(key, "none") for key in ("proxyjump", "proxycommand"))
    first = jump.partition(",")[0] if jump != "none" else proxy if proxy != "none" else address
    more = {name: value for name, value in _OVERRIDDEN_WHERE_KNOWN.items() if name.lower() in found}
    options = [f"-o{name}={value}" for name, value in (_OVERRIDDEN | more).items()]
    if found.get("connecttimeout", "none") in ("none", "0"):
        options.append(f"-oConnectTimeout={CONNECT_TIMEOUT}")
    return SshWay(address, first, tuple(options))


def command(
    name: str, way: SshWay, python: str, environ: Mapping[str, str], heartbeat: float, statement: str = REMOTE
) -> list[str]:
    """The command that starts ``ssh.remote`` on a host, or another statement of Python's.

    It uses ``exec``, so that the process is sshd's own child. ssh ends when the host is silent for the heartbeat
    timeout. It uses a master connection that runs already, for that may be the only way in (one-time passwords), and
    never becomes one (ControlPersist), for that would outlive the job. Raises UsageError if a word has a line break,
    which a shell there could not read.
    """
    alive = [f"-oServerAliveInterval={max(1, round(heartbeat / 3))}", "-oServerAliveCountMax=3"]
    return ["ssh", *way.options, *alive, "--", name, far(python_command(python, statement), environ)]


def as_person(host: str, words: list[str], environ: Mapping[str, str], *, terminal: bool) -> list[str]:
    """The command that starts a program of ours on a host, with our terminal or our pipes."""
    how = ["LogLevel=ERROR", "ServerAliveInterval=15", "ServerAliveCountMax=3"]
    how += [f"{name}={_OVERRIDDEN[name]}" for name in ("RemoteCommand", "ClearAllForwardings", "PermitLocalCommand")]
    return ["ssh", "-t" if terminal else "-T", *(f"-o{each}" for each in how), "--", host, far(words, environ)]


def far(words: list[str], environ: Mapping[str, str]) -> str:
    """A command of ours as a login shell there gets it. UsageError as in ``command``."""
    variables = ["PYTHONSAFEPATH=1"]
    for variable in _NEEDED_TO_START:
        if variable in environ:
            folders = [os.path.abspath(each) if each else each for each in environ[variable].split(os.pathsep)]
            variables.append(f"{variable}={os.pathsep.join(folders)}")
    words = ["env", *variables, *words]
    for word in words:
        if "\n" in word:
            what = f"'{shown(word, 200)}' has a line break, and some login shells cannot read that"
            raise UsageError(what, "use a folder or a value without a line break")
    return f"exec {shlex.join(words)}"


def why_ended(said: Sequence[str], last: str, code: int) -> str:
    """Why Python did not begin there, by all that was said, the last line that explains something and the exit code."""
    if any(re.search("No module named '?ddplaunch", line) for line in said):
        return "ddplaunch is not installed for this Python there (--remote-python names another)"
    return f"{last} (--remote-python names another Python)" if code in (126, 127) else last  # of env(1), or of a shell


@dataclass
class Stream:
    """stdout (1) or stderr (2) of an ssh."""

    number: int
    fd: int
    lines: Lines = field(default_factory=Lines)


class Session:
    """One ssh, which runs after ``begin``, and the host that it reaches."""

    def __init__(self, loop: Loop, name: str, way: str, words: list[str], job: HostJob) -> None:
        """``name`` is the host's, ``way`` the machine that lets us in, ``words`` the command line of the ssh."""
        self.name, self.way = name, way
        self.facts: HostFacts | None = None
        self.code: int | None = None
        self.begun = self.over = self.there = False
        self.heard = 0.0  # the last time that something came, on the clock of time.monotonic
        self.spoke: Callable[[Session], None] = lambda _: None  # when `ssh.remote` runs there
        self.answered: Callable[[], None] = lambda: None  # when its facts are here
        self.printed: Callable[[Session, int, bytes], None] = lambda *_: None  # each line of output that is not ours
        self._loop = loop
        self._words, self._job = words, job
        self._mark = mark(job.nonce)
        self.began = math.inf
        self._verdict = ""
        self._said = deque[bytes](maxlen=_MAX_SAID)
        self._stdin = -1

    def begin(self) -> None:
        """Start the ssh; again, after one that is over."""
        self.begun, self.over = True, False
        self.began = time.monotonic()
        self._said.clear()
        self._waiting = bytearray()
        # A session of its own: Ctrl-C is for us alone, and we pass it on.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._stdin = self._process.stdin.fileno()
        self._streams = [Stream(1, self._process.stdout.fileno()), Stream(2, self._process.stderr.fileno())]
        for fd in (self._stdin, *(stream.fd for stream in self._streams)):
            os.set_blocking(fd, False)
        self.read_on()
        # A start file of the login shell may put another shell in its place ("exec zsh"): that one reads commands here.
        self._write(self._words[-1].encode(errors="surrogateescape") + b"\n")

    @property
    def reached(self) -> bool:
        """Whether it had reached its host, now that it is over; else ssh ends with 255 (ssh(1))."""
        return self.there or self._process.returncode not in (255, -signal.SIGKILL)

    @property
    def refused(self) -> bool:
        """Whether it is over because somebody refused or closed the connection before ``ssh.remote`` ran."""
        said = "\n".join(self._complaints())
        before = self.over and not self.reached and not self._verdict
        return before and bool(_REFUSED.search(said)) and not _FINAL.search(said)

    @property
    def complaint(self) -> str:
        """The last line that explains why it ended; "" if there is none."""
        said = self._complaints()
        telling = [text for text in said if not _HOLLOW.search(text)]
        return self._verdict or (telling or said or [""])[-1]

    def _complaints(self) -> list[str]:
        texts = (shown(line.decode(errors="replace"), LONGEST_COMPLAINT) for line in self._said)
        return [text for text in texts if text]

    @property
    def trouble(self) -> str:
        """Why it ended before the host has answered, in words for people."""
        code = self._process.returncode
        if self._verdict:
            return self._verdict
        if not self.there and (code == 0 or (code != 255 and not self.complaint)):
            ended = f"the login shell ended before ddplaunch began (exit code {code})"
            return f"{ended}: does one of its start files call exit?"
        return why_ended(self._complaints(), self.complaint or "ssh ended without a message", code)

    def rest(self) -> None:
        """Get ready for another ``begin``, after an ssh that is over."""
        self.begun = self.over = False

    def give_up(self, why: str) -> None:
        """End the ssh; ``why`` is what ``trouble`` then says."""
        self._verdict = self._verdict or why
        self.kill()

    def send(self, data: bytes) -> None:
        """Send bytes to ``ssh.remote`` when it takes them; they are lost if it does not run yet."""
        if self.there:
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._stdin < 0:
            return
        self._waiting += data
        try:
            done = os.write(self._stdin, self._waiting)
        except BlockingIOError:
            done = 0
        except OSError:  # it has ended: check() finds out
            done = len(self._waiting)
        del self._waiting[:done]
        if self._waiting:
            self._loop.watch(self._stdin, lambda: self._write(b""), write=True)
        else:
            self._loop.forget(self._stdin)

    def pause(self) -> None:
        """Stop reading, so that the host, and in the end its ranks, must wait."""
        for stream in self._streams:
            self._loop.forget(stream.fd)

    def read_on(self) -> None:
        for stream in self._streams:
            self._loop.watch(stream.fd, partial(self._read, stream))

    def hang_up(self) -> None:
        """Close its stdin, at which the host ends everything."""
        self.over = self.over or not self.begun
        if self._stdin >= 0:
            self._loop.forget(self._stdin)
            assert self._process.stdin
            self._process.stdin.close()
            self._stdin = -1

    def kill(self) -> None:
        """End the ssh itself."""
        if self.begun:
            self._process.kill()

    def check(self) -> bool:
        """Whether the ssh has ended since the last look; then all its output has been passed on."""
        if self.over or not self.begun or self._process.poll() is None:
            return False
        for stream in list(self._streams):
            while stream in self._streams and self._read(stream):
                pass
            self._close(stream)  # a master connection (ControlPersist) may keep it open
        self.hang_up()
        self.over = True
        return True

    def _read(self, stream: Stream) -> bool:
        """Pass on what has come; return whether there may be more now."""
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
            if stream.number == 1 and not self.there and line.startswith(HELLO):
                self._hear_hello(line[len(HELLO) :])
                continue
            text, mark, ours = line.partition(self._mark)
            if stream.number == 2 or not self.there:
                self._said.append(text[: 4 * LONGEST_COMPLAINT])
            if text:
                self.printed(self, stream.number, text if not mark else text + b"\n")
            if mark:
                self._hear(stream.number, ours)

    def _hear_hello(self, version: bytes) -> None:
        """Send the job, if the version there is ours."""
        self.there = True
        there = shown(version.decode(errors="replace"), 20)
        if there != __version__:
            self.give_up(f"ddplaunch {there} there, {__version__} here")
            return
        self._write(self._job.line())
        self.spoke(self)

    def _hear(self, number: int, ours: bytes) -> None:
        """Take what ``ssh.remote`` says: its facts on stdout, the exit code of its launcher on stderr."""
        try:
            if number == 1:
                self.facts = HostFacts.read(ours)
            else:
                self.code = int(ours) & 255
        except ValueError:
            self.give_up("ddplaunch cannot read the answer of this host")
        else:
            if number == 1:
                self.answered()
