"""Starts a rank over as a fresh interpreter: the program imports something that the preloaded modules do not fit.

A fresh interpreter runs the program from its beginning, in the same process. That is possible as long as the program
has only computed and printed: the launcher drops what it prints again. Once it has written files, connected, or started
processes, the rank ends with an error instead. Where that would lose too much, because the program has imported torch
already or is in a call of ``launch``, the program gets the preloaded module, with a note. Either way the next run of
the program starts without these modules.

Bound by the rules of ``rank_runner.py``; nothing may be imported here either (``module_handover`` has the reason).
"""

from __future__ import annotations

import _frozen_importlib_external as bootstrap_external
import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import marshal
import os
import sys
from _frozen_importlib_external import _write_atomic  # type: ignore[attr-defined]
from _socket import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

    from ddplaunch.core.rank import inspection_endpoint, rank_exit
    from ddplaunch.core.rank.zygote_messages import PythonJob
    from ddplaunch.system.processes import proc_utils
else:
    proc_utils = load_private_module("system/processes/proc_utils")  # noqa: F821
    rank_exit = load_private_module("core/rank/rank_exit")  # noqa: F821

_REPLY_TIMEOUT_S = 20.0  # the launcher may be busy


class RankRestart:
    """The state of a rank before its program runs, which is needed to start the rank over."""

    def __init__(
        self, job: PythonJob, fds: dict[str, int], endpoint: inspection_endpoint.InspectionEndpoint | None, runner: str
    ) -> None:
        """``runner``: the file that runs the job in a fresh interpreter."""
        self._job, self._fds, self._endpoint, self._runner = job, fds, endpoint, runner
        self._environ, self._folder = dict(os.environ), rank_exit.current_folder()
        self._pid, self._cpus, self._umask = os.getpid(), os.sched_getaffinity(0), os.umask(0o77)
        os.umask(self._umask)
        self._handlers = {number: _signal.getsignal(number) for number in _signal.valid_signals()}
        self._blocked = list(map(int, _signal.pthread_sigmask(_signal.SIG_BLOCK, ())))
        self._open, self._child_page_faults = _list_open_fds(), _child_page_faults()
        self._stdin_offset = _offset(0)
        self._cached_bytes = 0
        self._written = _written_bytes() - (endpoint.bytes_written if endpoint else 0)
        bootstrap_external._write_atomic = self._write_cache  # type: ignore[attr-defined]

    def _write_cache(self, path: str, data: bytes, *mode: int) -> None:
        """Write the compiled file of an imported module without counting it as output of the program."""
        before = _written_bytes()
        try:
            _write_atomic(path, data, *mode)
        finally:
            self._cached_bytes += _written_bytes() - before

    def start_over(self, module: str, differs: str) -> None:
        """Start the rank over, or exit with an error; return if the program must continue with the preloaded module.

        Args:
            module: what the program imports.
            differs: how that differs from what was preloaded.
        """
        if os.getpid() != self._pid:
            text = f"ddplaunch: note: rank {self._job['rank']}: a child process got the preloaded {module}: {differs}\n"
            os.write(2, text.encode(errors="replace"))
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # it is closed, or replaced
                pass
        line, is_in_call = _find_line()
        differs = f"{line}{differs}"
        effect = self._find_side_effect()
        if effect is None and not self._has_only_printed():
            effect = "has written to files"
        if effect is None:
            self._report("restarts", module, differs)
            self._exec_interpreter()
        if "torch" in sys.modules or is_in_call:
            return self._report("continues", module, f"{differs}, and the program {effect}")
        self._report("ends", module, differs)
        self._end_with_error(module, differs, effect)

    def _report(self, outcome: str, module: str, differs: str) -> None:
        line = f"r {outcome} {module} {differs}".replace("\n", " ").encode("ascii", "backslashreplace")
        try:
            if self._endpoint is not None:
                self._endpoint.send(line)
            elif outcome == "continues":
                os.write(2, f"ddplaunch: note: the preloaded {module} is used, although {differs}\n".encode())
        except OSError:  # the program has closed it
            pass

    def _has_only_printed(self) -> bool:
        """Whether the program has written only to the launcher, which then drops the output when it is repeated.

        Without a rank channel that is unknown: then nothing may have been written.
        """
        sent = self._endpoint.bytes_written if self._endpoint else 0
        written = _written_bytes() - sent - self._written - self._cached_bytes
        if self._endpoint is None:
            return written <= 0
        try:
            self._endpoint.send(b"p %d" % written)
            end = socket(fileno=os.dup(self._endpoint._fd))
            end.settimeout(_REPLY_TIMEOUT_S)
            received = b"\n"
            while b"\np" not in received or not received.endswith(b"\n"):
                data = end.recv(4096)
                if not data:
                    return False
                received += data
            end.close()
            return b"\np1" in received
        except OSError:
            return False

    def _find_side_effect(self) -> str | None:
        """Return which effect of the program, other than output, forbids a second start; None if there is none."""
        if any(each.startswith("socket:") for _, each in _list_open_fds() - self._open):
            return "has opened connections"
        if _has_children() or _child_page_faults() != self._child_page_faults:
            return "has started processes"
        if _offset(0) != self._stdin_offset and not _rewind(0, self._stdin_offset):
            return "has read stdin"
        return None

    def _end_with_error(self, module: str, differs: str, effect: str) -> NoReturn:
        text = f"`import {module}` does not fit the preloaded one ({differs}), and the program {effect} before"
        hint = "run it again: it then starts without preloaded modules, as with --start exec"
        rank_exit.write_error_file(self._job, rank_exit.TargetError(text, hint), text)
        os._exit(2)

    def _exec_interpreter(self) -> NoReturn:
        sys.settrace(None)
        sys.setprofile(None)
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())  # until the new program image has begun
        for number, handler in self._handlers.items():
            if number in (_signal.SIGPIPE, _signal.SIGXFSZ) or number >= _signal.SIGRTMIN:
                # Ignored by Python and by features, and exec would keep that.
                _signal.signal(number, _signal.SIG_DFL)
            elif handler == _signal.SIG_IGN or _signal.getsignal(number) == _signal.SIG_IGN:
                _signal.signal(number, handler if handler == _signal.SIG_IGN else _signal.SIG_DFL)
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        os.umask(self._umask)
        os.chdir(self._folder)
        os.sched_setaffinity(0, self._cpus)
        fds = {**self._fds, **({"rank_channel": self._endpoint._fd} if self._endpoint else {})}
        job_fd = os.memfd_create("job", 0)
        os.write(job_fd, marshal.dumps((self._job, fds, self._blocked)))  # type: ignore[arg-type]  # a TypedDict is a dict
        os.lseek(job_fd, 0, os.SEEK_SET)
        for fd in (job_fd, *fds.values()):
            os.set_inheritable(fd, True)
        words = [sys.executable, self._runner, str(job_fd), self._job["target_text"], *self._job["args"]]
        os.execve(sys.executable, words, self._environ)


