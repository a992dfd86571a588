"""``ddplaunch clean``: remove what is kept of runs."""

from __future__ import annotations

import click

from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.job import past, runs
from ddplaunch.words import counted, size


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
def clean(run: str | None) -> None:
    """Remove what is kept of all runs that have ended, or of RUN.

    Log folders of --log-dir stay.
    """
    names = past.names()
    if run is not None:
        if run not in names or past.record(run):  # else it cannot be read
            run = runs.find(run).run
        if runs.known().get(run):
            raise UsageError(f"{run} is still running", f"ddplaunch stop {run}")
        names = [run]
    removed, freed, left = 0, 0, []
    for name in names:
        bytes_of = past.size_of(name)
        if past.remove(name):
            removed, freed = removed + 1, freed + bytes_of
        else:
            left.append(name)
    if run is not None and left:
        raise LaunchError(f"{run} cannot be removed: {past.folder(run)}")
    still = f"; {len(left)} still running" if left else ""
    click.echo(f"removed {counted(removed, 'run')}, {size(freed)}{still}", err=True)
