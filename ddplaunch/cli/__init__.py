"""The command line: ``main`` runs the command of ``sys.argv``, prints its error and exits with its exit code.

Each part of ``ddplaunch run`` has a file of its own: ``run_command`` calls them in order, from parsing the
command line to running the job. A command about a run finds the run by ``lookup`` and asks its launcher by ``client``.
Commands of features are in the features' folders.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import resource
import sys

from ddplaunch import __version__
from ddplaunch.base.errors import (
    EXIT_OS,
    EXIT_OUTPUT,
    EXIT_SIGNAL,
    EXIT_SOFTWARE,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    LaunchError,
    format_trace,
)
from ddplaunch.base.inherited_signals import AT_START
from ddplaunch.base.reinstalled import REINSTALLED_TEXT, was_reinstalled
from ddplaunch.cli.console_output import print_error
from ddplaunch.system.plan.launch_command import python_command

_FULL = (errno.ENOSPC, errno.EDQUOT)


LAUNCHER_COMMENT = "python -c … is ddplaunch; no file of the current folder can take the place of a module of Python's."
"""Explains ``launcher_command`` where users read it: in scripts and manifests."""


def launcher_command(python: str) -> list[str]:
    """Return the words that start ddplaunch with a Python (3.10 or newer) in any folder; its arguments follow them."""
    return python_command(python, "from ddplaunch.cli import main; main()")


def main() -> None:
    """Run the command line and exit with its exit code."""
    exit_fast(run_command_line())


def run_command_line() -> int:
    """Run the command line and return its exit code; users never see a traceback of ddplaunch itself."""
    if sys.platform == "win32":
        print("ddplaunch does not support Windows; it runs in WSL 2.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    AT_START.take()
    gc.set_threshold(100_000)  # objects: collections during the imports take 5 % of a start
    _open_standard_streams()
    try:
        if sys.argv[1:] in (["--version"], ["-V"]):  # without click and all features
            _print_version()
            code = None
        else:
            from ddplaunch.cli.click_commands import run_with_click  # here, so that Ctrl-C is handled meanwhile

            code = run_with_click(sys.argv[1:])
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


def _print_version() -> None:
    try:
        print(f"ddplaunch {__version__}")
    except BrokenPipeError:  # unbuffered output, as PYTHONUNBUFFERED sets it, to a reader that has ended
        pass


def _flush() -> None:
    """Flush stdout. Raises OSError only if the disk is full."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno in _FULL:
            raise


def _out_of_memory_hint() -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return "stop other processes that use memory"
    return f"the limit on the memory of a process is {limit >> 10} KiB (ulimit -v): raise it"


def _report_internal_error(error: Exception) -> int:
    """Report a bug of ddplaunch and save the traceback to a file; return the exit code."""
    summary = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in _FULL:  # stdout's file
        what = f"cannot write {error.filename or 'the output'}: {error.strerror}"
        print_error(what, "free some space, or write elsewhere", EXIT_OUTPUT)
        return EXIT_OUTPUT
    if shadow := _find_stdlib_shadow():
        hint = "rename it, or take its folder out of PYTHONPATH"
        print_error(f"{shadow}, which ddplaunch and torch import: {summary}", hint, EXIT_USAGE)
        return EXIT_USAGE
    if was_reinstalled():
        print_error(f"{REINSTALLED_TEXT}: {summary}", "type it again", EXIT_UNAVAILABLE)
        return EXIT_UNAVAILABLE
    try:
        # without the command line, which may contain a token
        details = f"ddplaunch {__version__}, Python {sys.version}\n{format_trace(error)}"
        import tempfile

        with tempfile.NamedTemporaryFile(prefix="ddplaunch-bug-", suffix=".txt", delete=False) as file:
            file.write(details.encode(errors="backslashreplace"))
        hint = f"the details are in {file.name}"
    except OSError:
        hint = "the details could not be written to a file"
    print_error(f"bug in ddplaunch: {summary}", hint, EXIT_SOFTWARE)
    return EXIT_SOFTWARE


def _find_stdlib_shadow() -> str | None:
    """Describe a user's file that was imported in place of a module of Python: "/x/json.py has the name of …"."""
    home = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
    for name in sorted(sys.stdlib_module_names & sys.modules.keys()):
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and not os.path.realpath(file).startswith(home):
            return f"{file} has the name of a module of Python"
    return None


def _open_standard_streams() -> None:
    """Open missing descriptors 0 to 2 on /dev/null, so that no other file of ddplaunch gets these numbers."""
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
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes


def exit_fast(code: int) -> None:
    """Flush the output and exit without finalizing the interpreter, which would only cost time."""
    if pmi := sys.modules.get("ddplaunch.system.clusters.hydra_pmi"):
        pmi.finalize()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader has closed the pipe, as `| head` does
            pass
    os._exit(code)
