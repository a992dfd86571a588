"""Tests of ``ddplaunch.Session``, whose ranks stay between calls."""

from types import SimpleNamespace

import pytest

from ddplaunch import Session
from ddplaunch.features.python import session as session_module
from tests.features.python.conftest import Python

ENDED = "the ranks have ended; their variables are lost"
SESSION_ENDED = "the session has ended: create a new one"

CALLS = """
kept = []

def setup():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    kept.append(rank())

def add(number):
    import torch
    import torch.distributed as dist
    total = torch.tensor(float(number + rank()))
    dist.all_reduce(total)
    sys.modules["kept"] = sys.modules.get("kept", 0) + 1
    return float(total), sys.modules["kept"], os.getpid()

if __name__ == "__main__":
    with Session(nproc=2) as session:
        session.run(setup)
        found = [session.run(add, number) for number in (1, 2)]
        print([[each[:2] for each in call] for call in found])
        assert [each[2] for each in found[0]] == [each[2] for each in found[1]]
        try:
            session.run(add, threading.Lock())
        except LaunchError as error:
            print(error)
        sys.stdout.flush()
        if not (child := os.fork()):
            sys.exit()  # the ranks are not its own
        assert os.waitpid(child, 0)[1] == 0
        print(session.run(add, 0)[1][:2])
        try:
            session.run(add, "x")
        except RankFailed as error:
            print(type(error).__name__)
        print(sorted(name.partition(".")[0] for name in os.listdir(session._ranks._job.folder)))
"""


@pytest.mark.ci
def test_ranks_keep_their_state(python: Python):
    assert python(CALLS).splitlines() == [
        "[[(3.0, 1), (3.0, 1)], [(5.0, 2), (5.0, 2)]]",
        "argument 1 (lock) cannot be sent to the ranks: cannot pickle '_thread.lock' object",
        "(1.0, 3)",
        "RankFailed",
        "['__pycache__', 'calls', 'launch', 'path']",
    ]


def test_a_call_without_disk_space_can_be_repeated(python: Python):
    """The ranks serve the next call after a full disk, and Ctrl-C while the session closes leaves no file."""
    body = """
import atexit, resource

def interrupt(caller):
    os.kill(caller, signal.SIGINT)
    time.sleep(1000)

if __name__ == "__main__":
    session = Session(nproc=1, preload="threading")
    print(session.run(rank))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (200_000, 2_000_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        try:
            session.run(len, bytearray(size))
        except OSError as error:
            print(error.strerror)
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        print(session.run(len, bytearray(size)))
    session.run(atexit.register, interrupt, os.getpid())
    try:
        session.close()
    except KeyboardInterrupt:
        print("interrupted")
"""
    expected = ["[0]", "File too large", "[200000]", "File too large", "[2000000]", "interrupted"]
    assert python(body).splitlines() == expected


def test_an_interrupted_end_of_the_ranks_does_not_end_a_session_that_restarts(python: Python):
    """The next call starts new ranks after Ctrl-C while those of a failed call were being stopped.

    Closing in another thread waits until they are, and no call starts ranks after it.
    """
    body = """
def interrupted():
    raise KeyboardInterrupt

if __name__ == "__main__":
    with Session(nproc=1, preload="threading", restart=True) as session:
        session.run(rank)
        session._ranks.stop = interrupted
        try:
            session.run(sys.exit)
        except KeyboardInterrupt:
            print("interrupted")
        print(session.run(rank))

        def fail(*call):
            ranks.ready = False
            closer.start()
            ranks._job.wait()
            raise LaunchError("failed")

        def stop():
            closer.join(0.2)
            print("stopped")

        ranks, closer = session._ranks, threading.Thread(target=lambda: (session.close(), print("closed")))
        ranks.run_call, ranks.stop = fail, stop
        for call in range(2):
            try:
                session.run(rank)
            except LaunchError as error:
                closer.join()
                print(error)
"""
    assert python(body).splitlines() == ["interrupted", "[0]", "stopped", "closed", "failed", SESSION_ENDED]


