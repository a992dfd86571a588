"""Why the kernel ended a rank for want of memory, in four lines: what ran out, who had it, who grew, what to do.

Pure: ``agent/memory.py`` finds out what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.dataclass import dataclass
from ddplaunch.words import format_count, format_elapsed, format_size

OOM_KILLER_TEXT = "the kernel's out-of-memory killer"

_HISTORY_S = 600.0  # seconds before the end of which points count
_MIN_GAP_S = 30.0  # seconds by which points from longer ago must go back to be better
_MIN_GROWTH_FRACTION = 0.05  # of all that was held, from which on growth is more than chance
_MIN_PART_FRACTION = 0.1  # of all growth, from which on a part of it is named


@dataclass(frozen=True)
class MemoryPoint:
    """What a rank held at a moment, in bytes; what is shared or cached is the whole control group's."""

    moment: float  # seconds since the epoch
    own: int  # its own process, without what is in files or shared
    children: int  # likewise, its DataLoaders' workers and all else below it together
    shared: int  # shared memory, /dev/shm's too
    cache: int | None = None  # pages of files; None where nobody tells


@dataclass(frozen=True)
class MemoryLimit:
    """How much memory there was, and who says so."""

    size: int  # bytes
    group: str = ""  # the control group, as /proc/self/cgroup names it; "" for the machine
    setting: str = ""  # its file: "memory.max"


@dataclass(frozen=True)
class OutOfMemory:
    """The end of a process for want of memory."""

    rank: int
    limit: MemoryLimit
    before: int  # oom_kill of the control group when the ranks began
    after: int  # and now
    certain: bool = True  # whether it was one of ours; otherwise one of any program on this machine
    victim: str = ""  # what was ended, if not the rank itself: "its process 4711, which had 3.1 GiB"
    others: int = 0  # other ranks that are still here
    held: int = 0  # bytes that they and their children hold


def explain_oom(
    shortage: OutOfMemory, points: Sequence[MemoryPoint], longer: Sequence[MemoryPoint] = ()
) -> tuple[str, ...]:
    """At most four lines; ``points`` are of the rank, the last one of its end.

    ``longer`` are, too, from longer ago; in these, forks of one process each count what they have in common.
    """
    goes_back = len(longer) > 1 and (len(points) < 2 or points[0].moment - longer[0].moment > _MIN_GAP_S)
    grew = longer if goes_back and _is_growth(longer) else points
    known = points if len(points) > 1 or not longer else longer
    lines = [
        _describe_limit(shortage),
        _describe_owner(shortage, known[-1]) if known else "",
        describe_growth(shortage.rank, grew),
    ]
    return (*filter(None, lines), _advice(shortage, grew if grew and _is_growth(grew) else known))


def _describe_limit(shortage: OutOfMemory) -> str:
    limit = shortage.limit
    if not shortage.certain:
        return f"{OOM_KILLER_TEXT} ran meanwhile on this machine: probably out of memory ({format_size(limit.size)})"
    counted_by = f"oom_kill rose from {shortage.before} to {shortage.after}"
    ended = f"{OOM_KILLER_TEXT} ended {shortage.victim or 'it'}"
    if limit.group:
        where = f"control group {limit.group} had used its {format_size(limit.size)} ({limit.setting})"
        return f"{ended}: {where}; {counted_by}"
    return f"{ended}: this machine had used its {format_size(limit.size)}; {counted_by}"


def _describe_owner(shortage: OutOfMemory, last: MemoryPoint) -> str:
    held = [f"rank {shortage.rank} had {format_size(last.own)}", f"its child processes {format_size(last.children)}"]
    if not last.children:
        held.pop()
    elif not last.own:  # it has ended, and was not looked at before
        held = [f"the child processes of rank {shortage.rank} had {format_size(last.children)}"]
    parts = [("shared memory", last.shared), ("page cache", last.cache)]
    held += [f"{name} {format_size(count)}" for name, count in parts if count]
    if shortage.others:
        held.append(f"{format_count(shortage.others, 'other rank')} {format_size(shortage.held)}")
    return ", ".join(held)


def describe_growth(rank: int, points: Sequence[MemoryPoint]) -> str:
    """Who grew before the end: "in the last 4 min rank 1 grew from 2.1 GiB to 12.4 GiB"; "" where nobody can tell."""
    if not (grown := _growing_fields(points)):
        return ""
    when = f"in the last {format_elapsed(max(0.1, points[-1].moment - _first_point(points).moment))}"
    total = sum(after - before for _, before, after in grown)
    if not _is_growth(points):
        return f"{when} nothing grew by much"
    names = {"own": f"rank {rank}", "children": "its child processes", "shared": "shared memory", "cache": "page cache"}
    words = [
        f"{names[part]} grew from {format_size(before)} to {format_size(after)}"
        for part, before, after in grown
        if after - before >= _MIN_PART_FRACTION * total
    ]
    return f"{when} {', '.join(words)}"


def _is_growth(points: Sequence[MemoryPoint]) -> bool:
    """Whether that was more than chance."""
    held = points[-1].own + points[-1].children + points[-1].shared
    return sum(after - before for _, before, after in _growing_fields(points)) >= _MIN_GROWTH_FRACTION * held


def _first_point(points: Sequence[MemoryPoint]) -> MemoryPoint:
    return next(each for each in points if each.moment >= points[-1].moment - _HISTORY_S)


def _growing_fields(points: Sequence[MemoryPoint]) -> list[tuple[str, int, int]]:
    """What grew, most first: a field of ``MemoryPoint``, its bytes before and after."""
    if len(points) < 2 or (first := _first_point(points)) is points[-1]:
        return []
    last = points[-1]
    both = [(part, getattr(first, part) or 0, getattr(last, part) or 0) for part in _ADVICE]
    return sorted((each for each in both if each[2] > each[1]), key=lambda each: each[1] - each[2])


def _advice(shortage: OutOfMemory, points: Sequence[MemoryPoint]) -> str:
    """What to do about the part that grew most or, where that is not known, the largest."""
    parts = [part for part, *_ in _growing_fields(points) if part != "cache"] if points and _is_growth(points) else []
    if not parts and points:
        parts = sorted(("own", "children", "shared"), key=lambda part: -getattr(points[-1], part))
    limit = shortage.limit
    more = next((words for name, words in _LIMIT_HINTS if name in limit.group), f"raise {limit.setting}")
    more = more if limit.group else "start fewer ranks on it (--nproc)"
    return f"{_ADVICE[parts[0] if parts else 'own']}; or {more}"


_ADVICE = {
    "own": "keep less on the host from step to step (losses by .item(), no growing lists), use smaller batches",
    "children": "use fewer DataLoader workers, and arrays or tensors in the Dataset: each worker copies Python objects",
    "shared": "use fewer DataLoader workers, a smaller prefetch_factor or smaller batches: they are in shared memory",
    "cache": "",  # which the kernel drops first
}
_LIMIT_HINTS = (
    ("slurm", "ask for more memory (sbatch --mem)"),
    ("kubepods", "raise resources.limits.memory of the pod"),
    ("docker", "give the container more (docker run --memory)"),
    ("libpod", "give the container more (podman run --memory)"),
)
"""Who made a control group, by its name, and how it is given more."""
