"""Runs a planned job on this node: builds the supervisor and its observers, prints the result, returns the exit code.

Imported only when a job starts on this machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ddplaunch.base.errors import EXIT_OUTPUT, EXIT_PREEMPTED, UsageError, host_name
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.safe_files import open_for_writing
from ddplaunch.cli.console_output import print_message, print_note, print_notes
from ddplaunch.cli.job_config_options import read_job_config
from ddplaunch.cli.node_config_options import read_node_config, why_no_live_view
from ddplaunch.cli.planning import PlanInputs
from ddplaunch.cli.show_option import missing_local_ranks
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.server import ControlSocket
from ddplaunch.core.control_socket.status_tracker import StatusTracker
from ddplaunch.core.events import Observers
from ddplaunch.core.failures import JobResult
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import ProfileReply
from ddplaunch.core.net.link import check_link, listen_on_node_zero
from ddplaunch.core.net.reserved_port import check_loopback
from ddplaunch.core.node.process_limits import check_proc
from ddplaunch.core.node.supervisor import Supervisor
from ddplaunch.core.node_config import NodeConfig, ShowRules
from ddplaunch.core.output.failure_text import render_verdict
from ddplaunch.core.output.isolation import IsolatedLoop
from ddplaunch.core.output.log_message import FORMATTER, LogMessage, MessageKind
from ddplaunch.core.output.run_log import RunLog
from ddplaunch.core.output.screen import Screen, ScreenOptions, TerminalScreen, make_screen
from ddplaunch.core.output.startup_notice import StartupNotice
from ddplaunch.core.output.streams import MEMORY_TAIL_BYTES
from ddplaunch.features.runs.history_recorder import HistoryRecorder
from ddplaunch.features.runs.sample_file import SampleFile
from ddplaunch.features.samples.node import LATER, SAMPLE_INTERVAL_S, SampleCollector
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rendezvous import LOOPBACK, check_store_file

if TYPE_CHECKING:
    from ddplaunch.features.debug.debug_server import DebugServer
    from ddplaunch.features.debug.debugger_prompt import TerminalFrontend
    from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection
    from ddplaunch.features.live.live_view import EmbeddedView
    from ddplaunch.features.notify.node import NotifyObserver
    from ddplaunch.features.samples.node import OnSample

EXIT_DELAY_S = 0.5  # other nodes exit after node 0, which prints why: mpirun kills all when the first process fails


def bind_control_port(planning: PlanInputs) -> tuple[JobConfig, socket.socket | None]:
    """Return the job config, and on node 0 the socket that listens on the control port.

    Raises:
        UsageError: this node cannot run its ranks, or the port is taken.
        NameTimeout: this is node 0, and its own name does not resolve in time.
    """
    check_proc()
    plan = planning.plan
    job_config = read_job_config(planning.options, plan.master_addr, plan.master_port, planning.cluster_env)
    check_link(plan, job_config, print_notes)
    return job_config, listen_on_node_zero(plan, job_config) if plan.nnodes > 1 else None


def build_node_job(
    planning: PlanInputs, show_rules: ShowRules, job_config: JobConfig, listener_socket: socket.socket | None
) -> NodeJob:
    """Print the notes on the plan, and return this node's part of the job, ready to run.

    Raises:
        UsageError: a port is taken, an interface does not exist, or a folder cannot be created.
    """
    plan, options = planning.plan, planning.options
    show_note = missing_local_ranks(show_rules, plan)
    if listener_socket is None and not plan.has_node_rank:
        plan = planning.plan_for_node_rank(1)  # any node but 0, until node 0 assigns its rank
    check_store_file(plan.init_method, plan.run_id)
    notes = [*plan.notes, show_note, why_no_live_view(options)]
    if plan.nnodes > 1 and job_config.port is None and not plan.started_rank:
        notes.append("--control none: nodes do not notice failures of other nodes")
    if plan.master_addr == LOOPBACK:
        notes.append(check_loopback())
    print_notes(*filter(None, notes))
    return NodeJob(plan, read_node_config(options, plan, show_rules, planning.cluster_env), job_config, listener_socket)


class NodeJob:
    """This node's part of a job: the supervisor, and what observes it; also the target of control socket requests."""

    def __init__(
        self, plan: Plan, node_config: NodeConfig, job_config: JobConfig, listener_socket: socket.socket | None
    ) -> None:
        """Bind the ports and open the log folder; ``listener_socket`` is that of ``bind_control_port``.

        Raises:
            UsageError: a port is taken, an interface does not exist, or the folder cannot be created.
        """
        self._plan, self._config = plan, node_config
        self._loop = loop = EventLoop()
        alone = job_config.port is None
        speaks = alone or not (job_config.shared_log and plan.node_rank)
        FORMATTER.set_origin(plan, numbered=plan.has_node_rank)
        self._view: EmbeddedView | None = None
        screen_options = ScreenOptions(
            node_config.output_timeout_s, node_config.quiet_s, node_config.prefix, node_config.show.merge
        )
        if node_config.has_live_view:
            from ddplaunch.features.live.live_screen import LiveScreen
            from ddplaunch.features.live.live_view import EmbeddedView

            self._screen: Screen = (
                live := LiveScreen(loop, screen_options, reports_job=speaks, colour=node_config.colour)
            )
            self._view = EmbeddedView(self._isolated("the live view"), live, self)
        else:
            self._screen = make_screen(loop, screen_options, reports_job=speaks, colour=node_config.colour)
        self._log = RunLog(node_config.log_dir, self._screen.show_note, is_single_node=alone)
        self._status_tracker = StatusTracker(plan)
        starting = StartupNotice(loop, self._screen, node_config.preload.modules)
        observers = Observers(self._screen, self._log, self._status_tracker, starting, report=self._screen.show_note)
        on_sample_callbacks: list[OnSample] = []
        if node_config.history:
            record_sources = (plan, self.output_tail, lambda: self._log.path, self._screen.show_note, self._times)
            observers.add(history := HistoryRecorder(*record_sources))
            on_sample_callbacks.append(
                self._isolated("readings.jsonl").guard(SampleFile(lambda: history.folder).on_sample)
            )
        if self._view is not None:
            observers.add(self._view)
        if node_config.metrics:
            from ddplaunch.features.metrics.prometheus_file import PrometheusFile

            metrics = PrometheusFile(node_config.metrics, self._status_tracker.status, self._screen.show_note)
            observers.add(metrics)
            on_sample_callbacks.append(self._isolated("--metrics").guard(metrics.on_sample))
        if on_sample_callbacks:
            on_sample_callbacks.append(lambda look, reading: self._supervisor.on_sample())
            inspect = self._inspect_local if node_config.inspect else None
            later = SAMPLE_INTERVAL_S if node_config.metrics else LATER
            isolated = self._isolated("the readings")
            observers.add(
                SampleCollector(isolated, inspect, observers.emit, on_sample_callbacks, late_interval_s=later)
            )
        self._notify: NotifyObserver | None = None
        if node_config.notify:
            from ddplaunch.features.notify.node import NotifyObserver

            self._notify = NotifyObserver(self._isolated("--notify"), plan, node_config.notify, self._screen)
            observers.add(self._notify)
        parts = (os.environ, loop, self._screen, self._log, observers, self._show_stacks, self._attach_terminal)
        self._supervisor = Supervisor(plan, node_config, job_config, *parts, listener_socket)
        self._control_socket = ControlSocket(loop, plan.run_id, self, self._screen.show_note)
        self._frontend: TerminalFrontend | None = None

    def _isolated(self, feature: str, *, ended: bool = False) -> IsolatedLoop:
        """Return a loop whose errors only disable ``feature``. ``ended``: the job has ended, so notes go to stderr."""
        return IsolatedLoop(self._loop, feature, print_note if ended else self._screen.show_note)

    def run(self) -> int:
        """Run the job to its end and return the exit code. Raises UsageError if the options of the nodes differ."""
        code = None
        try:
            result = self._supervisor.run()
            code = result.code or (EXIT_OUTPUT if self._screen.lost_lines_note else 0)
            if self._plan.node_rank == 0:
                _write_exit_file(code)
        finally:
            if self._frontend is not None:
                self._frontend.close()
            self._control_socket.close(code)
            if self._view is not None:
                self._view.close()
        try:
            self._print_result(result)
        finally:  # these may take some seconds
            if self._supervisor.sidecars:
                self._isolated("the end of the sidecars", ended=True).guard(self._supervisor.sidecars.stop)()
            if self._notify:
                self._isolated("the end of --notify", ended=True).guard(self._notify.finish)()
        if self._log.path:
            host = host_name()
            where = f" on {host}" if self._plan.nnodes > 1 else ""
            print_note(f"kept in {self._log.path}{where}", path=self._log.path, host=host)
        if self._screen.lost_lines_note:
            print_note(self._screen.lost_lines_note)
        if self._screen.reports_job:
            print_message(LogMessage(MessageKind.END, f"ended with exit code {code}", {"code": code}, human_text=""))
        return code

    def _attach_terminal(self, debug_server: DebugServer) -> None:
        """Connect the terminal, if there is one, to the debugger of ranks that stop."""
        if not (self._config.has_debug_prompt and isinstance(self._screen, TerminalScreen)):
            return
        from ddplaunch.features.debug.debugger_prompt import DebuggerPrompt, TerminalFrontend

        self._frontend = TerminalFrontend(self._loop, self._screen)
        prompt = DebuggerPrompt(self._frontend, debug_server.on_user_message)
        self._frontend.on_key = prompt.on_key
        debug_server.attach_user(prompt.on_message)

    def status(self) -> Status:
        return self._status_tracker.status()

    def inspect_job(self, detail: Detail, answer: Callable[[Inspection], None]) -> None:
        self._supervisor.inspect_job(detail, answer)

    def _inspect_local(self, detail: str, done: Callable[[Inspection], None]) -> None:
        self._supervisor.inspect_local(detail, None, done)

    def debug_server(self) -> DebugServer | None:
        return self._supervisor.debugging

    def profile_job(self, seconds: float, torch: bool, on_reply: Callable[[ProfileReply], None]) -> None:
        self._supervisor.profiles.profile_job(seconds, torch, on_reply)

    def _show_stacks(self) -> None:
        from ddplaunch.features.inspect.diagnosis.inspection import Detail

        self._screen.show_note("inspecting the ranks; press Ctrl-\\ again to stop the job")
        self._supervisor.inspect_job(Detail.WAITS, self._print_stacks)

    def _print_stacks(self, inspection: Inspection) -> None:

        from ddplaunch.features.inspect.diagnosis.wait_sentences import describe_waits
        from ddplaunch.features.inspect.stacks_text import render_stacks, stacks_to_json

        page = render_stacks(inspection)
        lines = page if self._config.colour else click.unstyle(page)
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

    def subscribe_output(self, on_output: Callable[[int, bytes], None]) -> None:
        self._supervisor.streams.subscribe(on_output)

    def unsubscribe_output(self, on_output: Callable[[int, bytes], None]) -> None:
        self._supervisor.streams.unsubscribe(on_output)

    def _print_result(self, result: JobResult) -> None:
        """Print how the job has ended."""
        if not self._screen.reports_job:
            time.sleep(EXIT_DELAY_S if result.code else 0)
            return
        if result.usage_error:
            raise UsageError(*result.usage_error)
        self._isolated("the report", ended=True).guard(self._report)(result)
        if result.remark:
            print_note(result.remark)

    def _report(self, result: JobResult) -> None:
        if result.verdict:
            report = render_verdict(result.verdict, self._plan.nnodes)
            text = result.verdict.blame or result.verdict.first.headline
            print_message(LogMessage(MessageKind.FAILURE, text, {"verdict": result.verdict}, human_text=report))


def _write_exit_file(code: int) -> None:
    """Write the exit code for the batch script; srun's own may be that of a killed task."""
    path, requeue_path = os.environ.get("DDPLAUNCH_EXIT_FILE"), os.environ.get("DDPLAUNCH_REQUEUE_FILE")
    try:
        if path:
            with open(open_for_writing(path, os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{code}\n")
        if requeue_path and code == EXIT_PREEMPTED:  # only scripts for schedulers other than Slurm set it
            os.close(open_for_writing(requeue_path, 0, 0o600))
    except OSError as error:
        print_note(f"cannot write the exit code {code} for the batch script: {error.filename}: {error.strerror}")
