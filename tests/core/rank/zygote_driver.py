"""A zygote that starts many ranks, one after the other, with the configuration and the job of a real launch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ddplaunch.core.agent.zygote_process import ZYGOTE_SCRIPT
from ddplaunch.core.rank.zygote_channel import receive_message, send_message
from tests.conftest import clean_environment, ddplaunch_command, run_command, write_program
from tests.constant_override import write_launcher
from tests.scaled_timeouts import scaled_timeout

RECORD = """
    import json
    from ddplaunch.core.agent import zygote_socket
    from ddplaunch.core.agent import zygote_process

    def record(owner, name, choose):
        original = getattr(owner, name)

        def call(*arguments):
            if (recorded := choose(*arguments)) is not None:
                with open(name + ".json", "w") as file:
                    json.dump(recorded, file)
            return original(*arguments)

        setattr(owner, name, call)

    record(zygote_process, "spawn_zygote", lambda config, fd, environment, *rest: [config, dict(environment)])
    record(zygote_socket, "encode_message", lambda message: message if "job" in message else None)
"""


class ZygoteDriver:
    """The zygote of ``ddplaunch run --nproc 1 OPTIONS train.py``; each rank runs the ``train.py`` of that moment."""

    def __init__(self, folder: Path, options: Sequence[str], environ: Mapping[str, str]) -> None:
        self.folder = folder
        write_program(folder, "train.py", "")
        words = ddplaunch_command("run", "--nproc", "1", *options, "train.py")
        words[0] = str(write_launcher(folder, RECORD))
        assert run_command(words, folder, environ).returncode == 0
        config, environment = json.loads((folder / "spawn_zygote.json").read_text())
        text = (folder / "encode_message.json").read_text()
        removed = os.path.dirname(json.loads(text)["job"]["error_file"])
        self._request: dict[str, Any] = json.loads(text.replace(removed, str(folder)))
        config = {**config, "parent_pid": os.getpid(), "remove_on_exit": []}
        self._socket, child_socket = socket.socketpair()
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, ZYGOTE_SCRIPT, str(child_socket.fileno()), json.dumps(config), "-" * 4096],
                cwd=folder,
                env=clean_environment(environment),
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket.settimeout(scaled_timeout(90))
        self._receive("ready")

    def run(self, stdout: IO[Any] | None = None, **changed: object) -> subprocess.CompletedProcess[str]:
        """Run ``train.py`` in a rank, with these changes to its job; return output, and exit code or minus signal."""
        channel, rank_channel = socket.socketpair()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, channel, rank_channel:
            with open(os.devnull) as stdin:
                given = {"stdin": stdin, "stdout": stdout or out, "stderr": err, "rank_channel": rank_channel}
                fds = [file.fileno() for file in given.values()]
                job = {**self._request["job"], **changed}
                send_message(self._socket, {**self._request, "job": job, "fds": list(given)}, fds)
            rank_channel.close()
            exited = self._receive("exited")
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "surrogateescape"))
        return subprocess.CompletedProcess([], os.waitstatus_to_exitcode(exited["status"]), *texts)

    def _receive(self, op: str) -> dict[str, Any]:
        """Return the next message of this kind."""
        while True:
            message, fds = receive_message(self._socket)
            for fd in fds:
                os.close(fd)
            if message["op"] == op:
                return dict(message)

    def __enter__(self) -> ZygoteDriver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
        self._process.wait(scaled_timeout(30))
