"""Finds who waits for whom: for each wait the collective, the ranks that are in it, and the ranks that are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.stack_frames import Frame
from ddplaunch.observe.diagnosis.inspection import (
    Collective,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
)
from ddplaunch.observe.diagnosis.rank_position import (
    FILE_LOCK,
    INIT_FUNCTION,
    NEW_GROUP,
    RECEIVE_FUNCTIONS,
    RPC_BARRIERS,
    RPC_CALLS,
    SEND_FUNCTIONS,
    UNRECORDED_FUNCTIONS,
    GroupProgress,
    collective_entry_line,
    distributed_call_of,
    group_progress,
    has_ended,
    members_of,
    peer_of,
    root_of,
    rpc_callee_line_of,
    waiting_call_of,
)
from ddplaunch.observe.diagnosis.wait_chains import find_cycle, group_by_chain_end

DEFAULT_GROUP = "default_pg"
MAX_DETAILED_RANKS = 4
"""Ranks that are queried for their last collectives at most, if a few are enough."""

_COMPARED_OPERATIONS = {
    "all_reduce",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "_all_gather_base",
}
"""Operations that require tensors of equal sizes on all ranks."""


class MissingRank(Struct, frozen=True):
    """A rank that others wait for."""

    rank: int
    waits: bool  # whether it waits itself, in another wait
    calls: str = ""  # what it waits in: "all_reduce #1 of tail", "recv"


class Wait(Struct, frozen=True):
    """Ranks that wait for others in one collective, or in one function of torch.distributed."""

    operation: str  # "all_reduce", "init_process_group"; "" if unknown
    group: str  # its description, "default_pg"; "" for what has no number: send, recv, init_process_group
    number: int  # of the collective in its group, from 1; 0 for what has no number
    members: tuple[int, ...]  # of a group other than the default one, if known
    collective: Collective | None  # its details, if a rank reported them
    waiting: tuple[int, ...]  # the ranks that are in it
    ahead: tuple[tuple[int, int], ...]  # ranks that have completed it and wait in a later one: rank, number
    entry_lines: tuple[Frame, ...]  # the user's lines from which the waiting ranks entered it
    missing: tuple[MissingRank, ...]  # the ranks that have not entered it; those that do not wait themselves first
    mismatched: tuple[tuple[Collective, tuple[int, ...]], ...] = ()  # different collectives entered at this number
    has_unreachable_members: bool = False  # some members could not be inspected
    uncertain: tuple[int, ...] = ()  # ranks that may or may not have entered it: they moved, or do not respond
    partners: tuple[
        tuple[int, int], ...
    ] = ()  # in send and recv: a rank, and the one that it sends to or receives from
    partners_match: bool = False  # each of those partners is in the matching call
    cycle: tuple[int, ...] = ()  # ranks that wait in a cycle, each for the next; set in the first wait of the cycle

    @property
    def root_causes(self) -> tuple[int, ...]:
        """The missing ranks that do not wait themselves: the cause of the wait."""
        return tuple(each.rank for each in self.missing if not each.waits)


def find_waits(inspection: Inspection) -> tuple[Wait, ...]:
    """Find all waits; the causes first, then the waits that depend on them."""
    view = _InspectionView(inspection)
    found = [wait for group in view.groups if (wait := view.find_wait(group))]
    assigned = {rank for wait in found for rank in _ranks_in(wait)}
    found += view.waits_from_stacks(assigned)
    return tuple(_order_by_cause([_with_waits_of_missing_ranks(wait, found) for wait in found]))


def ranks_to_query(inspection: Inspection) -> tuple[int, ...]:
    """Return the ranks whose last collectives a diagnosis needs: in the first call, one rank for each stack that waits.

    Call it again with the results: all ranks of a group are needed if none is missing though some wait, or if sends
    are counted in the numbers, which then cannot be compared. No rank is returned twice.
    """
    view = _InspectionView(inspection)
    needed: set[int] = set()
    for group in view.groups:
        waiting = view.maybe_waiting(group)
        queried = [number for number in waiting if view.ranks[number].last]
        if not queried:
            seen: dict[object, int] = {}
            for number in waiting:
                seen.setdefault(main_stack(view.ranks[number]), number)
            needed.update(list(seen.values())[:MAX_DETAILED_RANKS])
        elif view.counts_point_to_point(group) or (
            (wait := view.find_wait(group)) and not (wait.missing or wait.mismatched)
        ):
            needed.update(n for n, rank in view.ranks.items() if group in view.progress[n] and not rank.moved)
    return tuple(number for number in sorted(needed) if not view.ranks[number].last)


def mark_completed_operations(inspection: Inspection) -> Inspection:
    """Mark operations as completed if a rank's stack or flight recorder shows that it does not wait in them.

    Without a stack or a recorder, torch's counters stay as they are: see ``group_progress``.
    """
    view = _InspectionView(inspection)
    done = {(rank, group) for group in view.groups for rank in view.maybe_waiting(group).keys() - view.waiting(group)}

    def mark_completed(rank: int, state: GroupState) -> GroupState:
        return replace(state, completed=state.enqueued) if (rank, state.group) in done else state

    changed = ((rank, [mark_completed(rank.rank, each) for each in rank.groups]) for rank in inspection.ranks)
    return replace(inspection, ranks=tuple(replace(rank, groups=tuple(groups)) for rank, groups in changed))


def main_stack(rank: RankInspection) -> tuple[Frame, ...]:
    """The stack of a rank's main thread; ranks with equal stacks are at the same position."""
    return rank.threads[0].frames if rank.threads else ()


