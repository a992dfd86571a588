"""The options of ``ddplaunch submit`` in addition to those of ``run``, by heading, with their parsers."""

from __future__ import annotations

import shlex

import click

from ddplaunch.base.text import join_names
from ddplaunch.features.submit import batch_command
from ddplaunch.features.submit.batch_command import (
    CONFIG,
    CPUS,
    JOB_NAME,
    MEMORY,
    NODES,
    SBATCH_ALIASES,
    TIME,
    invalid_value_error,
    option,
    pattern_reader,
)
from ddplaunch.features.submit.grid import read_axes
from ddplaunch.system.schedulers.scheduler_registry import SCHEDULER_TITLES, SUBMIT_COMMANDS

REFUSED_OPTIONS = {
    **{
        name: hint
        for name, hint in batch_command.REFUSED_RUN_OPTIONS.items()
        if name not in ("--exclude", "--remote-python")
    },
    "--env": "export it: a Slurm job inherits the variables of this shell",
    "--token": "set DDPLAUNCH_TOKEN: Slurm passes it on, and it is not written to the script",
    "--json": "--dry-run prints the script",
}
"""Options that a Slurm job cannot have, and what to do instead."""

SCHEDULER_OPTIONS = {"pe": ("sge",), "qsub_args": ("sge", "pbs"), "bsub_args": ("lsf",)}
"""Options that only some schedulers have, by their Python names."""

_RESERVED_SBATCH_OPTIONS = {
    "--ntasks", "--ntasks-per-node", "-n", "--parsable", "--wrap", "--open-mode", "--chdir", "-D",
}  # fmt: skip


def _split(ctx: click.Context, param: click.Parameter, text: str, program: str, example: str) -> list[str]:
    """Split the value of an option that is passed to a program."""
    try:
        words = shlex.split(text)
    except ValueError:
        raise invalid_value_error(ctx, param, text, "unclosed quotation mark") from None
    if not words or not words[0].startswith("-"):
        hint = f"--{program}-arg=--{text if words else example}"
        raise invalid_value_error(ctx, param, text, f"expected an option of {program}", hint)
    return words


