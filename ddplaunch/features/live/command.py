"""``ddplaunch top``: live view of a running job, redrawn once a second through requests to its control socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import click
from msgspec.structs import replace

from ddplaunch.base.connection import Connection
from ddplaunch.base.errors import EXIT_SIGNAL, LaunchError, sanitize_line
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.local_sockets import peer_uid
from ddplaunch.base.text import format_elapsed
from ddplaunch.base.tty import ENTER, can_move_cursor, is_interactive, keep_terminal_settings
from ddplaunch.base.types import as_dict
from ddplaunch.cli import client, launcher_command
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.lookup.batch_jobs import find_running_batch_job
from ddplaunch.cli.lookup.job_command import JobCommand, RunName
from ddplaunch.cli.lookup.run_index import find_running, index_runs
from ddplaunch.cli.lookup.running_jobs import find_record, job_at
from ddplaunch.cli.text_table import format_table, short_target
from ddplaunch.core.control_socket.job_status import JobState, Status
from ddplaunch.core.control_socket.request import Request
from ddplaunch.core.control_socket.server import MAX_REPLY_BYTES
from ddplaunch.core.control_socket.status_request import StatusQuery, StopJobRequest
from ddplaunch.core.node_config import ScreenOptions
from ddplaunch.core.output.sink import READER_TIMEOUT_S
from ddplaunch.features.live.frame import render_footer
from ddplaunch.features.live.live_screen import LiveScreen
from ddplaunch.features.live.live_view import (
    DOWN,
    UP,
    LiveView,
    describe_waiting,
    format_failures,
    format_last_lines,
    to_job_snapshot,
)
from ddplaunch.features.live.styled_rows import Row, StyledText, render_plain_text, truncate_row
from ddplaunch.features.live.view_state import ViewState, busy_cpus_by_rank, collectives_per_second, rank_activities
from ddplaunch.features.runs.output_request import OutputChunk, TailOutputRequest
from ddplaunch.features.runs.time_tracker import BreakdownRequest
from ddplaunch.observe.diagnosis.inspection import Detail
from ddplaunch.observe.history import history_store, sample_file
from ddplaunch.observe.history.run_record import RunRecord
from ddplaunch.observe.history.time_breakdown import TimeBreakdown
from ddplaunch.observe.request import InspectJobRequest, JobInspection
from ddplaunch.system.processes.proc_utils import is_suspended, start_ticks

SAMPLE_INTERVAL_S = 0.5  # between the two inspections of a printed frame, and before a request is sent again
REFRESH_INTERVAL_S = 2.0  # between two updates of the list of jobs
REPLY_TIMEOUT_S = 0.5  # for each job in that list
COLUMNS, ROWS = 80, 24  # of a frame that is not printed to a terminal
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@click.command(cls=JobCommand)
@click.argument("run", metavar="[RUN]", required=False, type=RunName(running=True))
@click.option("--rank", "ranks", metavar="LIST", help="Show only these ranks: 0,3-5, or a state like waiting.")
@click.option("--ranks", hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the current state as a JSON object.")
def top(run: str | None, ranks: str | None, as_json: bool) -> int:
    """Show the live status of a run and its ranks.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the only run in progress,
    or in a terminal one that you choose. With the number of a job submitted to a scheduler, the status is printed
    once. For a run of this machine, the view fills the terminal and refreshes every second; press q to quit.
    Without a terminal it is printed once.
    """
    if batch_job := find_running_batch_job(run, "top"):
        return batch_job.run_command("top", [*(["--rank", ranks] if ranks else []), *(["--json"] if as_json else [])])
    in_terminal = is_interactive(1) and can_move_cursor() and not as_json
    several = in_terminal and run is None and len(index_runs().running) > 1
    chosen = JobChooser().run() if several else None
    if isinstance(chosen, int):
        return chosen
    path = chosen or find_running(run).path
    if as_json:
        seen, spent = _snapshot(path, ""), client.send_request(path, BreakdownRequest()).spent
        click.echo(json.dumps(_as_json(seen, spent), indent=2))
        return 0
    client.check_not_suspended(path)
    if in_terminal:
        return TopViewer(path, ranks or "").run()
    sys.stdout.write(render_plain_text(render_footer(_snapshot(path, ranks or ""), COLUMNS, ROWS)))
    return 0


def _as_json(seen: ViewState, spent: TimeBreakdown) -> dict[str, object]:
    inspection = seen.current.inspection
    ranks = (replace(rank, threads=()) for rank in inspection.ranks)
    return {
        "status": {**as_dict(seen.current.status), "time_by_phase": as_dict(spent)},
        "inspection": replace(inspection, ranks=tuple(ranks)).to_json(),
        "doing": {rank: what.word for rank, what in rank_activities(seen).items()},
        "waits": seen.sentences,
        "collectives_per_second": collectives_per_second(seen),
        "cpus": busy_cpus_by_rank(seen),
        "memory": {rank: used.memory for rank, used in seen.current.usage.items()},
    }


def _snapshot(path: str, chosen: str) -> ViewState:
    """Inspect the job twice, to compute rates; the second time with stacks."""
    before = to_job_snapshot(client.send_request(path, InspectJobRequest()))
    time.sleep(SAMPLE_INTERVAL_S)
    now = to_job_snapshot(client.send_request(path, InspectJobRequest(Detail.WAITS)))
    same = before.status.attempt == now.status.attempt
    texts, awaited = describe_waiting(now.inspection)
    return ViewState(now, before if same else None, sentences=texts, awaited=awaited, filter_text=chosen)


class SocketJobSource:
    """A job in another process, reached through its control socket."""

    def __init__(self, loop: EventLoop, path: str, on_lost: Callable[[], None]) -> None:
        """``on_lost`` is called when the job no longer replies."""
        self._loop, self._path, self._on_lost = loop, path, on_lost
        self._pid = job_at(path).pid
        self.status: Status | None = None

    def inspect(self, detail: Detail, on_reply: Callable[[JobInspection], None], *, lines: bool = False) -> None:
        def on_message(message: object) -> None:
            if isinstance(message, JobInspection):
                self.status = message.status
                on_reply(message)

        self._send_request(InspectJobRequest(detail, lines), on_message)

    def stop(self) -> None:
        self._send_request(StopJobRequest(command="ddplaunch top"), lambda message: None)

    def log(self, rank: int, on_reply: Callable[[str], None]) -> None:
        output = bytearray()

        def on_message(message: object) -> None:
            if isinstance(message, OutputChunk):
                output.extend(message.data)

        request = TailOutputRequest((rank,))
        self._send_request(request, on_message, lambda: on_reply(format_last_lines(rank, bytes(output))))

    def failures(self, on_reply: Callable[[str], None]) -> None:
        on_reply(format_failures(self.status) if self.status else "")

    def advice_to_continue(self) -> str:
        return client.advice_to_continue(self._pid) if is_suspended(self._pid) else ""

    def _send_request(
        self, request: Request[object], on_message: Callable[[object], None], on_done: Callable[[], None] = lambda: None
    ) -> None:
        """Send a request; ``on_done`` is called after the last reply.

        If there is no reply, the job has ended, or was suspended for longer than the timeout of a connection. While its
        launcher exists, the request is sent again.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self._path)
            if peer_uid(sock) != os.geteuid():
                raise PermissionError
        except BlockingIOError:  # the backlog is full
            sock.close()
            self._loop.call_later(0.1, partial(self._send_request, request, on_message, on_done))
            return
        except OSError:
            sock.close()
            self._loop.call_soon(self._on_lost)
            return
        has_reply = False

        def on_any_message(message: object) -> None:
            nonlocal has_reply
            has_reply = True
            on_message(message)

        def on_closed(why: str) -> None:
            if has_reply:
                on_done()
            elif os.path.exists(self._path) and start_ticks(self._pid) >= 0:
                self._loop.call_later(SAMPLE_INTERVAL_S, partial(self._send_request, request, on_message, on_done))
            else:
                self._on_lost()

        connection = Connection[object](
            self._loop, sock, request.answers, on_any_message, on_closed, max_bytes=MAX_REPLY_BYTES
        )
        connection.send(request)


