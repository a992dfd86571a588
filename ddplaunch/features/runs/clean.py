"""``ddplaunch clean``: deletes the records of runs."""

from __future__ import annotations

import os
import sys
import time

import click

from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line
from ddplaunch.base.text import format_count, format_size
from ddplaunch.cli.lookup.job_command import RunName
from ddplaunch.cli.lookup.remote_jobs import list_remote_jobs, remove_leftovers
from ddplaunch.cli.lookup.run_index import describe_elsewhere, find_run, index_runs
from ddplaunch.core.option_values import parse_seconds
from ddplaunch.observe.history import history_store
from ddplaunch.system.history_dir import history_dir


@click.command()
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
@click.option("--older-than", metavar="TIME", help="Delete only runs that ended longer ago than this, like 7d or 12h.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and exit.")
def clean(run: str | None, older_than: str | None, yes: bool, dry_run: bool) -> None:
    """Delete the records of all finished runs, or of RUN.

    Without RUN, asks for confirmation unless --older-than or --yes is given, and removes copies of code that ended jobs
    of `submit --code` have left. Log folders of --log-dir are kept.
    """
    if run is not None and older_than is not None:
        raise UsageError(f"--older-than is for all runs, not for {sanitize_line(run, 60)}", "leave one of them out")
    names = history_store.list_runs() if run is None else [_resolve_ended_run(run)]
    oldest = time.time() if older_than is None else _parse_age(older_than)
    if older_than is not None:
        names = [name for name in names if history_store.last_known_moment(name) < oldest]
    running = [name for name in names if history_store.may_be_running(name)] if run is None else []
    names = [name for name in names if name not in running]
    if dry_run:
        lines = [f"{name}  {format_size(history_store.run_size(name))}" for name in names]
        lines += remove_leftovers(oldest, dry_run=True) if run is None else ()
        for line in lines:
            click.echo(line)
        return None if lines else click.echo("nothing to delete", err=True)
    if run is None and older_than is None and not yes and names:
        _confirm_deletion(names)
    removed, freed = 0, 0
    for name in names:
        bytes_of = history_store.run_size(name)
        if history_store.remove_run(name):
            removed, freed = removed + 1, freed + bytes_of
    if run is not None and not removed:
        raise LaunchError(f"{run} cannot be removed: {history_store.run_dir(names[0])}")
    if run is None and older_than is None:
        for job in list_remote_jobs():
            if not job.is_running:
                job.remove_record()
    for line in remove_leftovers(oldest, dry_run=False) if run is None else ():
        click.echo(line, err=True)
    notes = [f"; {len(running)} still running"] if running else []
    if removed < len(names):
        notes.append(f"; {len(names) - removed} cannot be removed from {history_dir()}")
    click.echo(f"removed {format_count(removed, 'run')}, {format_size(freed)}{''.join(notes)}", err=True)


def _resolve_ended_run(run: str) -> str:
    """Return the name of the run that ``run`` names; raise UsageError if it still runs."""
    is_unreadable = run in history_store.list_runs() and not history_store.read_run_record(run)
    if not is_unreadable:  # an unreadable record is found by its exact name only
        run = find_run(run).run
    is_running = run in index_runs().running
    if not is_running and history_store.may_be_running(run):
        if hosts := history_store.hosts_elsewhere(history_store.read_node_records(run)):
            raise UsageError(*describe_elsewhere(run, hosts))
        is_running = True  # on this machine, but its control socket was not found, as with another XDG_RUNTIME_DIR
    if is_running:
        raise UsageError(f"{run} is still running", f"ddplaunch stop {run}")
    return run


def _parse_age(text: str) -> float:
    """Parse a duration; return the moment that long ago."""
    seconds = parse_seconds(text)
    if seconds is None or seconds < 0:
        raise UsageError(f"--older-than {sanitize_line(text, 60)}: expected a time, like 12h or 7d", "--older-than 7d")
    return time.time() - seconds


def _confirm_deletion(names: list[str]) -> None:
    """Ask whether to remove the records of these runs; exit if the user refuses."""
    what = f"the records of {format_count(len(names), 'run')}, {format_size(sum(map(history_store.run_size, names)))}"
    if not (sys.stdin.isatty() and os.isatty(2)):
        raise UsageError(f"this would delete {what}", "confirm with --yes; or --older-than 7d, or name one run")
    if not click.confirm(f"Remove {what}?", err=True):
        raise SystemExit(1)