@pytest.mark.parametrize(
    ("keywords", "has_started", "expected"),
    [
        ({}, True, [ENDED]),
        ({"restart": True}, True, [f"{ENDED}; the next call starts new ones"]),
        ({"restart": True}, False, []),
        ({}, False, []),
        ({"restart": True, "post_mortem": True}, True, []),  # its ranks end with each failure
        ({"post_mortem": True}, False, []),
    ],
)
def test_after_an_interrupted_call_it_is_said_that_the_variables_are_lost(monkeypatch, keywords, has_started, expected):
    printed: list[str] = []

    def interrupt(timeout_s: float | None, request: bytes) -> None:
        raise KeyboardInterrupt

    ranks = SimpleNamespace(ready=False, started=has_started, prepare=lambda *_: None, run_call=interrupt)
    ranks.print, ranks.stop, ranks.close = printed.append, lambda: None, lambda: None
    monkeypatch.setattr(session_module, "_SessionRanks", lambda *_: ranks)
    with Session(nproc=2, **keywords) as session, pytest.raises(KeyboardInterrupt):
        session.run(len, "")
    assert printed == expected


@pytest.mark.ci
def test_a_rank_that_ends_ends_the_session(python: Python):
    body = """
import io

def fail():
    if rank() == 1:
        sys.exit(3)

if __name__ == "__main__":
    for restart in (False, True):
        output = io.StringIO()
        with Session(nproc=2, restart=restart, preload="threading", output=output) as session:
            for call in (rank, fail, rank):
                try:
                    print(session.run(call))
                except LaunchError as error:
                    print(error)
        print(output.getvalue().splitlines()[-1])
"""
    assert python(body).splitlines() == [
        *("[0, 1]", "rank 1 exited with code 3", SESSION_ENDED),
        f"ddplaunch: {ENDED}",
        *("[0, 1]", "rank 1 exited with code 3", "[0, 1]"),
        f"ddplaunch: {ENDED}; the next call starts new ones",
    ]


def test_a_function_that_raises_does_not_end_the_ranks(python: Python):
    """Ranks in which a function raised serve the next call; the traceback is printed once, and in the report."""
    body = """
import io

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a)

def fail(how, ranks):
    sys.modules["kept"] = sys.modules.get("kept", 0) + 1
    if rank() in ranks:
        raise how if isinstance(how, Exception) else how()
    return rank()

def kept():
    return sys.modules["kept"]

if __name__ == "__main__":
    output = io.StringIO()
    with Session(nproc=3, preload="threading", output=output) as session:
        for how, ranks in ((ValueError("no luck"), [1]), (KeyError("x"), [0, 1, 2]), (partial(Odd, "odd", 2), [2])):
            try:
                session.run(fail, how, ranks)
            except RankFailed as error:
                cause = error.__cause__
                print(error, "|", repr(cause) if type(cause).__name__ != "RankTraceback" else cause.args[0], error.rank)
                print(error.exit_code, error.signal)
                assert "call_loop.py" not in error.report and ", in fail" in error.report, error.report
                print(error.report.splitlines()[-1])
        print(session.run(kept))
    print(output.getvalue().count("Traceback"), "features/python/rank/call_loop.py" in output.getvalue())
"""
    assert python(body).splitlines() == [
        "rank 1 failed with ValueError: no luck | ValueError('no luck') 1",
        "1 None",
        "  ValueError: no luck",
        "rank 0 failed with KeyError: 'x' | KeyError('x') 0",
        "1 None",
        "  ranks 1, 2 failed in the same way",
        "rank 2 failed with Odd: odd | 2 2",
        "1 None",
        "  Odd: odd",
        "[3, 3, 3]",
        "5 False",
    ]


