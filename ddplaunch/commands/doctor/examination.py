"""All nodes looked at, at once: what each says of itself, the ways between them, and how fast they reduce together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ddplaunch.commands.doctor import benchmark
from ddplaunch.commands.doctor.benchmark import Measured
from ddplaunch.commands.doctor.facts import Facts
from ddplaunch.commands.doctor.findings import machine_findings
from ddplaunch.commands.doctor.inquiry import DEADLINE, TORCH_DEADLINE
from ddplaunch.commands.doctor.questions import (
    Listen,
    Look,
    Measure,
    Prepare,
    Prepared,
    Route,
    Routed,
    Tell,
    Time,
    Try,
    Ways,
)
from ddplaunch.commands.doctor.session import UNREADABLE, Reach, Session, Unanswered
from ddplaunch.commands.doctor.ways import (
    CONNECT_DEADLINE,
    LARGE_DEADLINE,
    SMALL_DEADLINE,
    Listening,
    Outcome,
    Place,
    new_nonce,
)
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.plan.command import START_DEADLINE

MAX_ROUNDS = 7  # of pairs, each node once in each round: up to eight nodes meet all others
MAX_AGAIN = 8  # slow pairs that are measured twice
SLOW = 0.5  # of the best: what is slower is named
_ON_CPUS = 2  # processes on a node without GPUs: what they reduce goes through its memory
_CLOCK_READINGS = 5

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class NodeFound:
    """What a node said, or why it did not; times in seconds."""

    name: str
    facts: Facts | None = None
    trouble: str | None = None
    clock: float | None = None  # how far its clock is ahead of the first node's
    check: str = ""  # the command that tries to reach it
    taken: dict[int, str] = field(default_factory=dict)  # ports where it cannot listen, and why


@dataclass(frozen=True)
class Way:
    """One node's try to connect to another; nodes by their numbers."""

    source: int
    target: int
    port: int  # 0: one that the kernel chose
    outcome: Outcome
    seconds: float | None  # there and back


@dataclass(frozen=True)
class Power:
    """What one device does alone."""

    node: int
    device: str
    flops: float  # a second


@dataclass(frozen=True)
class Speed:
    """An all_reduce on one node alone, or on two."""

    nodes: tuple[int, ...]
    ranks: int
    backend: str
    seconds: tuple[float, ...] = ()  # for each of benchmark.SIZES in turn
    error: str | None = None


@dataclass(frozen=True)
class Examination:
    """All that was found, facts alone."""

    nodes: tuple[NodeFound, ...]
    ports: tuple[int, ...]  # of the store, and of the connections between nodes
    ways: tuple[Way, ...] = ()
    powers: tuple[Power, ...] = ()
    speeds: tuple[Speed, ...] = ()

    def name(self, node: int) -> str:
        return self.nodes[node].name


