"""Tests that a feature with a command, a request and a node side needs a folder and a line, in a copy."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import clean_environment
from tests.package_copy import add_feature, copy_package

FEATURE = """
from ddplaunch.core.feature import Command, Feature


class Count(Feature):
    commands = (Command("count", "Count."),)
    requests = ("request",)

    def make_node_side(self, context):
        from ddplaunch.features.count.node import Counter

        return Counter(context)


FEATURE = Count()
"""
NODE = """
from ddplaunch.core.events import JobEnded, RankStarted
from ddplaunch.core.feature import NodeSide


class Counter(NodeSide):
    def __init__(self, context):
        self._context, self._count = context, 0

    def observe(self, event):
        self._count += isinstance(event, RankStarted)
        if isinstance(event, JobEnded):
            self._context.screen.show_note(f"{self._count} ranks have started")
"""
REQUEST = """
from __future__ import annotations

from msgspec import Struct

from ddplaunch.core.control_socket.request import Request, RequestContext


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


def test_a_feature_is_a_folder_and_a_line(tmp_path: Path):
    add_feature(copy_package(tmp_path), "count", feature=FEATURE, node=NODE, request=REQUEST, command=COMMAND)

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ddplaunch", *words],
            env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
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
        assert "ddplaunch: 3 ranks have started\n" in job.communicate()[1]