@pytest.mark.ci
def test_a_rank_that_waits_for_one_that_raised_ends_the_session(python: Python):
    body = """
import io
from ddplaunch.features.python import session as module

module.RAISED_TIMEOUT_S = 0.5

def setup():
    import torch.distributed as dist
    dist.init_process_group("gloo")

def step():
    import torch.distributed as dist
    if rank() == 1:
        raise ValueError("no luck")
    dist.barrier()

if __name__ == "__main__":
    output = io.StringIO()
    with Session(nproc=2, output=output) as session:
        session.run(setup)
        for _ in range(2):
            try:
                session.run(step)
            except LaunchError as error:
                print(error)
    lines = [line for line in output.getvalue().splitlines() if line.startswith("ddplaunch")]
    print(*(line for line in lines if "starting 2 ranks" not in line), sep="\\n")
"""
    first, second, late, *_, gone = python(body).splitlines()
    assert (first, second) == ("rank 1 failed with ValueError: no luck", SESSION_ENDED)
    begin = "ddplaunch: rank 0 did not return within 0.5 s after rank 1 raised: rank 0 waits in "
    assert late.startswith(begin), late
    assert late.endswith("; rank 1 is between two calls"), "it has not ended"
    assert gone == f"ddplaunch: {ENDED}"


@pytest.mark.ci
def test_threads_take_turns(python: Python):
    body = """
def echo(x):
    return x

def use(session, name, found):
    found += [session.run(echo, (name, number)) == [(name, number)] * 2 for number in range(20)]

if __name__ == "__main__":
    with Session(nproc=2, preload="threading") as session:
        found = []
        threads = [threading.Thread(target=use, args=(session, name, found)) for name in "AB"]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    print(len(found), all(found))
"""
    assert python(body) == "40 True\n"


def test_a_session_that_is_never_closed(python: Python):
    shown = python("print(Session(nproc=2, preload='threading').run(rank), file=sys.stderr)\n1 / 0\n", fails=True)
    assert shown.startswith("[0, 1]\n")
    assert "ZeroDivisionError" in shown


def test_output_of_ranks_is_complete_when_a_call_returns(python: Python):
    """Output is complete at the end of a call, even without a line break, or after another rank closed its stdout."""
    body = """
import io

def speak(number):
    for line in range(1000):
        print(number, line)
    print(number, "half", end="")
    print(number, "aside", file=sys.stderr)

def close():
    if rank() == 1:
        sys.stdout.close()
        os.close(2)

if __name__ == "__main__":
    output = io.StringIO()
    with Session(nproc=2, output=output, preload="threading") as session:
        for number in range(5):
            session.run(speak, number)
            lines = [line for line in output.getvalue().splitlines() if line.startswith("[")]
            expected = [f"[{rank}] {number} {each}" for rank in (0, 1) for each in (*range(1000), "half", "aside")]
            assert sorted(lines[-2004:]) == sorted(expected), lines[-3:]
            assert len(lines) == 2004 * (number + 1)
        session.run(close)
        session.run(lambda: print("on") if rank() == 0 else None)
        assert output.getvalue().endswith("[0] on\\n")
    print(session is not None)
"""
    assert python(body) == "True\n"


FORKED = """
def number(given):
    return given

def fork(call):
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            call()
        except LaunchError as error:
            print(str(error).replace(str(os.getppid()), "PARENT").replace(str(os.getpid()), "CHILD"))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

if __name__ == "__main__":
    with Session(nproc=2, preload="threading") as session:
        fork(lambda: print("first in a fork:", session.run(number, 1)) or session.close())
        print(session.run(number, 2))
        fork(lambda: session.run(number, 9))
        fork(session.close)
        print(session.run(number, 3))
"""


@pytest.mark.ci
def test_a_fork_cannot_use_the_session(python: Python):
    refused = "the session belongs to process PARENT, and this is a fork of it (PID CHILD)"
    lines = python(FORKED).splitlines()
    assert lines == ["first in a fork: [1, 1]", "[2, 2]", refused, "[3, 3]"]
