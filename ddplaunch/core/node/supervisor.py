"""The supervisor of one node's ranks: a state machine driven by control messages, rank exits, signals and timers.

The coordinator (``core/job``) decides what the whole job does, such as stopping all ranks when one fails or restarting
them. The supervisor carries it out on its node. In an attempt ``_on_start`` requests the ranks from the zygote (phase
LOADING until its imports are done, then RUNNING), ``Teardown`` ends them (STOPPING, SWEEPING, DRAINING), and
``_on_drained`` reports to the coordinator and waits for its next message (WAITING); ENDED is the end of the job.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from ddplaunch.base import tty
from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, UsageError
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.text import signal_name
from ddplaunch.core import events, messages
from ddplaunch.core.failures import JobResult, RankFailure, describe_exit
from ddplaunch.core.job.joining import format_join_status
from ddplaunch.core.job.rpc import find_kind
from ddplaunch.core.job.signal_forwarding import DUPLICATE_WINDOW_S, FORWARDED_SIGNALS, STOP_SIGNALS
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import Message
from ddplaunch.core.net.link import make_attempt_plan, make_link
from ddplaunch.core.node import process_limits
from ddplaunch.core.node.launcher_signals import (
    ZYGOTE_REPORT_DELAY_S,
    BroadcastSignalFilter,
    LauncherSignals,
)
from ddplaunch.core.node.node_context import NodeContext
from ddplaunch.core.node.node_ranks import AttemptPhase, NodeRanks
from ddplaunch.core.node.node_rpc import NodeRpc
from ddplaunch.core.node.node_sides import NodeSides
from ddplaunch.core.node.process_tree import ProcessTree
from ddplaunch.core.node.run_temp_dir import PreemptionFile
from ddplaunch.core.node.store_host import StoreHost
from ddplaunch.core.node.teardown import Teardown
from ddplaunch.core.node_config import NodeConfig
from ddplaunch.core.output.isolation import not_isolated
from ddplaunch.core.output.run_log import RunLog
from ddplaunch.core.output.screen import Screen
from ddplaunch.core.output.streams import Streams
from ddplaunch.core.rank import proc_utils
from ddplaunch.core.rank.zygote_messages import Usage
from ddplaunch.system.network.addresses import ReverseLookupCheck
from ddplaunch.system.plan.plan import Plan


class Supervisor:
    """Drives this node's ranks through all attempts, until the job ends; the listener of its zygote."""

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

        ``sides``: those of all features, made by the caller before ``run``. ``tree`` may have started the zygote;
        ``listener_socket`` listens on the control port, if that was bound before.

        Raises:
            UsageError: a port is taken, the interface does not exist, or the folder cannot be created.
        """
        self._node_config, self._job_config = node_config, job_config
        self._loop, self._screen, self.sides = loop, screen, sides
        process_limits.raise_fd_limit(len(plan.local_ranks), 3 + 2 * bool(node_config.log_dir) + node_config.inspect)
        store = StoreHost(plan, new_file_each_attempt=plan.nnodes == 1 or job_config.port is not None)
        self._plan = replace(plan, master_port=store.port.number) if store.port else plan
        self._link = make_link(loop, self._plan, job_config, self._on_message, listener_socket)
        if plan.hosts_store or job_config.port is None:
            log.open(plan.run_id, plan.node_rank)
        self.tree = tree
        tree.attach(self, screen.show_note)
        self._emit = observers.emit
        self.streams = Streams(
            loop,
            screen,
            sides.on_output,
            lambda: self._teardown.on_output_drained(),
            full_tracebacks=node_config.show.full_tracebacks,
        )
        self.context = NodeContext(node_config, screen, self.streams, log, store, PreemptionFile(self.tree.temp_dir))
        self._lookup_check = ReverseLookupCheck(screen.show_note) if job_config.port is not None else None
        self._signals = LauncherSignals(node_config.zygote.preempt_signal)
        self._group_signals = BroadcastSignalFilter()  # those that the ranks have got too: not to be forwarded again
        self.send = not_isolated(loop.call_soon, self._link.send)  # sends a control message to node 0, for features
        self.rpc = NodeRpc(loop, self.send, find_kind, screen.show_note)
        self._result: JobResult | None = None  # set once node 0 has ended the job
        self._new_attempt(-1, self._plan)

    def _new_attempt(self, attempt: int, plan: Plan) -> None:
        """Replace the state of the previous attempt; -1: none has started."""
        send = self._link.send
        sides = self.sides
        ranks = self._ranks = NodeRanks(
            attempt, plan, self._loop, self.tree.temp_dir, sides.explain_failure, sides.find_exception
        )
        ranks.on_hold_changed = self.sides.on_resume
        self._teardown = Teardown(ranks, self.tree, self.context, self._job_config, self._emit, send, self._on_drained)

    def run(self) -> JobResult:
        """Run the job; return when nothing of its ranks is left on this node."""
        preempt_signal = self._node_config.zygote.preempt_signal
        self._loop.add_signal_handlers(
            STOP_SIGNALS, self._on_signal, even_if_ignored=() if preempt_signal is None else (preempt_signal,)
        )
        self._loop.add_signal_handlers(FORWARDED_SIGNALS - {preempt_signal}, self._on_forwardable_signal)
        self.tree.ensure_zygote(self._plan)
        proc_utils.adopt_orphans()  # not before: a zygote that a feature provides is a detached process
        try:
            with tty.restore_terminal():
                self._link.start()
                while self._ranks.phase is not AttemptPhase.ENDED:
                    self._loop.run_once()
        finally:
            self._link.close()
            self.tree.close()
            self.tree.temp_dir.remove()
            self.context.store.close()
        self._screen.end()
        while (outcome := self._result) is None or not (
            self._loop.is_idle and self._screen.is_drained and self._link.is_closed
        ):
            self._loop.run_once()
        return outcome

    # ------------------------------------------------------------------------------------------------- control messages

    def _on_message(self, message: Message) -> None:
        self._handle_message(message)
        self.sides.on_message(message)

    def _handle_message(self, message: Message) -> None:
        match message:
            case messages.JoinAccepted():
                self._on_joined(message)
            case messages.JoinStatus():
                self._screen.show_footer(format_join_status(message), of_job=True)
            case messages.ConnectingToNodeZero(reason=error):
                self._screen.show_footer(f"waiting for node 0: {error}")
            case messages.CoordinatorLost():
                self._screen.reports_job = True  # node 0 no longer prints what concerns the whole job
            case messages.StartAttempt() if (
                not self.context.log.failed
            ):  # else NodeStartError was sent, and node 0 ends the job
                self._on_start(message)
            case messages.StopAttempt(attempt=attempt) if attempt == self._ranks.number:
                self._teardown.on_stop(message)
            case messages.PreemptRanks(attempt=attempt) if attempt == self._ranks.number:
                self._on_preempt()
            case messages.ForwardSignal():
                self._loop.call_later(
                    DUPLICATE_WINDOW_S if message.sent_to_group else 0, partial(self._forward_signal, message.number)
                )
            case messages.RpcRequest():
                self.rpc.on_request(self._ranks, message)
            case messages.RpcReply():
                self.rpc.on_reply(message)
            case messages.EndJob(outcome=outcome):
                self._on_job_end(outcome)
            case _ if event := events.event_from_message(message):  # a note, a restart: shown by observers
                self._emit(event)

    def _on_joined(self, joined: messages.JoinAccepted) -> None:
        if joined.node_rank is not None:
            self._plan = replace(self._plan, node_rank=joined.node_rank)
        try:
            self.context.log.open(joined.run_id, self._plan.node_rank, late=joined.late)
        except UsageError as error:
            self._link.send(messages.NodeStartError(error.message, error.hint))

    def _on_start(self, order: messages.StartAttempt) -> None:
        plan, environ = self._plan, self.tree.environ
        if order.assignment:
            extra = self._lookup_check.rank_environment() if self._lookup_check else {}
            plan = make_attempt_plan(plan, order, self._job_config, environ, extra)
        plan = plan.with_store(torch=self._node_config.zygote.plan.imports_torch)
        self._new_attempt(order.attempt, plan)
        ranks = self._ranks
        self._emit(events.AttemptPlanned(plan, order.attempt))
        zygote = self.tree.ensure_zygote(plan)
        ranks.set_phase(AttemptPhase.RUNNING if zygote.ready else AttemptPhase.LOADING)
        self.context.store.start_attempt()
        self._open_store()
        ranks.not_spawned = len(plan.local_ranks)
        self.sides.on_attempt_start(ranks)
        build_job = partial(self.context.build_rank_job, self.sides.make_rank_sides, ranks)
        zygote.spawn((rank.rank, partial(build_job, rank)) for rank in plan.local_ranks)

    def _open_store(self) -> None:
        """Open the store of this attempt; again once the zygote is ready, when it is known whether it has torch."""
        try:
            self.context.store.open(self.tree.zygote, self._ranks)
        except UsageError as error:
            self._link.send(messages.NodeStartError(error.message, error.hint))

    def _on_preempt(self) -> None:
        """Notify the ranks of the preemption. They end by themselves, or node 0 stops them after the grace."""
        error = self.context.preemption_file.create()
        if error and self._ranks.processes:
            self._screen.show_note(f"cannot notify the ranks of the preemption: {error}")
        self._emit(events.JobPreempted())
        forward, preempt_signal = self._node_config.preempt_forward, self._node_config.zygote.preempt_signal
        if forward is not None:
            self._loop.call_later(
                ZYGOTE_REPORT_DELAY_S, partial(self._forward_preempt_signal, forward, self._ranks.signal_all)
            )
        if preempt_signal not in (None, forward, signal.SIGINT):  # SIGINT: Python itself handles it in every rank
            self._loop.call_later(
                ZYGOTE_REPORT_DELAY_S, partial(self._forward_preempt_signal, preempt_signal, self._ranks.forward_signal)
            )

    def _forward_preempt_signal(self, number: int, send: Callable[[int], object]) -> None:
        if self._ranks.any_catches(number):
            self.context.preemption_file.mark_seen()
        if not self._group_signals.consume(number):
            send(number)

    def _on_job_end(self, outcome: JobResult) -> None:
        self._result = outcome
        match self._ranks.phase:
            case AttemptPhase.WAITING:
                self._finish(outcome)
            case AttemptPhase.LOADING:
                self._teardown.kill_loading_zygote()
            case AttemptPhase.RUNNING | AttemptPhase.STOPPING:
                self._teardown.sweep(0)

    # -------------------------------------------------------------------------------------------------- zygote messages

    def on_zygote_ready(self, forks: bool, failed: str | None, unsafe: str | None, seconds: float) -> None:
        if self.tree.zygote:
            self.tree.temp_dir.create(self.tree.zygote.remove_on_exit)
        zygote_plan = self._node_config.zygote.plan
        fallback_reason, excluded = zygote_plan.explain(failed)
        modules = (zygote_plan.fallback if failed else zygote_plan.modules) if forks else ()
        self._emit(
            events.ZygoteReady(
                forks, unsafe, seconds, modules, fallback_reason, excluded, self.tree.source_unavailable_reason
            )
        )
        if self._ranks.phase is AttemptPhase.LOADING:
            self._ranks.set_phase(AttemptPhase.RUNNING)
            self._open_store()

    def on_import_failed(self, message: str) -> None:
        self._link.send(messages.NodeStartError(message))

    def on_spawned(self, rank: int, pid: int, pidfd: int | None) -> None:
        process = self._ranks.add_process(rank, pid, pidfd)
        self.tree.add_session(pid)
        self._emit(events.RankStarted(rank, pid, self._ranks.number))
        if self._ranks.spawned_count == 1:
            self._link.send(messages.RanksStarted(self._ranks.number))
        if self.context.preemption_file.is_preempted:
            self.context.preemption_file.create()  # the folder exists only since the zygote is ready
        if self._ranks.phase in (AttemptPhase.STOPPING, AttemptPhase.SWEEPING):
            process.stop(signal.SIGTERM)

    def on_spawn_failed(self, rank: int, errno: int) -> None:
        """Report that a rank could not be started; the others of this attempt are not started either."""
        self._ranks.not_spawned -= self.tree.cancel_pending()
        self._emit(events.RankStartFailed(rank, errno, self._ranks.number))
        self._on_rank_end(self._ranks.spawn_failure(rank, errno))

    def on_exited(self, rank: int, pid: int, code: int, usage: Usage) -> None:
        process = self._ranks.remove_process(rank, pid, code)
        if process is None:
            return
        self._emit(events.RankExited(rank, pid, code, self._ranks.number, *usage))
        failure = None
        if code == EXIT_PREEMPTED and self.context.preemption_file.is_preempted:
            self.context.preemption_file.mark_seen()
        elif code != 0:
            failure = self._ranks.to_failure(process, code, usage[0])
        self._on_rank_end(failure)

    def _on_rank_end(self, failure: RankFailure | None) -> None:
        if failure is not None:
            self._link.send(messages.FailureReported(self._ranks.number, failure, time.time()))
        self._teardown.check_progress()

    def on_store_exited(self, pid: int, code: int) -> None:
        self._teardown.on_store_exited(f"the store (pid {pid}) {describe_exit(code)}")

    def on_swept(self, found: list[str], stuck: list[str]) -> None:
        self._teardown.on_swept(found, stuck)

    def on_zygote_lost(self) -> None:
        self._teardown.on_zygote_lost()

    # ---------------------------------------------------------------------------------------------- signals and the end

    def _on_signal(self, number: int, reason: str = "") -> None:
        """Handle one of ``STOP_SIGNALS``; ``reason``: set if a rank or a command requested the stop instead."""
        if number == signal.SIGTSTP:
            self._screen.suspend(self._ranks.suspend)
            return self.sides.on_resume()
        if self._ranks.phase is AttemptPhase.ENDED:  # only features, a blocked reader of output or a peer are left
            if not self.sides.on_signal_after_end():
                os._exit(self._result.code if self._result else EXIT_SIGNAL + number)
            return
        if not reason and self._signals.is_inspect_request(number):
            self.sides.on_inspect_key()
            return
        self._emit(events.SignalReceived(number))
        first = not self._signals.interrupted
        request = self._signals.interpret(number, reason)
        if isinstance(request, messages.StopRequested):
            self._teardown.on_stop_requested(request, first=first)
        self._link.send(request)

    def on_zygote_signalled(self, number: int, rank: int | None) -> None:
        if rank is None:
            self._group_signals.record(number)
        elif self._ranks.phase is AttemptPhase.RUNNING and not self._signals.interrupted:
            self._on_signal(number, f"rank {rank} sent {signal_name(number)} to its parent process")

    def _on_forwardable_signal(self, number: int) -> None:
        """Ask node 0 to have a signal forwarded to all ranks, once the zygote had time to report whether it got it."""
        self._loop.call_later(
            ZYGOTE_REPORT_DELAY_S,
            lambda: self._link.send(messages.ForwardSignal(number, self._group_signals.was_seen(number))),
        )

    def _forward_signal(self, number: int) -> None:
        if not self._group_signals.consume(number):
            self._ranks.forward_signal(number)

    def stop(self, now: bool, command: str = "") -> None:
        """Stop the job as Ctrl-C does; ``now``: as a second Ctrl-C does. ``command``: the command that requests it."""
        for _ in range(1 + now):
            if self._ranks.phase is not AttemptPhase.ENDED:
                self._on_signal(signal.SIGINT, command and f"`{command}` was called")

    def _on_drained(self, report: messages.AttemptReport) -> None:
        """Called when no process of the attempt is left and its output is read: report it, or end with the job."""
        if self._result is not None:
            return self._finish(self._result)
        self._ranks.set_phase(AttemptPhase.WAITING)
        self._link.send(report)

    def _finish(self, outcome: JobResult) -> None:
        self._emit(events.JobEnded(outcome.code, outcome.verdict, outcome.remark))
        self._ranks.set_phase(AttemptPhase.ENDED)
