"""A node that was started by hand, and who passes for node 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess

import pytest

from tests.conftest import clean_environment, command, write
from tests.patience import patience

pytestmark = pytest.mark.slow

MARK = b"\x1eddplaunch doctor "


@pytest.fixture
def false_node_0(tmp_path):
    """Take in a node with no questions asked; return its process, and what it says and hears."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1] - 1
        place = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
        process = subprocess.Popen(
            command("doctor", *place),
            cwd=tmp_path,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        listening.settimeout(patience(20))
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb", buffering=0) as lines:
            connection.settimeout(patience(60))
            lines.write(MARK + b'{"nonce": "1"}\n')
            assert json.loads(lines.readline().removeprefix(MARK))["node_rank"] == 1
            lines.write(MARK + b'{"refused": null, "proof": null}\n')
            yield process, lines
        process.communicate(timeout=patience(20))


def test_it_has_nothing_run_here(false_node_0, tmp_path):
    process, lines = false_node_0
    write(tmp_path, "torch.py", "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    elsewhere = {"cwd": "/proc/nowhere", "toward": "127.0.0.1", "environ": {"PYTHONPATH": str(tmp_path)}}
    assert json.loads(lines.readline().removeprefix(MARK)), "its version"
    lines.write(json.dumps({"ask": "Look", "about": elsewhere}).encode() + b"\n")
    facts = json.loads(lines.readline().removeprefix(MARK))
    here = [each for each in facts["folders"] if each["what"] == "the current folder"]
    assert [each["error"] for each in here] == [None]
    assert facts["torch"]
    assert "ran" not in os.listdir(tmp_path)
    lines.write(b'{"ask": "End", "about": {"code": 7}}\n')
    assert process.wait(patience(10)) == 7


def test_it_asks_nonsense(false_node_0):
    process, lines = false_node_0
    lines.write(b'{"ask": "Run", "about": {"words": ["true"]}}\n')
    _, err = process.communicate(timeout=patience(20))
    assert process.returncode == 1
    assert "asks what ddplaunch cannot read\n  use the same version on all nodes\n" in err
