"""Explains an out-of-memory kill of a rank in four lines: the limit, who used it, what grew, what to do.

Pure: ``features/memory/node.py`` collects the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ddplaunch.base.text import format_count, format_elapsed, format_size

OOM_KILLER_TEXT = "the kernel's out-of-memory killer"

_HISTORY_S = 600.0  # before the end; older points do not count
_MIN_GAP_S = 30.0  # the coarse points are used if they begin earlier by this
_MIN_GROWTH_FRACTION = 0.05  # of the memory held; less growth may be chance
_MIN_PART_FRACTION = 0.1  # of all growth; smaller parts are not listed


class MemoryPoint(Struct, frozen=True):
    """The memory of a rank at one moment, in bytes; ``shared`` and ``cache`` are of its whole control group."""

    moment: float  # seconds since the epoch
    own: int  # its process, without file-backed and shared pages
    children: int  # the same of all its descendants, like DataLoader workers
    shared: int  # shared memory, including /dev/shm
    cache: int | None = None  # page cache; None if unknown


class MemoryLimit(Struct, frozen=True):
    """The memory limit that was reached, and where it is set."""

    size: int  # bytes
    group: str = ""  # the control group, as /proc/self/cgroup names it; "" for the machine
    setting: str = ""  # its file: "memory.max"


class OutOfMemory(Struct, frozen=True):
    """A process that the kernel killed because memory ran out."""

    rank: int
    limit: MemoryLimit
    before: int  # the control group's oom_kill counter when the ranks started
    after: int  # the same counter now
    certain: bool = True  # whether it was a process of the job; else perhaps another one on this machine
    victim: str = ""  # the killed process, if not the rank itself: "its process 4711, which had 3.1 GiB"
    others: int = 0  # other ranks that are still running
    held: int = 0  # bytes of memory of these ranks and their children


def explain_oom(
    shortage: OutOfMemory, points: Sequence[MemoryPoint], longer: Sequence[MemoryPoint] = ()
) -> tuple[str, ...]:
    """Explain the kill in at most four lines; ``points``: the rank's memory over time, up to its end.

    ``longer``: points over a longer time, but coarser: memory that forked processes share counts for each of them.
    """
    goes_back = len(longer) > 1 and (len(points) < 2 or points[0].moment - longer[0].moment > _MIN_GAP_S)
    grew = longer if goes_back and _has_grown(longer) else points
    known = points if len(points) > 1 or not longer else longer
    lines = [
        _describe_limit(shortage),
        _describe_usage(shortage, known[-1]) if known else "",
        describe_growth(shortage.rank, grew),
    ]
    return (*filter(None, lines), _advice(shortage, grew if grew and _has_grown(grew) else known))


def _describe_limit(shortage: OutOfMemory) -> str:
    limit = shortage.limit
    if not shortage.certain:
        return f"{OOM_KILLER_TEXT} was active on this machine: probably out of memory ({format_size(limit.size)})"
    counted_by = f"oom_kill rose from {shortage.before} to {shortage.after}"
    ended = f"{OOM_KILLER_TEXT} ended {shortage.victim or 'it'}"
    if limit.group:
        where = f"control group {limit.group} had used its {format_size(limit.size)} ({limit.setting})"
        return f"{ended}: {where}; {counted_by}"
    return f"{ended}: this machine had used its {format_size(limit.size)}; {counted_by}"


def _describe_usage(shortage: OutOfMemory, last: MemoryPoint) -> str:
    held = [f"rank {shortage.rank} had {format_size(last.own)}", f"its child processes {format_size(last.children)}"]
    if not last.children:
        held.pop()
    elif not last.own:  # it has ended and was not measured before
        held = [f"the child processes of rank {shortage.rank} had {format_size(last.children)}"]
    parts = [("shared memory", last.shared), ("page cache", last.cache)]
    held += [f"{name} {format_size(count)}" for name, count in parts if count]
    if shortage.others:
        held.append(f"{format_count(shortage.others, 'other rank')} {format_size(shortage.held)}")
    return ", ".join(held)


def describe_growth(rank: int, points: Sequence[MemoryPoint]) -> str:
    """Describe what grew: "in the last 4 min rank 1 grew from 2.1 GiB to 12.4 GiB"; "" if unknown."""
    if not (grown := _growing_fields(points)):
        return ""
    when = f"in the last {format_elapsed(max(0.1, points[-1].moment - _first_recent_point(points).moment))}"
    total = sum(after - before for _, before, after in grown)
    if not _has_grown(points):
        return f"{when} memory use hardly grew"
    names = {"own": f"rank {rank}", "children": "its child processes", "shared": "shared memory", "cache": "page cache"}
    words = [
        f"{names[part]} grew from {format_size(before)} to {format_size(after)}"
        for part, before, after in grown
        if after - before >= _MIN_PART_FRACTION * total
    ]
    return f"{when} {', '.join(words)}"


def _has_grown(points: Sequence[MemoryPoint]) -> bool:
    """Whether the memory of a rank grew by more than chance."""
    held = points[-1].own + points[-1].children + points[-1].shared
    return sum(after - before for _, before, after in _growing_fields(points)) >= _MIN_GROWTH_FRACTION * held


def _first_recent_point(points: Sequence[MemoryPoint]) -> MemoryPoint:
    return next(each for each in points if each.moment >= points[-1].moment - _HISTORY_S)


def _growing_fields(points: Sequence[MemoryPoint]) -> list[tuple[str, int, int]]:
    """Return the fields of ``MemoryPoint`` that grew, with bytes before and after; the largest growth first."""
    if len(points) < 2 or (first := _first_recent_point(points)) is points[-1]:
        return []
    last = points[-1]
    both = [(part, getattr(first, part) or 0, getattr(last, part) or 0) for part in _ADVICE]
    return sorted((each for each in both if each[2] > each[1]), key=lambda each: each[1] - each[2])


def _advice(shortage: OutOfMemory, points: Sequence[MemoryPoint]) -> str:
    """Return advice on the part of the memory that grew most or, if that is unknown, on the largest part."""
    parts = [part for part, *_ in _growing_fields(points) if part != "cache"] if points and _has_grown(points) else []
    if not parts and points:
        parts = sorted(("own", "children", "shared"), key=lambda part: -getattr(points[-1], part))
    limit = shortage.limit
    more = next((words for name, words in _LIMIT_HINTS if name in limit.group), f"raise {limit.setting}")
    more = more if limit.group else "start fewer ranks on it (--nproc)"
    return f"{_ADVICE[parts[0] if parts else 'own']}; or {more}"


_ADVICE = {
    "own": "reduce host memory: log loss.item(), avoid growing lists, use smaller batches",
    "children": "use fewer DataLoader workers, and arrays or tensors in the Dataset: each worker copies Python objects",
    "shared": "use fewer DataLoader workers, a smaller prefetch_factor or smaller batches: they are in shared memory",
    "cache": "",  # the kernel drops it first
}
_LIMIT_HINTS = (
    ("slurm", "ask for more memory (sbatch --mem)"),
    ("kubepods", "raise resources.limits.memory of the pod"),
    ("docker", "give the container more (docker run --memory)"),
    ("libpod", "give the container more (podman run --memory)"),
)
"""How to raise the limit of a control group, by a part of its name."""
