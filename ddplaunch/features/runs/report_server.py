"""``ddplaunch report --serve``: an HTTP server for the page of a run, which a browser reloads while the job runs.

It listens on loopback only, and the path has a random part, as the machine may have many users. A request with another
Host header is refused: that is DNS rebinding, by which a web site makes a browser read the page under its own name.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import click
from msgspec.structs import replace

from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line
from ddplaunch.cli.lookup.batch_jobs import mark_lost
from ddplaunch.cli.lookup.run_index import find_run
from ddplaunch.features.runs.html_report import content_security_policy, render_page
from ddplaunch.features.runs.html_report.page_inputs import collect_inputs, with_live_state
from ddplaunch.features.runs.report_text import TimeOfRuns
from ddplaunch.observe.history import history_store
from ddplaunch.system.schedulers.scheduler import BatchJobState

LOOPBACK = "127.0.0.1"
ALLOWED_HOSTS = {LOOPBACK, "localhost"}
CACHE_S = 4.0  # a page is reused for this long: many clients do not inspect the job more often
REQUEST_TIMEOUT_S = 10.0  # for a request to arrive


def serve(run: str, port: str, job: BatchJobState | None) -> None:
    """Serve the page of a run until Ctrl-C; ``port``: 0 for any; ``job``: the state of its batch job.

    Raises UsageError if the port is invalid or in use.
    """
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise UsageError(f"--serve {sanitize_line(port, 60)}: expected a port", "ddplaunch report RUN --serve 8000")
    pages = LivePage(run, job)
    try:
        server = LiveServer((LOOPBACK, int(port)), LiveHandler)
    except OSError as error:
        raise UsageError(f"--serve {port}: {error.strerror}", "--serve alone takes any free port") from None
    with server:
        server.pages = pages
        click.echo(f"http://{LOOPBACK}:{server.server_port}{server.path} shows {run}; Ctrl-C stops this server")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


class LivePage:
    """Renders the page of a run and caches it; thread-safe."""

    def __init__(self, run: str, job: BatchJobState | None) -> None:
        self._run, self._job, self._lock = run, job, threading.Lock()
        self._made, self._text = 0.0, b""

    def get_page(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._made > CACHE_S:
                self._text = self._render_page().encode()
                self._made = time.monotonic()
            return self._text

    def _render_page(self) -> str:
        run = find_run(self._run)
        shares = mark_lost(history_store.read_node_records(run.run), self._job)
        if not shares:  # it was deleted meanwhile
            raise LaunchError(f"{run.run} has no record: it was deleted", "ddplaunch ps --all lists all runs")
        known = collect_inputs(run, shares, live=run.running is not None)
        records = with_live_state(run, shares, known)
        effective = TimeOfRuns(records[:1], records[0].spent).line
        return render_page(records, replace(known, effective=effective))


class LiveServer(ThreadingHTTPServer):
    """HTTP server on loopback; its daemon threads do not delay the end of the process."""

    daemon_threads = True
    pages: LivePage

    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]
        self.path = f"/{secrets.token_urlsafe(16)}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that leaves in the middle of a request is not an error."""


class LiveHandler(BaseHTTPRequestHandler):
    """Handles one request; anything but a GET of the page is refused."""

    server: LiveServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "ddplaunch", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in ALLOWED_HOSTS:
            return self.send_error(HTTPStatus.FORBIDDEN, "Not for this host")
        if not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            text = self.server.pages.get_page()
        except LaunchError as error:
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, sanitize_line(error.message, 100))
        self.send_response(HTTPStatus.OK)
        for name, value in {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(text)),
            "Content-Security-Policy": f"{content_security_policy(live=True)}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the browser has gone
            self.wfile.write(text)

    def log_message(self, format: str, *words: object) -> None:
        """Print nothing for a request."""
