"""What a row of the fault matrix consists of: the actions that bring a job to a moment, and the faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from tests.faults.rows import Action
from tests.faults.trial import PORT, Trial
from tests.virtual_hosts.host import Host

LISTEN = """if True:
    import socket, sys, time
    sock = socket.create_server(("", int(sys.argv[1])))
    print("ready", flush=True)
    time.sleep(1000)
"""

P = ParamSpec("P")


def action(method: Callable[Concatenate[Trial, P], object]) -> Callable[P, Action]:
    """Return what makes an action of the arguments of a trial's method."""
    return lambda *args, **named: lambda trial: method(trial, *args, **named)


begin = action(Trial.begin)
wait = action(Trial.wait_seconds)
wait_for_output = action(Trial.wait_for_output)
wait_for_end = action(Trial.wait_for_end)
signal_launcher = action(Trial.signal_launcher)
signal_rank = action(Trial.signal_rank)
order_rank = action(Trial.order)
wait_for_ranks = action(Trial.wait_for_ranks)()
mark = action(Trial.mark)()
"""The fault is now, and not when it began."""


def in_turn(*actions: Action) -> Action:
    def run_all(trial: Trial) -> None:
        for action in actions:
            action(trial)

    return run_all


def ours(*actions: Action) -> Action:
    """Actions that only ddplaunch has a counterpart of."""
    return lambda trial: in_turn(*actions)(trial) if trial.launcher == "ddplaunch" else None


def on_host(node: int, what: Callable[[Host], object]) -> Action:
    return lambda trial: what(trial.hosts[node])


def until_noticed(node: int, start: Action, stop: Action) -> Action:
    """Start a fault on a node, and stop it once the other node has ended: its own time runs from there."""

    def fault(trial: Trial) -> None:
        start(trial)
        try:
            trial.wait_for_end(1 - node)
        finally:
            stop(trial)
            trial.mark(node)

    return fault


def leave_grandchild(trial: Trial) -> None:
    trial.order("leave")
    trial.until(lambda: "left a grandchild" in trial.runs[1].stdout(), "the grandchild")
    trial.mark()


def take_port(port: int) -> Action:
    """Another process on node 0 listens there."""

    def take(trial: Trial) -> None:
        holder = trial.hosts[0].start([sys.executable, "-IS", "-c", LISTEN, str(port)], stdout=-1)
        assert holder.stdout is not None
        with holder.stdout as pipe:
            pipe.readline()

    return take


def joining(trial: Trial) -> None:
    """Two of three nodes have joined."""
    for number in (0, 1):
        trial.begin(number, nnodes=3)
    if trial.launcher == "torchrun":
        wanted = ("state", "established", f"( sport = :{PORT} or dport = :{PORT} )")
        return trial.until(lambda: trial.hosts[1].run("ss", "-tnH", *wanted), "a connection")
    for number in (0, 1):
        trial.wait_for_output(number, "2/3 nodes joined")


def starting(trial: Trial) -> None:
    """The job has been started on both nodes, and torch is still being imported."""
    for number in (0, 1):
        trial.begin(number, more=("--log-dir", str(trial.folder / f"logs{number}")))
    if trial.launcher == "torchrun":
        return trial.until(lambda: all(host.find(r"python\S* -u .*program\.py") for host in trial.hosts), "ranks")
    for number in (0, 1):
        trial.until(lambda number=number: list(trial.folder.glob(f"logs{number}/**/plan.json")), "the start")  # type: ignore[misc]


started = in_turn(begin(0), begin(1))
running = in_turn(started, wait_for_ranks)
"""The four ranks are under way."""
