"""Renders ``ddplaunch stacks``: which ranks wait for which, then the stack of each group of ranks with equal stacks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby

import click

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.text import format_count, format_ranks
from ddplaunch.base.types import as_dict
from ddplaunch.core.output.log_message import MessageKind
from ddplaunch.observe.diagnosis.inspection import Inspection, RankInspection, Thread
from ddplaunch.observe.diagnosis.program_text import describe_programs
from ddplaunch.observe.diagnosis.rank_position import (
    PACKAGE_PATH,
    UNRECORDED_FUNCTIONS,
    busy_workers,
    describe_rank_activity,
    differing_library_calls,
    distributed_call_of,
    format_location,
    user_line_of,
    worker_noun,
)
from ddplaunch.observe.diagnosis.stack_groups import RUNNING, StackGroup, group_ranks
from ddplaunch.observe.diagnosis.wait_sentences import describe_wait, describe_waits
from ddplaunch.observe.diagnosis.waits import find_waits

STACKS = MessageKind("stacks")
"""The log message with an inspection that the user has requested by a key."""

MAX_PATH_CHARS = 44  # of the path of a library's file
MAX_USER_FRAMES = 30  # of the user's own code in a stack: recursion can be deep
_MAX_THREADS = 8


def render_stacks(inspection: Inspection) -> str:
    """Render an inspection as text with ANSI styles (click.echo removes them if they are not wanted)."""
    lines = [click.style(sanitize_line(each, 2000), bold=True) for each in describe_waits(inspection)]
    lines += [click.style(f"note: {note}", fg="yellow") for note in inspection_notes(inspection)]
    has_many_hosts = len({rank.host for rank in inspection.ranks}) > 1
    groups = group_ranks(inspection)
    calls = differing_library_calls(inspection.ranks, [group.example for group in groups])
    for group in groups:
        lines += ["", *_render_group(group, inspection, has_many_hosts, calls.get(group.example.rank))]
    if programs := [*describe_programs(inspection)]:
        lines += ["", *programs]
    return "\n".join(lines) + "\n"


def inspection_notes(inspection: Inspection) -> tuple[str, ...]:
    """List the nodes that were not inspected or did not answer, and what else the inspection lacks."""
    notes = [f"{sanitize_line(node)} did not answer" for node in inspection.silent]
    if inspection.node_only:
        notes.append("only the ranks of this node are shown (--control none)")
    if other := [rank for rank in inspection.ranks if rank.library]:
        uses, library = "uses" if len(other) == 1 else "use", other[0].library
        who = format_ranks(rank.rank for rank in other)
        notes.append(f"{who} {uses} {library}, which keeps records of its own: who waits for whom there is not known")
    calls = [
        call
        for rank in inspection.ranks
        if (call := distributed_call_of(rank)) and call.function not in UNRECORDED_FUNCTIONS
    ]
    if calls and not any(rank.answers and rank.groups for rank in inspection.ranks):
        notes.append("no rank has reported its collectives: only stacks are known")
    return tuple(notes)


def stacks_to_json(inspection: Inspection) -> dict[str, object]:
    """Return the object that ``ddplaunch stacks --json`` prints."""
    return {
        **inspection.to_json(),
        "sentences": list(describe_waits(inspection)),
        "notes": list(inspection_notes(inspection)),
        "waits": [
            {
                "text": describe_wait(wait, inspection),
                "operation": wait.operation,
                "group": wait.group,
                "number": wait.number,
                "waiting": sorted((*wait.waiting, *dict(wait.ahead))),
                "missing": [as_dict(each) for each in wait.missing],
                "partners": [list(each) for each in wait.partners],
                "cycle": list(wait.cycle),
                "different": [
                    {"operation": each.operation, "tensors": each.tensors, "ranks": list(numbers)}
                    for each, numbers in wait.mismatched
                ],
            }
            for wait in find_waits(inspection)
        ],
        "groups": [
            {"ranks": list(group.ranks), "state": group.state, "waited": group.waited_s}
            for group in group_ranks(inspection)
        ],
    }


def _render_group(
    group: StackGroup, inspection: Inspection, has_many_hosts: bool, library_call: Frame | None
) -> Iterator[str]:
    """Yield the lines of one group: its ranks and their state, the user's line, the stack."""
    by_number = inspection.by_number
    hosts = {by_number[number].host for number in group.ranks}
    where = f" (on {', '.join(sorted(map(sanitize_line, hosts)))})" if has_many_hosts and len(hosts) <= 2 else ""
    rank = group.example
    line = user_line_of(rank)
    state = group.description + (f" for {_seconds(group.waited_s)}" if group.waited_s is not None else "")
    place = (
        describe_rank_activity(rank, library_call) if group.state == RUNNING else format_location(line) if line else ""
    )
    heading = f"{place} ({state})" if place else state
    yield click.style(f"{format_ranks(group.ranks)}{where}: {sanitize_line(heading, 300)}", fg="cyan", bold=True)
    if rank.no_stack:
        yield f"  no stack: {sanitize_line(rank.no_stack)}"
    for number, thread in enumerate(_informative_threads(rank)):
        if number:
            yield click.style(f"  another {sanitize_line(thread.title)}:", dim=True)
        yield from _render_stack(thread)
    for worker in busy_workers(rank)[:_MAX_THREADS]:
        yield click.style(f"  its {worker_noun(rank)} (pid {worker.pid}):", dim=True)
        yield from _render_stack(Thread(worker.frames))


