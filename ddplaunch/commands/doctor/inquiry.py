"""A question that may never be answered, put to a child: a wedged driver or a dead file server holds who asks it."""

from __future__ import annotations

import subprocess
import sys
import time

from ddplaunch.commands.doctor.lines import Lines
from ddplaunch.plan.command import START_DEADLINE, python_command
from ddplaunch.rank.processes import die_with_parent

DEADLINE = 5.0  # seconds for an answer
TORCH_DEADLINE = 90.0  # seconds for torch to be imported

ASKED = "from ddplaunch.commands.doctor.subjects import main; main()"


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

    def answer(self) -> bytes | None:
        """Wait for the answer and return it; b"" if the child failed, None if it did not answer in time.

        A child that the kernel holds is left: nothing could end it.
        """
        assert self._child.stdout
        with self._child.stdout as pipe:
            lines = Lines(pipe)
            first = lines.next(self._began + START_DEADLINE)  # it says that it has begun
            answer = lines.next(time.monotonic() + self._deadline) if first else first
        self._child.kill()
        try:
            self._child.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        return answer
