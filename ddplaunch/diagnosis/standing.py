"""Where one rank stands: its line of the user's code, the torch function it is in, how far it is in a process group."""

from __future__ import annotations

import os
from itertools import takewhile
from typing import NamedTuple

from ddplaunch.diagnosis.inspection import Collective, Condition, Frame, RankInspection

INIT = "init_process_group"
POINT_TO_POINT = {
    "batch_isend_irecv",
    "irecv",
    "isend",
    "recv",
    "recv_object_list",
    "send",
    "send_object_list",
}
STORE = "store.wait"
UNRECORDED = POINT_TO_POINT | {
    INIT,
    STORE,
    "destroy_process_group",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
"""Functions of torch.distributed that wait for other ranks and that the flight recorder of gloo has not."""

_C10D = "torch/distributed/distributed_c10d.py"
_LOADER = "torch/utils/data/dataloader.py"
_WAITS = {
    ("threading.py", "join"): "waits for a thread to end",
    ("threading.py", "wait"): "waits for another thread",
    ("queue.py", "get"): "waits for a queue to fill",
    ("queue.py", "put"): "waits for room in a queue",
    ("subprocess.py", "wait"): "waits for a command to end",
    ("subprocess.py", "communicate"): "waits for a command to end",
}
"""What a rank does whose user code has called these of the standard library."""


class Call(NamedTuple):
    """A function of torch.distributed that a thread is in."""

    function: str  # the one that the user or a library called: "all_gather_object", and not what that calls
    place: Frame | None  # the user's line


class Standing(NamedTuple):
    """How far a rank is in a process group, in numbers that can be compared between ranks."""

    entered: int  # the last collective that it entered, from 1
    stuck: int  # the first that it entered and has not completed; 0 for none
    collective: Collective | None  # that one or, where it has none, the last; where the rank was asked
    certain: bool  # whether it was asked: else sends may be in the numbers, and ``stuck`` is the last that it entered


def where(frame: Frame) -> str:
    """Name a line: "train.py:88"."""
    return f"{frame.file}:{frame.line}"


def text(frame: Frame) -> str:
    """Name a line with its function, where it is in one: "load_batch at data.py:31"."""
    return where(frame) if frame.function == "<module>" else f"{frame.function} at {where(frame)}"


def place(frames: tuple[Frame, ...]) -> Frame | None:
    """The user's innermost line in a stack."""
    return next((frame for frame in frames if frame.own), None)


def line_of(rank: RankInspection) -> Frame | None:
    """The user's line that a rank is at: of its main thread, else of the first thread that has one."""
    return next((frame for thread in rank.threads if (frame := place(thread.frames))), None)


def call_in(frames: tuple[Frame, ...]) -> Call | None:
    """The function of torch.distributed that a stack is in."""
    inside = [frame.function for frame in frames if frame.file.endswith(_C10D)]
    if not inside:
        return None
    public = [name for name in inside if not name.startswith("_")]
    return Call((public or inside)[-1], place(frames))


def call_of(rank: RankInspection) -> Call | None:
    """The function of torch.distributed that a rank is in, in any of its threads."""
    return next((call for thread in rank.threads if (call := call_in(thread.frames))), None)


def wait_of(rank: RankInspection) -> Call | None:
    """The function in which a rank waits for others: of torch.distributed, or of the job's store."""
    return call_of(rank) or (Call(STORE, line_of(rank)) if rank.awaits == "store" else None)


def entered_at(rank: RankInspection) -> Frame | None:
    """The user's line from which a rank that waits in a collective has entered it."""
    call = call_of(rank)
    return call.place if call and call.place else line_of(rank)


def waiting_for(rank: RankInspection) -> str:
    """What a rank waits for outside torch.distributed: "waits for its DataLoader"; "" where nothing tells."""
    frames = rank.threads[0].frames if rank.threads else ()
    called = list(takewhile(lambda frame: not frame.own, frames))
    if any(frame.file.endswith(_LOADER) for frame in called):
        return "waits for its DataLoader"
    words = (_WAITS.get((os.path.basename(frame.file), frame.function)) for frame in called)
    reply = f"waits for a reply from {rank.awaits}" if rank.awaits else ""
    return next(filter(None, words), reply)


def doing(rank: RankInspection) -> str:
    """What a rank that does not wait for others does: "load_batch at data.py:31"; "" where nobody knows."""
    line = line_of(rank)
    told = text(line) if line else ""
    if words := waiting_for(rank):
        return f"it {words}" + (f", {told}" if told else "")
    return told


def is_gone(rank: RankInspection) -> bool:
    """Whether its program is over, also where its process still serves the others (it has no frames but ours)."""
    if rank.condition in (Condition.EXITED, Condition.REPLACED):
        return True
    return rank.condition is Condition.ALIVE and bool(rank.threads) and not any(each.frames for each in rank.threads)


def standings(rank: RankInspection) -> dict[str, Standing]:
    """How far a rank is in each process group that it has used, by its name.

    What torch counts as completed is a hint only: gloo's threads write it in any order, so an older collective can be
    there for ever. The entries of the flight recorder are right.
    """
    found: dict[str, Standing] = {}
    for state in reversed(rank.groups):
        stuck = state.enqueued if state.enqueued > state.completed else 0
        found[state.group] = Standing(state.enqueued, stuck, None, False)
    last: dict[str, list[Collective]] = {}
    for each in rank.last:
        last.setdefault(each.group, []).append(each)
    for group, of_group in last.items():
        oldest = next((each for each in of_group if not each.completed), None)
        stuck = oldest.number if oldest else 0
        found[group] = Standing(of_group[-1].number, stuck, oldest or of_group[-1], True)
    return found
