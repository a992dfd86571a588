"""The decisions on the programs of one node, as a pure state machine: events go in, commands come out.

- A program starts once all programs that it comes ``after`` are ready. The gate opens, and the ranks start, once all
  programs that the ranks wait for are ready.
- A service that ends before the job does has failed, also with code 0; so has a main that ends with another code than
  0, and a program that is not ready in time. Only the first failure of an attempt is reported.
- A program that fails starts again alone after a delay, up to ``restarts`` times: no other program is affected.
- The end of a sidecar is only noted. Programs that come after it start then.
- A stop: mains get the signal that stops the ranks, and no main starts any more. Then services and sidecars get
  SIGTERM, each once all programs that come after it have ended. Only the program itself gets the signal, not its
  children. A program that has not ended within its grace is killed.
- When all have ended, their guard sweeps the processes that they have left. There are two guards: one for the sidecars,
  which live as long as the job, and one for all others, which start again with each attempt.
- OVER: nothing is left, and nothing changes any more.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.base.errors import EXIT_OS, EXIT_SIGNAL, EXIT_TIMEOUT
from ddplaunch.base.text import format_count, format_elapsed, join_names, signal_name
from ddplaunch.core.deadlines import Deadlines, Now
from ddplaunch.core.failures import describe_exit
from ddplaunch.features.programs import program_commands as do
from ddplaunch.features.programs import program_events as ev
from ddplaunch.features.programs.program_commands import Life
from ddplaunch.features.programs.spec import ProgramSpec
from ddplaunch.system.processes.proc_utils import KILL_TIMEOUT_S

RESTART_DELAY_S, MAX_RESTART_DELAY_S = 10.0, 300.0  # before a program starts again alone: it doubles each time, up to
SWEEP_MARGIN_S = KILL_TIMEOUT_S + 1  # beyond the grace, for a guard to reply to a sweep


class ProgramState(Enum):
    WAITING = "waiting"  # for other programs, or for its guard
    REQUESTED = "requested"  # from the guard
    STARTING = "starting"  # it runs, and is not ready
    READY = "ready"
    PAUSING = "pausing"  # it has failed, and starts again soon
    ENDED = "ended"


ALIVE = {ProgramState.REQUESTED, ProgramState.STARTING, ProgramState.READY}


class GuardState(Enum):
    NONE = "not started"
    STARTING = "starting"
    READY = "ready"  # programs can be requested from it
    SWEEPING = "sweeping"


class LiveProgram(Struct):
    """The state of a program in the current attempt."""

    spec: ProgramSpec
    state: ProgramState = ProgramState.WAITING
    counts_as_ready: bool = False  # also after its end, where that does not matter
    restarts: int = 0  # how often it has started again alone
    kill_at: float | None = None  # when its grace is over, once it was asked to end

    @property
    def life(self) -> Life:
        return Life.JOB if self.spec.outlives_attempts else Life.ATTEMPT


class Gate(NamedTuple):
    """What the ranks wait for before they start: the programs that must be ready."""

    after: Collection[str]  # programs, also of other nodes
    target: str  # the name of the ranks' program in messages
    elsewhere: Collection[str] = ()  # programs of other nodes that the footer names


class ProgramsMachine:
    """The state machine for the programs of one node, through all attempts."""

    def __init__(self, specs: Sequence[ProgramSpec], gate: Gate) -> None:
        self.programs = [LiveProgram(spec) for spec in specs]
        self._gate = gate
        self._guards = {each.life: GuardState.NONE for each in self.programs}
        self._ready_elsewhere: set[str] = set()
        self._deadlines: Deadlines[tuple[str, int | Life]] = Deadlines()
        self._commands: list[do.Command] = []
        self._attempt = -1
        self._stopping: tuple[Life, ...] = ()  # whose programs are being stopped
        self._finishing = self._was_guard_lost = self._end_expected = False
        self.is_gate_open = self._failed = False
        self._main_signal = 0  # the signal that stops mains, also those that start later; 0: none yet
        self._footer = ""
        self.is_over = False

    def wake_at(self) -> float | None:
        return self._deadlines.next

    def on(self, event: ev.Event, now: Now) -> list[do.Command]:
        """Handle an event, and return the commands that follow from it."""
        if not self.is_over:
            self._handle(event, now)
        commands, self._commands = self._commands, []
        return commands

    def _handle(self, event: ev.Event, now: Now) -> None:
        match event:
            case ev.AttemptBegins(attempt=attempt):
                self._on_attempt_begins(attempt, now)
            case ev.GuardStarted(life=life):
                if self._guards[life] is GuardState.STARTING:
                    self._guards[life] = GuardState.READY
                    self._continue(now)
            case ev.ReadyElsewhere(names=names):
                self._ready_elsewhere.update(names)
                self._show_waiting()
                self._continue(now)
            case ev.ProgramSpawned(number=number):
                self._on_spawned(number, now)
            case ev.ProgramStartFailed(number=number, reason=reason):
                self._on_spawn_failed(number, reason, now)
            case ev.ConditionMet(number=number):
                if self.programs[number].state is ProgramState.STARTING:
                    self._on_condition_met(number, now)
            case ev.ProgramExited(number=number, code=code, last_words=words):
                self._on_exited(number, code, words, now)
            case ev.StopExpected():
                self._end_expected = True
            case ev.RanksStopped(signal=number):
                self._signal_mains(number, now)
            case ev.JobFinished(signal=number):
                self._on_job_finished(number, now)
            case ev.KillRequested():
                self._finishing, self._stopping = True, (*self._guards,)
                for life in self._stopping:
                    self._sweep(life, 0, now, kill=True)
            case ev.GuardSwept(life=life, stuck=stuck):
                self._on_swept(life, stuck, now)
            case ev.GuardLost(life=life):
                self._on_guard_lost(life, now)
            case ev.DeadlineDue():
                while (due := self._deadlines.pop_due(now.mono)) is not None:
                    self._on_deadline(*due, now)

    def _do(self, *commands: do.Command) -> None:
        self._commands += commands

    # ------------------------------------------------------------------------------------------------------ starting

    def _on_attempt_begins(self, attempt: int, now: Now) -> None:
        if self._finishing:
            return
        self._attempt = attempt
        self._ready_elsewhere.clear()
        if any(each.life is Life.ATTEMPT and each.state is not ProgramState.WAITING for each in self.programs):
            self._stop(signal.SIGTERM, (Life.ATTEMPT,), now)
        else:
            self._begin_attempt(now)

    def _begin_attempt(self, now: Now) -> None:
        """Begin an attempt: start the programs that can start; those of earlier attempts have ended."""
        self.is_gate_open = self._failed = False
        self._main_signal = 0
        for program in self.programs:
            if program.life is Life.ATTEMPT:
                program.state, program.counts_as_ready, program.kill_at = ProgramState.WAITING, False, None
                program.restarts = 0
        for life, state in self._guards.items():
            if state is GuardState.NONE and any(each.state is ProgramState.WAITING for each in self._programs_of(life)):
                self._guards[life] = GuardState.STARTING
                self._do(do.StartGuard(life))
        self._show_waiting()
        self._continue(now)

    def _continue(self, now: Now) -> None:
        """Continue a stop that is under way, and start the programs that can start now."""
        if self._stopping:
            self._continue_stop(now)
        if self._finishing or Life.ATTEMPT in self._stopping or self._attempt < 0:
            return
        ready = {each.spec.name for each in self.programs if each.counts_as_ready} | self._ready_elsewhere
        for number, program in enumerate(self.programs):
            has_guard = self._guards[program.life] is GuardState.READY
            if program.state is ProgramState.WAITING and has_guard and ready.issuperset(program.spec.after or ()):
                program.state = ProgramState.REQUESTED
                self._do(do.Spawn(number))
        if not self.is_gate_open and ready.issuperset(self._gate.after):
            self.is_gate_open = True
            self._show_footer("")
            self._do(do.OpenGate(self._attempt))

    def _on_spawned(self, number: int, now: Now) -> None:
        program = self.programs[number]
        if program.state is not ProgramState.REQUESTED:
            return
        program.state = ProgramState.STARTING
        if self._is_stopped(program):
            self._continue_stop(now)
        elif self._main_signal and program.spec.kind == "main":
            self._signal(number, self._main_signal, now)
        elif program.spec.ready:
            self._deadlines.set(("ready", number), now.mono + program.spec.ready_timeout_s)
            self._do(do.Probe(number))
            self._show_waiting()
        else:
            self._set_ready(number, now)

    def _on_condition_met(self, number: int, now: Now) -> None:
        program = self.programs[number]
        if program.kill_at is None:
            self._set_ready(number, now)
        elif program.spec.kind != "main":  # it still runs after SIGTERM: vLLM loses one that comes while it loads
            self._do(do.SendSignal(number, signal.SIGTERM))

    def _set_ready(self, number: int, now: Now) -> None:
        program = self.programs[number]
        program.state, program.counts_as_ready = ProgramState.READY, True
        self._deadlines.cancel(("ready", number))
        self._do(do.ReportReady(number))
        self._show_waiting()
        self._continue(now)

    def _show_waiting(self) -> None:
        if self.is_gate_open or self._finishing or self._failed or self._attempt < 0:
            return
        waits = [each.spec for each in self.programs if each.state is ProgramState.STARTING and each.spec.ready]
        elsewhere = [each for each in self._gate.elsewhere if each not in self._ready_elsewhere]
        text = join_names([*(f"{each.name} ({each.ready})" for each in waits), *elsewhere])
        self._show_footer(f"waiting for {text}" if text else "")

    def _show_footer(self, text: str) -> None:
        if text != self._footer:
            self._footer = text
            self._do(do.ShowFooter(text))

    # ----------------------------------------------------------------------------------------------- what has happened

    def _on_spawn_failed(self, number: int, reason: str, now: Now) -> None:
        program = self.programs[number]
        program.state = ProgramState.ENDED
        text = f"{program.spec.name} cannot be started: {reason}"
        if program.spec.kind == "sidecar":
            program.counts_as_ready = True
            self._do(do.ShowNote(text))
        elif not self._is_stopped(program):
            self._report_first_failure(EXIT_OS, text, None)
            self._report_main_ended(number)
        self._continue(now)

    def _report_main_ended(self, number: int) -> None:
        if self.programs[number].spec.kind == "main" and not self._finishing:
            self._do(do.ReportMainEnded(number))

    def _on_exited(self, number: int, code: int, last_words: str, now: Now) -> None:
        program, name = self.programs[number], self.programs[number].spec.name
        if program.state not in ALIVE:
            return
        was_ready, was_asked = program.state is ProgramState.READY, program.kill_at is not None
        program.state = ProgramState.ENDED
        self._deadlines.cancel(*((what, number) for what in ("ready", "kill", "stuck")))
        how, exit_code = describe_exit(code), EXIT_SIGNAL - code if code < 0 else code
        after = f", after {format_count(program.restarts, 'restart')}" if program.restarts else ""
        if was_asked or self._is_stopped(program):
            self._report_main_ended(number)
        elif self._may_restart(program, code):
            self._restart_later(number, how, now)
        elif program.spec.kind == "sidecar":
            program.counts_as_ready = True
            if not self._end_expected:
                words = f": {last_words}" if code and last_words else ""
                self._do(do.ShowNote(f"{name} {how}{after}, the job continues{words}"))
        elif program.spec.kind == "service":
            when = f"before {self._gate.target} was done" if was_ready else "before it was ready"
            self._report_first_failure(exit_code or 1, f"{name} {how} {when}{after}", number)
        elif code:
            self._report_first_failure(exit_code, f"{name} {how}{after}", number)
            self._report_main_ended(number)
        else:
            program.counts_as_ready = True
            self._do(do.ReportMainDone(number))
        self._continue(now)

    def _may_restart(self, program: LiveProgram, code: int) -> bool:
        has_failed = bool(code) or program.spec.kind == "service"
        goes_on = not (self._finishing or self._failed or self._end_expected)
        return has_failed and goes_on and program.restarts < program.spec.restarts

    def _restart_later(self, number: int, how: str, now: Now) -> None:
        program = self.programs[number]
        delay_s = min(MAX_RESTART_DELAY_S, RESTART_DELAY_S * 2**program.restarts)
        program.restarts += 1
        program.state = ProgramState.PAUSING
        self._deadlines.set(("restart", number), now.mono + delay_s)
        which = f"restart {program.restarts} of {program.spec.restarts}"
        text = f"{program.spec.name} {how}: starting it again in {delay_s:g} s ({which})"
        self._do(do.KillLeftovers(number), do.ShowNote(text))

    def _report_first_failure(self, code: int, reason: str, number: int | None) -> None:
        if not self._failed:
            self._failed = True
            self._show_footer("")
            self._do(do.ReportFailure(self._attempt, code, reason, number, self.is_gate_open))

    # ------------------------------------------------------------------------------------------------------- stopping

    def _programs_of(self, life: Life) -> Iterable[LiveProgram]:
        return (each for each in self.programs if each.life is life)

    def _is_stopped(self, program: LiveProgram) -> bool:
        return program.life in self._stopping

    def _signal_mains(self, number: int, now: Now) -> None:
        """Called when the ranks are being stopped: send the same signal to the mains; the services go on."""
        self._main_signal = number
        for index, program in enumerate(self.programs):
            if program.spec.kind != "main" or program.kill_at is not None:
                continue
            if program.state in (ProgramState.WAITING, ProgramState.PAUSING):
                self._deadlines.cancel(("restart", index))
                program.state = ProgramState.ENDED
                self._report_main_ended(index)
            self._signal(index, number, now)

    def _on_job_finished(self, number: int, now: Now) -> None:
        if not self._finishing:
            self._finishing, self.is_over = True, not self._guards
            self._show_footer("")
            self._stop(number, (*self._guards,), now)

    def _stop(self, main_signal: int, lives: tuple[Life, ...], now: Now) -> None:
        self._stopping, self._main_signal = lives, self._main_signal or main_signal
        for number, program in enumerate(self.programs):
            if program.life in lives:
                self._deadlines.cancel(("ready", number), ("restart", number))
        self._continue_stop(now)

    def _continue_stop(self, now: Now) -> None:
        """Send signals to the programs whose turn to stop has come; once all have ended, kill what they have left."""
        alive = [each for each in self.programs if self._is_stopped(each) and each.state in ALIVE]
        has_mains = any(each.spec.kind == "main" for each in alive)
        for number, program in enumerate(self.programs):
            if program not in alive or program.kill_at is not None or program.state is ProgramState.REQUESTED:
                continue
            if program.spec.kind == "main":
                self._signal(number, self._main_signal, now)
            elif not has_mains and not any(program.spec.name in (each.spec.after or ()) for each in alive):
                self._signal(number, signal.SIGTERM, now)
        if not alive:
            for life in self._stopping:
                left_s = max((each.kill_at or 0 for each in self._programs_of(life)), default=0) - now.mono
                self._sweep(life, max(0.0, left_s), now)

    def _signal(self, number: int, which: int, now: Now) -> None:
        """Send a signal to stop a program, and set the time at which it is killed."""
        program = self.programs[number]
        if program.state in (ProgramState.STARTING, ProgramState.READY):
            program.kill_at = now.mono + program.spec.grace_s
            self._deadlines.cancel(("ready", number))
            self._deadlines.set(("kill", number), program.kill_at)
            self._do(do.SendSignal(number, which))

    def _sweep(self, life: Life, grace_s: float, now: Now, *, kill: bool = False) -> None:
        match self._guards[life]:
            case GuardState.NONE:
                self._on_programs_gone(life, now)
            case GuardState.STARTING:  # it has no programs yet
                self._close_guard(life, now)
            case GuardState.SWEEPING if not kill:
                pass  # a second sweep could hit programs that start after the first
            case _:
                self._guards[life] = GuardState.SWEEPING
                self._deadlines.set(("sweep", life), now.mono + grace_s + SWEEP_MARGIN_S)
                self._do(do.SweepGuard(life, grace_s))

    def _on_swept(self, life: Life, stuck: Sequence[str], now: Now) -> None:
        if self._guards[life] is not GuardState.SWEEPING:
            return
        self._deadlines.cancel(("sweep", life))
        if stuck:
            self._do(do.ShowNote(f"not waiting for processes that cannot be killed: {', '.join(stuck)}"))
        if self._finishing:
            return self._close_guard(life, now)
        self._guards[life] = GuardState.READY
        self._on_programs_gone(life, now)

    def _close_guard(self, life: Life, now: Now) -> None:
        self._guards[life] = GuardState.NONE
        self._do(do.CloseGuard(life))
        self._on_programs_gone(life, now)

    def _on_programs_gone(self, life: Life, now: Now) -> None:
        """Called when no process of a guard's programs is left: end, or begin the next attempt."""
        for number, program in enumerate(self.programs):
            if program.life is life:
                self._deadlines.cancel(*((what, number) for what in ("ready", "kill", "stuck", "restart")))
                program.state = ProgramState.ENDED
        if not self._finishing:
            self._stopping = ()
            self._begin_attempt(now)
        elif all(state is GuardState.NONE for state in self._guards.values()) and not self.is_over:
            self.is_over = True
            self._deadlines.cancel()
            if self._was_guard_lost:
                self._do(do.KillRemaining())

    def _on_guard_lost(self, life: Life, now: Now) -> None:
        """Called when a guard was killed, and with it its programs, by their parent-death signal."""
        self._was_guard_lost = True
        alive = [each.spec.name for each in self._programs_of(life) if each.state is not ProgramState.ENDED]
        self._deadlines.cancel(("sweep", life))
        self._guards[life] = GuardState.NONE
        self._do(do.CloseGuard(life))
        if life in self._stopping:
            return self._on_programs_gone(life, now)
        for number, program in enumerate(self.programs):
            if program.life is life:
                self._deadlines.cancel(("restart", number))
                if program.state is not ProgramState.ENDED:
                    program.state = ProgramState.ENDED
                    self._report_main_ended(number)
        what = f"{join_names(alive)} ended because their guard process was killed"
        if life is Life.JOB:
            self._do(do.ShowNote(f"{what}; the job continues"))
            for program in self._programs_of(life):
                program.counts_as_ready = True
        elif alive:
            self._report_first_failure(EXIT_SIGNAL + signal.SIGKILL, what, None)
        self._continue(now)

    def _on_deadline(self, what: str, which: int | Life, now: Now) -> None:
        if isinstance(which, Life):  # "sweep": the guard does not answer
            self._do(do.KillGuard(which))
            return self._on_guard_lost(which, now)
        program, spec = self.programs[which], self.programs[which].spec
        match what:
            case "ready" if spec.kind == "sidecar":
                program.counts_as_ready = True
                limit = format_elapsed(spec.ready_timeout_s)
                self._do(do.ShowNote(f"{spec.name} was not ready within {limit} ({spec.ready}), the job continues"))
                self._continue(now)
            case "ready":
                limit = format_elapsed(spec.ready_timeout_s)
                self._report_first_failure(
                    EXIT_TIMEOUT, f"{spec.name} was not ready within {limit} ({spec.ready})", which
                )
            case "kill":
                sent = signal_name(self._main_signal if spec.kind == "main" else signal.SIGTERM)
                text = f"{spec.name} did not end within {spec.grace_s:g} s of {sent}, and was killed"
                self._do(do.SendSignal(which, signal.SIGKILL), do.ShowNote(text))
                self._deadlines.set(("stuck", which), now.mono + KILL_TIMEOUT_S)
            case "restart":
                program.state = ProgramState.WAITING
                self._continue(now)
            case "stuck":
                program.state = ProgramState.ENDED
                self._report_main_ended(which)
                self._continue(now)
