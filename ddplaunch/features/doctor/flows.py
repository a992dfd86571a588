"""Quality of the paths between nodes: round-trip time, packet loss and throughput, and the findings on these. Pure.

A path is judged by what is usual in one data center, even if all paths here are alike, and by the speed that its link
reports. It has one fault, the first in the order of causes: packet loss explains all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.features.doctor.checks import Finding, Findings, Severity
from ddplaunch.features.doctor.connectivity import MAX_LOST

MAX_LOSS_FRACTION = 0.01  # of the packets; TCP's own probing for bandwidth loses none of these
MAX_ROUND_TRIP_S = 0.005  # 0.1 ms is usual in one data center
MIN_RATE = 100e6 / 8  # bytes per second; the slowest links in a data center have ten times as much
MIN_CLAIMED_FRACTION = 0.1  # of the speed that the interfaces report
_MAX_STREAM_MBITS = 10_000  # one connection does not carry more everywhere
_MAX_FINDINGS = 3  # of one kind that are listed; the others are counted

FlowFault = Literal["lossy", "large", "far", "slow", "slower"]
Pair = tuple[int, int]


class Flow(Struct, frozen=True):
    """The measurements of the path from one node to another, given by their indices."""

    source: int
    target: int
    claimed: int | None  # Mbit/s, by the slower of the two interfaces
    seconds: float | None = None  # round-trip time; None if no packet came back
    sent: int = 0  # small packets
    lost: int = 0
    large: bool = True  # whether packets of full size arrive
    rate: float | None = None  # bytes per second; None if not measured

    @property
    def pair(self) -> Pair:
        return self.source, self.target

    @property
    def faults(self) -> tuple[FlowFault, ...]:
        """The faults of this path: at most one, or both of "far" and "slow"."""
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
    """Return nodes that need no more tests: all their paths were faulty so far, while other nodes have sound paths.

    Each faulty path costs its timeouts, and two or three say as much as thirty.
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
    """Return the pairs of nodes with packet loss, and the nodes that were not tested further because of it."""
    pairs = {frozenset(flow.pair) for flow in flows if "lossy" in flow.faults}
    return pairs, {node for node in nodes_to_skip(flows) if any(node in pair for pair in pairs)}


def flow_findings(flows: Sequence[Flow], name: Callable[[int], str]) -> Findings:
    """Yield the findings on faulty paths: one for a node if all of its paths have the fault."""
    for fault in _FAULT_SEVERITY:
        faulty = {flow.pair: flow for flow in flows if fault in flow.faults}
        groups = list(_group_by_node(faulty, {flow.pair for flow in flows}, name))
        for subject, pairs in groups[:_MAX_FINDINGS]:
            yield _make_finding(fault, subject, _summarize_flows(fault, [faulty[pair] for pair in pairs]))
        if len(groups) > _MAX_FINDINGS:
            subject = f"{len(groups) - _MAX_FINDINGS} more paths"
            rest = [faulty[pair] for _, pairs in groups[_MAX_FINDINGS:] for pair in pairs]
            yield _make_finding(fault, subject, _summarize_flows(fault, rest))


def _summarize_flows(fault: FlowFault, flows: Sequence[Flow]) -> Flow:
    """Return the worst path of a finding; for lost packets with the sums of all, as a busy node sends few on some."""
    worst = max(flows, key=_FAULT_SEVERITY[fault])
    if fault == "lossy":
        return replace(worst, sent=sum(each.sent for each in flows), lost=sum(each.lost for each in flows))
    return worst


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
    """Yield the subject of each finding and its paths: all paths, those of one node, or those between two nodes."""
    remaining = sorted(faulty)
    pairs = {frozenset(pair) for pair in measured}
    bad = {frozenset(pair) for pair in faulty}
    if len(pairs) > 2 and bad == pairs:
        yield "any two nodes", remaining
        return
    own = {node: {pair for pair in pairs if node in pair} for pair in bad for node in pair}
    for node in sorted(own, key=lambda each: (-len(own[each]), each)):
        own_pairs = [pair for pair in remaining if node in pair]
        if own_pairs and len(own[node]) > 1 and own[node] <= bad:
            yield name(node), own_pairs
            remaining = [pair for pair in remaining if pair not in own_pairs]
    for source, target in remaining:
        back = (target, source)
        if back not in remaining:
            yield f"{name(source)} to {name(target)}", [(source, target)]
        elif source < target:
            yield f"{name(source)} and {name(target)}", [(source, target), back]


def _make_finding(fault: FlowFault, subject: str, flow: Flow) -> Finding:
    match fault:
        case "lossy":
            share = 100 * flow.lost / flow.sent
            percent = f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"
            text = f"packets are lost: {percent} ({flow.lost} of {flow.sent})"
            hint = "check the cables, the switch ports and their error counters: ethtool -S, ip -s link"
        case "large":
            text = "connections work, but full-size packets are lost"
            hint = "set the same MTU on nodes and switches, and allow ICMP"
        case "far":
            text = f"round-trip time is {1e3 * (flow.seconds or 0):.3g} ms; expected below 1 ms in one data center"
            hint = "use nodes of one data center; `ping` and `traceroute` show where the time is spent"
        case _:
            claim = "expected 1000 Mbit/s or more in a data center"
            if flow.claimed:
                claim = f"the interface reports {flow.claimed} Mbit/s"
            text = f"throughput is {format_megabits(flow.rate or 0)}; {claim}"
            hint = "check the cables and switch ports (ethtool), limits (tc qdisc), and what else runs there"
    severity = Severity.WARNING if fault == "slower" else Severity.ERROR
    return Finding(severity, subject, text, hint)


def format_megabits(rate: float) -> str:
    """Format a rate, given in bytes per second, in Mbit/s, the unit of interface speeds."""
    return f"{rate * 8 / 1e6:.3g} Mbit/s" if rate < 125e6 else f"{rate * 8 / 1e6:.0f} Mbit/s"
