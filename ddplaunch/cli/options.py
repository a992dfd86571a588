"""The options of ``ddplaunch run``: their names, how each value is read, and the headings they stand under."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from ddplaunch.control.rules import MIN_HEARTBEAT
from ddplaunch.errors import UsageError
from ddplaunch.plan.numbers import decimal, whole

SECTIONS = {
    "What the target is": ("--module", "--no-python", "--pass-local-rank"),
    "What runs where": ("--nproc", "--gpus", "--oversubscribe", "--virtual-local-rank", "--bind"),
    "Several nodes": (
        "--cluster",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--interface",
        "--run-id",
        "--token",
    ),
    "Over SSH": ("--hosts", "--hostfile", "--include", "--exclude", "--env", "--remote-python"),
    "Hearing of each other": (
        "--control",
        "--control-port",
        "--join-timeout",
        "--heartbeat-timeout",
        "--allow-mismatch",
    ),
    "With more or fewer nodes": ("--join-window", "--max-membership-changes", "--grow"),
    "Starting": ("--backend", "--init-method", "--start", "--preload", "--role"),
    "Stopping and restarting": ("--grace", "--max-restarts", "--restart-backoff", "--min-uptime"),
    "When the machines are wanted back": ("--preempt-signal", "--preempt-grace", "--preempt-forward"),
    "Beside the ranks": ("--tensorboard", "--sidecar"),
    "Output": ("--show", "--stdin", "--log-dir"),
    "Looking first": ("--dry-run", "--json", "--help"),
}
"""The headings of the help, and the options under each."""


def _number(
    kind: type[int] | type[float], noun: str, lowest: float, highest: float, hint: str
) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Read an option's value as a number from ``lowest`` to ``highest``; ``noun`` says what it counts."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        number = whole(text) if kind is int else decimal(text)
        if number is None or not lowest <= number <= highest:
            raise UsageError(f"{param.opts[-1]} {text} is no {noun}", hint)
        return number

    return read


def _nodes(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, int]:
    """Read --nnodes: "4", or "2:4" for any number from 2 to 4."""
    lowest, colon, highest = text.partition(":")
    first, last = whole(lowest), whole(highest if colon else lowest)
    if first is None or last is None:
        raise UsageError(f"--nnodes {text} is no number of nodes", "give one like 2, or a range like 2:4")
    if first > last:
        raise UsageError(f"--nnodes {text}: {lowest} to {highest} is no range", f"--nnodes {highest}:{lowest}")
    if first < 1 and colon:
        raise UsageError(f"--nnodes {text}: a job has at least one node", f"--nnodes 1:{highest}")
    return first, last


def _node_rank(ctx: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    return AUTO if text == AUTO else _whole(ctx, param, text)


def _name(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """Read a name that becomes one of a folder too."""
    import re

    if text is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", text):
        raise UsageError(f"{param.opts[-1]} {text} is no name", "use letters, digits, dots, dashes and underscores")
    return text


AUTO = "auto"
"""The node rank of whoever wants one from node 0."""

WARNINGS = ("USR1", "USR2", "TERM", "HUP", "XCPU")
"""The signals that schedulers warn by: Slurm's and LSF's choice is free, SGE has USR1 and USR2, pods get TERM."""


def _signal(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Read the name of a signal that can be a warning."""
    import signal

    if text is None or (text == "none" and param.name == "preempt_signal"):
        return None
    name = text.upper().removeprefix("SIG")
    if name not in WARNINGS:
        raise UsageError(f"{param.opts[-1]} {text} is no signal to warn by", f"one of {', '.join(WARNINGS)}")
    return signal.Signals[f"SIG{name}"].value


