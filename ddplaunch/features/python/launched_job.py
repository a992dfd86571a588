"""A job started from Python: builds the ``ddplaunch run`` command, runs it, collects its messages and results."""

from __future__ import annotations

import inspect
import json
import keyword
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import IO, Any

import click
from msgspec import Struct

from ddplaunch.base.errors import LaunchError, UsageError
from ddplaunch.base.options import Option
from ddplaunch.cli import client, launcher_command
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.cli.run_options import OPTIONS
from ddplaunch.cli.target_args import require_current_folder
from ddplaunch.core.control_socket.socket_dir import list_sockets
from ddplaunch.core.control_socket.status_request import FlushRequest
from ddplaunch.core.failures import FailureReport, find_first_cause
from ddplaunch.features.preload.known_packages import PackageTable
from ddplaunch.features.preload.program_source import NEEDS_DYNAMO
from ddplaunch.features.python import pickle_files
from ddplaunch.features.python.output_printer import LauncherMessage, OutputPrinter
from ddplaunch.features.python.rank.call_loop import RaisedException
from ddplaunch.system.plan.launch_command import python_command

_EXPLAIN_TIMEOUT_S = 10.0
"""Timeout of ``ddplaunch stacks``, which explains why ranks wait."""

_MARK_TIMEOUT_S = 2.0
"""If a flush mark takes longer, another one is requested: the launcher drops lines if output is stuck for 10 s."""

_LAUNCHER = "from ddplaunch.features.python.launcher import main; main()"
"""The code of the child process. It ends with the thread that started it, so with this process, even by ``kill -9``."""

UNSUPPORTED_KEYWORDS = {
    **dict.fromkeys(("module", "no_python", "pass_local_rank"), "it applies to targets on the command line"),
    **dict.fromkeys(("dry_run", "as_json"), "ddplaunch run --dry-run shows a plan"),
    **dict.fromkeys(("stdin", "ui"), "it needs a terminal"),
    "log_json": "use output= to capture the output",
    "program": "several programs need a command line or a job file",
}
_NODE_KEYWORDS = ("hosts", "hostfile", "nnodes", "node_rank", "cluster", "spares")
"""With one of these the job may use other machines."""

_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|PET|DDPLAUNCH(?!_TOKEN$|_WARM$))_.*"
)
"""Variables that another launcher has set in this process: ``ddplaunch run`` would use them."""


def keywords_to_argv(keywords: Mapping[str, object]) -> list[str]:
    """Convert keyword arguments to options of ``ddplaunch run``.

    Raises:
        TypeError: a keyword is not an option.
        UsageError: the option does not work from Python.
    """
    options = {each.name: each for each in OPTIONS if not each.is_argument}
    argv: list[str] = []
    for name, value in keywords.items():
        if why := UNSUPPORTED_KEYWORDS.get(name):
            raise UsageError(f"{name} does not work from Python: {why}")
        if name not in options:
            raise TypeError(f"launch() got an unexpected keyword argument {name!r}")
        if name != "env" or keywords.get("hosts") or keywords.get("hostfile"):  # else the launcher has them
            argv += _option_to_argv(options[name], value)
    if not any(keywords.get(name) for name in _NODE_KEYWORDS):
        argv += ["--cluster", "none"]
    return argv


def _option_to_argv(option: Option, value: object) -> list[str]:
    """Format an option for the command line."""
    if value is None:
        return []
    if option.is_flag:
        flag = option.opts[-1] if value else option.off
        return [flag] if flag else []
    return [f"{option.opts[-1]}={each}" for each in (_option_values(value) if option.multiple else [value])]


def _option_values(value: Any) -> list[str]:
    """The values of an option that may be repeated, given as a mapping, a sequence or one text."""
    if isinstance(value, Mapping):
        return [f"{name}={text}" for name, text in value.items()]
    return [value] if isinstance(value, str) else [str(each) for each in value or ()]


def launcher_environment(more: object) -> dict[str, str]:
    """This process's environment without the variables of a rank, and with ``more`` (the keyword ``env``)."""
    environment = {name: value for name, value in os.environ.items() if not _RANK_VARIABLES.fullmatch(name)}
    for text in _option_values(more):
        name, equals, value = text.partition("=")
        if equals or name in os.environ:
            environment[name] = value if equals else os.environ[name]
    return environment


