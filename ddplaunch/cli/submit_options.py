"""The options of ``ddplaunch submit`` beside those of ``run``: their names, how each is read, their headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import click

from ddplaunch.cli.options import SECTIONS as OF_RUN
from ddplaunch.cli.values import Paths
from ddplaunch.errors import UsageError

_OWN = (
    "Where it goes",
    "What is asked for",
    "What Slurm alone is asked for",
    "What Kubernetes alone is asked for",
    "What the job runs in",
    "Afterwards",
)

SYSTEMS = {"slurm": "Slurm", "kubernetes": "Kubernetes"}
"""What ``--scheduler`` may be, and what people call it."""

INSTEAD = {
    "--nnodes": "--nodes N says how many",
    "--node-rank": "leave it out: {system} numbers the nodes",
    "--master-addr": "leave it out: node 0 is the first of the nodes that {system} gives",
    "--cluster": "leave it out: the job's is {system}",
    "--token": "set DDPLAUNCH_TOKEN: Slurm hands it on, and no script has it",
    "--stdin": "leave it out: a batch job has no terminal",
    "--json": "--dry-run prints the script",
    **dict.fromkeys(
        ("--join-window", "--max-membership-changes", "--grow"),
        "leave it out: the job has the nodes that {system} gives it",
    ),
    **dict.fromkeys(
        ("--hosts", "--hostfile", "--include", "--remote-python"),
        "leave it out: {system} starts the nodes, not SSH",
    ),
}
"""Options of ``run`` that a submitted job cannot have, and what to type instead."""

REPLACED = ("--env", "--exclude")
"""Options of ``run`` that mean something of the scheduler's here."""

_ABOUT_NODES = {
    name: INSTEAD[name].format(system="the scheduler") for name in ("--nnodes", "--node-rank", "--master-addr")
}

OF_TORCHRUN = {
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--local-addr"), _ABOUT_NODES["--master-addr"]),
    "--standalone": _ABOUT_NODES["--nnodes"],
    **_ABOUT_NODES,
}
"""Options of torchrun that it cannot have."""

_BY_LABEL = "--constraint KEY=VALUE chooses nodes by their labels"

_NOT_OF = {
    "slurm": {
        **dict.fromkeys(("--namespace", "--label"), "leave it out, or add --scheduler kubernetes"),
        "--env": "export it: a job of Slurm has the variables of this shell",
    },
    "kubernetes": {
        "--partition": f"{_BY_LABEL}; --label kueue.x-k8s.io/queue-name=NAME names a queue of Kueue",
        "--account": "--namespace NAME says whose it is",
        "--qos": "leave it out, or write a priorityClassName into what is printed",
        "--nodelist": _BY_LABEL,
        "--exclude": _BY_LABEL,
        "--array": "leave it out: submit one job for each",
        "--output": "leave it out: kubectl logs shows what a job prints",
        "--sbatch-arg": "leave it out: what is printed can be changed before kubectl gets it",
        "--setup": "leave it out: what a job needs is in its image",
        "--requeue": "leave it out: a Job starts pods again that were taken away",
        "--follow": "leave it out: nothing is submitted here, and kubectl logs --follow shows what a job prints",
        "--token": "--env DDPLAUNCH_TOKEN=SECRET; whoever may read the job can read it there",
        "--json": "leave it out: YAML is printed",
    },
}

REFUSED = {
    scheduler: {**{name: hint.format(system=system) for name, hint in INSTEAD.items()}, **_NOT_OF[scheduler]}
    for scheduler, system in SYSTEMS.items()
}
"""What makes no sense for a job of each scheduler, and what to type instead."""

SECTIONS: dict[str, Sequence[str]] = {
    "Where it goes": ("--scheduler", "--config"),
    "What is asked for": (
        "--nodes",
        "--gpus-per-node",
        "--cpus-per-task",
        "--mem",
        "--time",
        "--constraint",
        "--job-name",
    ),
    "What Slurm alone is asked for": (
        "--partition",
        "--account",
        "--qos",
        "--nodelist",
        "--exclude",
        "--array",
        "--output",
        "--sbatch-arg",
    ),
    "What Kubernetes alone is asked for": ("--namespace", "--label", "--env"),
    "What the job runs in": ("--setup", "--container-image", "--container-mounts"),
    "Afterwards": ("--requeue", "--follow"),
    **{heading: [name for name in names if name not in {*REPLACED, *INSTEAD}] for heading, names in OF_RUN.items()},
}
"""The headings of the help; those of ``run``'s options come last."""

