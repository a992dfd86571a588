"""All nodes looked at, at once: what each says of itself, the ways between them, and how fast they reduce together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from ddplaunch.commands.doctor import benchmark, messages
from ddplaunch.commands.doctor.benchmark import Measure, Measured, Prepare
from ddplaunch.commands.doctor.checks.fabric import Fabric
from ddplaunch.commands.doctor.facts import NodeFacts, machine_findings
from ddplaunch.commands.doctor.flows import Flow, Pair, given_up
from ddplaunch.commands.doctor.peers import UNREADABLE, Peer, no_answer
from ddplaunch.commands.doctor.probe import DEADLINE, TORCH_DEADLINE
from ddplaunch.commands.doctor.ways import (
    PING_DEADLINE,
    STREAM_DEADLINE,
    Listening,
    Outcome,
    Pinged,
    Tried,
    new_nonce,
    patience,
)
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.loop import Loop
from ddplaunch.plan.command import START_DEADLINE

MAX_FLOWS = 31  # rounds of pairs whose ways are measured, each node once in each round
ALL_MEET = 8  # nodes at most that all reduce with one another
MANY_MEET = 3  # others that each of more nodes reduces with
MAX_AGAIN = 8  # slow pairs that are measured twice
_STREAMS_AGAIN = 2  # times, alone: what was slow beside others may be fast
SLOW = 0.5  # of the best: what is slower is named
MAX_GPUS = 1024  # of a node, whatever it says
_ON_CPUS = 2  # processes on a node without GPUs: what they reduce goes through its memory
_CLOCK_READINGS = 5
_CLOCK_TRIP = 1.0  # seconds: an answer that took longer says too little about a clock
_FAR = 10.0  # seconds beyond what a node may take for an answer

A = TypeVar("A", bound=messages.NodeAnswer)


@dataclass(frozen=True)
class NodeFound:
    """What a node said, or why it did not; times in seconds."""

    name: str
    facts: NodeFacts | None = None
    trouble: str | None = None
    clock: float | None = None  # how far its clock is ahead of the first node's
    check: str = ""  # the command that tries to reach it
    taken: dict[int, str] = field(default_factory=dict)  # ports where it cannot listen, and why
    fabric_after: Fabric | None = None  # once all was measured


@dataclass(frozen=True)
class Way:
    """One node's try to connect to another; nodes by their numbers."""

    source: int
    target: int
    port: int  # 0: one that the kernel chose
    outcome: Outcome
    seconds: float | None  # there and back


@dataclass(frozen=True)
class Rail:
    """A network that several nodes have in common, beside the one to node 0: what came of its ways."""

    network: str
    interfaces: dict[int, str]  # of each of its nodes
    addresses: dict[int, str]
    outcomes: tuple[tuple[int, int, Outcome], ...] = ()  # from which node to which


@dataclass(frozen=True)
class Power:
    """What one device does alone."""

    node: int
    device: str
    flops: float  # a second


@dataclass(frozen=True)
class Speed:
    """A collective on one node alone, on two, or on all."""

    nodes: tuple[int, ...]
    ranks: int
    backend: str
    seconds: tuple[float, ...] = ()  # for each of benchmark.ALL_SIZES in turn, as far as it went
    error: str | None = None
    name: str = "all_reduce"


@dataclass(frozen=True)
class Examination:
    """All that was found, facts alone."""

    nodes: tuple[NodeFound, ...]
    ports: tuple[int, ...]  # of the store, and of the connections between nodes
    ways: tuple[Way, ...] = ()
    flows: tuple[Flow, ...] = ()
    powers: tuple[Power, ...] = ()
    speeds: tuple[Speed, ...] = ()
    together: tuple[Speed, ...] = ()  # with --thorough: each collective on all nodes at once
    rails: tuple[Rail, ...] = ()

    def name(self, node: int) -> str:
        return self.nodes[node].name


