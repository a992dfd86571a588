"""Inspections of real hangs, from what ``capture.py`` has kept of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddplaunch.diagnosis.collectives import parse_groups, parse_last, parse_states
from ddplaunch.diagnosis.inspection import Condition, Frame, Inspection, RankInspection, Thread
from ddplaunch.diagnosis.stack_dump import parse_dump
from ddplaunch.diagnosis.waits import needs

SAMPLES = Path(__file__).parent / "samples"
MEMBERS = {"0": (0, 1, 2), "1": (0, 1), "2": (1, 2)}

C10D = "/venv/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def glance(kind: str) -> Inspection:
    """A hang as the two cheap readings show it: stacks and numbers."""
    told = _sample(kind)
    return Inspection(1_800_000_000.0, tuple(_rank(rank, each) for rank, each in enumerate(told)), 3)


def inspected(kind: str) -> Inspection:
    """A hang with the last collectives of the ranks that ``needs`` names, asked as often as it names some."""
    return asked(glance(kind), kind)


def asked(inspection: Inspection, kind: str) -> Inspection:
    """An inspection, perhaps a changed one, with the last collectives of the ranks that it needs."""
    for _ in range(2):
        wanted = needs(inspection)
        ranks = (_asked(rank, kind) if rank.rank in wanted else rank for rank in inspection.ranks)
        inspection = replace(inspection, ranks=tuple(ranks))
    assert not needs(inspection)
    return inspection


def changed(inspection: Inspection, number: int, **fields: Any) -> Inspection:
    """The same with other facts of one rank."""
    ranks = (replace(rank, **fields) if rank.rank == number else rank for rank in inspection.ranks)
    return replace(inspection, ranks=tuple(ranks))


def stack(*frames: str) -> tuple[Thread, ...]:
    """A main thread's stack of "load_batch at data.py:4", the user's, and "recv", torch's; the innermost first."""
    found = []
    for frame in frames:
        function, at, line = frame.rpartition(" at ")
        file, _, number = line.partition(":")
        found.append(Frame(function, file, int(number), True) if at else Frame(frame, C10D, 1, False))
    return (Thread(tuple(found)),)


def _sample(kind: str) -> list[Any]:
    return json.loads((SAMPLES / f"{kind}.json").read_text())  # type: ignore[no-any-return]


def _rank(number: int, told: Any) -> RankInspection:
    if told is None:
        return RankInspection(number, "here", 100 + number, Condition.EXITED, code=0)
    threads = parse_dump("\n".join(told["stacks"]).encode(), "/job", "/ddplaunch")
    groups = parse_states(told["states"].encode()) if "states" in told else ()
    answers = None if not groups else True
    if "states" not in told:
        answers = False
    return RankInspection(
        number, "here", 100 + number, Condition.ALIVE, threads=threads, answers=answers, groups=groups
    )


def _asked(rank: RankInspection, kind: str) -> RankInspection:
    told = _sample(kind)[rank.rank]["entries"]
    dump = json.dumps({**told, "entries": [json.loads(entry) for entry in told["entries"]]}).encode()
    known = tuple(replace(group, ranks=MEMBERS[group.group]) for group in parse_groups(dump))
    return replace(rank, last=parse_last(dump), known=known)
