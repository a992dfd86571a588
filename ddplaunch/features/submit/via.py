"""``submit --via HOST``: submits a job on a login node, over SSH, with the code of this machine."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import click
from msgspec import Struct

from ddplaunch import __version__
from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.options import OptionSource, value_source
from ddplaunch.base.redaction import redacted_argv
from ddplaunch.base.types import as_dict, parse
from ddplaunch.cli.host_connector import SSH_FAILED, lost_host_error
from ddplaunch.cli.target_args import require_current_folder
from ddplaunch.features.code.archive import CodeArchive
from ddplaunch.features.submit.batch_command import (
    find_local_target,
    flatten_options,
    parsed_line,
    print_value_sources,
    select_typed_options,
)
from ddplaunch.features.submit.code_copies import NO_CODE, read_code
from ddplaunch.features.submit.remote_submission import CODE_REQUEST, HELLO, RemoteRequest, SentCode
from ddplaunch.features.submit.via_jobs import ViaJob, login_node_command, save_via_job
from ddplaunch.system.plan.launch_command import MAX_QUOTED_CHARS, explain_failed_start, python_command
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

_STATEMENT = "import sys; from ddplaunch.features.submit.via_host import main; sys.exit(main())"
_MAX_KEPT_LINES = 30  # of stderr, before ddplaunch has started there

_ONLY_HERE = ("--via", "--code", "--remote-python", "--follow", "--no-follow", "--config")
"""Options that the command on the login node does not get."""


class LoginNode(Struct, frozen=True):
    """Where to submit: a host as ssh knows it, and a folder there."""

    host: str
    folder: str  # relative to the home there
    python: str

    @classmethod
    def read(cls, ctx: click.Context) -> LoginNode:
        """Read the login node from the options."""
        host, _, folder = ctx.params["via"].partition(":")
        if not host or host.startswith("-"):
            raise UsageError(
                f"--via {ctx.params['via']}: expected a host as ssh knows it", "--via login, or login:/scratch/me"
            )
        return cls(host, folder or ".", ctx.params["remote_python"] or sys.executable)


def submit_via(ctx: click.Context, target: str) -> int:
    """Submit the job on the login node; with --follow follow it there. Return the exit code.

    Raises LaunchError if the host cannot be reached, or has no ddplaunch.
    """
    node = LoginNode.read(ctx)
    if ctx.params["dry_run"]:
        what = f"--dry-run does not work with --via {node.host}, which writes the script there"
        raise UsageError(what, f"ssh {node.host} ddplaunch submit --dry-run …, or leave --via out")
    if ctx.params["follow"] and (ctx.params["array"] or ctx.params["grid"]):
        option = "--grid" if ctx.params["grid"] else f"--array {ctx.params['array']}"
        raise UsageError(f"--follow does not work with {option}: each job has its own log", "leave one of them out")
    has_code = ctx.params["code"] not in (None, NO_CODE)
    found = find_local_target(ctx) if has_code and ctx.params["container_image"] is None else None
    code = read_code(ctx, require_current_folder(), found)
    print_value_sources(ctx, ctx.params, {}, code.notes if code else (), dry_run=False)
    sent = _describe_code(code) if code else None
    request = RemoteRequest(tuple(_words(ctx, target)), node.folder, secrets.token_hex(8), sent)
    exit_code, job = _SubmitSession(node).submit(request, code.data if code else b"")
    if exit_code or job is None:
        return exit_code
    began = time.time()
    saved = ViaJob(
        run_id=job.number, hosts=(node.host,), python=node.python, target=job.target, cwd=require_current_folder(),
        pid=0, ticks=None, host="", began=began, name=job.name, array=job.array, argv=redacted_argv(),
    )  # fmt: skip
    if not ctx.params["no_history"]:
        save_via_job(saved)
    return saved.start_on_first_host(["attach", job.number])() if ctx.params["follow"] else 0


def _describe_code(code: CodeArchive) -> SentCode:
    return SentCode(code.version, code.run_folder(require_current_folder()), len(code.data), code.size, str(code))


def _words(ctx: click.Context, target: str) -> Iterator[str]:
    """Yield the words of the command on the login node: those typed here, and this machine's default options."""
    for option in flatten_options(ctx.command.own_options):  # type: ignore[attr-defined]
        name, value = option.name or "", ctx.params.get(option.name or "")
        if value_source(ctx, name) is not OptionSource.FILE or option.opts[-1] in _ONLY_HERE:
            continue
        if option.is_flag:
            yield option.opts[-1] if value else option.secondary_opts[-1]
        else:
            text = parsed_line(ctx).defaults.values[name].value
            yield from (f"{option.opts[-1]}={each}" for each in (text if isinstance(text, (list, tuple)) else [text]))
    yield from select_typed_options(ctx, lambda name: name not in _ONLY_HERE)
    args = parsed_line(ctx).line.program_args
    yield from ("--", target, *args) if target.startswith("-") else (target, *(("--", *args) if args else ()))


