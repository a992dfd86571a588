"""``ddplaunch top``: what a running job does, drawn once a second; it asks the job's door and disturbs nothing."""

from __future__ import annotations

import click


@click.command()
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--ranks", metavar="LIST", help="Show only these ranks: 0,3-5, or a word like waiting.")
@click.option("--json", "as_json", is_flag=True, help="Print one look as a JSON object.")
def top(run: str | None, ranks: str | None, as_json: bool) -> int:
    """Show what a running job does, and where each rank stands.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the only job that runs. In a
    terminal the view is drawn again once a second, until q; elsewhere it is printed once.
    """
    import os

    from ddplaunch.commands.top import looking
    from ddplaunch.console import colour_wanted
    from ddplaunch.job.runs import running
    from ddplaunch.output.live import can_draw
    from ddplaunch.output.terminal import watched

    path = running(run).path
    if as_json:
        return looking.print_json(path)
    if not (watched(1) and can_draw(os.environ)):
        return looking.print_once(path, ranks or "")
    return looking.Looking(path, ranks or "", colour=colour_wanted()).run()
