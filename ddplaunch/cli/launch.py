"""A job that is planned, run from here to its end: what watches it, how its end is told, the exit code.

Loaded where a job starts here: with all that it needs.
"""

from __future__ import annotations

import os
import socket
import time

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.limits import need_processes
from ddplaunch.agent.policy import Policy, Shown
from ddplaunch.agent.readings import EVERY, LATER, NodeReadings
from ddplaunch.agent.supervisor import Supervisor
from ddplaunch.cli.planning import Planning
from ddplaunch.cli.policy import read_policy, why_no_view
from ddplaunch.cli.rules import read_rules
from ddplaunch.cli.say import say, say_note, say_notes
from ddplaunch.cli.show import missing
from ddplaunch.control.failure import Outcome
from ddplaunch.control.link import check, listen_on_node_zero
from ddplaunch.control.port import without_loopback
from ddplaunch.control.rules import Rules
from ddplaunch.errors import EXIT_OUTPUT, EXIT_PREEMPTED, UsageError, host_name
from ddplaunch.files import create
from ddplaunch.job.door import Door
from ddplaunch.job.history import History
from ddplaunch.job.readings import ReadingsFile
from ddplaunch.job.watch import Watch
from ddplaunch.loop import Loop
from ddplaunch.output.events import Observers
from ddplaunch.output.isolation import IsolatedLoop
from ddplaunch.output.run_log import RunLog
from ddplaunch.output.screen import Manner, Screen, Terminal, choose
from ddplaunch.output.streams import KEPT
from ddplaunch.output.voice import VOICE, Said, Topic
from ddplaunch.output.waiting import Starting
from ddplaunch.plan.plan import Plan
from ddplaunch.plan.rendezvous import LOOPBACK, check_store_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.agent.debugging import Debugging
    from ddplaunch.agent.notify import Notify
    from ddplaunch.agent.readings import Hear
    from ddplaunch.control.messages import Profiled
    from ddplaunch.diagnosis.inspection import Detail, Inspection
    from ddplaunch.job.status import Status
    from ddplaunch.live.prompt import AtTerminal
    from ddplaunch.live.view import OwnView

BEHIND = 0.5  # seconds by which the others end after node 0, which tells why: mpirun kills all when the first one fails


def claim(planning: Planning) -> tuple[Rules, socket.socket | None]:
    """Return the job's rules, and node 0's listening socket where this is the first to have its control port.

    Raises:
        UsageError: this node cannot start its share, or the port is taken.
        NameTimeout: this is node 0, and its own name does not resolve in time.
    """
    need_processes()
    plan = planning.plan
    rules = read_rules(planning.options, plan.master_addr, plan.master_port, planning.finding)
    check(plan, rules, say_notes)
    return rules, listen_on_node_zero(plan, rules) if plan.nnodes > 1 else None


def prepared(planning: Planning, shown: Shown, rules: Rules, listening: socket.socket | None) -> NodeJob:
    """Say what people should know, and return this node's share, ready to run.

    Raises:
        UsageError: a port is taken, there is no such interface, or a folder cannot be made.
    """
    plan, options = planning.plan, planning.options
    absent = missing(shown, plan)
    if listening is None and not plan.numbered:
        plan = planning.plan_as(1)  # any other node, until node 0 gives it a rank
    check_store_file(plan.init_method, plan.run_id)
    notes = [*plan.notes, absent, why_no_view(options)]
    if plan.nnodes > 1 and rules.port is None and not plan.started_rank:
        notes.append("--control none: nodes do not notice failures of other nodes")
    if plan.master_addr == LOOPBACK:
        notes.append(without_loopback())
    say_notes(*filter(None, notes))
    return NodeJob(plan, read_policy(options, plan, shown, planning.finding), rules, listening)


