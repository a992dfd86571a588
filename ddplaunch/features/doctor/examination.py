"""Examines all nodes at once: facts of each, connectivity between them, and the speed of collectives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.types import TaggedMessage
from ddplaunch.cli.target_args import require_current_folder
from ddplaunch.features.doctor import benchmark, messages
from ddplaunch.features.doctor.benchmark import CollectiveTimes, MeasureCollective, PrepareDevices
from ddplaunch.features.doctor.connectivity import (
    PING_TIMEOUT_S,
    STREAM_TIMEOUT_S,
    ConnectResult,
    ListenReply,
    Outcome,
    PingResult,
    max_connect_duration_s,
    new_nonce,
)
from ddplaunch.features.doctor.flows import Flow, Pair, nodes_to_skip
from ddplaunch.features.doctor.node_checks import machine_findings
from ddplaunch.features.doctor.node_facts import NodeFacts
from ddplaunch.features.doctor.peers import UNREADABLE_REPLY_ERROR, DoctorPeer, timeout_text
from ddplaunch.features.doctor.probe import REPLY_TIMEOUT_S, TORCH_IMPORT_TIMEOUT_S
from ddplaunch.system.plan.launch_command import START_TIMEOUT_S

MAX_FLOW_ROUNDS = 31  # rounds in which paths are measured, each node in one pair per round
MAX_ALL_PAIRS_NODES = 8  # up to this many nodes all pairs are measured
PAIRS_PER_NODE = 3  # of more nodes, each is measured with this many others
MAX_REMEASURED_PAIRS = 8  # slow pairs that are measured again, alone
_STREAM_REPEATS = 2  # repeats of a slow stream, alone: other streams may have slowed it
SLOW_FRACTION = 0.5  # of the best; what is slower is reported
MAX_GPUS = 1024  # upper limit for one node, whatever it reports
_CPU_PROCESSES = 2  # processes on a node without GPUs: they reduce through its memory
_CLOCK_READINGS = 5
_MAX_CLOCK_ROUND_TRIP_S = 1.0  # a slower reply says too little about a clock
_REPLY_MARGIN_S = 10.0  # added to the time that a node may take for a reply

A = TypeVar("A", bound=TaggedMessage)


class ExaminedNode(Struct, frozen=True):
    """The facts of one node, or why there are none; times in seconds."""

    name: str
    facts: NodeFacts | None = None
    trouble: str | None = None
    clock: float | None = None  # how far its clock is ahead of the first node's
    check: str = ""  # a command that tests the route to it
    taken: dict[int, str] = field(default_factory=dict)  # ports on which it cannot listen, and why


class PathResult(Struct, frozen=True):
    """One connection attempt between two nodes, given by their indices."""

    source: int
    target: int
    port: int  # 0: one that the kernel chose
    outcome: Outcome
    seconds: float | None  # round-trip time


class Rail(Struct, frozen=True):
    """A network that several nodes share besides the one to node 0, and the connection tests over it."""

    network: str
    interfaces: dict[int, str]  # by node
    addresses: dict[int, str]
    outcomes: tuple[tuple[int, int, Outcome], ...] = ()  # source, target, outcome


class DeviceResult(Struct, frozen=True):
    """The measured speed of one device, without collectives."""

    node: int
    device: str
    flops: float  # per second


class CollectiveResult(Struct, frozen=True):
    """The measured times of a collective on one node, on two, or on all."""

    nodes: tuple[int, ...]
    ranks: int
    backend: str
    seconds: tuple[float, ...] = ()  # for the first sizes of benchmark.ALL_SIZES, those that were measured
    error: str | None = None
    name: str = "all_reduce"


class DoctorResults(Struct, frozen=True):
    """The results of all tests: facts without a judgement."""

    nodes: tuple[ExaminedNode, ...]
    ports: tuple[int, ...]  # of the store, and the control port
    ways: tuple[PathResult, ...] = ()
    flows: tuple[Flow, ...] = ()
    powers: tuple[DeviceResult, ...] = ()
    speeds: tuple[CollectiveResult, ...] = ()
    together: tuple[CollectiveResult, ...] = ()  # with --thorough: each collective on all nodes at once
    rails: tuple[Rail, ...] = ()

    def name(self, node: int) -> str:
        return self.nodes[node].name


class Examiner:
    """Runs the tests on all nodes, which are in the order of their node ranks."""

    def __init__(
        self,
        loop: EventLoop,
        peers: Sequence[DoctorPeer],
        address: str,
        ports: tuple[int, ...],
        environ: dict[str, str],
        on_progress: Callable[[str], None],
    ) -> None:
        """``address``: node 0's, "" for one node; ``environ``: for benchmarks; ``on_progress``: gets progress notes.

        Raises UsageError if the current folder was removed.
        """
        self._loop, self._peers, self._address, self._ports = loop, peers, address, ports
        self._report_progress = on_progress
        self._cwd = os.fsencode(require_current_folder())
        self._environ = tuple(os.fsencode(f"{name}={value}") for name, value in environ.items())
        self._found = [ExaminedNode(peer.name, check=peer.check_command) for peer in peers]
        self._any_port: dict[int, int] = {}

    def examine(self) -> DoctorResults:
        """Run all tests. Every wait has a deadline; nodes that do not answer are excluded from later tests."""
        self._collect_facts()
        paths = self._test_connections() if len(self._responding_nodes()) > 1 else ()
        flows = self._measure_flows(paths)
        powers, speeds = self._measure(paths, flows)
        return DoctorResults(tuple(self._found), self._ports, paths, flows, powers, speeds)

    def _responding_nodes(self) -> list[int]:
        return [node for node, found in enumerate(self._found) if found.facts and not found.trouble]

    def _query(self, questions: Mapping[int, messages.Question], kind: type[A], timeout_s: float) -> dict[int, A]:
        """Send requests to nodes at once; exclude those that do not answer within ``timeout_s`` (plus a margin)."""
        for node, question in questions.items():
            self._peers[node].send_request(question, kind)
        timeout_s += _REPLY_MARGIN_S
        timer = self._loop.call_later(timeout_s, lambda: None)
        waiting = [self._peers[node] for node in questions]
        while waiting and time.monotonic() < timer.when:
            self._loop.run_once()
            waiting = [peer for peer in waiting if peer.is_waiting]
        timer.cancel()
        answers: dict[int, A] = {}
        for node in questions:
            peer = self._peers[node]
            if isinstance(peer.answer, kind):
                answers[node] = peer.answer
            else:
                self._exclude_node(node, peer.error or timeout_text(timeout_s))
        return answers

    def _exclude_node(self, node: int, why: str) -> None:
        self._found[node] = replace(self._found[node], trouble=why)

    def _collect_facts(self) -> None:
        count = len(self._peers)
        self._report_progress("examining this machine" if not self._address else f"examining {count} nodes")
        question = messages.DescribeNode(self._cwd, self._address, self._environ, new_nonce())
        seconds = START_TIMEOUT_S + 8 * REPLY_TIMEOUT_S + TORCH_IMPORT_TIMEOUT_S
        for node, facts in self._query(dict.fromkeys(range(count), question), NodeFacts, seconds).items():
            if _is_plausible(facts):
                self._found[node] = replace(self._found[node], facts=facts)
            else:
                self._exclude_node(node, UNREADABLE_REPLY_ERROR)
        readings: dict[int, list[tuple[float, float]]] = {}
        for _ in range(_CLOCK_READINGS):
            questions = dict.fromkeys(self._responding_nodes(), messages.GetTime())
            for node, answer in self._query(questions, messages.TimeReply, REPLY_TIMEOUT_S).items():
                peer = self._peers[node]
                readings.setdefault(node, []).append((peer.took, answer.now - peer.sent - peer.took / 2))
        fastest = {node: min(readings[node]) for node in self._responding_nodes()}
        ahead = {node: gap for node, (took, gap) in fastest.items() if took < _MAX_CLOCK_ROUND_TRIP_S}
        for node in ahead:
            self._found[node] = replace(self._found[node], clock=ahead[node] - ahead[min(ahead)])
        self._correct_node_zero_route()

    def _correct_node_zero_route(self) -> None:
        """Replace node 0's route by that to the address that others use, if node 0 resolves its own name to loopback.

        Debian's installer maps that name to 127.0.1.1 in /etc/hosts. A job also uses the address that others reach.
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

    def _test_connections(self) -> tuple[PathResult, ...]:
        self._report_progress("testing connectivity between the nodes")
        questions = dict.fromkeys(self._responding_nodes(), messages.ListenOnPorts(self._ports))
        listening_nodes = self._query(questions, ListenReply, REPLY_TIMEOUT_S)
        for node, listening in listening_nodes.items():
            self._found[node] = replace(self._found[node], taken=dict(listening.taken))
            self._any_port[node] = listening.any_port
        targets = {
            source: [
                (target, self._node_address(target), port or listening.any_port)
                for target, listening in listening_nodes.items()
                if target != source
                for port in (*self._ports, 0)
                if port not in self._found[target].taken
            ]
            for source in listening_nodes
        }
        return tuple(
            PathResult(source, target, port if port in self._ports else 0, tried.outcome, tried.seconds)
            for source, target, port, tried in self._connect(targets)
        )

    def _connect(
        self, targets: Mapping[int, Sequence[tuple[int, str, int]]]
    ) -> Iterator[tuple[int, int, int, ConnectResult]]:
        """Make nodes connect to others; yield source, target, port and result of each connection attempt."""
        questions = {
            source: messages.ConnectTo(tuple((address, port) for _, address, port in each))
            for source, each in targets.items()
        }
        seconds = max_connect_duration_s(max(map(len, targets.values()), default=0))
        for source, answer in self._query(questions, messages.ConnectReply, seconds).items():
            if len(answer.tried) != len(targets[source]):
                self._exclude_node(source, UNREADABLE_REPLY_ERROR)
                continue
            for (target, _, port), tried in zip(targets[source], answer.tried, strict=True):
                yield source, target, port, tried

    def _measure_flows(self, paths: Sequence[PathResult]) -> tuple[Flow, ...]:
        """Measure round-trip time, loss and throughput of working paths: many pairs at once, each node in one pair."""
        ports: dict[Pair, int] = {}
        for path in paths:
            if path.outcome == "ok":
                ports[path.source, path.target] = path.port or self._any_port[path.target]
        flows: dict[Pair, Flow] = {}
        for pairing in round_robin_pairs(self._responding_nodes(), MAX_FLOW_ROUNDS):
            taking = set(self._responding_nodes()) - nodes_to_skip(list(flows.values()))
            pairs = [pair for pair in pairing if taking.issuperset(pair) and pair in ports and pair[::-1] in ports]
            both: list[Pair] = [each for a, b in pairs for each in ((a, b), (b, a))]
            flows |= self._ping({each: ports[each] for each in both})
            lossy = {frozenset(path) for path, flow in flows.items() if "lossy" in flow.faults}
            going = [pair for pair in pairs if frozenset(pair) not in lossy]
            # One direction at a time: acknowledgements would share the path.
            self._measure_streams(flows, {pair: ports[pair] for pair in going})
            self._measure_streams(flows, {pair[::-1]: ports[pair[::-1]] for pair in going})
            for each in both:
                for _ in range(_STREAM_REPEATS):
                    if each in flows and not {"slow", "slower"}.isdisjoint(flows[each].faults):
                        self._measure_streams(flows, {each: ports[each]})
        return tuple(flows.values())

    def _ping(self, ports: Mapping[Pair, int]) -> dict[Pair, Flow]:
        questions = {a: messages.PingNode(self._node_address(b), port) for (a, b), port in ports.items()}
        answers = self._query(questions, PingResult, PING_TIMEOUT_S)
        return {
            (a, b): Flow(a, b, self._claimed_speed(a, b), answers[a].seconds, answers[a].sent, answers[a].lost)
            for a, b in ports
            if a in answers
        }

    def _measure_streams(self, flows: dict[Pair, Flow], ports: Mapping[Pair, int]) -> None:
        """Measure the throughput of paths and add it to the flows; of several results the fastest counts."""
        questions = {a: messages.SendStream(self._node_address(b), port) for (a, b), port in ports.items()}
        for a, answer in self._query(questions, messages.StreamReply, STREAM_TIMEOUT_S).items():
            (path,) = (each for each in ports if each[0] == a)
            if (stream := answer.stream) and path in flows:
                rates = [rate for rate in (stream.rate, flows[path].rate) if rate is not None]
                flows[path] = replace(flows[path], large=stream.large, rate=max(rates, default=None))

    def _claimed_speed(self, *nodes: int) -> int | None:
        """The lowest link speed that the interfaces of these nodes report, in Mbit/s."""
        links = [facts.link for facts in (self._found[node].facts for node in nodes) if facts]
        return min((link.speed for link in links if link and link.speed), default=None)

    def _node_address(self, node: int) -> str:
        """The address of a node: that of its interface towards node 0."""
        facts = self._found[node].facts
        link = facts.link if facts else None
        return self._address if node == 0 or link is None or link.loopback else link.address

    def _measure(
        self, paths: Sequence[PathResult], flows: Sequence[Flow]
    ) -> tuple[tuple[DeviceResult, ...], tuple[CollectiveResult, ...]]:
        facts = {node: self._found[node].facts for node in self._responding_nodes()}
        with_torch = [
            node
            for node, each in facts.items()
            if each and each.torch and not each.loopback and not self._uses_missing_interface(node, each)
        ]
        if not with_torch:
            return (), ()
        self._report_progress("measuring all_reduce")
        requests = {node: self._prepare_request(node) for node in with_torch}
        replies = self._query(requests, messages.PrepareReply, TORCH_IMPORT_TIMEOUT_S)
        powers = [DeviceResult(node, each.device, each.flops) for node, one in replies.items() for each in one.powers]
        broken = [
            CollectiveResult((node,), len(self._devices_for(node)), self._backend_for(node), error=reply.error)
            for node, reply in replies.items()
            if reply.error
        ]
        ready = [node for node, reply in replies.items() if not reply.error]
        alone = self._measure_in_groups([(node,) for node in ready])
        closed = {frozenset((path.source, path.target)) for path in paths if path.port == 0 and path.outcome != "ok"}
        closed |= {frozenset(flow.pair) for flow in flows if flow.faults}
        ready = [node for node in ready if node not in nodes_to_skip(flows)]
        pairs = dict[tuple[int, ...], CollectiveResult]()
        rounds = MAX_ALL_PAIRS_NODES - 1 if len(ready) <= MAX_ALL_PAIRS_NODES else PAIRS_PER_NODE
        for pairing in round_robin_pairs(ready, rounds):
            failing = _failing_nodes(pairs.values())
            candidates = [pair for pair in pairing if frozenset(pair) not in closed and failing.isdisjoint(pair)]
            same_backend = [(a, b) for a, b in candidates if self._backend_for(a) == self._backend_for(b)]
            pairs |= self._measure_in_groups(same_backend, most=1)
        self._remeasure_slow_pairs(pairs)
        return tuple(powers), (*broken, *alone.values(), *pairs.values())

    def _remeasure_slow_pairs(self, pairs: dict[tuple[int, ...], CollectiveResult]) -> None:
        """Measure slow pairs again, alone: concurrent pairs may have slowed them. If so, drop other slow results."""
        slow = sorted(
            (each for each in slow_pairs(list(pairs.values())) if not each.error), key=bandwidth_of_largest_size
        )
        for each in slow[:MAX_REMEASURED_PAIRS]:
            for nodes, again in self._measure_in_groups([each.nodes], most=1).items():
                pairs[nodes] = max(each, again, key=bandwidth_of_largest_size)
        still = {each.nodes for each in slow_pairs(list(pairs.values()))}
        if not still.issuperset(each.nodes for each in slow[:MAX_REMEASURED_PAIRS]):
            for each in slow[MAX_REMEASURED_PAIRS:]:
                del pairs[each.nodes]

    def _prepare_request(self, node: int) -> PrepareDevices:
        facts = self._found[node].facts
        interface = facts.link.interface if facts and facts.link else None
        return PrepareDevices(self._devices_for(node), interface if interface and interface != "lo" else "")

    def _measure_in_groups(
        self,
        groups: Sequence[tuple[int, ...]],
        name: str = "all_reduce",
        *,
        most: int = MAX_GPUS,
        max_bytes: int = benchmark.SIZES[-1],
        rail: Rail | None = None,
    ) -> dict[tuple[int, ...], CollectiveResult]:
        """Measure a collective in disjoint groups of nodes at once, with up to ``most`` devices of each node."""
        questions: dict[int, MeasureCollective] = {}
        for nodes in groups:
            first, counts = nodes[0], [min(most, len(self._devices_for(node))) for node in nodes]
            address, port = "", 0
            if len(nodes) > 1:
                address, port = rail.addresses[first] if rail else self._node_address(first), self._any_port[first]
            for place, node in enumerate(nodes if sum(counts) > 1 else ()):
                questions[node] = MeasureCollective(
                    address, port, sum(counts[:place]), counts[place], sum(counts), name, max_bytes
                )
        answers = self._query(questions, CollectiveTimes, benchmark.TASK_TIMEOUT_S + TORCH_IMPORT_TIMEOUT_S)
        return {
            nodes: CollectiveResult(
                nodes,
                questions[nodes[0]].world_size,
                "gloo" if rail else self._backend_for(nodes[0]),
                answers[nodes[0]].seconds,
                next((answers[node].error for node in nodes if answers[node].error), None),
                f"{name} over {rail.network}" if rail else name,
            )
            for nodes in groups
            if answers.keys() >= set(nodes)
        }

    def _backend_for(self, node: int) -> str:
        return "gloo" if self._devices_for(node)[0] == "cpu" else "nccl"

    def _uses_missing_interface(self, node: int, facts: NodeFacts) -> bool:
        """Whether a variable of gloo or NCCL on a node names a missing interface: its collectives would fail."""
        return any(each.startswith(self._backend_for(node).upper()) for each in facts.unknown_interfaces)

    def _devices_for(self, node: int) -> tuple[str, ...]:
        facts = self._found[node].facts
        gpus = facts.torch.devices if facts and facts.torch else 0
        on_cpus = _CPU_PROCESSES if len(self._peers) <= MAX_ALL_PAIRS_NODES else 1  # importing torch takes long
        return tuple(f"cuda:{index}" for index in range(min(gpus, MAX_GPUS))) or ("cpu",) * on_cpus


