"""What the ways between nodes carry: how long a packet takes, how many are lost, how fast a stream is; and what of that
is too little. Pure.

The floors are what a room of machines has, whatever all the ways here have in common, and what a link claims. A way has
one fault, the first of its causes: where packets are lost, all else is a consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from ddplaunch.commands.doctor.checks import Finding, Findings, Severity
from ddplaunch.commands.doctor.ways import MAX_LOST
from ddplaunch.dataclass import dataclass

MAX_LOSS_FRACTION = 0.01  # of the packets; TCP's own tries to go faster lose none of these
MAX_ROUND_TRIP_S = 0.005  # seconds there and back; in a room of machines it is a tenth of a millisecond
MIN_RATE = 100e6 / 8  # bytes a second; the slowest links in such a room have ten times as much
MIN_CLAIMED_FRACTION = 0.1  # of what the interfaces say
_MAX_STREAM_MBITS = 10_000  # megabits a second: more does not go through one connection everywhere
_MAX_FINDINGS = 3  # findings of one kind that are told one by one

FlowFault = Literal["lossy", "large", "far", "slow", "slower"]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Flow:
    """What went from one node to another; nodes by their numbers."""

    source: int
    target: int
    claimed: int | None  # megabits a second, by the slower of the two interfaces
    seconds: float | None = None  # a packet's there and back; None where none came through
    sent: int = 0  # small packets
    lost: int = 0
    large: bool = True  # whether packets of full size arrive
    rate: float | None = None  # bytes a second; None where that was not measured

    @property
    def pair(self) -> Pair:
        return self.source, self.target

    @property
    def faults(self) -> tuple[FlowFault, ...]:
        """What is wrong with it: one, or both of "far" and "slow"."""
        if self.lost >= MAX_LOST and self.lost >= MAX_LOSS_FRACTION * self.sent:
            return ("lossy",)
        if not self.large:
            return ("large",)
        far: tuple[FlowFault, ...] = ("far",) if self.seconds is not None and self.seconds > MAX_ROUND_TRIP_S else ()
        if self.rate is None:
            return far
        if self.rate < MIN_RATE:
            return (*far, "slow")
        claim = min(self.claimed or 0, _MAX_STREAM_MBITS) * 1e6 / 8
        return ("slower",) if not far and self.rate < MIN_CLAIMED_FRACTION * claim else far


def nodes_to_skip(flows: Sequence[Flow]) -> set[int]:
    """The nodes that need not be tried with more: all their ways were faulty so far, though others have sound ones.

    Each way costs its deadlines, and two or three say as much as thirty.
    """
    faulty: dict[int, set[int]] = {}
    met: dict[int, set[int]] = {}
    for flow in flows:
        for node, other in (flow.pair, flow.pair[::-1]):
            met.setdefault(node, set()).add(other)
            if flow.faults:
                faulty.setdefault(node, set()).add(other)
    sound = {node for node, others in met.items() if others - faulty.get(node, set())}
    return {
        node for node, others in faulty.items() if node not in sound and len(others) >= (2 if others & sound else 3)
    }


def lossy_pairs(flows: Sequence[Flow]) -> tuple[set[frozenset[int]], set[int]]:
    """The pairs of nodes between which packets are lost, and the nodes of which no more ways were tried for that."""
    pairs = {frozenset(flow.pair) for flow in flows if "lossy" in flow.faults}
    return pairs, {node for node in nodes_to_skip(flows) if any(node in pair for pair in pairs)}


def flow_findings(flows: Sequence[Flow], name: Callable[[int], str]) -> Findings:
    """What is wrong, told by the node where all its ways have it."""
    for fault in _FAULT_ORDER:
        faulty = {flow.pair: flow for flow in flows if fault in flow.faults}
        told = list(_group_by_node(faulty, {flow.pair for flow in flows}, name))
        for subject, pairs in told[:_MAX_FINDINGS]:
            yield _make_finding(fault, subject, max((faulty[pair] for pair in pairs), key=_FAULT_SEVERITY[fault]))
        if len(told) > _MAX_FINDINGS:
            subject = f"{len(told) - _MAX_FINDINGS} more ways"
            rest = [faulty[pair] for _, pairs in told[_MAX_FINDINGS:] for pair in pairs]
            yield _make_finding(fault, subject, max(rest, key=_FAULT_SEVERITY[fault]))


_FAULT_ORDER: tuple[FlowFault, ...] = ("lossy", "large", "far", "slow", "slower")
_FAULT_SEVERITY: Mapping[FlowFault, Callable[[Flow], float]] = {
    "lossy": lambda flow: flow.lost / flow.sent,
    "large": lambda flow: 0.0,
    "far": lambda flow: flow.seconds or 0.0,
    "slow": lambda flow: -(flow.rate or 0.0),
    "slower": lambda flow: -(flow.rate or 0.0),
}


def _group_by_node(
    faulty: Collection[Pair], measured: Collection[Pair], name: Callable[[int], str]
) -> Iterator[tuple[str, list[Pair]]]:
    """The subject of each finding, and the ways that it stands for: all, those of a node, or those of two nodes."""
    left = sorted(faulty)
    pairs = {frozenset(pair) for pair in measured}
    bad = {frozenset(pair) for pair in faulty}
    if len(pairs) > 2 and bad == pairs:
        yield "any two nodes", left
        return
    own = {node: {pair for pair in pairs if node in pair} for pair in bad for node in pair}
    for node in sorted(own, key=lambda each: (-len(own[each]), each)):
        mine = [pair for pair in left if node in pair]
        if mine and len(own[node]) > 1 and own[node] <= bad:
            yield name(node), mine
            left = [pair for pair in left if pair not in mine]
    for source, target in left:
        back = (target, source)
        if back not in left:
            yield f"{name(source)} to {name(target)}", [(source, target)]
        elif source < target:
            yield f"{name(source)} and {name(target)}", [(source, target), back]


def _make_finding(fault: FlowFault, subject: str, flow: Flow) -> Finding:
    match fault:
        case "lossy":
            share = 100 * flow.lost / flow.sent
            told = f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"
            text = f"packets are lost on the way: {told} ({flow.lost} of {flow.sent})"
            hint = "look at the cables, the switch ports and their error counters: ethtool -S, ip -s link"
        case "large":
            text = "a connection works, but packets of full size are lost on the way"
            hint = "set the same MTU on nodes and switches, and let ICMP pass"
        case "far":
            text = f"a packet takes {1e3 * (flow.seconds or 0):.3g} ms there and back; in a machine room under 1 ms"
            hint = "give a job nodes of one place; `ping` and `traceroute` show where the time goes"
        case _:
            claim = (
                f"the interface claims {flow.claimed} Mbit/s"
                if flow.claimed
                else "a machine room has 1000 Mbit/s or more"
            )
            text = f"data flows at {format_megabits(flow.rate or 0)}, and {claim}"
            hint = "look at the cables and switch ports (ethtool), at limits (tc qdisc), and at what else runs there"
    severity = Severity.WARNING if fault == "slower" else Severity.ERROR
    return Finding(severity, subject, text, hint)


def format_megabits(rate: float) -> str:
    """A rate in bytes a second, as interfaces have theirs."""
    return f"{rate * 8 / 1e6:.3g} Mbit/s" if rate < 125e6 else f"{rate * 8 / 1e6:.0f} Mbit/s"