def _commands(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Look at command lines, which only node 0 then uses."""
    if texts:
        from ddplaunch.cli import sidecars

        for text in texts:
            sidecars.split(text)
    return texts


def as_typed(param: click.Option, value: Any) -> Iterator[str]:
    """The words of an option that was typed, from the value that was read."""
    for each in value if param.multiple else (value,):
        yield param.opts[-1]
        if not param.is_flag:
            yield _spelled(param, each)


def _spelled(param: click.Parameter, value: Any) -> str:
    if param.callback is _signal:
        import signal

        return "none" if value is None else signal.Signals(value).name.removeprefix("SIG")
    return f"{value:g}" if isinstance(value, float) else str(value)


_INFINITE = float("inf")
_WEEK = 7 * 24 * 3600.0
_whole = _number(int, "whole number", -_INFINITE, _INFINITE, "give one like 2")
_seconds = _number(float, "number of seconds", 0, _WEEK, "give 0 or more, like 2.5, up to a week")


class Paths(click.Path):
    """Words that may be anything here, and are completed as the names of files or folders."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


_OPTIONS = (
    click.option("-m", "--module", is_flag=True, help="A module, run as `python -m` would."),
    click.option("--no-python", is_flag=True, help="A program, not Python."),
    click.option(
        "--pass-local-rank",
        is_flag=True,
        help="Its first argument is --local-rank=N, or --local_rank=N where its source names only that.",
    ),
    click.option(
        "--nproc",
        metavar="N",
        help="Processes on this node: a number, one for each node like 8,8,4, or auto, gpu or cpu.  "
        "[default: auto, the visible GPUs, or 1]",
    ),
    click.option(
        "--gpus",
        metavar="LIST",
        help="GPUs to use, in this order: indices as `ddplaunch devices` shows them, or UUIDs; none: the CPUs.",
    ),
    click.option("--oversubscribe", is_flag=True, help="Let ranks share GPUs."),
    click.option(
        "--virtual-local-rank",
        is_flag=True,
        help="Each rank has LOCAL_RANK 0 and sees its own GPU alone.",
    ),
    click.option("--bind", type=click.Choice(["numa"]), help="Pin each rank to the CPUs beside its GPU."),
    click.option(
        "--cluster",
        metavar="NAME",
        help="Whose variables say what is not typed here: slurm, openmpi, …, or none.  [default: whoever started us]",
    ),
    click.option(
        "--nnodes",
        metavar="N",
        default="1",
        show_default=True,
        callback=_nodes,
        help="Machines of the job; 2:4 for any number from 2 to 4, as they come and go.",
    ),
    click.option(
        "--node-rank",
        metavar="I",
        callback=_node_rank,
        help="Which of them this is, from 0. Rank 0 is on node 0. With auto that is the one whose address is "
        "--master-addr, and the others are numbered as they join.",
    ),
    click.option("--master-addr", metavar="HOST", help="Node 0's address.  [default: 127.0.0.1 on one node]"),
    click.option(
        "--master-port",
        metavar="PORT",
        callback=_number(int, "port", 0, 65535, "ports go from 1 to 65535; 0 is any free one"),
        help="Where rank 0's store listens.  [default: any free port on one node, 29500 on several]",
    ),
    click.option(
        "--interface",
        metavar="NAME",
        help="The network interface to use, like ib0.  [default: that of the way to node 0]",
    ),
    click.option(
        "--run-id",
        metavar="NAME",
        callback=_name,
        help="Keep jobs apart: nodes join only where it is the same.",
    ),
    click.option(
        "--token",
        metavar="SECRET",
        envvar="DDPLAUNCH_TOKEN",
        help="What nodes must know to join; DDPLAUNCH_TOKEN keeps it out of `ps`.",
    ),
    click.option("--hosts", metavar="A:4,B:4", help="Start the job on these hosts, with so many ranks each."),
    click.option("--hostfile", metavar="FILE", type=Paths(dir_okay=False), help="The same: n1 slots=4, a host a line."),
    click.option("--include", metavar="A@B:0,2", help="Of these hosts only some, or some of their slots."),
    click.option("--exclude", metavar="A@B:0,2", help="Of these hosts not some, or not some of their slots."),
    click.option(
        "--env",
        metavar="NAME[=VALUE]",
        multiple=True,
        help="A variable for the hosts, beside LD_LIBRARY_PATH, PYTHONPATH, NCCL_* and the like; may be repeated.",
    ),
    click.option("--remote-python", metavar="PATH", help="Python on the hosts.  [default: the path of this one]"),
    click.option(
        "--control",
        type=click.Choice(["tcp", "none"]),
        default="tcp",
        show_default=True,
        help="How the nodes hear of each other; none: not at all, each starts its share on its own.",
    ),
    click.option(
        "--control-port",
        metavar="PORT",
        callback=_number(int, "port", 1, 65535, "ports go from 1 to 65535"),
        help="Where node 0 listens for the others.  [default: the master port + 1]",
    ),
    click.option(
        "--join-timeout",
        metavar="SECONDS",
        default="600",
        show_default=True,
        callback=_seconds,
        help="How long to wait for all nodes.",
    ),
    click.option(
        "--heartbeat-timeout",
        metavar="SECONDS",
        default="15",
        show_default=True,
        callback=_number(
            float, "heartbeat timeout", MIN_HEARTBEAT, _WEEK, "give 2 s or more: less, and a busy node counts as lost"
        ),
        help="A node that is silent for so long is lost. Node 0's counts.",
    ),
    click.option("--allow-mismatch", is_flag=True, help="Say where versions differ between nodes, and go on."),
    click.option(
        "--join-window",
        metavar="SECONDS",
        default="30",
        show_default=True,
        callback=_seconds,
        help="With --nnodes 2:4: wait so long for the others once 2 are there.",
    ),
    click.option(
        "--max-membership-changes",
        metavar="N",
        default="100",
        show_default=True,
        callback=_number(int, "number of changes", 0, _INFINITE, "give 0 or more"),
        help="With --nnodes 2:4: go on with other nodes so many times.",
    ),
    click.option(
        "--grow", is_flag=True, help="With --nnodes 2:4: take in a node that comes later at once, by a restart."
    ),
    click.option(
        "--backend", metavar="NAME", help="Initialise the process group before the target runs: nccl, gloo, auto, …"
    ),
    click.option(
        "--init-method", metavar="URL", help="How to: env://, tcp://host:port or file:///path.  [default: env://]"
    ),
    click.option(
        "--start",
        type=click.Choice(["auto", "zygote", "exec"]),
        default="auto",
        show_default=True,
        help="Fork ranks from one process that has imported torch, or start each afresh.",
    ),
    click.option(
        "--preload", metavar="A,B", help="Modules to import before forking, instead of those that seem to pay."
    ),
    click.option("--role", metavar="NAME", default="default", help="ROLE_NAME of the ranks here.  [default: default]"),
    click.option(
        "--grace",
        metavar="SECONDS",
        default="30",
        show_default=True,
        callback=_seconds,
        help="What ranks have between SIGTERM and SIGKILL.",
    ),
    click.option(
        "--max-restarts",
        metavar="N",
        default="0",
        show_default=True,
        callback=_number(int, "number of restarts", 0, _INFINITE, "give 0 or more"),
        help="Start all ranks again after a failure, so many times.",
    ),
    click.option(
        "--restart-backoff",
        metavar="SECONDS",
        default="0",
        show_default=True,
        callback=_seconds,
        help="Wait before a restart, doubled while ranks keep dying early.",
    ),
    click.option(
        "--min-uptime",
        metavar="SECONDS",
        default="5",
        show_default=True,
        callback=_seconds,
        help="Three attempts in a row shorter than this are a crash loop, and the last.",
    ),
    click.option(
        "--preempt-signal",
        metavar="SIGNAL",
        default="USR2",
        show_default=True,
        callback=_signal,
        help="The scheduler's warning; ranks learn of it by ddplaunch.runtime.preempted(). none: it is no warning.",
    ),
    click.option(
        "--preempt-grace",
        metavar="SECONDS",
        default="90",
        show_default=True,
        callback=_seconds,
        help="What ranks have between the warning and SIGTERM.",
    ),
    click.option(
        "--preempt-forward",
        metavar="SIGNAL",
        callback=_signal,
        help="A signal for each rank when the warning comes, for programs that expect one.",
    ),
    click.option(
        "--tensorboard",
        metavar="DIR",
        type=Paths(file_okay=False),
        help="Run TensorBoard on DIR while the job lives, for this machine alone, and print its address.",
    ),
    click.option(
        "--sidecar",
        metavar="COMMAND",
        multiple=True,
        callback=_commands,
        help="Run a program beside rank 0 while the job lives; may be repeated.",
    ),
    click.option(
        "--show",
        metavar="RANKS",
        default="all",
        show_default=True,
        help="Whose output is shown: all, none, ranks like 0,3, or local:0 on every node; 0/err is its stderr alone.",
    ),
    click.option(
        "--stdin",
        metavar="RANK",
        callback=_whole,
        help="The rank that gets our terminal, for pdb. A single rank has it.",
    ),
    click.option(
        "--log-dir",
        metavar="DIR",
        type=Paths(file_okay=False),
        help="Keep a folder of this run in DIR: plan, events, what each rank printed, failure.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan and start nothing."),
    click.option("--json", "as_json", is_flag=True, help="With --dry-run: print it as one JSON object."),
    click.argument("target", type=Paths()),
    click.argument("args", nargs=-1, type=Paths()),
)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them; the help shows them in the order of their sections."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
