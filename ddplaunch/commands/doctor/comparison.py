"""What the facts of several nodes mean together: what differs, who reaches whom, who is slow. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ddplaunch.commands.doctor.checks import Finding, Findings, Severity
from ddplaunch.commands.doctor.checks.fabric import new_errors, slower_ports
from ddplaunch.commands.doctor.checks.kernel import is_cpu_throttled
from ddplaunch.commands.doctor.checks.network import RouteToNodeZero
from ddplaunch.commands.doctor.examination import (
    SLOW_FRACTION,
    CollectiveResult,
    Examination,
    NodeResult,
    PathResult,
    largest_bus_bandwidth,
    slow_pairs,
)
from ddplaunch.commands.doctor.facts import NodeFacts, machine_findings
from ddplaunch.commands.doctor.flows import flow_findings, lossy_pairs
from ddplaunch.commands.doctor.ways import Outcome
from ddplaunch.words import format_size

MAX_CLOCK_DIFFERENCE_S = 1.0  # seconds
UNSUPPORTED_TEXT = "not support"
"""In the message of a collective that a backend of this torch does not have."""
_MORE_LOG_HINT = "TORCH_CPP_LOG_LEVEL=INFO and NCCL_DEBUG=INFO before a job's command show more"
SLOW_FRACTION_WHEN_BUSY = 0.15  # of the best pair, where all nodes are busy: they disturb one another
_MAX_FINDINGS = 3  # findings of one kind that are told one by one


def find_all(found: Examination, more: Iterable[Finding] = ()) -> list[Finding]:
    """All that is wrong, and ``more``, the worst first; the order is else that of the nodes."""
    same: dict[tuple[Severity, str, str], list[str]] = {}
    for each in _per_node(found):
        same.setdefault((each.severity, each.text, each.hint), []).append(each.subject)
    together = [Finding(severity, join_node_names(who), text, hint) for (severity, text, hint), who in same.items()]
    return sorted([*together, *_across_nodes(found), *more], key=lambda each: list(Severity).index(each.severity))


def _per_node(found: Examination) -> Findings:
    for node in found.nodes:
        if node.trouble:
            what = "it did not take part" if node.facts is None else "it stopped answering"
            yield Finding(Severity.ERROR, node.name, f"{what}: {node.trouble}", f"see whether this works: {node.check}")
        if node.facts:
            yield from machine_findings(node.name, node.facts)
    for speed in found.speeds:
        if speed.error and len(speed.nodes) == 1:
            text = f"all_reduce of its {speed.ranks} devices failed ({speed.backend}): {speed.error}"
            yield Finding(
                Severity.ERROR, found.name(speed.nodes[0]), text, "run the job with NCCL_DEBUG=INFO to see more"
            )
    yield from _slow_devices(found)
    yield from slower_ports({node.name: node.facts.fabric for node in found.nodes if node.facts and node.facts.fabric})
    for node in found.nodes:
        if node.facts and node.facts.fabric and node.fabric_after:
            yield from new_errors(node.name, node.facts.fabric, node.fabric_after)
    yield from _slow_together(found)


def _across_nodes(found: Examination) -> Findings:
    if len(found.nodes) < 2:
        return
    yield from flow_findings(found.flows, found.name)
    for rule in (_differences, _machines, _clocks, _links, _ports, _broken_paths, _pairs, _broken_rails):
        yield from rule(found)


# ------------------------------------------------------------------------------------------------------ what differs


def _version(facts: NodeFacts) -> str:
    return ".".join(facts.python.split(".")[:2])


COMPARED_FACTS: tuple[tuple[str, Severity, Callable[[NodeFacts], str | None]], ...] = (
    ("Python", Severity.ERROR, _version),
    ("torch", Severity.ERROR, lambda facts: facts.torch.version if facts.torch else None),
    ("torch's CUDA", Severity.ERROR, lambda facts: (facts.torch.cuda or "none") if facts.torch else None),
    ("NCCL", Severity.ERROR, lambda facts: facts.torch.nccl if facts.torch else None),
    ("the GPU driver", Severity.WARNING, lambda facts: facts.gpus[0].driver if facts.gpus else None),
    ("the number of GPUs", Severity.WARNING, lambda facts: str(len(facts.gpus) + len(facts.lost_gpus))),
    (
        "the GPU model",
        Severity.WARNING,
        lambda facts: " and ".join(dict.fromkeys(gpu.name for gpu in facts.gpus)) or None,
    ),
)


def _differences(found: Examination) -> Findings:
    for what, severity, read in COMPARED_FACTS:
        values = nodes_by_value(found.nodes, read)
        if len(values) < 2:
            continue
        usual = max(values.items(), key=lambda each: len(each[1]))  # of several the first node's
        others = [each for each in values.items() if each != usual]
        told = "; ".join(f"{value} on {join_node_names(who)}" for value, who in (usual, *others))
        subject = join_node_names([name for _, who in others for name in who])
        hint = "install the same on all nodes" if severity is Severity.ERROR else "the slowest sets the pace"
        yield Finding(severity, subject, f"{what} differs: {told}", hint)


def nodes_by_value(nodes: Iterable[NodeResult], read: Callable[[NodeFacts], str | None]) -> dict[str, list[str]]:
    """The nodes that have each value, in the order of the nodes; None means no value."""
    values: dict[str, list[str]] = {}
    for node in nodes:
        value = read(node.facts) if node.facts else None
        if value is not None:
            values.setdefault(value, []).append(node.name)
    return values


def join_node_names(who: Sequence[str], most: int = 5) -> str:
    """ "n0, n1 and n2"; the first of many."""
    if len(who) > most:
        return f"{', '.join(who[:most])} and {len(who) - most} more"
    return who[0] if len(who) == 1 else f"{', '.join(who[:-1])} and {who[-1]}"


def _clocks(found: Examination) -> Findings:
    for node in found.nodes:
        if node.clock is not None and abs(node.clock) > MAX_CLOCK_DIFFERENCE_S:
            way = "ahead of" if node.clock > 0 else "behind"
            text = f"its clock is {abs(node.clock):.1f} s {way} that of {found.nodes[0].name}"
            yield Finding(Severity.WARNING, node.name, text, "let a time server keep it: timedatectl set-ntp true")


# ------------------------------------------------------------------------------------------------- who reaches whom


def _links(found: Examination) -> Findings:
    for node in found.nodes:
        facts = node.facts
        if facts and facts.link_error:
            hint = "name node 0 so that all nodes find it: --master-addr 10.0.0.1"
            yield Finding(Severity.ERROR, node.name, facts.link_error, hint)
        elif node is not found.nodes[0] and facts and facts.link and facts.link.loopback:
            text = f"node 0's address leads to this machine itself ({facts.link.address})"
            yield Finding(Severity.ERROR, node.name, text, "--master-addr with an address that others reach")
    mtus = nodes_by_value(found.nodes, lambda facts: _mtu(facts.link))
    if len(mtus) > 1:
        told = "; ".join(f"{mtu} on {join_node_names(who)}" for mtu, who in mtus.items())
        text = f"the largest packet (MTU) of the interfaces differs: {told}"
        yield Finding(Severity.WARNING, "network", text, "set the same MTU on all nodes and switches")


def _is_led_astray(node: NodeResult) -> bool:
    """Whether the name of node 0 leads it elsewhere, which is a finding of its own."""
    facts = node.facts
    return bool(facts and (facts.link_error or (facts.link and facts.link.loopback)))


def _mtu(link: RouteToNodeZero | None) -> str | None:
    return str(link.mtu) if link and link.mtu and not link.loopback else None


def _named_twice(found: Examination) -> dict[str, str]:
    """The nodes that are one machine with an earlier one, and the name of that."""
    alike = nodes_by_value(found.nodes, lambda facts: facts.machine or None).values()
    return {name: first for first, *others in alike for name in others}


def _machines(found: Examination) -> Findings:
    for name, first in _named_twice(found).items():
        yield Finding(Severity.ERROR, name, f"it is the same machine as {first}", "name each machine once")


def _ports(found: Examination) -> Findings:
    again = _named_twice(found)
    for node in found.nodes:
        if node.name in again:
            continue  # the doctor itself listens there, as the other node
        for port, why in node.taken.items():
            hint = f"`ss -ltnp 'sport = :{port}'` shows who; or another port: --master-port"
            severity = Severity.ERROR if node is found.nodes[0] else Severity.NOTE
            yield Finding(severity, node.name, f"it cannot listen at port {port}: {why}", hint)


_OUTCOME_TEXTS: dict[Outcome, tuple[str, str]] = {
    "refused": ("is refused", "let the firewall pass TCP between the nodes"),
    "silent": ("gets no answer", "let the firewall pass TCP between the nodes, at all ports from 1024 up"),
    "unreachable": ("finds no route", "look at routes and netmasks; --master-addr may be of another network"),
    "stranger": (
        "reaches another program, or one that closes the connection",
        "look for a proxy or a filter between the nodes",
    ),
}
"""What people read of a connection, and what to do."""


def _broken_paths(found: Examination) -> Findings:
    """Broken ways, told by the node where all to or from it are broken, else one by one."""
    broken: dict[tuple[Outcome, tuple[int, ...]], set[tuple[int, int]]] = {}
    by_pair: dict[tuple[int, int], list[PathResult]] = {}
    unclear = set[tuple[int, int]]()
    lossy, losers = lossy_pairs(found.flows)
    for way in found.ways:
        by_pair.setdefault((way.source, way.target), []).append(way)
    for (source, target), ways in by_pair.items():
        # What leads to such a node was tried at the address of node 0: its own is not known.
        astray = _is_led_astray(found.nodes[target or source])
        if astray or {source, target} in lossy or not losers.isdisjoint((source, target)):
            unclear.add((source, target))  # a connection may get no answer for that
            continue
        outcomes: dict[Outcome, None] = dict.fromkeys(way.outcome for way in ways if way.outcome != "ok")
        for outcome in outcomes:
            ports = tuple(way.port for way in ways if way.outcome == outcome)
            broken.setdefault((outcome, ports), set()).add((source, target))
    for (outcome, ports), pairs in broken.items():
        all_ports = len(ports) == len({way.port for way in found.ways})
        at = "" if all_ports and outcome != "refused" else f" at {_at(ports)}"
        said, hint = _OUTCOME_TEXTS[outcome]
        clear = set(by_pair) - unclear
        both_ways, left = _both_ways(pairs, clear)
        for nodes in both_ways:
            what = f"{at.removeprefix(' at ')} is blocked" if at and outcome == "silent" else f"a connection{at} {said}"
            yield Finding(
                Severity.ERROR, join_node_names(list(map(found.name, nodes))), f"{what} in both directions", hint
            )
        yield from _path_finding(found, Severity.ERROR, outcome, at, _group_pairs(left, clear))


def _path_finding(
    found: Examination, severity: Severity, outcome: Outcome, at: str, told: Iterable[tuple[list[int], list[int]]]
) -> Findings:
    said, hint = _OUTCOME_TEXTS[outcome]
    told = list(told)
    for sources, targets in told[:_MAX_FINDINGS]:
        subject = " to ".join(join_node_names(list(map(found.name, nodes))) for nodes in (sources, targets))
        yield Finding(severity, subject, f"a connection{at} {said}", hint)
    if len(told) > _MAX_FINDINGS:
        text = f"{len(told) - _MAX_FINDINGS} more ways where a connection{at} {said}"
        yield Finding(severity, "network", text, "--json lists all")


def _at(ports: tuple[int, ...]) -> str:
    named = [str(port) for port in ports if port]
    parts = [f"port{'s' * (len(named) > 1)} {' and '.join(named)}"] if named else []
    return " and ".join([*parts, *(["a port that the kernel chose"] if 0 in ports else [])])


def _both_ways(
    pairs: set[tuple[int, int]], all_pairs: set[tuple[int, int]]
) -> tuple[list[list[int]], set[tuple[int, int]]]:
    """The nodes all of whose ways are broken, to them and from them, each of them alone; and the other broken ways."""
    found, left = list[list[int]](), set(pairs)
    for node in sorted({node for pair in pairs for node in pair}):
        its = {pair for pair in all_pairs if node in pair}
        if len(its) > 2 and its <= pairs and its & left:
            found.append([node])
            left -= its
    return found, left


def _group_pairs(pairs: set[tuple[int, int]], all_pairs: set[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Put broken ways together: all to a node, all from a node, then each by itself."""
    left = set(pairs)
    nodes = sorted({node for pair in pairs for node in pair})
    for node in nodes:
        into = {pair for pair in all_pairs if pair[1] == node}
        if len(into) > 1 and into <= pairs:
            yield sorted(source for source, _ in into), [node]
            left -= into
    for node in nodes:
        out = {pair for pair in all_pairs if pair[0] == node}
        if len(out) > 1 and out <= pairs and out & left:
            yield [node], sorted(target for _, target in out)
            left -= out
    yield from (([source], [target]) for source, target in sorted(left))


