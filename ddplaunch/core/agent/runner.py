"""Runs the ranks of one node: gives ``NodeMachine`` its events, and executes its commands.

All effects of the node are here or in the objects that this one holds: the loop, the control link, the zygote, the
ranks' processes, their output, the store, the screen and the features' node sides. What they report becomes an event.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from functools import partial

from msgspec.structs import replace

from ddplaunch.base import tty
from ddplaunch.base.errors import UsageError
from ddplaunch.base.event_loop import EventLoop, WakeTimer
from ddplaunch.base.safe_files import current_folder
from ddplaunch.core import events, messages
from ddplaunch.core.agent import printed_errors, rank_files
from ddplaunch.core.agent.node_context import NodeContext
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.node_rpc import NodeRpc
from ddplaunch.core.agent.node_sides import NodeSides
from ddplaunch.core.agent.process_tree import ProcessTree
from ddplaunch.core.agent.run_temp_dir import PreemptionFile
from ddplaunch.core.agent.signal_delivery import SignalDelivery
from ddplaunch.core.agent.store_host import StoreHost
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import MAX_REPORT_CHARS, JobResult, RankFailure
from ddplaunch.core.isolation import raise_errors_in_loop
from ddplaunch.core.job.rpc import find_kind
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.net.link import make_attempt_plan, make_link
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.node.machine import NodeMachine
from ddplaunch.core.node.node_attempt import AttemptPhase
from ddplaunch.core.node_config import NodeConfig
from ddplaunch.core.options import Logging, Preemption, Stopping
from ddplaunch.core.output.run_log import RunLog
from ddplaunch.core.output.screen import Screen
from ddplaunch.core.output.streams import REPORTED, Streams
from ddplaunch.core.signals import STOP_SIGNALS
from ddplaunch.system.network.addresses import ReverseLookupCheck
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.processes import proc_utils, process_limits
from ddplaunch.system.processes.proc_utils import FORWARDED_SIGNALS


class NodeRunner:
    """Runs this node's part of a job, through all attempts; listens to the zygote and to the output of the ranks."""

    def __init__(
        self,
        plan: Plan,
        node_config: NodeConfig,
        job_config: JobConfig,
        loop: EventLoop,
        screen: Screen,
        log: RunLog,
        observers: events.Observers,
        sides: NodeSides,
        tree: ProcessTree,
        listener_socket: socket.socket | None,
    ) -> None:
        """Bind the ports and open the log folder.

        ``sides``: the sides of all features; the caller makes them before ``run``. ``tree`` may have started the
        zygote; ``listener_socket`` listens on the control port, if that was bound before.
        Raises UsageError if a port is taken, the interface does not exist, or the folder cannot be created.
        """
        self._node_config, self._job_config, options = node_config, job_config, node_config.options
        self._loop, self._screen, self._observers, self.sides = loop, screen, observers, sides
        process_limits.raise_fd_limit_for_ranks(
            len(plan.local_ranks), 3 + 2 * bool(options[Logging].log_dir) + 2 * node_config.inspect
        )
        store = StoreHost(plan, new_file_each_attempt=plan.nnodes == 1 or job_config.port is not None)
        self._plan = replace(plan, master_port=store.port.number) if store.port else plan
        self._link = make_link(loop, self._plan, job_config, self._on_message, listener_socket)
        if plan.holds_store or job_config.port is None:
            log.open(plan.run_id, plan.node_rank)
        self.tree = tree
        tree.attach(self, screen.show_note)
        self.streams = Streams(loop, screen, self, full_tracebacks=node_config.show.full_tracebacks)
        self.context = NodeContext(node_config, screen, self.streams, log, store, PreemptionFile(tree.temp_dir))
        self._lookup_check = ReverseLookupCheck(screen.show_note) if job_config.port is not None else None
        self.send = raise_errors_in_loop(
            loop.call_soon, self._link.send
        )  # sends a control message to node 0, for features
        self.rpc = NodeRpc(loop, self.send, screen.show_note)
        self._machine = NodeMachine(
            grace_s=options[Stopping].grace,
            inspects_before_stop=job_config.inspects_before_stop,
            preempt_signal=node_config.zygote.preempt_signal,
            preempt_forward=options[Preemption].preempt_forward,
        )
        self._ranks = NodeRanks(self._machine.view, self._plan, loop, tree.temp_dir)
        self._signals = SignalDelivery(loop, screen.show_note)
        self._inbox: deque[MachineEvent] = deque()
        self._replies: deque[MachineEvent] = deque()  # to commands of the last event: handled before the inbox
        self._is_handling = self._waits_ended = False
        self.exit_code: int | None = None  # once the result is written: a signal then ends the process with it
        self._post_for_feature = raise_errors_in_loop(loop.call_soon, self.post)
        self._timer = WakeTimer(loop, lambda: self.post(ev.DeadlineDue()))

    def run(self) -> JobResult:
        """Run the job; return when no process of its ranks is left on this node, and their output is written."""
        preempt_signal = self._node_config.zygote.preempt_signal
        self._loop.add_signal_handlers(
            STOP_SIGNALS, self._on_signal, even_if_ignored=() if preempt_signal is None else (preempt_signal,)
        )
        self._loop.add_signal_handlers(
            FORWARDED_SIGNALS - {preempt_signal}, lambda number: self.post(ev.ForwardableSignalArrived(number))
        )
        self.tree.ensure_zygote(self._plan)
        proc_utils.adopt_orphans()  # not before: a zygote that a feature provides is a detached process
        try:
            with tty.keep_terminal_settings():
                self._link.start()
                while self._machine.phase is not AttemptPhase.ENDED:
                    self._loop.run_once()
        finally:
            self._signals.close()
            self._link.close()
            self.tree.close()
            self.tree.temp_dir.remove()
            self.context.store.close()
        self._screen.end()
        while not (self._waits_ended or (self._loop.is_idle and self._screen.is_drained and self._link.is_closed)):
            self._loop.run_once()
        assert self._machine.result
        return self._machine.result

    # ------------------------------------------------------------------------------------------------------- events

    def post(self, event: MachineEvent) -> None:
        """Handle an event, and what follows from it.

        An event that is posted while another one is handled waits for its end, so commands never nest.
        """
        self._inbox.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while waiting := self._replies or self._inbox:
                now = Now(time.monotonic(), time.time())
                for command in self._machine.on(waiting.popleft(), now):
                    self._execute(command)
        finally:
            self._is_handling = False
        self._timer.set(self._machine.wake_at())

    def stop(self, now: bool, command: str = "") -> None:
        """Stop the job as Ctrl-C does; ``now``: as a second Ctrl-C does. ``command``: the command that requests it."""
        self._post_for_feature(ev.StopCommanded(now, command and f"`{command}` was called"))

    def _end_waits(self) -> None:
        """Let ``run`` return without waiting for readers and other nodes; exit if the result is written already."""
        if self.exit_code is not None:
            os._exit(self.exit_code)
        self._waits_ended = True

    def _on_signal(self, number: int) -> None:
        self.post(ev.SignalArrived(number, from_terminal=os.isatty(2)))

    def _on_message(self, message: messages.Message) -> None:
        match message:
            case messages.RpcRequest():
                self.rpc.on_request(self._ranks, message, find_kind(message.kind))
            case messages.RpcReply():
                self.rpc.on_reply(message)
            case messages.JoinAccepted(node_rank=int(node_rank)):
                self._plan = replace(self._plan, node_rank=node_rank)
                self.post(ev.MessageReceived(0, message))
            case messages.CheckRequest(attempt=attempt):
                return None if self.sides.on_check(message) else self.send(messages.CheckPassed(attempt))
            case _:
                self.post(ev.MessageReceived(0, message))
        self.sides.on_message(message)

    def on_output(self, rank: int) -> None:
        self.sides.on_output(rank)

    def on_output_drained(self) -> None:
        self.post(ev.OutputDrained())

    def on_zygote_event(self, event: ev.NodeEvent) -> None:
        """Handle an event of the zygote or a process: update the list of processes, then pass it to the machine."""
        match event:
            case ev.ZygoteStarted():
                self._on_zygote_started(event)
            case ev.ProcessSpawned(rank=rank, pid=pid, pidfd=pidfd):
                self._ranks.add_process(rank, pid, pidfd)
                self.tree.add_rank_session(pid)
            case ev.ProcessExited(rank=rank, pid=pid, code=code):
                self._ranks.remove_process(rank, pid, code)
            case ev.ZygoteLost():
                event = ev.ZygoteLost(self.tree.close())
        self.post(event)

    def _on_zygote_started(self, started: ev.ZygoteStarted) -> None:
        if self.tree.zygote:
            self.tree.temp_dir.create(self.tree.zygote.remove_on_exit)
        plan, failed = self._node_config.zygote.plan, started.failed
        fallback_reason, excluded = plan.explain_exclusions(failed)
        modules = (plan.fallback if failed else plan.modules) if started.forks else ()
        source = self.tree.zygote_source
        warm = source.unavailable_reason if source else None
        values = (started.forks, started.unsafe, started.seconds, modules, fallback_reason, excluded, warm)
        self._observers.emit(events.ZygoteReady(*values))

    def _on_mismatch(self, rank: int, outcome: str, module: str, differs: str) -> None:
        self._observers.emit(events.ImportMismatch(rank, outcome, module, differs, self._ranks.number))

    def _on_crash(self, ranks: NodeRanks, rank: int) -> None:
        self.streams.read_pending(rank)  # what it printed before
        if not self.sides.on_crash(rank):
            ranks.release_crashed(rank)

    # ----------------------------------------------------------------------------------------------------- commands

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.Send(message=message):
                self._link.send(message)
            case do.Emit(event=event):
                self._observers.emit(event)
            case do.ShowNote(text=text, of_job=of_job):
                self._screen.show_note(text, of_job=of_job)
            case do.ShowFooter(text=text, of_job=of_job):
                self._screen.show_footer(text, of_job=of_job)
            case do.ShowJobMessages():
                self._screen.reports_job = True
            case do.OpenLog(joined=joined):
                self._open_log(joined)
            case do.PrepareAttempt(order=order):
                self._prepare_attempt(order)
            case do.OpenStore():
                self._open_store()
            case do.BeginAttempt():
                self._signals.on_attempt_start(self._ranks)
                self.sides.on_attempt_start(self._ranks)
            case do.SpawnRank(rank=rank):
                self._spawn_rank(rank)
            case do.WithdrawSpawns():
                self._replies.append(ev.SpawnsWithdrawn(tuple(self.tree.withdraw_spawns())))
            case do.StopRanks(number=number, spare_failing=spare_failing):
                self._stop_ranks(number, spare_failing=spare_failing)
            case do.StopRank(rank=rank):
                self._ranks.processes[rank].stop(signal.SIGTERM)
            case do.SignalRanks(number=number, only_handlers=only_handlers):
                if only_handlers:
                    is_notice = number == self._node_config.zygote.preempt_signal  # it has messages of its own
                    self._signals.send(number, self._ranks, names_unhandled=not is_notice)
                else:
                    self._ranks.forward_signal(number, only_handlers=False)
            case do.CreatePreemptionFile(report_error=report_error):
                error = self.context.preemption_file.create()
                if error and report_error:
                    self._screen.show_note(f"cannot notify the ranks of the preemption: {error}")
            case do.NotePreemptionHandlers(number=number):
                if self._ranks.is_signal_handled(number):
                    self.context.preemption_file.mark_seen()
            case do.ExplainEnd():
                self._explain_rank_end(command)
            case do.Sweep(grace_s=grace_s):
                self.tree.sweep(grace_s)
            case do.KillZygote():
                self.tree.kill()  # without waiting for end of file: a fork of it may keep the socket open
                self._replies.append(ev.ZygoteLost(self.tree.close()))
            case do.CloseZygote():
                self.tree.close()
            case do.KillRemaining():
                self._replies.append(ev.RemainingKilled(tuple(self.tree.kill_remaining())))
            case do.DrainOutput():
                self._ranks.forget_processes()
                if not self.streams.has_open_rank:
                    self.post(ev.OutputDrained())
            case do.CollectOutput(failed=failed):
                self._collect_output(failed)
            case do.SuspendJob():
                self._screen.suspend(self._ranks.suspend)
                self.sides.on_resume()
            case do.InspectRanks():
                self.sides.on_inspect_key()
            case do.EndWaits(delay_s=delay_s):
                if not self.sides.on_signal_after_end():
                    self._loop.call_later(delay_s, self._end_waits)
            case _:
                raise AssertionError(command)

    def _open_log(self, joined: messages.JoinAccepted) -> None:
        try:
            self.context.log.open(joined.run_id, self._plan.node_rank, late=joined.late)
        except UsageError as error:
            self._replies.append(ev.StartFailed(error.message, error.hint, is_final=True))

    def _prepare_attempt(self, order: messages.StartAttempt) -> None:
        plan, environ = self._plan, self.tree.environ
        if order.assignment:
            extra = self._lookup_check.rank_environment() if self._lookup_check else {}
            plan = make_attempt_plan(plan, order, self._job_config, environ, extra)
        plan = plan.with_store(torch=self._node_config.zygote.plan.imports_torch)
        self._ranks = NodeRanks(self._machine.view, plan, self._loop, self.tree.temp_dir)
        self._ranks.on_hold_changed = self.sides.on_resume
        self._ranks.on_mismatch, self._ranks.has_only_printed = self._on_mismatch, self.streams.prepare_restart
        self._ranks.on_crash, self._ranks.on_crash_output = (
            partial(self._on_crash, self._ranks),
            self.streams.add_stderr,
        )
        self._observers.emit(events.AttemptPlanned(plan, order.attempt))
        zygote = self.tree.ensure_zygote(plan)
        self.context.store.start_attempt()
        self._replies.append(ev.AttemptPrepared(tuple(plan.local_ranks), zygote.ready))

    def _open_store(self) -> None:
        try:
            self.context.store.open(self.tree.zygote, self._ranks)
        except UsageError as error:
            self._replies.append(ev.StartFailed(error.message, error.hint))

    def _spawn_rank(self, number: int) -> None:
        rank = self._ranks.plan.rank_of(number)
        build = partial(self.context.build_rank_job, self.sides.make_rank_sides, self._ranks, rank)
        assert self.tree.zygote
        self.tree.zygote.spawn(number, lambda fds: self.sides.complete_job(build(fds)))

    def _stop_ranks(self, number: int, *, spare_failing: bool) -> None:
        spared = {rank for rank in self._ranks.processes if spare_failing and self.sides.find_exception(rank)}
        stopped = {rank: process for rank, process in self._ranks.processes.items() if rank not in spared}
        for process in stopped.values():
            process.stop(number)
        self._replies.append(ev.StopSent(tuple(stopped)))

    def _explain_rank_end(self, end: do.ExplainEnd) -> None:
        failure, rank = end.failure, end.failure.rank
        self.streams.read_pending(rank)
        self._ranks.read_crash_output(rank)
        recorded = rank_files.read_exception(self._ranks.rank_file_path(rank, "json"), failure, stopped=end.stopped)
        if recorded is None and end.stopped:  # perhaps killed in a ``finally`` that took longer than the grace
            if (found := self.sides.find_exception(rank)) is None:
                return self._replies.append(ev.EndExplained(rank, None))
            recorded = replace(failure, message=found[0], traceback=found[1])
        failure = recorded or failure
        hint = failure.hint or self.sides.explain_failure(failure, end.peak_bytes)
        hint = hint or rank_files.signal_hint(failure.signal)
        self._replies.append(ev.EndExplained(rank, self._add_printed_errors(replace(failure, hint=hint))))

    def _add_printed_errors(self, failure: RankFailure) -> RankFailure:
        """Add to a failure what only the output shows: why native code aborted the rank, or that a thread failed."""
        if failure.refused or (failure.signal not in (None, signal.SIGABRT)):
            return failure
        printed = self.streams.tail(failure.rank)
        if failure.signal:
            hint = printed_errors.add_abort_location(failure.hint, printed, current_folder())
            return replace(failure, hint=hint, abort_reason=printed_errors.find_abort_reason(printed))
        if failure.exit_code == 1 and not failure.message and (last := printed_errors.find_last_traceback(printed)):
            return replace(failure, message=last[0], traceback=last[1])
        text = printed_errors.describe_thread_error(printed, current_folder())
        return replace(failure, hint="\n".join(filter(None, (failure.hint, text)))) if text else failure

    def _collect_output(self, failed: tuple[int, ...]) -> None:
        self._ranks.close()
        self.streams.close()
        tails, chars = [], 0
        for rank in failed:
            lines = rank_files.last_lines(self.streams.tail(rank, REPORTED))
            chars += sum(map(len, lines))
            if lines and chars <= MAX_REPORT_CHARS:
                tails.append((rank, lines))
        self._replies.append(ev.OutputCollected(tuple(tails), self.context.preemption_file.was_seen))
