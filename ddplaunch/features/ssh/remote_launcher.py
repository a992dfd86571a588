"""The program that ssh runs on each host: checks that the job can run there, then starts and supervises the launcher.

It prints ``HELLO``, then reads stdin: one line of JSON, a ``HostJob``, and after that single bytes. At the end of
stdin, or after the heartbeat timeout without a byte, it stops the launcher, whose ranks get the grace. Nothing else
would: without a terminal sshd kills nothing when a connection closes, and it does not notice a silent network
(ClientAliveInterval of sshd_config(5) is 0 by default).
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
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.base.errors import (
    EXIT_SIGNAL,
    EXIT_SOFTWARE,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    LaunchError,
    UsageError,
    escape_control_chars,
)
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.inherited_signals import AT_START
from ddplaunch.base.types import as_dict
from ddplaunch.cli import launcher_command
from ddplaunch.system.code_version import CODE_VARIABLE
from ddplaunch.system.network.addresses import machine_id, resolve
from ddplaunch.system.processes import proc_utils
from ddplaunch.system.processes.proc_utils import FORWARDED_SIGNALS
from ddplaunch.system.target.target import find_target
from ddplaunch.system.target.versions import Versions, read_versions

_OUTPUT_MARK = b"\x1eddplaunch "

HELLO = _OUTPUT_MARK + b"here "
"""Prefix of the first line that this program prints. Nothing is sent to it before: a login shell might read that."""


def output_mark(nonce: str) -> bytes:
    """Return the mark before this program's lines among the ranks' output; no rank knows the nonce to forge it."""
    return _OUTPUT_MARK + nonce.encode() + b" "


_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class HostCode(Struct, frozen=True):
    """The code that the job runs; the host requests it if it has no copy."""

    sha: str
    name: str  # of the folder of the copy
    size: Annotated[int, msgspec.Meta(ge=0)]  # of the archive, in bytes
    folder: str  # below the copy: where the job runs
    variable: str  # the value of CODE_VARIABLE for the launcher


class HostJob(Struct, frozen=True):
    """What one host checks and runs; times in seconds."""

    nonce: str  # a secret of this job, see `output_mark`
    environ: Mapping[str, str]  # variables for the launcher, besides those of the login
    cwd: str  # where the job runs if it has no ``code``
    target: str  # as the user typed it
    module: bool  # how to read the target, as ``no_python``
    no_python: bool
    log_dir: str | None
    address: str  # node 0's, which must resolve here; "" where the job has one node
    ports: tuple[_Port, ...]  # must be free here
    argv: tuple[str, ...]  # the launcher's, from `run` on
    preempt_signal: int | None  # the number of the preemption signal; None for none
    heartbeat: Annotated[float, msgspec.Meta(gt=0)]
    grace: Annotated[float, msgspec.Meta(ge=0)]
    code: HostCode | None = None

    def line(self) -> bytes:
        """Encode as one line of JSON; bytes of paths that are not UTF-8 are preserved."""
        return json.dumps(as_dict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> HostJob:
        """Decode the output of ``line``. Raises ValueError if it is not JSON, or a field is missing or wrong."""
        return msgspec.convert(json.loads(line), cls)


class HostFacts(Struct, frozen=True):
    """A host's report before the job starts."""

    problems: tuple[str, ...]
    versions: Versions
    machine: str = ""  # equal for two names of one machine; "" if unknown


CODE_REQUEST = b"send the code"
"""The only other line on stdout before the job starts, with the mark; CODE_BYTE and the archive follow on stdin."""

GO_BYTE, GO_AT_ONCE_BYTE, HEARTBEAT_BYTE, INSPECT_BYTE, CODE_BYTE = b"G", b"g", b".", b"?", b"C"
SIGNAL_BYTES: Mapping[bytes, int] = {
    b"I": signal.SIGINT,
    b"T": signal.SIGTERM,
    b"H": signal.SIGHUP,
    b"Q": signal.SIGQUIT,
    **{bytes([0x80 + number]): number for number in FORWARDED_SIGNALS},
}
"""The bytes after the line of JSON: G starts the launcher; g starts it too, and tells it that no spare is left to wait
for; "." is a heartbeat; "?" inspects the ranks; C precedes the code; the others are signals for the launcher.
"""

