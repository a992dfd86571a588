"""The launcher's client of the zygote: starts the zygote, requests processes, reports what happens to them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.inherited_signals import AT_START
from ddplaunch.core.agent.zygote_process import ZygoteProcess, ZygoteSource, ZygoteStartSettings, spawn_child_zygote
from ddplaunch.core.agent.zygote_socket import ZygoteSocket
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.rank.zygote_messages import FromZygote, RankJob, ToZygote, ZygoteConfig
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.system.processes import process_limits

EXIT_TIMEOUT_S = 6.0  # for a zygote to kill its descendants, before it is killed itself (more than KILL_TIMEOUT_S)
OWN_EXIT_TIMEOUT_S = 0.5  # seconds that leftover processes have to end by themselves before SIGTERM

BuildRankJob = Callable[[dict[str, int]], "RankJob"]
"""Builds the job of a rank, and adds its descriptors by purpose: stdin, stdout, stderr, rank_channel, crash_socket."""


def make_zygote_config(
    plan: ZygotePlan | None = None,
    *,
    first: str = "",
    remove: Sequence[str] = (),
    shielded: Sequence[int] = (),
    blocked: Iterable[int] = (),
) -> ZygoteConfig:
    """Return the config of a zygote of one run.

    Args:
        plan: what it imports; None: it imports nothing, and every rank is a new interpreter.
        first: the folder that ranks have in front of ``sys.path``.
        remove: paths that it removes if the launcher is killed.
        shielded: signals for the launcher that all descendants get too; ranks may handle them.
        blocked: signals that a rank inherits as blocked.
    """
    plan = plan or ZygotePlan()
    return {
        "parent_pid": os.getpid(),
        "forks": plan.forks,
        "modules": list(plan.modules),
        "user_modules": list(plan.user_modules),
        "fallback": list(plan.fallback),
        "known": list(plan.known),
        "import_auditor": plan.import_auditor,
        "fork_fixups": plan.fork_fixups,
        "native_reads": plan.native_reads,
        "import_environment": dict(plan.settings),
        "sys_path_0": first,
        "remove_on_exit": list(remove),
        "shielded_signals": list(shielded),
        "blocked_signals": sorted(blocked),
        "ignores_sigchld": AT_START.ignores_children,
        "failed": None,
        "unsafe": plan.unsafe,
        "server": None,
        "has_guardian": False,
    }


class ZygoteEventHandler(Protocol):
    """Handles the events of a zygote; it is never called while a method of ``ZygoteClient`` runs."""

    def on_zygote_event(self, event: ev.NodeEvent) -> None: ...


class ZygoteClient:
    """One zygote process, from construction to ``close``. Processes can be requested once it has started."""

    def __init__(
        self,
        loop: EventLoop,
        start: ZygoteStartSettings,
        *,
        listener: ZygoteEventHandler | None,  # None: set before the loop runs
        source: ZygoteSource | None = None,  # provides a zygote, if it can
    ) -> None:
        """Start the zygote; ResourceLimitError: a limit on processes or memory is reached."""
        self._loop, self.listener = loop, listener
        self.ready = self.killed = self.stores = False  # ``stores``: a fork of it can serve the store
        provided = source.get_zygote(start.config, start.environment) if source else None
        self._process: ZygoteProcess
        try:
            self._process, our_socket = provided or spawn_child_zygote(start)
        except OSError as error:
            raise process_limits.ResourceLimitError(
                f"no process can be started: {process_limits.describe_spawn_error(error.errno)}"
            ) from None
        self._socket = ZygoteSocket(loop, our_socket, self)

    def spawn(self, rank: int, build_job: BuildRankJob) -> None:
        """Request the process of a rank; the reply is ``ProcessSpawned`` or ``SpawnFailed``.

        The job is built once earlier messages are sent: only one rank's descriptors are open here at a time.
        """

        def build_request(fds: list[int]) -> ToZygote:
            by_purpose: dict[str, int] = {}
            try:
                job = build_job(by_purpose)
            finally:
                fds += by_purpose.values()
            return {"op": "spawn", "rank": rank, "job": job, "fds": list(by_purpose)}

        self._socket.send_built(build_request, lambda error: self._on_spawn_failed(rank, error.errno or 0), rank)

    def serve_store(self, listening: socket.socket) -> None:
        """Have the zygote replace the store by a new one on this listening socket; call it before ``spawn``."""

        def build_request(fds: list[int]) -> ToZygote:
            with suppress(OSError):  # without the socket, the zygote reports for each rank that it cannot be started
                fds.append(listening.dup().detach())
            return {"op": "serve_store"}

        self._socket.send_built(build_request)

    def withdraw_spawns(self) -> list[int]:
        """Drop the requests for processes that are not sent yet; return the ranks, which will not start."""
        return self._socket.withdraw_unsent_spawns()

    def remove_on_exit(self, path: str) -> None:
        """Have the zygote remove ``path`` if the launcher is killed."""
        self._socket.send({"op": "remove_path", "path": path})

    def sweep(self, grace: float, *, own_exit_timeout_s: float = OWN_EXIT_TIMEOUT_S) -> None:
        """End all descendants of the zygote: SIGTERM after ``own_exit_timeout_s``, SIGKILL ``grace`` seconds later.

        The reply is ``ProcessesSwept``.
        """
        self._socket.send({"op": "sweep", "grace_s": grace, "own_exit_timeout_s": own_exit_timeout_s})

    def kill(self) -> None:
        """Kill the zygote, and by their parent-death signal its ranks."""
        self.killed = True
        self._process.kill()

    def close(self) -> int | None:
        """Have the zygote kill its descendants and exit; return its wait status, None if it was closed before."""
        if self._socket.is_closed:
            return None
        if not self.ready:
            self.kill()  # it has no descendants yet, and imports may take long
        self._socket.close()
        return self._process.wait(EXIT_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unkillable(self) -> list[str]:
        """The zygote's descendants that ``close`` could not kill, except those that the launcher adopts."""
        return list(self._process.unkillable)

    def _on_spawn_failed(self, rank: int, number: int) -> None:
        self._report(ev.SpawnFailed(rank, number, process_limits.describe_spawn_error(number)))

    def on_zygote_closed(self) -> None:
        self._report(ev.ZygoteLost())

    def _report(self, event: ev.NodeEvent) -> None:
        assert self.listener
        self.listener.on_zygote_event(event)

    def on_zygote_message(self, message: FromZygote, fds: list[int]) -> None:
        if message["op"] == "ready":
            self.ready, self.stores = True, message["can_serve_store"]
            self._process.on_ready(message["pid"], fds[0] if fds else None)
            seconds = message["import_s"]
            self._report(ev.ZygoteStarted(message["forks"], message["failed"], message["unsafe"], seconds))
        elif message["op"] == "import_failed":
            self._report(ev.StartFailed(message["message"]))
        elif message["op"] == "spawned":
            self._report(ev.ProcessSpawned(message["rank"], message["pid"], fds[0] if fds else None))
        elif message["op"] == "spawn_failed":
            self._on_spawn_failed(message["rank"], message["errno"])
        elif message["op"] == "exited":
            code = os.waitstatus_to_exitcode(message["status"])
            self._report(ev.ProcessExited(message["rank"], message["pid"], code, message["usage"]))
        elif message["op"] == "store_exited":
            self._report(ev.StoreExited(message["pid"], os.waitstatus_to_exitcode(message["status"])))
        elif message["op"] == "signalled":
            self._report(ev.ZygoteSignalled(message["number"], message["rank"]))
        elif message["op"] == "swept":
            self._report(ev.ProcessesSwept(tuple(message["found"]), tuple(message["stuck"])))
