"""This machine looked at before its ranks start: by a child, for a dead file server or a wedged driver holds who asks.

What is looked at is in ``checkup``; the loop goes on meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

from ddplaunch.agent.checkup import CURRENT
from ddplaunch.control.messages import Check, Checked, Unable
from ddplaunch.loop import Loop, Timer
from ddplaunch.plan.command import START_DEADLINE, python_command
from ddplaunch.plan.plan import Plan
from ddplaunch.rank.processes import die_with_parent

DEADLINE = 5.0  # seconds for a step

CHECKUP = "from ddplaunch.agent.checkup import main; main()"


class CheckOfNode:
    """One look, begun as it is made; ``answer`` gets what it found, once, and ``show`` what it waits for."""

    def __init__(
        self,
        loop: Loop,
        order: Check,
        plan: Plan,
        environ: Mapping[str, str],
        log_dir: str | None,
        show: Callable[[str], None],
        answer: Callable[[Checked | Unable], None],
    ) -> None:
        """``environ``: that of the ranks, which says what GPUs they see; ``log_dir``: where the log is written."""
        self._loop, self._order, self._show, self._answer = loop, order, show, answer
        folders = {CURRENT: os.getcwd(), "TMPDIR": environ.get("TMPDIR") or "/tmp", "--log-dir": log_dir}
        asked = (
            order.gpu_memory_timeout,
            sorted({rank.device for rank in plan.local_ranks} - {"cpu"}),
            {f"{what} ({path})": path for what, path in folders.items() if path},
        )
        self._text = b""
        self._about = "the check"
        self._child = subprocess.Popen(
            [*python_command(sys.executable, CHECKUP), json.dumps(asked)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            preexec_fn=die_with_parent,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
        assert self._child.stdout
        self._pipe = self._child.stdout
        loop.watch(self._pipe.fileno(), self._readable)
        self._deadline = self._wait(START_DEADLINE)

    def close(self) -> None:
        """End the child; one that the kernel holds is left: nothing could end it."""
        if self._pipe.closed:
            return
        self._deadline.cancel()
        self._loop.forget(self._pipe.fileno())
        self._pipe.close()
        self._child.kill()
        try:
            self._child.wait(0.2)
        except subprocess.TimeoutExpired:
            pass

    def _readable(self) -> None:
        data = os.read(self._pipe.fileno(), 1 << 16)
        if not data:
            return self._end(Unable(f"the check of this machine broke off at {self._about}"))
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            kind, text, hint = json.loads(line)
            match kind:
                case "looking":
                    self._about = text
                case "waiting":
                    self._show(f"waiting for {text}")
                case "unfit":
                    return self._end(Unable(text, hint))
                case _:
                    return self._end(Checked(self._order.attempt))
        self._deadline.cancel()
        self._deadline = self._wait(DEADLINE)

    def _wait(self, seconds: float) -> Timer:
        what = f"{self._about} did not answer in {seconds:g} s"
        return self._loop.after(seconds, lambda: self._end(Unable(what, "look at `mount`, `nvidia-smi` and dmesg")))

    def _end(self, found: Checked | Unable) -> None:
        self.close()
        self._show("")
        self._answer(found)
