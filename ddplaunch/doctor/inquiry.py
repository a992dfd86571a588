"""A question that may never be answered, put to a child: a wedged driver or a dead file server holds who asks it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from ddplaunch.plan.command import python_command
from ddplaunch.rank.processes import die_with_parent

DEADLINE = 5.0  # seconds for an answer
BEGIN_DEADLINE = 60.0  # seconds for the interpreter to start: it may be on a slow file server
TORCH_DEADLINE = 90.0  # seconds for torch to be imported

ASKED = "from ddplaunch.doctor.subjects import main; main()"


class Inquiry:
    """One child with one question, begun as it is made."""

    def __init__(self, *words: str, deadline: float = DEADLINE) -> None:
        """``words``: the subject and its arguments, for ``subjects``."""
        self._deadline = deadline
        self._began = time.monotonic()
        self._child = subprocess.Popen(
            [*python_command(sys.executable, ASKED), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        self._text = b""

    def answer(self) -> bytes | None:
        """Wait for the answer and return it; b"" if the child failed, None if it did not answer in time.

        A child that the kernel holds is left: nothing could end it.
        """
        assert self._child.stdout
        with self._child.stdout as pipe:
            first = self._line(pipe.fileno(), self._began + BEGIN_DEADLINE)  # it says that it has begun
            answer = self._line(pipe.fileno(), time.monotonic() + self._deadline) if first else first
        self._child.kill()
        try:
            self._child.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        return answer

    def _line(self, fd: int, until: float) -> bytes | None:
        """Read a line; b"" at the end, None if it does not come."""
        while b"\n" not in self._text:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                return b""
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        return line
