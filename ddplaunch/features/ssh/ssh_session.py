"""SSH session to one host: starts the launcher there and follows it; its command line is in ``ssh_command.py``."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct, field

from ddplaunch import __version__
from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.helper_process import HelperProcess
from ddplaunch.base.types import parse
from ddplaunch.core.output.line_assembler import LineAssembler
from ddplaunch.features.ssh.remote_launcher import CODE_BYTE, CODE_REQUEST, HELLO, HostFacts, HostJob, output_mark
from ddplaunch.system.plan.launch_command import MAX_QUOTED_CHARS, explain_failed_start

_MAX_KEPT_LINES = 30  # the last lines of stderr; a banner may come before the one that matters

# What ssh prints when another try may help (sshd's MaxStartups, a restart), when none does, and when the line explains
# nothing, as it only follows from an error of a jump host.
_CONNECTION_REFUSED = re.compile(
    r"closed by|reset by|Connection refused|Broken pipe|MaxStartups|Not allowed at this time"
)
_PERMANENT_ERROR = re.compile(
    r"ermission denied|verification failed|open failed|authentication failures|timed out|not resolve"
)
_UNINFORMATIVE = re.compile(
    r"UNKNOWN port|stdio forwarding failed|^(kex|ssh)_exchange_identification|^Warning: Permanently added"
)


_UNKNOWN_KEY = re.compile(r"No \S+ host key is known for (\S+)")
_CHANGED_KEY = re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key for (\S+) has changed")
_REMOVAL = re.compile(r"ssh-keygen -f \S+ -R [\"']?([^\s\"']+)")

_PROBE_TIMEOUT_S = 20.0
_QUESTION, _ANSWER = b"echo ddplaunch-$FISH_VERSION\n", re.compile(rb"^ddplaunch-\d", re.M)
FISH_TEXT = (
    "a start file of the login shell runs fish, which waits there for the end of its input: `[ -t 0 ] && exec fish`"
)


def explain_host_key(lines: Sequence[str], name: str) -> str:
    """Explain why ssh refuses a host's key, and what to do; "" for another problem. ``name``: the host's name.

    The lines may be about a jump host, or have the name and port as they are in known_hosts.
    """
    text = "\n".join(lines)
    if match := _UNKNOWN_KEY.search(text):
        host = match[1].rstrip(".")
        return f"the host key of {host} is not known here: connect once by `ssh {host}`, and confirm it"
    if match := _CHANGED_KEY.search(text):
        removal = _REMOVAL.search(text)
        host = removal[1] if removal else (match[1] or name)
        return f"the host key of {host} has changed: if the machine is new, `ssh-keygen -R {shlex.quote(host)}`"
    return ""


class SessionStream(Struct):
    """stdout (1) or stderr (2) of an ssh process."""

    number: int
    fd: int
    lines: LineAssembler = field(default_factory=LineAssembler)


class ShellProbe:
    """Checks whether the login shell of a host that does not reply starts fish instead; calls ``on_fish`` then.

    fish runs nothing before its input ends. The input of a session does not end while the job runs, so a second
    connection asks, with an input that ends at once.
    """

    def __init__(self, loop: EventLoop, words: Sequence[str], on_fish: Callable[[], None]) -> None:
        """``words``: the ssh command of the session. Raises OSError if it cannot be started."""
        self._on_fish, self._text = on_fish, b""
        command = [*words[:-1], "true"]  # a login shell that is not replaced runs this, and ignores its input
        self._child = HelperProcess(
            loop, command, self._on_output, self.close, deadline=_PROBE_TIMEOUT_S, pipe_stdin=True
        )
        self._child.write(_QUESTION)
        self._child.close_stdin()

    def _on_output(self, data: bytes) -> None:
        self._text = (self._text + data)[-1024:]
        if _ANSWER.search(self._text):
            self.close()
            self._on_fish()
        elif not data:
            self.close()

    def close(self) -> None:
        self._child.close()


class SshSession:
    """One host and the ssh process that connects to it, which runs after ``start``."""

    def __init__(
        self, loop: EventLoop, name: str, gateway: str, words: list[str], job: HostJob, code: bytes = b""
    ) -> None:
        """``name``: the host's name; ``gateway``: the first machine on the route; ``words``: the ssh command.

        ``code``: the archive of ``job.code``, which is sent if the host requests it.
        """
        self.name, self.gateway = name, gateway
        self.facts: HostFacts | None = None
        self.code: int | None = None
        self.is_started = self.has_ended = self.has_replied = self.has_code_sent = False
        self.last_output_at = self.last_input_at = 0.0  # by time.monotonic()
        self.on_hello: Callable[[SshSession], None] = lambda _: None  # called when `remote_launcher` has started
        self.on_facts: Callable[[], None] = lambda: None  # called when its facts have arrived
        # Called with each line that `remote_launcher` did not mark.
        self.on_line: Callable[[SshSession, int, bytes], None] = lambda *_: None
        self._loop = loop
        self._words, self._job, self._code = words, job, code
        self._mark = output_mark(job.nonce)
        self.began = math.inf
        self._failure = ""
        self._probe: ShellProbe | None = None
        self._stderr_lines = deque[bytes](maxlen=_MAX_KEPT_LINES)
        self._stdin = -1

    def start(self) -> None:
        """Start the ssh process; may be called again after ``reset``."""
        self.is_started, self.has_ended = True, False
        self.began = time.monotonic()
        self._stderr_lines.clear()
        self._unsent = deque[memoryview]()
        # In a session of its own, ssh gets no Ctrl-C: this process gets it, and forwards it.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._stdin = self._process.stdin.fileno()
        self._streams = [
            SessionStream(1, self._process.stdout.fileno()),
            SessionStream(2, self._process.stderr.fileno()),
        ]
        for fd in (self._stdin, *(stream.fd for stream in self._streams)):
            os.set_blocking(fd, False)
        self.resume_reading()
        # A start file of the login shell may replace it by another shell ("exec zsh"), which reads commands from stdin.
        self._write(self._words[-1].encode(errors="surrogateescape") + b"\n")

    @property
    def was_reached(self) -> bool:
        """Whether ssh, which has ended, had reached the host; if not it exits with 255 (ssh(1))."""
        return self.has_replied or self._process.returncode not in (255, -signal.SIGKILL)

    @property
    def was_refused(self) -> bool:
        """Whether ssh ended because the connection was refused or closed before ``remote_launcher`` ran."""
        errors = "\n".join(self._error_lines())
        failed_early = self.has_ended and not self.was_reached and not self._failure
        return failed_early and bool(_CONNECTION_REFUSED.search(errors)) and not _PERMANENT_ERROR.search(errors)

    @property
    def last_error_line(self) -> str:
        """The last line on stderr that explains why ssh ended; "" if there is none."""
        lines = self._error_lines()
        informative = [text for text in lines if not _UNINFORMATIVE.search(text)]
        return self._failure or (informative or lines or [""])[-1]

    def _error_lines(self) -> list[str]:
        texts = (sanitize_line(line.decode(errors="replace"), MAX_QUOTED_CHARS) for line in self._stderr_lines)
        return [text for text in texts if text]

    @property
    def failure_reason(self) -> str:
        """Why ssh ended before the host replied, for the user."""
        code = self._process.returncode
        if self._failure:
            return self._failure
        if not self.has_replied and (code == 0 or (code != 255 and not self.last_error_line)):
            ended = f"the login shell exited before ddplaunch started (exit code {code})"
            return f"{ended}: does one of its start files call exit?"
        if code == 255 and (text := explain_host_key(self._error_lines(), self.name)):
            return text
        return explain_failed_start(self._error_lines(), self.last_error_line or "ssh ended without a message", code)

    def probe_shell(self) -> None:
        """Check, once, whether the host's login shell keeps the command from running; if so, give up the host."""
        if self._probe is None:
            with suppress(OSError):
                self._probe = ShellProbe(self._loop, self._words, self._on_fish)

    def _on_fish(self) -> None:
        if not self.has_replied:
            self.give_up(FISH_TEXT)

    def reset(self) -> None:
        """Prepare for another ``start`` after ssh has ended."""
        self.is_started = self.has_ended = False

    def give_up(self, why: str) -> None:
        """Kill ssh; ``failure_reason`` is then ``why``."""
        self._failure = self._failure or why
        self.kill()

    def send(self, data: bytes) -> None:
        """Queue bytes for ``remote_launcher``; they are dropped if it has not started."""
        if self.has_replied:
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._stdin < 0:
            return
        if data:
            self._unsent.append(memoryview(data))  # not copied: all hosts may get the same archive
        try:
            while self._unsent:
                done = os.write(self._stdin, self._unsent[0])
                self._unsent[0] = self._unsent[0][done:]
                if not self._unsent[0]:
                    self._unsent.popleft()
                if done > 1:  # not a heartbeat
                    self.last_input_at = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:  # ssh has ended: poll_exit() notices
            self._unsent.clear()
        if self._unsent:
            self._loop.watch_fd(self._stdin, lambda: self._write(b""), write=True)
        else:
            self._loop.unwatch_fd(self._stdin)

    def pause_reading(self) -> None:
        """Pause the reads from ssh, so that the host's launcher, and in the end its ranks, block when they print."""
        for stream in self._streams:
            self._loop.unwatch_fd(stream.fd)

    def resume_reading(self) -> None:
        for stream in self._streams:
            self._loop.watch_fd(stream.fd, partial(self._read, stream))

    def close_stdin(self) -> None:
        """Close ssh's stdin; ``remote_launcher`` then stops the launcher."""
        self.has_ended = self.has_ended or not self.is_started
        if self._stdin >= 0:
            self._loop.unwatch_fd(self._stdin)
            assert self._process.stdin
            self._process.stdin.close()
            self._stdin = -1

    def kill(self) -> None:
        """Kill the ssh process."""
        if self.is_started:
            self._process.kill()

    def poll_exit(self) -> bool:
        """Return whether ssh has ended since the last call; then all its output has been delivered."""
        if self.has_ended or not self.is_started or self._process.poll() is None:
            return False
        for stream in list(self._streams):
            while stream in self._streams and self._read(stream):
                pass
            self._close(stream)  # a master connection (ControlPersist) may hold it open
        self.close_stdin()
        if self._probe is not None:
            self._probe.close()
        self.has_ended = True
        return True

    def _read(self, stream: SessionStream) -> bool:
        """Read once and deliver complete lines; return whether there may be more to read now."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.last_output_at = time.monotonic()
            self._deliver_lines(stream, stream.lines.feed(data))
        else:
            self._close(stream)
        return bool(data)

    def _close(self, stream: SessionStream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
            self._loop.unwatch_fd(stream.fd)
            self._deliver_lines(stream, stream.lines.close())
            pipe = self._process.stdout if stream.number == 1 else self._process.stderr
            assert pipe
            pipe.close()

    def _deliver_lines(self, stream: SessionStream, lines: bytes) -> None:
        for line in re.findall(rb"[^\n]*\n", lines):
            if stream.number == 1 and not self.has_replied and line.startswith(HELLO):
                self._on_hello(line[len(HELLO) :])
                continue
            text, mark, control_line = line.partition(self._mark)
            if stream.number == 2 or not self.has_replied:
                self._stderr_lines.append(text[: 4 * MAX_QUOTED_CHARS])
            if text:
                self.on_line(self, stream.number, text if not mark else text + b"\n")
            if mark:
                self._on_control_line(stream.number, control_line)

    def _on_hello(self, version: bytes) -> None:
        """Called when ``remote_launcher`` has started: send the job, if its version is that of this program."""
        self.has_replied = True
        remote_version = sanitize_line(version.decode(errors="replace"), 20)
        if remote_version != __version__:
            self.give_up(f"ddplaunch {remote_version} there, {__version__} here")
            return
        self._write(self._job.line())
        self.on_hello(self)

    def _on_control_line(self, number: int, text: bytes) -> None:
        """Called with a line of ``remote_launcher``: its facts on stdout, the exit code of its launcher on stderr."""
        try:
            if number == 1 and text.strip() == CODE_REQUEST:
                self.has_code_sent = True
                self._write(CODE_BYTE)
                self._write(self._code)
            elif number == 1:
                self.facts = parse(text, HostFacts)
            else:
                self.code = int(text) & 255
        except (ProtocolError, ValueError):
            self.give_up("ddplaunch cannot read the reply of this host")
        else:
            if number == 1 and self.facts:
                self.on_facts()