START_TIMEOUT_S = 120.0  # for the line, and then for GO_BYTE, which comes when all hosts have replied
KILL_DELAY_S = 5.0  # after the grace, for the launcher to exit
ZYGOTE_EXIT_TIMEOUT_S = 1.0  # for the zygote of a killed launcher to end its ranks and remove their files


def main() -> int:
    """Run one job on this host; return the launcher's exit code."""
    try:
        return _run_job()
    except Exception as error:  # the machine at the other end of ssh shows this line
        os.write(2, f"a bug in ddplaunch on this host: {type(error).__name__}: {error}\n".encode(errors="replace"))
        return EXIT_SOFTWARE


def _run_job() -> int:
    AT_START.take()
    proc_utils.die_with_parent(signal.SIGTERM)
    # On a line of its own, whatever the login shell printed before, such as a progress bar.
    os.write(1, b"\n" + HELLO + __version__.encode() + b"\n")
    line = _read_line()
    while line is not None and not line.startswith(b"{"):  # the command is for a shell that replaced the login shell
        line = _read_line()
    if line is None:
        return EXIT_UNAVAILABLE
    job = HostJob.read(line)
    os.environ.pop("PYTHONSAFEPATH", None)  # set by ssh_command, so that Python took no module from the home folder
    os.environ.update(job.environ)
    try:
        if (code := job.code) is not None:
            job = replace(job, cwd=os.path.normpath(os.path.join(_copy_code(job, code), code.folder)))
            os.environ[CODE_VARIABLE] = code.variable
        problems = [*_find_problems(job)]
    except EOFError:
        return EXIT_UNAVAILABLE
    except LaunchError as error:
        problems = [error.message]
    facts = HostFacts(tuple(map(escape_control_chars, problems)), read_versions(torch=not job.no_python), machine_id())
    os.write(1, output_mark(job.nonce) + msgspec.json.encode(facts) + b"\n")
    byte = _read_command()
    if byte == GO_AT_ONCE_BYTE:
        job = replace(job, argv=(job.argv[0], "--join-window", "0", *job.argv[1:]))
    elif byte != GO_BYTE:
        return EXIT_USAGE if facts.problems else EXIT_UNAVAILABLE
    return LauncherSupervisor(job).run()


def _read_byte() -> bytes:
    """Read a byte; b"" at the end of stdin, or after START_TIMEOUT_S."""
    return os.read(0, 1) if select.select([0], [], [], START_TIMEOUT_S)[0] else b""


def _read_command() -> bytes:
    """Read the next byte that is not a heartbeat; b"" as ``_read_byte``."""
    byte = HEARTBEAT_BYTE
    while byte == HEARTBEAT_BYTE:
        byte = _read_byte()
    return byte


def _read_line() -> bytes | None:
    line = b""
    while not line.endswith(b"\n"):
        byte = _read_byte()
        if not byte:
            return None
        line += byte
    return line


def _copy_code(job: HostJob, code: HostCode) -> str:
    """Return the folder of a copy of the code, which is requested if there is none here.

    Raises EOFError if it does not come, and LaunchError if it cannot be written.
    """
    from ddplaunch.features.code import copies

    parent = copies.cache_folder()
    folder = copies.find_copy(parent, code.name)
    if folder is None:
        os.write(1, output_mark(job.nonce) + CODE_REQUEST + b"\n")
        if _read_command() != CODE_BYTE:
            raise EOFError
        data = bytearray()
        while len(data) < code.size:
            if not select.select([0], [], [], START_TIMEOUT_S)[0] or not (
                piece := os.read(0, min(1 << 20, code.size - len(data)))
            ):
                raise EOFError
            data += piece
        folder = copies.make_copy(parent, code.sha, code.name, bytes(data))
        copies.remove_unused(parent)
    copies.hold_copy(folder)
    return folder


