"""Formats the doctor's results: a report in plain text for 80 columns, or one JSON object."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from ddplaunch import __version__
from ddplaunch.base.text import format_size
from ddplaunch.base.types import JsonObject, as_dict
from ddplaunch.features.doctor.benchmark import ALL_SIZES, SIZES
from ddplaunch.features.doctor.checks import Finding, Severity
from ddplaunch.features.doctor.examination import (
    CollectiveResult,
    DoctorResults,
    ExaminedNode,
    bandwidth_of_largest_size,
    bus_bandwidth,
)
from ddplaunch.features.doctor.findings import UNSUPPORTED_TEXT, join_node_names, nodes_by_value
from ddplaunch.features.doctor.flows import format_megabits
from ddplaunch.features.doctor.node_checks import CHECKS
from ddplaunch.features.doctor.node_facts import NodeFacts

WIDTH = 80
MAX_MATRIX_NODES = 8  # of more nodes only the number of working paths is printed
MAX_COLLECTIVE_ROWS = 12  # of more only the slowest are printed
_LABEL = 16
_OUTCOME_LABELS = {
    "ok": "ok",
    "refused": "refused",
    "silent": "silent",
    "unreachable": "unreachable",
    "stranger": "reset",
    "lossy": "lossy",
    "large": "MTU",
    "far": "high latency",
    "slow": "slow",
    "slower": "slow",
}


def format_report(examination: DoctorResults, findings: Sequence[Finding], seconds: float) -> str:
    """Return the whole report."""
    names = [node.name for node in examination.nodes]
    parts = [
        [f"ddplaunch doctor {__version__}: {join_node_names(names)}, in {seconds:.0f} s"],
        list(_format_findings(findings)),
        list(_format_machines(examination)),
        [*_format_matrix(examination), *_format_flows(examination)],
        list(_format_speeds(examination)),
        list(_format_joint_speeds(examination)),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def to_json(examination: DoctorResults, findings: Sequence[Finding]) -> JsonObject:
    """Return all results as JSON types: sizes are bytes, times seconds, null is unknown, nodes are indices."""
    listed = [as_dict(each) for each in findings]
    sizes = list(ALL_SIZES)
    return {"ddplaunch": __version__, "findings": listed, **as_dict(examination), "sizes": sizes}


def _format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "No problems found."
    for each in findings:
        yield from _wrap_text(f"{each.severity.value:9}", f"{each.subject}: {each.text}")
        yield from _wrap_text(" " * 9 + "-> ", each.hint)
    if findings:
        counts = [(each, sum(one.severity is each for one in findings)) for each in Severity]
        summary = [f"{count} {each.value}{'s' * (count > 1)}" for each, count in counts if count]
        yield f"{', '.join(summary)}."


def _wrap_text(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


# ------------------------------------------------------------------------------------------------------------ machines


def _format_machines(examination: DoctorResults) -> Iterator[str]:
    for check in reversed(CHECKS):
        for label, amount in check.size_rows.items():
            yield from _format_row(label, _find_extremes(examination.nodes, amount))
    for check in CHECKS:
        for label, read in check.text_rows.items():
            yield from _format_row(label, nodes_by_value(examination.nodes, read))
    clocks = [f"{node.name} {node.clock:+.3f} s" for node in examination.nodes[1:] if node.clock is not None]
    if clocks:
        yield from _wrap_text(f"{'':{_LABEL}}", f"compared with {examination.nodes[0].name}: {', '.join(clocks)}")


def _format_row(label: str, values: dict[str, list[str]]) -> Iterator[str]:
    """Yield the lines of a row of the table: one value for all nodes, or each value with its nodes."""
    if values:
        cells = [f"{value} ({join_node_names(who)})" for value, who in values.items()]
        yield from _wrap_text(f"{label:{_LABEL}}", "; ".join(cells if len(values) > 1 else values))


def _find_extremes(nodes: Sequence[ExaminedNode], read: Callable[[NodeFacts], int | None]) -> dict[str, list[str]]:
    amounts = {node.name: amount for node in nodes if node.facts and (amount := read(node.facts)) is not None}
    found: dict[str, list[str]] = {}
    for name in (which(amounts, key=amounts.__getitem__) for which in (min, max) if amounts):
        found.setdefault(format_size(amounts[name]), []).append(name)
    return found


# ------------------------------------------------------------------------------------------------------ connectivity


def _format_matrix(examination: DoctorResults) -> Iterator[str]:
    if not examination.ways:
        return
    ports = f"ports {', '.join(map(str, examination.ports))} and a random one"
    worst: dict[tuple[int, int], str] = {flow.pair: flow.faults[0] for flow in examination.flows if flow.faults}
    for path in examination.ways:
        pair = (path.source, path.target)
        if worst.get(pair, "ok") == "ok":
            worst[pair] = path.outcome
    if len(examination.nodes) > MAX_MATRIX_NODES:
        good = sum(outcome == "ok" for outcome in worst.values())
        yield f"connectivity: {good} of {len(worst)} connections succeed on {ports}"
        return
    yield f"connectivity matrix, {ports}"
    labels = {_OUTCOME_LABELS[outcome] for outcome in worst.values()}
    wide = max(8, *(len(node.name) for node in examination.nodes), *map(len, labels)) + 2
    yield "  from".ljust(_LABEL) + "".join(node.name.rjust(wide) for node in examination.nodes)
    for source, node in enumerate(examination.nodes):
        cells = []
        for target in range(len(examination.nodes)):
            outcome = worst.get((source, target))
            cells.append("-" if source == target else _OUTCOME_LABELS[outcome] if outcome else "?")
        yield f"  {node.name}".ljust(_LABEL) + "".join(cell.rjust(wide) for cell in cells)


def _format_flows(examination: DoctorResults) -> Iterator[str]:
    trips = sorted(flow.seconds for flow in examination.flows if flow.seconds is not None)
    rates = sorted(flow.rate for flow in examination.flows if flow.rate is not None)
    if trips:
        ends = dict.fromkeys(f"{1e3 * each:.3g} ms" for each in (trips[0], trips[-1]))
        yield f"  round-trip time: {' to '.join(ends)}"
    if rates:
        ends = dict.fromkeys(map(format_megabits, (rates[0], rates[-1])))
        yield f"  throughput: {' to '.join(ends)}"


# ------------------------------------------------------------------------------------------------------------ speeds


def _format_speeds(examination: DoctorResults) -> Iterator[str]:
    speeds = sorted(examination.speeds, key=lambda each: len(each.nodes))
    if not speeds:
        return
    labels = {speed: _describe_collective(examination, speed) for speed in speeds}
    wide = max(map(len, labels.values()))
    more = ""
    if len(speeds) > MAX_COLLECTIVE_ROWS:
        more = f"; the {MAX_COLLECTIVE_ROWS} slowest of {len(speeds)}"
        speeds = sorted(speeds, key=bandwidth_of_largest_size)[:MAX_COLLECTIVE_ROWS]
    yield f"all_reduce, bus bandwidth{more}"
    heads = ["4 B takes", *(format_size(each) for each in SIZES[1:])]
    yield f"  {'':{wide}}" + "".join(head.rjust(13) for head in heads)
    for speed in speeds:
        if speed.error:
            yield from _wrap_text(f"  {labels[speed]:{wide}}  ", f"failed: {speed.error}")
            continue
        cells = [f"{speed.seconds[0] * 1e6:.0f} us" if speed.seconds else "-"]
        for place in range(1, len(SIZES)):
            value = bus_bandwidth(speed, place)
            cells.append("too slow" if value is None else f"{format_size(round(value))}/s")
        yield f"  {labels[speed]:{wide}}" + "".join(cell.rjust(13) for cell in cells)


def _format_joint_speeds(examination: DoctorResults) -> Iterator[str]:
    if not examination.together:
        return
    wide = max(len(_describe_group(examination, speed)) for speed in examination.together)
    what = "all nodes at once" if len(examination.nodes) > 1 else "larger tensors"
    yield f"{what}, {examination.together[0].ranks} ranks"
    yield f"  {'':{wide}}{'4 B takes':>13}   bus bandwidth"
    for speed in examination.together:
        label = f"  {_describe_group(examination, speed):{wide}}"
        if speed.error:
            unsupported = UNSUPPORTED_TEXT in speed.error
            why = f"not with {speed.backend} of this torch" if unsupported else f"failed: {speed.error}"
            yield from _wrap_text(f"{label}   ", why)
        elif speed.seconds:
            last, bandwidth = len(speed.seconds) - 1, "too slow"
            if last:
                rate = format_size(round(bus_bandwidth(speed, last) or 0))
                bandwidth = f"{rate}/s at {format_size(ALL_SIZES[last])}"
            yield from _wrap_text(f"{label}{speed.seconds[0] * 1e6:>10.0f} us   ", bandwidth)


def _describe_group(examination: DoctorResults, speed: CollectiveResult) -> str:
    alone = f"{examination.name(speed.nodes[0])}, " if len(speed.nodes) == 1 < len(examination.nodes) else ""
    return f"{alone}{speed.name} ({speed.backend})"


def _describe_collective(examination: DoctorResults, speed: CollectiveResult) -> str:
    who = " and ".join(map(examination.name, speed.nodes))
    return f"{who} ({speed.backend})" if len(speed.nodes) > 1 else f"{who} alone, {speed.ranks} ranks ({speed.backend})"
