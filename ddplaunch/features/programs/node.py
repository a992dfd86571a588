"""Sidecars: programs that run alongside the ranks of node 0, from the first attempt to the end of the job.

They are children of a zygote of their own, without imports, which is swept only once, at the end. As for the ranks, it
kills what is left of them if the launcher is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial

from ddplaunch.base.errors import host_name
from ddplaunch.base.event_loop import Timer
from ddplaunch.base.types import ExitStatus, Pid, TextLine
from ddplaunch.core.events import Event, JobPreempted, SignalReceived, StoredEvent
from ddplaunch.core.failures import describe_exit
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.job.signal_forwarding import STOP_SIGNALS
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.node import rank_files
from ddplaunch.core.node.node_ranks import NodeRanks
from ddplaunch.core.node.process_tree import signals_to_block
from ddplaunch.core.node.run_temp_dir import RunTempDir
from ddplaunch.core.node.zygote_client import ZygoteClient
from ddplaunch.core.rank.zygote_messages import ProgramJob
from ddplaunch.features.programs.sidecars import Sidecar
from ddplaunch.system.processes import proc_utils, process_limits

TAIL_BYTES = 8192  # of the last output, for the pattern of the URL, and for a message
MAX_GRACE_S = 5.0  # between SIGTERM and SIGKILL, at most


class SidecarStarted(StoredEvent, frozen=True, tag="sidecar_started"):
    sidecar: TextLine
    pid: Pid

    in_history = False


class SidecarListening(StoredEvent, frozen=True, tag="sidecar_answers"):
    sidecar: TextLine
    url: TextLine  # that it has printed

    in_history = False


class SidecarExited(StoredEvent, frozen=True, tag="sidecar_exited"):
    sidecar: TextLine
    code: ExitStatus  # -N for signal N

    in_history = False


class SidecarRunner(NodeSide):
    """Runs all sidecars; reports one that ends early, while the job continues."""

    def __init__(self, context: FeatureContext, sidecars: Sequence[Sidecar]) -> None:
        self._emit, self._tree = context.job.emit, context.tree
        self._streams, self._log = context.node.streams, context.log
        self._screen, self._show_note = context.screen, context.screen.show_note
        self._loop = context.loop
        self._loop.on_error = self._close
        self._grace = min(MAX_GRACE_S, context.job_config.grace)
        self._sidecars = sidecars
        self._names = ", ".join(each.name for each in self._sidecars)
        self._preempt_signal = context.config.zygote.preempt_signal
        self._zygote: ZygoteClient | None = None
        self._temp_dir = RunTempDir("ddplaunch-sidecars")
        self._announced: set[str] = set()
        # _stop_expected: the job is being stopped; the sidecars may have got the signal too: do not report their end
        self._stop_expected = self._was_preempted = self._stopping = self._stopped_now = self._was_lost = False
        self._started = False
        self._timer: Timer | None = None

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        if not self._started:
            self._started = True
            self._loop.call_soon(self._start)  # once the ranks are requested

    def observe(self, event: Event) -> None:
        match event:
            case SignalReceived(number=number):
                is_notice = number == self._preempt_signal and not (self._was_preempted and number in STOP_SIGNALS)
                self._stop_expected = self._stop_expected or not is_notice
            case JobPreempted():
                self._was_preempted = True

    def _start(self) -> None:
        shielded = signals_to_block(self._preempt_signal)
        try:
            self._zygote = ZygoteClient(self._loop, listener=self, environment=self._tree.environ, shielded=shielded)
        except process_limits.ResourceLimitError as error:
            return self._show_note(f"{self._names}: {error.message}; the job continues")
        self._tree.other_zygotes.add(self._zygote.pid)

    def _build_job(self, number: int, sidecar: Sidecar, fds: dict[str, int]) -> ProgramJob:
        name, log = sidecar.name, self._log.file(f"sidecar-{sidecar.name}.log")
        show, on_output = sidecar.url_pattern is None, self._loop.guard(partial(self._on_output, sidecar))
        self._streams.open_program(fds, name, show=show, log=log, on_output=on_output)
        variables = {"PYTHONUNBUFFERED": "1", **sidecar.variables}  # what it prints goes to a pipe, and is to come now
        if sidecar.url_pattern and self._temp_dir.path:
            variables["TMPDIR"] = self._temp_dir.path
        command, *args = sidecar.argv
        return {
            "rank": number,
            "kind": "program",
            "target_text": command,
            "path": sidecar.path,
            "args": args,
            "env": variables,
            "cpus": None,
        }

    def finish(self) -> None:
        """Stop all sidecars: SIGTERM, and SIGKILL after the grace; return when none is left."""
        if not self._started:
            return
        self._stopping = True
        for sidecar in self._sidecars:
            if sidecar.url_pattern:
                self._streams.set_shown(sidecar.name, False)  # what it prints at its end is not of interest
        if self._zygote:
            self._zygote.withdraw_spawns()
            self._zygote.sweep(self._grace, own_exit_timeout_s=0)
            self._timer = self._loop.call_later(self._grace + proc_utils.KILL_TIMEOUT_S + 1, self._kill_zygote)
        elif self._was_lost:
            self._tree.kill_remaining()
        while self._zygote or not self._screen.is_drained:
            self._loop.run_once()

    def on_signal_after_end(self) -> bool:
        """Kill them without the rest of the grace; return False if there is nothing left to kill."""
        if self._zygote is None or self._stopped_now:
            return False
        self._stopped_now = True
        self._zygote.sweep(0)
        return True

    def on_zygote_event(self, event: ev.NodeEvent) -> None:
        """Handle what happened to the sidecars; signals are not forwarded to them, nothing is imported for them."""
        match event:
            case ev.ZygoteStarted():
                self._on_zygote_started()
            case ev.ProcessSpawned(rank=number, pid=pid, pidfd=pidfd):
                if pidfd is not None:
                    os.close(pidfd)
                self._tree.add_session(pid)
                self._emit(SidecarStarted(self._sidecars[number].name, pid))
            case ev.SpawnFailed(rank=number, reason=reason):
                self._show_note(f"{self._sidecars[number].name} cannot be started: {reason}")
            case ev.ProcessExited(rank=number, code=code):
                self._on_exited(self._sidecars[number], code)
            case ev.ProcessesSwept(stuck=stuck):
                if stuck:
                    self._show_note(f"not waiting for processes that cannot be killed: {', '.join(stuck)}")
                self._close()
            case ev.ZygoteLost():
                self._on_zygote_lost()

    def _on_zygote_started(self) -> None:
        if self._zygote is None or self._stopping:
            return
        if any(each.url_pattern for each in self._sidecars):
            self._temp_dir.create(self._zygote.remove_on_exit)  # TensorBoard leaves files in TMPDIR when it is killed
        for number, sidecar in enumerate(self._sidecars):
            self._zygote.spawn(number, partial(self._build_job, number, sidecar))

    def _on_exited(self, sidecar: Sidecar, code: int) -> None:
        self._emit(SidecarExited(sidecar.name, code))
        self._streams.read_pending(sidecar.name)
        if not (self._stopping or self._stop_expected):
            last = rank_files.last_lines(self._streams.tail(sidecar.name, TAIL_BYTES), 1) if code else ()
            words = "".join(f": {line.strip()}" for line in last)
            self._show_note(f"{sidecar.name} {describe_exit(code)}, the job continues{words}")
        elif self._stopping and code == -signal.SIGKILL and not self._stopped_now:
            self._show_note(f"{sidecar.name} did not end within {self._grace:g} s of SIGTERM, and was killed")

    def _on_output(self, sidecar: Sidecar) -> None:
        """Show the sidecar's URL once it has printed it: then it listens."""
        if sidecar.url_pattern is None or sidecar.name in self._announced or self._stopping:
            return
        title, pattern = sidecar.url_pattern
        if (found := pattern.search(self._streams.tail(sidecar.name, TAIL_BYTES))) is None:
            return
        self._announced.add(sidecar.name)
        self._streams.set_shown(sidecar.name, True)
        url = found["url"].decode()
        self._show_note(f"{title} at {url}")
        if hint := format_tunnel_hint(url, self._tree.environ, host_name()):
            self._show_note(hint)
        self._emit(SidecarListening(sidecar.name, url))

    def _on_zygote_lost(self) -> None:
        """The zygote was killed, and the sidecars by their parent-death signal."""
        self._was_lost = True
        if not self._stopping:
            self._show_note(f"{self._names} ended because their guard process was killed; the job continues")
        self._close()  # waits for its end: only then has the launcher adopted its descendants
        if self._stopping:
            self._tree.kill_remaining()  # no ranks are left

    def _kill_zygote(self) -> None:
        """Kill a zygote that does not answer; do not wait for end of file: a fork may keep its socket open."""
        if self._zygote:
            self._zygote.kill()
            self._on_zygote_lost()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._zygote:
            self._zygote.close()
            self._tree.other_zygotes.discard(self._zygote.pid)
            self._zygote = None
        for sidecar in self._sidecars:
            self._streams.close_source(sidecar.name)
        self._temp_dir.remove()


def format_tunnel_hint(url: str, environ: Mapping[str, str], host: str) -> str | None:
    """Describe how to reach a local URL from the user's machine, if the launcher seems to run on another one."""
    if not ("SSH_CONNECTION" in environ or "SLURM_JOB_ID" in environ):
        return None
    port = url.rstrip("/").rpartition(":")[2]
    return f"from your own machine: ssh -N -L {port}:127.0.0.1:{port} {host}"