class _InspectionView:
    """An inspection, indexed by process group."""

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection
        self.ranks = inspection.by_number
        self.progress = {
            number: group_progress(rank) for number, rank in self.ranks.items()
        }  # a job may have many groups
        self.mixed = {each.group for rank in inspection.ranks for each in rank.last if not each.alone}
        names = {each.group for rank in inspection.ranks for each in rank.groups}
        names |= {each.group for rank in inspection.ranks for each in rank.last}
        self.groups = sorted(names, key=lambda name: (len(name), name))
        known = {each.group: each for rank in inspection.ranks for each in rank.known}
        self.recorded = any(rank.answers and rank.groups for rank in inspection.ranks)
        self.descriptions = {name: each.description for name, each in known.items()}
        self.members = {name: each.ranks for name, each in known.items() if each.ranks}

    def description(self, group: str) -> str:
        name = self.descriptions.get(group, "")
        if group == "0" and not name:
            return DEFAULT_GROUP
        return name if name not in ("", "undefined") else f"group {group}"

    def has_unknown_members(self, group: str) -> bool:
        """Whether the members of a group are unknown: torch reports a group only in ranks that have used it."""
        return group not in self.members and self.description(group) != DEFAULT_GROUP

    def counts_point_to_point(self, group: str) -> bool:
        """Whether send and recv are known to be counted in a group's numbers."""
        return group in self.mixed

    def comparable_progress(self, group: str) -> dict[int, GroupProgress]:
        """Return the progress in a group of each rank whose numbers can be compared."""
        certain = self.counts_point_to_point(group)
        found = ((number, of_rank.get(group)) for number, of_rank in self.progress.items())
        return {number: each for number, each in found if each and (each.is_certain or not certain)}

    def maybe_waiting(self, group: str) -> dict[int, GroupProgress]:
        """Return the progress of ranks that may wait in a group by torch's counters, or reported their collectives."""
        return {
            number: each
            for number, each in self.comparable_progress(group).items()
            if (each.first_incomplete or each.is_certain)
            and not self.ranks[number].moved
            and self.ranks[number].condition is not ProcessCondition.EXITED
        }

    def waiting(self, group: str) -> dict[int, GroupProgress]:
        """Return the progress of the ranks that wait in a group, without those whose counters only lag behind."""
        progress = self.maybe_waiting(group)
        furthest = max((each.entered for each in progress.values()), default=0)
        past = {
            (main_stack(self.ranks[number]), each.entered)
            for number, each in progress.items()
            if not each.first_incomplete
        }

        def is_waiting(number: int, each: GroupProgress) -> bool:
            rank = self.ranks[number]
            if each.is_certain or not rank.threads:
                return each.first_incomplete > 0
            behind = each.entered < furthest and distributed_call_of(rank) is None
            return not behind and (main_stack(rank), each.entered) not in past

        return {number: each for number, each in progress.items() if is_waiting(number, each)}

    def find_wait(self, group: str) -> Wait | None:
        """Return the wait in a process group, at its first collective that a member has not entered; or None."""
        stuck = self.waiting(group)
        if not stuck:
            return None
        vague = self.has_unknown_members(group)
        members = self.members.get(group, tuple(self.ranks if vague else range(self.inspection.world_size)))
        number, missing = self._find_first_missed_collective(group, stuck, members)
        standings = self.comparable_progress(group)
        seen = {rank for rank, each in standings.items() if each.entered >= number}
        uncertain = [
            rank
            for rank in members
            if rank in self.ranks and rank not in {*missing, *seen}
            if self.ranks[rank].moved or self.ranks[rank].answers is False
        ]
        known = {*standings, *missing}
        unseen = vague or any(rank not in known for rank in members)
        certain = {rank: each for rank, each in stuck.items() if each.is_certain}
        if not (missing or unseen or certain):
            return None  # all have entered the collective, and no rank reported whether it has completed
        here = {
            r: e for r, e in stuck.items() if (e.first_incomplete == number if e.is_certain else e.entered >= number)
        }
        exact = [each.collective for each in here.values() if each.collective]
        calls = {call.function for rank in here if (call := distributed_call_of(self.ranks[rank]))}
        operation = exact[0].operation if exact else calls.pop() if len(calls) == 1 else ""
        default = self.description(group) == DEFAULT_GROUP
        return Wait(
            operation,
            self.description(group),
            number,
            () if default else self.members.get(group, ()),
            exact[0] if exact else None,
            tuple(sorted(here)),
            tuple(
                sorted(
                    (rank, each.first_incomplete) for rank, each in certain.items() if each.first_incomplete > number
                )
            ),
            _collective_entry_frames((self.ranks[rank] for rank in sorted(here)), operation),
            tuple(MissingRank(rank, False) for rank in missing),
            self._find_mismatched_collectives(here, number),
            unseen,
            tuple(uncertain),
        )

    def _find_first_missed_collective(
        self, group: str, stuck: dict[int, GroupProgress], members: Iterable[int]
    ) -> tuple[int, list[int]]:
        """Return the first collective that ranks wait in and that members have not entered, with those members."""
        others = [rank for rank in members if rank not in stuck]
        exact = {each.first_incomplete for each in stuck.values() if each.is_certain}
        numbers = sorted({each.first_incomplete for each in stuck.values()})
        for number in numbers:
            missing = self._find_missing_members(group, number, others)
            if not missing:
                continue
            if number not in exact:  # ranks entered several at once, and wait in the first that the others have not
                standings = self.comparable_progress(group)
                number = min((standings[rank].entered + 1 for rank in missing if rank in standings), default=number)
            return number, self._find_missing_members(group, number, others)
        return numbers[0], []

    def _find_missing_members(self, group: str, number: int, members: Iterable[int]) -> list[int]:
        """Return the members of a group that are known not to have entered its collective ``number``."""
        standings = self.comparable_progress(group)
        vague = self.has_unknown_members(group)
        return [
            each
            for each in members
            if each in self.ranks
            and (
                standings[each].entered < number
                if each in standings
                else not vague and self._counts_as_absent(group, each)
            )
            and not self.ranks[each].moved
        ]

    def _counts_as_absent(self, group: str, number: int) -> bool:
        """Whether a rank that reported no progress in a process group counts as not having entered its collectives."""
        rank = self.ranks[number]
        if group in self.progress[number]:
            return False  # it has progress, in numbers that cannot be compared
        if has_ended(rank) or rank.condition in (
            ProcessCondition.STOPPED,
            ProcessCondition.PENDING,
            ProcessCondition.ENDING,
        ):
            return True
        if rank.answers is None:
            return bool(rank.threads) and distributed_call_of(rank) is None
        return rank.answers or distributed_call_of(rank) is None

    def _find_mismatched_collectives(
        self, here: dict[int, GroupProgress], number: int
    ) -> tuple[tuple[Collective, tuple[int, ...]], ...]:
        """Return the collectives that ranks wait in at one number, if they differ; () otherwise."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        examples: dict[tuple[object, ...], Collective] = {}
        stacks: dict[object, tuple[object, ...]] = {}
        exact = {rank: one for rank, each in sorted(here.items()) if (one := each.collective)}
        roots = {rank: root_of(self.ranks[rank], one) for rank, one in exact.items()}
        rooted = None not in roots.values()
        for rank, one in exact.items():
            tensors = one.tensors if one.operation in _COMPARED_OPERATIONS else ""
            kind = one.operation, tensors, roots[rank] if rooted else None
            kinds.setdefault(kind, []).append(rank)
            examples.setdefault(kind, one)
            stacks.setdefault(main_stack(self.ranks[rank]), kind)
        if len(kinds) < 2:
            return ()
        for rank, each in here.items():  # a rank that was not queried is in the same one as ranks with an equal stack
            if not each.is_certain and (known := stacks.get(main_stack(self.ranks[rank]))):
                kinds[known].append(rank)
        ordered = sorted(kinds, key=lambda kind: (-len(kinds[kind]), kinds[kind]))
        return tuple((examples[kind], tuple(sorted(kinds[kind]))) for kind in ordered)

    def waits_from_stacks(self, assigned: set[int]) -> Iterator[Wait]:
        """Find the waits that the flight recorder does not have, by stacks: init_process_group, send, recv and others.

        Ranks that are ``assigned`` to a wait already are left out.
        """
        ranks_by_call: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for number, rank in self.ranks.items():
            call = waiting_call_of(rank)
            if call and call.function in RPC_CALLS and not self._rpc_callees(number):
                continue  # nothing shows who should reply
            if not call or number in assigned or rank.moved or rank.answers is False:
                continue
            if call.function in UNRECORDED_FUNCTIONS or not (self.recorded and rank.answers):
                ranks_by_call.setdefault((call.function, members_of(rank)), []).append(number)
        inside = {rank for calls in ranks_by_call.values() for rank in calls}
        partners = {rank: peer_of(self.ranks[rank]) for rank in inside}
        for (function, members), calls in sorted(ranks_by_call.items(), key=lambda item: item[0][0] != INIT_FUNCTION):
            together = group_by_chain_end(
                {rank: partners[rank] for rank in calls}, self._ranks_with_matching_partner(function, partners)
            )
            for end, waiting in together.items():
                known = end.has_matching_partner or end.cycle
                needs_all = function in RPC_BARRIERS.values()
                elsewhere = {*calls} if needs_all else inside | assigned
                others = [] if known else self._awaited(end.rank, elsewhere, members, calls)
                if function in RPC_CALLS:
                    others = self._rpc_callees(*waiting)
                moved = [rank for rank in others if self.ranks[rank].moved]
                missing = [r for r in others if r not in moved and self._counts_as_missing(function, self.ranks[r])]
                unseen = {r for r in others if r not in {*moved, *missing} and not self._has_called(function, r)}
                all_known = end.rank is None and len(self.ranks) == self.inspection.world_size
                yield Wait(
                    function,
                    "",
                    0,
                    members,
                    None,
                    tuple(waiting),
                    (),
                    _collective_entry_frames((self.ranks[rank] for rank in waiting), function),
                    tuple(MissingRank(rank, False) for rank in missing),
                    has_unreachable_members=bool(unseen)
                    or not (all_known or end.rank in self.ranks or end.has_matching_partner or end.cycle),
                    uncertain=tuple(moved),
                    partners=tuple((rank, each) for rank in waiting if (each := partners[rank]) is not None),
                    partners_match=end.has_matching_partner,
                    cycle=end.cycle,
                )

    def _rpc_callees(self, *callers: int) -> list[int]:
        """Return the ranks that ``callers`` wait for in an RPC; if unknown, all other ranks that execute an RPC."""
        calls = [self.ranks[rank].inside for rank in callers]
        named = {each.names for each in calls if each and each.operation in RPC_CALLS and each.names is not None}
        if named:
            return [rank for rank in self.ranks if rank in named and rank not in callers]
        return [rank for rank, each in self.ranks.items() if rank not in callers and rpc_callee_line_of(each)]

    def _awaited(
        self, partner: int | None, inside: set[int], members: tuple[int, ...], calls: Collection[int]
    ) -> list[int]:
        """Return the inspected ranks that the ranks in ``calls`` wait for: a partner, or other members of the group."""
        if partner is not None:
            others: Iterable[int] = [partner]
        elif members:
            others = [rank for rank in members if rank not in calls]
        else:
            others = [rank for rank in self.ranks if rank not in inside]
        return [rank for rank in others if rank in self.ranks]

    def _ranks_with_matching_partner(self, function: str, partners: Mapping[int, int | None]) -> set[int]:
        """Return the ranks in a send whose partner is in the matching recv, and vice versa."""
        other = (
            RECEIVE_FUNCTIONS
            if function in SEND_FUNCTIONS
            else SEND_FUNCTIONS
            if function in RECEIVE_FUNCTIONS
            else set()
        )
        matched = set()
        for rank, partner in partners.items():
            if partner is not None and partner in self.ranks and partners.get(partner, rank) in (rank, None):
                call = waiting_call_of(self.ranks[partner])
                matched.update([rank] if call and call.function in other else [])
        return matched

    def _has_called(self, function: str, rank: int) -> bool:
        """Whether a rank is known to have called ``function``: for init_process_group, if it has a process group."""
        found = self.ranks[rank]
        return function == INIT_FUNCTION and (bool(found.groups) or found.answers is True)

    def _counts_as_missing(self, function: str, rank: RankInspection) -> bool:
        if function == INIT_FUNCTION:
            return not self._has_called(function, rank.rank) and not rank.no_stack
        return not rank.no_stack and (bool(rank.threads) or rank.answers is not None or has_ended(rank))


def _collective_entry_frames(ranks: Iterable[RankInspection], operation: str) -> tuple[Frame, ...]:
    return tuple(dict.fromkeys(place for rank in ranks if (place := collective_entry_line(rank, operation))))


def _with_waits_of_missing_ranks(wait: Wait, waits: Sequence[Wait]) -> Wait:
    """Add to each missing rank of a wait whether that rank waits too, and in which call."""
    inside = {
        rank: wait_title(other) + format_partner(other, rank)
        for other in waits
        if other is not wait
        for rank in other.waiting
    }
    inside |= {
        rank: f"#{number} of {other.group}" for other in waits if other is not wait for rank, number in other.ahead
    }
    if wait.operation in RPC_CALLS:  # a thread of the callee works on it, whatever its main thread waits for
        return wait
    missing = [MissingRank(each.rank, each.rank in inside, inside.get(each.rank, "")) for each in wait.missing]
    return replace(wait, missing=tuple(sorted(missing, key=lambda each: (each.waits, each.rank))))


def wait_title(wait: Wait) -> str:
    """Return what ranks wait in: "all_reduce #5 of default_pg", "init_process_group"."""
    if not wait.number:
        return wait.operation
    return f"{wait.operation or 'collective'} #{wait.number} of {wait.group}"


def short_wait_title(wait: Wait) -> str:
    """Like ``wait_title``, without the name of the default group: "all_reduce #5"."""
    return wait_title(wait).removesuffix(f" of {DEFAULT_GROUP}")


def format_partner(wait: Wait, rank: int) -> str:
    """Format the partner of a rank in send or recv: " from rank 2"; "" if unknown."""
    other = dict(wait.partners).get(rank) if wait.operation != FILE_LOCK else None
    return "" if other is None else f" {'to' if wait.operation in SEND_FUNCTIONS else 'from'} rank {other}"


def _order_by_cause(waits: Sequence[Wait]) -> Iterator[Wait]:
    """Order waits: first those for a rank that does not wait itself, then those that depend on them."""
    left = sorted(waits, key=lambda wait: (any(each.waits for each in wait.missing), -len(wait.waiting)))
    reached: set[int] = set()
    while left:
        ready = [
            each for each in left if each.root_causes or not each.missing or _missing_ranks(each.missing) & reached
        ]
        roots = [each for each in ready if each.root_causes or not each.missing] or ready
        if not ready:
            found = _find_cycle(left)
            roots = [each for each in left if not _ranks_in(each).isdisjoint(found)]
            roots.sort(key=lambda each: each.operation != NEW_GROUP)  # one of its members skipped new_group
            ready = [replace(roots[0], cycle=found), *roots[1:]]
        else:
            ready = roots
        yield from ready
        reached.update(rank for each in roots for rank in _ranks_in(each))
        left = [each for each in left if each not in roots]


def _find_cycle(waits: Sequence[Wait]) -> tuple[int, ...]:
    """Return a cycle of ranks that each wait for the next, where every wait depends on another."""
    nexts: dict[int, int] = {}
    for wait in waits:
        partners = dict(wait.partners)
        nexts.update((rank, partners.get(rank, wait.missing[0].rank)) for rank in _ranks_in(wait))
    return find_cycle(nexts)


def _ranks_in(wait: Wait) -> set[int]:
    return {*wait.waiting, *dict(wait.ahead)}


def _missing_ranks(missing: Iterable[MissingRank]) -> set[int]:
    return {each.rank for each in missing}