class _SubmitSession:
    """The ssh process that runs ``via_host`` on the login node."""

    def __init__(self, node: LoginNode) -> None:
        self._node = node
        self._has_started = False
        self._lines = deque[str](maxlen=_MAX_KEPT_LINES)  # of stderr, before ddplaunch has started
        words = login_node_command(node.host, python_command(node.python, _STATEMENT), terminal=False)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._reader = threading.Thread(target=self._copy_stderr, daemon=True)
        self._reader.start()

    def submit(self, request: RemoteRequest, data: bytes) -> tuple[int, SubmittedJob | None]:
        """Send a request, and the code if the host requests it; return the exit code and the submitted job."""
        try:
            self._wait_for_hello()
            self._write(json.dumps(as_dict(request)).encode() + b"\n")
            if self._read_line() == CODE_REQUEST:
                self._write(data)
            return self._read_result(f"{request.mark} ".encode())
        finally:
            self._process.kill()
            self._process.wait()

    def _wait_for_hello(self) -> None:
        while line := self._read_line():
            _, hello, version = line.rpartition(HELLO)
            if not hello:
                self._lines.append(line.decode(errors="replace"))
                continue
            self._has_started = True
            if (there := version.decode(errors="replace").strip()) != __version__:
                what = f"{self._node.host} has ddplaunch {sanitize_line(there, 20)}, this machine {__version__}"
                raise UsageError(f"{what}: no job was submitted", "install the same version on both")
            return
        raise self._start_error(self._process.wait())

    def _start_error(self, code: int) -> LaunchError:
        """Return the error for a command that has not started on the login node."""
        self._reader.join(5)
        lines, host = [text for each in self._lines if (text := sanitize_line(each, MAX_QUOTED_CHARS))], self._node.host
        last = lines[-1] if lines else f"exit code {code}"
        if code != SSH_FAILED:
            why = explain_failed_start(lines, last, code)
            return UsageError(
                f"cannot submit via {host}: {why}",
                f"try: ssh {host} {shlex.quote(self._node.python)} -m ddplaunch --version",
            )
        what = f"ssh cannot connect to {host}: {last}; no job was submitted"
        return lost_host_error(what, f"ssh {host} true shows more")

    def _read_line(self) -> bytes:
        assert self._process.stdout
        return self._process.stdout.readline()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # ssh has ended: its exit code says more
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _read_result(self, mark: bytes) -> tuple[int, SubmittedJob | None]:
        """Pass on what the command prints; return its exit code and the job."""
        job = None
        while line := self._read_line():
            if line.startswith(mark):
                with suppress(ProtocolError):
                    job = parse(line[len(mark) :], SubmittedJob)
            else:
                sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        code = self._process.wait()
        self._reader.join(5)
        if code == SSH_FAILED and job is None:
            host = self._node.host
            hint = f"ssh {host} ddplaunch ps shows whether the job was submitted"
            raise lost_host_error(f"the connection to {host} was lost", hint)
        return code, job

    def _copy_stderr(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            if self._has_started:
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            else:
                self._lines.append(line.decode(errors="replace"))
