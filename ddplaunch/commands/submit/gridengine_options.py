"""``ddplaunch submit --scheduler sge``: from what was typed, and defaults in files, to a job of Grid Engine."""

from __future__ import annotations

import os

import click

from ddplaunch.commands.submit.script import check_array, check_passed_on, hand_in, hosts_job, refuse, refused
from ddplaunch.errors import UsageError

_BY_HAND = "Grid Engine leaves it to the site; type it as for qsub: --qsub-arg="

REFUSED = {
    **dict.fromkeys(
        ("gpus_per_node", "gpus_per_task", "gres"),
        f"{_BY_HAND}'-l gpu=8', or what `qconf -sc` calls GPUs; --nproc 8 says how many ranks",
    ),
    **dict.fromkeys(("mem", "mem_per_gpu", "mem_per_cpu"), f"{_BY_HAND}'-l h_vmem=4G', for each slot"),
    "account": f"{_BY_HAND}'-P PROJECT'",
    "qos": f"{_BY_HAND}'-p -100', a priority",
    "constraint": f"{_BY_HAND}'-l NAME=VALUE'",
    "nodelist": f"{_BY_HAND}'-l hostname=NAME'",
    "exclude": f"{_BY_HAND}'-l hostname=!NAME'",
    "exclusive": f"{_BY_HAND}'-l exclusive', or what `qconf -sc` calls it",
    "reservation": f"{_BY_HAND}'-ar ID'",
    "dependency": f"{_BY_HAND}'-hold_jid 4711'",
    "mail_type": f"{_BY_HAND}'-m ea'",
    "mail_user": f"{_BY_HAND}'-M ADDRESS'",
    "comment": f"{_BY_HAND}'-ac comment=TEXT'",
    **refused("qsub"),
}
"""Options of a job of Slurm that one of Grid Engine has not, by click's names, and what to type instead."""

_OURS_ALONE = {"-pe", "-S", "-j", "-o", "-e", "-wd", "-cwd", "-V", "-terse", "-sync", "-N", "-q", "-t", "-tc"}


def submit_to_gridengine(ctx: click.Context, target: str) -> int:
    """Print the script, or hand it to qsub; with --follow show the log, and return the job's exit code."""
    from ddplaunch.commands.submit import gridengine

    values = ctx.params
    refuse(ctx, REFUSED)
    hint = "options of ddplaunch submit: --pe, --partition, --job-name, --output"
    check_passed_on("--qsub-arg", values["qsub_args"], "-l h_vmem=4G", _OURS_ALONE, hint)
    if values["pe"] is None:
        hint = "`qconf -spl` lists them; it needs control_slaves TRUE, and as many slots on each host"
        raise UsageError("--scheduler sge needs --pe NAME, a parallel environment", hint)
    check_array(ctx)
    if values["requeue"] and values["time"] is None:
        what = f"--requeue {values['requeue']} needs --time with --scheduler sge"
        raise UsageError(what, "the job is requeued before that time is up; Grid Engine preempts by suspending it")
    name = _name(values["job_name"] or os.path.basename(target))
    job = hosts_job(ctx, name, "qsub_args")
    return hand_in(
        ctx, target, job, gridengine, gridengine.GridEngine(), shows="qstat -j shows the variables of a job to everyone"
    )


def _name(text: str) -> str:
    """A name that qsub takes: it may not begin with a digit, nor have some characters (sge_types(1))."""
    name = "".join("_" if each in "\n\t\r/:@\\*?" else each for each in text)
    return f"j{name}" if name[:1].isdigit() else name