def _make_screen(loop: EventLoop) -> LiveScreen:
    return LiveScreen(loop, ScreenOptions("", READER_TIMEOUT_S, 0.0, is_colour_allowed()))


class JobChooser:
    """A full-screen list of the jobs that run on this machine, from which the user chooses one."""

    def __init__(self) -> None:
        self._loop = EventLoop()
        self._screen = _make_screen(self._loop)
        self._jobs: list[tuple[str, str, tuple[str, ...]]] = []  # name, control socket, columns
        self._cursor = 0
        self._chosen: str | int | None = None

    def run(self) -> str | int:
        """Return the control socket of the chosen job, or an exit code."""
        try:
            with keep_terminal_settings():
                self._loop.add_signal_handlers(END_SIGNALS, lambda number: self._end(EXIT_SIGNAL + number))
                self._refresh()
                self._screen.begin(self._render, self._on_key)
                self._screen.set_full_screen(True)
                while self._chosen is None or not (self._loop.is_idle and self._screen.is_drained):
                    self._loop.run_once()
        finally:
            self._screen.close()
        return self._chosen

    def _refresh(self) -> None:
        self._loop.call_later(REFRESH_INTERVAL_S, self._refresh)
        self._jobs = [(name, job.path, _job_columns(job.path)) for name, job in index_runs().running.items()]
        self._cursor = max(0, min(self._cursor, len(self._jobs) - 1))
        self._screen.refresh()

    def _on_key(self, key: str) -> None:
        if key == "q":
            self._end(0)
        elif key == ENTER and self._jobs:
            self._end(self._jobs[self._cursor][1])
        elif key in UP or key in DOWN:
            self._cursor = max(0, min(self._cursor + (1 if key in DOWN else -1), len(self._jobs) - 1))
            self._screen.refresh()

    def _end(self, chosen: str | int) -> None:
        if self._chosen is None:
            self._chosen = chosen
            self._screen.end()

    def _render(self, columns: int, rows: int, full: bool) -> list[Row]:
        if self._chosen is not None or not full:
            return []
        table = [(sanitize_line(name, 40), *cells) for name, _, cells in self._jobs]
        lines = [click.unstyle(line) for line in format_table(("RUN", "STATE", "AGE", "RANKS", "TARGET"), table)]
        first = max(0, self._cursor - (rows - 4))
        styled = [(StyledText(line, "7" if at == self._cursor else ""),) for at, line in enumerate(lines[1:])]
        body = [(StyledText(lines[0], "2"),), *styled[first : first + rows - 2]]
        hint = (StyledText("Up, Down: choose a run  Enter: show it  q: quit", "2"),)
        return [truncate_row(row, columns - 1) for row in [*body, *[()] * (rows - 1 - len(body)), hint]]


