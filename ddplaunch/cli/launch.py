"""A job that is planned, run from here to its end: what watches it, how its end is told, the exit code.

Loaded where a job starts here: with all that it needs.
"""

from __future__ import annotations

import os
import socket
import time

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.limits import check_proc
from ddplaunch.agent.policy import NodeConfig, ShowRules
from ddplaunch.agent.readings import LATER, SAMPLE_INTERVAL_S, SampleCollector
from ddplaunch.agent.supervisor import Supervisor
from ddplaunch.cli.planning import PlanInputs
from ddplaunch.cli.policy import read_node_config, why_no_live_view
from ddplaunch.cli.rules import read_job_config
from ddplaunch.cli.say import print_message, print_note, print_notes
from ddplaunch.cli.show import missing_local_ranks
from ddplaunch.control.failure import JobResult
from ddplaunch.control.link import check_link, listen_on_node_zero
from ddplaunch.control.port import check_loopback
from ddplaunch.control.rules import JobConfig
from ddplaunch.errors import EXIT_OUTPUT, EXIT_PREEMPTED, UsageError, host_name
from ddplaunch.files import open_for_writing
from ddplaunch.job.door import ControlSocket
from ddplaunch.job.history import HistoryRecorder
from ddplaunch.job.readings import SampleFile
from ddplaunch.job.watch import StatusTracker
from ddplaunch.loop import EventLoop
from ddplaunch.output.events import Observers
from ddplaunch.output.isolation import IsolatedLoop
from ddplaunch.output.run_log import RunLog
from ddplaunch.output.screen import Screen, ScreenOptions, TerminalScreen, make_screen
from ddplaunch.output.streams import MEMORY_TAIL_BYTES
from ddplaunch.output.voice import FORMATTER, LogMessage, MessageKind
from ddplaunch.output.waiting import StartupNotice
from ddplaunch.plan.plan import Plan
from ddplaunch.plan.rendezvous import LOOPBACK, check_store_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.agent.debugging import DebugServer
    from ddplaunch.agent.notify import NotifyObserver
    from ddplaunch.agent.readings import Hear
    from ddplaunch.control.messages import ProfileReply
    from ddplaunch.diagnosis.inspection import Detail, Inspection
    from ddplaunch.job.status import Status
    from ddplaunch.live.prompt import TerminalFrontend
    from ddplaunch.live.view import EmbeddedView

EXIT_DELAY_S = (
    0.5  # seconds by which the others end after node 0, which tells why: mpirun kills all when the first one fails
)


def bind_control_port(planning: PlanInputs) -> tuple[JobConfig, socket.socket | None]:
    """Return the job's rules, and node 0's listening socket where this is the first to have its control port.

    Raises:
        UsageError: this node cannot start its share, or the port is taken.
        NameTimeout: this is node 0, and its own name does not resolve in time.
    """
    check_proc()
    plan = planning.plan
    rules = read_job_config(planning.options, plan.master_addr, plan.master_port, planning.cluster_env)
    check_link(plan, rules, print_notes)
    return rules, listen_on_node_zero(plan, rules) if plan.nnodes > 1 else None


def build_node_job(
    planning: PlanInputs, shown: ShowRules, rules: JobConfig, listener_socket: socket.socket | None
) -> NodeJob:
    """Say what people should know, and return this node's share, ready to run.

    Raises:
        UsageError: a port is taken, there is no such interface, or a folder cannot be made.
    """
    plan, options = planning.plan, planning.options
    absent = missing_local_ranks(shown, plan)
    if listener_socket is None and not plan.has_node_rank:
        plan = planning.plan_for_node_rank(1)  # any other node, until node 0 gives it a rank
    check_store_file(plan.init_method, plan.run_id)
    notes = [*plan.notes, absent, why_no_live_view(options)]
    if plan.nnodes > 1 and rules.port is None and not plan.started_rank:
        notes.append("--control none: nodes do not notice failures of other nodes")
    if plan.master_addr == LOOPBACK:
        notes.append(check_loopback())
    print_notes(*filter(None, notes))
    return NodeJob(plan, read_node_config(options, plan, shown, planning.cluster_env), rules, listener_socket)