class NodeJob:
    """This node's share, ready to run."""

    def __init__(self, plan: Plan, policy: Policy, rules: Rules, listening: socket.socket | None) -> None:
        """Bind the ports and open the log folder; ``listening`` is on the control port, if that was claimed before.

        Raises:
            UsageError: a port is taken, there is no such interface, or the folder cannot be made.
        """
        self._plan, self._policy = plan, policy
        self._loop = loop = Loop()
        alone = rules.port is None
        speaks = alone or not (rules.one_log and plan.node_rank)
        VOICE.of(plan, numbered=plan.numbered)
        self._view: OwnView | None = None
        how = Manner(policy.patience, policy.quiet, policy.prefix, policy.show.merge)
        if policy.live:
            from ddplaunch.live.screen import LiveScreen
            from ddplaunch.live.view import OwnView

            self._screen: Screen = (live := LiveScreen(loop, how, speaks=speaks, colour=policy.colour))
            self._view = OwnView(self._isolated("the live view"), live, self)
        else:
            self._screen = choose(loop, how, speaks=speaks, colour=policy.colour)
        self._log = RunLog(policy.log_dir, self._screen.note, alone=alone)
        self._watch = Watch(plan)
        starting = Starting(loop, self._screen, policy.preload.modules)
        observers = Observers(self._screen, self._log, self._watch, starting, report=self._screen.note)
        hearers: list[Hear] = []
        if policy.history:
            history = History(plan, self.printed, lambda: self._log.path, self._screen.note, self._times)
            observers.add(history)
            hearers.append(self._isolated("readings.jsonl").guard(ReadingsFile(history).hear))
        if self._view is not None:
            observers.add(self._view)
        if policy.metrics:
            from ddplaunch.job.metrics import MetricsFile

            metrics = MetricsFile(policy.metrics, self._watch.status, self._screen.note)
            observers.add(metrics)
            hearers.append(self._isolated("--metrics").guard(metrics.hear))
        if hearers:
            hearers.append(lambda look, reading: self._supervisor.note_state())
            inspect = self._inspect_here if policy.inspect else None
            later = EVERY if policy.metrics else LATER
            isolated = self._isolated("the readings")
            observers.add(NodeReadings(isolated, inspect, observers.emit, hearers, later=later))
        self._notify: Notify | None = None
        if policy.notify:
            from ddplaunch.agent.notify import Notify

            self._notify = Notify(self._isolated("--notify"), plan, policy.notify, self._screen)
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
            self._invite,
            listening,
        )
        self._door = Door(loop, plan.run_id, self, self._screen.note)
        self._face: AtTerminal | None = None

    def _isolated(self, feature: str, *, ended: bool = False) -> IsolatedLoop:
        """Return a loop for what the job can do without; ``ended``: the job has ended, so that no screen is drawn."""
        return IsolatedLoop(self._loop, feature, say_note if ended else self._screen.note)

    def run(self) -> int:
        """Run it to its end; return the exit code. UsageError: the nodes disagree on what was typed."""
        code = None
        try:
            outcome = self._supervisor.run()
            code = outcome.code or (EXIT_OUTPUT if self._screen.lost else 0)
            if self._plan.node_rank == 0:
                _tell_script(code)
        finally:
            if self._face is not None:
                self._face.close()
            self._door.close(code)
            if self._view is not None:
                self._view.close()
        try:
            self._tell(outcome)
        finally:  # they may take some seconds
            if self._supervisor.sidecars:
                self._isolated("the end of the sidecars", ended=True).guard(self._supervisor.sidecars.end)()
            if self._notify:
                self._isolated("the end of --notify", ended=True).guard(self._notify.end)()
        if self._log.path:
            host = host_name()
            where = f" on {host}" if self._plan.nnodes > 1 else ""
            say_note(f"kept in {self._log.path}{where}", path=self._log.path, host=host)
        if self._screen.lost:
            say_note(self._screen.lost)
        if self._screen.speaks:
            say(Said(Topic.END, f"ended with exit code {code}", {"code": code}, lines=""))
        return code

    def _invite(self, debugging: Debugging) -> None:
        """Have the person at our terminal, if there is one, type to the ranks that stop."""
        if not (self._policy.prompts and isinstance(self._screen, Terminal)):
            return
        from ddplaunch.live.prompt import AtTerminal, Prompt

        self._face = AtTerminal(self._loop, self._screen)
        prompt = Prompt(self._face, debugging.take)
        self._face.heard = prompt.key
        debugging.attach(prompt.hear)

    def status(self) -> Status:
        return self._watch.status()

    def inspect(self, detail: Detail, answer: Callable[[Inspection], None]) -> None:
        self._supervisor.inspect(detail, answer)

    def _inspect_here(self, detail: str, done: Callable[[Inspection], None]) -> None:
        self._supervisor.inspect_here(detail, None, done)

    def debugging(self) -> Debugging | None:
        return self._supervisor.debugging

    def profile(self, seconds: float, torch: bool, hear: Callable[[Profiled], None]) -> None:
        self._supervisor.profiles.ask(seconds, torch, hear)

    def _show_stacks(self) -> None:
        from ddplaunch.diagnosis.inspection import Detail

        self._screen.note("looking at the ranks; Ctrl-\\ again stops them")
        self._supervisor.inspect(Detail.WAITS, self._tell_stacks)

    def _tell_stacks(self, inspection: Inspection) -> None:
        import click

        from ddplaunch.console.stacks import render_stacks, to_json
        from ddplaunch.diagnosis.sentences import sentences

        page = render_stacks(inspection)
        lines = page if self._policy.colour else click.unstyle(page)
        self._screen.say(Said(Topic.STACKS, "\n".join(sentences(inspection)), {"stacks": to_json(inspection)}, lines))

    def stop(self, now: bool, command: str = "") -> None:
        self._supervisor.stop(now, command)

    def ranks(self) -> list[int]:
        return self._supervisor.streams.ranks()

    def printed(self, rank: int, since: float | None = None) -> bytes:
        streams = self._supervisor.streams
        return streams.tail(rank, KEPT) if since is None else streams.since(rank, since)

    def _times(self, rank: int, count: int) -> bytes:
        return self._supervisor.streams.times(rank, count)

    def flush(self, mark: bytes) -> None:
        self._supervisor.streams.flush(mark)

    def listen(self, hear: Callable[[int, bytes], None]) -> None:
        self._supervisor.streams.listen(hear)

    def forget(self, hear: Callable[[int, bytes], None]) -> None:
        self._supervisor.streams.ignore(hear)

    def _tell(self, outcome: Outcome) -> None:
        """Say how the job has ended."""
        if not self._screen.speaks:
            time.sleep(BEHIND if outcome.code else 0)
            return
        if outcome.refused:
            raise UsageError(*outcome.refused)
        self._isolated("the report", ended=True).guard(self._report)(outcome)
        if outcome.remark:
            say_note(outcome.remark)

    def _report(self, outcome: Outcome) -> None:
        if outcome.verdict:
            from ddplaunch.console.failure import render_verdict

            report = render_verdict(outcome.verdict, self._plan.nnodes)
            text = outcome.verdict.blame or outcome.verdict.first.headline
            say(Said(Topic.FAILURE, text, {"verdict": outcome.verdict}, lines=report))


def _tell_script(code: int) -> None:
    """Leave the exit code for the batch script, which cannot go by srun's: that may be a killed task's."""
    path, mark = os.environ.get("DDPLAUNCH_EXIT_FILE"), os.environ.get("DDPLAUNCH_REQUEUE_FILE")
    try:
        if path:
            with open(create(path, os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{code}\n")
        if mark and code == EXIT_PREEMPTED:  # of the scripts for other schedulers than Slurm
            os.close(create(mark, 0, 0o600))
    except OSError as error:
        say_note(f"the batch script does not learn the exit code {code}: {error.filename}: {error.strerror}")
