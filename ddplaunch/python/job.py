"""One ``ddplaunch run`` that a program has started: its command line, its process, what it says, and its end."""

from __future__ import annotations

import contextvars
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
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import click

from ddplaunch.cli.option import Option
from ddplaunch.cli.options import OPTIONS
from ddplaunch.console.failure import render_verdict
from ddplaunch.control.failure import FailureReport, find_first_cause
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.job import client
from ddplaunch.job.folder import list_sockets
from ddplaunch.job.requests.output import FlushRequest
from ddplaunch.plan.command import python_command
from ddplaunch.preload.program import NEEDS_DYNAMO
from ddplaunch.preload.table import PackageTable
from ddplaunch.python import parcel
from ddplaunch.python.printing import OutputPrinter
from ddplaunch.python.ranks import RaisedException
from ddplaunch.wire.typed import convert

_EXPLAIN_TIMEOUT_S = 10.0
"""Seconds for the ranks to say what they do."""

_SECOND_SIGNAL_DELAY_S = 2.0
"""Seconds after which a mark may be lost: where output is stuck for 10 s, the launcher drops lines."""

_LAUNCHER = "from ddplaunch.python.launcher import main; main()"
"""It ends with the thread that started it, and so with this process, ``kill -9`` included."""

_UNSUPPORTED_KEYWORDS = {
    **dict.fromkeys(("module", "no_python", "pass_local_rank"), "it is for a target that is typed"),
    **dict.fromkeys(("dry_run", "as_json"), "ddplaunch run --dry-run shows a plan"),
    **dict.fromkeys(("stdin", "ui"), "it needs a terminal"),
    "log_json": "output= takes what is printed",
}
_NODE_KEYWORDS = ("hosts", "hostfile", "nnodes", "node_rank", "cluster", "spares")
"""With one of these the job may have other machines than this one."""

_RANK_VARIABLES = re.compile(
    r"(LOCAL_|WORLD|GROUP_|ROLE_|NODE_|MASTER_|TORCHELASTIC_|PET_)|RANK$|DDPLAUNCH_(?!TOKEN$|WARM$)"
)
"""Variables that the rank of another launcher has, and that would be taken for ours."""


def keywords_to_argv(keywords: Mapping[str, object]) -> list[str]:
    """The options of ``ddplaunch run`` that these keywords are.

    Raises:
        TypeError: a keyword is not an option.
        UsageError: it makes no sense here.
    """
    options = {each.name: each for each in OPTIONS if not each.is_argument}
    found: list[str] = []
    for name, value in keywords.items():
        if why := _UNSUPPORTED_KEYWORDS.get(name):
            raise UsageError(f"{name} does not work from Python: {why}")
        if name not in options:
            raise TypeError(f"launch() got an unexpected keyword argument {name!r}")
        if name != "env" or keywords.get("hosts") or keywords.get("hostfile"):  # else the launcher's own variables do
            found += _option_to_argv(options[name], value)
    if not any(keywords.get(name) for name in _NODE_KEYWORDS):
        found += ["--cluster", "none"]
    return found


def _option_to_argv(option: Option, value: object) -> list[str]:
    """An option as it is typed."""
    if value is None:
        return []
    if option.is_flag:
        spelled = option.opts[-1] if value else option.off
        return [spelled] if spelled else []
    if isinstance(value, Mapping):
        value = [f"{name}={text}" for name, text in value.items()]
    several = option.multiple and not isinstance(value, str)
    return [f"{option.opts[-1]}={each}" for each in (value if several else [value])]  # type: ignore[attr-defined]


def launcher_environment(more: object) -> dict[str, str]:
    """This process's variables, without those of a rank, and with ``more``, which ``env`` gives."""
    kept = {name: value for name, value in os.environ.items() if not _RANK_VARIABLES.match(name)}
    return {**kept, **({str(k): str(v) for k, v in more.items()} if isinstance(more, Mapping) else {})}