class RankFailed(LaunchError):
    """A rank has failed; the exception that it raised is the ``__cause__``.

    Attributes:
        rank: the first rank that failed, and not because another rank had failed.
        host: its host name.
        exit_code: its exit code; 128 + N if signal N ended it.
        signal: the number of that signal; None if it exited.
        report: the failure report as text, as ``ddplaunch run`` prints it.
    """

    def __init__(self, message: str, *, rank: int, host: str, exit_code: int, signal: int | None, report: str) -> None:
        super().__init__(message)
        self.rank, self.host, self.exit_code, self.signal, self.report = rank, host, exit_code, signal, report

    def _render_traceback_(self) -> list[str]:
        """IPython's display hook: omits the rank's traceback, which the rank has printed into the cell already."""
        from IPython import get_ipython  # only IPython calls this

        tb = get_ipython().InteractiveTB
        lines: list[str] = tb.structured_traceback(RankFailed, copy(self), self.__traceback__, tb.tb_offset)
        return lines

    def __reduce__(self) -> tuple[object, ...]:
        names = ("rank", "host", "exit_code", "signal", "report")
        return partial(RankFailed, **{name: getattr(self, name) for name in names}), (self.message,)


RankFailed.__module__ = "ddplaunch"  # the public module, shown in tracebacks


class RankTraceback(Exception):
    """The traceback of an exception in a rank, as text: traceback objects cannot be pickled."""

    def __str__(self) -> str:
        return f"in rank {self.args[0]}:\n{self.args[1]}"


class LauncherResult(Struct, frozen=True):
    """How a launcher ended."""

    code: int
    failure: FailureReport | None
    error: LaunchError | None  # an error of the launcher itself
    remark: str | None  # the last relevant note