def _job_columns(path: str) -> tuple[str, ...]:
    """Return the state, age, ranks and target of a job."""
    known: Status | RunRecord | None
    try:
        known = client.send_request(path, StatusQuery(), REPLY_TIMEOUT_S)
        state = known.state.value
    except LaunchError:
        job = job_at(path)
        state, known = "suspended" if is_suspended(job.pid) else "silent", find_record(job)
    if known is None:
        return state, "", "", ""
    age = format_elapsed(max(0.0, time.time() - known.began))
    return state, age, str(known.world_size), short_target(sanitize_line(known.target, 200))


class TopViewer:
    """Shows the live view of a job in this terminal."""

    def __init__(self, path: str, chosen: str) -> None:
        self._loop, self._path = EventLoop(), path
        self._screen = _make_screen(self._loop)
        self._source = SocketJobSource(self._loop, path, self._on_job_lost)
        self._view = LiveView(
            self._loop,
            self._screen,
            self._source,
            filter_text=chosen,
            on_quit=self._exit,
            run_command=self._run_command,
        )
        if record := find_record(job_at(path)):
            file = sample_file.sample_file_name(record.node_rank)
            self._view.add_earlier_samples(
                sample_file.read_samples(os.path.join(history_store.run_dir(record.run), file))
            )
        self._code: int | None = None
        self._end_message = ""

    def run(self) -> int:
        """Show the view until the user leaves or the job ends; return the exit code."""
        try:
            with keep_terminal_settings():
                self._loop.add_signal_handlers(END_SIGNALS, lambda number: self._exit(EXIT_SIGNAL + number))
                stop = partial(os.kill, os.getpid(), signal.SIGSTOP)
                self._loop.add_signal_handlers([signal.SIGTSTP], lambda number: self._screen.suspend(stop))
                self._view.start(keys=True)
                self._screen.set_full_screen(True)
                while self._code is None or not (self._loop.is_idle and self._screen.is_drained):
                    self._loop.run_once()
        finally:
            self._view.close()
            self._screen.close()
        if self._end_message:
            click.echo(self._end_message, err=True)
        return self._code

    def _run_command(self, command: str, *words: str) -> None:
        """Run a command of ddplaunch on this job in the terminal; show the view again once the user types Enter."""
        argv = [*launcher_command(sys.executable), command, str(job_at(self._path).pid), *words]

        def run_in_terminal() -> None:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
            try:
                subprocess.run(argv, check=False, preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL))
                with suppress(EOFError):
                    input("ddplaunch: press Enter to show the ranks again ")
            finally:
                signal.signal(signal.SIGINT, before)

        self._screen.suspend(run_in_terminal)

    def _exit(self, code: int = 0) -> None:
        if self._code is None:
            self._code = code
            self._view.close()
            self._screen.end()

    def _on_job_lost(self) -> None:
        """Called when the job no longer replies: it has ended."""
        if self._code is None:
            record = find_record(job_at(self._path))
            code = record.code if record else None
            if self._source.status:
                self._view.update(replace(self._source.status, state=JobState.ENDED, code=code))
            name = record.run_id if record and code is not None else "the job"
            self._end_message = f"ddplaunch: {name} has ended" + ("" if code is None else f", exit code {code}")
        self._exit()
