"""``ddplaunch submit --scheduler pbs``: from what was typed, and defaults in files, to a job of PBS."""

from __future__ import annotations

import os
import re

import click

from ddplaunch.commands.submit.script import check_array, check_passed_on, hand_in, hosts_job, refuse, refused
from ddplaunch.errors import UsageError

_BY_HAND = "type it as for qsub: --qsub-arg="

REFUSED = {
    "gpus_per_task": "--gpus-per-node 8 says how many",
    "gres": "--gpus-per-node 8 says how many GPUs",
    **dict.fromkeys(("mem_per_gpu", "mem_per_cpu"), "--mem 200G is that of a node"),
    "qos": f"{_BY_HAND}'-p -100', a priority",
    **dict.fromkeys(
        ("constraint", "nodelist", "exclude"), "PBS has no such option; a queue may have the nodes: --partition NAME"
    ),
    "reservation": "a reservation of PBS is a queue: --partition R123",
    "dependency": f"{_BY_HAND}'-W depend=afterok:4711'",
    "mail_type": f"{_BY_HAND}'-m ae'",
    "mail_user": f"{_BY_HAND}'-M ADDRESS'",
    "comment": "--job-name NAME is shown",
    "requeue": "PBS itself starts a preempted job again; at a time limit only its operators may (qrerun)",
    **refused("qsub"),
}
"""Options of a job of Slurm that one of PBS has not, by click's names, and what to type instead."""

_OURS_ALONE = {"-S", "-j", "-k", "-o", "-e", "-V", "-N", "-q", "-J", "-A", "-I", "-X", "-z"}
_OF_THE_LIST = re.compile(r"-l(?:.*[\s,])?(select|place|walltime|nodes|ncpus|ngpus)=")


def submit_to_pbs(ctx: click.Context, target: str) -> int:
    """Print the script, or hand it to qsub; with --follow show the log, and return the job's exit code."""
    from ddplaunch.commands.submit import pbs

    values = ctx.params
    refuse(ctx, REFUSED)
    hint = "options of ddplaunch submit: --partition, --account, --job-name, --output"
    check_passed_on("--qsub-arg", values["qsub_args"], "-P PROJECT", _OURS_ALONE, hint)
    for text in values["qsub_args"]:
        if found := _OF_THE_LIST.match(text):
            hint = "options of ddplaunch submit: --nodes, --cpus-per-task, --gpus-per-node, --exclusive, --time"
            raise UsageError(f"--qsub-arg {text}: ddplaunch sets {found[1]} itself", hint)
    if values["gpus_per_node"] and not values["gpus_per_node"].isdecimal():
        what = f"--gpus-per-node {values['gpus_per_node']}: PBS does not distinguish types of GPUs"
        raise UsageError(what, "--gpus-per-node 8, and --partition NAME if a queue has that type")
    if values["mem"] and not re.search("[1-9]", values["mem"]):
        raise UsageError("--mem 0 does not work with --scheduler pbs", "--mem 200G, or --exclusive for whole nodes")
    check_array(ctx, first=0, alone=False)
    output = values["output"]
    if output and (odd := re.search("[:$%]", output)):
        what = f"--output {output}: PBS has no patterns, and reads a colon as a host's name"
        raise UsageError(what, f"leave {odd[0]} out; without --output the log is NAME.oNUMBER")
    if output and values["array"] and pbs.EACH not in output:
        raise UsageError(
            f"--output {output}: each job of an array needs a log of its own", f"--output DIR/{pbs.EACH}.out"
        )
    name = _name(values["job_name"] or os.path.basename(target))
    job = hosts_job(ctx, name, "qsub_args")
    return hand_in(
        ctx,
        target,
        job,
        pbs,
        pbs.Pbs(),
        shows="qstat -f shows the variables of a job to you, and at some sites to everyone",
    )


def _name(text: str) -> str:
    """A name that qsub takes: letters, digits and +-_. of at most 230, with a letter or digit first."""
    name = re.sub(r"[^A-Za-z0-9+_.-]", "_", text)[:230]
    return name if name[:1].isalnum() else f"j{name}"
