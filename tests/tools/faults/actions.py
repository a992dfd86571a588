"""The actions of the fault matrix: they bring a job to a moment, or cause a fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from tests.tools.faults.rows import Action
from tests.tools.faults.trial import PORT, Trial
from tests.tools.virtual_hosts.host import Host

LISTEN = """if True:
    import socket, sys, time
    sock = socket.create_server(("", int(sys.argv[1])))
    print("ready", flush=True)
    time.sleep(1000)
"""

P = ParamSpec("P")


def action(method: Callable[Concatenate[Trial, P], object]) -> Callable[P, Action]:
    """Return a function that makes an action of a trial's method and its arguments."""
    return lambda *args, **named: lambda trial: method(trial, *args, **named)


start = action(Trial.start)
wait = action(Trial.wait_seconds)
wait_for_output = action(Trial.wait_for_output)
wait_for_end = action(Trial.wait_for_end)
signal_launcher = action(Trial.signal_launcher)
signal_rank = action(Trial.signal_rank)
order_rank = action(Trial.order_rank)
wait_for_ranks = action(Trial.wait_for_ranks)()
mark_fault = action(Trial.mark_fault)()
"""Make this the moment of the fault, instead of the start of its action."""


def sequence(*actions: Action) -> Action:
    def run_all(trial: Trial) -> None:
        for action in actions:
            action(trial)

    return run_all


def only_ddplaunch(*actions: Action) -> Action:
    """Actions for ddplaunch only, as torchrun has nothing like it."""
    return lambda trial: sequence(*actions)(trial) if trial.launcher == "ddplaunch" else None


def on_host(node: int, what: Callable[[Host], object]) -> Action:
    return lambda trial: what(trial.hosts[node])


def until_noticed(node: int, start: Action, stop: Action) -> Action:
    """Start a fault on a node, and stop it once the other launcher has ended: the node's own time counts from there."""

    def fault(trial: Trial) -> None:
        start(trial)
        try:
            trial.wait_for_end(1 - node)
        finally:
            stop(trial)
            trial.mark_fault(node)

    return fault


def leave_grandchild(trial: Trial) -> None:
    trial.order_rank("leave")
    trial.wait_until(lambda: "left a grandchild" in trial.runs[1].stdout(), "the grandchild")
    trial.mark_fault()


def take_port(port: int) -> Action:
    """Start another process on node 0 that listens on the port."""

    def take(trial: Trial) -> None:
        holder = trial.hosts[0].start([sys.executable, "-IS", "-c", LISTEN, str(port)], stdout=-1)
        assert holder.stdout is not None
        with holder.stdout as pipe:
            pipe.readline()

    return take


def joining(trial: Trial) -> None:
    """Start two of three nodes, and wait until they have joined."""
    for number in (0, 1):
        trial.start(number, nnodes=3)
    if trial.launcher == "torchrun":
        wanted = ("state", "established", f"( sport = :{PORT} or dport = :{PORT} )")
        return trial.wait_until(lambda: trial.hosts[1].run("ss", "-tnH", *wanted), "a connection")
    for number in (0, 1):
        trial.wait_for_output(number, "2/3 nodes joined")


def starting(trial: Trial) -> None:
    """Start the job on both nodes, and wait until torch is being imported."""
    for number in (0, 1):
        trial.start(number, more=("--log-dir", str(trial.folder / f"logs{number}")))
    if trial.launcher == "torchrun":
        return trial.wait_until(lambda: all(host.find(r"python\S* -u .*program\.py") for host in trial.hosts), "ranks")
    for number in (0, 1):
        trial.wait_until(lambda number=number: list(trial.folder.glob(f"logs{number}/**/plan.json")), "the start")  # type: ignore[misc]


start_both = sequence(start(0), start(1))
running = sequence(start_both, wait_for_ranks)
"""Start the job on both nodes, and wait until its four ranks run."""