class Examiner:
    """Asks all nodes, in the order of their node ranks."""

    thorough = False

    def __init__(
        self,
        loop: Loop,
        peers: Sequence[Peer],
        address: str,
        ports: tuple[int, ...],
        environ: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        """``address``: node 0's, "" for one node; ``environ``: variables of what is measured; ``say``: what we do."""
        self._loop, self._peers, self._address, self._ports, self._say = loop, peers, address, ports, say
        self._environ = tuple(os.fsencode(f"{name}={value}") for name, value in environ.items())
        self._found = [NodeFound(peer.name, check=peer.check) for peer in peers]
        self._any_port: dict[int, int] = {}

    def examine(self) -> Examination:
        """Look at all of them. Every wait has a deadline; nodes that do not answer are left out of what follows."""
        self._describe()
        ways = self._try_ways() if len(self._live()) > 1 else ()
        flows = self._measure_flows(ways)
        powers, speeds = self._measure(ways, flows)
        return Examination(tuple(self._found), self._ports, ways, flows, powers, speeds)

    def _live(self) -> list[int]:
        return [node for node, found in enumerate(self._found) if found.facts and not found.trouble]

    def _ask(self, questions: Mapping[int, messages.Question], kind: type[A], seconds: float) -> dict[int, A]:
        """Ask nodes at once, each of which may take so many seconds; one that does not answer is out."""
        for node, question in questions.items():
            self._peers[node].ask(question, kind)
        seconds += _FAR
        over = self._loop.after(seconds, lambda: None)
        waiting = [self._peers[node] for node in questions]
        while waiting and time.monotonic() < over.when:
            self._loop.step()
            waiting = [peer for peer in waiting if peer.waits]
        over.cancel()
        answers: dict[int, A] = {}
        for node in questions:
            peer = self._peers[node]
            if isinstance(peer.answer, kind):
                answers[node] = peer.answer
            else:
                self._leave_out(node, peer.trouble or no_answer(seconds))
        return answers

    def _leave_out(self, node: int, why: str) -> None:
        self._found[node] = replace(self._found[node], trouble=why)

    def _describe(self) -> None:
        count = len(self._peers)
        self._say("looking at this machine" if not self._address else f"looking at {count} nodes")
        cwd = os.fsencode(os.getcwd())
        question = messages.Describe(cwd, self._address, self._environ, new_nonce(), self.thorough)
        seconds = START_DEADLINE + 8 * DEADLINE + TORCH_DEADLINE
        for node, facts in self._ask(dict.fromkeys(range(count), question), NodeFacts, seconds).items():
            if _makes_sense(facts):
                self._found[node] = replace(self._found[node], facts=facts)
            else:
                self._leave_out(node, UNREADABLE)
        readings: dict[int, list[tuple[float, float]]] = {}
        for _ in range(_CLOCK_READINGS):
            for node, answer in self._ask(
                dict.fromkeys(self._live(), messages.Tell()), messages.Time, DEADLINE
            ).items():
                peer = self._peers[node]
                readings.setdefault(node, []).append((peer.took, answer.now - peer.sent - peer.took / 2))
        nearest = {node: min(readings[node]) for node in self._live()}
        ahead = {node: gap for node, (took, gap) in nearest.items() if took < _CLOCK_TRIP}
        for node in ahead:
            self._found[node] = replace(self._found[node], clock=ahead[node] - ahead[min(ahead)])
        self._find_node_zero()

    def _find_node_zero(self) -> None:
        """Ask node 0 for its link by the address that others have of it, if its own name leads it to its loopback.

        Debian's installer writes that name beside 127.0.1.1 into /etc/hosts. A job goes by what the others reach, too.
        """
        facts = self._found[0].facts
        if not facts or not facts.link or not facts.link.loopback or self._found[0].trouble:
            return
        others = (found.facts.link for found in self._found[1:] if found.facts and found.facts.link)
        address = next((link.there for link in others if not link.loopback), None)
        if address:
            routed = self._ask({0: messages.Route(address)}, messages.Routed, 3 * DEADLINE)
            if 0 in routed and (link := routed[0].link):
                self._found[0] = replace(self._found[0], facts=replace(facts, link=link))

    def _try_ways(self) -> tuple[Way, ...]:
        self._say("trying the ways between them")
        heard = self._ask(dict.fromkeys(self._live(), messages.Listen(self._ports)), Listening, DEADLINE)
        for node, listening in heard.items():
            self._found[node] = replace(self._found[node], taken=dict(listening.taken))
            self._any_port[node] = listening.any_port
        places = {
            source: [
                (target, self._reached_at(target), port or listening.any_port)
                for target, listening in heard.items()
                if target != source
                for port in (*self._ports, 0)
                if port not in self._found[target].taken
            ]
            for source in heard
        }
        return tuple(
            Way(source, target, port if port in self._ports else 0, tried.outcome, tried.seconds)
            for source, target, port, tried in self._connect(places)
        )

    def _connect(self, places: Mapping[int, Sequence[tuple[int, str, int]]]) -> Iterator[tuple[int, int, int, Tried]]:
        """Have nodes connect to others, each at an address and a port; from which to which, and what came of it."""
        questions = {
            source: messages.Connect(tuple((address, port) for _, address, port in each))
            for source, each in places.items()
        }
        seconds = patience(max(map(len, places.values()), default=0))
        for source, answer in self._ask(questions, messages.Connected, seconds).items():
            if len(answer.tried) != len(places[source]):
                self._leave_out(source, UNREADABLE)
                continue
            for (target, _, port), tried in zip(places[source], answer.tried, strict=True):
                yield source, target, port, tried

    def _measure_flows(self, ways: Sequence[Way]) -> tuple[Flow, ...]:
        """What the open ways carry, those of many nodes at once, but each node only to and from one other."""
        ports: dict[Pair, int] = {}
        for way in ways:
            if way.outcome == "ok":
                ports[way.source, way.target] = way.port or self._any_port[way.target]
        flows: dict[Pair, Flow] = {}
        for pairing in rounds(self._live(), MAX_FLOWS):
            taking = set(self._live()) - given_up(list(flows.values()))
            pairs = [pair for pair in pairing if taking.issuperset(pair) and pair in ports and pair[::-1] in ports]
            both: list[Pair] = [each for a, b in pairs for each in ((a, b), (b, a))]
            flows |= self._ping({each: ports[each] for each in both})
            going = [pair for pair in pairs if not _lossy(flows, pair)]
            for turn in (going, [(b, a) for a, b in going]):  # the answers to one stream go where the other would
                self._stream(flows, {each: ports[each] for each in turn})
            for each in both:
                for _ in range(_STREAMS_AGAIN):
                    if each in flows and not {"slow", "slower"}.isdisjoint(flows[each].faults):
                        self._stream(flows, {each: ports[each]})
        return tuple(flows.values())

    def _ping(self, ports: Mapping[Pair, int]) -> dict[Pair, Flow]:
        questions = {a: messages.Ping(self._reached_at(b), port) for (a, b), port in ports.items()}
        answers = self._ask(questions, Pinged, PING_DEADLINE)
        return {
            (a, b): Flow(a, b, self._claimed(a, b), answers[a].seconds, answers[a].sent, answers[a].lost)
            for a, b in ports
            if a in answers
        }

    def _stream(self, flows: dict[Pair, Flow], ports: Mapping[Pair, int]) -> None:
        """Add to the flows what streams have shown; of several the fastest counts."""
        questions = {a: messages.SendStream(self._reached_at(b), port) for (a, b), port in ports.items()}
        for a, answer in self._ask(questions, messages.Flowed, STREAM_DEADLINE).items():
            (way,) = (each for each in ports if each[0] == a)
            if (stream := answer.stream) and way in flows:
                rates = [rate for rate in (stream.rate, flows[way].rate) if rate is not None]
                flows[way] = replace(flows[way], large=stream.large, rate=max(rates, default=None))

    def _claimed(self, *nodes: int) -> int | None:
        """What the slowest of their interfaces claims."""
        links = [facts.link for facts in (self._found[node].facts for node in nodes) if facts]
        return min((link.speed for link in links if link and link.speed), default=None)

    def _reached_at(self, node: int) -> str:
        """The address of a node: that of the interface which leads to node 0."""
        facts = self._found[node].facts
        link = facts.link if facts else None
        return self._address if node == 0 or link is None or link.loopback else link.address

    def _measure(self, ways: Sequence[Way], flows: Sequence[Flow]) -> tuple[tuple[Power, ...], tuple[Speed, ...]]:
        facts = {node: self._found[node].facts for node in self._live()}
        able = [node for node, each in facts.items() if each and each.torch and not each.loopback]
        if not able:
            return (), ()
        self._say("measuring all_reduce")
        ready = self._ask({node: self._preparation(node) for node in able}, messages.Prepared, TORCH_DEADLINE)
        powers = [Power(node, each.device, each.flops) for node, done in ready.items() for each in done.powers]
        broken = [
            Speed((node,), len(self._devices(node)), self._backend(node), error=done.error)
            for node, done in ready.items()
            if done.error
        ]
        well = [node for node, done in ready.items() if not done.error]
        alone = self._collective([(node,) for node in well])
        closed = {frozenset((way.source, way.target)) for way in ways if way.port == 0 and way.outcome != "ok"}
        closed |= {frozenset(flow.pair) for flow in flows if flow.faults}
        well = [node for node in well if node not in given_up(flows)]
        pairs = dict[tuple[int, ...], Speed]()
        for pairing in rounds(well, ALL_MEET - 1 if len(well) <= ALL_MEET else MANY_MEET):
            out = _failing(pairs.values())
            trying = [pair for pair in pairing if frozenset(pair) not in closed and out.isdisjoint(pair)]
            pairs |= self._collective([(a, b) for a, b in trying if self._backend(a) == self._backend(b)], most=1)
        self._reduce_again(pairs)
        return tuple(powers), (*broken, *alone.values(), *pairs.values())

    def _reduce_again(self, pairs: dict[tuple[int, ...], Speed]) -> None:
        """Measure slow pairs alone: all that ran beside them may have slowed them, and then also those not tried."""
        slow = sorted((each for each in slow_pairs(list(pairs.values())) if not each.error), key=bandwidth)
        for each in slow[:MAX_AGAIN]:
            for nodes, again in self._collective([each.nodes], most=1).items():
                pairs[nodes] = max(each, again, key=bandwidth)
        still = {each.nodes for each in slow_pairs(list(pairs.values()))}
        if not still.issuperset(each.nodes for each in slow[:MAX_AGAIN]):
            for each in slow[MAX_AGAIN:]:
                del pairs[each.nodes]

    def _preparation(self, node: int) -> Prepare:
        facts = self._found[node].facts
        interface = facts.link.interface if facts and facts.link else None
        return Prepare(self._devices(node), interface if interface and interface != "lo" else "")

    def _collective(
        self,
        groups: Sequence[tuple[int, ...]],
        name: str = "all_reduce",
        *,
        most: int = MAX_GPUS,
        room: int = benchmark.SIZES[-1],
        rail: Rail | None = None,
    ) -> dict[tuple[int, ...], Speed]:
        """Measure in groups of nodes at the same time, none in two of them, with so many devices of each at most."""
        questions: dict[int, Measure] = {}
        for nodes in groups:
            first, counts = nodes[0], [min(most, len(self._devices(node))) for node in nodes]
            address, port = "", 0
            if len(nodes) > 1:
                address, port = rail.addresses[first] if rail else self._reached_at(first), self._any_port[first]
            for place, node in enumerate(nodes if sum(counts) > 1 else ()):
                questions[node] = Measure(address, port, sum(counts[:place]), counts[place], sum(counts), name, room)
        answers = self._ask(questions, Measured, benchmark.DEADLINE + TORCH_DEADLINE)
        return {
            nodes: Speed(
                nodes,
                questions[nodes[0]].world_size,
                "gloo" if rail else self._backend(nodes[0]),
                answers[nodes[0]].seconds,
                next((answers[node].error for node in nodes if answers[node].error), None),
                f"{name} over {rail.network}" if rail else name,
            )
            for nodes in groups
            if answers.keys() >= set(nodes)
        }

    def _backend(self, node: int) -> str:
        return "gloo" if self._devices(node)[0] == "cpu" else "nccl"

    def _devices(self, node: int) -> tuple[str, ...]:
        facts = self._found[node].facts
        gpus = facts.torch.devices if facts and facts.torch else 0
        on_cpus = _ON_CPUS if len(self._peers) <= ALL_MEET else 1  # torch takes its time to be imported
        return tuple(f"cuda:{index}" for index in range(min(gpus, MAX_GPUS))) or ("cpu",) * on_cpus


def _failing(speeds: Collection[Speed]) -> set[int]:
    """The nodes that failed twice, and never did not: each failure takes its deadline."""
    failed = [node for speed in speeds if speed.error for node in speed.nodes]
    passed = {node for speed in speeds if not speed.error for node in speed.nodes}
    return {node for node in failed if failed.count(node) > 1} - passed


def _lossy(flows: Mapping[Pair, Flow], pair: Pair) -> bool:
    return any(way in flows and "lossy" in flows[way].faults for way in (pair, pair[::-1]))


def _makes_sense(facts: NodeFacts) -> bool:
    """Whether the rules can be applied to what a node says; it may be a stranger's."""
    try:
        list(machine_findings("", facts))
    except (ValueError, ArithmeticError):
        return False
    return True


def rate(speed: Speed, place: int) -> float | None:
    """Bytes a second over the slowest link (nccl-tests' "bus bandwidth") for one of benchmark.ALL_SIZES.

    None where that was not measured.
    """
    if speed.error or place >= len(speed.seconds):
        return None
    passes = 2 if speed.name.startswith("all_reduce") else 1  # over the slowest link
    return passes * (speed.ranks - 1) / speed.ranks * benchmark.ALL_SIZES[place] / speed.seconds[place]


def bandwidth(speed: Speed) -> float:
    """The rate of the largest size that was measured: small ones may fit into a buffer of the way. 0 if it failed."""
    return rate(speed, len(speed.seconds) - 1) or 0.0 if len(speed.seconds) > 1 else 0.0


def slow_pairs(speeds: Sequence[Speed], share: float = SLOW) -> Iterator[Speed]:
    """The pairs of nodes much slower than the best, and those that failed."""
    pairs = [speed for speed in speeds if len(speed.nodes) == 2]
    rates = sorted(map(bandwidth, pairs))
    best = rates[len(rates) * 3 // 4] if rates else 0.0  # not of those few that were measured again, alone
    yield from (each for each in pairs if bandwidth(each) < share * best)


def rounds(nodes: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Pair the nodes so that each is in one pair of a round: the circle method of tournaments. Few nodes all meet."""
    seats: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(min(len(seats) - 1, most)):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