def _failing_nodes(speeds: Collection[CollectiveResult]) -> set[int]:
    """Return nodes that failed at least twice and never passed: each further failure would take a whole timeout."""
    failed = [node for speed in speeds if speed.error for node in speed.nodes]
    passed = {node for speed in speeds if not speed.error for node in speed.nodes}
    return {node for node in failed if failed.count(node) > 1} - passed


def _is_plausible(facts: NodeFacts) -> bool:
    """Whether the checks can process the facts of a node, which may be forged."""
    try:
        list(machine_findings("", facts))
    except (ValueError, ArithmeticError):
        return False
    return True


def bus_bandwidth(speed: CollectiveResult, index: int) -> float | None:
    """Bytes per second over the slowest link (nccl-tests' "bus bandwidth") for one of benchmark.ALL_SIZES.

    None if that was not measured.
    """
    if speed.error or index >= len(speed.seconds):
        return None
    passes = 2 if speed.name.startswith("all_reduce") else 1  # over the slowest link
    return passes * (speed.ranks - 1) / speed.ranks * benchmark.ALL_SIZES[index] / speed.seconds[index]


def bandwidth_of_largest_size(speed: CollectiveResult) -> float:
    """The bandwidth of the largest measured size: small ones may fit into a buffer on the path. 0 if it failed."""
    return bus_bandwidth(speed, len(speed.seconds) - 1) or 0.0 if len(speed.seconds) > 1 else 0.0


def slow_pairs(speeds: Sequence[CollectiveResult], share: float = SLOW_FRACTION) -> Iterator[CollectiveResult]:
    """Yield the pairs of nodes that are much slower than the best, and those that failed."""
    pairs = [speed for speed in speeds if len(speed.nodes) == 2]
    rates = sorted(map(bandwidth_of_largest_size, pairs))
    best = rates[len(rates) * 3 // 4] if rates else 0.0  # not the maximum: a few pairs were measured again, alone
    yield from (each for each in pairs if bandwidth_of_largest_size(each) < share * best)


def round_robin_pairs(nodes: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Pair the nodes so that each is in one pair per round (circle method); with enough rounds all pairs occur."""
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(min(len(circle) - 1, most)):
        pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
