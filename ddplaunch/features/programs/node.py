"""Runs the programs of one node: gives ``ProgramsMachine`` its events, and executes its commands.

Programs are children of a guard: a zygote of their own, without imports. As for the ranks, it kills what is left of
them if the launcher is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from ddplaunch.base.errors import host_name
from ddplaunch.base.event_loop import WakeTimer
from ddplaunch.base.types import ExitStatus, Pid, TextLine
from ddplaunch.core.deadlines import Now
from ddplaunch.core.events import Event, JobPreempted, SignalReceived, StoredEvent
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.job.signal_forwarding import STOP_SIGNALS
from ddplaunch.core.node import node_events, rank_files
from ddplaunch.core.node.node_ranks import NodeRanks
from ddplaunch.core.node.process_tree import signals_to_block
from ddplaunch.core.node.run_temp_dir import RunTempDir
from ddplaunch.core.node.zygote_client import ZygoteClient
from ddplaunch.core.rank.zygote_messages import ProgramJob
from ddplaunch.features.programs import program_commands as do
from ddplaunch.features.programs import program_events as ev
from ddplaunch.features.programs.machine import Gate, ProgramsMachine
from ddplaunch.features.programs.program_commands import Life
from ddplaunch.features.programs.sidecars import UrlPattern
from ddplaunch.features.programs.spec import ProgramSpec
from ddplaunch.system.processes import proc_utils, process_limits

TAIL_BYTES = 8192  # of the last output, for the pattern of the URL, and for a message


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


class Guard:
    """A zygote for programs of one life; it passes its events on with that."""

    def __init__(self, runner: ProgramRunner, life: Life, zygote: ZygoteClient) -> None:
        self._runner, self._life, self.zygote = runner, life, zygote
        zygote.listener = self

    def on_zygote_event(self, event: node_events.NodeEvent) -> None:
        self._runner.on_zygote_event(self._life, event)


class ProgramRunner(NodeSide):
    """Runs all programs of this node."""

    def __init__(
        self, context: FeatureContext, specs: Sequence[ProgramSpec], url_patterns: Mapping[str, UrlPattern]
    ) -> None:
        """``url_patterns``: by the name of the program, of those that are shown once they have printed their URL."""
        self._context, self._tree = context, context.tree
        self._streams, self._screen = context.node.streams, context.screen
        self._emit, self._show_note = context.job.emit, context.screen.show_note
        self._loop = context.loop
        self._loop.on_error = self._close
        self._specs, self._url_patterns = specs, url_patterns
        self._machine = ProgramsMachine(specs, Gate((), os.path.basename(context.plan.target.text)))
        self._guards: dict[Life, Guard] = {}
        self._pids: dict[int, tuple[int, int | None]] = {}  # by program: pid and pidfd
        self._temp_dir = RunTempDir("ddplaunch-sidecars")
        self._announced: set[str] = set()
        self._preempt_signal = context.config.zygote.preempt_signal
        self._has_begun = self._was_preempted = self._finishing = False
        self._last_signal: int = signal.SIGTERM
        self._timer = WakeTimer(self._loop, lambda: self._post(ev.Woken()))

    # ---------------------------------------------------------------------------------------------------------- hooks

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._loop.call_soon(lambda: self._post(ev.AttemptBegins(ranks.number)))  # once the ranks are requested

    def observe(self, event: Event) -> None:
        match event:
            case SignalReceived(number=number):
                if number != self._preempt_signal or (self._was_preempted and number in STOP_SIGNALS):
                    self._last_signal = number
                    self._post(ev.StopExpected())
            case JobPreempted():
                self._was_preempted = True

    def finish(self) -> None:
        """Stop all programs; return when none is left."""
        self._finishing = True
        for name in self._url_patterns:
            self._streams.set_shown(name, False)  # what it prints at its end is not of interest
        self._post(ev.JobFinished(self._last_signal))
        while not (self._machine.is_over and self._screen.is_drained) and not self._loop.failed:
            self._loop.run_once()
        self._close()

    def on_signal_after_end(self) -> bool:
        """Kill them without the rest of the grace; return False if there is nothing left to kill."""
        if self._machine.is_over or not self._guards:
            return False
        self._post(ev.KillRequested())
        return True

    # --------------------------------------------------------------------------------------------------------- events

    def _post(self, event: ev.Event) -> None:
        """Have the machine handle an event, and execute what follows from it."""
        for command in self._machine.on(event, Now(time.monotonic(), time.time())):
            self._execute(command)
        self._timer.set(self._machine.wake_at())

    def on_zygote_event(self, life: Life, event: node_events.NodeEvent) -> None:
        match event:
            case node_events.ZygoteStarted():
                self._post(ev.GuardStarted(life))
            case node_events.ProcessSpawned(rank=number, pid=pid, pidfd=pidfd):
                self._pids[number] = pid, pidfd
                self._tree.add_session(pid)
                self._emit(SidecarStarted(self._specs[number].name, pid))
                self._post(ev.ProgramSpawned(number))
            case node_events.SpawnFailed(rank=number, reason=reason):
                self._post(ev.ProgramStartFailed(number, reason))
            case node_events.ProcessExited(rank=number, code=code):
                self._on_exited(number, code)
            case node_events.ProcessesSwept(stuck=stuck):
                self._post(ev.GuardSwept(life, stuck))
            case node_events.ZygoteLost():
                self._post(ev.GuardLost(life))

    def _on_exited(self, number: int, code: int) -> None:
        name = self._specs[number].name
        self._forget_process(number)
        self._emit(SidecarExited(name, code))
        self._streams.read_pending(name)
        last = rank_files.last_lines(self._streams.tail(name, TAIL_BYTES), 1)
        self._post(ev.ProgramExited(number, code, "".join(last).strip()))

    def _on_output(self, number: int) -> None:
        """Show the URL of a program once it has printed it: then it listens."""
        name = self._specs[number].name
        pattern = self._url_patterns.get(name)
        if pattern is None or name in self._announced or self._finishing:
            return
        if (found := pattern.line.search(self._streams.tail(name, TAIL_BYTES))) is None:
            return
        self._announced.add(name)
        self._streams.set_shown(name, True)
        url = found["url"].decode()
        self._show_note(f"{pattern.title} at {url}")
        if hint := format_tunnel_hint(url, self._tree.environ, host_name()):
            self._show_note(hint)
        self._emit(SidecarListening(name, url))

    # ------------------------------------------------------------------------------------------------------- commands

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.StartGuard(life=life):
                self._start_guard(life)
            case do.Spawn(number=number):
                guard = self._guards[self._machine.programs[number].life]
                guard.zygote.spawn(number, partial(self._build_job, number))
            case do.SendSignal(number=number, signal=which):
                self._send_signal(number, which)
            case do.ShowNote(text=text):
                self._show_note(text)
            case do.ShowFooter(text=text):
                self._screen.show_footer(text)
            case do.SweepGuard(life=life, grace_s=grace_s):
                self._guards[life].zygote.withdraw_spawns()
                self._guards[life].zygote.sweep(grace_s, own_exit_timeout_s=0)
            case do.KillGuard(life=life):
                self._guards[life].zygote.kill()  # without waiting for end of file: a fork may keep its socket open
            case do.CloseGuard(life=life):
                self._close_guard(life)
            case do.KillRemaining():
                self._tree.kill_remaining()  # no ranks are left

    def _start_guard(self, life: Life) -> None:
        shielded = signals_to_block(self._preempt_signal)
        try:
            zygote = ZygoteClient(self._loop, listener=None, environment=self._tree.environ, shielded=shielded)
        except process_limits.ResourceLimitError as error:
            for number, program in enumerate(self._machine.programs):
                if program.life is life:
                    self._loop.call_soon(partial(self._post, ev.ProgramStartFailed(number, error.message)))
            return
        self._guards[life] = Guard(self, life, zygote)
        self._tree.other_zygotes.add(zygote.pid)
        if self._url_patterns and life is Life.JOB:
            self._temp_dir.create(zygote.remove_on_exit)  # TensorBoard leaves files in TMPDIR when it is killed

    def _build_job(self, number: int, fds: dict[str, int]) -> ProgramJob:
        spec = self._specs[number]
        show, log = spec.name not in self._url_patterns, self._context.log.file(f"sidecar-{spec.name}.log")
        on_output = self._loop.guard(partial(self._on_output, number))
        self._streams.open_program(fds, spec.name, show=show, log=log, on_output=on_output)
        variables = {"PYTHONUNBUFFERED": "1", **spec.env}  # what it prints goes to a pipe, and is to come now
        if spec.name in self._url_patterns and self._temp_dir.path:
            variables["TMPDIR"] = self._temp_dir.path
        command, *args = spec.command
        return {
            "rank": number,
            "kind": "program",
            "target_text": command,
            "path": shutil.which(command) or command,
            "args": args,
            "env": variables,
            "cpus": None,
        }

    def _send_signal(self, number: int, which: int) -> None:
        if number in self._pids:
            pid, pidfd = self._pids[number]
            with suppress(OSError):
                proc_utils.send_signal(pid, which, pidfd)

    def _forget_process(self, number: int) -> None:
        _, pidfd = self._pids.pop(number, (0, None))
        if pidfd is not None:
            os.close(pidfd)

    def _close_guard(self, life: Life) -> None:
        if guard := self._guards.pop(life, None):
            guard.zygote.close()  # waits for its end: only then has the launcher adopted its descendants
            self._tree.other_zygotes.discard(guard.zygote.pid)
        for number, program in enumerate(self._machine.programs):
            if program.life is life:
                self._forget_process(number)
                self._streams.close_source(program.spec.name)

    def _close(self) -> None:
        """Close all, also after an exception in one of the callbacks."""
        self._timer.set(None)
        for life in Life:
            self._close_guard(life)
        self._temp_dir.remove()


def format_tunnel_hint(url: str, environ: Mapping[str, str], host: str) -> str | None:
    """Describe how to reach a local URL from the user's machine, if the launcher seems to run on another one."""
    if not ("SSH_CONNECTION" in environ or "SLURM_JOB_ID" in environ):
        return None
    port = url.rstrip("/").rpartition(":")[2]
    return f"from your own machine: ssh -N -L {port}:127.0.0.1:{port} {host}"
