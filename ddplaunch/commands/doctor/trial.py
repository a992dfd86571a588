"""One run of a command, below a process of ours that ends all it has started, also when we are killed."""

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

from ddplaunch.cli.say import print_note
from ddplaunch.plan.command import python_command
from ddplaunch.rank.processes import KILL_TIMEOUT_S, adopt_orphans, die_with_parent, kill_descendants, list_descendants

STOP_GRACE_S = 40.0  # seconds between SIGTERM and SIGKILL: `ddplaunch run` gives its ranks 30
_KEEPER_STATEMENT = "from ddplaunch.commands.doctor.trial import keeper_main; keeper_main()"


def run_command(words: Sequence[str], environ: Mapping[str, str], log: str, timeout: float) -> int | str | None:
    """Run a command; return its exit code, negative for a signal, why it cannot start, or None where it took too long.

    What it prints goes to ``log``. Nothing of it is left, also where this is interrupted; a second time, without grace.
    """
    with (
        open(log, "wb") as file,
        subprocess.Popen(
            [*python_command(sys.executable, _KEEPER_STATEMENT), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environ,
            start_new_session=True,
        ) as keeper,
    ):
        assert keeper.stdin
        assert keeper.stdout
        try:
            if not select.select([keeper.stdout], [], [], timeout)[0]:
                return None
            said = keeper.stdout.read().decode()
            return int(said) if said.lstrip("-").isdecimal() else said or "the process that started it was killed"
        except KeyboardInterrupt:
            _kill_on_second_signal(keeper)
            click.echo(err=True)
            print_note("stopping the command; Ctrl-C again kills it at once")
            raise
        finally:
            before = _kill_on_second_signal(keeper)
            keeper.stdin.close()
            try:
                keeper.wait(STOP_GRACE_S + KILL_TIMEOUT_S + 5)
            except subprocess.TimeoutExpired:
                keeper.kill()
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill_on_second_signal(keeper: subprocess.Popen[bytes]) -> dict[signal.Signals, Any]:
    """Have Ctrl-C, or SIGTERM, kill at once what is being stopped; return the handlers so far."""
    hurried = (signal.SIGINT, signal.SIGTERM)
    return {number: signal.signal(number, lambda *_: keeper.send_signal(signal.SIGINT)) for number in hurried}


def keeper_main() -> None:
    """In a process of its own: run our arguments, say how they ended, and leave nothing of them.

    They are stopped when stdin ends, and killed on SIGINT.
    """
    adopt_orphans()
    words, stopped = sys.argv[1:], threading.Event()
    try:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, preexec_fn=die_with_parent
        )
    except OSError as error:
        _exit(f"{words[0]}: {error.strerror}")

    def stop() -> None:
        os.read(0, 1)
        stopped.set()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        until = time.monotonic() + STOP_GRACE_S
        while _has_process_in_group(child.pid) and time.monotonic() < until:  # a shell ends before what it started
            time.sleep(0.05)
        _exit("")

    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    try:
        code = child.wait()
        if stopped.is_set():
            stopper.join()
    except KeyboardInterrupt:
        _exit("")
    _exit(str(code))


def _has_process_in_group(group: int) -> bool:
    """Whether any process below us is in this process group; what has left it was to outlive its parent."""
    for pid in list_descendants(os.getpid()):
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                return True
    return False


def _exit(said: str) -> NoReturn:
    """End with all that is below us."""
    kill_descendants(os.getpid())
    os.write(1, said.encode())
    os._exit(0)
