"""``ddplaunch doctor bisect``: run a command on halves of the hosts until those that it fails on are left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from ddplaunch.cli.say import print_note
from ddplaunch.cli.values import WEEK_S, parse_seconds
from ddplaunch.clusters.systems import hosts as submitted
from ddplaunch.clusters.systems import indexed, slurm
from ddplaunch.commands.doctor import trial
from ddplaunch.commands.doctor.halving import FAILURES_TO_BLAME, FaultSearch, HostFault, Hosts, TrialResult, Trials
from ddplaunch.control.failure import describe_exit
from ddplaunch.errors import EXIT_SIGNAL, LaunchError, UsageError, sanitize_line
from ddplaunch.ssh.hosts import Host, read_host_options
from ddplaunch.words import format_count, format_elapsed, group_consecutive, shell_quote

SKIP_EXIT_CODE = 125
"""The exit code of a command that can tell nothing about these hosts, as for ``git bisect run``."""

_HOSTS, _NNODES = "{hosts}", "{nnodes}"
_LAST_LINE = 120  # characters of the last line that a failed run has printed
_TAIL_BYTES = 4096  # bytes of the log in which it is sought
_EXAMPLE = "ddplaunch doctor bisect --hosts n[0-7] -- ddplaunch run --hosts {hosts} check.py"


@click.command(
    context_settings={"allow_interspersed_args": False}, short_help="Find the hosts that a command fails on."
)
@click.option("--hosts", metavar="HOSTS", help="The hosts to search: n1,n2 or n[1-4].")
@click.option("--hostfile", metavar="FILE", help="The hosts to search are in this file, one a line.")
@click.option(
    "--timeout",
    metavar="TIME",
    default="10m",
    show_default=True,
    callback=lambda ctx, param, text: _seconds(text),
    help="A run that takes longer is stopped, and has failed.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def bisect(hosts: str | None, hostfile: str | None, timeout: float, command: Hosts) -> int:
    """Run COMMAND on all hosts, then on halves of them, until the bad ones are left.

    In COMMAND, {hosts} becomes the hosts of a run, as n1,n2, and {nnodes} their number; DDPLAUNCH_HOSTS and
    DDPLAUNCH_NNODES say the same. Exit code 0 is good, 125 tells nothing, any other is bad. Hosts are bad that fail
    three times. The last line is for the next submit: --exclude=n1,n2. The exit code is 1 where hosts are bad.
    """
    if not command:
        raise UsageError("what is to be run on the hosts?", _EXAMPLE)
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]} is not a program here, or is not in the PATH", _EXAMPLE)
    runner = BisectRunner(_hosts(hosts, hostfile), command, timeout)
    search = FaultSearch(runner.names)
    signal.signal(signal.SIGTERM, _interrupt)
    stopped = 0
    try:
        trials = search.run()
        outcome: TrialResult | None = None
        while (asked := _next_trial(trials, outcome)) is not None:
            outcome = runner.run(asked)
    except KeyboardInterrupt as interrupt:
        stopped = EXIT_SIGNAL + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    for line in format_report(search, bool(stopped)):
        print_note(line)
    print_note(f"what each run has printed: {runner.folder}")
    if search.excluded_hosts:
        click.echo(f"--exclude={fold_hosts(search.excluded_hosts)}")
    return stopped or int(bool(search.faults or search.flaky))


def _seconds(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds is None or not 0 < seconds <= WEEK_S:
        raise UsageError(f"--timeout {text}: expected a time up to a week, like 90 (seconds) or 10m")
    return seconds


def _hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    """The hosts that are named, or else those of the Slurm job."""
    if hosts is not None or hostfile is not None:
        return read_host_options(hosts, hostfile)
    allocation = slurm.allocation(os.environ)
    if allocation is None or not allocation.hosts:
        raise UsageError("which hosts? this is not a Slurm job", _EXAMPLE)
    return tuple(map(Host, allocation.hosts))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _next_trial(trials: Trials[None], outcome: TrialResult | None) -> Hosts | None:
    """The hosts to run on next, after the outcome of the last run; None where nothing more is to be found."""
    try:
        return next(trials) if outcome is None else trials.send(outcome)
    except StopIteration:
        return None


class BisectRunner:
    """Runs the command on some of the hosts at a time, one run after the other: they may write to the same files."""

    def __init__(self, hosts: Sequence[Host], command: Hosts, timeout: float) -> None:
        self.names = tuple(host.name for host in hosts)
        self.folder = tempfile.mkdtemp(prefix="ddplaunch-bisect-")
        self._typed = {host.name: _host_text(host) for host in hosts}
        self._command, self._timeout, self._runs = command, timeout, 0
        print_note(
            f"searching {format_count(len(hosts), 'host')}; a run may take {format_elapsed(timeout)} (--timeout)"
        )
        if not any(_HOSTS in word for word in command):
            print_note(f"{_HOSTS} is not in the command, which must read {submitted.SUBMIT_HOSTS_VARIABLE}")

    def run(self, names: Hosts) -> TrialResult:
        """Run on these hosts, and print a line of it. Raises LaunchError where the command cannot start."""
        self._runs += 1
        listed = ",".join(self._typed[name] for name in names)
        words = [word.replace(_HOSTS, listed).replace(_NNODES, str(len(names))) for word in self._command]
        environ = {**os.environ, submitted.SUBMIT_HOSTS_VARIABLE: listed, indexed.NNODES_VARIABLE: str(len(names))}
        log = os.path.join(self.folder, f"run-{self._runs}.log")
        click.echo(f"run {self._runs}: {format_count(len(names), 'host')}, {fold_hosts(names)}: ", nl=False, err=True)
        began = time.monotonic()
        ended = trial.run_command(words, environ, log, self._timeout)
        took = format_elapsed(time.monotonic() - began)
        if isinstance(ended, str):
            click.echo("not started", err=True)
            raise LaunchError(f"the command cannot be run: {sanitize_line(ended)}", shell_quote(words)[:_TAIL_BYTES])
        outcome = {0: TrialResult.PASSED, SKIP_EXIT_CODE: TrialResult.SKIPPED}.get(
            -1 if ended is None else ended, TrialResult.FAILED
        )
        how = outcome.value
        if outcome is TrialResult.FAILED:
            why = (
                f"no end in {format_elapsed(self._timeout)}"
                if ended is None
                else f"{describe_exit(ended)}{_last_line(log)}"
            )
            how += f", {why}"
        click.echo(f"{how} ({took})", err=True)
        return outcome


def _host_text(host: Host) -> str:
    """A host as --hosts takes it."""
    name = host.destination if ":" not in host.name else host.destination.replace(host.name, f"[{host.name}]")
    return name if host.slots is None else f"{name}:{host.slots}"


def _last_line(log: str) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {sanitize_line(last, _LAST_LINE)}" if last else ""


# ------------------------------------------------------------------------------------------------------ what was found


def format_report(search: FaultSearch, stopped: bool) -> Iterator[str]:
    """Say what is known, for people."""
    if search.fails_everywhere:
        where = ", ".join(fold_hosts(fault.hosts) for fault in search.faults)
        yield f"it failed {FAILURES_TO_BLAME} times on each of these: {where}; and never passed on as many hosts: look at COMMAND"
        return
    for fault in search.faults:
        yield _format_fault(fault)
    for hosts in search.flaky:
        yield f"{fold_hosts(hosts)} failed, and not when it was run again: not counted as bad"
    others = "the other " if search.faults or search.flaky else "all "
    if search.good_hosts:
        alone = len(search.good_hosts) == 1
        yield f"{'the last host passes alone' if alone else f'{others}{len(search.good_hosts)} hosts pass together'}"
    else:
        yield f"{'stopped: ' * stopped}it is not known whether {others}hosts pass together"


def _format_fault(fault: HostFault) -> str:
    if len(fault.hosts) == 1:
        return f"{fault.hosts[0]} is bad: it failed alone, {FAILURES_TO_BLAME} times"
    together = f"{fold_hosts(fault.hosts)} failed together, {FAILURES_TO_BLAME} times, and pass with one of them less"
    if not fault.left_out:
        return f"{together}: something between them"
    if fault.with_others:
        return f"{fold_hosts(fault.left_out)} is bad: it passes alone and fails with others; {together}"
    return f"{together}: something between them; without {fold_hosts(fault.left_out)} the others can go on"


def fold_hosts(names: Sequence[str]) -> str:
    """A list of hosts, numbers that follow one another as a range: n[0-3],login."""
    found: dict[tuple[str, str, int], list[int]] = {}
    for name in names:
        parts = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", name)
        if parts is None or ":" in name or parts[1][-1:].isdigit():
            found[name, "", 0] = []
        else:
            found.setdefault((parts[1], parts[3], len(parts[2])), []).append(int(parts[2]))
    return ",".join(
        f"{head}{part}{tail}"
        for (head, tail, digits), numbers in found.items()
        for run in (group_consecutive(numbers) or [[]])
        for part in _range([str(number).zfill(digits) for number in run])
    )


def _range(run: Sequence[str]) -> Sequence[str]:
    return [f"[{run[0]}-{run[-1]}]"] if len(run) > 2 else run or [""]