def _find_line() -> tuple[str, bool]:
    """Return the line of the program's code that imports, as "train.py:3: ", or ""; and whether ``launch`` calls it."""
    frame: FrameType | None = sys._getframe(2)
    line, is_in_call = "", False
    while frame is not None:
        file = frame.f_code.co_filename
        is_in_call = is_in_call or "HIDES_FRAMES" in frame.f_globals  # of ``features/python``
        if not line and rank_exit.is_user_file(file) and not rank_exit.is_internal_file(file):
            line = f"{os.path.basename(file)}:{frame.f_lineno}: "
        frame = frame.f_back
    return line, is_in_call


def _written_bytes() -> int:
    """How many bytes this process has written to any descriptor (proc(5): wchar in /proc/pid/io)."""
    words = proc_utils.read_proc_file("self", "io").partition(b"wchar:")[2].split()
    return int(words[0]) if words else 0


def _list_open_fds() -> set[tuple[str, str]]:
    """List the open descriptors, with what they lead to."""
    descriptors, folder = set(), "/proc/self/fd"
    for fd in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            descriptors.add((fd, os.readlink(f"{folder}/{fd}")))
        except OSError:  # of the listing itself
            pass
    return descriptors


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # there is none
        return False
    return True


def _child_page_faults() -> int:
    """The page faults of child processes that have ended: 0 if there was none (proc(5): cminflt in /proc/pid/stat)."""
    fields = proc_utils.read_stat("self")
    return int(fields[8]) if fields else 0


def _offset(fd: int) -> int | None:
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:  # a pipe, or a terminal
        return None


def _rewind(fd: int, offset: int | None) -> bool:
    return offset is not None and os.lseek(fd, offset, os.SEEK_SET) == offset
