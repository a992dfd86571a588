"""What the ways between nodes carry: how long a packet takes, how many are lost, how fast a stream is; and what of that
is too little. Pure.

The floors are what a room of machines has, whatever all the ways here have in common, and what a link claims. A way has
one fault, the first of its causes: where packets are lost, all else is a consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from ddplaunch.commands.doctor.checks import Found, Severity, Symptom
from ddplaunch.commands.doctor.ways import MANY_LOST
from ddplaunch.dataclass import dataclass

LOSSY = 0.01  # of the packets; TCP's own tries to go faster lose none of these
FAR = 0.005  # seconds there and back; in a room of machines it is a tenth of a millisecond
SLOW = 100e6 / 8  # bytes a second; the slowest links in such a room have ten times as much
OF_CLAIM = 0.1  # of what the interfaces say
_ONE_STREAM = 10_000  # megabits a second: more does not go through one connection everywhere
_MOST = 3  # findings of one kind that are told one by one

Fault = Literal["lossy", "large", "far", "slow", "slower"]
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
    def faults(self) -> tuple[Fault, ...]:
        """What is wrong with it: one, or both of "far" and "slow"."""
        if self.lost >= MANY_LOST and self.lost >= LOSSY * self.sent:
            return ("lossy",)
        if not self.large:
            return ("large",)
        far: tuple[Fault, ...] = ("far",) if self.seconds is not None and self.seconds > FAR else ()
        if self.rate is None:
            return far
        if self.rate < SLOW:
            return (*far, "slow")
        claim = min(self.claimed or 0, _ONE_STREAM) * 1e6 / 8
        return ("slower",) if not far and self.rate < OF_CLAIM * claim else far


def given_up(flows: Sequence[Flow]) -> set[int]:
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


def losing(flows: Sequence[Flow]) -> tuple[set[frozenset[int]], set[int]]:
    """The pairs of nodes between which packets are lost, and the nodes of which no more ways were tried for that."""
    pairs = {frozenset(flow.pair) for flow in flows if "lossy" in flow.faults}
    return pairs, {node for node in given_up(flows) if any(node in pair for pair in pairs)}


def flow_findings(flows: Sequence[Flow], name: Callable[[int], str]) -> Found:
    """What is wrong, told by the node where all its ways have it."""
    for fault in _TOLD:
        faulty = {flow.pair: flow for flow in flows if fault in flow.faults}
        told = list(_told(faulty, {flow.pair for flow in flows}, name))
        for subject, pairs in told[:_MOST]:
            yield _symptom(fault, subject, max((faulty[pair] for pair in pairs), key=_BADNESS[fault]))
        if len(told) > _MOST:
            subject = f"{len(told) - _MOST} more ways"
            rest = [faulty[pair] for _, pairs in told[_MOST:] for pair in pairs]
            yield _symptom(fault, subject, max(rest, key=_BADNESS[fault]))


_TOLD: tuple[Fault, ...] = ("lossy", "large", "far", "slow", "slower")
_BADNESS: Mapping[Fault, Callable[[Flow], float]] = {
    "lossy": lambda flow: flow.lost / flow.sent,
    "large": lambda flow: 0.0,
    "far": lambda flow: flow.seconds or 0.0,
    "slow": lambda flow: -(flow.rate or 0.0),
    "slower": lambda flow: -(flow.rate or 0.0),
}


def _told(
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


def _symptom(fault: Fault, subject: str, flow: Flow) -> Symptom:
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
            text = f"data flows at {in_megabits(flow.rate or 0)}, and {claim}"
            hint = "look at the cables and switch ports (ethtool), at limits (tc qdisc), and at what else runs there"
    severity = Severity.WARNING if fault == "slower" else Severity.ERROR
    return Symptom(severity, subject, text, hint)


def in_megabits(rate: float) -> str:
    """A rate in bytes a second, as interfaces have theirs."""
    return f"{rate * 8 / 1e6:.3g} Mbit/s" if rate < 125e6 else f"{rate * 8 / 1e6:.0f} Mbit/s"
