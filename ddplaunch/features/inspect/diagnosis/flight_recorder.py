"""Parses dumps of torch's flight recorder: how far a rank is in each process group, and its last collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from ddplaunch.base.errors import sanitize_line
from ddplaunch.features.inspect.diagnosis.inspection import ActiveCall, Collective, Group, GroupState

MAX_GROUPS = 1024
"""Process groups of a rank that are read at most."""

_MAX_ENTRIES = 1 << 16
_MAX_NUMBER = (1 << 63) - 1
_MAX_DIMENSIONS = 8
_NAMED_TENSORS = 2
_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
"""torch's internal type names that are not just another spelling of the usual name (like "BFloat16")."""

T = TypeVar("T")


def parse_states(dump: bytes) -> tuple[GroupState, ...]:
    """Parse how far a rank is in each process group that it has used; ValueError if it is not such a dump."""
    return tuple(
        GroupState(
            sanitize_line(name),
            max(_parse_int(_get_field(state, "last_enqueued_collective", "-1")), 0),
            max(_parse_int(_get_field(state, "last_completed_collective", "-1")), 0),
        )
        for name, state in islice(_checked_cast(dict, _load(dump).get("pg_status", {})).items(), MAX_GROUPS)
    )


def parse_group_counts(reply: bytes) -> dict[Group, int]:
    """Parse a rank's process groups, in the order of their creation, and the number of operations in each so far.

    ``reply`` is written by ``rank/torch_state.py``; -1 is an unknown number. ValueError for anything else.
    """
    found: dict[Group, int] = {}
    try:
        for name, description, ranks, count in islice(json.loads(reply), MAX_GROUPS):
            found[Group(sanitize_line(str(name)), sanitize_line(str(description)), tuple(map(int, ranks)))] = int(count)
    except (TypeError, RecursionError) as error:
        raise ValueError("no groups") from error
    return found


def parse_call(reply: bytes) -> ActiveCall | None:
    """Parse the function that a rank is in, as ``rank/torch_state.py`` writes it; ValueError for anything else."""
    if not reply:
        return None
    function, operation, number, *members = reply.decode("ascii").split(" ")
    ranks = tuple(map(int, members[0].split(","))) if members else ()
    return ActiveCall(
        sanitize_line(function), sanitize_line(operation), int(number) if int(number) >= 0 else None, ranks
    )


def name_groups(states: Sequence[GroupState], known: Mapping[Group, int]) -> tuple[GroupState, ...]:
    """Replace the group numbers in ``states`` by names; torch numbers groups in each process as it creates them.

    Once groups were destroyed the numbers no longer fit, which the counts in ``known`` reveal. Then the completed
    operations are unknown: all but the last one count as completed, so that a rank that may wait is queried again.
    """
    groups = list(known)
    if all(
        each.group.isdecimal()
        and int(each.group) < len(groups)
        and not 0 <= known[groups[int(each.group)]] < each.enqueued
        for each in states
    ):
        return tuple(replace(each, group=groups[int(each.group)].group) for each in states)
    return tuple(GroupState(group.group, count, count - 1) for group, count in known.items() if count > 0)


def states_without_recorder(known: Mapping[Group, int]) -> tuple[GroupState, ...]:
    """Return the group states of a rank without a flight recorder: what it has entered counts as completed."""
    return tuple(GroupState(group.group, count, count) for group, count in known.items() if count > 0)


def parse_last_collectives(dump: bytes) -> tuple[Collective, ...]:
    """Parse the collectives of a dump with entries: in each group the oldest incomplete one, and the last.

    Raises:
        ValueError: it is not such a dump.
    """
    found: list[Collective] = []
    for entries in _by_group(_load(dump)).values():
        last = max(entries, key=lambda entry: entry.number)
        waiting = [entry for entry in entries if not entry.completed]
        oldest = min(waiting, key=lambda entry: entry.number, default=last)
        found += [last] if oldest is last else [oldest, last]
    return tuple(found)