class RankFailed(LaunchError):
    """A rank has failed; the exception that it raised is the ``__cause__``.

    Attributes:
        rank: the first that failed on its own.
        host: the name of its machine.
        exit_code: its exit code; 128 + N where signal N ended it.
        signal: the number of that signal; None where it exited.
        report: the report as text, as ``ddplaunch run`` prints it.
    """

    def __init__(self, message: str, *, rank: int, host: str, exit_code: int, signal: int | None, report: str) -> None:
        super().__init__(message)
        self.rank, self.host, self.exit_code, self.signal, self.report = rank, host, exit_code, signal, report

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows: without the rank's traceback, which the rank has printed into the cell."""
        from IPython import get_ipython  # only IPython calls this

        alone = RankFailed(self.message, **self._details())
        renderer = get_ipython().InteractiveTB
        lines: list[str] = renderer.structured_traceback(RankFailed, alone, self.__traceback__, renderer.tb_offset)
        return lines

    def _details(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("rank", "host", "exit_code", "signal", "report")}

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RankFailed, **self._details()), (self.message,)


RankFailed.__module__ = "ddplaunch"  # where programs import it from, and what tracebacks show


class RankTraceback(Exception):
    """The traceback of an exception that a rank raised, as text: tracebacks do not travel between processes."""

    def __str__(self) -> str:
        return f"in rank {self.args[0]}:\n{self.args[1]}"


@dataclass(frozen=True)
class LauncherResult:
    """How a launcher ended."""

    code: int
    failure: Mapping[str, Any] | None  # the verdict, as failure.json has it
    complaint: LaunchError | None  # of the launcher itself
    remark: str | None  # the last word on it


