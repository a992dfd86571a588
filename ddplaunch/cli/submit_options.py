"""The options of ``ddplaunch submit`` beside those of ``run``: what each is, how it is read, its heading."""

from __future__ import annotations

import shlex

import click

from ddplaunch.cli import batch_command
from ddplaunch.cli.batch_command import CONFIG, CPUS, JOB_NAME, MEMORY, NODES, OF_SBATCH, TIME, like, option, wrong

REFUSED = {
    **{name: hint for name, hint in batch_command.REFUSED.items() if name != "--exclude"},
    "--env": "export it: a job of Slurm has the variables of this shell",
    "--token": "set DDPLAUNCH_TOKEN: Slurm hands it on, and no script has it",
    "--json": "--dry-run prints the script",
}
"""Options that a job of Slurm cannot have, and what to type instead."""

SCHEDULERS = ("slurm", "sge")

_OURS_ALONE = {"--ntasks", "--ntasks-per-node", "-n", "--parsable", "--wrap", "--open-mode", "--chdir", "-D"}


def _sbatch_args(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    own = {name for options in HEADINGS.values() for option in options for name in option.opts}
    for text in values:
        try:
            words = shlex.split(text)
        except ValueError:
            raise wrong(ctx, param, text, "a quotation mark is missing") from None
        name = words[0].partition("=")[0] if words else ""
        if not name.startswith("-"):
            hint = f"--sbatch-arg=--{text}" if words else "--sbatch-arg=--exclusive"
            raise wrong(ctx, param, text, "expected an option of sbatch", hint)
        if name in _OURS_ALONE:
            hint = "ddplaunch asks for one task a node, in this folder, and starts the ranks itself: --nproc"
            raise wrong(ctx, param, text, f"ddplaunch sets {name} itself", hint)
        if ours := name if name in own else OF_SBATCH.get(name):
            raise wrong(ctx, param, text, f"ddplaunch has {ours} itself", f"use {ours}")
    return values


def _scheduler(ctx: click.Context, param: click.Parameter, text: str) -> str:
    if text not in SCHEDULERS:
        hint = "ddplaunch manifest prints a job for Kubernetes" if text == "kubernetes" else "leave it out for Slurm"
        raise wrong(ctx, param, text, "submit is for Slurm (slurm) and Grid Engine (sge)", hint)
    return text


HEADINGS = {
    "Resources": (
        NODES,
        option(
            "--gpus-per-node",
            "N",
            "GPUs on each node, like 8 or a100:8. Each gets a rank, unless --nproc says otherwise.",
            like(r"([\w.-]+:)?\d{1,9}", "a number of GPUs like 8, or with a type like a100:8"),
        ),
        CPUS,
        option("--mem", "SIZE", "Memory on each node, like 200G; 0 is all.", MEMORY),
        TIME,
    ),
    "For Slurm": (
        option("--partition", "NAME", "Partition to queue in; a list like a,b for either."),
        option("--account", "NAME", "Account to charge."),
        option("--qos", "NAME", "Quality of service."),
        option("--constraint", "LIST", "Features that the nodes must have."),
        option("--nodelist", "LIST", "Nodes that the job must include, like gpu[1-4]."),
        option("--exclude", "LIST", "Nodes that the job must not use, like gpu[1-4]."),
        option(
            "--array",
            "LIST",
            "Submit a job for each index, like 0-3. The program reads SLURM_ARRAY_TASK_ID.",
            like(r"[\d,-]+(:\d+)?(%\d+)?", "a list of indices like 0-3 or 1,5%2"),
        ),
        JOB_NAME,
        option(
            "--output",
            "FILE",
            "Log file, with sbatch's patterns.  [default: slurm-%j.out; with --array, slurm-%A_%a.out]",
            path=True,
        ),
        option(
            "--sbatch-arg sbatch_args",
            "OPTION",
            "Any other option of sbatch, like --sbatch-arg=--exclusive",
            _sbatch_args,
            multiple=True,
        ),
        CONFIG,
    ),
    "For Grid Engine": (
        click.Option(
            ["--scheduler"],
            metavar="NAME",
            default="slurm",
            show_default=True,
            callback=_scheduler,
            help="slurm, or sge for Grid Engine, where --partition names a queue.",
        ),
        option("--pe", "NAME", "Parallel environment, which must give each host the same number of slots."),
        option(
            "--qsub-arg qsub_args", "OPTION", "Any other option of qsub, like --qsub-arg='-l h_vmem=4G'", multiple=True
        ),
    ),
    "Environment of the job": (
        option("--setup", "FILE|CMD", "A file to source, or a command to run, before the job starts", multiple=True),
        option("--container-image", "IMAGE", "Run in this container image; needs pyxis on the nodes."),
        option(
            "--container-mounts",
            "LIST",
            "Folders to mount in the container, SRC:DST,…, beside the current folder",
            multiple=True,
        ),
    ),
    "After the start": (
        option(
            "--requeue",
            "N",
            "When the job is preempted or its time is up: warn it, and start it again, at most N times.",
            like(r"\d{1,4}", "a number of times, like 3", int),
        ),
        click.Option(
            ["--follow/--no-follow"], default=False, help="Show the log as it grows, and end with the job's exit code."
        ),
    ),
    "Dry run and help": (
        click.Option(["--dry-run"], is_flag=True, help="Print the script and the source of each value."),
    ),
}
"""The options under their headings in the help."""

COMMON = (
    "--nodes", "--gpus-per-node", "--cpus-per-task", "--mem", "--time", "--partition", "--account", "--nproc",
    "--array", "--output", "--requeue", "--follow", "--dry-run", "--help", "--help-all",
)  # fmt: skip
"""The options that most people need."""
