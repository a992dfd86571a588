"""submitit integration: a ``Task`` that runs one launcher with its ranks on each node.

    import submitit
    from ddplaunch.submitit import Task

    executor = submitit.AutoExecutor(folder="runs/%j")
    executor.update_parameters(nodes=2, tasks_per_node=1, gpus_per_node=8, timeout_min=240)
    job = executor.submit(Task("train.py", nproc=8, args=["--lr", "0.1"]))

When the job is preempted or its time is up, the ranks make a checkpoint. Then submitit requeues the job by its own
rules, and the program goes on from the checkpoint.
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

from ddplaunch.base.errors import EXIT_PREEMPTED, LaunchError
from ddplaunch.system.plan.launch_command import python_command
from ddplaunch.system.processes.proc_utils import die_with_parent

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

REQUEUE_TIMEOUT_S = 60.0
"""After a preemption a task waits this long for the requeue to end it; the first task does not wait."""


class _FinishedError(Exception):
    """The ranks have finished in spite of the preemption signal: there is nothing to requeue."""


@dataclass
class Task:
    """A callable with ``checkpoint``, which submitit pickles, calls on each node and requeues.

    Attributes:
        target: as for ``ddplaunch run``: a script, ``train.py:main``, ``package.module:function``.
        nproc: ranks on each node, as for ``ddplaunch run``. None with several tasks on a node: each task is one rank.
        args: the target's arguments.
        options: other options of ``ddplaunch run``.
        grace: seconds for a checkpoint. Stopping the ranks takes up to 30 more, so keep it well below the executor's
            ``slurm_signal_delay_s`` (90 by default).
    """

    target: str
    nproc: int | str | None = None
    args: Sequence[str] = ()
    options: Sequence[str] = ()
    grace: float = 45.0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self) -> None:
        """Run this node's ranks until they end.

        Raises LaunchError if the job failed; the report is in the log.
        """
        # Not cli.launcher_command: importing that package takes longer than all that this module needs.
        words = [*python_command(sys.executable, "from ddplaunch.cli import main; main()"), "run"]
        words += [] if self.nproc is None else ["--nproc", str(self.nproc)]
        words += ["--preempt-signal", _preempt_signal_name(), "--preempt-grace", f"{self.grace:g}"]
        words += [*self.options, self.target, *(("--", *self.args) if self.args else ())]
        # The launcher must not outlive this process: to cancel a job submitit kills only this one.
        self._process = subprocess.Popen(words, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
        try:
            code = self._wait_for_launcher()
        except _FinishedError:
            code = 0
        if code == EXIT_PREEMPTED:  # submitit's signal may still come; a result would mean that the job is over
            time.sleep(REQUEUE_TIMEOUT_S)
        if code:
            raise LaunchError(f"ddplaunch run {self.target} ended with exit code {code}", "its report is in the log")

    def checkpoint(self) -> DelayedSubmission:
        """Preempt the ranks, and return the resubmission; runs on the first node, in submitit's signal handler."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            # on some sites Slurm signals only this process
            self._process.send_signal(getattr(signal, f"SIG{_preempt_signal_name()}"))
            if self._wait_for_launcher() == 0:
                raise _FinishedError  # ends the wait of ``__call__``, which this handler has interrupted
        return DelayedSubmission(replace(self))

    def _wait_for_launcher(self) -> int:
        """Wait for the launcher, and return its exit code. Unlike Popen.wait(), a signal handler may call it again."""
        assert self._process is not None
        if self._process.returncode is None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return self._process.wait()


def _preempt_signal_name() -> str:
    """The warning signal that submitit asks the scheduler for (its core/job_environment.py)."""
    return os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
