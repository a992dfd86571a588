"""Options of ``submit`` that Slurm would refuse together, refused before anything is submitted."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress

import click

from ddplaunch.cli.options import Source
from ddplaunch.cli.run_command import source_of
from ddplaunch.clusters.nodelist import expand_hosts
from ddplaunch.commands.submit.queue import MEMORY, OVERRIDES
from ddplaunch.commands.submit.slurm import BatchJob
from ddplaunch.errors import UsageError
from ddplaunch.words import named


def memory(ctx: click.Context) -> Mapping[str, str | None]:
    """The value of each option of memory; one that is typed overrules the others of files.

    Raises:
        UsageError: there are several.
    """
    values = {name: ctx.params[name.replace("-", "_")] for name in MEMORY}
    typed = [name for name in MEMORY if source_of(ctx, name.replace("-", "_")) is Source.TYPED]
    given = typed or [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        words = " and ".join(f"--{name} {values[name]}" for name in given)
        raise UsageError(f"{words} exclude each other", f"leave one out: --{given[0]} {values[given[0]]}")
    return {name: value if name in given else None for name, value in values.items()}


def check(job: BatchJob) -> None:
    """Check GPUs, memory and nodes. Raises UsageError if they contradict each other."""
    counts = {
        name: found[1]
        for name, text in (("gpus-per-task", job.gpus_per_task), ("gpus-per-node", job.gpus_per_node))
        if text and (found := re.search(r"(\d+)$", text))
    }
    if job.gres and (found := re.search(r"(?:^|,)(?:gres[:/])?gpu(?::[^,:]+)*?(?::(\d+))?(?:\(|,|$)", job.gres)):
        counts["gres"] = found[1] or "1"
    if "gpus-per-task" in counts and len(set(counts.values())) > 1:
        other = next(name for name in ("gpus-per-node", "gres") if name in counts)
        value = job.gpus_per_node if other == "gpus-per-node" else job.gres
        what = (
            f"--gpus-per-task {job.gpus_per_task} and --{other} {value} differ, but each node has one task, ddplaunch"
        )
        raise UsageError(what, f"--{other} {value} alone; ddplaunch starts a rank for each GPU")
    asked = counts or any("gpu" in words for words in job.sbatch_args)
    if job.mem_per_gpu and not asked and not any(os.environ.get(OVERRIDES[each]) for each in _OF_GPUS):
        raise UsageError(f"--mem-per-gpu {job.mem_per_gpu}: the job asks for no GPU", "add --gpus-per-node 8")
    if job.nodelist and job.exclude:
        both = set[str]()
        with suppress(UsageError):  # a form that we do not know is sbatch's to read
            both = set(expand_hosts(job.nodelist, "--nodelist")) & set(expand_hosts(job.exclude, "--exclude"))
        if both:
            what = f"--nodelist {job.nodelist} and --exclude {job.exclude} both have {named(sorted(both))}"
            raise UsageError(what, "leave these nodes out of one of them")


_OF_GPUS = ("gpus-per-node", "gpus-per-task", "gres")
