"""Faults of ranks: each fails the job, or with --max-restarts 1 begins a second attempt."""

import os
import signal
from collections.abc import Callable

from tests.faults.rows import SILENCE, SOCKET, WELL, Expect, Row, both
from tests.faults.trial import Trial

KILLED = r"rank 3 was ended by SIGKILL.*\(on n1\)|rank 3 was ended by SIGKILL"


def _signal(number: int) -> Callable[[Trial], None]:
    def fault(trial: Trial) -> None:
        pid = trial.rank_pid(3)
        trial.mark()
        os.kill(pid, number)

    return fault


def _order(what: str) -> Callable[[Trial], None]:
    def fault(trial: Trial) -> None:
        trial.mark()
        trial.order(3, what)

    return fault


def _stopped(trial: Trial) -> None:
    pid = trial.rank_pid(3)
    trial.mark()
    os.kill(pid, signal.SIGSTOP)
    trial.wait_seconds(SILENCE)
    os.kill(pid, signal.SIGCONT)


def _leave(trial: Trial) -> None:
    trial.order(3, "leave")
    trial.until(lambda: "left a grandchild" in trial.runs[1].stdout(), "the grandchild")
    trial.mark()


def _leave_and_die(trial: Trial) -> None:
    _leave(trial)
    _signal(signal.SIGKILL)(trial)


ROWS = [
    Row("rank killed -9", _signal(signal.SIGKILL), both(137, KILLED), restarts=True),
    Row("rank exits 3", _order("exit"), both(3, "rank 3 exited with code 3"), restarts=True),
    Row("rank raises", _order("raise"), both(1, "rank 3 failed with ValueError: as ordered"), restarts=True),
    Row(
        "rank killed -9 while the others compute silently",
        _signal(signal.SIGKILL),
        both(137, KILLED),
        mode="silent",
        restarts=True,
    ),
    Row("rank stopped, then continued", _stopped, (WELL, WELL), survives=True),
    Row(
        "grandchild left behind by a job that ends well",
        _leave,
        (WELL, Expect(0, "killed leftover processes .*sleep")),
        mode="silent",
        survives=True,
    ),
    Row("grandchild left behind by a rank killed -9", _leave_and_die, both(137, KILLED, SOCKET), restarts=True),
]
