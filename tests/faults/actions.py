"""What a row of the fault matrix consists of: the actions that bring a job to a moment, and the faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from operator import methodcaller

from tests.faults.rows import Action
from tests.faults.trial import PORT, Trial
from tests.virtual_hosts.host import Host

LISTEN = """if True:
    import socket, sys, time
    sock = socket.create_server(("", int(sys.argv[1])))
    print("ready", flush=True)
    time.sleep(1000)
"""

mark: Action = methodcaller("mark")
"""The fault is now, and not when it began."""

wait_for_ranks: Action = methodcaller("wait_for_ranks")


def in_turn(*actions: Action) -> Action:
    def run_all(trial: Trial) -> None:
        for action in actions:
            action(trial)

    return run_all


def ours(*actions: Action) -> Action:
    """Actions that only ddplaunch has a counterpart of."""
    return lambda trial: in_turn(*actions)(trial) if trial.launcher == "ddplaunch" else None


def wait(seconds: float) -> Action:
    return methodcaller("wait_seconds", seconds)


def wait_for_output(number: int, text: str) -> Action:
    return methodcaller("wait_for_output", number, text)


def wait_for_end(number: int) -> Action:
    return methodcaller("wait_for_end", number)


def begin(node: int, **options: object) -> Action:
    """Start the launcher of a node."""
    return methodcaller("begin", node, **options)


def signal_launcher(node: int, number: int) -> Action:
    return lambda trial: trial.runs[node].signal(number)


def signal_rank(number: int) -> Action:
    return lambda trial: os.kill(trial.rank_pid(3), number)


def order_rank(what: str, rank: int = 3) -> Action:
    return methodcaller("order", rank, what)


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
    trial.order(3, "leave")
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