class LaunchedJob:
    """A launcher as a child process, and the folder for data exchange with its ranks."""

    def __init__(self, function: Callable[..., object], keywords: Mapping[str, object], output: IO[str] | None) -> None:
        """Prepare the job without starting it. Raises UsageError or TypeError for unsupported keywords."""
        folder = require_current_folder()
        self._options = keywords_to_argv(keywords)
        self._env = launcher_environment(keywords.get("env"))
        shared = keywords.get("hosts") or keywords.get("hostfile")  # then the current folder must be shared
        parent, dot = (folder, ".") if shared else (None, "")
        program = _program_source(function)
        self.folder = tempfile.mkdtemp(prefix=f"{dot}ddplaunch-", dir=parent)
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = f"{os.path.basename(self.folder)}."
        self.printer, self._flushes = OutputPrinter(output, self._mark), 0
        self._control_socket: str | None = None
        # Whether the results of all ranks are in this folder.
        single_node = {"node_rank": (None,), "nnodes": (None, 1, "1"), "cluster": (None, "none")}
        self._has_all_ranks = bool(shared) or all(keywords.get(name) in each for name, each in single_node.items())
        self._thread = threading.Thread(target=self._run, name="ddplaunch", daemon=True)
        self._started = threading.Event()
        self._ended = threading.Event()
        self.end_socket, self._end_writer = socket.socketpair()
        self._start_error: BaseException | None = None
        self._result: LauncherResult | None = None
        pickle_files.dump([each or folder for each in sys.path], self.path("path"))
        self._target = f"{self.path('launch.py')}:{_program_name(function)}"
        with open(self.path("launch.py"), "w", encoding="utf-8") as file:
            file.write(program)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def start(self) -> None:
        """Start the launcher. Raises OSError if the process cannot be started, ValueError for a null byte."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def _run(self) -> None:
        """Body of the thread: start the launcher and read its output; the launcher ends when this thread does."""
        command = [*python_command(sys.executable, _LAUNCHER), str(os.getpid()), self.folder, "run", "--log-json"]
        try:
            self._process = subprocess.Popen(
                [*command, *self._options, self._target, "--", "--folder", self.folder],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the caller's
            )
        except Exception as error:
            self._start_error = error
            self._ended.set()
            self._started.set()
            return
        self.printer.stop = self._process.terminate
        self._started.set()
        assert self._process.stdout
        assert self._process.stderr
        args = (self._process.stdout, "stdout")
        printing = threading.Thread(target=self.printer.print_stream, args=args, daemon=True)
        printing.start()
        self.printer.print_stream(self._process.stderr, "stderr")
        printing.join()
        code = self._process.wait()
        self._result = _parse_result(code, self.printer.messages)
        self._ended.set()
        self._end_writer.close()

    @property
    def has_started(self) -> bool:
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended; ``end_socket`` is readable from then on."""
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end; return False after ``seconds``. KeyboardInterrupt stops the job and is raised again."""
        __tracebackhide__ = True
        try:
            return self._ended.wait(seconds)
        except BaseException:
            self.stop(signal.SIGINT)
            raise

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop the ranks, and wait until no process of the job is left; a second Ctrl-C kills them."""
        while self._thread.ident is not None and not self._ended.is_set():
            try:
                self._started.wait()
                if self._process is not None and self._process.poll() is None:
                    self._process.send_signal(number)
                self._ended.wait()
            except KeyboardInterrupt:
                number = signal.SIGINT

    def set_note_handler(self, on_note: Callable[[int, str], bool]) -> None:
        """Set a function that gets the launcher's pid and each note; if it returns True, the note is not printed."""
        self.printer.on_note = lambda text: on_note(self._process.pid if self._process else 0, text)

    def flush(self) -> None:
        """Wait until all output of the ranks so far has been printed; raises an exception of the stream ``output``."""
        self._flushes += 1
        if self._control_socket is None and self._process is not None:
            of_launcher = f".{self._process.pid}"
            self._control_socket = next((path for path in list_sockets() if path.endswith(of_launcher)), None)
        with suppress(client.JobNotResponding):  # the job is ending
            while self._control_socket and not self.has_ended:
                client.send_request(self._control_socket, FlushRequest(f"{self._mark}{self._flushes}"))
                if self.printer.wait_for_mark(self._flushes, _MARK_TIMEOUT_S):
                    break
        self._raise_output_error()

    def _raise_output_error(self) -> None:
        if self.printer.error is not None:
            raise self.printer.error

    def describe_waits(self) -> str:
        """Describe which ranks wait for which, as ``ddplaunch stacks`` does; "" if that fails."""
        if self._process is None:
            return ""
        command = [*launcher_command(sys.executable), "stacks", str(self._process.pid), "--json"]
        try:
            inspection = subprocess.run(
                command, env=self._env, capture_output=True, timeout=_EXPLAIN_TIMEOUT_S, check=True
            ).stdout
            return "; ".join(json.loads(inspection)["sentences"])
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            return ""

    def remove_dir(self) -> None:
        """Remove the folder of the job; mapped files stay valid as long as they are used."""
        self.end_socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def results(self, call: int) -> list[Any]:
        """Return the results of a call by rank; only those of this node, if other nodes were started separately.

        Raises LaunchError if a rank ended without returning.
        """
        begin, values = f"{call}.", dict[int, Any]()
        for name in os.listdir(self.folder):
            if name.startswith(begin) and name[len(begin) :].isdigit():
                size, values[int(name[len(begin) :])] = pickle_files.load(self.path(name))
        missing = [rank for rank in range(size if values else 1) if rank not in values]
        if missing and (self._has_all_ranks or not values):
            raise LaunchError(f"rank {missing[0]} ended before the function returned")
        self.discard(call)
        return [values[rank] for rank in sorted(values)]

    def discard(self, call: int) -> None:
        """Remove the files of a call: a session may make many calls. Mapped files stay valid."""
        for name in os.listdir(self.folder):
            if name == f"call.{call}" or name.startswith((f"{call}.", f"call.{call}-")):
                os.unlink(self.path(name))

    def make_raised_error(self, call: int, raised: Collection[int], stopped: int) -> RankFailed:
        """Return the error of a call: the ``raised`` ranks raised an exception, and ``stopped`` others are stopped."""
        exceptions = {rank: each for rank in raised if (each := self._rank_exception(call, rank))}
        if not exceptions:
            raise LaunchError(f"rank {min(raised)} raised an exception that could not be read")
        failures = [each.to_failure(rank) for rank, each in exceptions.items()]
        verdict = find_first_cause(failures, stopped, 2)  # 2 ranks: for 1, the report omits the rank's traceback
        return _make_rank_failed(verdict, exceptions[verdict.first.rank], alive=True)

    def wait_for_success(self, call: int) -> None:
        """Wait for the end of the job, and raise its error; return if it succeeded.

        Raises:
            RankFailed: a rank failed.
            LaunchError: the job did not start, or was stopped.
            Exception: the stream ``output`` has raised it.
        """
        __tracebackhide__ = True
        self.wait()
        self._raise_output_error()
        result = self._result
        assert result is not None
        if result.failure is not None:
            raise _make_rank_failed(result.failure, self._rank_exception(call, result.failure.first.rank), alive=False)
        if result.error is not None:
            raise result.error
        if result.code:
            remark = f": {result.remark}" if result.remark else ""
            raise LaunchError(f"the job ended with exit code {result.code}{remark}")

    def _rank_exception(self, call: int, rank: int) -> RaisedException | None:
        """Read the exception that a rank raised; None if there is none."""
        try:
            raised = pickle_files.load(self.path(f"{call}.{rank}.raised"))
        except Exception:
            return None
        return raised if isinstance(raised, RaisedException) else None