class Examiner:
    """Asks all nodes, in the order of their node ranks."""

    def __init__(
        self,
        reaches: Sequence[Reach],
        address: str,
        ports: tuple[int, ...],
        environ: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        """``address``: node 0's, "" for one node; ``environ``: variables of what is measured; ``say``: what we do."""
        self._reaches, self._address, self._ports, self._environ, self._say = reaches, address, ports, environ, say
        self._pool = ThreadPoolExecutor(len(reaches))
        self._sessions: list[Session] = []
        self._found = [NodeFound(reach.name, check=reach.check) for reach in reaches]
        self._any_port: dict[int, int] = {}

    def examine(self) -> Examination:
        """Look at all of them. Every wait has a deadline; nodes that do not answer are left out of what follows."""
        try:
            self._sessions = [Session(reach) for reach in self._reaches]
            self._look()
            ways = self._try_ways() if len(self._live()) > 1 else ()
            powers, speeds = self._measure(ways)
            return Examination(tuple(self._found), self._ports, ways, powers, speeds)
        finally:
            with ThreadPoolExecutor(len(self._reaches)) as closing:  # after a Ctrl-C the others still wait for answers
                list(closing.map(Session.close, self._sessions))

    def _live(self) -> list[int]:
        return [node for node, found in enumerate(self._found) if found.facts and not found.trouble]

    def _each(self, nodes: Sequence[int], ask: Callable[[int], R]) -> dict[int, R]:
        """Ask nodes at once; one that does not answer is out."""

        def one(node: int) -> R | Unanswered:
            try:
                return ask(node)
            except Unanswered as why:
                return why

        answers: dict[int, R] = {}
        for node, answer in zip(nodes, self._pool.map(one, nodes), strict=True):
            if isinstance(answer, Unanswered):
                self._found[node] = replace(self._found[node], trouble=str(answer))
            else:
                answers[node] = answer
        return answers

    def _look(self) -> None:
        count = len(self._sessions)
        self._say("looking at this machine" if not self._address else f"looking at {count} nodes")
        cwd = os.getcwd()

        def ask(node: int) -> tuple[Facts, float]:
            session = self._sessions[node]
            session.greet()
            facts = session.ask(
                Look(cwd, self._address, self._environ), Facts, START_DEADLINE + 8 * DEADLINE + TORCH_DEADLINE
            )
            if not _makes_sense(facts):
                raise Unanswered(UNREADABLE)
            readings = []
            for _ in range(_CLOCK_READINGS):
                began, at = time.monotonic(), time.time()
                now = session.ask(Tell(), Time, DEADLINE).now
                took = time.monotonic() - began
                readings.append((took, now - at - took / 2))
            return facts, min(readings)[1]

        answers = self._each(range(count), ask)
        first = answers[min(answers)][1] if answers else 0.0
        for node, (facts, ahead) in answers.items():
            self._found[node] = replace(self._found[node], facts=facts, clock=ahead - first)
        self._find_node_zero()

    def _find_node_zero(self) -> None:
        """Ask node 0 for its link by the address that others have of it, if its own name leads it to its loopback.

        Debian's installer writes that name beside 127.0.1.1 into /etc/hosts. A job goes by what the others reach, too.
        """
        facts = self._found[0].facts
        if not facts or not facts.link or not facts.link.loopback:
            return
        others = (found.facts.link for found in self._found[1:] if found.facts and found.facts.link)
        address = next((link.there for link in others if not link.loopback), None)
        if address:
            routed = self._each([0], lambda node: self._sessions[0].ask(Route(address), Routed, 2 * DEADLINE))
            if 0 in routed and (link := routed[0].link):
                self._found[0] = replace(self._found[0], facts=replace(facts, link=link))

    def _try_ways(self) -> tuple[Way, ...]:
        self._say("trying the ways between them")
        nonce = new_nonce()
        heard = self._each(
            self._live(), lambda node: self._sessions[node].ask(Listen(self._ports, nonce), Listening, DEADLINE)
        )
        for node, listening in heard.items():
            self._found[node] = replace(self._found[node], taken=listening.taken)
            self._any_port[node] = listening.any_port
        tries = {
            source: [
                (target, port)
                for target, listening in heard.items()
                if target != source
                for port in (*self._ports, 0)
                if port not in listening.taken
            ]
            for source in heard
        }

        def ask(source: int) -> Ways:
            places = tuple(Place(self._reached_at(to), port or self._any_port[to]) for to, port in tries[source])
            turns = 1 + len(places) // 64
            ways = self._sessions[source].ask(
                Try(places, nonce), Ways, turns * (CONNECT_DEADLINE + SMALL_DEADLINE + 2 * LARGE_DEADLINE)
            )
            if len(ways.tried) != len(places):
                raise Unanswered(UNREADABLE)
            return ways

        return tuple(
            Way(source, target, port, tried.outcome, tried.seconds)
            for source, ways in self._each(list(heard), ask).items()
            for (target, port), tried in zip(tries[source], ways.tried, strict=True)
        )

    def _reached_at(self, node: int) -> str:
        """The address of a node: that of the interface which leads to node 0."""
        facts = self._found[node].facts
        link = facts.link if facts else None
        return self._address if node == 0 or link is None or link.loopback else link.address

    def _measure(self, ways: Sequence[Way]) -> tuple[tuple[Power, ...], tuple[Speed, ...]]:
        facts = {node: self._found[node].facts for node in self._live()}
        able = [node for node, each in facts.items() if each and each.torch and not each.loopback]
        if not able:
            return (), ()
        self._say("measuring all_reduce")
        ready = self._each(able, self._prepare)
        powers = [Power(node, each.device, each.flops) for node, done in ready.items() for each in done.ready]
        broken = [self._speed((node,), error=done.error) for node, done in ready.items() if done.error]
        well = [node for node, done in ready.items() if not done.error]
        alone = self._each([node for node in well if len(self._devices(node)) > 1], self._reduce_alone)
        speeds = [self._speed((node,), measured.seconds, measured.error) for node, measured in alone.items()]
        closed = {frozenset((way.source, way.target)) for way in ways if way.port == 0 and way.outcome != "ok"}
        pairs = dict[tuple[int, ...], Speed]()
        for round in rounds(well):
            pairs |= self._reduce([pair for pair in round if frozenset(pair) not in closed and self._alike(*pair)])
        for slow in list(slow_pairs(list(pairs.values())))[:MAX_AGAIN]:  # it may have been a moment's
            for nodes, again in self._reduce([(slow.nodes[0], slow.nodes[1])]).items():
                pairs[nodes] = max(slow, again, key=bandwidth)
        return tuple(powers), (*broken, *speeds, *pairs.values())

    def _prepare(self, node: int) -> Prepared:
        facts = self._found[node].facts
        interface = facts.link.interface if facts and facts.link else None
        asked = Prepare(self._devices(node), interface if interface and interface != "lo" else "")
        return self._sessions[node].ask(asked, Prepared, TORCH_DEADLINE)

    def _reduce_alone(self, node: int) -> Measured:
        count = len(self._devices(node))
        return self._sessions[node].ask(Measure("", 0, 0, count, count), Measured, benchmark.DEADLINE + TORCH_DEADLINE)

    def _reduce(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], Speed]:
        """Let pairs of nodes, of which none has a node of another, reduce at the same time."""
        place = {node: (pair[0], rank) for pair in pairs for rank, node in enumerate(pair)}

        def ask(node: int) -> Measured:
            first, rank = place[node]
            question = Measure(self._reached_at(first), self._any_port[first], rank, 1, 2)
            return self._sessions[node].ask(question, Measured, benchmark.DEADLINE + TORCH_DEADLINE)

        answers = self._each(list(place), ask)
        return {
            (a, b): self._speed((a, b), answers[a].seconds, answers[a].error or answers[b].error)
            for a, b in pairs
            if a in answers and b in answers
        }

    def _speed(self, nodes: tuple[int, ...], seconds: tuple[float, ...] = (), error: str | None = None) -> Speed:
        devices = self._devices(nodes[0])
        return Speed(nodes, len(devices) if len(nodes) == 1 else 2, _backend(devices), seconds, error)

    def _alike(self, a: int, b: int) -> bool:
        return _backend(self._devices(a)) == _backend(self._devices(b))

    def _devices(self, node: int) -> tuple[str, ...]:
        facts = self._found[node].facts
        gpus = facts.torch.devices if facts and facts.torch else 0
        return tuple(f"cuda:{index}" for index in range(gpus)) or ("cpu",) * _ON_CPUS


