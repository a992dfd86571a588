"""Reads the inspections of real hangs that ``capture.py`` has written."""

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ddplaunch.base.stack_frames import Frame
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection, Thread
from ddplaunch.observe.diagnosis.stack_parser import parse_dump
from ddplaunch.observe.diagnosis.waits import ranks_to_query
from ddplaunch.observe.node.rank_reply import RankReply, add_group_states, add_last_collectives

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = ("2.4", "2.9", "2.13", "2.15")  # of torch
RECORDING = ("2.13", "2.15")  # those whose flight recorder has gloo's collectives
NEWEST = VERSIONS[-1]
_SAME = {"2.4": ("2.9", "2.13"), "2.9": ("2.13",), "2.13": (), "2.15": ("2.13",)}
"""The versions whose hangs are equal but for the flight recorder: one of them has the sample."""

EMPTY_RECORDER = '{"comm_lib_version": "", "nccl_comm_state": {}, "pg_config": {}, "pg_status": {}, "version": "2.10"}'
_RECORDERS = {"2.4": [], "2.9": [EMPTY_RECORDER, EMPTY_RECORDER]}
"""What ranks of these versions reply in place of a flight recorder."""

C10D = "/venv/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def cheap_inspection(kind: str, version: str = NEWEST) -> Inspection:
    """Return a hang as a cheap inspection shows it: stacks and group progress."""
    sample = _sample(kind, version)
    return Inspection(1_800_000_000.0, tuple(_rank(rank, each) for rank, each in enumerate(sample)), 3)


def full_inspection(kind: str, version: str = NEWEST) -> Inspection:
    """Return a hang with the last collectives of the ranks that ``ranks_to_query`` names."""
    return with_collectives(cheap_inspection(kind, version), kind, version)


def with_collectives(inspection: Inspection, kind: str, version: str = NEWEST) -> Inspection:
    """An inspection, perhaps a changed one, with the last collectives of the ranks that it needs."""
    for _ in range(2):
        wanted = ranks_to_query(inspection)
        ranks = (_asked(rank, kind, version) if rank.rank in wanted else rank for rank in inspection.ranks)
        inspection = replace(inspection, ranks=tuple(ranks))
    assert not ranks_to_query(inspection)
    return inspection


def with_rank_changed(inspection: Inspection, number: int, **fields: Any) -> Inspection:
    """Return an inspection with other facts of one rank."""
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


def _sample(kind: str, version: str) -> list[Any]:
    """Read a hang as this version of torch shows it."""
    paths = (SAMPLES / each / f"{kind}.json" for each in (version, *_SAME[version]))
    path = next(each for each in paths if each.exists())
    ranks: list[Any] = json.loads(path.read_text())
    if path.parent.name != version and version in _RECORDERS:
        for reply in (rank[query] for rank in ranks if rank for query in ("states", "entries") if query in rank):
            reply[3:] = _RECORDERS[version]
    return ranks


def _parse_reply(fields: list[str]) -> RankReply:
    return RankReply.parse("\t".join(fields).encode())


def _rank(number: int, sample: Any) -> RankInspection:
    if sample is None:
        return RankInspection(number, "here", 100 + number, ProcessCondition.EXITED, code=0)
    threads = parse_dump("\n".join(sample["stacks"]).encode(), "/job", "/ddplaunch")
    found = RankInspection(number, "here", 100 + number, ProcessCondition.ALIVE, threads=threads, answers=False)
    return add_group_states(found, _parse_reply(sample["states"])) if "states" in sample else found


def _asked(rank: RankInspection, kind: str, version: str) -> RankInspection:
    return add_last_collectives(rank, _parse_reply(_sample(kind, version)[rank.rank]["entries"]))
