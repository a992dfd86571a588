"""One node's ranks from start to end: a small state machine driven by exits, signals and timers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ddplaunch.agent import failure, folder, job, processes, terminal
from ddplaunch.agent.failure import Failure, Verdict
from ddplaunch.agent.folder import LogFolder
from ddplaunch.agent.loop import Loop, Timer
from ddplaunch.agent.nursery import Nursery
from ddplaunch.agent.output import Output
from ddplaunch.agent.phase import NEXT, Phase
from ddplaunch.agent.policy import Outcome, Policy
from ddplaunch.agent.rank_process import RankProcess
from ddplaunch.agent.restarts import Restarts
from ddplaunch.agent.store import Port
from ddplaunch.errors import EXIT_SIGNAL, EXIT_USAGE
from ddplaunch.plan.layout import Rank
from ddplaunch.plan.plan import Plan
from ddplaunch.plan.target import Kind

INTERRUPT_PATIENCE = 3.0
"""Seconds after which ranks that Ctrl-C did not end are told by SIGTERM: a wait inside torch never sees SIGINT."""

SETTLE = 1.0
"""Seconds that a rank which only lost a peer waits for the peer's own, truer, failure before all are stopped."""

LEFTOVER_GRACE = 5.0
"""Seconds at most that processes left behind by ranks that succeeded have for their own end."""

DRAIN_PATIENCE = 1.0
"""Seconds to wait for output after everything is dead; longer only if a process that cannot die holds a pipe."""


