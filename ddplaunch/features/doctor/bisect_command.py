"""``ddplaunch doctor bisect``: bisects a list of hosts to find those on which a command fails."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType

import click

from ddplaunch.base.errors import EXIT_SIGNAL, LaunchError, UsageError, sanitize_line
from ddplaunch.base.text import format_count, format_elapsed, group_consecutive
from ddplaunch.base.types import WEEK_S
from ddplaunch.cli.console_output import print_note
from ddplaunch.cli.target_args import require_current_folder
from ddplaunch.core.failures import describe_exit
from ddplaunch.core.option_values import make_number_parser, parse_seconds
from ddplaunch.features.doctor import command_run
from ddplaunch.features.doctor.fault_search import FAILURES_TO_BLAME, FaultSearch, HostFault, Hosts, TrialResult
from ddplaunch.system.clusters.host_spec import Host, read_host_options
from ddplaunch.system.clusters.systems import host_lists as hosts_system
from ddplaunch.system.clusters.systems import indexed_tasks, slurm_env

SKIP_EXIT_CODE = 125
"""The exit code of a command that could not test these hosts, as for ``git bisect run``."""

_HOSTS, _NNODES = "{hosts}", "{nnodes}"
_LAST_LINE = 120  # characters of a failed run's last line that are shown
_TAIL_BYTES = 4096  # of the end of the log, where it is searched
_read_timeout = make_number_parser(parse_seconds, 1e-9, WEEK_S, "a time up to a week, like 90 (seconds) or 10m")
_EXAMPLE = "ddplaunch doctor bisect --hosts n[0-7] -- ddplaunch run --hosts {hosts} check.py"


@click.command(
    context_settings={"allow_interspersed_args": False}, short_help="Find the hosts that a command fails on."
)
@click.option("--hosts", metavar="HOSTS", help="Hosts to search: n1,n2 or n[1-4].")
@click.option("--hostfile", metavar="FILE", help="File with the hosts to search, one per line.")
@click.option(
    "--timeout",
    metavar="TIME",
    default="10m",
    show_default=True,
    callback=lambda ctx, param, text: _read_timeout(param, text),
    help="Stop a run that takes longer, and count it as failed.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def bisect(hosts: str | None, hostfile: str | None, timeout: float, command: Hosts) -> int:
    """Run COMMAND on all hosts, then on halves of them, to find the bad hosts.

    In COMMAND, {hosts} is replaced by the hosts of a run, like n1,n2, and {nnodes} by their number; they are also in
    DDPLAUNCH_HOSTS and DDPLAUNCH_NNODES. Exit code 0 means good, 125 unknown, any other bad. Hosts are reported as
    bad after three failures. The last line can be passed to the next submit: --exclude=n1,n2. The exit code is 1 if
    hosts are bad.
    """
    if not command:
        raise UsageError("missing COMMAND", _EXAMPLE)
    require_current_folder()  # raises UsageError if the runs would have none
    if shutil.which(command[0]) is None:
        raise UsageError(f"command not found: {command[0]}", _EXAMPLE)
    runner = BisectRunner(_hosts(hosts, hostfile), command, timeout)
    search = FaultSearch(runner.names)
    signal.signal(signal.SIGTERM, _interrupt)
    stopped = 0
    try:
        trials = search.run()
        with suppress(StopIteration):  # the search is finished
            hosts_to_test = next(trials)
            while True:
                hosts_to_test = trials.send(runner.run(hosts_to_test))
    except KeyboardInterrupt as interrupt:
        stopped = EXIT_SIGNAL + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    for line in format_report(search, bool(stopped)):
        print_note(line)
    print_note(f"logs of all runs: {runner.folder}")
    if search.excluded_hosts:
        click.echo(f"--exclude={fold_hosts(search.excluded_hosts)}")
    return stopped or int(bool(search.faults or search.flaky))


def _hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    """Return the hosts of ``--hosts`` or ``--hostfile``, or else of the surrounding Slurm job."""
    if hosts is not None or hostfile is not None:
        return read_host_options(hosts, hostfile)
    allocation = slurm_env.allocation(os.environ)
    if allocation is None or not allocation.hosts:
        raise UsageError("missing --hosts: not inside a Slurm job", _EXAMPLE)
    return tuple(map(Host, allocation.hosts))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


class BisectRunner:
    """Runs the command on subsets of the hosts, one run at a time: runs may write to the same files."""

    def __init__(self, hosts: Sequence[Host], command: Hosts, timeout: float) -> None:
        self.names = tuple(host.name for host in hosts)
        try:
            self.folder = tempfile.mkdtemp(prefix="ddplaunch-bisect-")
        except OSError as error:
            hint = "export TMPDIR=FOLDER, with some free space"
            raise UsageError(f"no folder for the logs of the runs: {error.strerror}", hint) from None
        self._host_texts = {host.name: _host_text(host) for host in hosts}
        self._command, self._timeout, self._runs = command, timeout, 0
        print_note(
            f"searching {format_count(len(hosts), 'host')}; a run may take {format_elapsed(timeout)} (--timeout)"
        )
        if not any(_HOSTS in word for word in command):
            print_note(f"the command has no {_HOSTS}, so it must read {hosts_system.SUBMIT_HOSTS_VARIABLE}")

    def run(self, names: Hosts) -> TrialResult:
        """Run the command on these hosts, and print its result. Raises LaunchError if the command cannot start."""
        self._runs += 1
        listed = ",".join(self._host_texts[name] for name in names)
        words = [word.replace(_HOSTS, listed).replace(_NNODES, str(len(names))) for word in self._command]
        environ = {
            **os.environ,
            hosts_system.SUBMIT_HOSTS_VARIABLE: listed,
            indexed_tasks.NNODES_VARIABLE: str(len(names)),
        }
        log = os.path.join(self.folder, f"run-{self._runs}.log")
        click.echo(f"run {self._runs}: {format_count(len(names), 'host')}, {fold_hosts(names)}: ", nl=False, err=True)
        began = time.monotonic()
        ended = command_run.run_command(words, environ, log, self._timeout)
        took = format_elapsed(time.monotonic() - began)
        if isinstance(ended, str):
            click.echo("not started", err=True)
            raise LaunchError(f"cannot run the command: {sanitize_line(ended)}", shlex.join(words)[:_TAIL_BYTES])
        how = ""
        if ended is None:
            outcome, how = TrialResult.FAILED, f", timeout after {format_elapsed(self._timeout)}"
        elif ended in (0, SKIP_EXIT_CODE):
            outcome = TrialResult.SKIPPED if ended else TrialResult.PASSED
        else:
            outcome, how = TrialResult.FAILED, f", {describe_exit(ended)}{_last_line(log)}"
        click.echo(f"{outcome.value}{how} ({took})", err=True)
        return outcome


def _host_text(host: Host) -> str:
    """Format a host in the syntax of ``--hosts``."""
    name = host.destination if ":" not in host.name else host.destination.replace(host.name, f"[{host.name}]")
    return name if host.slots is None else f"{name}:{host.slots}"


def _last_line(log: str) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {sanitize_line(last, _LAST_LINE)}" if last else ""


# ------------------------------------------------------------------------------------------------------ report


def format_report(search: FaultSearch, stopped: bool) -> Iterator[str]:
    """Yield the lines of the final report."""
    if search.fails_everywhere:
        where = ", ".join(fold_hosts(fault.hosts) for fault in search.faults)
        failed = f"COMMAND failed {FAILURES_TO_BLAME} times on each of: {where}"
        yield f"{failed}; no run on as many hosts passed: check COMMAND itself"
        return
    for fault in search.faults:
        yield _format_fault(fault)
    for hosts in search.flaky:
        yield f"{fold_hosts(hosts)} failed, but not in a second run: not counted as bad"
    others = "the other " if search.faults or search.flaky else "all "
    if search.good_hosts:
        alone = len(search.good_hosts) == 1
        yield f"{'the last host passes alone' if alone else f'{others}{len(search.good_hosts)} hosts pass together'}"
    else:
        yield f"{'stopped: ' * stopped}unknown whether {others}hosts pass together"


def _format_fault(fault: HostFault) -> str:
    if len(fault.hosts) == 1:
        return f"{fault.hosts[0]} is bad: it failed alone, {FAILURES_TO_BLAME} times"
    together = f"{fold_hosts(fault.hosts)} failed together, {FAILURES_TO_BLAME} times, but pass without any one of them"
    if not fault.left_out:
        return f"{together}: check the links between them"
    if fault.with_others:
        return f"{fold_hosts(fault.left_out)} is bad: it passes alone and fails with others; {together}"
    return f"{together}: check the links between them; excluding {fold_hosts(fault.left_out)} is enough"


def fold_hosts(names: Sequence[str]) -> str:
    """Format a list of hosts, consecutive numbers as a range: n[0-3],login."""
    numbers_by_name: dict[tuple[str, str, int], list[int]] = {}
    for name in names:
        parts = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", name)
        if parts is None or ":" in name or parts[1][-1:].isdigit():
            numbers_by_name[name, "", 0] = []
        else:
            numbers_by_name.setdefault((parts[1], parts[3], len(parts[2])), []).append(int(parts[2]))
    folded = []
    for (head, tail, digits), numbers in numbers_by_name.items():
        for run in group_consecutive(numbers) or [[]]:
            words = [str(number).zfill(digits) for number in run] or [""]
            words = [f"[{words[0]}-{words[-1]}]"] if len(run) > 2 else words
            folded += [f"{head}{part}{tail}" for part in words]
    return ",".join(folded)
