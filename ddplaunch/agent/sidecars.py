"""The programs beside the ranks of node 0, from the job's first attempt to its end.

They hang below a zygote of their own, an empty one that is swept only once: it ends what is left of them when we are
killed, as the other does for the ranks, and knows nothing of attempts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent import job, limits, remains
from ddplaunch.agent.job import NodeContext
from ddplaunch.agent.policy import Sidecar
from ddplaunch.agent.temporary import RunTempDir
from ddplaunch.agent.tree import ProcessTree
from ddplaunch.agent.zygote_client import ZygoteClient
from ddplaunch.control.failure import describe_exit
from ddplaunch.errors import host_name
from ddplaunch.loop import EventLoop, Timer
from ddplaunch.output.events import Event, SidecarExited, SidecarListening, SidecarStarted
from ddplaunch.output.isolation import IsolatedLoop
from ddplaunch.rank import processes

if TYPE_CHECKING:
    from ddplaunch.rank.messages import ProgramJob, Usage

MAX_GRACE_S = 5.0  # seconds at most that they have between SIGTERM and SIGKILL


class SidecarRunner:
    """All of them; if one ends early, a message says so, and the job goes on."""

    def __init__(
        self, loop: EventLoop, context: NodeContext, emit: Callable[[Event], None], tree: ProcessTree, grace: float
    ) -> None:
        """``context`` and ``tree`` are those of the ranks, as is ``grace``, in seconds."""
        self._emit, self._tree = emit, tree
        self._streams, self._log = context.streams, context.log
        self._screen, self._say = context.screen, context.screen.show_note
        self._loop = IsolatedLoop(loop, "the sidecars", self._say, self._over)
        self._grace = min(MAX_GRACE_S, grace)
        self._all = context.policy.sidecars
        self._names = ", ".join(each.name for each in self._all)
        self._shielded = job.signals_to_block(context.policy.preempt_signal)
        self._zygote: ZygoteClient | None = None
        self._temporary = RunTempDir("ddplaunch-sidecars")
        self._announced: set[str] = set()
        # expected: the job has been told to stop, and they perhaps too, so that nobody needs to read of their end
        self.stop_expected = self._stopping = self._hurried = self._was_lost = False
        self._timer: Timer | None = None

    def start(self) -> None:
        self._loop.guard(self._start)()

    def _start(self) -> None:
        try:
            self._zygote = ZygoteClient(
                self._loop, listener=self, environment=self._tree.environ, shielded=self._shielded
            )
        except limits.ResourceLimitError as error:
            return self._say(f"{self._names}: {error.message}; the job goes on")
        self._tree.sidecar_zygote = self._zygote.pid
        self._zygote.spawn((number, partial(self._build_job, number, each)) for number, each in enumerate(self._all))

    def _build_job(self, number: int, sidecar: Sidecar, fds: dict[str, int]) -> ProgramJob:
        name, log = sidecar.name, self._log.file(f"sidecar-{sidecar.name}.log")
        show, heard = sidecar.url_pattern is None, self._loop.guard(partial(self._on_output, sidecar))
        self._streams.open_sidecar(fds, name, show=show, log=log, heard=heard)
        variables = {"PYTHONUNBUFFERED": "1", **sidecar.variables}  # what it prints goes to a pipe, and is to come now
        if sidecar.url_pattern and self._temporary.path:
            variables["TMPDIR"] = self._temporary.path
        typed, *args = sidecar.argv
        return {
            "rank": number,
            "kind": "program",
            "typed": typed,
            "path": sidecar.path,
            "args": args,
            "env": variables,
            "cpus": None,
        }

    def stop(self) -> None:
        """End them all, as the job has: SIGTERM, and SIGKILL after the grace; returns when none is left."""
        self._stopping = True
        for sidecar in self._all:
            if sidecar.url_pattern:
                self._streams.set_shown(sidecar.name, False)  # its farewell says nothing new
        if self._zygote:
            self._zygote.cancel_pending()
            self._zygote.sweep(self._grace, own_exit_timeout_s=0)
            self._timer = self._loop.call_later(self._grace + processes.KILL_TIMEOUT_S + 1, self._zygote.kill)
        elif self._was_lost:
            self._tree.kill_remaining()
        while self._zygote or not self._screen.is_drained:
            self._loop.run_once()

    def stop_now(self) -> bool:
        """Do without the grace; return whether there is anything left to hurry."""
        if self._zygote is None or self._hurried:
            return False
        self._hurried = True
        self._zygote.sweep(0)
        return True

    def on_zygote_ready(self, forks: bool, failed: str | None, unsafe: str | None, seconds: float) -> None:
        if self._zygote and any(each.url_pattern for each in self._all):
            self._temporary.create(self._zygote.remove_on_exit)  # TensorBoard leaves files behind when it is killed

    def on_import_failed(self, message: str) -> None: ...  # nothing was to be imported

    def on_zygote_signalled(self, number: int, rank: int | None) -> None: ...  # which is not for them

    def on_store_exited(self, pid: int, code: int) -> None: ...  # they have none

    def on_spawned(self, rank: int, pid: int, pidfd: int | None) -> None:
        if pidfd is not None:
            os.close(pidfd)
        self._tree.add_session(pid)
        self._emit(SidecarStarted(self._all[rank].name, pid))

    def on_spawn_failed(self, rank: int, errno: int) -> None:
        self._say(f"{self._all[rank].name} cannot be started: {limits.describe_spawn_error(errno)}")

    def on_swept(self, found: list[str], stuck: list[str]) -> None:
        if stuck:
            self._say(f"not waiting for processes that cannot be killed: {', '.join(stuck)}")
        self._over()

    def on_exited(self, rank: int, pid: int, code: int, usage: Usage) -> None:
        sidecar = self._all[rank]
        self._emit(SidecarExited(sidecar.name, code))
        self._streams.read_pending(sidecar.name)
        if not (self._stopping or self.stop_expected):
            last = remains.last_lines(self._streams.tail(sidecar.name), 1) if code else ()
            words = "".join(f": {line.strip()}" for line in last)
            self._say(f"{sidecar.name} {describe_exit(code)}, the job goes on{words}")
        elif self._stopping and code == -signal.SIGKILL and not self._hurried:
            self._say(f"{sidecar.name} did not end within {self._grace:g} s of SIGTERM, and was killed")

    def _on_output(self, sidecar: Sidecar) -> None:
        """Say where it answers as soon as it says so itself: by then it listens."""
        if sidecar.url_pattern is None or sidecar.name in self._announced or self._stopping:
            return
        title, pattern = sidecar.url_pattern
        if (found := pattern.search(self._streams.tail(sidecar.name))) is None:
            return
        self._announced.add(sidecar.name)
        self._streams.set_shown(sidecar.name, True)
        url = found["url"].decode()
        self._say(f"{title} at {url}")
        if way := format_tunnel_hint(url, self._tree.environ, host_name()):
            self._say(way)
        self._emit(SidecarListening(sidecar.name, url))

    def on_zygote_lost(self) -> None:
        """It was killed, and they with it (their parent-death signal)."""
        self._was_lost = True
        if not self._stopping:
            self._say(f"{self._names} ended because their guard process was killed; the job goes on")
        self._over()  # which waits for its end: what it leaves is below us only then
        if self._stopping:
            self._tree.kill_remaining()  # nothing else of ours is left there

    def _over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._zygote:
            self._zygote.close()
        self._zygote = self._tree.sidecar_zygote = None
        for sidecar in self._all:
            self._streams.read_pending(sidecar.name)
            self._streams.close_source(sidecar.name)
        self._temporary.remove()


def format_tunnel_hint(url: str, environ: Mapping[str, str], host: str) -> str | None:
    """How to reach an address of this machine's own from where the user sits, if that seems to be elsewhere."""
    if not ("SSH_CONNECTION" in environ or "SLURM_JOB_ID" in environ):
        return None
    port = url.rstrip("/").rpartition(":")[2]
    return f"from your own machine: ssh -N -L {port}:127.0.0.1:{port} {host}"
