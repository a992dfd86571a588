"""Prints the state of a job array, and of each of its jobs."""

from __future__ import annotations

import json

import click
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.lookup.batch_jobs import find_recorded_run
from ddplaunch.cli.lookup.job_arrays import query_array
from ddplaunch.cli.text_table import format_table
from ddplaunch.system.schedulers.scheduler import JobId
from ddplaunch.system.schedulers.submitted_job import SubmittedJob


def print_array(job: SubmittedJob, *, as_json: bool) -> None:
    """Print a summary of an array, and the state of each of its jobs. Raises LaunchError as ``query_array`` does."""
    words, code, states = query_array(job)
    rows = []
    for index, state in states.items():
        number = state.number or JobId(job.number, index=index).text
        run = find_recorded_run(job, replace(state, number=number))
        rows.append((index, state, run, job.log_paths(index)[0] or state.log_path))
    names = dict(zip(states, job.runs, strict=False))
    if as_json:
        jobs = [
            {
                **{"index": int(index), "state": state.description, "code": state.code, "run": run, "log": log},
                **({"name": names[index]} if index in names else {}),
            }
            for index, state, run, log in rows
        ]
        return click.echo(json.dumps({"job": job.number, "state": words, "code": code, "jobs": jobs}, indent=2))
    what = f"grid of {len(names)}" if names else f"array {job.array}"
    click.echo(f"job {job.number}, {what}: {words}")
    cells = [
        (index, *([names[index]] if index in names else []), state.description.removeprefix("is "), log or "-")
        for index, state, _, log in rows
    ]
    for line in format_table(("INDEX", *(["RUN"] if names else []), "STATE", "LOG"), cells):
        click.echo(line)
    return click.echo(f"one of them: ddplaunch report {JobId(job.number, index='INDEX').text}")


def no_page_error(job: SubmittedJob, page: str) -> UsageError:
    """Return the error for ``--html`` or ``--serve`` (``page``) with a whole array."""
    what = f"{page}: job {job.number} is an array of --array {job.array}"
    return UsageError(what, f"name one by its index: ddplaunch report {JobId(job.number, index='INDEX').text}")
