"""Parses dumps of torch's flight recorder: how far a rank is in each process group, and its last collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import MAX_COUNT, NonNegativeFloat, Number, parse
from ddplaunch.observe.diagnosis.inspection import ActiveCall, Collective, Group, GroupState

MAX_GROUPS = 1024
"""Process groups of a rank that are read at most."""

_MAX_ENTRIES = 1 << 16
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

Counter = Annotated[int, Meta(ge=0, lt=1 << 62)]
Nanoseconds = Counter  # since the epoch
NumberText = Annotated[str, Meta(pattern=r"^-?[0-9]{1,18}$")]


class RecordedGroupStatus(Struct, frozen=True):
    """The last collectives that a rank has entered and completed in a process group; -1 for none."""

    last_enqueued_collective: NumberText | Number = -1
    last_completed_collective: NumberText | Number = -1


class RecordedGroupStates(Struct, frozen=True):
    """A flight recorder dump without entries: the progress in each process group, by the group's number."""

    pg_status: dict[str, RecordedGroupStatus] = {}


class RecordedOperation(Struct, frozen=True):
    """One operation in a flight recorder dump, as torch writes it."""

    process_group: tuple[str, str]  # name, description
    collective_seq_id: Counter
    time_created_ns: Nanoseconds
    pg_id: Counter = 0  # number of the process group; later groups of the process have higher numbers
    profiling_name: str = ""  # "gloo:all_reduce"
    op_id: Number = -1
    input_dtypes: list[str] = []
    input_sizes: list[list[int]] = []
    timeout_ms: NonNegativeFloat = 0.0
    time_discovered_completed_ns: Nanoseconds | None = None
    is_p2p: bool = False
    retired: bool = False
    state: str = ""

    @property
    def group(self) -> tuple[str, str]:
        """Name and description of the operation's process group."""
        return sanitize_line(self.process_group[0]), sanitize_line(self.process_group[1])


class RecordedOperations(Struct, frozen=True):
    """A flight recorder dump with entries; ``entries`` is None if the dump has none."""

    entries: list[RecordedOperation] | None = None


def decode_dump(dump: bytes, kind: type[T]) -> T:
    """Decode a dump of torch's flight recorder. ValueError: it is not such a dump."""
    try:
        return parse(dump, kind)
    except ProtocolError as error:
        raise ValueError(f"not a dump of torch: {error}") from None


def parse_group_states(dump: bytes) -> tuple[GroupState, ...]:
    """Parse from a flight recorder dump how far a rank is in each process group; ValueError for an invalid dump."""
    return tuple(
        GroupState(
            sanitize_line(name),
            max(int(status.last_enqueued_collective), 0),
            max(int(status.last_completed_collective), 0),
        )
        for name, status in islice(decode_dump(dump, RecordedGroupStates).pg_status.items(), MAX_GROUPS)
    )


def parse_group_counts(reply: bytes) -> dict[Group, int]:
    """Parse a rank's process groups, in the order of their creation, with the number of operations so far in each.

    ``reply`` is written by ``rank/torch_state.py``; -1 is an unknown number. ValueError for anything else.
    """
    counts: dict[Group, int] = {}
    try:
        for name, description, ranks, count in islice(json.loads(reply), MAX_GROUPS):
            counts[Group(sanitize_line(str(name)), sanitize_line(str(description)), tuple(map(int, ranks)))] = int(
                count
            )
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError("no groups") from error
    return counts