# --------------------------------------------------------------------------------------------------------- who is slow


def _slow_devices(found: Examination) -> Findings:
    for kind in ("cpu", "cuda"):
        powers = [each for each in found.powers if each.device.startswith(kind)]
        best = max((each.flops for each in powers), default=0.0)
        slow: dict[str, float] = {}
        for power in powers:
            if power.flops < SLOW_FRACTION * best and not (kind == "cpu" and _held_back(found, power.node)):
                name = found.name(power.node)
                subject = name if kind == "cpu" else f"{name} {power.device}"
                slow[subject] = min(power.flops, slow.get(subject, power.flops))
        for subject, flops in slow.items():
            text = f"it multiplies matrices at {format_flops(flops)}, the best at {format_flops(best)}"
            yield Finding(Severity.WARNING, subject, text, "see with `top` or `nvidia-smi` what else runs there")


def _held_back(found: Examination, node: int) -> bool:
    facts = found.nodes[node].facts
    return facts is not None and is_cpu_throttled(facts)


def format_flops(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def _pairs(found: Examination) -> Findings:
    """Name the node all of whose exchanges are slow or fail, or else the link."""
    pairs = {speed.nodes: speed for speed in found.speeds if len(speed.nodes) == 2}
    held = {nodes for nodes in pairs if any(_held_back(found, node) for node in nodes)}
    share = SLOW_FRACTION_WHEN_BUSY
    if len(held) < len(pairs):  # of nodes that are all busy one may still be slow for another reason
        share = SLOW_FRACTION
        pairs = {nodes: speed for nodes, speed in pairs.items() if nodes not in held or speed.error}
    best = max((largest_bus_bandwidth(speed) for speed in pairs.values()), default=0.0)
    slow = {
        speed.nodes: speed for speed in (*slow_pairs(list(pairs.values()), share), *filter(_failed, pairs.values()))
    }
    told: set[tuple[int, ...]] = set()
    for node in range(len(found.nodes)):
        own = [speed for nodes, speed in pairs.items() if node in nodes]
        if len(own) > 1 and all(speed.nodes in slow for speed in own) and best:
            fastest = max(own, key=largest_bus_bandwidth)
            yield _slow_pair_finding(
                found.name(node), "all_reduce with any other node", fastest, best, "its network card, cable"
            )
            told |= {speed.nodes for speed in own}
    for nodes, speed in slow.items():
        if nodes not in told:
            subject = " and ".join(map(found.name, nodes))
            yield _slow_pair_finding(subject, "all_reduce between them", speed, best, "the cables")


def _broken_rails(found: Examination) -> Findings:
    """Ways that are broken over one of several networks."""
    for rail in found.rails:
        over = f" over {rail.network} ({', '.join(dict.fromkeys(rail.interfaces.values()))})"
        pairs: dict[Outcome, set[tuple[int, int]]] = {}
        for source, target, outcome in rail.outcomes:
            pairs.setdefault(outcome, set()).add((source, target))
        everyone = {(source, target) for source, target, _ in rail.outcomes}
        pairs.pop("ok", None)
        for outcome, broken in pairs.items():
            yield from _path_finding(found, Severity.WARNING, outcome, over, _group_pairs(broken, everyone))


def _slow_together(found: Examination) -> Findings:
    """What fails or is slow only on all nodes at once."""
    pairs = [largest_bus_bandwidth(speed) for speed in found.speeds if len(speed.nodes) == 2 and not speed.error]
    for speed in found.together:
        who = "all nodes at once" if len(speed.nodes) > 1 else found.name(speed.nodes[0])
        if speed.error and UNSUPPORTED_TEXT not in speed.error:
            yield Finding(Severity.ERROR, who, f"{speed.name} failed ({speed.backend}): {speed.error}", _MORE_LOG_HINT)
        held = any(_held_back(found, node) for node in speed.nodes)
        slow = speed.name == "all_reduce" and 0 < largest_bus_bandwidth(speed) < SLOW_FRACTION * min(pairs, default=0.0)
        if len(speed.nodes) > 2 and slow and not held:
            text = f"all_reduce runs at {_per_second(largest_bus_bandwidth(speed))}, the slowest pair at {_per_second(min(pairs))}"
            hint = "pairs do not load what is between the switches: look there, and at routing"
            yield Finding(Severity.WARNING, who, text, hint)


def _failed(speed: CollectiveResult) -> bool:
    return speed.error is not None


def _slow_pair_finding(subject: str, what: str, speed: CollectiveResult, best: float, where: str) -> Finding:
    if speed.error:
        return Finding(Severity.ERROR, subject, f"{what} failed ({speed.backend}): {speed.error}", _MORE_LOG_HINT)
    text = f"{what} runs at {_per_second(largest_bus_bandwidth(speed))}, the best pair at {_per_second(best)}"
    return Finding(Severity.WARNING, subject, text, f"look at {where} and switch port, and at what else runs there")


def _per_second(value: float) -> str:
    return f"{format_size(round(value))}/s"