class RecordedCall(NamedTuple):
    """A collective in the flight recorder, with its group's description and its end."""

    collective: Collective
    description: str  # of its group: "default_pg"
    ended: float  # seconds since the epoch; 0 if unknown, as on gloo


def collectives_between(dump: bytes, since: float, until: float) -> Iterator[RecordedCall]:
    """Yield the collectives that were entered between two moments; ValueError if it is not a dump."""
    for entry in _entries(_load(dump)):
        if since <= _parse_seconds(entry.get("time_created_ns", 0), 1e9) <= until and entry.get("is_p2p") is not True:
            ended = _parse_seconds(entry.get("time_discovered_completed_ns") or 0, 1e9)
            yield RecordedCall(_collective(entry), _group_names(entry)[1], ended)


def _by_group(dump: Mapping[str, object]) -> dict[str, list[Collective]]:
    found: dict[str, list[Collective]] = {}
    for entry in _entries(dump):
        if entry.get("is_p2p") is True:
            continue  # NCCL's send and recv, which have numbers of their own
        group = _group_names(entry)[0]
        if len(found) < MAX_GROUPS or group in found:
            found.setdefault(group, []).append(_collective(entry))
    return found


def _collective(entry: Mapping[str, object]) -> Collective:
    number = _parse_int(_get_field(entry, "collective_seq_id"))
    return Collective(
        group=_group_names(entry)[0],
        number=number,
        operation=sanitize_line(_checked_cast(str, _get_field(entry, "profiling_name")).rpartition(":")[2]),
        tensors=_tensors(
            _checked_cast(list, entry.get("input_dtypes", [])), _checked_cast(list, entry.get("input_sizes", []))
        ),
        timeout=_parse_seconds(entry.get("timeout_ms", 0), 1e3),
        entered=_parse_seconds(entry.get("time_created_ns", 0), 1e9),
        completed=entry.get("retired") is True or entry.get("state") == "completed",
        alone=_parse_int(_get_field(entry, "op_id")) == number,
    )


def _tensors(types: Sequence[object], sizes: Sequence[object]) -> str:
    """Format tensors as "float32[2, 3], int64[1]"; of many only the first."""
    if len(types) != len(sizes):
        raise ValueError("types and sizes do not go together")
    named = [_tensor(*each) for each in zip(types[:_NAMED_TENSORS], sizes[:_NAMED_TENSORS], strict=True)]
    more = len(types) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _tensor(kind: object, sizes: object) -> str:
    name = sanitize_line(_checked_cast(str, kind).rpartition("::")[2], 40)
    numbers = [str(_parse_int(each)) for each in _checked_cast(list, sizes)]
    shape = ", ".join([*numbers[:_MAX_DIMENSIONS], *["…"] * (len(numbers) > _MAX_DIMENSIONS)])
    return f"{_DTYPES.get(name, name.lower())}[{shape}]"


def _group_names(entry: Mapping[str, object]) -> tuple[str, str]:
    """Return torch's name of the group, and its description."""
    names = [
        sanitize_line(_checked_cast(str, each)) for each in _checked_cast(list, _get_field(entry, "process_group"))
    ]
    if not names:
        raise ValueError("a collective of no process group")
    return names[0], names[1] if len(names) > 1 else ""


def _entries(dump: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [_checked_cast(dict, each) for each in _checked_cast(list, dump.get("entries", []))[-_MAX_ENTRIES:]]


def _load(dump: bytes) -> Mapping[str, object]:
    try:
        return _checked_cast(dict, json.loads(dump))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _checked_cast(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__}")
    return value


def _get_field(value: object, name: str, default: object = None) -> object:
    found = _checked_cast(dict, value).get(name, default)
    if found is None:
        raise ValueError(f"no {name}")
    return found


def _parse_int(value: object) -> int:
    """Parse an integer; torch writes some of them as strings."""
    if isinstance(value, str) and len(value) <= 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_NUMBER:
        raise ValueError("expected a whole number")
    return value


def _parse_seconds(value: object, units: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("expected a number")
    if not abs(value) <= _MAX_NUMBER:  # NaN is not, nor infinity
        raise ValueError("expected a time")
    return value / units
