"""What people type, parsed and wired: a file for each command; this one runs it, and says how it went wrong."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys

from ddplaunch import __version__
from ddplaunch.cli.say import print_error, write_text
from ddplaunch.errors import EXIT_OS, EXIT_OUTPUT, EXIT_SIGNAL, EXIT_SOFTWARE, EXIT_USAGE, LaunchError, format_trace
from ddplaunch.inherited import AT_START

_FULL = (errno.ENOSPC, errno.EDQUOT)
COMPLETION_VARIABLE = "_DDPLAUNCH_COMPLETE"  # the variable by which a shell asks click for completions (README)


def main() -> None:
    """Run the command line, and end with its exit code."""
    exit_fast(run_command_line())


def run_command_line() -> int:
    """Run the command line; every way out of here is an exit code, and no traceback of ours reaches a user."""
    if sys.platform == "win32":
        print("ddplaunch does not support Windows; it runs in WSL 2.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    AT_START.take()
    gc.set_threshold(100_000)  # objects: to look for garbage among what is imported takes 5 % of a start
    _open_standard_streams()
    try:
        code = _dispatch(sys.argv[1:])
        if not code:
            _flush()
    except LaunchError as error:
        print_error(error.message, error.hint, code := error.exit_code)
    except KeyboardInterrupt:
        code = EXIT_SIGNAL + 2
    except MemoryError:
        print_error("out of memory", _out_of_memory_hint(), code := EXIT_OS)
    except Exception as error:
        code = _report_internal_error(error)
    return code if isinstance(code, int) else 0


def _flush() -> None:
    """Write what stdout still holds. Raises OSError where the disk is full, and for nothing else."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno in _FULL:
            raise


def _dispatch(words: list[str]) -> object:
    """Run the command; click, which took a third of a start to load, is for all but ``ddplaunch run``, and its help."""
    if words[:1] == ["run"] and COMPLETION_VARIABLE not in os.environ:
        from ddplaunch.cli.command_line import HELP
        from ddplaunch.cli.run import run

        try:  # it ends as click ends a command
            if (code := run(words[1:])) is not None:
                return code
        except BrokenPipeError:  # `| head` has read enough
            return 1
        except KeyboardInterrupt:
            write_text("\n", err=True)  # behind the terminal's ^C
            raise
        words = ["run", next(word for word in words if word in HELP)]
    from ddplaunch.cli.commands import run_with_click

    return run_with_click(words)


def _out_of_memory_hint() -> str:
    import resource  # which Windows has not, and it is to be told so

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return "end what uses it"
    return f"the limit on the memory of a process is {limit >> 10} KiB (ulimit -v): raise it"


def _report_internal_error(error: Exception) -> int:
    """Say that it is our fault, and keep the traceback for a report; return the exit code."""
    import tempfile

    said = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in _FULL:  # what stdout is sent to
        what = f"cannot write {error.filename or 'the output'}: {error.strerror}"
        print_error(what, "free some space, or write elsewhere", EXIT_OUTPUT)
        return EXIT_OUTPUT
    try:
        # the words typed stay out: one may be a token
        details = f"ddplaunch {__version__}, Python {sys.version}\n{format_trace(error)}"
        with tempfile.NamedTemporaryFile(prefix="ddplaunch-bug-", suffix=".txt", delete=False) as file:
            file.write(details.encode(errors="backslashreplace"))
        kept = f"the details are in {file.name}"
    except OSError:
        kept = "no file could be made for the details"
    print_error(f"bug in ddplaunch: {said}", f"please report it; {kept}", EXIT_SOFTWARE)
    return EXIT_SOFTWARE


def _open_standard_streams() -> None:
    """Keep descriptors 0 to 2 from becoming anything else of ours where we were started without them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be any bytes


def exit_fast(code: int) -> None:
    """End without taking the interpreter apart: nothing of ours is left that would need it."""
    if pmi := sys.modules.get("ddplaunch.clusters.pmi"):
        pmi.finalize()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # `| head` has read enough
            pass
    os._exit(code)