class NodeJob:
    """This node's share, ready to run."""

    def __init__(self, plan: Plan, policy: NodeConfig, rules: JobConfig, listening: socket.socket | None) -> None:
        """Bind the ports and open the log folder; ``listener_socket`` is on the control port, if that was claimed before.

        Raises:
            UsageError: a port is taken, there is no such interface, or the folder cannot be made.
        """
        self._plan, self._policy = plan, policy
        self._loop = loop = EventLoop()
        alone = rules.port is None
        speaks = alone or not (rules.shared_log and plan.node_rank)
        FORMATTER.set_origin(plan, numbered=plan.has_node_rank)
        self._view: EmbeddedView | None = None
        how = ScreenOptions(policy.output_timeout_s, policy.quiet_s, policy.prefix, policy.show.merge)
        if policy.has_live_view:
            from ddplaunch.live.screen import LiveScreen
            from ddplaunch.live.view import EmbeddedView

            self._screen: Screen = (live := LiveScreen(loop, how, speaks=speaks, colour=policy.colour))
            self._view = EmbeddedView(self._isolated("the live view"), live, self)
        else:
            self._screen = make_screen(loop, how, speaks=speaks, colour=policy.colour)
        self._log = RunLog(policy.log_dir, self._screen.show_note, is_single_node=alone)
        self._watch = StatusTracker(plan)
        starting = StartupNotice(loop, self._screen, policy.preload.modules)
        observers = Observers(self._screen, self._log, self._watch, starting, report=self._screen.show_note)
        hearers: list[Hear] = []
        if policy.history:
            history = HistoryRecorder(
                plan, self.output_tail, lambda: self._log.path, self._screen.show_note, self._times
            )
            observers.add(history)
            hearers.append(self._isolated("readings.jsonl").guard(SampleFile(history).on_sample))
        if self._view is not None:
            observers.add(self._view)
        if policy.metrics:
            from ddplaunch.job.metrics import PrometheusFile

            metrics = PrometheusFile(policy.metrics, self._watch.status, self._screen.show_note)
            observers.add(metrics)
            hearers.append(self._isolated("--metrics").guard(metrics.on_sample))
        if hearers:
            hearers.append(lambda look, reading: self._supervisor.note_state())
            inspect = self._inspect_local if policy.inspect else None
            later = SAMPLE_INTERVAL_S if policy.metrics else LATER
            isolated = self._isolated("the readings")
            observers.add(SampleCollector(isolated, inspect, observers.emit, hearers, late_interval_s=later))
        self._notify: NotifyObserver | None = None
        if policy.notify:
            from ddplaunch.agent.notify import NotifyObserver

            self._notify = NotifyObserver(self._isolated("--notify"), plan, policy.notify, self._screen)
            observers.add(self._notify)
        self._supervisor = Supervisor(
            plan,
            policy,
            rules,
            os.environ,
            loop,
            self._screen,
            self._log,
            observers,
            self._show_stacks,
            self._attach_terminal,
            listening,
        )
        self._door = ControlSocket(loop, plan.run_id, self, self._screen.show_note)
        self._face: TerminalFrontend | None = None

    def _isolated(self, feature: str, *, ended: bool = False) -> IsolatedLoop:
        """Return a loop for what the job can do without; ``ended``: the job has ended, so that no screen is drawn."""
        return IsolatedLoop(self._loop, feature, print_note if ended else self._screen.show_note)

    def run(self) -> int:
        """Run it to its end; return the exit code. UsageError: the nodes disagree on what was typed."""
        code = None
        try:
            outcome = self._supervisor.run()
            code = outcome.code or (EXIT_OUTPUT if self._screen.lost else 0)
            if self._plan.node_rank == 0:
                _write_exit_file(code)
        finally:
            if self._face is not None:
                self._face.close()
            self._door.close(code)
            if self._view is not None:
                self._view.close()
        try:
            self._print_result(outcome)
        finally:  # they may take some seconds
            if self._supervisor.sidecars:
                self._isolated("the end of the sidecars", ended=True).guard(self._supervisor.sidecars.stop)()
            if self._notify:
                self._isolated("the end of --notify", ended=True).guard(self._notify.finish)()
        if self._log.path:
            host = host_name()
            where = f" on {host}" if self._plan.nnodes > 1 else ""
            print_note(f"kept in {self._log.path}{where}", path=self._log.path, host=host)
        if self._screen.lost:
            print_note(self._screen.lost)
        if self._screen.speaks:
            print_message(LogMessage(MessageKind.END, f"ended with exit code {code}", {"code": code}, human_text=""))
        return code

    def _attach_terminal(self, debugging: DebugServer) -> None:
        """Have the person at our terminal, if there is one, type to the ranks that stop."""
        if not (self._policy.has_debug_prompt and isinstance(self._screen, TerminalScreen)):
            return
        from ddplaunch.live.prompt import DebuggerPrompt, TerminalFrontend

        self._face = TerminalFrontend(self._loop, self._screen)
        prompt = DebuggerPrompt(self._face, debugging.on_user_message)
        self._face.on_key = prompt.on_key
        debugging.attach_user(prompt.on_message)

    def status(self) -> Status:
        return self._watch.status()

    def inspect_job(self, detail: Detail, answer: Callable[[Inspection], None]) -> None:
        self._supervisor.inspect_job(detail, answer)

    def _inspect_local(self, detail: str, done: Callable[[Inspection], None]) -> None:
        self._supervisor.inspect_local(detail, None, done)

    def debug_server(self) -> DebugServer | None:
        return self._supervisor.debugging

    def profile_job(self, seconds: float, torch: bool, hear: Callable[[ProfileReply], None]) -> None:
        self._supervisor.profiles.profile_job(seconds, torch, hear)

    def _show_stacks(self) -> None:
        from ddplaunch.diagnosis.inspection import Detail

        self._screen.show_note("looking at the ranks; Ctrl-\\ again stops them")
        self._supervisor.inspect_job(Detail.WAITS, self._print_stacks)

    def _print_stacks(self, inspection: Inspection) -> None:
        import click

        from ddplaunch.console.stacks import render_stacks, stacks_to_json
        from ddplaunch.diagnosis.sentences import describe_waits

        page = render_stacks(inspection)
        lines = page if self._policy.colour else click.unstyle(page)
        self._screen.show_message(
            LogMessage(
                MessageKind.STACKS, "\n".join(describe_waits(inspection)), {"stacks": stacks_to_json(inspection)}, lines
            )
        )

    def stop(self, now: bool, command: str = "") -> None:
        self._supervisor.stop(now, command)

    def ranks_with_output(self) -> list[int]:
        return self._supervisor.streams.ranks_in_memory()

    def output_tail(self, rank: int, since: float | None = None) -> bytes:
        streams = self._supervisor.streams
        return streams.tail(rank, MEMORY_TAIL_BYTES) if since is None else streams.since(rank, since)

    def _times(self, rank: int, count: int) -> bytes:
        return self._supervisor.streams.times(rank, count)

    def flush_output(self, mark: bytes) -> None:
        self._supervisor.streams.flush(mark)

    def subscribe_output(self, hear: Callable[[int, bytes], None]) -> None:
        self._supervisor.streams.subscribe(hear)

    def unsubscribe_output(self, hear: Callable[[int, bytes], None]) -> None:
        self._supervisor.streams.unsubscribe(hear)

    def _print_result(self, outcome: JobResult) -> None:
        """Say how the job has ended."""
        if not self._screen.speaks:
            time.sleep(EXIT_DELAY_S if outcome.code else 0)
            return
        if outcome.usage_error:
            raise UsageError(*outcome.usage_error)
        self._isolated("the report", ended=True).guard(self._report)(outcome)
        if outcome.remark:
            print_note(outcome.remark)

    def _report(self, outcome: JobResult) -> None:
        if outcome.verdict:
            from ddplaunch.console.failure import render_verdict

            report = render_verdict(outcome.verdict, self._plan.nnodes)
            text = outcome.verdict.blame or outcome.verdict.first.headline
            print_message(LogMessage(MessageKind.FAILURE, text, {"verdict": outcome.verdict}, human_text=report))


def _write_exit_file(code: int) -> None:
    """Leave the exit code for the batch script, which cannot go by srun's: that may be a killed task's."""
    path, mark = os.environ.get("DDPLAUNCH_EXIT_FILE"), os.environ.get("DDPLAUNCH_REQUEUE_FILE")
    try:
        if path:
            with open(open_for_writing(path, os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{code}\n")
        if mark and code == EXIT_PREEMPTED:  # of the scripts for other schedulers than Slurm
            os.close(open_for_writing(mark, 0, 0o600))
    except OSError as error:
        print_note(f"the batch script does not learn the exit code {code}: {error.filename}: {error.strerror}")
