"""Runs the programs of one node: gives ``ProgramsMachine`` its events, and executes its commands.

Programs are children of a guard: a zygote of their own, without imports. If the launcher is killed, the guard kills the
programs and all processes that they have left, as the zygote does for the ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from ddplaunch.base.errors import EXIT_SOFTWARE, host_name
from ddplaunch.base.event_loop import WakeTimer
from ddplaunch.base.safe_files import TEMP_PARENT_VARIABLE
from ddplaunch.core.agent import rank_files
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.process_tree import signals_to_block
from ddplaunch.core.agent.run_temp_dir import RunTempDir
from ddplaunch.core.agent.zygote_client import ZygoteClient, make_zygote_config
from ddplaunch.core.agent.zygote_process import ZygoteStartSettings
from ddplaunch.core.deadlines import Now
from ddplaunch.core.events import (
    Event,
    JobPreempted,
    ProgramExited,
    ProgramReady,
    ProgramsStarting,
    ProgramStarted,
    SignalReceived,
)
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.messages import CheckPassed, CheckRequest, Message, PreemptRanks, StopAttempt
from ddplaunch.core.node import node_events
from ddplaunch.core.output.run_log import attempt_suffix
from ddplaunch.core.rank.zygote_messages import ProgramJob, RankJob
from ddplaunch.core.signals import STOP_SIGNALS
from ddplaunch.features.programs import program_commands as do
from ddplaunch.features.programs import program_events as ev
from ddplaunch.features.programs.machine import ProgramsMachine, ProgramState
from ddplaunch.features.programs.messages import (
    HoldPorts,
    MainDone,
    MainEnded,
    PortsHeld,
    ProgramFailed,
    ProgramIsReady,
    ReadyPrograms,
    StartPrograms,
    StopMains,
)
from ddplaunch.features.programs.program_commands import Life
from ddplaunch.features.programs.program_jobs import PROGRAM_VARIABLE, ProgramJobs
from ddplaunch.features.programs.ready import ReadyProbe
from ddplaunch.features.programs.sidecars import (
    SidecarExited,
    SidecarListening,
    SidecarStarted,
    UrlPattern,
    format_tunnel_hint,
)
from ddplaunch.features.programs.spec import Programs, ProgramSpec
from ddplaunch.system.processes import proc_utils, process_limits

TAIL_BYTES = 8192  # of the last output, for the pattern of the URL, and for a message
READY_BYTES = 1 << 16  # of the last output, for the line that says that it is ready
REPORTED_LINES = 10  # the last ones of a program that has failed


class Guard:
    """The zygote for the programs with one ``Life``: passes its events on to the runner together with this ``Life``."""

    def __init__(self, runner: ProgramRunner, life: Life, zygote: ZygoteClient) -> None:
        self._runner, self._life, self.zygote = runner, life, zygote
        zygote.listener = self

    def on_zygote_event(self, event: node_events.NodeEvent) -> None:
        self._runner.on_zygote_event(self._life, event)


class ProgramRunner(NodeSide):
    """The node side: runs the programs of this node."""

    def __init__(
        self,
        context: FeatureContext,
        sidecars: Sequence[ProgramSpec],
        programs: Programs | None,
        url_patterns: Mapping[str, UrlPattern],
    ) -> None:
        """``sidecars``: of ``--sidecar`` and ``--tensorboard``; ``programs``: all others, None where there are none.

        ``url_patterns``: by the name of the program; its output is shown only once it has printed its URL.
        """
        self._context, self._tree = context, context.tree
        self._streams, self._screen = context.node.streams, context.screen
        self._emit, self._show_note, self._send = context.job.emit, context.screen.show_note, context.job.send
        self._loop = context.loop
        self._loop.on_error = self._on_internal_error
        self._programs, self._url_patterns = programs, url_patterns
        self._jobs = jobs = ProgramJobs(context, programs, sidecars)
        self._specs, self._sidecar_count, self._addresses = jobs.specs, len(sidecars), jobs.addresses
        self._machine = ProgramsMachine(self._specs, jobs.gate)
        self._guards: dict[Life, Guard] = {}
        self._pids: dict[int, tuple[int, int | None]] = {}  # by program: pid and pidfd
        self._started_at: dict[int, float] = {}
        self._probes: dict[int, ReadyProbe] = {}
        self._planned_at = 0.0
        self._ready_elsewhere: set[str] = set()
        self._attempt = 0
        self._temp_dir = RunTempDir("ddplaunch-programs")
        self._announced: set[str] = set()
        self._preempt_signal = context.config.zygote.preempt_signal
        self._has_begun = self._was_preempted = self._finishing = False
        self._last_signal: int = signal.SIGTERM
        self._timer = WakeTimer(self._loop, lambda: self._post(ev.DeadlineDue()))

    # ---------------------------------------------------------------------------------------------------------- hooks

    def on_check(self, request: CheckRequest) -> bool:
        if self._addresses is None or not isinstance(request, HoldPorts):
            return False
        self._send(PortsHeld(request.attempt, self._addresses.hold_ports(self._context.job_config)))
        return True

    def on_message(self, message: Message) -> None:
        match message:
            case StartPrograms(attempt=attempt, addresses=addresses) if attempt != self._attempt or not self._has_begun:
                assert self._addresses
                self._attempt, self._jobs.run_id = attempt, message.run_id
                self._addresses.set_addresses(addresses)
                self._screen.show_footer("")  # it said that nodes are missing
                self._emit(ProgramsStarting(attempt, self._jobs.has_ranks))
                self._show_plan()
                self._begin_attempt(attempt)
            case ReadyPrograms(attempt=self._attempt, names=names):
                self._report_ready_elsewhere(names)
                self._post(ev.ReadyElsewhere(names))
            case StopAttempt(signal=number) | StopMains(attempt=self._attempt, signal=number):
                self._post(ev.RanksStopped(number))
            case PreemptRanks():
                self._preempt_mains()

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        if not self._has_begun:
            self._loop.call_soon(lambda: self._begin_attempt(ranks.number))  # once the ranks are requested

    def complete_job(self, job: RankJob) -> None:
        self._jobs.complete_rank_job(job)

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
        """Called on a signal after the job's end: kill the programs at once; return False if none is left to kill."""
        if self._machine.is_over or not self._guards:
            return False
        self._post(ev.KillRequested())
        return True

    @property
    def is_gate_open(self) -> bool:
        """Whether all programs that the ranks wait for are ready."""
        return self._machine.is_gate_open

    def list_addresses(self) -> list[tuple[str, str, str, int]]:
        """Return the addresses of all programs: program, name of the port, host and port."""
        return self._addresses.list_addresses() if self._addresses else []

    def _begin_attempt(self, attempt: int) -> None:
        self._has_begun = True
        self._post(ev.AttemptBegins(attempt))

    def _preempt_mains(self) -> None:
        """Send the preemption signal to the mains that handle it."""
        number = self._preempt_signal or signal.SIGTERM
        for index, (pid, _) in self._pids.items():
            if self._specs[index].kind == "main" and proc_utils.catches_signal(pid, number):
                self._send_signal(index, number)

    def _show_plan(self) -> None:
        self._planned_at = time.monotonic()
        self._ready_elsewhere.clear()
        for elsewhere in self._jobs.plan_programs_elsewhere():
            self._emit(elsewhere)
        for plan in self._jobs.plan_programs(self._context.options):
            self._emit(plan)
            _, port = self._jobs.addresses.of(plan.program) if self._jobs.addresses else ("", 0)
            if facts := [f"GPUs {plan.gpus}"] * bool(plan.gpus) + [f"port {port}"] * bool(port):
                self._show_note(f"{plan.program}: {', '.join(facts)}")

    # --------------------------------------------------------------------------------------------------------- events

    def _post(self, event: ev.Event) -> None:
        """Pass an event to the machine, and execute the commands that it returns."""
        for command in self._machine.on(event, Now(time.monotonic(), time.time())):
            self._execute(command)
        self._timer.set(self._machine.wake_at())

    def on_zygote_event(self, life: Life, event: node_events.NodeEvent) -> None:
        match event:
            case node_events.ZygoteStarted():
                self._post(ev.GuardStarted(life))
            case node_events.ProcessSpawned(rank=number, pid=pid, pidfd=pidfd):
                self._pids[number] = pid, pidfd
                self._started_at[number] = time.monotonic()
                self._tree.add_rank_session(pid)
                name, of_option = self._specs[number].name, self._is_option_sidecar(number)
                self._emit(SidecarStarted(name, pid) if of_option else ProgramStarted(name, pid, self._attempt))
                self._post(ev.ProgramSpawned(number))
            case node_events.SpawnFailed(rank=number, reason=reason):
                self._post(ev.ProgramStartFailed(number, reason))
            case node_events.ProcessExited(rank=number, code=code, usage=(peak_memory, *_)):
                self._on_exited(number, code, peak_memory)
            case node_events.ProcessesSwept(stuck=stuck):
                self._post(ev.GuardSwept(life, stuck))
            case node_events.ZygoteLost():
                self._post(ev.GuardLost(life))

    def _on_exited(self, number: int, code: int, peak_memory: int) -> None:
        spec = self._specs[number]
        self._forget_process(number)
        of_option = self._is_option_sidecar(number)
        self._streams.read_pending(spec.name)
        quiet_s = self._streams.quiet_s(spec.name)
        exited = ProgramExited(spec.name, code, self._attempt, peak_memory, quiet_s)
        self._emit(SidecarExited(spec.name, code) if of_option else exited)
        self._post(ev.ProgramExited(number, code, "".join(self._last_lines(number, 1)).strip()))

    def _is_option_sidecar(self, number: int) -> bool:
        """Whether a program is a sidecar of ``--sidecar`` or ``--tensorboard``."""
        return number >= len(self._specs) - self._sidecar_count

    def _last_lines(self, number: int, count: int) -> tuple[str, ...]:
        return rank_files.last_lines(self._streams.tail(self._specs[number].name, TAIL_BYTES), count)

    def _check_ready_line(self, number: int, text: bytes) -> None:
        if text in self._streams.tail(self._specs[number].name, READY_BYTES):
            self._post(ev.ConditionMet(number))

    def _on_output(self, number: int) -> None:
        """Called on output of a program: search it for the line that makes the program ready, and for its URL."""
        name, condition = self._specs[number].name, self._specs[number].condition
        if condition.kind == "line" and self._machine.programs[number].state is ProgramState.STARTING:
            self._check_ready_line(number, condition.what.encode())
        pattern = self._url_patterns.get(name)
        if pattern is None or name in self._announced or self._finishing:
            return
        if (match := pattern.line.search(self._streams.tail(name, TAIL_BYTES))) is None:
            return
        self._announced.add(name)
        self._streams.set_shown(name, True)
        url = match["url"].decode()
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
            case do.Probe(number=number):
                self._start_probe(number)
            case do.SendSignal(number=number, signal=which):
                self._send_signal(number, which)
            case do.KillLeftovers(number=number):
                self._kill_leftovers(number)
            case do.OpenGate(attempt=attempt) if self._programs:
                self._send(CheckPassed(attempt))
            case do.ReportMainDone(number=number):
                self._send(MainDone(self._attempt, self._specs[number].name))
            case do.ReportMainEnded(number=number):
                self._send(MainEnded(self._attempt, self._specs[number].name))
            case do.ReportReady(number=number) if self._programs:
                self._report_ready(number)
            case do.ReportFailure():
                self._report_failure(command)
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
        config = make_zygote_config(shielded=signals_to_block(self._preempt_signal))
        try:
            zygote = ZygoteClient(self._loop, ZygoteStartSettings(config, self._jobs.environment()), listener=None)
        except process_limits.ResourceLimitError as error:
            for number, program in enumerate(self._machine.programs):
                if program.life is life:
                    self._loop.call_soon(partial(self._post, ev.ProgramStartFailed(number, error.message)))
            return
        self._guards[life] = Guard(self, life, zygote)
        self._tree.other_zygotes.add(zygote.pid)
        specs = [program.spec for program in self._machine.programs if program.life is life]
        if any(spec.is_world or spec.name in self._url_patterns for spec in specs):
            self._temp_dir.create(zygote.remove_on_exit)  # TensorBoard and launchers leave files when they are killed

    def _build_job(self, number: int, fds: dict[str, int]) -> ProgramJob:
        spec = self._specs[number]
        show, log = spec.name not in self._url_patterns, f"{spec.name}{attempt_suffix(self._attempt)}.log"
        log_path = self._context.log.file(f"sidecar-{spec.name}.log" if self._is_option_sidecar(number) else log)
        on_output = self._loop.guard(partial(self._on_output, number))
        self._streams.open_program(fds, spec.name, show=show, log=log_path, on_output=on_output)
        variable = TEMP_PARENT_VARIABLE if spec.is_world else "TMPDIR" if spec.name in self._url_patterns else ""
        return self._jobs.build(number, {variable: self._temp_dir.path} if variable and self._temp_dir.path else {})

    def _start_probe(self, number: int) -> None:
        spec = self._specs[number]
        condition = spec.condition
        if condition.kind == "line":  # it may have printed that before its process was known here
            return self._loop.call_soon(partial(self._check_ready_line, number, condition.what.encode()))
        if self._addresses is None:
            return
        if condition.kind == "file":
            condition = condition._replace(what=self._jobs.fill_path(number, condition.what))
        on_ready = partial(self._post, ev.ConditionMet(number))
        self._probes[number] = ReadyProbe(self._loop, condition, self._addresses.of(spec.name), on_ready)

    def _report_ready(self, number: int) -> None:
        spec = self._specs[number]
        if self._is_option_sidecar(number):
            return
        self._send(ProgramIsReady(self._attempt, spec.name))
        seconds = time.monotonic() - self._started_at.get(number, time.monotonic())
        address = self._addresses.format_address(spec.name) if self._addresses else ""
        self._emit(ProgramReady(spec.name, seconds, self._attempt))
        if spec.ready:
            self._show_note(f"{spec.name} is ready{address and f' at {address}'} after {seconds:.1f} s")

    def _report_ready_elsewhere(self, names: Sequence[str]) -> None:
        """Show which programs of other nodes have become ready."""
        for name in names:
            if (spec := self._jobs.elsewhere.get(name)) is None or name in self._ready_elsewhere:
                continue
            self._ready_elsewhere.add(name)
            address = self._addresses.format_address(name) if self._addresses else ""
            if self._context.plan.node_rank == 0:
                self._emit(ProgramReady(name, time.monotonic() - self._planned_at, self._attempt))
            if spec.ready and self._jobs.has_own_terminal:
                self._show_note(f"{name} is ready{address and f' at {address}'}")

    def _report_failure(self, failure: do.ReportFailure) -> None:
        lines = () if failure.number is None else self._last_lines(failure.number, REPORTED_LINES)
        reason = failure.reason
        if any("address already in use" in line.lower() for line in lines) and self._specs[failure.number or 0].hold:
            reason += " (its port is held for it: try --no-hold, or hold = false)"
        if lines and not failure.ranks_run:
            reason, lines = f"{reason}: {lines[-1].strip()}", ()
        self._send(ProgramFailed(failure.attempt, failure.code, reason, lines))

    def _send_signal(self, number: int, which: int) -> None:
        if number in self._pids:
            pid, pidfd = self._pids[number]
            with suppress(OSError):
                proc_utils.send_signal(pid, which, pidfd)

    def _kill_leftovers(self, number: int) -> None:
        guard = self._guards[self._machine.programs[number].life].zygote
        mark = f"{PROGRAM_VARIABLE}={self._specs[number].name}".encode()
        for pid in proc_utils.list_descendants(guard.pid):
            with suppress(OSError):
                if mark in proc_utils.read_proc_file(pid, "environ").split(b"\0"):
                    os.kill(pid, signal.SIGKILL)

    def _forget_process(self, number: int) -> None:
        if number in self._probes:
            self._probes.pop(number).close()
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

    def _on_internal_error(self) -> None:
        """Called once, after an exception in a callback of ddplaunch; after that no callback is called."""
        if self._programs and not self._finishing:
            reason = "the other programs of the job were stopped by a bug in ddplaunch"
            self._send(ProgramFailed(self._attempt, EXIT_SOFTWARE, reason))
        self._close()

    def _close(self) -> None:
        self._timer.set(None)
        for life in Life:
            self._close_guard(life)
        if self._addresses:
            self._addresses.release_ports()
        self._temp_dir.remove()
