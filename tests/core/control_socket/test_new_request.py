"""Tests that a new request to a running job needs its file, a command and a line, in a copy of the package."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ddplaunch
from tests.conftest import clean_environment

REQUEST = """
from __future__ import annotations

from msgspec import Struct
from ddplaunch.core.control_socket.server import RequestContext
from ddplaunch.core.control_socket.request import Request


class Counted(Struct, frozen=True):
    rank: int


class CountRanks(Request[Counted], frozen=True):
    answers = (Counted,)

    def handle(self, context: RequestContext) -> None:
        context.send(Counted(len(context.job.status().ranks)))
        context.finish()
"""
COMMAND = """
import click

from ddplaunch.core.control_socket import client
from ddplaunch.features.count.request import CountRanks
from ddplaunch.features.runs.run_lookup import find_running


@click.command()
def count():
    click.echo(client.send_request(find_running("toy").path, CountRanks()).rank)
"""


def test_a_request_is_a_file_a_command_and_a_line(tmp_path: Path):
    package = shutil.copytree(
        Path(ddplaunch.__file__).parent, tmp_path / "ddplaunch", ignore=shutil.ignore_patterns("__pycache__")
    )
    feature = package / "features" / "count"
    feature.mkdir()
    (feature / "__init__.py").touch()
    (feature / "request.py").write_text(REQUEST)
    (feature / "command.py").write_text(COMMAND)
    table = package / "cli" / "click_commands.py"
    line = 'COMMANDS = {\n    "count": ("features.count.command", "Count."),\n'
    table.write_text(table.read_text().replace("COMMANDS = {\n", line))

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ddplaunch", *words],
            env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start("run", "--run-id", "toy", "--nproc", "3", "--no-python", "sh", "-c", "echo up; exec sleep 600") as job:
        assert job.stdout
        assert [job.stdout.readline()[-3:] for _ in range(3)] == ["up\n"] * 3
        try:
            with start("count") as asking:
                assert asking.stdout
                assert asking.stdout.read() == "3\n"
        finally:
            job.send_signal(signal.SIGTERM)