class LaunchedJob:
    """A launcher below this process, with the folder through which it and its ranks are reached."""

    def __init__(self, function: Callable[..., object], keywords: Mapping[str, object], output: IO[str] | None) -> None:
        """Prepare it; nothing starts. Raises UsageError or TypeError for keywords that make no sense."""
        self._words = keywords_to_argv(keywords)
        self._env = launcher_environment(keywords.get("env"))
        shared = keywords.get("hosts") or keywords.get("hostfile")  # then the current folder must be
        place, before = (os.getcwd(), ".") if shared else (None, "")
        program = _program_source(function)
        self.folder = tempfile.mkdtemp(prefix=f"{before}ddplaunch-", dir=place)
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = f"{os.path.basename(self.folder)}."
        self._printing, self._flushes = OutputPrinter(output, self._mark), 0
        self._door: str | None = None
        # Whether all ranks leave what they return in our folder.
        alone = {"node_rank": (None,), "nnodes": (None, 1, "1"), "cluster": (None, "none")}
        self._here = bool(shared) or all(keywords.get(name) in values for name, values in alone.items())
        self._thread = threading.Thread(target=self._run, name="ddplaunch", daemon=True)
        self._started = threading.Event()
        self._over = threading.Event()
        self.bell, self._ring = socket.socketpair()
        self._failed: BaseException | None = None
        self._end: LauncherResult | None = None
        parcel.dump([each or os.getcwd() for each in sys.path], self.path("path"))
        self._target = f"{self.path('launch.py')}:{_program_name(function)}"
        with open(self.path("launch.py"), "w", encoding="utf-8") as file:
            file.write(program)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def start(self) -> None:
        """Start the launcher. Raises OSError if the system does not let it start, ValueError for a null byte."""
        self._thread.start()
        self._started.wait()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        """Start it and read what it says; the thread lasts as long as the launcher, which is tied to it."""
        typed = [*python_command(sys.executable, _LAUNCHER), str(os.getpid()), self.folder, "run", "--log-json"]
        try:
            self._process = subprocess.Popen(
                [*typed, *self._words, self._target, "--", "--folder", self.folder],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the caller's
            )
        except Exception as error:
            self._failed = error
            self._over.set()
            self._started.set()
            return
        self._printing.stop = self._process.terminate
        self._started.set()
        assert self._process.stdout
        assert self._process.stderr
        printing = threading.Thread(
            target=self._printing.print_stream, args=(self._process.stdout, "stdout"), daemon=True
        )
        printing.start()
        self._printing.print_stream(self._process.stderr, "stderr")
        printing.join()
        code = self._process.wait()
        self._end = _parse_result(code, self._printing.messages)
        self._over.set()
        self._ring.close()

    @property
    def has_started(self) -> bool:
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended; ``bell`` can be read from then on."""
        return self._over.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end; False if it has not come after ``seconds``. Ctrl-C stops the job and is raised again."""
        __tracebackhide__ = True
        try:
            return self._over.wait(seconds)
        except BaseException:
            self.stop(signal.SIGINT)
            raise

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop the ranks, and wait until nothing of the job is left; a second Ctrl-C makes it quick."""
        while self._thread.ident is not None and not self._over.is_set():
            self._started.wait()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)
            try:
                self._over.wait()
            except KeyboardInterrupt:
                number = signal.SIGINT

    def set_note_handler(self, heard: Callable[[int, str], bool]) -> None:
        """Tell of each note of the launcher, with its pid; it is not printed where that returns True."""
        self._printing.on_note = lambda text: heard(self._process.pid if self._process else 0, text)

    def print(self, text: str) -> None:
        """Print a text of ddplaunch's own where the ranks' standard error goes."""
        self._printing.print(text, "stderr")

    def capture_context(self) -> None:
        """What ranks print from now on is for the caller of this: the cell of a notebook."""
        self._printing.context = contextvars.copy_context()

    def flush(self) -> None:
        """Return when all that ranks have printed by now has been passed on; raise what the stream ``output`` does."""
        self._flushes += 1
        if self._door is None and self._process is not None:
            self._door = next((path for path in list_sockets() if path.endswith(f".{self._process.pid}")), None)
        try:
            while self._door and not self.has_ended:
                client.send_request(self._door, FlushRequest(f"{self._mark}{self._flushes}"))
                if self._printing.wait_for_mark(self._flushes, _SECOND_SIGNAL_DELAY_S):
                    break
        except client.JobNotResponding:  # it is ending
            pass
        self._raise_output()

    def _raise_output(self) -> None:
        if self._printing.error is not None:
            raise self._printing.error

    def describe_waits(self) -> str:
        """Say who waits for whom, as ``ddplaunch stacks`` does; "" where that cannot be told."""
        if self._process is None:
            return ""
        asked = [*python_command(sys.executable), "stacks", str(self._process.pid), "--json"]
        try:
            told = subprocess.run(
                asked, env=self._env, capture_output=True, timeout=_EXPLAIN_TIMEOUT_S, check=True
            ).stdout
            return "; ".join(json.loads(told)["sentences"])
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            return ""

    def remove_dir(self) -> None:
        """Remove the folder; what is mapped stays as long as it is used."""
        self.bell.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def results(self, call: int) -> list[Any]:
        """What the ranks returned, in order; those of this node, where the job has others that were started alone.

        Raises LaunchError if one ended without returning.
        """
        begin, found = f"{call}.", dict[int, Any]()
        for name in os.listdir(self.folder):
            if name.startswith(begin) and name[len(begin) :].isdigit():
                size, found[int(name[len(begin) :])] = parcel.load(self.path(name))
        missing = [rank for rank in range(size if found else 1) if rank not in found]
        if missing and (self._here or not found):
            raise LaunchError(f"rank {missing[0]} ended before the function returned")
        self.discard(call)
        return [found[rank] for rank in sorted(found)]

    def discard(self, call: int) -> None:
        """Remove the files of a call: a session may do many. What is mapped stays."""
        for name in os.listdir(self.folder):
            if name == f"call.{call}" or name.startswith((f"{call}.", f"call.{call}-")):
                os.unlink(self.path(name))

    def raised(self, call: int, raised: Collection[int], stopped: int) -> RankFailed:
        """The failure of a call in which these ranks raised, and are still there; ``stopped`` are not."""
        found = {rank: each for rank in raised if (each := self._rank_exception(call, rank))}
        if not found:
            raise LaunchError(f"rank {min(raised)} raised, and its exception could not be read")
        failures = [each.to_failure(rank) for rank, each in found.items()]
        verdict = find_first_cause(
            failures, stopped, 2
        )  # of one rank the report would leave out what it has printed itself
        return _failed_rank(verdict, found[verdict.first.rank], alive=True)

    def raise_end(self, call: int) -> None:
        """Wait for the end, and raise what it means; return where all went well.

        Raises:
            RankFailed: a rank failed.
            LaunchError: the job did not start, or was stopped.
            Exception: that of the stream ``output``.
        """
        __tracebackhide__ = True
        self.wait()
        self._raise_output()
        end = self._end
        assert end is not None
        if end.failure is not None:
            verdict: FailureReport = convert(end.failure, FailureReport)
            raise _failed_rank(verdict, self._rank_exception(call, verdict.first.rank), alive=False)
        if end.complaint is not None:
            raise end.complaint
        if end.code:
            raise LaunchError(f"the job ended with exit code {end.code}" + (f": {end.remark}" if end.remark else ""))

    def _rank_exception(self, call: int, rank: int) -> RaisedException | None:
        """The exception that a rank raised; None where it left none."""
        try:
            raised = parcel.load(self.path(f"{call}.{rank}.raised"))
        except Exception:
            return None
        return raised if isinstance(raised, RaisedException) else None


def _failed_rank(verdict: FailureReport, raised: RaisedException | None, *, alive: bool) -> RankFailed:
    """The error for a verdict; its cause is what the rank raised, which has the rank's traceback as its cause."""
    first = verdict.first
    message, report = verdict.blame or first.headline, click.unstyle(render_verdict(verdict, 1))
    if alive:  # no process has ended
        report = report.replace(message, message := message.removesuffix(f" (exit code {first.exit_code})"), 1)
    error = RankFailed(
        message, rank=first.rank, host=first.host, exit_code=first.shell_exit_code, signal=first.signal, report=report
    )
    text = RankTraceback(first.rank, first.traceback) if first.traceback else None
    error.__cause__ = raised.error if raised is not None and raised.error is not None else text
    if error.__cause__ is not text and error.__cause__ is not None:
        error.__cause__.__cause__ = text
    return error


