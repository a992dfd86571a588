"""Describes the collectives that the ranks were in when native code, such as gloo's or NCCL's, failed in a rank."""

from __future__ import annotations

from ddplaunch.base.text import format_ranks
from ddplaunch.observe.diagnosis.inspection import Collective, Inspection, RankInspection
from ddplaunch.observe.diagnosis.rank_position import (
    collective_entry_line,
    distributed_call_of,
    format_location,
    group_progress,
    has_ended,
    user_line_of,
)
from ddplaunch.observe.diagnosis.wait_sentences import describe_mismatch
from ddplaunch.observe.diagnosis.waits import find_waits

_MAX_OTHERS = 2  # lines on other ranks


def describe_crash(inspection: Inspection, crashed: int) -> str:
    """Describe how the ranks' collectives differ; if they are equal, the collective of each, the crashed rank's first.

    The text is "" if the crashed rank was in no collective. faulthandler prints that rank's line after the inspection.
    """
    for wait in find_waits(inspection):
        if any(crashed in ranks for _, ranks in wait.mismatched):
            return f"ranks entered different collectives: {describe_mismatch(wait, inspection)}"
    if not (
        place := _describe_collective_of_rank(inspection.by_number[crashed]) if crashed in inspection.by_number else ""
    ):
        return ""
    places: dict[str, list[int]] = {}
    for rank in inspection.ranks:
        if rank.rank != crashed and (other := _describe_collective_of_rank(rank)):
            places.setdefault(other, []).append(rank.rank)
    others = [f"{format_ranks(n)} {'was' if len(n) == 1 else 'were'} in {each}" for each, n in places.items()]
    return "\n".join([f"it was in {place}", *others[:_MAX_OTHERS]])


def _describe_collective_of_rank(rank: RankInspection) -> str:
    """Describe the collective that a rank is in: "all_reduce #7 of float32[128], step at train.py:31"; "" for none."""
    if has_ended(rank):
        return ""
    call = distributed_call_of(rank)
    waiting = [each.collective for each in group_progress(rank).values() if each.first_incomplete and each.collective]
    collective = min(waiting, key=lambda each: each.entered, default=None)
    if collective is None and call is None:
        return ""
    line = (
        collective_entry_line(rank, collective.operation) if collective else call.place if call else user_line_of(rank)
    )
    what = _describe_collective(collective) if collective else call.function if call else ""
    return what + (f", {format_location(line)}" if line else "")


def _describe_collective(collective: Collective) -> str:
    return f"{collective.operation} #{collective.number}" + (f" of {collective.tensors}" if collective.tensors else "")