def _informative_threads(rank: RankInspection) -> list[Thread]:
    """Select the threads to show: the main thread, and others that are in the user's code."""
    others = [each for each in rank.threads[1:] if any(frame.own for frame in each.frames)]
    return [*rank.threads[:1], *others[:_MAX_THREADS]]


def _render_stack(thread: Thread) -> Iterator[str]:
    """Yield the lines of a stack, the innermost call first; of library frames, only the innermost one is shown."""
    left = MAX_USER_FRAMES
    for is_own, run in groupby(thread.frames, key=lambda frame: frame.own):
        frames = list(run)
        if not is_own:
            innermost = frames[0] is thread.frames[0]
            yield from (_format_library_frames(frames) if innermost else [_format_skipped_frames(frames)])
            continue
        yield from (f"  {sanitize_line(format_location(frame))}" for frame in frames[:left])
        left -= len(frames)
        if left < 0:
            hidden = sum(frame.own for frame in thread.frames) - MAX_USER_FRAMES
            yield click.style(f"  … {format_count(hidden, 'call')} more", dim=True)
            return


def _format_library_frames(frames: Sequence[Frame]) -> Iterator[str]:
    first = frames[0]
    yield click.style(f"  {sanitize_line(first.function)} at {_short_path(first.file)}:{first.line}", dim=True)
    if frames[1:]:
        yield _format_skipped_frames(frames[1:])


def _format_skipped_frames(frames: Sequence[Frame]) -> str:
    packages = dict.fromkeys(_package_name(frame.file) for frame in frames)
    return click.style(f"  … {format_count(len(frames), 'call')} in {', '.join(list(packages)[:3])}", dim=True)


def _package_name(file: str) -> str:
    """Name the package or module that a library's file belongs to; "importlib" for "<frozen importlib._bootstrap>"."""
    if file.startswith("<frozen "):
        return sanitize_line(file[8:].partition(".")[0].rstrip(">"))
    return _short_path(file).partition("/")[0].removesuffix(".py")


def _short_path(file: str) -> str:
    """Name a library's file by its package: "torch/distributed/distributed_c10d.py"."""
    short = sanitize_line(PACKAGE_PATH.sub("", file))
    if len(short) <= MAX_PATH_CHARS:
        return short
    return f"{short.partition('/')[0]}/…/{os.path.basename(short)}" if "/" in short.strip("/") else short


def _seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
