"""Runs a planned job on this node: builds the runner and its observers, prints the result, returns the exit code.

Imported only when a job starts on this machine.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TypeVar

from ddplaunch.base.errors import EXIT_OUTPUT, EXIT_PREEMPTED, UsageError, host_name
from ddplaunch.base.options import Options
from ddplaunch.base.safe_files import open_for_writing
from ddplaunch.cli.console_output import print_message, print_note, print_notes
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.cli.node_config_options import build_node_config
from ddplaunch.cli.node_start import NodeStart
from ddplaunch.cli.planning import PreparedPlan
from ddplaunch.cli.show_option import missing_local_ranks_note
from ddplaunch.cli.startup_notice import StartupNotice
from ddplaunch.core.agent.node_rpc import NodeRpc
from ddplaunch.core.agent.node_sides import NodeSides
from ddplaunch.core.agent.runner import NodeRunner
from ddplaunch.core.control_socket.job_status import Status, StatusTracker
from ddplaunch.core.control_socket.server import ControlSocket
from ddplaunch.core.events import Event, Observers
from ddplaunch.core.failures import JobResult, RankFailure
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.isolation import IsolatedLoop, Isolation
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import FromNode
from ddplaunch.core.node_config import NodeConfig, ShowRules
from ddplaunch.core.options import Logging
from ddplaunch.core.output.log_message import FORMATTER, LogMessage, MessageKind
from ddplaunch.core.output.run_log import RunLog
from ddplaunch.core.output.screen import Screen, make_screen
from ddplaunch.core.output.streams import Streams
from ddplaunch.system.clusters.cluster_env import ClusterEnv
from ddplaunch.system.network.interface_variables import find_unknown_interfaces
from ddplaunch.system.network.reserved_port import loopback_note
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rendezvous import LOOPBACK, check_store_file

T = TypeVar("T")

EXIT_DELAY_S = 0.5  # other nodes exit after node 0, which prints why: mpirun kills all when the first process fails


def build_node_job(
    planning: PreparedPlan,
    show_rules: ShowRules,
    start: NodeStart,
    job_config: JobConfig,
    listener_socket: socket.socket | None,
) -> NodeJob:
    """Print the notes on the plan, and return this node's part of the job, ready to run.

    ``listener_socket`` listens on the control port, on node 0 of several nodes.
    Raises UsageError if a port is taken, an interface does not exist, or a folder cannot be created.
    """
    plan, options = planning.plan, planning.options
    show_note = missing_local_ranks_note(show_rules, plan)
    if listener_socket is None and not plan.has_node_rank:
        plan = planning.plan_for_node_rank(1)  # any node but 0, until node 0 assigns its rank
    check_store_file(plan.init_method, plan.run_id)
    notes = [*plan.notes, show_note]
    for name, feature in load_features():
        notes += load_features().call(name, feature.check, options, plan) or ()
    if plan.nnodes > 1 and job_config.port is None and not plan.started_rank:
        notes.append("--control none: nodes do not notice failures of other nodes")
    if plan.master_addr == LOOPBACK:
        notes.append(loopback_note())
    if plan.world_size > 1:
        unknown = find_unknown_interfaces({**os.environ, **plan.rank_environment(plan.local_ranks[0])})
        where = "this machine" if plan.nnodes == 1 else host_name()  # over SSH all of them print to one terminal
        notes += (f"{each}: {where} has no such network interface" for each in unknown)
    print_notes(*filter(None, notes))
    config = build_node_config(options, plan, show_rules, start.settings, planning.cluster_env)
    return NodeJob(plan, start, config, job_config, options, planning.cluster_env, listener_socket)


class NodeJob:
    """This node's part of a job: the runner and the observers of its events; requests on the control socket ask it."""

    def __init__(
        self,
        plan: Plan,
        start: NodeStart,
        node_config: NodeConfig,
        job_config: JobConfig,
        options: Options,
        cluster_env: ClusterEnv | None,
        listener_socket: socket.socket | None,
    ) -> None:
        """Bind the ports that are not bound yet, and open the log folder.

        Raises UsageError if a port is taken, an interface does not exist, or the folder cannot be created.
        """
        self._plan = plan
        self._has_ended = False  # then notes go to stderr
        self._show_rules = node_config.show
        loop = start.loop
        alone = job_config.port is None
        FORMATTER.set_origin(plan, numbered=plan.has_node_rank)
        features = load_features()
        screens = (features.call(name, each.make_screen, loop, options, node_config.screen) for name, each in features)
        self._screen: Screen = next(filter(None, screens), None) or make_screen(loop, node_config.screen)
        self._screen.reports_job = alone or not (job_config.shared_log and plan.node_rank)
        self._log = RunLog(options[Logging].log_dir, is_single_node=alone)
        self._status_tracker = StatusTracker(plan)
        starting = StartupNotice(loop, self._screen, node_config.zygote.plan.modules)
        self._observers = observers = Observers(
            self._screen, self._log, self._status_tracker, starting, report=self._screen.show_note
        )
        self._sides = sides = NodeSides(loop, self.report_bug)
        self._runner = runner = NodeRunner(
            plan,
            node_config,
            job_config,
            loop=loop,
            screen=self._screen,
            log=self._log,
            observers=observers,
            sides=sides,
            tree=start.tree,
            listener_socket=listener_socket,
        )

        def make_context(loop: IsolatedLoop, earlier: tuple[NodeSide, ...]) -> FeatureContext:
            return FeatureContext(
                plan=plan,
                config=node_config,
                job_config=job_config,
                options=options,
                cluster_env=cluster_env,
                job=self,
                node=runner.context,
                tree=runner.tree,
                screen=self._screen,
                log=self._log,
                loop=loop,
                earlier=earlier,
            )

        sides.make(make_context)
        observers.add(sides)
        self._control_socket = ControlSocket(loop, plan.run_id, self)

    def report_bug(self, text: str) -> None:
        if self._has_ended:
            print_note(text)
        else:
            self._screen.show_note(text)

    def run(self) -> int:
        """Run the job to its end and return the exit code. Raises UsageError if the options of the nodes differ."""
        code = None
        try:
            result = self._runner.run()
            code = result.code or (EXIT_OUTPUT if self._screen.lost_lines_note else 0)
            if self._plan.node_rank == 0:
                _write_exit_file(code, result.failed_host)
        finally:
            self._sides.close()
            self._control_socket.close(code)
        self._has_ended = True
        if not self._screen.is_stderr_drained:  # a signal has ended the wait for the reader of the output
            self._runner.exit_code = code
            self._sides.finish()
            return code
        try:
            self._print_result(result)
            self._runner.exit_code = code
        finally:  # these may take some seconds
            self._sides.finish()
        if self._log.path:
            host = host_name()
            where = f" on {host}" if self._plan.nnodes > 1 else ""
            print_note(f"log folder: {self._log.path}{where}", path=self._log.path, host=host)
        if self._log.incomplete_note:
            print_note(self._log.incomplete_note)
        if self._screen.lost_lines_note:
            print_note(self._screen.lost_lines_note)
        if self._screen.reports_job:
            print_message(LogMessage(MessageKind.END, f"ended with exit code {code}", {"code": code}, human_text=""))
        return code

    @property
    def control_socket_path(self) -> str | None:
        return self._control_socket.path

    def status(self) -> Status:
        return self._status_tracker.status()

    @property
    def rpc(self) -> NodeRpc:
        return self._runner.rpc

    @property
    def streams(self) -> Streams:
        return self._runner.streams

    def find_side(self, kind: type[T]) -> T | None:
        return self._sides.find(kind)

    def emit(self, event: Event) -> None:
        self._observers.emit(event)

    def send(self, message: FromNode) -> None:
        self._runner.send(message)

    def stop(self, now: bool, command: str = "") -> None:
        self._runner.stop(now, command)

    def _print_result(self, result: JobResult) -> None:
        """Print how the job has ended."""
        if not self._screen.reports_job:
            time.sleep(EXIT_DELAY_S if result.code else 0)
            return
        if result.usage_error:
            raise UsageError(*result.usage_error)
        Isolation("the report", self.report_bug).call(self._report, result)
        if result.remark:
            print_note(result.remark)

    def _report(self, result: JobResult) -> None:
        if result.verdict:
            report = render_verdict(result.verdict, self._plan.nnodes, was_shown=self._was_shown(result.verdict.first))
            text = result.verdict.blame or result.verdict.first.headline
            print_message(LogMessage(MessageKind.FAILURE, text, {"failure": result.verdict}, human_text=report))

    def _was_shown(self, failure: RankFailure) -> bool:
        """Whether this node showed the stderr of the failed rank while the job ran."""
        rank = next((each for each in self._plan.local_ranks if each.rank == failure.rank), None)
        return rank is not None and 2 in self._show_rules.streams_for(rank)


def _write_exit_file(code: int, failed_host: str | None) -> None:
    """Write the job's exit code, and the host that failed, to a file for the batch script; srun's code may differ."""
    path, requeue_path = os.environ.get("DDPLAUNCH_EXIT_FILE"), os.environ.get("DDPLAUNCH_REQUEUE_FILE")
    try:
        if path:
            with open(open_for_writing(path, os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{code}\n{failed_host}\n" if failed_host else f"{code}\n")
        if requeue_path and code == EXIT_PREEMPTED:  # only scripts for schedulers other than Slurm set it
            os.close(open_for_writing(requeue_path, 0, 0o600))
    except OSError as error:
        where = error.filename or path  # a full disk has no name
        print_note(f"cannot write the exit code {code} for the batch script: {where}: {error.strerror}")
