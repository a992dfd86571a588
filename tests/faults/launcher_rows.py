"""Faults of launchers while ranks run or stop: killed, suspended, interrupted, terminated."""

import signal
from collections.abc import Callable

from tests.faults.rows import DEAD, HEARTBEAT, LOST, SILENCE, SOCKET, WELL, Expect, Row, both, killed, lost, signalled
from tests.faults.trial import Trial

GRACE = 2.0
LONG = 60.0
"""Seconds of grace that must not pass where the job is to end at once."""

_FAILED = "rank 1 exited with code 3"


def _repeated(node: int, number: int) -> Callable[[Trial], None]:
    """Only a second signal on the same node kills at once, as schedulers send the first one to every node."""

    def fault(trial: Trial) -> None:
        trial.runs[node].signal(number)
        trial.wait_for_output(node, "stopping 2 ranks")
        trial.mark()
        trial.runs[node].signal(number)

    return fault


def _paused(trial: Trial) -> None:
    trial.mark()
    trial.runs[1].signal(signal.SIGSTOP)
    trial.wait_seconds(HEARTBEAT / 2)
    trial.runs[1].signal(signal.SIGCONT)
    trial.wait_seconds(HEARTBEAT)


def _stopped(node: int) -> Callable[[Trial], None]:
    def fault(trial: Trial) -> None:
        trial.mark()
        trial.runs[node].signal(signal.SIGSTOP)
        try:
            trial.ended(1 - node)
        finally:
            trial.runs[node].signal(signal.SIGCONT)
            trial.mark(node)

    return fault


def _stopping(trial: Trial) -> None:
    """Ranks that ignore SIGTERM have got it on both nodes, and their grace runs."""
    trial.begin(0)
    trial.begin(1)
    trial.wait_for_ranks()
    trial.runs[0].signal(signal.SIGTERM)
    trial.wait_for_output(1, "SIGTERM on node 0")
    if trial.launcher == "ddplaunch":
        trial.wait_for_output(0, "stopping 2 ranks")


def _failing(trial: Trial) -> None:
    """A rank has failed on node 0, and those that ignore SIGTERM are waited for; both nodes know it."""
    trial.begin(0)
    trial.begin(1)
    trial.wait_for_ranks()
    trial.order(1, "exit")
    for number in (0, 1):
        trial.wait_for_output(number, _FAILED)


def _stop_row(what: str, node: int, number: int) -> Row:
    """Ctrl-C again ends the ranks at once; SIGTERM again, which schedulers send, leaves them their grace."""
    name = f"{what}{', twice,' if node else ''} on node {node} while the job stops for SIGTERM"
    patient = number == signal.SIGTERM
    fault = _repeated(node, number) if node else signalled(node, number)
    expect = both(143, within=GRACE + SOCKET) if patient else both(143)
    return Row(
        name, fault, expect, _stopping, "stubborn", ("--grace", f"{GRACE if patient else LONG:g}"), torchrun=False
    )


ROWS = [
    Row("supervisor of node 1 killed -9", killed(1), (lost(1), DEAD)),
    Row("supervisor of node 0 killed -9", killed(0), (DEAD, lost(0))),
    Row("supervisor of node 1 killed -9 while the ranks compute silently", killed(1), (lost(1), DEAD), mode="silent"),
    Row(
        "supervisor of node 1 stopped for half the heartbeat timeout",
        _paused, (WELL, WELL), mode="silent", survives=True,
    ),
    Row("supervisor of node 1 stopped, continued after the verdict", _stopped(1), (lost(1, SILENCE), lost(0))),
    Row(
        "supervisor of node 0 stopped, continued after the verdict",
        _stopped(0), (Expect(LOST, "was lost"), lost(0, SILENCE)),
    ),
    Row("Ctrl-C on node 0", signalled(0, signal.SIGINT), (Expect(130), Expect(130, "Ctrl-C on node 0"))),
    Row("Ctrl-C on node 1", signalled(1, signal.SIGINT), (Expect(130, "Ctrl-C on node 1"), Expect(130))),
    Row(
        "Ctrl-C on node 0 while the ranks compute silently",
        signalled(0, signal.SIGINT), (Expect(130), Expect(130, "Ctrl-C on node 0")), mode="silent",
    ),
    Row("SIGTERM on node 0", signalled(0, signal.SIGTERM), (Expect(143), Expect(143, "SIGTERM on node 0"))),
    Row("SIGTERM on node 1", signalled(1, signal.SIGTERM), (Expect(143, "SIGTERM on node 1"), Expect(143))),
    Row(
        "SIGTERM on node 1, which the ranks ignore",
        signalled(1, signal.SIGTERM), both(143, within=GRACE + SOCKET), mode="deaf", options=("--grace", f"{GRACE:g}"),
    ),
    _stop_row("Ctrl-C", 0, signal.SIGINT),
    _stop_row("Ctrl-C", 1, signal.SIGINT),
    _stop_row("SIGTERM", 0, signal.SIGTERM),
    _stop_row("SIGTERM", 1, signal.SIGTERM),
    *(
        Row(name, fault, expect, start, "deaf", ("--grace", f"{GRACE:g}"), torchrun=False)
        for name, fault, expect, start in (
            (
                "supervisor of node 1 killed -9 while the job stops for SIGTERM",
                killed(1), (Expect(143, within=GRACE + SOCKET), DEAD), _stopping,
            ),
            (
                "supervisor of node 0 killed -9 while the job stops for SIGTERM",
                killed(0), (DEAD, lost(0, GRACE + SOCKET)), _stopping,
            ),
            (
                "supervisor of node 1 killed -9 while the job stops for a failure",
                killed(1), (Expect(3, _FAILED, GRACE + SOCKET), DEAD), _failing,
            ),
            (
                "Ctrl-C on node 1 while the job stops for a failure",
                signalled(1, signal.SIGINT), both(130, _FAILED, GRACE + SOCKET), _failing,
            ),
        )
    ),
]  # fmt: skip
