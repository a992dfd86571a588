"""Histories of one node, replayed without processes: what happens, when, and what the machine decides.

A step's expected commands are those since the step before, in order; only observers see the others.
"""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2
from typing import Any

import pytest

from ddplaunch.core import events, messages
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from tests.core.machine_histories import Step, step
from tests.core.node.machine_world import (
    World,
    describe,
    end,
    exited,
    is_over,
    preempt,
    spawned,
    start,
    started,
    stop,
)

BEGIN = (
    step(0, start()),
    step(1, started(), "spawn 0", "spawn 1"),
    step(1, spawned(0), "send RanksStarted"),
    step(1, spawned(1)),
)
"""Two ranks run after a second."""

SIGNAL = ev.SignalArrived
LOST = "the zygote was ended by SIGKILL"
STORE = "the store (pid 7) was ended by SIGKILL (killed from outside)"
BOTH = "stopping 2 ranks; Ctrl-C again kills them now"

HISTORIES: dict[str, tuple[Step, ...]] = {
    "all ranks succeed": (
        *BEGIN,
        step(5, exited(1)),
        step(6, exited(0), "send RanksFinished", "sweep in 5 s"),
        step(6, ev.ProcessesSwept(), "send report 0: 0 stopped"),
        step(7, end(), "end with 0"),
    ),
    "processes that ranks leave behind are killed and named": (
        *BEGIN,
        step(5, exited(0)),
        step(5, exited(1), "send RanksFinished", "sweep in 5 s"),
        step(
            6,
            ev.ProcessesSwept(("sleep (pid 9)",), ("nfs (pid 8)",)),
            "show: killed leftover processes of the ranks: sleep (pid 9)",
            "show: not waiting for processes that cannot be killed: nfs (pid 8)",
            "send report 0: 0 stopped",
        ),
    ),
    "a rank fails, node 0 stops the other": (
        *BEGIN,
        step(5, exited(1, 3), "send failure of 1: 3"),
        step(5, stop(), "SIGTERM to all, but those that fail"),
        step(6, exited(0, -15), "sweep in 0 s"),
        step(6, ev.ProcessesSwept(), "send report 0: last line of 1, 1 stopped"),
        step(7, end(3), "end with 3"),
    ),
    "exit code 75 without a preemption is a failure": (
        *BEGIN,
        step(5, exited(1, 75), "send failure of 1: 75"),
    ),
    "all ranks fail before node 0 orders anything": (
        *BEGIN,
        step(5, exited(1, 3), "send failure of 1: 3"),
        step(5, exited(0, -11), "send failure of 0: SIGSEGV", "sweep in 0 s"),
        step(5, stop()),
        step(6, ev.ProcessesSwept(), "send report 0: last line of 1, last line of 0, 0 stopped"),
    ),
    "ranks that a stop signal ends have not failed": (
        *BEGIN,
        step(5, stop(), "SIGTERM to all, but those that fail"),
        step(6, exited(1, -15)),
        step(6, exited(0, -9), "sweep in 0 s"),
        step(7, ev.ProcessesSwept(), "send report 0: 2 stopped"),
    ),
    "the grace expires, the sweep kills what ignores SIGTERM": (
        *BEGIN,
        step(5, stop(grace_s=10), "SIGTERM to all, but those that fail"),
        step(14.9, None),
        step(15.1, None, "sweep in 0 s"),
        step(15.2, exited(0, -9)),
        step(15.2, exited(1, -9)),
        step(15.3, ev.ProcessesSwept(), "send report 0: 2 stopped"),
    ),
    "a stop without grace kills at once": (
        *BEGIN,
        step(5, stop(grace_s=0), "sweep in 0 s"),
        step(5, exited(0, -9)),
        step(5, exited(1, -9)),
        step(5, ev.ProcessesSwept(), "send report 0: 2 stopped"),
    ),
    "a zygote that does not answer the sweep is killed": (
        *BEGIN,
        step(5, stop(grace_s=0), "sweep in 0 s"),
        step(10.9, None),
        step(11.1, None, "KillZygote", "send report 0: 2 stopped"),
    ),
    "Ctrl-C: SIGINT, SIGTERM 3 s later, SIGKILL after the grace": (
        *BEGIN,
        step(5, SIGNAL(SIGINT), f"job: {BOTH}", "SIGINT to all", "send stop request SIGINT"),
        step(5.1, stop(SIGINT)),
        step(8.1, None, "SIGTERM to all"),
        step(34.9, None),
        step(35.1, None, "sweep in 0 s"),
        step(36, ev.ProcessesSwept(), "send report 0: 2 stopped"),
        step(36, end(130), "end with 130"),
    ),
    "Ctrl-C while leftover processes have their grace: they are killed": (
        *BEGIN,
        step(5, exited(0)),
        step(5, exited(1), "send RanksFinished", "sweep in 5 s"),
        step(6, SIGNAL(SIGINT), "sweep in 0 s", "send stop request SIGINT"),
        step(6, ev.ProcessesSwept(("sleep (pid 9)",)), "send report 0: 0 stopped"),
        step(6, ev.ProcessesSwept()),
        step(7, SIGNAL(SIGINT), "send stop request SIGINT again"),
        step(8, end(130), "end with 130"),
    ),
    "a signal while no rank runs is named": (
        *BEGIN,
        step(5, exited(0)),
        step(5, exited(1), "send RanksFinished", "sweep in 5 s"),
        step(
            6,
            SIGNAL(SIGTERM),
            "job: SIGTERM: stopping; no rank runs here",
            "sweep in 0 s",
            "send stop request SIGTERM",
        ),
        step(6, ev.ProcessesSwept(), "send report 0: 0 stopped"),
        step(7, SIGNAL(SIGTERM), "send stop request SIGTERM"),
        step(8, end(143), "end with 143"),
    ),
    "Ctrl-C twice kills": (
        *BEGIN,
        step(5, SIGNAL(SIGINT), f"job: {BOTH}", "SIGINT to all", "send stop request SIGINT"),
        step(6, SIGNAL(SIGINT), "sweep in 0 s", "send stop request SIGINT again"),
        step(7, SIGNAL(SIGINT), "sweep in 0 s", "send stop request SIGINT again"),
    ),
    "a second SIGTERM does not shorten the grace": (
        *BEGIN,
        step(5, SIGNAL(SIGTERM), "job: SIGTERM: stopping 2 ranks", "SIGTERM to all", "send stop request SIGTERM"),
        step(6, SIGNAL(SIGTERM), "send stop request SIGTERM"),
        step(7, exited(0, -15)),
        step(7, exited(1, -15), "sweep in 0 s"),
    ),
    "a terminal that closes after Ctrl-C does not postpone SIGTERM": (
        *BEGIN,
        step(5, SIGNAL(SIGINT), f"job: {BOTH}", "SIGINT to all", "send stop request SIGINT"),
        step(7, SIGNAL(SIGHUP), "SIGHUP to all", "send stop request SIGHUP"),
        step(8.1, None, "SIGTERM to all"),
    ),
    "SIGTERM soon after Ctrl-C: the ranks get it once": (
        *BEGIN,
        step(5, SIGNAL(SIGINT), f"job: {BOTH}", "SIGINT to all", "send stop request SIGINT"),
        step(6, SIGNAL(SIGTERM), "SIGTERM to all", "send stop request SIGTERM"),
        step(34.9, None),
        step(35.1, None, "sweep in 0 s"),
    ),
    "Ctrl-C, then SIGTERM after the one of ddplaunch: the ranks get it once": (
        *BEGIN,
        step(5, SIGNAL(SIGINT), f"job: {BOTH}", "SIGINT to all", "send stop request SIGINT"),
        step(8.1, None, "SIGTERM to all"),
        step(9, SIGNAL(SIGTERM), "send stop request SIGTERM"),
    ),
    "a command stops the job, and kills it": (
        *BEGIN,
        step(
            5,
            ev.StopCommanded(again=True, reason="`ddplaunch stop` was called"),
            "job: `ddplaunch stop` was called: stopping 2 ranks",
            "SIGINT to all",
            "send stop request SIGINT (`ddplaunch stop` was called)",
            "sweep in 0 s",
            "send stop request SIGINT again (`ddplaunch stop` was called)",
        ),
    ),
    "a rank signals its parent: the job stops, once": (
        *BEGIN,
        step(
            5,
            ev.ZygoteSignalled(SIGQUIT, 1),
            "job: rank 1 sent SIGQUIT to its parent process: stopping 2 ranks",
            "SIGQUIT to all",
            "send stop request SIGQUIT (rank 1 sent SIGQUIT to its parent process)",
        ),
        step(6, ev.ZygoteSignalled(SIGTERM, 0)),
    ),
    "a rank signals its parent while the ranks are stopped": (
        *BEGIN,
        step(5, stop(), "SIGTERM to all, but those that fail"),
        step(6, ev.ZygoteSignalled(SIGTERM, 1)),
    ),
    "Ctrl-C while the zygote imports": (
        step(0, start()),
        step(1, SIGNAL(SIGINT), "send stop request SIGINT"),
        step(1, stop(SIGINT), "CloseZygote", "send report 0: 0 stopped"),
        step(1, end(130), "end with 130"),
    ),
    "the job ends while the zygote imports": (
        step(0, start()),
        step(1, end(75), "CloseZygote", "end with 75"),
    ),
    "node 0 ends the job while ranks run": (
        *BEGIN,
        step(5, end(137), "sweep in 0 s"),
        step(5, SIGNAL(SIGINT), "sweep in 0 s", "send stop request SIGINT"),
        step(6, ev.ProcessesSwept(), "end with 137"),
    ),
    "the zygote is lost while it imports": (
        step(0, start()),
        step(1, ev.ZygoteLost(LOST), f"send report 0: 0 stopped, {LOST}"),
    ),
    "the zygote is lost while ranks run": (
        *BEGIN,
        step(5, ev.ZygoteLost(LOST), f"send report 0: 2 stopped, {LOST}"),
    ),
    "the zygote is lost while ranks are stopped": (
        *BEGIN,
        step(5, stop(), "SIGTERM to all, but those that fail"),
        step(6, ev.ZygoteLost("it was ended by SIGKILL"), "send report 0: 2 stopped, it was ended by SIGKILL"),
        step(99, None),
    ),
    "the zygote is lost while it sweeps": (
        *BEGIN,
        step(5, exited(0)),
        step(5, exited(1), "send RanksFinished", "sweep in 5 s"),
        step(6, ev.ZygoteLost("it was ended by SIGKILL"), "send report 0: 0 stopped, it was ended by SIGKILL"),
    ),
    "the zygote is lost between attempts: the next one has another": (
        *BEGIN,
        step(5, exited(0, 1), "send failure of 0: 1"),
        step(5, exited(1, 1), "send failure of 1: 1", "sweep in 0 s"),
        step(5, ev.ProcessesSwept(), "send report 0: last line of 0, last line of 1, 0 stopped"),
        step(6, ev.ZygoteLost("it was ended by SIGKILL")),
        step(7, start(1)),
        step(8, started(), "spawn 0", "spawn 1"),
    ),
    "a restart: the zygote is ready, and the end of a rank of the earlier attempt is ignored": (
        *BEGIN,
        step(5, exited(0, 1), "send failure of 0: 1"),
        step(5, stop(grace_s=0), "sweep in 0 s"),
        step(
            6,
            ev.ProcessesSwept((), ("1 (pid 101)",)),
            "show: not waiting for processes that cannot be killed: 1 (pid 101)",
            "send report 0: last line of 0, 1 stopped",
        ),
        step(7, start(1), "spawn 0", "spawn 1"),
        step(7, spawned(0, 1), "send RanksStarted"),
        step(7, spawned(1, 1)),
        step(8, exited(1, -9, 0)),
        step(8, stop(attempt=0)),
        step(9, exited(1, 0, 1)),
        step(9, exited(0, 0, 1), "send RanksFinished", "sweep in 5 s"),
        step(9, ev.ProcessesSwept(), "send report 1: 0 stopped"),
    ),
    "a rank cannot be started": (
        step(0, start()),
        step(1, started(), "spawn 0", "spawn 1"),
        step(1, spawned(0), "send RanksStarted"),
        step(
            1,
            ev.SpawnFailed(1, 11, "too many processes"),
            "send failure of 1: rank 1 could not be started: too many processes; 1 of 2 ranks had been started here",
        ),
        step(1, stop(), "SIGTERM to all, but those that fail"),
        step(2, exited(0, -15), "sweep in 0 s"),
        step(2, ev.ProcessesSwept(), "send report 0: last line of 1, 1 stopped"),
    ),
    "a rank that starts while the others are killed has not failed": (
        step(0, start()),
        step(1, started(), "spawn 0", "spawn 1"),
        step(1, spawned(0), "send RanksStarted"),
        step(2, exited(0, 3), "send failure of 0: 3"),
        step(2, stop(grace_s=0), "sweep in 0 s"),
        step(2, spawned(1), "SIGTERM to 1"),
        step(2, exited(1, -9)),
        step(2, ev.ProcessesSwept(), "send report 0: last line of 0, 1 stopped"),
    ),
    "no rank can be started: only the first is reported": (
        step(0, start()),
        step(1, started(), "spawn 0", "spawn 1"),
        step(
            1,
            ev.SpawnFailed(0, 11, "too many processes"),
            "send failure of 0: rank 0 could not be started: too many processes; 0 of 2 ranks had been started here",
        ),
        step(1, ev.SpawnFailed(1, 11, "too many processes"), "sweep in 0 s"),
    ),
    "the module that the zygote imports is broken": (
        step(0, start()),
        step(1, ev.StartFailed("cannot import x"), "send start error: cannot import x"),
        step(1, end(2), "CloseZygote", "end with 2"),
    ),
    "the store's process ends": (
        *BEGIN,
        step(5, ev.StoreExited(7, -9), "sweep in 0 s"),
        step(5, ev.ProcessesSwept(), f"send report 0: 2 stopped, {STORE}"),
        step(6, ev.StoreExited(7, 0), "show: the store (pid 7) exited with code 0"),
    ),
    "a signal for ranks: node 0 decides, each gets it once": (
        *BEGIN,
        step(5, ev.ForwardableSignalArrived(SIGUSR2)),
        step(6.1, None, "send forward request SIGUSR2"),
        step(7, ev.MessageReceived(0, messages.ForwardSignal(SIGUSR2))),
        step(7, None, "forward SIGUSR2 to handlers"),
    ),
    "a signal that the ranks have got too is not forwarded, the next one is": (
        *BEGIN,
        step(5, ev.ForwardableSignalArrived(SIGUSR2)),
        step(5.1, ev.ZygoteSignalled(SIGUSR2)),
        step(6.1, None, "send forward request SIGUSR2 sent to group"),
        step(6.2, ev.MessageReceived(0, messages.ForwardSignal(SIGUSR2, sent_to_group=True))),
        step(9, ev.MessageReceived(0, messages.ForwardSignal(SIGUSR2))),
        step(9, None, "forward SIGUSR2 to handlers"),
    ),
    "a signal that this node's ranks get a little later than those of the others is not forwarded": (
        *BEGIN,
        step(5, ev.MessageReceived(0, messages.ForwardSignal(SIGUSR2, sent_to_group=True))),
        step(5.2, ev.ZygoteSignalled(SIGUSR2)),
        step(9, None),
        step(9, ev.MessageReceived(0, messages.ForwardSignal(SIGUSR2, sent_to_group=True))),
        step(20, None, "forward SIGUSR2 to handlers"),
    ),
    "Ctrl-\\ inspects, a second press stops": (
        *BEGIN,
        step(5, SIGNAL(SIGQUIT, from_terminal=True), "InspectRanks"),
        step(9, SIGNAL(SIGQUIT, from_terminal=True), "InspectRanks"),
        step(
            10,
            SIGNAL(SIGQUIT, from_terminal=True),
            "job: SIGQUIT: stopping 2 ranks",
            "SIGQUIT to all",
            "send stop request SIGQUIT",
        ),
    ),
    "Ctrl-C in a terminal": (
        *BEGIN,
        step(
            5,
            SIGNAL(SIGINT, from_terminal=True),
            "job: stopping 2 ranks; Ctrl-C again kills them now",
            "SIGINT to all",
            "send stop request SIGINT",
        ),
    ),
    "SIGQUIT without a terminal stops at once": (
        *BEGIN,
        step(5, SIGNAL(SIGQUIT), "job: SIGQUIT: stopping 2 ranks", "SIGQUIT to all", "send stop request SIGQUIT"),
    ),
    "Ctrl-Z": (*BEGIN, step(5, SIGNAL(SIGTSTP), "SuspendJob")),
    "a signal after the end": (
        *BEGIN,
        step(5, exited(0)),
        step(5, exited(1), "send RanksFinished", "sweep in 5 s"),
        step(5, ev.ProcessesSwept(), "send report 0: 0 stopped"),
        step(5, end(), "end with 0"),
        step(6, ev.StopCommanded()),
        step(6, SIGNAL(SIGTERM), "wait 2 s more"),
        step(7, SIGNAL(SIGINT), "wait 0 s more"),
    ),
    "waiting for node 0": (
        step(0, ev.MessageReceived(0, messages.ConnectingToNodeZero("refused")), "show: waiting for node 0: refused"),
        step(1, ev.MessageReceived(0, messages.JoinAccepted("id", 15.0)), "OpenLog"),
        step(1, ev.MessageReceived(0, messages.JoinStatus(1, 2, 2, (1,))), "job: 1/2 nodes joined, waiting for node 1"),
        step(2, ev.MessageReceived(0, messages.CoordinatorLost()), "ShowJobMessages"),
        step(2, end(69), "end with 69"),
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name):
    World().replay(HISTORIES[name])


PREEMPTED = (
    *BEGIN,
    step(5, SIGNAL(SIGUSR1), "send preemption notice SIGUSR1"),
    step(5, preempt(), "CreatePreemptionFile or report"),
    step(6.1, None, "note handlers", "forward SIGUSR1 to handlers"),
)

OTHER_WORLDS: dict[str, tuple[Any, ...]] = {
    "a log that cannot be opened ends the job without ranks": (
        {"log_fails": True},
        step(0, ev.MessageReceived(0, messages.JoinAccepted("id", 15.0)), "OpenLog", "send start error: no space left"),
        step(1, start(), "send report 0: 0 stopped"),  # else the node waits for its end if node 0 is lost now
        step(2, end(2), "end with 2"),
    ),
    "node 0 may inspect the ranks before a node stops them": (
        {"inspects_before_stop": True},
        *BEGIN,
        step(5, SIGNAL(SIGINT), f"job: {BOTH}", "send stop request SIGINT"),
        step(6.4, None),
        step(6.6, None, "SIGINT to all"),
        step(6.7, stop(SIGINT)),
        step(7, SIGNAL(SIGTERM), "SIGTERM to all", "send stop request SIGTERM"),
    ),
    "node 0 may be out of reach": (
        {"inspects_before_stop": True},
        *BEGIN,
        step(5, SIGNAL(SIGTERM), "job: SIGTERM: stopping 2 ranks", "send stop request SIGTERM"),
        step(6, SIGNAL(SIGTERM), "send stop request SIGTERM"),
        step(6.2, ev.ZygoteSignalled(SIGINT, 1)),
        step(6.6, None, "SIGTERM to all"),
    ),
    "Ctrl-C before any rank is spawned is no success": (
        {"inspects_before_stop": True, "unsent": {0, 1}},
        step(0, start()),
        step(0, started(), "spawn 0", "spawn 1"),
        step(5, SIGNAL(SIGINT), f"job: {BOTH}", "send stop request SIGINT", "sweep in 0 s"),
        step(7, ev.ProcessesSwept(), "send report 0: 0 stopped"),
    ),
    "output that never closes is waited for a second": (
        {"output_open": True},
        *BEGIN,
        step(5, exited(0)),
        step(5, exited(1), "send RanksFinished", "sweep in 5 s"),
        step(6, ev.ProcessesSwept()),
        step(6.9, None),
        step(7.1, None, "send report 0: 0 stopped"),
        step(7.2, ev.OutputDrained()),
    ),
    "a rank that could not be killed ends while the output is read": (
        {"output_open": True},
        *BEGIN,
        step(5, stop(grace_s=0), "sweep in 0 s"),
        step(
            6,
            ev.ProcessesSwept((), ("1 (pid 101)",)),
            "show: not waiting for processes that cannot be killed: 1 (pid 101)",
        ),
        step(6.5, exited(1, -9)),
        step(7.1, None, "send report 0: 2 stopped"),
    ),
    "a zygote that is lost while the output is read is replaced": (
        {"output_open": True},
        *BEGIN,
        step(5, exited(0, 3), "send failure of 0: 3"),
        step(5, stop(grace_s=0), "sweep in 0 s"),
        step(5, ev.ProcessesSwept()),
        step(5.1, ev.ZygoteLost(LOST)),
        step(5.2, ev.OutputDrained(), "send report 0: last line of 0, 1 stopped"),
        step(6, start(1)),
        step(7, started(), "spawn 0", "spawn 1"),
    ),
    "leftover processes have no longer grace than ranks": (
        {"grace_s": 1},
        *BEGIN,
        step(5, exited(0)),
        step(5, exited(1), "send RanksFinished", "sweep in 1 s"),
    ),
    # The zygote was suspended, so the launcher killed it, and the ranks with it.
    "an exception is reported although the zygote did not report the end": (
        {"recorded": {1: "ValueError: x"}},
        *BEGIN,
        step(5, stop(grace_s=1), "SIGTERM to all, but those that fail"),
        step(6, None, "sweep in 0 s"),
        step(12, None, "KillZygote", "send failure of 1: ValueError: x", "send report 0: last line of 1, 1 stopped"),
    ),
    "a preemption that the ranks have seen": (
        {"preempt_signal": SIGUSR1},
        *PREEMPTED,
        step(9, exited(0, 75)),
        step(9, exited(1, 75), "send RanksFinished", "sweep in 5 s"),
        step(9, ev.ProcessesSwept(), "send report 0: 0 stopped preemption seen"),
        step(9, end(75), "end with 75"),
    ),
    "ranks that finish after the notice need no requeue": (
        {"preempt_signal": SIGUSR1},
        *PREEMPTED,
        step(9, exited(0)),
        step(9, exited(1), "send RanksFinished", "sweep in 5 s"),
        step(9, ev.ProcessesSwept(), "send report 0: 0 stopped"),
    ),
    "a notice before the first rank is there when ranks start": (
        {"preempt_signal": SIGUSR1},
        step(0, start()),
        step(1, SIGNAL(SIGUSR1), "send preemption notice SIGUSR1"),
        step(1, preempt(), "CreatePreemptionFile"),
        step(2, started(), "note handlers", "forward SIGUSR1 to handlers", "spawn 0", "spawn 1"),
        step(2, spawned(0), "send RanksStarted", "CreatePreemptionFile"),
    ),
    "the ranks of the next attempt do not get the preemption signal": (
        {"preempt_signal": SIGUSR1},
        *PREEMPTED[:-1],
        step(5.1, stop(grace_s=0), "sweep in 0 s"),
        step(5.1, exited(0, -9)),
        step(5.1, exited(1, -9)),
        step(5.1, ev.ProcessesSwept(), "send report 0: 2 stopped"),
        step(5.1, start(1), "spawn 0", "spawn 1"),
        step(9, None),
    ),
    "a preemption that no rank has seen": (
        {"preempt_signal": SIGUSR1},
        *PREEMPTED,
        step(95, stop(), "SIGTERM to all, but those that fail"),
        step(96, exited(0, -15)),
        step(96, exited(1, -15), "sweep in 0 s"),
        step(96, ev.ProcessesSwept(), "send report 0: 2 stopped"),
    ),
    "a preemption signal that every process got is not sent again": (
        {"preempt_signal": SIGUSR1},
        *PREEMPTED[:-1],
        step(5.1, ev.ZygoteSignalled(SIGUSR1)),
        step(7, None, "note handlers"),
    ),
    "Ctrl-C after the notice stops the ranks": (
        {"preempt_signal": SIGUSR1},
        *PREEMPTED,
        step(7, SIGNAL(SIGUSR1), "send preemption notice SIGUSR1"),
        step(9, SIGNAL(SIGINT), f"job: {BOTH}", "SIGINT to all", "send stop request SIGINT"),
    ),
    "SIGTERM as the notice is one only the first time": (
        {"preempt_signal": SIGTERM, "preempt_forward": SIGUSR2},
        *BEGIN,
        step(5, SIGNAL(SIGTERM), "send preemption notice SIGTERM"),
        step(5, preempt(), "CreatePreemptionFile or report"),
        step(6.1, None, "note handlers", "forward SIGUSR2", "note handlers", "forward SIGTERM to handlers"),
        step(9, SIGNAL(SIGTERM), "job: SIGTERM: stopping 2 ranks", "SIGTERM to all", "send stop request SIGTERM"),
    ),
}
"""What is different in the world, and the steps of the history there."""


@pytest.mark.parametrize("name", OTHER_WORLDS)
def test_history_in_another_world(name):
    different, *steps = OTHER_WORLDS[name]
    World(**different).replay(steps)


def test_an_exception_that_came_before_the_stop_is_a_failure():
    """It counts with code 1: the signal only interrupted its cleanup."""
    world = World(recorded={1: "ValueError: x"})
    world.replay(
        (
            *BEGIN,
            step(5, stop(), "SIGTERM to all, but those that fail"),
            step(6, exited(0, -15)),
            step(6, exited(1, -15), "send failure of 1: ValueError: x", "sweep in 0 s"),
            step(6, ev.ProcessesSwept(), "send report 0: last line of 1, 1 stopped"),
        ),
    )
    assert [(failure.exit_code, failure.signal) for failure in world.machine.attempt.failures] == [(1, None)]


def test_a_rank_that_is_failing_gets_no_stop_signal_before_the_grace_is_over():
    world = World(failing={1})
    world.replay((*BEGIN, step(5, stop(), "SIGTERM to all, but those that fail")))
    assert {rank: live.stop_requested for rank, live in world.machine.attempt.live.items()} == {0: True, 1: False}
    world.replay(
        (
            step(6, exited(1, 7), "send failure of 1: 7"),
            step(7, exited(0, -15), "sweep in 0 s"),
            step(7, ev.ProcessesSwept(), "send report 0: last line of 1, 1 stopped"),
        ),
    )


def test_ranks_are_requested_a_few_at_a_time():
    world = World(range(20))
    world.on(start())
    assert [describe(each) for each in world.on(started())] == [None, *(f"spawn {rank}" for rank in range(8))]
    assert world.machine.attempt.not_spawned == 20
    assert "spawn 8" in map(describe, world.on(spawned(0)))
    assert world.machine.attempt.not_spawned == 19


def test_after_a_rank_that_cannot_be_started_no_other_is():
    """No other is requested even if one that was requested before starts after it."""
    world = World(range(20))
    world.on(start())
    world.on(started())
    shown = []
    for event in (ev.SpawnFailed(0, 11, "too many processes"), spawned(1), spawned(2)):
        shown += filter(None, map(describe, world.on(event)))
    text = "rank 0 could not be started: too many processes; 0 of 20 ranks had been started here"
    assert shown == [f"send failure of 0: {text}", "send RanksStarted"]
    alone = World([5])
    alone.on(start())
    alone.on(started())
    sent = filter(None, map(describe, alone.on(ev.SpawnFailed(5, 11, "too many processes"))))
    assert [*sent] == ["send failure of 5: rank 5 could not be started: too many processes", "sweep in 0 s"]


def test_a_stop_while_ranks_start():
    """Those that are requested get SIGTERM when they have started; the others are not requested."""
    world = World(range(20), unsent={6, 7})
    world.on(start())
    world.on(started())
    world.on(spawned(0))
    world.replay((step(5, stop(), "SIGTERM to all, but those that fail"),))
    for rank in (1, 2, 3, 4, 5, 8):
        assert [describe(each) for each in world.on(spawned(rank))] == [None, f"SIGTERM to {rank}"]
    for rank in (1, 2, 3, 4, 5, 8):
        world.on(exited(rank, -15))
    world.replay(
        (step(6, exited(0, -15), "sweep in 0 s"), step(6, ev.ProcessesSwept(), "send report 0: 7 stopped")),
    )


def test_observers_see_each_event_once_and_in_order():
    world = World()
    done = []
    note = ev.MessageReceived(0, messages.NoteMessage("slow"))
    begin = (note, start(), started(), spawned(0), ev.SpawnFailed(1, 11, "too many processes"), SIGNAL(SIGTERM))
    for event in (*begin, ev.ProcessExited(0, 100, 3, (1 << 30, 2.0, 0.5)), ev.ProcessesSwept(), end()):
        done += world.on(event)
    assert [type(each.event) for each in done if isinstance(each, do.Emit)] == [
        events.NoteAdded,
        events.RankStarted,
        events.RankStartFailed,
        events.SignalReceived,
        events.RankExited,
        events.AttemptSwept,
        events.JobEnded,
    ]
    assert [each.peak_bytes for each in done if isinstance(each, do.ExplainEnd)] == [0, 1 << 30]
    assert is_over(world)
