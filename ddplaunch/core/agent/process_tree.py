"""The launcher's process tree: the zygote, and which other descendants belong to the job.

A shell that became the launcher by ``exec`` may have left it children: unrelated processes. While a zygote lives, all
descendants of its ranks are below it. If it is killed, the launcher adopts them, and unrelated orphans too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.inherited_signals import AT_START
from ddplaunch.base.safe_files import current_folder
from ddplaunch.core.agent.run_temp_dir import RunTempDir
from ddplaunch.core.agent.zygote_client import ZygoteClient, ZygoteEventHandler, make_zygote_config
from ddplaunch.core.agent.zygote_process import ZygoteSource, ZygoteStartSettings
from ddplaunch.core.failures import describe_exit
from ddplaunch.core.zygote_plan import ZygoteSettings
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.processes import child_processes, proc_utils

LAUNCHER_VARIABLES = frozenset(
    {"DDPLAUNCH_TOKEN", "DDPLAUNCH_EXIT_FILE", "DDPLAUNCH_REQUEUE_FILE", "DDPLAUNCH_OVER_SSH", "DDPLAUNCH_CODE"}
    | {"DDPLAUNCH_LOCAL_JOB", "DDPLAUNCH_START_FILE"}
)
"""Environment variables of the launcher that ranks do not get."""

STOPPED_S = 1.0  # seconds before a stop is reported: a scheduler resumes the processes of a job one by one


def signals_to_block(preempt_signal: int | None) -> list[int]:
    """Return the preemption signal, unless it is SIGTERM or SIGHUP: any process of the job may get it."""
    return [] if preempt_signal in (None, signal.SIGTERM, signal.SIGHUP) else [preempt_signal]


def make_zygote_start_settings(
    settings: ZygoteSettings, environ: Mapping[str, str], plan: Plan, remove: Sequence[str] = ()
) -> ZygoteStartSettings:
    """Return config and environment of a plan's zygotes; ``environ``: the launcher's variables for its descendants."""
    config = make_zygote_config(
        settings.plan,
        first=plan.target.sys_path_0 or current_folder(),
        remove=remove,
        shielded=signals_to_block(settings.preempt_signal),
        blocked=AT_START.blocked - {settings.preempt_signal},  # it may have come before the launcher had a handler
    )
    return ZygoteStartSettings(config, {**environ, **plan.shared_environment}, " ".join(plan.target.argv))


class ProcessTree:
    """Owns one zygote at a time, and distinguishes processes of the job from unrelated children of the launcher."""

    def __init__(
        self,
        loop: EventLoop,
        settings: ZygoteSettings,
        environ: Mapping[str, str],
        run_id: str,
        zygote_source: ZygoteSource | None,
    ) -> None:
        """``environ``: variables for all descendants; ``zygote_source`` provides zygotes, if it can."""
        self._loop, self._settings, self.zygote_source = loop, settings, zygote_source
        self._listener: ZygoteEventHandler | None = None
        self._show_note: Callable[[str], object] | None = None
        early = zygote_source.child_pid if zygote_source else None
        self.unrelated_pids = frozenset(proc_utils.list_children()) - {early}  # of a shell that became the launcher
        self._sessions: set[int] = set()
        self.environ = environ
        self.temp_dir = RunTempDir(f"ddplaunch-{run_id}")  # ranks have its path in their environment
        self.zygote: ZygoteClient | None = None
        self._stopped = 0  # the pid of a zygote whose stop was reported
        self._stuck: list[str] = []  # descendants of the last zygote that could not be killed
        self.other_zygotes: set[int] = set()  # zygotes of features: their descendants do not end with the ranks
        loop.add_signal_handlers((signal.SIGCHLD,), self._on_sigchld)

    def attach(self, listener: ZygoteEventHandler, show_note: Callable[[str], object]) -> None:
        """Set the listener of all zygotes, and what shows a message to the user; before the loop runs."""
        self._listener, self._show_note = listener, show_note
        if self.zygote:
            self.zygote.listener = listener

    def ensure_zygote(self, plan: Plan) -> ZygoteClient:
        """Return the zygote, started if there is none.

        Raises ResourceLimitError if a limit on processes or memory is reached.
        """
        if self.zygote is None:
            remove = [self.temp_dir.path] if self.temp_dir.path else ()
            start = make_zygote_start_settings(self._settings, self.environ, plan, remove)
            self.zygote = ZygoteClient(self._loop, start, listener=self._listener, source=self.zygote_source)
        return self.zygote

    def _on_sigchld(self, number: int) -> None:
        """Called on SIGCHLD: a child has ended, or a signal has suspended or continued it."""
        if self._stopped_zygote_pid() != self._stopped:
            self._loop.call_later(STOPPED_S, self.report_stopped_zygote)

    def report_stopped_zygote(self) -> None:
        """Report once that a signal has stopped the zygote, which then neither starts ranks nor reports exits."""
        pid = self._stopped_zygote_pid()
        if pid and pid != self._stopped and self._show_note:
            text = f"the process that starts the ranks (pid {pid}) is stopped; continue it: kill -CONT {pid}"
            self._show_note(text)
        self._stopped = pid

    def _stopped_zygote_pid(self) -> int:
        """The pid of the zygote if a signal has stopped it, else 0."""
        pid = self.zygote.pid if self.zygote else 0
        return pid if pid and proc_utils.is_suspended(pid) else 0

    def withdraw_spawns(self) -> list[int]:
        return self.zygote.withdraw_spawns() if self.zygote else []

    def sweep(self, grace: float) -> None:
        """Kill what is left of the ranks, as ``ZygoteClient.sweep`` does."""
        if self.zygote:
            self.zygote.sweep(grace)

    def kill(self) -> None:
        if self.zygote:
            self.zygote.kill()

    def close(self) -> str | None:
        """Close the zygote; return how it has ended, in words. None if there is none, or the launcher has killed it."""
        if (zygote := self.zygote) is None:
            return None
        self.zygote = None
        killed, status = zygote.killed, zygote.close()
        self._stuck = zygote.unkillable
        how = describe_exit(-signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status))
        return None if killed else f"the zygote (pid {zygote.pid}) {how}, and its ranks with it"

    def kill_remaining(self) -> list[str]:
        """Kill the descendants that the launcher adopted from the zygote; return those that cannot be killed."""
        return [*self._stuck, *child_processes.kill_descendants(self._is_unrelated)]

    def add_rank_session(self, pid: int) -> None:
        """Record that a rank leads this session. The rank's children are in it too, unless they leave it."""
        self._sessions.add(pid)

    def _is_unrelated(self, pid: int) -> bool:
        """Whether a child of the launcher, own or adopted, does not descend from the ranks.

        If the launcher began without children, False for all but zygotes of features; else True if nothing is known.
        """
        if pid in self.other_zygotes or not self.unrelated_pids:
            return pid in self.other_zygotes
        return pid in self.unrelated_pids or not (
            self._get_session(pid) in self._sessions or self._has_temp_dir_in_environ(pid)
        )

    def _get_session(self, pid: int) -> int:
        try:
            return os.getsid(pid)
        except OSError:
            return 0

    def _has_temp_dir_in_environ(self, pid: int) -> bool:
        if self.temp_dir.path is None:
            return False
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return os.fsencode(self.temp_dir.path) in file.read()
        except OSError:
            return False
