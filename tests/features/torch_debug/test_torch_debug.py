"""Tests of ``--torch-debug``: torch's own pages of a real job, on loopback, and what is refused."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.features.torch_debug import node
from ddplaunch.features.torch_debug.feature import FEATURE
from ddplaunch.features.torch_debug.options import TorchDebug
from ddplaunch.system.target.target import Target, TargetKind
from tests.conftest import assert_refused, wait_until, write_program
from tests.scaled_timeouts import scaled_timeout

HANG = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("waiting", flush=True)
if dist.get_rank() == 1:
    time.sleep(600)  # late
dist.all_reduce(torch.ones(1))
"""


def is_open(address):
    with socket.socket() as client:
        return client.connect_ex(address) == 0


@pytest.mark.ci
@pytest.mark.skipif(find_spec("tabulate") is None, reason="torch's debug server needs tabulate")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_pages_of_a_job(start_ddplaunch, tmp_path, number):
    """They show the stacks of all ranks, on 127.0.0.1 alone, and end with the job, however it ends."""
    program = write_program(tmp_path, "hang.py", HANG)
    job = start_ddplaunch("run", "--torch-debug", "--nproc", "2", program)
    job.wait_for("waiting", 2)

    def find_address():
        return re.search(r"ddplaunch: torch's debug server: http://127\.0\.0\.1:(\d+)\n", job.stderr())

    wait_until(find_address, "the address of the pages", timeout=60)
    port = int(find_address()[1])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stacks", timeout=scaled_timeout(30)) as page:
        text = page.read().decode()
    assert re.findall(r"Rank (\d): http://127\.0\.0\.1:\d+/", text) == ["0", "1"]
    assert "hang.py&#34;, line 6" in text or 'hang.py", line 6' in text
    assert not is_open(("127.0.0.2", port))
    job.signal(number)
    job.assert_nothing_left()
    wait_until(lambda: not is_open(("127.0.0.1", port)), "the end of the pages")


def test_refusals(run_in_fork, tmp_path):
    write_program(tmp_path, "hang.py", HANG)
    assert_refused(
        run_in_fork(
            "run", "--torch-debug", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "hang.py"
        ),
        "--torch-debug works on one node, as torch protects its pages by nothing; this job has 2",
    )
    done = run_in_fork("run", "--torch-debug", "--no-python", "true")
    assert_refused(done, "--torch-debug works only with Python")


@pytest.mark.parametrize(
    ("version", "modules", "expected"),
    [
        ("2.9.1", ("jinja2", "tabulate", "requests"), "--torch-debug needs torch 2.11 or later: this is 2.9"),
        (None, ("jinja2", "tabulate", "requests"), "--torch-debug needs torch 2.11 or later: none is installed"),
        ("2.11.0+cu130", ("jinja2", "requests"), "torch's debug server needs tabulate"),
        ("3.0.0", (), "torch's debug server needs jinja2 and tabulate and requests"),
    ],
)
def test_what_is_not_installed(monkeypatch, tmp_path, version, modules, expected):
    """One sentence says what is missing, before anything starts."""
    for name in ("torch", *modules) if version else modules:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    if version:
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    options = Options({TorchDebug: TorchDebug(torch_debug=True)}, {})
    plan = SimpleNamespace(target=Target(TargetKind.SCRIPT, "train.py"), nnodes=1)
    with pytest.raises(UsageError, match=re.escape(expected)):
        FEATURE.check(options, plan)


def start_pages(monkeypatch, start):
    """Start an attempt, with this in place of the process of the pages; return the notes."""
    notes = []
    monkeypatch.setattr(node, "HelperProcess", start)
    context = SimpleNamespace(loop=None, job=SimpleNamespace(emit=lambda event: notes.append(event.text)))
    plan = SimpleNamespace(local_ranks=[0], rank_environment=lambda rank, number: {})
    node.DebugServerSide(context).on_attempt_start(SimpleNamespace(plan=plan, number=0))
    return notes


def test_modules_in_the_folder_of_the_user_replace_none_of_the_pages(monkeypatch, tmp_path):
    """A socket.py there is not that of Python."""
    write_program(tmp_path, "socket.py", "raise SystemExit('the socket of the user')")
    commands = []
    start_pages(monkeypatch, lambda loop, command, *_, **__: commands.append(command))
    done = subprocess.run(
        [*commands[0][:-1], commands[0][-1].replace("main()", "print(main.__name__)")],
        cwd=tmp_path, capture_output=True, text=True, timeout=scaled_timeout(30),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "main\n"), done.stderr


def test_a_process_that_cannot_be_started_is_a_note(monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    expected = "torch's debug server cannot be started: Resource temporarily unavailable"
    assert start_pages(monkeypatch, refuse) == [expected]