def _makes_sense(facts: Facts) -> bool:
    """Whether the rules can be applied to what a node says; it may be a stranger's."""
    try:
        list(machine_findings("", facts))
    except (ValueError, ArithmeticError):
        return False
    return True


def _backend(devices: tuple[str, ...]) -> str:
    return "gloo" if devices[0] == "cpu" else "nccl"


def rate(speed: Speed, place: int) -> float | None:
    """Bytes a second over the slowest link (nccl-tests' "bus bandwidth") for one of benchmark.SIZES.

    None where that was not measured.
    """
    if speed.error or place >= len(speed.seconds):
        return None
    return 2 * (speed.ranks - 1) / speed.ranks * benchmark.SIZES[place] / speed.seconds[place]


def bandwidth(speed: Speed) -> float:
    """The rate of the largest size that was measured: small ones may fit into a buffer of the way. 0 if it failed."""
    return rate(speed, len(speed.seconds) - 1) or 0.0 if len(speed.seconds) > 1 else 0.0


def slow_pairs(speeds: Sequence[Speed]) -> Iterator[Speed]:
    """The pairs of nodes much slower than the best, and those that failed."""
    pairs = [speed for speed in speeds if len(speed.nodes) == 2]
    best = max(map(bandwidth, pairs), default=0.0)
    yield from (each for each in pairs if bandwidth(each) < SLOW * best)


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pair the nodes so that each is in one pair of a round at most: the circle method of tournaments.

    With eight nodes or fewer all meet; with more each meets MAX_ROUNDS others.
    """
    seats: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(min(len(seats) - 1, MAX_ROUNDS)):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
