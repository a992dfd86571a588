"""Runs a command below a guardian process, which kills all its descendants, also when the doctor itself is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click

from ddplaunch.cli.console_output import print_note
from ddplaunch.system.plan.launch_command import python_command
from ddplaunch.system.processes.proc_utils import (
    KILL_TIMEOUT_S,
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    list_descendants,
)

STOP_GRACE_S = 40.0  # between SIGTERM and SIGKILL; `ddplaunch run` gives its ranks 30
_GUARDIAN_STATEMENT = "from ddplaunch.features.doctor.command_run import guardian_main; guardian_main()"


def run_command(words: Sequence[str], environ: Mapping[str, str], log: str, timeout: float) -> int | str | None:
    """Run a command; return its exit code (negative: a signal), why it cannot start, or None after the timeout.

    Its output goes to ``log``. All its processes are ended, also on Ctrl-C; a second Ctrl-C kills them without grace.
    """
    with (
        open(log, "wb") as file,
        subprocess.Popen(
            [*python_command(sys.executable, _GUARDIAN_STATEMENT), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environ,
            start_new_session=True,
        ) as guardian,
    ):
        assert guardian.stdin
        assert guardian.stdout
        try:
            if not select.select([guardian.stdout], [], [], timeout)[0]:
                return None
            reply = guardian.stdout.read().decode()
            return int(reply) if reply.lstrip("-").isdecimal() else reply or "the process that started it was killed"
        except KeyboardInterrupt:
            _kill_on_second_signal(guardian)
            click.echo(err=True)
            print_note("stopping the command; Ctrl-C again kills it at once")
            raise
        finally:
            before = _kill_on_second_signal(guardian)
            guardian.stdin.close()
            try:
                guardian.wait(STOP_GRACE_S + KILL_TIMEOUT_S + 5)
            except subprocess.TimeoutExpired:
                guardian.kill()
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill_on_second_signal(guardian: subprocess.Popen[bytes]) -> dict[signal.Signals, Any]:
    """Make Ctrl-C or SIGTERM kill the command at once while it is being stopped; return the previous handlers."""
    signals = (signal.SIGINT, signal.SIGTERM)
    return {number: signal.signal(number, lambda *_: guardian.send_signal(signal.SIGINT)) for number in signals}


def guardian_main() -> None:
    """Main function of the guardian: run the command in sys.argv, print its exit code, and end all its processes.

    At the end of stdin the command is stopped, on SIGINT killed.
    """
    adopt_orphans()
    words, stopped = sys.argv[1:], threading.Event()
    try:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, preexec_fn=die_with_parent
        )
    except OSError as error:
        _kill_descendants_and_exit(f"{words[0]}: {error.strerror}")

    def stop() -> None:
        os.read(0, 1)
        stopped.set()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        while _has_process_in_group(child.pid) and time.monotonic() < deadline:  # a shell ends before what it started
            time.sleep(0.05)
        _kill_descendants_and_exit("")

    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    try:
        code = child.wait()
        if stopped.is_set():
            stopper.join()
    except KeyboardInterrupt:
        _kill_descendants_and_exit("")
    _kill_descendants_and_exit(str(code))


def _has_process_in_group(group: int) -> bool:
    """Whether a descendant of this process is in process group ``group``; those in others may outlive their parent."""
    for pid in list_descendants(os.getpid()):
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                return True
    return False


def _kill_descendants_and_exit(reply: str) -> NoReturn:
    """Kill all descendants, print the reply and exit."""
    kill_descendants(os.getpid())
    os.write(1, reply.encode())
    os._exit(0)