class Supervisor:
    """Runs this node's share of a plan, with restarts, to its end."""

    def __init__(self, plan: Plan, policy: Policy, environ: Mapping[str, str]) -> None:
        """Bind the store's port and open the log folder.

        Raises:
            UsageError: the port is taken, or the folder cannot be made.
        """
        self._policy = policy
        self._port = Port(plan.master_addr, plan.master_port, nnodes=plan.nnodes) if plan.hosts_store else None
        self._plan = replace(plan, master_port=self._port.number) if self._port else plan
        self._logs = LogFolder(policy.log_dir, plan.run_id) if policy.log_dir else None
        self._environ = environ
        self._loop = Loop()
        self._output = Output(self._loop, colour=policy.colour, width=len(str(plan.world_size - 1)))
        self._output.drained = self._drained
        self._output.note = self._say
        self._temporary = folder.temporary_path(plan.run_id)
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._phase = Phase.LOADING
        self._attempt = 0
        self._restarts = Restarts(policy.max_restarts, policy.restart_backoff, policy.min_uptime)
        self._interrupted: int | None = None
        self._outcome: Outcome | None = None
        method = plan.init_method or ""
        self._store_file = method.removeprefix("file://") if method.startswith("file://") else None
        self._begin()

    def _begin(self) -> None:
        """Forget the previous attempt."""
        self._started = time.monotonic()
        self._processes: dict[int, RankProcess] = {}
        self._pending = 0
        self._failures: list[Failure] = []
        self._stopped = 0
        self._hold: socket.socket | None = None
        self._lost: str | None = None
        self._timers: list[Timer] = []
        self._memory = failure.Memory()

    # ------------------------------------------------------------------------------------------------ from outside

    def run(self) -> Outcome:
        """Run the job; returns when nothing of it is left."""
        processes.adopt_orphans()
        self._loop.catch(
            (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP), self._signalled
        )
        if self._logs:
            self._logs.write("plan.json", self._plan.to_json())
        self._nursery = self._start_zygote()
        try:
            with terminal.restored():
                self._spawn_ranks()
                while self._phase is not Phase.ENDED:
                    self._loop.step()
        finally:
            self._nursery.close()
            if self._port:
                self._port.close()
            if self._temporary:
                folder.remove_temporary(self._temporary)
            self._remove_store_file(last=True)
        while not self._output.written:
            self._loop.step()
        assert self._outcome is not None
        return self._outcome

    # ---------------------------------------------------------------------------------------------------- starting

    def _start_zygote(self) -> Nursery:
        return Nursery(
            self._loop,
            environment={**self._environ, **self._plan.shared},
            modules=self._policy.modules,
            asked=self._policy.asked,
            first=self._plan.target.first or os.getcwd(),
            temporary=self._temporary,
            remove=[path for path in (self._temporary, self._store_file) if path],
            title=job.title(self._plan),
            hear=self._hear,
            lost=self._zygote_lost,
        )

    def _spawn_ranks(self) -> None:
        self._remove_store_file(last=False)
        for rank in self._plan.local_ranks:
            if self._logs:
                try:
                    self._output.keep(rank.rank, self._logs.rank_file(rank.rank, self._attempt))
                except OSError as error:
                    self._say(f"no log of rank {rank.rank}: {error.strerror}")
            fds = self._descriptors(rank)
            described = job.describe(
                self._plan,
                rank,
                self._attempt,
                error_file=self._error_file(rank.rank),
                line_buffered=self._output.stdout.terminal,
            )
            self._nursery.spawn(rank.rank, described, fds)
            for fd in fds.values():
                if fd not in (self._null, 0):
                    os.close(fd)
            self._pending += 1

    def _descriptors(self, rank: Rank) -> dict[str, int]:
        """What ``rank`` is given; what is missing it inherits from us by way of the zygote."""
        fds: dict[str, int] = {}
        alone = self._plan.world_size == 1
        shown = self._policy.show is None or rank.rank in self._policy.show
        reads = alone or rank.rank == self._policy.stdin
        if not reads:
            fds["stdin"] = self._null
        if not (reads and shown and not self._logs):
            fds["stdout"] = self._output.pipe(rank.rank, 1, shown=shown)
            fds["stderr"] = self._output.pipe(rank.rank, 2, shown=shown)
        if rank.rank == 0 and self._port and self._plan.target.kind is not Kind.PROGRAM:
            fds["store"] = self._port.listen().detach()
            if self._plan.world_size > 1:
                ours, theirs = socket.socketpair()
                self._hold = ours
                fds["hold"] = theirs.detach()
        return fds

    def _error_file(self, rank: int) -> str | None:
        return os.path.join(self._temporary, f"{rank}.{self._attempt}.json") if self._temporary else None

    def _remove_store_file(self, *, last: bool) -> None:
        """A store in a file is fresh for each attempt; where nodes share it, only node 0 removes it, at the end."""
        if self._store_file and self._plan.hosts_store and (last or self._plan.nnodes == 1):
            try:
                os.unlink(self._store_file)
            except OSError:
                pass

    # ------------------------------------------------------------------------------------------------ what we hear

    def _hear(self, message: dict[str, Any], fds: list[int]) -> None:
        match message["op"]:
            case "ready":
                self._ready(message)
            case "refused":
                self._finish(Outcome(EXIT_USAGE, refused=(message["message"], None)))
            case "spawned":
                self._spawned(message["rank"], message["pid"], fds[0] if fds else None)
            case "exited":
                self._exited(message["rank"], message["status"])
            case "swept":
                self._swept(message["found"], message["stuck"])

    def _ready(self, message: dict[str, Any]) -> None:
        self._event("ready", forks=message["forks"], unsafe=message["unsafe"], seconds=message["seconds"])
        if message["unsafe"]:
            self._say(f"ranks start one by one instead of being forked: {message['unsafe']}")
        if self._phase is Phase.LOADING:
            self._enter(Phase.RUNNING)

    def _spawned(self, number: int, pid: int, pidfd: int | None) -> None:
        self._pending -= 1
        process = self._processes[number] = RankProcess(self._plan.ranks[number], pid, pidfd)
        self._event("started", rank=number, pid=pid, attempt=self._attempt)
        if number == 0 and self._hold is not None:
            self._loop.watch(self._hold.fileno(), self._first_rank_finished)
        if self._phase is Phase.STOPPING:
            self._tell(process, signal.SIGTERM)

    def _first_rank_finished(self) -> None:
        """Rank 0 says that it is done, or has gone."""
        assert self._hold is not None
        self._loop.forget(self._hold.fileno())
        if self._hold.recv(16) and 0 in self._processes:
            self._processes[0].finished = True
            self._event("finished", rank=0)
            self._check_ended()

    def _exited(self, number: int, status: int) -> None:
        process = self._processes.pop(number)
        if process.pidfd is not None:
            os.close(process.pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._event("exited", rank=number, pid=process.pid, code=code, attempt=self._attempt)
        if code != 0 and not process.finished:
            self._failed(process, code)
        self._check_ended()

    def _failed(self, process: RankProcess, code: int) -> None:
        """Tell a failure from the end that we asked for, and stop the others at the first."""
        rank = process.rank
        recorded = failure.read_error_file(self._error_file(rank.rank))
        if process.signalled:
            if recorded.message is None:
                self._stopped += 1
                return
            code = 1  # its exception came first, our signal only cut its end short
        new = Failure(
            rank=rank.rank,
            local_rank=rank.local_rank,
            host=rank.host or "",
            pid=process.pid,
            attempt=self._attempt,
            exit_code=None if code < 0 else code,
            signal=-code if code < 0 else None,
            message=recorded.message,
            traceback=recorded.traceback,
            moment=recorded.moment or time.time(),
            hint=self._memory.hint(-code, recorded.traceback or recorded.message or ""),
            refused=recorded.refused,
        )
        self._failures.append(new)
        if self._phase is not Phase.RUNNING:
            return
        if not new.is_consequence:
            self._stop(signal.SIGTERM)
        elif len(self._failures) == 1:
            self._after(SETTLE, lambda: self._stop(signal.SIGTERM))

    def _zygote_lost(self) -> None:
        """It was killed, and its ranks with it (their parent-death signal); nothing is left to ask."""
        if self._phase in (Phase.DRAINING, Phase.ENDED):
            return
        status = self._nursery.close()
        self._lost = failure.describe_end(-signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status))
        stuck, _ = processes.kill_all_below(os.getpid())
        self._processes.clear()
        self._swept([], stuck)

    # ---------------------------------------------------------------------------------------------------- stopping

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTSTP:
            return self._suspend()
        self._event("signal", number=number)
        again = self._interrupted is not None
        self._interrupted = self._interrupted or number
        match self._phase:
            case Phase.LOADING | Phase.PAUSING:
                self._nursery.kill()
                self._finish(Outcome(EXIT_SIGNAL + number))
            case Phase.RUNNING | Phase.STOPPING if again:
                self._sweep(0)
            case Phase.RUNNING | Phase.STOPPING:
                count = len(self._processes)
                self._say(f"stopping {count} rank{'s' * (count != 1)}; Ctrl-C again ends them at once")
                self._stop(number)
            case Phase.SWEEPING:
                self._nursery.sweep(0)
            case Phase.ENDED:  # output that nobody reads is all that we wait for
                os._exit(self._outcome.code if self._outcome else EXIT_SIGNAL + number)

    def _suspend(self) -> None:
        """Ctrl-Z: the ranks are in sessions of their own, so they are stopped and continued with us."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in self._processes.values():
                try:
                    os.killpg(process.pid, number)
                except (ProcessLookupError, PermissionError):
                    process.send(number)
            if number == signal.SIGSTOP:
                os.kill(os.getpid(), signal.SIGSTOP)

    def _stop(self, number: int) -> None:
        """Tell the leaders, never their groups: a DataLoader's workers must live while a checkpoint is written."""
        if self._phase is Phase.RUNNING:
            self._enter(Phase.STOPPING)
            self._after(self._policy.grace, lambda: self._sweep(0))
        if number != signal.SIGTERM:
            self._after(INTERRUPT_PATIENCE, lambda: self._tell_all(signal.SIGTERM))
        self._tell_all(number)

    def _tell_all(self, number: int) -> None:
        for process in self._processes.values():
            self._tell(process, number)

    def _tell(self, process: RankProcess, number: int) -> None:
        process.signalled = True
        process.send(number)
        process.send(signal.SIGCONT)  # a stopped process handles nothing

    def _check_ended(self) -> None:
        """Let rank 0 go once it is the last; sweep once all have gone."""
        if self._phase not in (Phase.RUNNING, Phase.STOPPING) or self._pending:
            return
        if any(not process.finished for process in self._processes.values()):
            return
        self._release_first_rank()
        if not self._processes:
            ended_well = self._phase is Phase.RUNNING and not self._failures
            self._sweep(min(LEFTOVER_GRACE, self._policy.grace) if ended_well else 0)

    def _release_first_rank(self) -> None:
        if self._hold is not None:
            self._loop.forget(self._hold.fileno())
            self._hold.close()
            self._hold = None

    def _sweep(self, grace: float) -> None:
        if self._phase is Phase.SWEEPING:
            return
        self._enter(Phase.SWEEPING)
        for process in self._processes.values():
            process.signalled = True
        self._nursery.sweep(grace)
        # A zygote that does not answer is itself stopped or stuck.
        self._after(grace + processes.KILL_PATIENCE + 1, self._nursery.kill)

    def _swept(self, found: list[str], stuck: list[str]) -> None:
        if self._phase in (Phase.DRAINING, Phase.ENDED):
            return
        for timer in self._timers:
            timer.cancel()
        if found and not self._failures and not self._stopped and self._interrupted is None:
            self._say(f"ended what the ranks left behind: {', '.join(found)}")
        if stuck:
            self._say(f"cannot be killed, so not waited for: {', '.join(stuck)}")
        self._event("swept", found=found, stuck=stuck)
        self._release_first_rank()
        self._stopped += len(self._processes)
        self._enter(Phase.DRAINING)
        if self._output.open:
            self._after(DRAIN_PATIENCE, self._drained)
        else:
            self._drained()

    def _drained(self) -> None:
        """All that the ranks ever printed has arrived: decide what comes next."""
        if self._phase is not Phase.DRAINING:
            return
        for timer in self._timers:
            timer.cancel()
        self._failures = [
            replace(each, tail=failure.last_lines(self._output.tail(each.rank))) for each in self._failures
        ]
        self._output.close()
        verdict = failure.judge(self._failures, self._stopped, self._plan.world_size) if self._failures else None
        if self._logs and verdict:
            self._logs.write("failure.json", verdict.to_json())
        if self._interrupted is not None:
            self._finish(Outcome(EXIT_SIGNAL + self._interrupted))
        elif self._lost:
            remark = f"the zygote (pid {self._nursery.pid}) {self._lost}, and its ranks with it"
            self._finish(Outcome(EXIT_SIGNAL + signal.SIGKILL, remark=remark))
        elif verdict is None:
            self._finish(Outcome(0))
        elif verdict.first.refused:
            self._finish(Outcome(EXIT_USAGE, refused=verdict.first.refused))
        else:
            self._restart(verdict)

    # -------------------------------------------------------------------------------------------------- restarting

    def _restart(self, verdict: Verdict) -> None:
        decision = self._restarts.after(time.monotonic() - self._started)
        if decision.wait is None:
            return self._finish(Outcome(verdict.first.code, verdict, remark=decision.remark))
        self._attempt = self._restarts.used
        when = f" in {decision.wait:g} s" if decision.wait else ""
        self._say(f"{verdict.first.headline}\nrestart {self._attempt} of {self._restarts.most}{when}")
        self._event("restart", attempt=self._attempt, wait=decision.wait)
        self._enter(Phase.PAUSING)
        self._loop.after(decision.wait, self._again)

    def _again(self) -> None:
        if self._phase is Phase.PAUSING:
            self._begin()
            self._enter(Phase.RUNNING)
            self._spawn_ranks()

    def _finish(self, outcome: Outcome) -> None:
        self._output.close()
        self._event("ended", code=outcome.code)
        if self._logs:
            if self._logs.trouble:
                self._say(f"the log folder is incomplete: {self._logs.trouble}")
            outcome = replace(outcome, log_folder=self._logs.path)
        self._outcome = outcome
        self._phase = Phase.ENDED

    # ----------------------------------------------------------------------------------------------------- helpers

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self._phase], f"{self._phase} to {phase}"
        self._phase = phase

    def _after(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timers.append(self._loop.after(seconds, callback))

    def _event(self, name: str, **fields: Any) -> None:
        if self._logs:
            self._logs.event(name, **fields)

    def _say(self, text: str) -> None:
        self._output.say("".join(f"ddplaunch: {line}\n" for line in text.splitlines()))
