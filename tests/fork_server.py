"""Runs a command in a fork of an interpreter that has imported it: ``ddplaunch`` without ranks, and ``torchrun``.

That takes 15 ms instead of 150, or instead of 1.8 s. The command reads its own words, variables, folder and descriptors
as ever, and ends by its own exit. ``python fork_server.py FD COMMAND`` is that interpreter: it forks for each request
on the socket FD.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Any

MODULES = {
    "ddplaunch": [
        f"ddplaunch.{name}" for name in (
            "cli.run_command", "cli.dry_run", "cli.plan_text", "system.plan.plan", "features.devices.command",
            "features.manifest.command", "features.submit.command", "features.submit.slurm",
        )
    ],
    "torchrun": ["torch.distributed.launcher.api"],
}  # fmt: skip
"""By command: imported before the first request; the others when a command asks for them, as ever."""


CONSTANTS = "DDPLAUNCH_TEST_CONSTANTS"
"""A variable of a command: constants of the package that it changes, as "core.net.link.CONNECT_TIMEOUT_S=0.5 …"."""

HOST = "DDPLAUNCH_TEST_HOST"
"""A variable of a command: the name of the machine on which it believes to be."""

_AT_START = ("LD_", "PYTHON")
"""How the variables begin that are read when a process starts: each set of them needs an interpreter of its own.

But not for ``torchrun``, which only hands them on.
"""


class ForkServerPool:
    """Runs commands in forks of a few interpreters, as many as are needed at once."""

    def __init__(self, command: str = "ddplaunch") -> None:
        self._command = command
        self._forked: dict[tuple[tuple[str, str], ...], ForkServer] = {}

    def run(
        self, words: Sequence[str], cwd: Path, environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run the command with ``words`` to its end, with an empty stdin; raises ``subprocess.TimeoutExpired``."""
        kind = tuple(sorted(item for item in environ.items() if item[0].startswith(_AT_START)))
        if self._command == "torchrun":
            kind = ()
        if kind not in self._forked:
            at_start = {name: value for name, value in environ.items() if kind or not name.startswith(_AT_START)}
            self._forked[kind] = ForkServer(self._command, at_start)
        try:
            return self._forked[kind].run(words, cwd, environ, timeout)
        except subprocess.TimeoutExpired:
            self._forked.pop(kind).close()
            raise

    def close(self) -> None:
        """End the interpreters."""
        for forked in self._forked.values():
            forked.close()
        self._forked.clear()


TORCHRUN = ForkServerPool("torchrun")
"""Closed at the end of the session (tests/conftest.py)."""


class ForkServer:
    """One interpreter, which forks for one command at a time."""

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), command],
                env=environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def run(
        self, words: Sequence[str], cwd: Path, environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As :meth:`ForkServerPool.run`; after a time-out it is only good for closing."""
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            request = {"words": words, "cwd": str(cwd), "environ": dict(environ), "files": [out.name, err.name]}
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            self._socket.settimeout(timeout)
            try:
                answer = self._socket.recv(4)
            except TimeoutError:
                raise subprocess.TimeoutExpired(list(words), timeout) from None
            assert len(answer) == 4, "the interpreter that forks has died"
            texts = [file.read().decode(errors="surrogateescape") for file in (out, err)]
        return subprocess.CompletedProcess(list(words), int.from_bytes(answer, "little", signed=True), *texts)

    def close(self) -> None:
        """End the interpreter and what it runs."""
        self._socket.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def serve(client: socket.socket, command: str) -> None:
    """Fork for each line on the socket until the other end is closed."""
    with client, client.makefile("rb") as lines:
        for line in lines:
            if (pid := os.fork()) == 0:
                lines.close()
                client.close()
                _run_in_child(command, json.loads(line))
            client.sendall(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]).to_bytes(4, "little", signed=True))


def _run_in_child(command: str, request: dict[str, Any]) -> None:
    for fd, path in enumerate(request["files"], start=1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = [command, *request["words"]]
    sys.path.append(os.getcwd())  # where ``python -m`` has it
    if command == "torchrun":
        run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
        sys.exit()
    for constant in os.environ.pop(CONSTANTS, "").split():
        name, _, value = constant.partition("=")
        module, _, attribute = name.rpartition(".")
        assert isinstance(getattr(import_module(f"ddplaunch.{module}"), attribute), float)
        setattr(import_module(f"ddplaunch.{module}"), attribute, float(value))
    if host := os.environ.pop(HOST, ""):
        seen = os.uname()
        os.uname = lambda: os.uname_result((seen.sysname, host, *seen[2:]))
    import_module("ddplaunch.cli").main()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    command = sys.argv[2]
    for name in MODULES[command]:
        import_module(name)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    serve(socket.socket(fileno=int(sys.argv[1])), command)
