"""Findings from the results of all nodes: differences, connectivity, slow nodes and links. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from ddplaunch.base.text import format_size
from ddplaunch.features.doctor.checks import Finding, Findings, Severity
from ddplaunch.features.doctor.checks.kernel import is_cpu_time_short
from ddplaunch.features.doctor.connectivity import Outcome
from ddplaunch.features.doctor.examination import (
    SLOW_FRACTION,
    CollectiveResult,
    DoctorResults,
    ExaminedNode,
    PathResult,
    bandwidth_of_largest_size,
    slow_pairs,
)
from ddplaunch.features.doctor.flows import Pair, flow_findings, lossy_pairs
from ddplaunch.features.doctor.node_checks import machine_findings
from ddplaunch.features.doctor.node_facts import NodeFacts

MAX_CLOCK_DIFFERENCE_S = 1.0
UNSUPPORTED_TEXT = "not support"
"""Part of the error of a collective that a backend of this torch does not have."""
_MORE_LOG_HINT = "for details set TORCH_CPP_LOG_LEVEL=INFO and NCCL_DEBUG=INFO for a job"
SLOW_FRACTION_WHEN_BUSY = 0.15  # of the best pair, if all nodes are busy: processes disturb one another
_PYTHON_HINT = "--remote-python PATH: the Python there that has ddplaunch; or install ddplaunch there"
_MAX_NAMES = 5  # of nodes in a sentence
_MAX_FINDINGS = 3  # of one kind that are listed; the others are counted


def find_all(examination: DoctorResults, more: Iterable[Finding] = ()) -> list[Finding]:
    """Return all findings on an examination and those in ``more``, by severity, then in the order of the nodes."""
    examination = _without_explained_failures(examination)
    same: dict[tuple[Severity, str, str], list[str]] = {}
    for each in _find_per_node(examination):
        same.setdefault((each.severity, each.text, each.hint), []).append(each.subject)
    together = [Finding(severity, join_node_names(who), text, hint) for (severity, text, hint), who in same.items()]
    return sorted(
        [*together, *_find_across_nodes(examination), *more], key=lambda each: list(Severity).index(each.severity)
    )


def _without_explained_failures(examination: DoctorResults) -> DoctorResults:
    """Remove failed collectives of nodes whose variables name a missing interface, which is a finding of its own."""
    wrong = {number for number, node in enumerate(examination.nodes) if node.facts and node.facts.unknown_interfaces}
    if not wrong:
        return examination
    speeds, together = (
        tuple(each for each in results if not (each.error and wrong.intersection(each.nodes)))
        for results in (examination.speeds, examination.together)
    )
    return replace(examination, speeds=speeds, together=together)


def _find_per_node(examination: DoctorResults) -> Findings:
    for node in examination.nodes:
        if node.trouble:
            what = "did not respond" if node.facts is None else "stopped responding"
            has_no_python = "--remote-python" in node.trouble
            hint = _PYTHON_HINT if has_no_python else f"check whether this works: {node.check}"
            yield Finding(Severity.ERROR, node.name, f"{what}: {node.trouble}", hint)
        if node.facts:
            yield from machine_findings(node.name, node.facts)
    for speed in examination.speeds:
        if speed.error and len(speed.nodes) == 1:
            text = f"all_reduce of its {speed.ranks} devices failed ({speed.backend}): {speed.error}"
            hint = "for details run the job with NCCL_DEBUG=INFO"
            yield Finding(Severity.ERROR, examination.name(speed.nodes[0]), text, hint)
    yield from _find_slow_devices(examination)
    yield from _find_slow_collectives(examination)


def _find_across_nodes(examination: DoctorResults) -> Findings:
    if len(examination.nodes) < 2:
        return
    yield from flow_findings(examination.flows, examination.name)
    for rule in (
        _find_differences,
        _find_variable_differences,
        _check_duplicate_machines,
        _check_clocks,
        _check_links,
        _check_ports,
        _find_broken_paths,
        _find_slow_pairs,
        _find_broken_rails,
    ):
        yield from rule(examination)


# ------------------------------------------------------------------------------------------------------ what differs


COMPARED_FACTS: tuple[tuple[str, Severity, Callable[[NodeFacts], str | None]], ...] = (
    ("Python", Severity.ERROR, lambda facts: ".".join(facts.python.split(".")[:2])),
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


def _find_differences(examination: DoctorResults) -> Findings:
    hints = {Severity.ERROR: "install the same on all nodes"}
    for what, severity, read in COMPARED_FACTS:
        hint = hints.get(severity, "the slowest one sets the speed of the job")
        yield from _find_difference(examination, what, severity, read, hint)


_VARIABLES_OF_ONE_NODE = frozenset({"NCCL_HOSTID"})
_DEVICE_VARIABLES = frozenset(
    {"GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES"}
)
"""Variables with names of devices, which machines may number differently."""


def _find_variable_differences(examination: DoctorResults) -> Findings:
    """Find variables of gloo, NCCL and others that the nodes have with different values."""
    facts = [node.facts for node in examination.nodes if node.facts]
    names = {name for each in facts for name, _ in each.network_variables}
    unknown = {each.partition("=")[0] for fact in facts for each in fact.unknown_interfaces}  # findings of their own
    for name in sorted(names - unknown - _VARIABLES_OF_ONE_NODE):
        severity = Severity.NOTE if name in _DEVICE_VARIABLES else Severity.WARNING
        hint = "set the same on all nodes: see the files of their shells"
        yield from _find_difference(examination, name, severity, partial(_variable_value, name), hint)


def _variable_value(name: str, facts: NodeFacts) -> str:
    return dict(facts.network_variables).get(name, "not set")


def _find_difference(
    examination: DoctorResults, what: str, severity: Severity, read: Callable[[NodeFacts], str | None], hint: str
) -> Findings:
    """Compare a value of all nodes; yield a finding on the nodes that differ from most of them."""
    values = nodes_by_value(examination.nodes, read)
    if len(values) < 2:
        return
    usual = max(values.items(), key=lambda each: len(each[1]))  # of several the first node's
    others = [each for each in values.items() if each != usual]
    by_value = "; ".join(f"{value} on {join_node_names(who)}" for value, who in (usual, *others))
    subject = join_node_names([name for _, who in others for name in who])
    yield Finding(severity, subject, f"{what} differs: {by_value}", hint)


def nodes_by_value(nodes: Iterable[ExaminedNode], read: Callable[[NodeFacts], str | None]) -> dict[str, list[str]]:
    """Group the nodes by a value, in the order of the nodes; without those for which ``read`` returns None."""
    values: dict[str, list[str]] = {}
    for node in nodes:
        value = read(node.facts) if node.facts else None
        if value is not None:
            values.setdefault(value, []).append(node.name)
    return values


def join_node_names(who: Sequence[str]) -> str:
    """Join names to "n0, n1 and n2"; of more than ``_MAX_NAMES``, only the first are named."""
    if len(who) > _MAX_NAMES:
        return f"{', '.join(who[:_MAX_NAMES])} and {len(who) - _MAX_NAMES} more"
    return who[0] if len(who) == 1 else f"{', '.join(who[:-1])} and {who[-1]}"


def _check_clocks(examination: DoctorResults) -> Findings:
    for node in examination.nodes:
        if node.clock is not None and abs(node.clock) > MAX_CLOCK_DIFFERENCE_S:
            direction = "ahead of" if node.clock > 0 else "behind"
            text = f"its clock is {abs(node.clock):.1f} s {direction} that of {examination.nodes[0].name}"
            hint = "synchronise it with a time server: timedatectl set-ntp true"
            yield Finding(Severity.WARNING, node.name, text, hint)


# ------------------------------------------------------------------------------------------------- connectivity


def _check_links(examination: DoctorResults) -> Findings:
    for node in examination.nodes:
        facts = node.facts
        if facts and facts.link_error:
            hint = "give an address of node 0 that all nodes can use: --master-addr 10.0.0.1"
            yield Finding(Severity.ERROR, node.name, facts.link_error, hint)
        elif node is not examination.nodes[0] and facts and facts.link and facts.link.loopback:
            text = f"node 0's address is this machine itself ({facts.link.address})"
            yield Finding(Severity.ERROR, node.name, text, "--master-addr with an address that the other nodes reach")
    own = [node for node in examination.nodes if node.facts and node.facts.link and not node.facts.link.loopback]
    mtus = nodes_by_value(own, lambda facts: str(facts.link.mtu) if facts.link and facts.link.mtu else None)
    if len(mtus) > 1:
        by_mtu = "; ".join(f"{mtu} on {join_node_names(who)}" for mtu, who in mtus.items())
        text = f"the MTU of the interfaces differs: {by_mtu}"
        yield Finding(Severity.WARNING, "network", text, "set the same MTU on all nodes and switches")


def _resolves_node_zero_wrongly(node: ExaminedNode) -> bool:
    """Whether a node resolves the name of node 0 wrongly, which is a finding of its own."""
    facts = node.facts
    return bool(facts and (facts.link_error or (facts.link and facts.link.loopback)))


def _duplicate_machines(examination: DoctorResults) -> dict[str, str]:
    """Map each node that is the same machine as an earlier one to the name of that one."""
    groups = nodes_by_value(examination.nodes, lambda facts: facts.machine or None).values()
    return {name: first for first, *others in groups for name in others}


def _check_duplicate_machines(examination: DoctorResults) -> Findings:
    for name, first in _duplicate_machines(examination).items():
        yield Finding(Severity.ERROR, name, f"same machine as {first}", "list each machine once")


def _check_ports(examination: DoctorResults) -> Findings:
    duplicates = _duplicate_machines(examination)
    for node in examination.nodes:
        if node.name in duplicates:
            continue  # the doctor's process for the other name has the port
        for port, why in node.taken.items():
            hint = f"`ss -ltnp 'sport = :{port}'` shows the process; or choose another port: --master-port"
            severity = Severity.ERROR if node is examination.nodes[0] else Severity.NOTE
            yield Finding(severity, node.name, f"cannot listen on port {port}: {why}", hint)


_OUTCOME_TEXTS: dict[Outcome, tuple[str, str]] = {
    "refused": ("is refused", "allow TCP between the nodes in the firewall"),
    "silent": ("gets no answer", "allow TCP between the nodes in the firewall, on all ports from 1024 up"),
    "unreachable": ("has no route", "check routes and netmasks; --master-addr may be of another network"),
    "stranger": ("is closed, or reaches another program", "check for a proxy or a filter between the nodes"),
}
"""For each outcome of a connection: the finding, and the hint."""


def _find_broken_paths(examination: DoctorResults) -> Findings:
    """Report failed connections: by node if all to or from it fail, else one by one."""
    broken: dict[tuple[Outcome, tuple[int, ...]], set[Pair]] = {}
    by_pair: dict[Pair, list[PathResult]] = {}
    unclear = set[Pair]()
    lossy, losers = lossy_pairs(examination.flows)
    no_way_back = {(path.target, path.source) for path in examination.ways if path.outcome == "unreachable"}
    for path in examination.ways:
        by_pair.setdefault((path.source, path.target), []).append(path)
    for (source, target), paths in by_pair.items():
        # Such a node was tested at the address of node 0, as its own address is unknown.
        wrong_address = _resolves_node_zero_wrongly(examination.nodes[target or source])
        if wrong_address or {source, target} in lossy or not losers.isdisjoint((source, target)):
            unclear.add((source, target))  # lost packets alone may be why a connection gets no answer
            continue
        if (source, target) in no_way_back and all(path.outcome in ("ok", "silent") for path in paths):
            unclear.add((source, target))  # the reply is what has no route
            continue
        outcomes: dict[Outcome, None] = dict.fromkeys(path.outcome for path in paths if path.outcome != "ok")
        for outcome in outcomes:
            ports = tuple(path.port for path in paths if path.outcome == outcome)
            broken.setdefault((outcome, ports), set()).add((source, target))
    for (outcome, ports), pairs in broken.items():
        all_ports = len(ports) == len({path.port for path in examination.ways})
        at = "" if all_ports and outcome != "refused" else f" on {_describe_ports(ports)}"
        what_happened, hint = _OUTCOME_TEXTS[outcome]
        clear = set(by_pair) - unclear
        both_ways, remaining = _split_failed_nodes(pairs, clear)
        what = f"a connection{at} {what_happened}"
        if at and outcome == "silent":
            what = f"{at.removeprefix(' on ')} is blocked"
        for node in both_ways:
            yield Finding(Severity.ERROR, examination.name(node), f"{what} in both directions", hint)
        yield from _path_findings(examination, Severity.ERROR, outcome, at, remaining, clear)


def _path_findings(
    examination: DoctorResults, severity: Severity, outcome: Outcome, at: str, pairs: set[Pair], all_pairs: set[Pair]
) -> Findings:
    what_happened, hint = _OUTCOME_TEXTS[outcome]
    groups = list(_group_pairs(pairs, all_pairs))
    for sources, targets in groups[:_MAX_FINDINGS]:
        subject = " to ".join(join_node_names(list(map(examination.name, nodes))) for nodes in (sources, targets))
        yield Finding(severity, subject, f"a connection{at} {what_happened}", hint)
    if len(groups) > _MAX_FINDINGS:
        text = f"{len(groups) - _MAX_FINDINGS} more paths where a connection{at} {what_happened}"
        yield Finding(severity, "network", text, "--json lists all")


def _describe_ports(ports: tuple[int, ...]) -> str:
    named = [str(port) for port in ports if port]
    parts = [f"port{'s' * (len(named) > 1)} {' and '.join(named)}"] if named else []
    return " and ".join([*parts, *(["a random port"] if 0 in ports else [])])


def _split_failed_nodes(pairs: set[Pair], all_pairs: set[Pair]) -> tuple[list[int], set[Pair]]:
    """Return the nodes of which all paths failed, in both directions, and the failed paths between other nodes."""
    failed_nodes, remaining = list[int](), set(pairs)
    for node in sorted({node for pair in pairs for node in pair}):
        node_pairs = {pair for pair in all_pairs if node in pair}
        if len(node_pairs) > 2 and node_pairs <= pairs and node_pairs & remaining:
            failed_nodes.append(node)
            remaining -= node_pairs
    return failed_nodes, remaining


def _group_pairs(pairs: set[Pair], all_pairs: set[Pair]) -> Iterator[tuple[list[int], list[int]]]:
    """Group failed paths: all to one node, all from one node, then each by itself."""
    remaining = set(pairs)
    nodes = sorted({node for pair in pairs for node in pair})
    for node in nodes:
        into = {pair for pair in all_pairs if pair[1] == node}
        if len(into) > 1 and into <= pairs:
            yield sorted(source for source, _ in into), [node]
            remaining -= into
    for node in nodes:
        out = {pair for pair in all_pairs if pair[0] == node}
        if len(out) > 1 and out <= pairs and out & remaining:
            yield [node], sorted(target for _, target in out)
            remaining -= out
    yield from (([source], [target]) for source, target in sorted(remaining))


# --------------------------------------------------------------------------------------------- slow devices and links


def _find_slow_devices(examination: DoctorResults) -> Findings:
    for kind in ("cpu", "cuda"):
        powers = [each for each in examination.powers if each.device.startswith(kind)]
        best = max((each.flops for each in powers), default=0.0)
        slow: dict[str, float] = {}
        for power in powers:
            if power.flops < SLOW_FRACTION * best and not (kind == "cpu" and _is_throttled(examination, power.node)):
                name = examination.name(power.node)
                subject = name if kind == "cpu" else f"{name} {power.device}"
                slow[subject] = min(power.flops, slow.get(subject, power.flops))
        for subject, flops in slow.items():
            text = f"multiplies matrices at {format_flops(flops)}; the best device reaches {format_flops(best)}"
            yield Finding(Severity.WARNING, subject, text, "check with `top` or `nvidia-smi` what else runs there")


def _is_throttled(examination: DoctorResults, node: int) -> bool:
    facts = examination.nodes[node].facts
    return facts is not None and is_cpu_time_short(facts)


def format_flops(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def _find_slow_pairs(examination: DoctorResults) -> Findings:
    """Report a node if all its pairs are slow or fail; else report each slow pair."""
    pairs = {speed.nodes: speed for speed in examination.speeds if len(speed.nodes) == 2}
    throttled = {nodes for nodes in pairs if any(_is_throttled(examination, node) for node in nodes)}
    share = SLOW_FRACTION_WHEN_BUSY
    if len(throttled) < len(pairs):  # if all nodes are busy, one may still be slow for another reason
        share = SLOW_FRACTION
        pairs = {nodes: speed for nodes, speed in pairs.items() if nodes not in throttled or speed.error}
    best = max((bandwidth_of_largest_size(speed) for speed in pairs.values()), default=0.0)
    slow = {speed.nodes: speed for speed in slow_pairs(list(pairs.values()), share)}
    slow |= {nodes: speed for nodes, speed in pairs.items() if speed.error is not None}
    reported: set[tuple[int, ...]] = set()
    for node in range(len(examination.nodes)):
        own = [speed for nodes, speed in pairs.items() if node in nodes]
        if len(own) > 1 and all(speed.nodes in slow for speed in own) and best:
            fastest = max(own, key=bandwidth_of_largest_size)
            who = examination.name(node)
            yield _slow_pair_finding(who, "all_reduce with any other node", fastest, best, "its network card, cable")
            reported |= {speed.nodes for speed in own}
    for nodes, speed in slow.items():
        if nodes not in reported:
            subject = " and ".join(map(examination.name, nodes))
            yield _slow_pair_finding(subject, "all_reduce between them", speed, best, "the cables")


def _find_broken_rails(examination: DoctorResults) -> Findings:
    """Report connections that fail over one of several networks."""
    for rail in examination.rails:
        over = f" over {rail.network} ({', '.join(dict.fromkeys(rail.interfaces.values()))})"
        pairs: dict[Outcome, set[Pair]] = {}
        for source, target, outcome in rail.outcomes:
            pairs.setdefault(outcome, set()).add((source, target))
        all_pairs = {(source, target) for source, target, _ in rail.outcomes}
        pairs.pop("ok", None)
        for outcome, broken in pairs.items():
            yield from _path_findings(examination, Severity.WARNING, outcome, over, broken, all_pairs)


def _find_slow_collectives(examination: DoctorResults) -> Findings:
    """Report collectives that fail, or are slow, only with all nodes at once."""
    pairs = [
        bandwidth_of_largest_size(speed) for speed in examination.speeds if len(speed.nodes) == 2 and not speed.error
    ]
    for speed in examination.together:
        who = "all nodes at once" if len(speed.nodes) > 1 else examination.name(speed.nodes[0])
        if speed.error and UNSUPPORTED_TEXT not in speed.error:
            yield Finding(Severity.ERROR, who, f"{speed.name} failed ({speed.backend}): {speed.error}", _MORE_LOG_HINT)
        throttled = any(_is_throttled(examination, node) for node in speed.nodes)
        slow = speed.name == "all_reduce" and 0 < bandwidth_of_largest_size(speed) < SLOW_FRACTION * min(
            pairs, default=0.0
        )
        if len(speed.nodes) > 2 and slow and not throttled:
            rate = _format_rate(bandwidth_of_largest_size(speed))
            text = f"all_reduce runs at {rate}; the slowest pair at {_format_rate(min(pairs))}"
            hint = "check the links between the switches, which pairs do not load, and the routing"
            yield Finding(Severity.WARNING, who, text, hint)


def _slow_pair_finding(subject: str, what: str, speed: CollectiveResult, best: float, where: str) -> Finding:
    if speed.error:
        return Finding(Severity.ERROR, subject, f"{what} failed ({speed.backend}): {speed.error}", _MORE_LOG_HINT)
    text = f"{what} runs at {_format_rate(bandwidth_of_largest_size(speed))}; the best pair at {_format_rate(best)}"
    return Finding(Severity.WARNING, subject, text, f"check {where} and switch port, and what else runs there")


def _format_rate(value: float) -> str:
    return f"{format_size(round(value))}/s"
