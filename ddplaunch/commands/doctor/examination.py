"""All nodes looked at, at once: what each says of itself, the ways between them, and how fast they reduce together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from ddplaunch.commands.doctor import benchmark, messages
from ddplaunch.commands.doctor.benchmark import CollectiveTimes, MeasureCollective, PrepareDevices
from ddplaunch.commands.doctor.checks.fabric import Fabric
from ddplaunch.commands.doctor.facts import NodeFacts, machine_findings
from ddplaunch.commands.doctor.flows import Flow, Pair, nodes_to_skip
from ddplaunch.commands.doctor.peers import UNREADABLE_REPLY_ERROR, DoctorPeer, timeout_text
from ddplaunch.commands.doctor.probe import REPLY_TIMEOUT_S, TORCH_IMPORT_TIMEOUT_S
from ddplaunch.commands.doctor.ways import (
    PING_TIMEOUT_S,
    STREAM_TIMEOUT_S,
    ConnectResult,
    ListenReply,
    Outcome,
    PingResult,
    max_duration,
    new_nonce,
)
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.loop import EventLoop
from ddplaunch.plan.command import START_TIMEOUT_S

MAX_FLOW_ROUNDS = 31  # rounds of pairs whose ways are measured, each node once in each round
MAX_ALL_PAIRS_NODES = 8  # nodes at most that all reduce with one another
PAIRS_PER_NODE = 3  # others that each of more nodes reduces with
MAX_REMEASURED_PAIRS = 8  # slow pairs that are measured twice
_STREAM_REPEATS = 2  # times, alone: what was slow beside others may be fast
SLOW_FRACTION = 0.5  # of the best: what is slower is named
MAX_GPUS = 1024  # of a node, whatever it says
_CPU_PROCESSES = 2  # processes on a node without GPUs: what they reduce goes through its memory
_CLOCK_READINGS = 5
_MAX_CLOCK_ROUND_TRIP_S = 1.0  # seconds: an answer that took longer says too little about a clock
_REPLY_MARGIN_S = 10.0  # seconds beyond what a node may take for an answer

A = TypeVar("A", bound=messages.NodeAnswer)


@dataclass(frozen=True)
class NodeResult:
    """What a node said, or why it did not; times in seconds."""

    name: str
    facts: NodeFacts | None = None
    trouble: str | None = None
    clock: float | None = None  # how far its clock is ahead of the first node's
    check: str = ""  # the command that tries to reach it
    taken: dict[int, str] = field(default_factory=dict)  # ports where it cannot listen, and why
    fabric_after: Fabric | None = None  # once all was measured


@dataclass(frozen=True)
class PathResult:
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
class DeviceResult:
    """What one device does alone."""

    node: int
    device: str
    flops: float  # a second


@dataclass(frozen=True)
class CollectiveResult:
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

    nodes: tuple[NodeResult, ...]
    ports: tuple[int, ...]  # of the store, and of the connections between nodes
    ways: tuple[PathResult, ...] = ()
    flows: tuple[Flow, ...] = ()
    powers: tuple[DeviceResult, ...] = ()
    speeds: tuple[CollectiveResult, ...] = ()
    together: tuple[CollectiveResult, ...] = ()  # with --thorough: each collective on all nodes at once
    rails: tuple[Rail, ...] = ()

    def name(self, node: int) -> str:
        return self.nodes[node].name


class Examiner:
    """Asks all nodes, in the order of their node ranks."""

    thorough = False

    def __init__(
        self,
        loop: EventLoop,
        peers: Sequence[DoctorPeer],
        address: str,
        ports: tuple[int, ...],
        environ: dict[str, str],
        on_progress: Callable[[str], None],
    ) -> None:
        """``address``: node 0's, "" for one node; ``environ``: variables of what is measured; ``on_progress``: what we do."""
        self._loop, self._peers, self._address, self._ports, self._say = loop, peers, address, ports, on_progress
        self._environ = tuple(os.fsencode(f"{name}={value}") for name, value in environ.items())
        self._found = [NodeResult(peer.name, check=peer.check_command) for peer in peers]
        self._any_port: dict[int, int] = {}

    def examine(self) -> Examination:
        """Look at all of them. Every wait has a deadline; nodes that do not answer are left out of what follows."""
        self._collect_facts()
        ways = self._test_paths() if len(self._live()) > 1 else ()
        flows = self._measure_flows(ways)
        powers, speeds = self._measure(ways, flows)
        return Examination(tuple(self._found), self._ports, ways, flows, powers, speeds)

    def _live(self) -> list[int]:
        return [node for node, found in enumerate(self._found) if found.facts and not found.trouble]

    def _query(self, questions: Mapping[int, messages.Question], kind: type[A], seconds: float) -> dict[int, A]:
        """Ask nodes at once, each of which may take so many seconds; one that does not answer is out."""
        for node, question in questions.items():
            self._peers[node].send_request(question, kind)
        seconds += _REPLY_MARGIN_S
        over = self._loop.call_later(seconds, lambda: None)
        waiting = [self._peers[node] for node in questions]
        while waiting and time.monotonic() < over.when:
            self._loop.run_once()
            waiting = [peer for peer in waiting if peer.is_waiting]
        over.cancel()
        answers: dict[int, A] = {}
        for node in questions:
            peer = self._peers[node]
            if isinstance(peer.answer, kind):
                answers[node] = peer.answer
            else:
                self._exclude(node, peer.error or timeout_text(seconds))
        return answers

    def _exclude(self, node: int, why: str) -> None:
        self._found[node] = replace(self._found[node], trouble=why)

    def _collect_facts(self) -> None:
        count = len(self._peers)
        self._say("looking at this machine" if not self._address else f"looking at {count} nodes")
        cwd = os.fsencode(os.getcwd())
        question = messages.DescribeNode(cwd, self._address, self._environ, new_nonce(), self.thorough)
        seconds = START_TIMEOUT_S + 8 * REPLY_TIMEOUT_S + TORCH_IMPORT_TIMEOUT_S
        for node, facts in self._query(dict.fromkeys(range(count), question), NodeFacts, seconds).items():
            if _is_plausible(facts):
                self._found[node] = replace(self._found[node], facts=facts)
            else:
                self._exclude(node, UNREADABLE_REPLY_ERROR)
        readings: dict[int, list[tuple[float, float]]] = {}
        for _ in range(_CLOCK_READINGS):
            for node, answer in self._query(
                dict.fromkeys(self._live(), messages.GetTime()), messages.TimeReply, REPLY_TIMEOUT_S
            ).items():
                peer = self._peers[node]
                readings.setdefault(node, []).append((peer.took, answer.now - peer.sent - peer.took / 2))
        nearest = {node: min(readings[node]) for node in self._live()}
        ahead = {node: gap for node, (took, gap) in nearest.items() if took < _MAX_CLOCK_ROUND_TRIP_S}
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
            routed = self._query({0: messages.FindRoute(address)}, messages.RouteReply, 3 * REPLY_TIMEOUT_S)
            if 0 in routed and (link := routed[0].link):
                self._found[0] = replace(self._found[0], facts=replace(facts, link=link))

    def _test_paths(self) -> tuple[PathResult, ...]:
        self._say("trying the ways between them")
        heard = self._query(
            dict.fromkeys(self._live(), messages.ListenOnPorts(self._ports)), ListenReply, REPLY_TIMEOUT_S
        )
        for node, listening in heard.items():
            self._found[node] = replace(self._found[node], taken=dict(listening.taken))
            self._any_port[node] = listening.any_port
        places = {
            source: [
                (target, self._address_of(target), port or listening.any_port)
                for target, listening in heard.items()
                if target != source
                for port in (*self._ports, 0)
                if port not in self._found[target].taken
            ]
            for source in heard
        }
        return tuple(
            PathResult(source, target, port if port in self._ports else 0, tried.outcome, tried.seconds)
            for source, target, port, tried in self._connect(places)
        )

    def _connect(
        self, places: Mapping[int, Sequence[tuple[int, str, int]]]
    ) -> Iterator[tuple[int, int, int, ConnectResult]]:
        """Have nodes connect to others, each at an address and a port; from which to which, and what came of it."""
        questions = {
            source: messages.ConnectTo(tuple((address, port) for _, address, port in each))
            for source, each in places.items()
        }
        seconds = max_duration(max(map(len, places.values()), default=0))
        for source, answer in self._query(questions, messages.ConnectReply, seconds).items():
            if len(answer.tried) != len(places[source]):
                self._exclude(source, UNREADABLE_REPLY_ERROR)
                continue
            for (target, _, port), tried in zip(places[source], answer.tried, strict=True):
                yield source, target, port, tried

    def _measure_flows(self, ways: Sequence[PathResult]) -> tuple[Flow, ...]:
        """What the open ways carry, those of many nodes at once, but each node only to and from one other."""
        ports: dict[Pair, int] = {}
        for way in ways:
            if way.outcome == "ok":
                ports[way.source, way.target] = way.port or self._any_port[way.target]
        flows: dict[Pair, Flow] = {}
        for pairing in round_robin_pairs(self._live(), MAX_FLOW_ROUNDS):
            taking = set(self._live()) - nodes_to_skip(list(flows.values()))
            pairs = [pair for pair in pairing if taking.issuperset(pair) and pair in ports and pair[::-1] in ports]
            both: list[Pair] = [each for a, b in pairs for each in ((a, b), (b, a))]
            flows |= self._ping({each: ports[each] for each in both})
            going = [pair for pair in pairs if not _is_lossy(flows, pair)]
            for turn in (going, [(b, a) for a, b in going]):  # the answers to one stream go where the other would
                self._stream(flows, {each: ports[each] for each in turn})
            for each in both:
                for _ in range(_STREAM_REPEATS):
                    if each in flows and not {"slow", "slower"}.isdisjoint(flows[each].faults):
                        self._stream(flows, {each: ports[each]})
        return tuple(flows.values())

    def _ping(self, ports: Mapping[Pair, int]) -> dict[Pair, Flow]:
        questions = {a: messages.PingNode(self._address_of(b), port) for (a, b), port in ports.items()}
        answers = self._query(questions, PingResult, PING_TIMEOUT_S)
        return {
            (a, b): Flow(a, b, self._claimed_speed(a, b), answers[a].seconds, answers[a].sent, answers[a].lost)
            for a, b in ports
            if a in answers
        }

    def _stream(self, flows: dict[Pair, Flow], ports: Mapping[Pair, int]) -> None:
        """Add to the flows what streams have shown; of several the fastest counts."""
        questions = {a: messages.SendStream(self._address_of(b), port) for (a, b), port in ports.items()}
        for a, answer in self._query(questions, messages.StreamReply, STREAM_TIMEOUT_S).items():
            (way,) = (each for each in ports if each[0] == a)
            if (stream := answer.stream) and way in flows:
                rates = [rate for rate in (stream.rate, flows[way].rate) if rate is not None]
                flows[way] = replace(flows[way], large=stream.large, rate=max(rates, default=None))

    def _claimed_speed(self, *nodes: int) -> int | None:
        """What the slowest of their interfaces claims."""
        links = [facts.link for facts in (self._found[node].facts for node in nodes) if facts]
        return min((link.speed for link in links if link and link.speed), default=None)

    def _address_of(self, node: int) -> str:
        """The address of a node: that of the interface which leads to node 0."""
        facts = self._found[node].facts
        link = facts.link if facts else None
        return self._address if node == 0 or link is None or link.loopback else link.address

    def _measure(
        self, ways: Sequence[PathResult], flows: Sequence[Flow]
    ) -> tuple[tuple[DeviceResult, ...], tuple[CollectiveResult, ...]]:
        facts = {node: self._found[node].facts for node in self._live()}
        able = [node for node, each in facts.items() if each and each.torch and not each.loopback]
        if not able:
            return (), ()
        self._say("measuring all_reduce")
        ready = self._query(
            {node: self._prepare_request(node) for node in able}, messages.PrepareReply, TORCH_IMPORT_TIMEOUT_S
        )
        powers = [DeviceResult(node, each.device, each.flops) for node, done in ready.items() for each in done.powers]
        broken = [
            CollectiveResult((node,), len(self._devices(node)), self._backend(node), error=done.error)
            for node, done in ready.items()
            if done.error
        ]
        well = [node for node, done in ready.items() if not done.error]
        alone = self._collective([(node,) for node in well])
        closed = {frozenset((way.source, way.target)) for way in ways if way.port == 0 and way.outcome != "ok"}
        closed |= {frozenset(flow.pair) for flow in flows if flow.faults}
        well = [node for node in well if node not in nodes_to_skip(flows)]
        pairs = dict[tuple[int, ...], CollectiveResult]()
        for pairing in round_robin_pairs(
            well, MAX_ALL_PAIRS_NODES - 1 if len(well) <= MAX_ALL_PAIRS_NODES else PAIRS_PER_NODE
        ):
            out = _failing_nodes(pairs.values())
            trying = [pair for pair in pairing if frozenset(pair) not in closed and out.isdisjoint(pair)]
            pairs |= self._collective([(a, b) for a, b in trying if self._backend(a) == self._backend(b)], most=1)
        self._remeasure_slow_pairs(pairs)
        return tuple(powers), (*broken, *alone.values(), *pairs.values())

    def _remeasure_slow_pairs(self, pairs: dict[tuple[int, ...], CollectiveResult]) -> None:
        """Measure slow pairs alone: all that ran beside them may have slowed them, and then also those not tried."""
        slow = sorted((each for each in slow_pairs(list(pairs.values())) if not each.error), key=largest_bus_bandwidth)
        for each in slow[:MAX_REMEASURED_PAIRS]:
            for nodes, again in self._collective([each.nodes], most=1).items():
                pairs[nodes] = max(each, again, key=largest_bus_bandwidth)
        still = {each.nodes for each in slow_pairs(list(pairs.values()))}
        if not still.issuperset(each.nodes for each in slow[:MAX_REMEASURED_PAIRS]):
            for each in slow[MAX_REMEASURED_PAIRS:]:
                del pairs[each.nodes]

    def _prepare_request(self, node: int) -> PrepareDevices:
        facts = self._found[node].facts
        interface = facts.link.interface if facts and facts.link else None
        return PrepareDevices(self._devices(node), interface if interface and interface != "lo" else "")

    def _collective(
        self,
        groups: Sequence[tuple[int, ...]],
        name: str = "all_reduce",
        *,
        most: int = MAX_GPUS,
        room: int = benchmark.SIZES[-1],
        rail: Rail | None = None,
    ) -> dict[tuple[int, ...], CollectiveResult]:
        """Measure in groups of nodes at the same time, none in two of them, with so many devices of each at most."""
        questions: dict[int, MeasureCollective] = {}
        for nodes in groups:
            first, counts = nodes[0], [min(most, len(self._devices(node))) for node in nodes]
            address, port = "", 0
            if len(nodes) > 1:
                address, port = rail.addresses[first] if rail else self._address_of(first), self._any_port[first]
            for place, node in enumerate(nodes if sum(counts) > 1 else ()):
                questions[node] = MeasureCollective(
                    address, port, sum(counts[:place]), counts[place], sum(counts), name, room
                )
        answers = self._query(questions, CollectiveTimes, benchmark.TASK_TIMEOUT_S + TORCH_IMPORT_TIMEOUT_S)
        return {
            nodes: CollectiveResult(
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
        on_cpus = (
            _CPU_PROCESSES if len(self._peers) <= MAX_ALL_PAIRS_NODES else 1
        )  # torch takes its time to be imported
        return tuple(f"cuda:{index}" for index in range(min(gpus, MAX_GPUS))) or ("cpu",) * on_cpus


def _failing_nodes(speeds: Collection[CollectiveResult]) -> set[int]:
    """The nodes that failed twice, and never did not: each failure takes its deadline."""
    failed = [node for speed in speeds if speed.error for node in speed.nodes]
    passed = {node for speed in speeds if not speed.error for node in speed.nodes}
    return {node for node in failed if failed.count(node) > 1} - passed


def _is_lossy(flows: Mapping[Pair, Flow], pair: Pair) -> bool:
    return any(way in flows and "lossy" in flows[way].faults for way in (pair, pair[::-1]))


def _is_plausible(facts: NodeFacts) -> bool:
    """Whether the rules can be applied to what a node says; it may be a stranger's."""
    try:
        list(machine_findings("", facts))
    except (ValueError, ArithmeticError):
        return False
    return True


def bus_bandwidth(speed: CollectiveResult, place: int) -> float | None:
    """Bytes a second over the slowest link (nccl-tests' "bus bandwidth") for one of benchmark.ALL_SIZES.

    None where that was not measured.
    """
    if speed.error or place >= len(speed.seconds):
        return None
    passes = 2 if speed.name.startswith("all_reduce") else 1  # over the slowest link
    return passes * (speed.ranks - 1) / speed.ranks * benchmark.ALL_SIZES[place] / speed.seconds[place]


def largest_bus_bandwidth(speed: CollectiveResult) -> float:
    """The rate of the largest size that was measured: small ones may fit into a buffer of the way. 0 if it failed."""
    return bus_bandwidth(speed, len(speed.seconds) - 1) or 0.0 if len(speed.seconds) > 1 else 0.0


def slow_pairs(speeds: Sequence[CollectiveResult], share: float = SLOW_FRACTION) -> Iterator[CollectiveResult]:
    """The pairs of nodes much slower than the best, and those that failed."""
    pairs = [speed for speed in speeds if len(speed.nodes) == 2]
    rates = sorted(map(largest_bus_bandwidth, pairs))
    best = rates[len(rates) * 3 // 4] if rates else 0.0  # not of those few that were measured again, alone
    yield from (each for each in pairs if largest_bus_bandwidth(each) < share * best)


def round_robin_pairs(nodes: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Pair the nodes so that each is in one pair of a round: the circle method of tournaments. Few nodes all meet."""
    seats: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(min(len(seats) - 1, most)):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
