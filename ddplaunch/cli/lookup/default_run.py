"""The default run of commands without RUN: the newest one started in the current folder; its name is printed."""

from __future__ import annotations

import os

import click

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import join_names
from ddplaunch.cli.lookup.remote_jobs import JobOnOtherHosts, list_remote_jobs
from ddplaunch.cli.lookup.run_index import index_runs
from ddplaunch.cli.target_args import require_current_folder
from ddplaunch.observe.history import history_store


def default_run(*, follow: bool = False) -> str:
    """Return the name of the newest run of this folder; ``follow``: prefer one that still runs.

    Raises:
        JobOnOtherHosts: it runs on other hosts, and its record is there.
        UsageError: there is none; the hint names others.
    """
    folder, known = require_current_folder(), index_runs().jobs
    remote = {job.run_id: job for job in reversed(list_remote_jobs()) if job.cwd == folder}
    changed = {each.name: each.modified_ns / 1e9 for each in history_store.list_folders()}
    began: dict[str, float] = {}
    for name, job in known.items():
        if began and not job and changed.get(name, 0.0) < max(began.values()):
            continue  # it is older, so its record need not be read
        if record := history_store.read_run_head(name):
            if folder in (record.cwd, record.code_version and record.code_version.folder):
                began[name] = record.began
        elif job and _working_dir(job.pid) == folder:  # with --no-history
            began[name] = job.created_at
    began |= {name: job.began for name, job in remote.items()}
    if not began:
        hint = f"name one: {join_names(known)}" if known else "ddplaunch run train.py"
        raise UsageError(f"no running or recorded run was started in {folder}", hint)
    running = [name for name in began if known.get(name) or (name in remote and remote[name].is_running)]
    run = max(running if follow and running else began, key=began.__getitem__)
    click.echo(f"the newest run of this folder: {run}", err=True)
    if run in remote:
        raise JobOnOtherHosts(remote[run])
    return run


def _working_dir(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None
