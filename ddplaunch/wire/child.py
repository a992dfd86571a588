"""A child that is asked something which may hang: it answers on its stdout, and the loop goes on meanwhile."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from ddplaunch.loop import Callback, Loop, Timer


class AskedChild:
    """One child, from its start until it is closed."""

    def __init__(
        self,
        loop: Loop,
        command: Sequence[str],
        heard: Callable[[bytes], None],
        late: Callback,
        *,
        deadline: float | None,
        asks: bool = False,
        errors: bool = False,
        environ: Mapping[str, str] | None = None,
        begun: Callback | None = None,
    ) -> None:
        """``heard`` gets what it prints as it comes, b"" at its end; ``late`` is called when a deadline has passed.

        ``asks``: it reads questions on its stdin. ``errors``: what it says on stderr is heard too. ``begun`` is called
        in the child.

        Raises:
            OSError: it cannot be started.
        """
        self._loop, self._heard, self._late = loop, heard, late
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if asks else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
            bufsize=0,
            env=environ,
            preexec_fn=begun,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
        assert self._child.stdout
        self._pipe = self._child.stdout
        self._timer: Timer | None = None
        loop.watch(self._pipe.fileno(), self._readable)
        self.wait(deadline)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def awaited(self) -> bool:
        """Whether a deadline runs."""
        return self._timer is not None

    def ask(self, question: bytes) -> None:
        assert self._child.stdin
        try:
            self._child.stdin.write(question)
        except OSError:  # it has ended, as is read in a moment
            pass

    def wait(self, deadline: float | None) -> None:
        """Set a new deadline, in seconds from now; None for none."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if deadline is None else self._loop.after(deadline, self._late)

    def close(self) -> None:
        """End it; one that the kernel holds is left: nothing could end it."""
        if self._pipe.closed:
            return
        self.wait(None)
        self._loop.forget(self._pipe.fileno())
        for pipe in filter(None, (self._child.stdin, self._pipe)):
            pipe.close()
        self._child.kill()
        try:
            self._child.wait(0.2)
        except subprocess.TimeoutExpired:
            pass

    def _readable(self) -> None:
        self._heard(os.read(self._pipe.fileno(), 1 << 16))
