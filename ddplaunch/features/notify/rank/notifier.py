"""The process that runs the ``--notify`` commands, one at a time, and kills the processes that each leaves behind.

Run by path, as ``python notifier.py FD COMMANDS TIMEOUT``. Each line received on the socket FD is an event: it is the
stdin of every command, and when all are done one line is sent back: ``[[number, code, last line], …]`` of those that
failed. When the launcher's end of the socket closes, however it died, all descendants are killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from ddplaunch.system.processes import proc_utils
else:
    package_dir = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    spec = spec_from_file_location("proc_utils", os.path.join(package_dir, "system", "processes", "proc_utils.py"))
    proc_utils = module_from_spec(spec)
    spec.loader.exec_module(proc_utils)

GRACE_S = 1.0  # between SIGTERM and SIGKILL, for a command that takes too long
MAX_OUTPUT_BYTES = 2000  # of a command's last output
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may be sent to the whole process tree; this process ends when the launcher closes the socket."""


class Notifier:
    """Runs the ``--notify`` commands for each event that the launcher sends on the socket."""

    def __init__(self, launcher_socket: socket.socket, commands: list[list[str]], timeout_s: float) -> None:
        """``commands``: path and arguments of each; ``timeout_s``: for one command."""
        self._socket, self._commands, self._timeout_s = launcher_socket, commands, timeout_s
        self._wakeup_fd, _ = proc_utils.open_wakeup_pipe()
        signal.signal(signal.SIGCHLD, proc_utils.on_signal_noop)

    def run(self) -> NoReturn:
        pending = b""
        while True:
            event, found, pending = pending.partition(b"\n")
            if found:
                failed = [
                    [number, *end] for number in range(len(self._commands)) if (end := self._run_command(number, event))
                ]
                self._socket.sendall(json.dumps(failed).encode() + b"\n")
                continue
            pending = event
            if not (data := self._socket.recv(1 << 16)):
                kill_descendants_and_exit()
            pending += data

    def _run_command(self, number: int, event: bytes) -> tuple[int | None, str] | None:
        """Run a command; if it failed, return its exit code (None: timeout) and its last line of output."""
        path, *words = self._commands[number]
        read, write = os.pipe()
        try:
            pid = self._spawn(path, words, event, write)
        except OSError as error:
            os.close(read)
            return 126, error.strerror or "cannot be started"
        finally:
            os.close(write)
        os.set_blocking(read, False)
        tail, limits = b"", [time.monotonic() + self._timeout_s, time.monotonic() + self._timeout_s + GRACE_S]
        late, watched = False, [self._socket.fileno(), self._wakeup_fd, read]
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            ready, _, _ = select.select(watched, (), (), max(0.0, limits[0] - time.monotonic()))
            if self._socket.fileno() in ready:  # only the end of file arrives while a command runs
                kill_descendants_and_exit()
            if self._wakeup_fd in ready:
                os.read(self._wakeup_fd, 4096)
            if read in ready:
                if data := os.read(read, 1 << 16):
                    tail = (tail + data)[-MAX_OUTPUT_BYTES:]
                else:
                    watched.remove(read)
            if time.monotonic() >= limits[0]:
                if late:
                    ended = pid, signal.SIGKILL  # all descendants are killed below
                    break
                late = True
                limits.pop(0)
                for each in proc_utils.list_descendants(os.getpid()):
                    proc_utils.send_signal(each, signal.SIGTERM)
        proc_utils.kill_descendants(os.getpid())
        try:
            while data := os.read(read, 1 << 16):
                tail = (tail + data)[-MAX_OUTPUT_BYTES:]
        except BlockingIOError:  # a process that cannot be killed holds the pipe
            pass
        os.close(read)
        code = os.waitstatus_to_exitcode(ended[1])
        lines = tail.decode(errors="replace").strip().splitlines()
        return (None if late else code, lines[-1].strip() if lines else "") if late or code else None

    def _spawn(self, path: str, words: list[str], event: bytes, output: int) -> int:
        """Start a command with the event on its stdin; raises OSError if it cannot be started."""
        stdin, stdin_writer = os.pipe()
        os.set_blocking(stdin_writer, False)
        try:
            if os.write(stdin_writer, event + b"\n") <= len(event):
                raise OSError(0, "the event is too large for a pipe")
            os.close(stdin_writer)
            stdin_writer = -1
            return os.posix_spawn(
                path,
                words,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, stdin, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=[*IGNORED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
            )
        finally:
            os.close(stdin)
            if stdin_writer >= 0:
                os.close(stdin_writer)


def kill_descendants_and_exit() -> NoReturn:
    proc_utils.kill_descendants(os.getpid())
    os._exit(0)


if __name__ == "__main__":
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    proc_utils.adopt_orphans()
    launcher = socket.socket(fileno=int(sys.argv[1]))
    launcher.set_inheritable(False)
    try:
        Notifier(launcher, json.loads(sys.argv[2]), float(sys.argv[3])).run()
    except OSError:  # the launcher has ended
        kill_descendants_and_exit()
