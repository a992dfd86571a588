"""Histories of a job that is stopped: by signals, by the scheduler, and what nodes do not report."""

from __future__ import annotations

from signal import SIGINT, SIGTERM, SIGUSR2

import pytest

from ddplaunch.core.job import job_events as ev
from tests.core.job.job_world import History, World, failed, finished, job, noticed, replay, reported, signalled
from tests.core.machine_histories import step

CALLED = "`ddplaunch stop` was called"
NOTICED = "preempted by SIGUSR2 on node 0 (n0)"
AGAIN = "the same command may be run again (exit code 75)"
SAVE = "to save a checkpoint"
NO_REPORT = "it did not report the end of its ranks within"

HISTORIES: dict[str, History] = {
    "a signal on every node at once counts as one": (
        job(2),
        step(5, signalled(0, SIGTERM), "1: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 30 s"),
        step(5, signalled(1, SIGTERM)),
        step(6, signalled(1, SIGTERM, again=True), "all: stop, SIGTERM, 0 s"),
    ),
    "Ctrl-C on any node stops all": (
        job(2),
        step(5, signalled(1, SIGINT), "0: note: Ctrl-C on node 1 (n1)", "all: stop, SIGINT, 30 s"),
        step(6, signalled(1, SIGINT, again=True), "all: stop, SIGINT, 0 s"),
        step(7, reported(0)),
        step(7, reported(1), "all: end, 130"),
    ),
    "a requested stop names its command and node": (
        job(2),
        step(
            5,
            signalled(1, SIGINT, reason=CALLED),
            "0: note: `ddplaunch stop` was called on node 1 (n1)",
            "all: stop, SIGINT, 30 s",
        ),
        step(6, reported(0)),
        step(6, reported(1), "all: end, 130: stopped because `ddplaunch stop` was called"),
    ),
    "Ctrl-C once, twice, and a third time, which waits for no node": (
        job(2, grace=0.0),
        step(1, signalled(0, SIGINT), "1: note: Ctrl-C on node 0 (n0)", "all: stop, SIGINT, 0 s"),
        step(2, signalled(0, SIGINT, again=True), "all: stop, SIGINT, 0 s"),
        step(3, signalled(0, SIGINT, again=True), "all: end, 130"),
        step(4, reported(1)),
    ),
    "a failure before the signal is reported": (
        job(2, max_restarts=1),
        step(5, failed(1, 2), "all: stop, SIGTERM, 30 s"),
        step(5.2, signalled(0, SIGTERM), "1: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 30 s"),
        step(7, reported(0, stopped=2)),
        step(7, reported(1, stopped=1), "all: end, 143, rank 2 failed, 3 stopped"),
    ),
    "a third signal, which waits for no node, leaves the report in": (
        job(2, grace=0.0),
        step(1, failed(1, 2), "all: stop, SIGTERM, 0 s"),
        step(1.2, signalled(0, SIGINT), "1: note: Ctrl-C on node 0 (n0)", "all: stop, SIGINT, 0 s"),
        step(1.3, signalled(0, SIGINT, again=True), "all: stop, SIGINT, 0 s"),
        step(1.4, signalled(0, SIGINT, again=True), "all: end, 130, rank 2 failed, 0 stopped"),
    ),
    "a rank that the signal itself has ended before is none": (
        job(2),
        step(5, failed(1, 2, exit_code=None, signal=SIGTERM), "all: stop, SIGTERM, 30 s"),
        step(5.1, signalled(0, SIGTERM), "1: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 30 s"),
        step(7, reported(0)),
        step(7, reported(1), "all: end, 143"),
    ),
    "a failure after the signal is none": (
        job(2),
        step(5, signalled(0, SIGTERM), "1: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 30 s"),
        step(6, failed(1, 2)),
        step(7, reported(0)),
        step(7, reported(1), "all: end, 143"),
    ),
    "a node without a report is lost": (
        job(3, grace=7.0),
        step(0, signalled(0, SIGINT), "1, 2: note: Ctrl-C on node 0 (n0)", "all: stop, SIGINT, 7 s"),
        step(0, reported(0)),
        step(0, reported(2)),
        step(36.9, None),
        step(
            37.1,
            None,
            "1: disconnect",
            "0: NodeLost",
            f"all: note: node 1 (n1) was lost: {NO_REPORT} 37 s",
            "all: end, 130",
        ),
    ),
    "a node without a report is lost after success too": (
        job(2),
        step(5, finished(0)),
        step(5, finished(1)),
        step(5, reported(0)),
        step(
            65,
            None,
            "1: disconnect",
            "0: NodeLost",
            f"0: note: node 1 (n1) was lost: {NO_REPORT} 60 s; stopping the others",
            f"0: end, 69: node 1 (n1) was lost: {NO_REPORT} 60 s",
        ),
    ),
    "a stop without grace shortens the wait for a report, a longer grace does not extend it": (
        job(2),
        step(100, signalled(0, SIGINT), "1: note: Ctrl-C on node 0 (n0)", "all: stop, SIGINT, 30 s"),
        step(120, signalled(0, SIGINT, again=True), "all: stop, SIGINT, 0 s"),
        step(120, reported(0)),
        step(130, finished(1)),
        step(149.9, None),
        step(
            150, None, "1: disconnect", "0: NodeLost", f"0: note: node 1 (n1) was lost: {NO_REPORT} 30 s", "0: end, 130"
        ),
    ),
    "the wait for a report ends with the report": (
        job(2, max_restarts=1),
        step(5, failed(1, 2), "all: stop, SIGTERM, 30 s"),
        step(5, reported(0)),
        step(5, reported(1), "all: restart: rank 2 exited with code 1 (on n1); restart 1 of 1"),
        step(5, None, "all: start attempt 1"),
        step(1005, None),
    ),
    "a preemption notice reaches all nodes once": (
        job(3),
        step(
            5,
            noticed(1, SIGUSR2),
            f"all: note: preempted by SIGUSR2 on node 1 (n1): ranks have 90 s (--preempt-grace) {SAVE}",
            "all: PreemptRanks",
        ),
        step(6, noticed(2, SIGUSR2)),
        step(9, finished(0)),
        step(9, reported(0)),
        step(9, finished(1)),
        step(9, reported(1)),
        step(9, finished(2)),
        step(9, reported(2, preemption_seen=True), f"all: end, 75: preempted by SIGUSR2 on node 1 (n1): {AGAIN}"),
    ),
    "ranks that save a checkpoint after the notice": (
        job(preempt_grace=20.0),
        step(
            5,
            noticed(0, SIGUSR2),
            f"0: note: preempted by SIGUSR2: ranks have 20 s (--preempt-grace) {SAVE}",
            "0: PreemptRanks",
        ),
        step(9, finished(0)),
        step(9, reported(0, preemption_seen=True), f"0: end, 75: preempted by SIGUSR2: {AGAIN}"),
    ),
    "ranks that the preemption notice does not concern": (
        job(preempt_grace=20.0),
        step(
            5,
            noticed(0, SIGUSR2),
            f"0: note: preempted by SIGUSR2: ranks have 20 s (--preempt-grace) {SAVE}",
            "0: PreemptRanks",
        ),
        step(9, finished(0)),
        step(9, reported(0), "0: end, 0"),
    ),
    "a preemption notice while ranks are being stopped announces no other grace": (
        job(2),
        step(5, failed(1, 2), "all: stop, SIGTERM, 30 s"),
        step(
            5.1, noticed(0, SIGUSR2), f"all: note: {NOTICED}: the ranks are being stopped already", "all: PreemptRanks"
        ),
    ),
    "after a preemption notice a failure stops no rank until the grace is over": (
        job(2, max_restarts=3, preempt_grace=20.0),
        step(
            5,
            noticed(0, SIGUSR2),
            f"all: note: {NOTICED}: ranks have 20 s (--preempt-grace) {SAVE}",
            "all: PreemptRanks",
        ),
        step(6, failed(1, 3)),
        step(24, reported(1)),
        step(25, None, "all: note: --preempt-grace (20 s) expired: stopping the ranks", "0: stop, SIGTERM, 30 s"),
        step(26, reported(0, stopped=2), f"all: end, 75, rank 3 failed, 2 stopped: {NOTICED}: {AGAIN}"),
    ),
    "a preemption notice while nodes join": (
        job(min_nodes=2),
        step(0, None, "0: status: 1/2 nodes joined, waiting for node 1"),
        step(5, noticed(0, SIGUSR2), f"0: end, 75: {NOTICED}: no rank was running"),
    ),
    "a preemption notice between attempts": (
        job(2, max_restarts=1, restart_backoff=60.0),
        step(5, failed(1, 2), "all: stop, SIGTERM, 30 s"),
        step(5, reported(1)),
        step(5, reported(0), "all: restart: rank 2 exited with code 1 (on n1); restart 1 of 1 in 60 s"),
        step(6, noticed(0, SIGUSR2), f"all: end, 75: {NOTICED}: no rank was running"),
    ),
    "a stop signal after a preemption notice sets the exit code": (
        job(),
        step(
            5,
            noticed(0, SIGUSR2),
            f"0: note: preempted by SIGUSR2: ranks have 90 s (--preempt-grace) {SAVE}",
            "0: PreemptRanks",
        ),
        step(6, signalled(0, SIGTERM), "0: stop, SIGTERM, 30 s"),
        step(7, reported(0, stopped=2, preemption_seen=True), "0: end, 143"),
    ),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())
def test_history(history: History) -> None:
    replay(history)


def test_a_suspension_of_node_0_adds_one_step_to_the_wait_for_a_report() -> None:
    """A laptop that sleeps while ranks are being stopped: a node that is late by that is not lost."""
    world = World([1], grace=5.0)
    world.at(0, signalled(0, SIGTERM), "1: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 5 s")
    world.at(1, reported(0))
    world.at(5, None)
    world.now = 1000
    assert world.on(ev.DeadlineDue()) == []
    world.at(1024.9, None)
    why = "node 1 (n1) was lost: it did not report the end of its ranks within 35 s"
    world.at(1025, None, "1: disconnect", "0: NodeLost", f"0: note: {why}", "0: end, 143")
