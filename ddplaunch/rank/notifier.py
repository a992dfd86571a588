"""The process that runs the commands of ``--notify``, one at a time, and ends whatever each leaves.

Run from its path, as ``python notifier.py FD COMMANDS PATIENCE``. Each line that comes on the socket FD is an event: it
is the standard input of every command, and a line goes back when all are done: ``[[number, code, last line], …]`` of
those that failed. When the launcher's end of the socket closes, however it died, everything below is killed.
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

    from ddplaunch.rank import processes
else:
    spec = spec_from_file_location(
        "processes", os.path.join(os.path.dirname(os.path.abspath(__file__)), "processes.py")
    )
    processes = module_from_spec(spec)
    spec.loader.exec_module(processes)

GRACE_S = 1.0  # seconds between SIGTERM and SIGKILL, of a command that takes too long
MAX_OUTPUT_BYTES = 2000  # bytes of what a command printed last
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a whole tree of processes may be sent; the launcher says when this is over."""


class Notifier:
    def __init__(self, launcher_socket: socket.socket, commands: list[list[str]], timeout_s: float) -> None:
        """``commands``: the path and the words of each; ``timeout_s``: seconds that it has."""
        self._line, self._commands, self._patience = launcher_socket, commands, timeout_s
        self._woken, wake = os.pipe()  # of SIGCHLD
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> NoReturn:
        pending = b""
        while True:
            event, found, pending = pending.partition(b"\n")
            if found:
                failed = [
                    [number, *end] for number in range(len(self._commands)) if (end := self._run_command(number, event))
                ]
                self._line.sendall(json.dumps(failed).encode() + b"\n")
                continue
            pending = event
            if not (data := self._line.recv(1 << 16)):
                exit_cleanly()
            pending += data

    def _run_command(self, number: int, event: bytes) -> tuple[int | None, str] | None:
        """Run a command to its end; return how it failed: its exit code (None: it took too long), its last line."""
        path, *words = self._commands[number]
        read, write = os.pipe()
        try:
            pid = self._spawn(path, words, event, write)
        except OSError as error:
            os.close(read)
            return 126, error.strerror or "it cannot be started"
        finally:
            os.close(write)
        os.set_blocking(read, False)
        tail, limits = b"", [time.monotonic() + self._patience, time.monotonic() + self._patience + GRACE_S]
        late, watched = False, [self._line.fileno(), self._woken, read]
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            ready, _, _ = select.select(watched, (), (), max(0.0, limits[0] - time.monotonic()))
            if self._line.fileno() in ready:  # which says nothing while we are at work
                exit_cleanly()
            if self._woken in ready:
                os.read(self._woken, 4096)
            if read in ready:
                if data := os.read(read, 1 << 16):
                    tail = (tail + data)[-MAX_OUTPUT_BYTES:]
                else:
                    watched.remove(read)
            if time.monotonic() >= limits[0]:
                if late:
                    processes.kill_descendants(os.getpid())
                    ended = pid, signal.SIGKILL
                    break
                late = True
                limits.pop(0)
                for each in processes.list_descendants(os.getpid()):
                    processes.send_signal(each, signal.SIGTERM)
        processes.kill_descendants(os.getpid())
        try:
            while data := os.read(read, 1 << 16):
                tail = (tail + data)[-MAX_OUTPUT_BYTES:]
        except BlockingIOError:  # a process that cannot be killed has it
            pass
        os.close(read)
        code = os.waitstatus_to_exitcode(ended[1])
        lines = tail.decode(errors="replace").strip().splitlines()
        return (None if late else code, lines[-1].strip() if lines else "") if late or code else None

    def _spawn(self, path: str, words: list[str], event: bytes, output: int) -> int:
        given, give = os.pipe()
        os.set_blocking(give, False)
        try:
            if os.write(give, event + b"\n") <= len(event):
                raise OSError(0, "there is no room for the event in a pipe")
            os.close(give)
            give = -1
            return os.posix_spawn(
                path,
                words,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, given, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=[*IGNORED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
            )
        finally:
            os.close(given)
            if give >= 0:
                os.close(give)


def exit_cleanly() -> NoReturn:
    processes.kill_descendants(os.getpid())
    os._exit(0)


if __name__ == "__main__":
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    processes.adopt_orphans()
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    try:
        Notifier(line, json.loads(sys.argv[2]), float(sys.argv[3])).run()
    except OSError:  # the launcher has gone
        exit_cleanly()