def parse_active_call(reply: bytes) -> ActiveCall | None:
    """Parse the torch.distributed call that a rank is in, as ``rank/torch_state.py`` writes it, or raise ValueError."""
    if not reply:
        return None
    function, operation, number, *more = reply.decode("ascii").split(" ")
    members, key, world_size = (*more, *("-", "-", "0")[len(more) :])
    return ActiveCall(
        sanitize_line(function),
        sanitize_line(operation),
        int(number) if 0 <= int(number) <= MAX_COUNT else None,
        tuple(map(int, members.split(","))) if members != "-" else (),
        sanitize_line(key.encode("ascii").decode("unicode_escape")) if key != "-" else "",
        int(world_size) if 0 < int(world_size) <= MAX_COUNT else 0,
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


def group_states_from_counts(known: Mapping[Group, int]) -> tuple[GroupState, ...]:
    """Return the group states of a rank without a flight recorder: operations that it entered count as completed."""
    return tuple(GroupState(group.group, count, count) for group, count in known.items() if count > 0)


def parse_last_collectives(dump: bytes) -> tuple[Collective, ...]:
    """Parse a flight recorder dump: in each process group the oldest incomplete collective, and the last one.

    Raises ValueError if it is not such a dump.
    """
    collectives: list[Collective] = []
    for entries in _collectives_by_group(dump).values():
        last = max(entries, key=lambda entry: entry.number)
        waiting = [entry for entry in entries if not entry.completed]
        oldest = min(waiting, key=lambda entry: entry.number, default=last)
        collectives += [last] if oldest is last else [oldest, last]
    return tuple(collectives)


class RecordedCollective(NamedTuple):
    """A collective in the flight recorder, with its group's description and the time of its end."""

    collective: Collective
    description: str  # of its group: "default_pg"
    ended: float  # seconds since the epoch; 0 if unknown, as on gloo


def collectives_between(dump: bytes, since: float, until: float) -> Iterator[RecordedCollective]:
    """Yield a dump's collectives that were entered between two moments; ValueError if the dump is invalid."""
    for entry in _entries(dump):
        if since <= entry.time_created_ns / 1e9 <= until and not entry.is_p2p:
            ended = (entry.time_discovered_completed_ns or 0) / 1e9
            yield RecordedCollective(_to_collective(entry), entry.group[1], ended)


def _collectives_by_group(dump: bytes) -> dict[str, list[Collective]]:
    """Return the collectives of each process group by its name; of groups with the same name, only those of the newest.

    After ``destroy_process_group`` torch names new groups like the old ones.
    """
    collectives: dict[str, list[Collective]] = {}
    entries = [entry for entry in _entries(dump) if not entry.is_p2p]  # NCCL numbers its send and recv separately
    newest = {entry.group[0]: entry.pg_id for entry in sorted(entries, key=lambda entry: entry.pg_id)}
    for entry in entries:
        group = entry.group[0]
        if entry.pg_id == newest[group] and (len(collectives) < MAX_GROUPS or group in collectives):
            collectives.setdefault(group, []).append(_to_collective(entry))
    return collectives


def _entries(dump: bytes) -> list[RecordedOperation]:
    return (decode_dump(dump, RecordedOperations).entries or [])[-_MAX_ENTRIES:]


def _to_collective(entry: RecordedOperation) -> Collective:
    return Collective(
        group=entry.group[0],
        number=entry.collective_seq_id,
        operation=sanitize_line(entry.profiling_name.rpartition(":")[2]),
        tensors=_format_tensors(entry.input_dtypes, entry.input_sizes),
        timeout=entry.timeout_ms / 1e3,
        entered=entry.time_created_ns / 1e9,
        completed=entry.retired or entry.state == "completed",
        alone=entry.op_id == entry.collective_seq_id,
    )


def _format_tensors(types: Sequence[str], sizes: Sequence[Sequence[int]]) -> str:
    """Format tensors as "float32[2, 3], int64[1]"; of many only the first."""
    if len(types) != len(sizes):
        raise ValueError("types and sizes do not go together")
    named = [_format_tensor(*each) for each in zip(types[:_NAMED_TENSORS], sizes[:_NAMED_TENSORS], strict=True)]
    more = len(types) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _format_tensor(kind: str, sizes: Sequence[int]) -> str:
    name = sanitize_line(kind.rpartition("::")[2], 40)
    shape = ", ".join([*map(str, sizes[:_MAX_DIMENSIONS]), *["…"] * (len(sizes) > _MAX_DIMENSIONS)])
    return f"{_DTYPES.get(name, name.lower())}[{shape}]"
