"""Where one rank stands: its line of the user's code, the torch function it is in, how far it is in a process group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from ddplaunch.diagnosis.inspection import Collective, Condition, Frame, RankInspection, Thread, Worker
from ddplaunch.words import signal_name

INIT = "init_process_group"
SENDS = {"isend", "send", "send_object_list"}
RECEIVES = {"irecv", "recv", "recv_object_list"}
WORK_WAIT = "the wait() of isend or irecv"
POINT_TO_POINT = {"batch_isend_irecv", WORK_WAIT, *SENDS, *RECEIVES}
ROOTED = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
"""Collectives with a root, which all ranks must name alike, and how it is said of them."""

STORE = "store.wait"
FILE_LOCK = "flock"
NEW_GROUP = "new_group"
UNRECORDED = POINT_TO_POINT | {
    INIT,
    STORE,
    FILE_LOCK,
    NEW_GROUP,
    "destroy_process_group",
    "monitored_barrier",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
"""Functions of torch.distributed that wait for other ranks and that the flight recorder of gloo has not."""

PACKAGES = re.compile(r".*/(?:(?:site|dist)-packages|python3\.\d+t?)/")
"""What stands before a library's own name in the name of a file."""

_C10D = "torch/distributed/distributed_c10d.py"
_PACKING = {"_object_to_tensor", "_tensor_to_object"}
"""What turns objects into tensors and back, by the program's own ``__reduce__``: no other rank is waited for there."""

LOADER_WAIT = "waits for its DataLoader"
_LOADER = "torch/utils/data/dataloader.py"
_FETCH = "torch/utils/data/_utils/fetch.py"  # in which a worker is that has something to do
_MAX_WORKERS = 3
_RPC = "torch/distributed/rpc/"
_CHILD = "waits for a process that it has started"
_MESSAGE = "waits for a message of another process"
_FUTURE = "waits for a result of its executor"
_POOL = "waits for its process pool"
_EXIT, _EXIT_QUEUE = "waits at its exit for a child process to end", "waits at its exit until its queue is read"
_LOCK_FILE = "waits for a file lock"
_WAITS = {
    ("multiprocessing/queues.py", "_finalize_join"): _EXIT_QUEUE,
    ("multiprocessing/util.py", "_exit_function"): _EXIT,
    ("multiprocessing/pool.py", "get"): _POOL,
    ("multiprocessing/pool.py", "next"): _POOL,
    ("multiprocessing/pool.py", "join"): _POOL,
    ("multiprocessing/queues.py", "get"): _MESSAGE,
    ("multiprocessing/connection.py", "recv"): _MESSAGE,
    ("multiprocessing/popen_fork.py", "poll"): _CHILD,
    ("concurrent/futures/_base.py", "result"): _FUTURE,
    ("concurrent/futures/_base.py", "wait"): _FUTURE,
    ("concurrent/futures/process.py", "shutdown"): _FUTURE,
    ("filelock/_api.py", "acquire"): _LOCK_FILE,  # this and the next poll, so the kernel shows no wait
    ("torch/utils/file_baton.py", "wait"): _LOCK_FILE,
    ("queue.py", "get"): "waits for a queue to fill",
    ("queue.py", "put"): "waits for room in a queue",
    ("subprocess.py", "wait"): "waits for a command to end",
    ("subprocess.py", "communicate"): "waits for a command to end",
    ("threading.py", "join"): "waits for a thread to end",
    ("threading.py", "_shutdown"): "waits for its threads to end",
    ("threading.py", "wait"): "waits for another thread",
}
"""What a rank does whose user code has called these of the standard library, or of another; the first counts."""

WAITS_FOR_CHILDREN = {LOADER_WAIT, _CHILD, _MESSAGE, _FUTURE, _POOL, _EXIT, _EXIT_QUEUE}
"""Waits that processes of the rank's own may end: of these it is asked where they are."""


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


