"""A rank's reply about its collectives, and what it adds to the inspection of the rank."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.observe.diagnosis.flight_recorder import (
    group_states_from_counts,
    name_groups,
    parse_active_call,
    parse_group_counts,
    parse_group_states,
    parse_last_collectives,
)
from ddplaunch.observe.diagnosis.inspection import RankInspection


class RankReply(Struct, frozen=True):
    """A rank's reply about its collectives; ``rank/inspect_side.py`` writes it."""

    initialised: bool
    groups: bytes  # an array for each group, in the order of creation (JSON, from torch)
    call: bytes  # the function of torch.distributed that it is in
    traces: tuple[bytes, ...]  # of its flight recorders
    outer: bytes = b""  # the outer frames of a deep stack, as a dump has them

    @classmethod
    def parse(cls, line: bytes) -> RankReply:
        """Parse a reply; ValueError: it is malformed."""
        initialised, groups, call, *traces = line.split(b"\t")
        call, _, outer = call.partition(b"|")
        return cls(initialised == b"1", groups, call, tuple(traces), outer.replace(b"\r", b"\n"))


def add_group_states(inspected: RankInspection, reply: RankReply) -> RankInspection:
    """Return the inspection with the states of the rank's groups. ValueError or TypeError: the reply is malformed."""
    known = parse_group_counts(reply.groups)
    inspected = replace(inspected, inside=parse_active_call(reply.call))
    groups = tuple(state for trace in reply.traces for state in name_groups(parse_group_states(trace), known))
    if not groups and any(count > 0 for count in known.values()):  # an older torch, or a recorder without a buffer
        return replace(inspected, answers=None, groups=group_states_from_counts(known))
    return replace(inspected, answers=True if reply.initialised and reply.traces else None, groups=groups)


def add_last_collectives(inspected: RankInspection, reply: RankReply) -> RankInspection:
    """Return the inspection with the rank's last collectives. ValueError or TypeError: the reply is malformed."""
    groups, known = add_group_states(inspected, reply).groups, parse_group_counts(reply.groups)
    unused = {group.group for group, count in known.items() if count == 0}  # recorded are those of a destroyed group
    recorded = (each for trace in reply.traces for each in parse_last_collectives(trace))
    last = tuple(each for each in recorded if each.group not in unused)
    used = {each.group for each in groups} | {each.group for each in last}
    return replace(inspected, last=last, known=tuple(each for each in known if each.group in used))