def _check_sbatch_args(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    own = {name: option.opts[-1] for options in HEADINGS.values() for option in options for name in option.opts}
    for text in values:
        words = _split(ctx, param, text, "sbatch", "hint=nomultithread")
        name = words[0].partition("=")[0]
        if name in _RESERVED_SBATCH_OPTIONS:
            hint = "ddplaunch requests one task per node, in this folder, and starts the ranks itself: --nproc"
            raise invalid_value_error(ctx, param, text, f"ddplaunch sets {name} itself", hint)
        if name == "--exclusive" and "=" in words[0]:
            continue  # ddplaunch's --exclusive has no value
        if same := own.get(name) or SBATCH_ALIASES.get(name):
            raise invalid_value_error(ctx, param, text, f"ddplaunch has {same} itself", f"use {same}")
    return values


_RESERVED_SRUN_OPTIONS = {
    "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--kill-on-bad-exit", "-K", "--cpus-per-task", "-c",
    "--container-image", "--container-mounts", "--container-workdir",
}  # fmt: skip
"""Options of srun that the batch script sets."""


def _check_srun_args(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for text in values:
        words = _split(ctx, param, text, "srun", "cpu-bind=none")
        for name in (word.partition("=")[0] for word in words):
            if name in _RESERVED_SRUN_OPTIONS:
                raise invalid_value_error(ctx, param, text, f"the script sets {name} itself", "--dry-run shows it")
    return values


_MAIL_TYPES = (
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT",
    "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
)  # fmt: skip


def _parse_mail_types(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    if text is not None and not {word.upper() for word in text.split(",")} <= set(_MAIL_TYPES):
        raise invalid_value_error(ctx, param, text, f"expected a list like END,FAIL, of {', '.join(_MAIL_TYPES)}")
    return text


_DEPENDENCY_PATTERN = (
    r"(after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)(:\d+(_(\d+|\*))?(\+\d+)?)+|singleton"
)
"""One condition of sbatch's --dependency."""


def _choose_scheduler(ctx: click.Context, param: click.Parameter, text: str) -> str:
    if text not in SCHEDULER_TITLES:
        hint = "ddplaunch manifest prints a job for Kubernetes" if text == "kubernetes" else "leave it out for Slurm"
        known = join_names([f"{system} ({name})" for name, system in SCHEDULER_TITLES.items()])
        raise invalid_value_error(ctx, param, text, f"submit is for {known}", hint)
    if text in SUBMIT_COMMANDS:  # from a file: a typed value is handled earlier
        raise invalid_value_error(ctx, param, text, "it has options of its own", f"type it: --scheduler {text}")
    return text


def _parse_exit_codes(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    codes = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(0 < code < 256 for code in codes):
        raise invalid_value_error(ctx, param, text, "expected exit codes from 1 to 255, like 1,69")
    return tuple(codes)


_GPUS = pattern_reader(r"([\w.-]+:)?\d{1,9}", "a number of GPUs like 8, or with a type like a100:8")
_MEMORY_OF_ONE = pattern_reader(r"\d{1,15}[KMGT]?B?", "a size like 50G")

HEADINGS = {
    "Resources": (
        NODES,
        option("--gpus-per-node", "N",
               "Number of GPUs on each node, like 8 or a100:8. --nproc defaults to it.", _GPUS),
        option("--gpus-per-task", "N", "The same as --gpus-per-node.", _GPUS),
        option("--gres", "LIST", "Generic resources on each node, like gpu:a100:8."),
        CPUS,
        option("--mem", "SIZE", "Memory on each node, like 200G; 0 for all.", MEMORY),
        option("--mem-per-gpu", "SIZE", "Memory for each GPU, instead of --mem.", _MEMORY_OF_ONE),
        option("--mem-per-cpu", "SIZE", "Memory for each CPU, instead of --mem.", _MEMORY_OF_ONE),
        TIME,
    ),
    "For Slurm": (
        option("-p --partition", "NAME", "Partition, or a list like a,b for any of them."),
        option("-A --account", "NAME", "Account to charge."),
        option("--qos", "NAME", "Quality of service."),
        option("--constraint", "LIST", "Required features of the nodes."),
        option("--nodelist", "LIST", "Nodes to include, like gpu[1-4]."),
        option("--exclude", "LIST", "Nodes to exclude, like gpu[1-4]."),
        click.Option(["--exclusive"], is_flag=True, help="Allocate whole nodes, not shared with other jobs."),
        option("--reservation", "NAME", "Reservation to use."),
        option("--dependency", "LIST", "Start after other jobs: afterok:4711, afterany:4711:4712, singleton.",
               pattern_reader(rf"({_DEPENDENCY_PATTERN})([,?]({_DEPENDENCY_PATTERN}))*",
                    "conditions like afterok:4711, afterany:4711:4712 or singleton")),
        option("--mail-type", "LIST", "Send mail on these events: BEGIN, END, FAIL, TIME_LIMIT_90, ALL, …",
               _parse_mail_types),
        option("--mail-user", "ADDRESS", "Recipient of the mail.  [default: you]"),
        option("--comment", "TEXT", "Comment, shown by squeue and sacct."),
        option("--array", "LIST",
               "Submit a job for each index, like 0-3.",
               pattern_reader(r"[\d,-]+(:\d+)?(%\d+)?", "a list of indices like 0-3 or 1,5%2")),
        option("--grid", "ARG VALUES",
               "Submit a run for each value of an argument of the program, like '--lr 0.1,0.2'; "
               "of several, for each combination", read_axes, multiple=True),
        click.Option(["--yes"], is_flag=True, help="Submit a --grid of more than 100 runs."),
        JOB_NAME,
        option("--output", "FILE",
               "Log file, with sbatch's patterns.  [default: slurm-%j.out; with --array, slurm-%A_%a.out]",
               path=True),
        option("--error", "FILE",
               "File for stderr.  [default: the log file]", path=True),
        option("--sbatch-arg sbatch_args", "OPTION",
               "Another option for sbatch, like --sbatch-arg=--hint=nomultithread", _check_sbatch_args, multiple=True),
        option("--srun-arg srun_args", "OPTION",
               "Option for srun, like --srun-arg=--cpu-bind=none", _check_srun_args,
               multiple=True),
        CONFIG,
    ),
    "For Grid Engine, PBS and LSF": (
        click.Option(["--scheduler"], metavar="NAME", default="slurm", show_default=True, callback=_choose_scheduler,
                     help="Scheduler: slurm, sge (Grid Engine), pbs, lsf, kubernetes, or local for this machine."),
        option("--pe", "NAME",
               "Parallel environment of Grid Engine, with the same number of slots on each host."),
        option("--qsub-arg qsub_args", "OPTION", "Another option for qsub, like --qsub-arg='-l h_vmem=4G'",
               multiple=True),
        option("--bsub-arg bsub_args", "OPTION", "Another option for bsub, like --bsub-arg='-M 200G'", multiple=True),
    ),
    "From another machine": (
        option("--via", "HOST[:DIR]",
               "Submit on this login node, over SSH, in this folder there.  [default: the home folder]"),
        option("--remote-python", "PATH",
               "With --via: path of Python there.  [default: the path of this Python]"),
    ),
    "Environment of the job": (
        option("--setup", "FILE|CMD", "File to source, or command to run, before the job starts", multiple=True),
        option("--teardown", "FILE|CMD",
               "File to source, or command to run, after the job",
               multiple=True),
        option("--code", "DIR",
               "Copy this folder, without what git ignores, at submission, and run the copy.  [default: none]"),
        option("--container-image", "IMAGE", "Container image to run in, with pyxis."),
        option("--container-mounts", "LIST",
               "Folders to mount in the container: SRC:DST,…", multiple=True),
    ),
    "After the start": (
        option("--requeue", "N",
               "Requeue the job when it is preempted or reaches its time limit, at most N times.",
               pattern_reader(r"\d{1,4}", "a number of times, like 3", int)),
        option("--requeue-on", "CODES",
               "With --requeue: also after these exit codes, like 1,69, without the node whose rank or check failed.",
               _parse_exit_codes),
        click.Option(["--follow/--no-follow"], default=False,
                     help="Follow the log, and exit with the job's exit code."),
    ),
    "Dry run and help": (
        click.Option(["--dry-run"], is_flag=True,
                     help="Print the batch script and the source of each value, and exit."),
    ),
}  # fmt: skip
"""The options by heading in the help."""

COMMON_OPTIONS = (
    "--nodes", "--gpus-per-node", "--cpus-per-task", "--mem", "--time", "--partition", "--account", "--nproc",
    "--array", "--grid", "--output", "--requeue", "--follow", "--dry-run", "--help", "--help-all",
)  # fmt: skip
"""The options in ``--help``."""

_SBATCH_OPTIONS = (
    "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "clusters", "container", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "distribution", "export-file",
    "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus-per-socket", "gres-flags", "hint", "input",
    "kill-on-invalid-dep", "licenses", "mcs-label", "mem-bind", "mincpus", "network", "nodefile", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-socket", "power", "prefer", "priority", "profile", "segment", "signal",
    "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind",
    "tres-per-task", "uid", "wait-all-nodes", "wckey",
)  # fmt: skip
_SBATCH_FLAGS = (
    "contiguous", "get-user-env", "hold", "ignore-pbs", "nice", "no-kill", "no-requeue", "overcommit",
    "oversubscribe", "propagate", "reboot", "spread-job", "use-min-nodes", "wait",
)  # fmt: skip
_SBATCH_LETTERS = {
    "-b": "begin", "-B": "extra-node-info", "-F": "nodefile", "-H": "hold", "-i": "input", "-k": "no-kill",
    "-L": "licenses", "-M": "clusters", "-O": "overcommit", "-s": "oversubscribe", "-S": "core-spec", "-W": "wait",
}  # fmt: skip
"""Options of sbatch(1) that ddplaunch lacks: those with a value; those without, or with "=VALUE"; short names."""


def pass_through_words(words: list[str]) -> str | None:
    """Return the --sbatch-arg for the first of ``words``; None if it is no option of sbatch that ddplaunch lacks."""
    typed, equals, value = words[0].partition("=")
    name = _SBATCH_LETTERS.get(typed, typed.removeprefix("--").replace("_", "-"))
    if typed not in _SBATCH_LETTERS and not typed.startswith("--"):
        return None
    if name in _SBATCH_FLAGS or (name in _SBATCH_OPTIONS and equals):
        return "--sbatch-arg=" + shlex.quote(f"--{name}{equals}{value}")
    if name in _SBATCH_OPTIONS:
        value = words[1] if len(words) > 1 else "VALUE"
        return "--sbatch-arg=" + shlex.quote(f"--{name}={value}")
    return None