NAMES = frozenset({"--no-follow", *(name for heading in _OWN for name in SECTIONS[heading])})
"""What these options are called."""

OF_SBATCH = {
    "-A": "--account",
    "-a": "--array",
    "-C": "--constraint",
    "-c": "--cpus-per-task",
    "-J": "--job-name",
    "-N": "--nodes",
    "--num-nodes": "--nodes",
    "-n": "--nproc",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
    "-w": "--nodelist",
    "-x": "--exclude",
    "--ntasks": "--nproc",
    "--ntasks-per-node": "--nproc",
}
"""What sbatch and others call an option of ours."""

_OURS_ALONE = {"--ntasks", "--ntasks-per-node", "-n", "--parsable", "--wrap", "--open-mode", "--chdir", "-D"}

_TIME = r"\d{1,9}(:\d\d?){0,2}|\d{1,9}-\d\d?(:\d\d?){0,2}|UNLIMITED|INFINITE"
"""The forms of sbatch's --time: 90, 90:00, 4:00:00, 1-12, 1-12:30, 1-12:30:00."""


def seconds(time: str) -> int | None:
    """What a value of --time is; None for no limit, which 0 is too (sbatch(1))."""
    if not time[0].isdigit():
        return None
    days, dash, rest = time.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if dash or len(numbers) == 3:  # [days-]hours[:minutes[:seconds]]
        hours, minutes, secs = [*numbers, 0, 0][:3]
    else:  # minutes[:seconds]
        hours, minutes, secs = [0, *numbers, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs or None


_Reader = Callable[[click.Context, click.Parameter, Any], Any]


def _like(pattern: str, noun: str, hint: str, kind: Callable[[str], Any] = str) -> _Reader:
    """Read a value of this pattern."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        if not re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII):
            raise UsageError(f"{param.opts[-1]} {text} is no {noun}{where(ctx, param)}", hint)
        return kind(text)

    return read


def where(ctx: click.Context, param: click.Parameter) -> str:
    """The file that a value comes from, for an error."""
    default = ctx.meta.get("defaults", {}).get(param.name)
    source = ctx.get_parameter_source(param.name or "")
    return f" ({default.file})" if default and source is not None and source.name == "DEFAULT_MAP" else ""


def _sbatch_args(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for text in values:
        try:
            words = shlex.split(text)
        except ValueError:
            raise UsageError(f"--sbatch-arg {text}: a quotation is not closed{where(ctx, param)}") from None
        name = words[0].partition("=")[0] if words else ""
        if not name.startswith("-"):
            raise UsageError(
                f"--sbatch-arg {text}: no option of sbatch{where(ctx, param)}",
                f"--sbatch-arg=--{text}" if words else "--sbatch-arg=--exclusive",
            )
        if name in _OURS_ALONE:
            raise UsageError(
                f"--sbatch-arg {text}: {name} is for ddplaunch to say{where(ctx, param)}",
                "it asks for one task a node, in this folder, and starts the ranks itself: --nproc",
            )
        if own := name if name in NAMES else OF_SBATCH.get(name):
            raise UsageError(f"--sbatch-arg {text}: ddplaunch has {own} itself{where(ctx, param)}", f"give {own}")
    return values


def _text(name: str, help: str, metavar: str = "NAME") -> Callable[..., Any]:
    return click.option(name, metavar=metavar, help=help)


_OPTIONS = (
    click.option(
        "--scheduler",
        type=click.Choice(list(SYSTEMS)),
        default="slurm",
        show_default=True,
        help="Slurm gets a batch script; for Kubernetes a manifest is printed, to pipe into kubectl apply -f -.",
    ),
    click.option(
        "--config",
        metavar="FILE",
        type=Paths(dir_okay=False),
        help="Read defaults from this file instead of the nearest pyproject.toml; none reads no file.",
    ),
    click.option(
        "--nodes",
        metavar="N",
        default="1",
        show_default=True,
        callback=_like(r"[1-9]\d{0,5}", "number of nodes", "give one like 2", int),
        help="Machines of the job.",
    ),
    click.option(
        "--gpus-per-node",
        metavar="N",
        callback=_like(r"([\w.-]+:)?\d{1,9}", "number of GPUs", "give one like 8, or with a type like a100:8"),
        help="GPUs on each, like 8, or a100:8 in Slurm; a rank for each, unless --nproc says otherwise.",
    ),
    click.option(
        "--cpus-per-task",
        metavar="N",
        callback=_like(r"[1-9]\d{0,8}", "number of CPUs", "give one like 64: all that a node's ranks share", int),
        help="CPUs on each node, for all of its ranks.",
    ),
    click.option(
        "--mem",
        metavar="SIZE",
        callback=_like(r"\d{1,15}[KMGT]?B?", "size of memory", "give one like 200G; 0 is all of the node's"),
        help="Memory on each node, like 200G; 0 is all.",
    ),
    click.option(
        "--time",
        metavar="TIME",
        callback=_like(_TIME, "time", "give minutes, hours:minutes:seconds or days-hours, like 4:00:00"),
        help="The limit: minutes, 4:00:00, or 1-12 for a day and a half.",
    ),
    _text("--partition", "Where to queue; a list like a,b for either."),
    _text("--account", "Who pays."),
    _text("--qos", "Quality of service."),
    _text("--constraint", "Features that the nodes must have; in Kubernetes labels, KEY=VALUE,…", "LIST"),
    _text("--nodelist", "Nodes that must be among them, like gpu[1-4].", "LIST"),
    _text("--exclude", "Nodes that must not be among them, like gpu[1-4].", "LIST"),
    click.option(
        "--array",
        metavar="LIST",
        callback=_like(r"[\d,-]+(:\d+)?(%\d+)?", "list of indices", "give one like 0-3 or 1,5%2"),
        help="A job for each index, like 0-3; SLURM_ARRAY_TASK_ID tells the program.",
    ),
    _text("--job-name", "What queues show.  [default: the target]"),
    click.option(
        "--output",
        metavar="FILE",
        type=Paths(dir_okay=False),
        help="The log, with sbatch's patterns.  [default: slurm-%j.out; of an array, slurm-%A_%a.out]",
    ),
    click.option(
        "--sbatch-arg",
        "sbatch_args",
        metavar="OPTION",
        multiple=True,
        callback=_sbatch_args,
        help="Any other option, like --sbatch-arg=--exclusive; may be given again.",
    ),
    _text("--namespace", "Where the job's name is looked for.  [default: kubectl's]"),
    click.option(
        "--label",
        "labels",
        metavar="KEY=VALUE",
        multiple=True,
        help="A label of the job and its pods; may be given again.",
    ),
    click.option(
        "--env",
        metavar="NAME[=VALUE]",
        multiple=True,
        help="A variable of the pods, by itself with the value that it has here; may be given again.",
    ),
    click.option(
        "--setup",
        metavar="FILE|CMD",
        multiple=True,
        help="A file to source, or a command, before the job starts; may be given again.",
    ),
    click.option(
        "--container-image",
        metavar="IMAGE",
        help="Run in a container: in Slurm where the site has pyxis, in Kubernetes always.",
    ),
    click.option(
        "--container-mounts",
        metavar="LIST",
        multiple=True,
        help="SRC:DST,… to mount there, in Slurm beside this folder; in Kubernetes SRC is a folder of the machine, "
        "or names a PersistentVolumeClaim; may be given again.",
    ),
    click.option(
        "--requeue",
        metavar="N",
        callback=_like(r"\d{1,4}", "number of times", "give one like 3: how often the job may go on", int),
        help="In Slurm: when the job must make room or its time is up: warn it, and start it again, so many times.",
    ),
    click.option(
        "--follow/--no-follow",
        default=False,
        help="In Slurm: show the log as it grows, and end with the job's exit code.",
    ),
)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
