"""``ddplaunch ps``: this user's jobs on this machine, and those that have ended lately."""

from __future__ import annotations

import click


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Show all runs that are kept, not only the latest.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array with stable field names.")
def ps(show_all: bool, as_json: bool) -> None:
    """Show your jobs: those that run on this machine, those that you have submitted, and those that ended lately.

    COLLECTIVES/S is how fast a job moves: what its lowest rank here completed in its default process group within a
    tenth of a second. Runs that have ended are kept in your home; `run --no-history` keeps none.
    """
    import itertools
    import json
    import time

    from ddplaunch.job.glance import begin
    from ddplaunch.job.runs import known

    runs = known()
    looked = begin({run: job for run, job in runs.items() if job})
    from ddplaunch.commands.runs.jobs import LATELY, RECENT, standings
    from ddplaunch.commands.runs.table import ended_json, render, running_json, submitted_json
    from ddplaunch.console import colour_wanted
    from ddplaunch.job import past
    from ddplaunch.job.record import Fate

    now = time.time()
    kept = filter(None, (past.record(run) for run, job in runs.items() if not job))
    over = (each for each in kept if each.fate is not Fate.RUNNING)
    lately = (each for each in over if show_all or now - (each.ended or each.began) < LATELY)
    ended = list(itertools.islice(lately, None if show_all else RECENT))
    jobs = standings(now, everything=show_all)
    running = looked()
    if as_json:
        found = [*map(running_json, running), *map(submitted_json, jobs), *map(ended_json, ended)]
        click.echo(json.dumps(found, indent=2))
        return
    if not running and not ended and not jobs:
        hint = "" if show_all or not runs else "; --all shows those that have ended"
        click.echo(f"no job of yours is running here{hint}", err=True)
    for line in render(running, jobs, ended, now):
        click.echo(line, color=None if colour_wanted() else False)
