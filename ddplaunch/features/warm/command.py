"""``ddplaunch warm``: lists the warm zygotes with their memory, or stops them."""

from __future__ import annotations

import time

import click

from ddplaunch.base.errors import LaunchError
from ddplaunch.base.text import format_elapsed, format_size
from ddplaunch.cli.text_table import format_table
from ddplaunch.features.warm.rank.warm_messages import WarmStatus
from ddplaunch.features.warm.warm_client import query_all
from ddplaunch.system.devices.cgroups import read_counters
from ddplaunch.system.processes.proc_utils import wait_for_end

_EXIT_TIMEOUT_S = 10.0
_MAX_MODULES = 3  # in a row of the table


@click.command()
@click.option("--stop", is_flag=True, help="Stop them. One in use stops when its run ends.")
def warm(stop: bool) -> None:
    """List the idle processes of `ddplaunch run --warm`, which have torch imported."""
    replies = query_all(stop=stop)
    zygotes = [each for each in replies if not isinstance(each, str)]
    if not replies:
        click.echo("no warm zygotes", err=True)
    elif stop:
        _wait_for_exit([each["pid"] for each in zygotes if not each["current_runs"]])
        for each in zygotes:
            click.echo(f"{each['pid']} {'stops when its run ends' if each['current_runs'] else 'stopped'}", err=True)
    elif zygotes:
        _print_table(zygotes)
    for path in replies:
        if isinstance(path, str):
            click.echo(f"{path} does not answer: still importing, or busy", err=True)


def _print_table(zygotes: list[WarmStatus]) -> None:
    rows = []
    for zygote in zygotes:
        pss = _memory(zygote["pid"])
        left = "in use" if zygote["remaining_s"] is None else format_elapsed(zygote["remaining_s"])
        age, memory = format_elapsed(time.time() - zygote["started_at"]), "-" if pss is None else format_size(pss)
        modules = _format_modules(zygote["modules"])
        rows.append((str(zygote["pid"]), memory, age, left, str(zygote["runs_served"]), modules, zygote["working_dir"]))
    for line in format_table(("PID", "MEMORY", "AGE", "LEFT", "RUNS", "IMPORTED", "FOLDER"), rows):
        click.echo(line)


def _format_modules(modules: list[str]) -> str:
    more = len(modules) - _MAX_MODULES
    return ",".join(modules) if more <= 0 else f"{','.join(modules[:_MAX_MODULES])} and {more} more"


def _memory(pid: int) -> int | None:
    """Return the proportional set size (PSS) of a process in bytes: of shared pages, it counts a share."""
    kib = read_counters(f"/proc/{pid}/smaps_rollup").get("Pss")
    return None if kib is None else kib << 10


def _wait_for_exit(pids: list[int]) -> None:
    for pid in pids:
        if not wait_for_end(pid, _EXIT_TIMEOUT_S):
            raise LaunchError(f"{pid} has not ended after {_EXIT_TIMEOUT_S:.0f} s", f"kill -9 {pid}")