_set_cause = BaseException.__dict__["__cause__"].__set__


def _make_rank_failed(verdict: FailureReport, raised: RaisedException | None, *, alive: bool) -> RankFailed:
    """The error for a failure report; its cause is the rank's exception, whose cause is the rank's traceback."""
    first = verdict.first
    message, report = verdict.blame or first.headline, click.unstyle(render_verdict(verdict, 1))
    if alive:  # the process has not ended, so there is no exit code
        report = report.replace(message, message := message.removesuffix(f" (exit code {first.exit_code})"), 1)
    code, signal_number = first.shell_exit_code, first.signal
    error = RankFailed(message, rank=first.rank, host=first.host, exit_code=code, signal=signal_number, report=report)
    text = RankTraceback(first.rank, first.traceback) if first.traceback else None
    error.__cause__ = raised.error if raised is not None and raised.error is not None else text
    if error.__cause__ is not text and error.__cause__ is not None:
        _set_cause(error.__cause__, text)  # even if its class overrides ``__cause__``
    return error


def _program_source(function: Callable[..., object]) -> str:
    """The source of the program that the ranks run.

    It contains, in a function that is never called, imports of the known packages that this process has imported, so
    that the zygote preloads them for all ranks (docs/performance.md).
    """
    table = PackageTable()
    owners = {name: table.find_package(name) for name in sys.modules if "." not in name}
    known = [name for name, owner in owners.items() if owner and not owner.refused]
    imports = [f"import {name}" for name in sorted({*known, "torch"})]
    if _source_needs_dynamo(function):
        imports.append("from torch.nn.parallel import DistributedDataParallel")
    newline = "\n    "
    return f"""from ddplaunch.features.python.rank.call_loop import run_calls as {_program_name(function)}


def imported():
    {newline.join(imports)}
"""


def _program_name(function: Callable[..., object]) -> str:
    """The name of the job's program, shown by ``ddplaunch ps``."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() and not keyword.iskeyword(name) and name != "imported" else "function"


def _source_needs_dynamo(function: Callable[..., object]) -> bool:
    try:
        file = inspect.getsourcefile(function)
        with open(file or "", encoding="utf-8", errors="replace") as source:
            return bool(NEEDS_DYNAMO.search(source.read()))
    except (OSError, TypeError):
        return False


_IGNORED_NOTE_STARTS = ("stopping ", "inspecting ", "kept in ", "log folder: ")
"""The start of notes that do not explain how the job ended."""


def _parse_result(code: int, messages: list[LauncherMessage]) -> LauncherResult:
    """Find the failure report, error and last relevant note in the launcher's messages (--log-json)."""
    failure = next((each.failure for each in messages if each.kind == "failure"), None)
    error_type = UsageError if code == UsageError.exit_code else LaunchError
    error = next((error_type(_error_text(each), each.hint) for each in messages if each.kind == "error"), None)
    notes = [each.text for each in messages if each.kind in ("note", "stacks")]
    remark = next((text for text in reversed(notes) if not text.startswith(_IGNORED_NOTE_STARTS)), None)
    return LauncherResult(code, failure, error, remark)


def _error_text(message: LauncherMessage) -> str:
    """The text of an error, with a line for each host that cannot run the job."""
    return "\n  ".join([message.text, *(f"{each['host']}: {each['text']}" for each in message.problems)])