def library_calls(ranks: Iterable[RankInspection], of: Iterable[RankInspection]) -> dict[int, Frame]:
    """The calls of libraries by which ranks differ from others at the same line of the user's: for some of ``ranks``.

    It is the first that is not the same in all of them, seen from that line. A rank whose line no other shares, or
    which does the same there as all others, has none.
    """
    wanted = {each.rank: inner for each in of if (inner := _inner(each)) and inner[1:]}
    lines = {inner[0] for inner in wanted.values()}
    alike: dict[Frame, set[tuple[Frame, ...]]] = {line: set() for line in lines}
    for each in ranks if lines else ():
        if (inner := _inner(each)) and inner[0] in lines:
            alike[inner[0]].add(inner)
    depths = {line: _shared(list(found)) for line, found in alike.items() if len(found) > 1}
    return {rank: inner[min(depths[inner[0]], len(inner) - 1)] for rank, inner in wanted.items() if inner[0] in depths}


def _inner(rank: RankInspection) -> tuple[Frame, ...]:
    """The user's line that a rank is at, and the calls of libraries from there on."""
    for thread in rank.threads:
        for number, frame in enumerate(thread.frames):
            if frame.own:
                return thread.frames[number::-1]
    return ()


def _shared(stacks: list[tuple[Frame, ...]]) -> int:
    """How many calls stacks have in common; where all their functions are the same, how many lines."""
    functions = [[(frame.function, frame.file) for frame in stack] for stack in stacks]
    differ = any(each != functions[0] for each in functions)
    columns = zip(*(functions if differ else [[frame.line for frame in stack] for stack in stacks]), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def call_in(frames: tuple[Frame, ...]) -> Call | None:
    """The function of torch.distributed that a stack is in."""
    inside = [frame.function for frame in frames if frame.file.endswith(_C10D)]
    if not inside or not _PACKING.isdisjoint(inside):
        return None
    public = [name for name in inside if not name.startswith("_")]
    return Call((public or inside)[-1], place(frames))


def call_of(rank: RankInspection) -> Call | None:
    """The function of torch.distributed that a rank is in, in any of its threads."""
    return next((call for thread in rank.threads if (call := call_in(thread.frames))), None)


def partner_of(rank: RankInspection) -> int | None:
    """The rank to which a rank sends, from which it receives, or whose lock it wants; None where that is not known."""
    call, inside = wait_of(rank), rank.inside
    if call and call.function == FILE_LOCK:
        return rank.lock_holder
    known = call and inside and call.function in (inside.function, inside.operation)
    return inside.names if known and inside and call and call.function in SENDS | RECEIVES else None


def members_of(rank: RankInspection) -> tuple[int, ...]:
    """The ranks that a rank waits for in a call that makes a group, or that is of one; () where that is not known."""
    call, inside = call_of(rank), rank.inside
    return inside.members if call and inside and inside.function == call.function else ()


def root_of(rank: RankInspection, collective: Collective) -> int | None:
    """The root of a collective that a rank waits in; None where it has none, or that is not known."""
    known = rank.inside and rank.inside.operation == collective.operation in ROOTED and not collective.completed
    return rank.inside.names if known and rank.inside else None


def wait_of(rank: RankInspection) -> Call | None:
    """What a rank waits for others in: a function of torch.distributed, a store, a Work's ``wait()``, a file's lock."""
    if call := call_of(rank):
        return call
    if rank.awaits == "store":
        return Call(STORE, line_of(rank))
    if rank.lock_holder is not None:
        return Call(FILE_LOCK, line_of(rank))
    # That of a collective is in the flight recorder; without one nothing shows which it is.
    if rank.inside and rank.inside.function == "wait" and rank.answers and rank.asleep in ("", "asleep"):
        return Call(WORK_WAIT if rank.inside.names is None else rank.inside.operation, line_of(rank))
    return None


def may_wait(rank: RankInspection) -> bool:
    """Whether a rank may wait for others, by its own word and the kernel's, without a stack."""
    if any(each.enqueued > each.completed for each in rank.groups):
        return True
    inside = rank.inside.function if rank.inside else ""
    return inside in UNRECORDED or wait_of(rank) is not None


def thread_in(rank: RankInspection, operation: str = "") -> Thread | None:
    """The thread that runs a collective: the first that is in that function, else in any, else the main one."""
    inside = [(call, thread) for thread in rank.threads if (call := call_in(thread.frames))]
    exact = (
        thread
        for _, thread in inside
        if any(frame.function == operation and frame.file.endswith(_C10D) for frame in thread.frames)
    )
    return next(exact, inside[0][1] if inside else next(iter(rank.threads), None))


def entered_at(rank: RankInspection, operation: str = "") -> Frame | None:
    """The user's line from which a rank that waits in a collective has entered it."""
    thread = thread_in(rank, operation)
    return (place(thread.frames) if thread else None) or line_of(rank)


def waiting_for(rank: RankInspection) -> str:
    """What a rank waits for outside torch.distributed: "waits for its DataLoader"; "" where nothing tells."""
    frames = rank.threads[0].frames if rank.threads else ()
    called = list(takewhile(lambda frame: not frame.own, frames))
    if any(frame.file.endswith(_LOADER) for frame in called):
        return LOADER_WAIT
    if any(_RPC in frame.file for frame in called):
        return "waits for an RPC"
    calls = {(frame.function, f"/{frame.file}") for frame in called}
    for (file, function), words in _WAITS.items():
        if any(function == name and path.endswith(f"/{file}") for name, path in calls):
            return words
    return f"waits for a reply from {rank.awaits}" if rank.awaits else rank.asleep.removeprefix("asleep")


def doing(rank: RankInspection, apart: Frame | None = None) -> str:
    """What a rank that does not wait for others does: "load_batch at data.py:31"; "" if unknown.

    ``apart`` is the library's call by which it differs from others at that line: "…, in download at hub/files.py:90".
    """
    line = line_of(rank)
    told = text(line) if line else ""
    if words := waiting_for(rank):
        workers = workers_of(rank)
        more = f" and {len(workers) - _MAX_WORKERS} more" if len(workers) > _MAX_WORKERS else ""
        inside = f" ({'; '.join(workers[:_MAX_WORKERS])}{more})" if workers else ""
        return f"it {words}" + (f", {told}" if told else "") + inside
    return f"{told}, in {apart.function} at {_library_line(apart)}" if apart else told


def workers_of(rank: RankInspection) -> list[str]:
    """Describe its child processes: "a worker: read at data.py:9", "worker pid 4711 is stopped (SIGSTOP)"."""
    name = worker_name(rank)
    gone = [f"{name} pid {each.pid} has ended: {end(each.code)}" for each in rank.workers if each.code is not None]
    gone += [f"{name} pid {each.pid} is stopped (SIGSTOP)" for each in rank.workers if each.stopped]
    busy = dict.fromkeys(f"a {name}: {_at_work(each.frames)}" for each in at_work(rank))
    return [*gone, *busy]


def worker_name(rank: RankInspection) -> str:
    """Name the child processes that a rank waits for: "worker" of its DataLoader, else "child process"."""
    return "worker" if waiting_for(rank) == LOADER_WAIT else "child process"


def at_work(rank: RankInspection) -> list[Worker]:
    """Those of its child processes that are not idle."""
    return [each for each in rank.workers if any(frame.own or frame.file.endswith(_FETCH) for frame in each.frames)]


def _at_work(frames: tuple[Frame, ...]) -> str:
    own = place(frames)
    return text(own) if own else f"{frames[0].function} at {_library_line(frames[0])}"


def _library_line(frame: Frame) -> str:
    return f"{PACKAGES.sub('', frame.file)}:{frame.line}"


def end(code: int) -> str:
    """Say how a process ended: "exit code 0", "SIGKILL"."""
    return f"exit code {code}" if code >= 0 else signal_name(-code)


def is_gone(rank: RankInspection) -> bool:
    """Whether its program is over, also where its process has yet to end (it has no frames but ours)."""
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
