"""All hosts of a job over SSH: the job starts when all are ready, and has one output and one exit code."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from ddplaunch import rlimits
from ddplaunch.agent.signals import InspectKey
from ddplaunch.control.relay import FOR_RANKS
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE, UsageError, shown
from ddplaunch.loop import Loop
from ddplaunch.output.sink import Sink
from ddplaunch.output.voice import BEGINNING, VOICE, Said, Topic, same_words
from ddplaunch.ssh.client import LONGEST_COMPLAINT, Session
from ddplaunch.ssh.remote import ASK, BEAT, GO, KILL_AFTER, SIGNALS
from ddplaunch.ssh.turns import PAUSE, Turns

ANSWER_PATIENCE = 60.0  # seconds that a host has to connect and answer
WORRY_AFTER = 5.0  # seconds after which the hosts that have not answered are named
MAX_PROBLEMS = 20  # lines for one host in the list of problems
LAST_WORDS = 5.0  # seconds between the end of the first host and SIGTERM for those that still run
_OTHER_FILES = 40  # descriptors beside those of the hosts: the event loop, outputs, an ssh that starts
_COMPARED = {"python": "Python", "torch": "torch", "cuda": "torch's CUDA", "nccl": "NCCL"}
_OBJECT = BEGINNING.encode()
_BEGINNINGS = (b"ddplaunch: ", b"Error: ", _OBJECT)  # of what a launcher says
_LETTERS = {number: letter for letter, number in SIGNALS.items()}


def make_room(hosts: int) -> None:
    """Raise the limit on open files to three pipes for each host. Raises UsageError if the hard limit is lower."""
    needed = 3 * hosts + _OTHER_FILES
    soft, hard = rlimits.read(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        what = f"{hosts} hosts need {needed} open files, and at most {hard} are allowed (ulimit -Hn)"
        raise UsageError(what, "start fewer hosts, or ask for a higher limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class FleetState(Enum):
    """What the hosts are doing."""

    CHECKING = "checking"
    RUNNING = "running"
    ENDING = "ending"


@dataclass(frozen=True)
class Problem:
    """Why a host cannot take part."""

    host: str
    text: str
    unreached: bool = False


class Fleet:
    """The hosts of one job, in the order of their node ranks; times in seconds."""

    def __init__(
        self, heartbeat: float, grace: float, spares: int = 0, *, allow_mismatch: bool, warning: int | None
    ) -> None:
        """``warning``: the preemption signal; None for none. With ``spares`` the job goes on without a host."""
        self._heartbeat, self._grace, self._allow_mismatch = heartbeat, grace, allow_mismatch
        self._warning, self._spares = warning, spares
        self.loop = Loop()
        self.problems: list[Problem] = []
        self._hosts: list[Session] = []
        self._turns = Turns(())
        self._late: list[Session] = []
        self._stage = FleetState.CHECKING
        self._first: int | None = None
        self._asked: int | None = None
        self._question = InspectKey()
        self._sinks = {1: Sink(self.loop, 1), 2: Sink(self.loop, 2)}
        for sink in self._sinks.values():
            sink.relieved = self._read_on
        self._paused = False
        self._said: Counter[bytes] = Counter()
        self._said_by: dict[Session, Counter[bytes]] = {}
        self._reporting: set[Session] = set()  # those whose last line was their launcher's

    def run(self, begin: Sequence[Callable[[Loop], Session]]) -> int:
        """Connect to all hosts, run the job, and return its exit code when no host is left; see ``problems``."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCHLD)
        self.loop.catch(caught, self._signalled, anyway=() if self._warning is None else (self._warning,))
        self.loop.catch(FOR_RANKS - {self._warning}, self._pass_on)
        try:
            self._hosts = [start(self.loop) for start in begin]
            self._turns = Turns([host.way for host in self._hosts])
            for host in self._hosts:
                host.spoke, host.answered, host.printed = self._spoke, self._check_answers, self._printed
            self._connect()
            self.loop.after(WORRY_AFTER, self._worry)
            self._beat()
            self._look_for_ends()
            while self._live() or not all(sink.idle for sink in self._sinks.values()):
                self.loop.step()
        finally:
            for host in self._live():
                host.hang_up()
        assert self._first is not None
        return self._first

    def _live(self) -> list[Session]:
        return [host for host in self._hosts if not host.over]

    def _beat(self) -> None:
        for host in self._live():
            host.send(BEAT)
        self.loop.after(self._heartbeat / 3, self._beat)

    # ---------------------------------------------------------------------------------------------------- before

    def _connect(self) -> None:
        """Connect to the hosts whose turn it is."""
        for node in self._turns.take():
            self._hosts[node].begin()

    def _spoke(self, host: Session) -> None:
        self._turns.done(self._hosts.index(host))
        self._connect()

    def _again(self, host: Session) -> bool:
        """Try a host again if it, or a machine on the way, refused the connection; return whether we do."""
        node = self._hosts.index(host)
        if not host.refused:
            self._turns.done(node)
            return False
        if not self._turns.refused(node):
            return False
        host.rest()
        self.loop.after(PAUSE, partial(self._retry, node))
        return True

    def _retry(self, node: int) -> None:
        if self._stage is FleetState.CHECKING:
            self._turns.back(node)
            self._connect()

    def _worry(self) -> None:
        """Name the hosts whose answer is late, and give up those that are too late."""
        if self._stage is not FleetState.CHECKING:
            return
        self.loop.after(WORRY_AFTER, self._worry)
        now = time.monotonic()
        late = [host for host in self._live() if host.facts is None and now - host.began >= WORRY_AFTER]
        for host in late:
            if now - host.began >= ANSWER_PATIENCE:
                host.give_up(f"no answer in {ANSWER_PATIENCE:g} s{_advice(host)}")
        if late and late != self._late:
            more = f" and {len(late) - 5} more" if len(late) > 5 else ""
            self._say(f"waiting for {', '.join(host.name for host in late[:5])}{more}{_advice(late[0])}")
        self._late = late

    def _check_answers(self) -> None:
        """When all hosts have answered or ended: start the job, or end it."""
        if self._stage is not FleetState.CHECKING or any(host.facts is None and not host.over for host in self._hosts):
            return
        self.problems = [problem for host in self._hosts for problem in self._problems_of(host)] + self._named_twice()
        if self.problems:
            unreached = any(problem.unreached for problem in self.problems)
            self._end(EXIT_UNAVAILABLE if unreached else EXIT_USAGE)
            return
        self._stage = FleetState.RUNNING
        for host in self._hosts:
            host.send(GO)

    def _problems_of(self, host: Session) -> list[Problem]:
        if host.facts is None or host.over:
            return [Problem(host.name, host.trouble, unreached=not host.reached)]
        found = [Problem(host.name, shown(text, LONGEST_COMPLAINT)) for text in host.facts.problems[:MAX_PROBLEMS]]
        if not self._allow_mismatch:
            for name, what in _COMPARED.items():
                known = [(getattr(each.facts.versions, name), each.name) for each in self._hosts if each.facts]
                first = next((each for each in known if each[0] is not None), None)
                own = getattr(host.facts.versions, name)
                if first is not None and own != first[0]:
                    text = f"{what} is {own or 'missing'} there, {' on '.join(first)}"
                    found.append(Problem(host.name, shown(text, LONGEST_COMPLAINT)))
                if name == "torch" and own is None:
                    break  # what comes with torch is missing too
        return found

    def _named_twice(self) -> list[Problem]:
        """The hosts that are one machine with an earlier one: there two ranks would use each GPU."""
        found, names = list[Problem](), dict[str, str]()
        for host in self._hosts:
            machine = host.facts.machine if host.facts and not host.over else ""
            if machine and (first := names.setdefault(machine, host.name)) != host.name:
                found.append(Problem(host.name, f"it is the same machine as {first}: name it once"))
        return found

    # ---------------------------------------------------------------------------------------------------- meanwhile

    def _printed(self, host: Session, number: int, line: bytes) -> None:
        """Pass on what ranks print; a line that several launchers print, a report say, only once."""
        if self._stage is FleetState.CHECKING or self.problems:
            return  # a greeting, or what the problems say
        if number == 2 and len(self._hosts) > 1 and self._is_launchers(host, line):
            words = same_words(line) if line.startswith(_OBJECT) else line
            said = self._said_by.setdefault(host, Counter())
            said[words] += 1
            if said[words] <= self._said[words]:
                return
            self._said[words] += 1
        self._sinks[number].write(line)
        if self._sinks[number].full and not self._paused:
            self._paused = True
            for each in self._live():
                each.pause()

    def _is_launchers(self, host: Session, line: bytes) -> bool:
        """Whether a launcher says it, and no rank: its first words tell, or it belongs to such a line above it."""
        begins = line.startswith(_BEGINNINGS)
        below = line.startswith(b"  ") and host in self._reporting
        (self._reporting.add if begins or below else self._reporting.discard)(host)
        return begins or below

    def _read_on(self) -> None:
        if self._paused and not any(sink.full for sink in self._sinks.values()):
            self._paused = False
            for host in self._live():
                host.read_on()

    def _say(self, text: str) -> None:
        self._sinks[2].write(VOICE.form(Said(Topic.NOTE, text)).encode())

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._look_for_ends()
        elif number == signal.SIGTSTP:
            self._say("a job over SSH cannot be suspended: its hosts would end it")
        elif self._stage is not FleetState.CHECKING and self._question.asks(number):
            self._say("looking at the ranks; Ctrl-\\ again stops them")
            self._hosts[0].send(ASK)
        elif not self._live():  # all that is left is output that nobody reads
            os._exit(self._first if self._first is not None else EXIT_SIGNAL + number)
        else:
            self._asked = EXIT_PREEMPTED if number == self._warning else EXIT_SIGNAL + number
            if self._stage is FleetState.CHECKING:
                self._end(self._asked)
                for host in self._live():
                    if not host.there:  # nothing of ours runs there
                        host.kill()
            for host in self._live():
                host.send(_LETTERS[number])

    def _pass_on(self, number: int) -> None:
        """Give a signal for the ranks to the first launcher, which tells the others."""
        if self._stage is FleetState.RUNNING:
            for host in self._live()[:1]:
                host.send(_LETTERS[number])

    # ---------------------------------------------------------------------------------------------------- the end

    def _look_for_ends(self) -> None:
        for host in self._hosts:
            if not host.check():
                continue
            if self._stage is FleetState.CHECKING:
                if not self._again(host):
                    self._connect()
                    self._check_answers()
            elif self._spares and host is not self._hosts[0] and not self._hosts[0].over:
                # Node 0 decides whether the job goes on without it; what fails before the start is named as a problem.
                if host.code is None and self._stage is FleetState.RUNNING:
                    self._say_lost(host)
            elif host.code is None:
                self._lost(host)
            elif self._first is None:
                self._first = host.code
                self._let_others_end(host)

    def _lost(self, host: Session) -> None:
        if self._first is None:
            self._first = self._asked or EXIT_UNAVAILABLE
            self._say_lost(host)
            self._let_others_end(host)

    def _say_lost(self, host: Session) -> None:
        self._say(f"{host.name} was lost: {host.complaint or 'ssh ended without a message'}")

    def _let_others_end(self, first: Session) -> None:
        """The others end by themselves: by control, or because all is done. Their last output may take some time."""
        control = math.inf if first.code == 0 else self._heartbeat + self._grace
        self.loop.after(LAST_WORDS, partial(self._stop_others, first, time.monotonic() + control))

    def _stop_others(self, first: Session, patient: float) -> None:
        """Stop the hosts that still run, but until ``patient`` none that still prints or waits for us."""
        if not self._live():
            return
        now = time.monotonic()
        if now < patient and (self._paused or any(now - host.heard < LAST_WORDS for host in self._live())):
            self.loop.after(LAST_WORDS, partial(self._stop_others, first, patient))
            return
        if first.code:
            self._say(f"{first.name} has ended with exit code {first.code}; stopping the others")
        for host in self._live():
            host.send(_LETTERS[signal.SIGTERM])
        self.loop.after(self._grace + KILL_AFTER, lambda: self._end(self._first or 0))

    def _end(self, code: int) -> None:
        """Close all sessions; ``code`` is the exit code if no host has given one."""
        self._stage = FleetState.ENDING
        self._turns.clear()
        self._first = code if self._first is None else self._first
        for host in self._live():
            host.hang_up()
        self.loop.after(LAST_WORDS, self._kill)

    def _kill(self) -> None:
        for host in self._live():
            host.kill()


def _advice(host: Session) -> str:
    return "" if host.there else f"; does `ssh {host.name} true` end at once and ask nothing?"
