"""Jobs that were submitted by ``submit --via``: a small file for each on this machine, which names the login node.

The login node has their records as jobs of a scheduler, and runs commands about them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import click
from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.tty import is_interactive
from ddplaunch.base.types import TextLine, parse
from ddplaunch.cli import launcher_command
from ddplaunch.cli.host_connector import make_waiter
from ddplaunch.cli.lookup.remote_jobs import RemoteJob, RunLocator, find_host_connector
from ddplaunch.system.record_folder import RecordFolder

QUERY_TIMEOUT_S = 15.0  # for the states of all jobs of a login node


def login_node_command(host: str, words: list[str], *, terminal: bool) -> list[str]:
    """Return the ssh command that runs ``words`` on a login node; paths of this machine are not passed on."""
    return find_host_connector(f"--via {host}").interactive_command(host, words, terminal=terminal, environ={})


class ViaJob(RemoteJob, frozen=True, kw_only=True):
    """A job that was submitted on a login node; its run id is its number."""

    name: str
    array: str | None = None
    seen: str = ""  # its state, when it was last queried

    @property
    def is_running(self) -> bool:
        return self.ended is None

    @property
    def is_submitted(self) -> bool:
        return True

    @property
    def state(self) -> str:
        return self.seen or "was submitted"

    @property
    def description(self) -> str:
        return self.state.removeprefix("is ")

    def matches_exactly(self, word: str) -> bool:
        """Whether a word names this job: its number, also with an index or without the server of PBS, or its name."""
        short = self.run_id.partition(".")[0]
        return word in (self.run_id, short, self.name) or bool(self.array and word.partition("_")[0] == short)

    def name_on_host(self, word: str) -> str:
        """Return the word that names this job on its host, where a newer job may have the same name."""
        return word if self.array and "_" in word else self.run_id

    def start_on_first_host(self, words: Sequence[str], *, stdin: bool = True) -> Callable[[], int]:
        host = self.hosts[0]
        click.echo(f"ddplaunch: job {self.run_id} was submitted on {host}; connecting over SSH", err=True)
        terminal = stdin and os.isatty(0) and is_interactive(1)
        argv = login_node_command(host, [*launcher_command(self.python), *words], terminal=terminal)
        process = subprocess.Popen(argv, stdin=None if stdin else subprocess.DEVNULL)
        hint = f"the job is not affected; log in there and run: {self.format_command(words)}"
        return make_waiter(process, f"ssh cannot connect to {host}, or the connection was lost", hint)

    def remove_record(self) -> None:
        _RECORDS.remove(self)


_RECORDS = RecordFolder("via", ViaJob, lambda job: f"{job.run_id}.{job.hosts[0]}.json", lambda job: job.began)
save_via_job = _RECORDS.save


class _ListedJob(Struct, frozen=True):
    """An entry of ``ps --json``."""

    run: TextLine
    state: TextLine | None = None
    code: int | None = None
    pid: int | None = None


class ViaJobLocator(RunLocator):
    """Finds the jobs that were submitted on login nodes, and queries their states there."""

    def list_remote_jobs(self) -> list[RemoteJob]:
        return [*_RECORDS.list()]

    def update_remote_jobs(self, jobs: Sequence[RemoteJob]) -> list[RemoteJob]:
        """Query all login nodes at the same time, each once for all of its jobs; record which jobs have ended."""
        open_jobs = [job for job in jobs if isinstance(job, ViaJob) and job.is_running]
        nodes = list(dict.fromkeys((job.hosts[0], job.python) for job in open_jobs))
        queries = {node: _start_query(*node) for node in nodes}
        until = time.monotonic() + QUERY_TIMEOUT_S
        listed = {node: _read_answer(query, until - time.monotonic()) for node, query in queries.items()}
        now = time.time()
        updated = {job: _update(job, listed[job.hosts[0], job.python], now) for job in open_jobs}
        for job in updated.values():
            if not job.is_running:
                save_via_job(job)
        return [updated.get(job, job) if isinstance(job, ViaJob) else job for job in jobs]


def _start_query(host: str, python: str) -> subprocess.Popen[bytes]:
    words = login_node_command(host, [*launcher_command(python), "ps", "--json"], terminal=False)
    null = subprocess.DEVNULL
    return subprocess.Popen(words, stdin=null, stdout=subprocess.PIPE, stderr=null, start_new_session=True)


def _read_answer(query: subprocess.Popen[bytes], seconds: float) -> Mapping[str, _ListedJob] | None:
    """Return the jobs of a login node by number; None if there is no answer."""
    try:
        out, _ = query.communicate(timeout=max(0.0, seconds))
        listed = parse(out, list[_ListedJob]) if query.returncode == 0 else None
    except (subprocess.TimeoutExpired, ProtocolError):
        listed = None
    finally:
        query.kill()
        query.wait()
    return None if listed is None else {each.run: each for each in listed if each.pid is None}


def _update(job: ViaJob, listed: Mapping[str, _ListedJob] | None, now: float) -> ViaJob:
    """Return a job with the state that its login node lists."""
    if listed is None:
        return replace(job, seen=f"is unknown: {job.hosts[0]} does not answer")
    if (found := listed.get(job.run_id)) is None:
        return replace(job, seen=f"is no longer known on {job.hosts[0]}", ended=now)
    ended = None if found.code is None else now
    return replace(job, seen=found.state or "", ended=ended, code=found.code)


LOCATOR = ViaJobLocator()
