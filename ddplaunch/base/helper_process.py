"""Helper processes, which make calls that may hang, so that the event loop does not block; they reply on stdout."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from ddplaunch.base.event_loop import Callback, EventLoop, Timer
from ddplaunch.base.safe_files import current_folder


class HelperProcess:
    """A child process that makes calls which may hang; the event loop reads its output and enforces a timeout."""

    def __init__(
        self,
        loop: EventLoop,
        command: Sequence[str],
        on_output: Callable[[bytes], None],
        on_timeout: Callback,
        *,
        deadline: float | None,
        pipe_stdin: bool = False,
        merge_stderr: bool = False,
        environ: Mapping[str, str] | None = None,
        preexec_fn: Callback | None = None,
    ) -> None:
        """Start it; ``on_output`` gets its stdout, at the end b""; ``on_timeout`` is called after ``deadline`` seconds.

        ``pipe_stdin``: ``write`` sends data to its stdin. ``merge_stderr``: ``on_output`` gets its stderr too.
        ``preexec_fn`` is called in the child.
        Raises OSError if it cannot be started.
        """
        self._loop, self._on_output, self._on_timeout = loop, on_output, on_timeout
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if pipe_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge_stderr else subprocess.DEVNULL,
            bufsize=0,
            env=environ,
            cwd=None if os.path.isdir(current_folder()) else "/",  # if it was removed, Python would not start there
            preexec_fn=preexec_fn,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )
        assert self._child.stdout
        self._pipe = self._child.stdout
        self._timer: Timer | None = None
        loop.watch_fd(self._pipe.fileno(), self._on_readable)
        self.set_deadline(deadline)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_timeout(self) -> bool:
        """Whether a timeout is set."""
        return self._timer is not None

    def write(self, data: bytes) -> None:
        assert self._child.stdin
        try:
            self._child.stdin.write(data)
        except OSError:  # the process has ended: the loop reads the end of its output next
            pass

    def close_stdin(self) -> None:
        """Close the stdin pipe of the helper process."""
        assert self._child.stdin
        self._child.stdin.close()

    def set_deadline(self, deadline: float | None) -> None:
        """Set a new timeout in seconds; None for none."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if deadline is None else self._loop.call_later(deadline, self._on_timeout)

    def close(self) -> None:
        """Kill the process and close its pipes; do not wait for a process in uninterruptible sleep (state D)."""
        if self._pipe.closed:
            return
        self.set_deadline(None)
        self._loop.unwatch_fd(self._pipe.fileno())
        for pipe in filter(None, (self._child.stdin, self._pipe)):
            pipe.close()
        self._child.kill()
        try:
            self._child.wait(0.2)
        except subprocess.TimeoutExpired:
            pass

    def _on_readable(self) -> None:
        self._on_output(os.read(self._pipe.fileno(), 1 << 16))
