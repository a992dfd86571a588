"""``ddplaunch submit --scheduler lsf``: from what was typed, and defaults in files, to a job of LSF."""

from __future__ import annotations

import os
import re

import click

from ddplaunch.commands.submit.script import check_array, check_passed_on, hand_in, hosts_job, refuse, refused
from ddplaunch.errors import UsageError

_BY_HAND = "type it as for bsub: --bsub-arg="

REFUSED = {
    "gpus_per_task": "--gpus-per-node 8 says how many",
    "gres": "--gpus-per-node 8 says how many GPUs",
    **dict.fromkeys(
        ("mem", "mem_per_gpu", "mem_per_cpu"),
        f"each site chooses the unit; {_BY_HAND}'-M 200G', or -R 'rusage[mem=200G]'",
    ),
    "qos": f"{_BY_HAND}'-sp 100', a priority",
    "constraint": f"{_BY_HAND}'-R select[NAME]'",
    "nodelist": f"{_BY_HAND}'-m \"n1 n2\"'",
    "exclude": f"{_BY_HAND}'-R select[hname!=n1]'",
    "reservation": f"{_BY_HAND}'-U NAME'",
    "dependency": f"{_BY_HAND}'-w done(4711)'",
    "mail_type": f"{_BY_HAND}-N",
    "mail_user": f"{_BY_HAND}'-u ADDRESS'",
    "comment": f"{_BY_HAND}'-Jd TEXT'",
    **refused("bsub"),
}
"""Options of a job of Slurm that one of LSF has not, by click's names, and what to type instead."""

_OURS_ALONE = {
    "-J", "-n", "-nnodes", "-gpu", "-x", "-W", "-q", "-P", "-o", "-oo", "-e", "-eo", "-I", "-Is", "-Ip", "-K",
}  # fmt: skip
_OF_REQUEUE = {"-Q", "-wa", "-wt", "-r"}


def submit_to_lsf(ctx: click.Context, target: str) -> int:
    """Print the script, or hand it to bsub; with --follow show the log, and return the job's exit code."""
    from ddplaunch.commands.submit import lsf

    values = ctx.params
    refuse(ctx, REFUSED)
    hint = "options of ddplaunch submit: --nodes, --cpus-per-task, --gpus-per-node, --time, --partition, --output"
    check_passed_on(
        "--bsub-arg",
        values["bsub_args"],
        "-R rusage[mem=4G]",
        _OURS_ALONE | (_OF_REQUEUE if values["requeue"] else set()),
        hint,
    )
    for text in values["bsub_args"]:
        if "span[" in text:
            raise UsageError(f"--bsub-arg {text}: ddplaunch sets span itself", hint)
    if values["gpus_per_node"] and not values["gpus_per_node"].isdecimal():
        what = f"--gpus-per-node {values['gpus_per_node']}: here it is a number"
        raise UsageError(what, "--gpus-per-node 8, and --partition NAME if a queue has that type")
    check_array(ctx, lists=True)
    if values["spares"] and not any(text.startswith("-app") for text in values["bsub_args"]):
        hint = "name one: --bsub-arg='-app PROFILE'; without it LSF ends a job that has lost a host"
        what = "--spares needs an application profile of the site, with DJOB_COMMFAIL_ACTION=IGNORE_COMMFAIL"
        raise UsageError(what, hint)
    output = values["output"]
    if output and (odd := re.search("%(?![JI])", output)):
        hint = "%J is the job's number, %I its index in an array"
        raise UsageError(f"--output {output}: {odd[0]} is not a pattern here", hint)
    name = re.sub(r"[^A-Za-z0-9+_.-]", "_", values["job_name"] or os.path.basename(target))
    job = hosts_job(ctx, name, "bsub_args")
    return hand_in(
        ctx,
        target,
        job,
        lsf,
        lsf.Lsf(),
        shows="bjobs -env shows the variables of a job to you, and at some sites to everyone",
    )