def _program_source(function: Callable[..., object]) -> str:
    """The program that ranks run.

    It names, where nothing calls it, what this process has imported and is known, so that the zygote may import that
    once for all ranks (docs/performance.md).
    """
    table = PackageTable()
    owners = {name: table.find_package(name) for name in sys.modules if "." not in name}
    known = [name for name, owner in owners.items() if owner and not owner.refused]
    named = [f"import {name}" for name in sorted({*known, "torch"})]
    if _needs_dynamo(function):
        named.append("from torch.nn.parallel import DistributedDataParallel")
    below = "\n    "
    return f"""from ddplaunch.python.ranks import run_calls as {_program_name(function)}


def imported():
    {below.join(named)}
"""


def _program_name(function: Callable[..., object]) -> str:
    """What to call the job's program, which ``ddplaunch ps`` shows."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() and not keyword.iskeyword(name) and name != "imported" else "function"


def _needs_dynamo(function: Callable[..., object]) -> bool:
    try:
        file = inspect.getsourcefile(function)
        with open(file or "", encoding="utf-8", errors="replace") as source:
            return bool(NEEDS_DYNAMO.search(source.read()))
    except (OSError, TypeError):
        return False


_IGNORED_NOTE_STARTS = ("stopping ", "looking at ", "kept in ")
"""How notes begin that do not say how it ended."""


def _parse_result(code: int, said: list[dict[str, Any]]) -> LauncherResult:
    failure = next((each["verdict"] for each in said if each["kind"] == "failure"), None)
    kind = UsageError if code == UsageError.exit_code else LaunchError
    complaint = next((kind(each["text"], each.get("hint")) for each in said if each["kind"] == "error"), None)
    notes = [
        each["text"]
        for each in said
        if each["kind"] in ("note", "stacks") and not each["text"].startswith(_IGNORED_NOTE_STARTS)
    ]
    return LauncherResult(code, failure, complaint, notes[-1] if notes else None)