def _find_problems(job: HostJob) -> Iterator[str]:
    """Yield why the job cannot run on this host."""
    try:
        os.chdir(job.cwd)
    except OSError as error:
        yield f"{job.cwd}: {error.strerror}"
    else:
        if job.log_dir is not None:
            yield from _log_dir_problems(job.log_dir)
        try:
            find_target(job.target, (), as_module=job.module, as_program=job.no_python, cwd=job.cwd)
        except UsageError as error:
            yield error.message
    if job.address:
        try:
            resolve(job.address)
        except OSError:
            yield f"--master-addr {job.address} does not resolve on this host"
    for port in job.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                yield f"port {port}: {error.strerror}"


def _log_dir_problems(log_dir: str) -> Iterator[str]:
    """Yield why the log folder of this host's ranks cannot be created."""
    there = os.path.abspath(log_dir)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        yield f"--log-dir {log_dir}: {there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"--log-dir {log_dir}: cannot write to {there}"


class LauncherSupervisor:
    """Runs one launcher, and stops it when the connection to the machine that started the job is lost."""

    def __init__(self, job: HostJob) -> None:
        self._job = job
        self._loop = EventLoop()
        self._disconnected = self._killed = False

    def run(self) -> int:
        """Run the launcher to its end, send its exit code, and return it."""
        proc_utils.adopt_orphans()
        caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        self._loop.add_signal_handlers(caught, self._on_signal)
        self._loop.add_signal_handlers(FORWARDED_SIGNALS, lambda number: None)  # sent to the launcher, ignored here
        guard_pid = os.getpid()

        def before_exec() -> None:
            proc_utils.die_with_parent(signal.SIGTERM)
            if os.getppid() != guard_pid:
                os._exit(EXIT_UNAVAILABLE)
            if self._job.preempt_signal is not None:  # until the launcher has its handler
                signal.pthread_sigmask(signal.SIG_BLOCK, [self._job.preempt_signal])

        self._launcher = subprocess.Popen(
            [*launcher_command(sys.executable), *self._job.argv],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=before_exec,
        )
        self._heartbeat_timer = self._loop.call_later(self._job.heartbeat, self._on_disconnect)
        self._loop.watch_fd(0, self._on_stdin)
        while self._launcher.poll() is None and not self._killed:
            self._loop.run_once()
        code = self._launcher.returncode
        self._kill_remaining()
        code = EXIT_UNAVAILABLE if code is None else EXIT_SIGNAL - code if code < 0 else code
        if not self._disconnected:
            os.write(2, output_mark(self._job.nonce) + str(code).encode() + b"\n")
        return code

    def _kill_remaining(self) -> None:
        """Kill all descendants; first give the zygote of a killed launcher a moment to end ranks and remove files."""
        self._loop.unwatch_fd(0)
        if self._launcher.returncode is None:
            self._launcher.kill()
        deadline = time.monotonic() + ZYGOTE_EXIT_TIMEOUT_S
        self._loop.call_later(ZYGOTE_EXIT_TIMEOUT_S, lambda: None)
        while proc_utils.list_descendants(os.getpid()) and time.monotonic() < deadline:
            self._loop.run_once()
        proc_utils.kill_descendants(os.getpid())

    def _on_stdin(self) -> None:
        data = os.read(0, 4096)
        if not data:
            self._on_disconnect()
            return
        self._heartbeat_timer.cancel()
        self._heartbeat_timer = self._loop.call_later(self._job.heartbeat, self._on_disconnect)
        if INSPECT_BYTE in data:
            words = [*launcher_command(sys.executable), "stacks", str(self._launcher.pid)]
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        for byte in data:
            number = SIGNAL_BYTES.get(bytes([byte]))
            if number is not None:
                proc_utils.send_signal(self._launcher.pid, number)

    def _on_signal(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._on_disconnect()

    def _on_disconnect(self) -> None:
        """Called when the connection is lost: stop the launcher."""
        if self._disconnected:
            return
        self._disconnected = True
        self._loop.unwatch_fd(0)
        self._heartbeat_timer.cancel()
        proc_utils.send_signal(self._launcher.pid, signal.SIGTERM)
        self._loop.call_later(self._job.grace + KILL_DELAY_S, self._kill)

    def _kill(self) -> None:
        self._killed = True
