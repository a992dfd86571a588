"""A job for those who submit with submitit: one task a node, each a launcher with its ranks.

    import submitit
    from ddplaunch.submit.submitit import Task

    executor = submitit.AutoExecutor(folder="runs/%j")
    executor.update_parameters(nodes=2, tasks_per_node=1, gpus_per_node=8, timeout_min=240)
    job = executor.submit(Task("train.py", nproc=8, args=["--lr", "0.1"]))

When the job must make room, or its time is up, submitit requeues it by its own rules once the ranks have made a
checkpoint; the program goes on from that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddplaunch.errors import EXIT_PREEMPTED, LaunchError
from ddplaunch.plan.command import python_command
from ddplaunch.rank.processes import die_with_parent

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

REQUEUE_PATIENCE = 60.0
"""Seconds that a task other than the first waits, when its ranks have made room, for the end that a requeue brings."""


@dataclass
class Task:
    """A callable with ``checkpoint``, which submitit pickles, calls on each node and requeues.

    Attributes:
        target: as for ``ddplaunch run``: a script, ``train.py:main``, ``package.module:function``.
        nproc: ranks on each node; "auto" is a rank for each GPU.
        args: the target's own.
        options: further ones of ``ddplaunch run``.
        grace: seconds for a checkpoint; 30 more are for the end of the ranks, so keep it well below the executor's
            ``slurm_signal_delay_s`` (90 by default).
    """

    target: str
    nproc: int | str = "auto"
    args: Sequence[str] = ()
    options: Sequence[str] = ()
    grace: float = 45.0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self) -> None:
        """Run this node's share to its end.

        Raises:
            LaunchError: the job failed; the log has the report.
        """
        words = [*python_command(sys.executable), "run", "--nproc", str(self.nproc)]
        words += ["--preempt-signal", _warning(), "--preempt-grace", f"{self.grace:g}"]
        words += [*self.options, self.target, *(("--", *self.args) if self.args else ())]
        # It must not outlive us: whoever cancels a job of submitit's kills us alone.
        self._process = subprocess.Popen(words, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
        code = self._end()
        if code == EXIT_PREEMPTED:  # submitit's signal may yet come here; a result would say that the job is over
            time.sleep(REQUEUE_PATIENCE)
        if code:
            raise LaunchError(f"ddplaunch run {self.target} ended with exit code {code}", "its report is in the log")

    def checkpoint(self) -> DelayedSubmission:
        """Have the ranks make room, and say how to go on; called on the first node, in submitit's signal handler."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(getattr(signal, f"SIG{_warning()}"))  # not every site's Slurm signals children
            self._end()
        return DelayedSubmission(replace(self))

    def _end(self) -> int:
        """Wait for the launcher; return its exit code. In Popen.wait() a signal handler would wait for its lock."""
        assert self._process is not None
        if self._process.returncode is None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return self._process.wait()


def _warning() -> str:
    """The signal by which submitit has the scheduler warn (submitit/core/job_environment.py)."""
    return os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
