"""Tests of waits in torch.distributed.rpc: who should reply, or has not called shutdown."""

import pytest

from ddplaunch.base.stack_frames import Frame
from ddplaunch.observe.diagnosis.inspection import (
    ActiveCall,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
)
from ddplaunch.observe.diagnosis.wait_sentences import describe_waits

API, WORK = "torch/distributed/rpc/api.py", "torch/distributed/rpc/internal.py"


def stack(*calls: str) -> Thread:
    """A thread in these calls, "function file:line", the innermost first; those of torch are not the user's."""
    frames = []
    for each in calls:
        function, place = each.split(" ")
        file, line = place.split(":")
        frames.append(Frame(function, file, int(line), own="/" not in file))
    return Thread(tuple(frames))


MAIN = "<module> rpc.py:15"
IN_SHUTDOWN = stack("wait threading/x.py:3", f"_all_gather {API}:254", f"shutdown {API}:380", f"wrapper {API}:99", MAIN)
WORKS = stack("slow rpc.py:4", f"_run_function {WORK}:218")
IN_CALL = stack(f"rpc_sync {API}:842", f"wrapper {API}:99", "<module> rpc.py:7")
ELSEWHERE = stack("<module> rpc.py:14")


def describe(*threads: tuple[Thread, ...], inside: ActiveCall | None = None) -> tuple[str, ...]:
    """``inside``: the call that rank 0 reports."""
    ranks = [
        RankInspection(
            number, "n0", 100 + number, ProcessCondition.ALIVE, threads=each, inside=None if number else inside
        )
        for number, each in enumerate(threads)
    ]
    return describe_waits(Inspection(0.0, tuple(ranks), len(ranks)))


IN_SYNC = "rank 0 waits in rpc_sync, called at rpc.py:7; rank 1 has not replied: slow at rpc.py:4"


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        (((IN_CALL,), (ELSEWHERE, WORKS)), (IN_SYNC,)),
        (  # the callee's main thread waits for the caller
            ((IN_CALL,), (IN_SHUTDOWN, WORKS), (IN_SHUTDOWN,)),
            (
                IN_SYNC,
                "ranks 1, 2 wait in rpc.shutdown, called at rpc.py:15; "
                "rank 0 has not called it: it waits in rpc_sync, rpc.py:7",
            ),
        ),
        (
            ((IN_SHUTDOWN,), (ELSEWHERE,), (IN_SHUTDOWN,)),
            ("ranks 0, 2 wait in rpc.shutdown, called at rpc.py:15; rank 1 has not called it: rpc.py:14",),
        ),
        (((IN_CALL,), (ELSEWHERE,)), ("no rank waits for another rank",)),  # nothing shows who should reply
    ],
)
def test_who_is_waited_for(threads, expected):
    assert describe(*threads) == expected


@pytest.mark.parametrize(
    ("inside", "stacks", "expected"),
    [
        # The callee is known: only it is named.
        (ActiveCall("rpc_sync", "rpc_sync", 1), (IN_CALL, WORKS, WORKS), [IN_SYNC]),
        (
            ActiveCall("rpc_sync", "rpc_sync", 1),
            (IN_CALL, ELSEWHERE, WORKS),
            ["rank 0 waits in rpc_sync, called at rpc.py:7; rank 1 has not replied: rpc.py:14"],
        ),
        (
            ActiveCall("wait", "to_here", 2),
            (ELSEWHERE, WORKS, WORKS),
            ["rank 0 waits in to_here, called at rpc.py:14; rank 2 has not replied: slow at rpc.py:4"],
        ),
        # It is not: a rank with a thread that works on a call.
        (
            ActiveCall("wait", "rpc_async", None),
            (ELSEWHERE, ELSEWHERE, WORKS),
            ["rank 0 waits in the wait() of rpc_async, called at rpc.py:14; rank 2 has not replied: slow at rpc.py:4"],
        ),
        (ActiveCall("wait", "rpc_async", None), (ELSEWHERE, ELSEWHERE), ["no rank waits for another rank"]),
        (ActiveCall("rpc_sync", "rpc_sync", 0), (IN_CALL, ELSEWHERE), ["no rank waits for another rank"]),  # itself
    ],
)
def test_waits_for_a_reply(inside, stacks, expected):
    assert [*describe(*((each,) for each in stacks), inside=inside)] == expected
