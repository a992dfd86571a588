"""Tests of ``ddplaunch report --serve``: the page of a running job, in a browser on this machine."""

import http.client
import re
import signal
import socket
import struct

import pytest

from tests.conftest import assert_refused, free_port, write_program
from tests.observe.history.test_history import keep
from tests.start_modes import LIGHT

pytestmark = pytest.mark.usefixtures("state")

RUN = "served"

WAITS = """
    import os, sys, time
    print("<b>up</b>", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "1":
        while not os.path.exists("fail"):
            time.sleep(0.05)
        sys.exit(3)
    time.sleep(600)
"""


@pytest.fixture
def job(start_ddplaunch, tmp_path):
    write_program(tmp_path, "waits.py", WAITS)
    job = start_ddplaunch("run", "--nproc", "2", "--run-id", RUN, "--max-restarts", "0", *LIGHT, "waits.py")
    job.wait_for("up", 2)
    return job


@pytest.fixture
def served(start_ddplaunch):
    """Serve a run; return the process, the port and the path of its page."""

    def begin(*words: str):
        process = start_ddplaunch("report", *words)
        process.wait_for("Ctrl-C stops this server")
        match = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w-]{22}/) shows", process.stdout())
        return process, int(match[1]), match[2]

    return begin


def ask(port: int, path: str, method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


@pytest.mark.ci
def test_a_job_while_it_runs_and_after(job, served, tmp_path):
    process, port, path = served(RUN, "--serve")
    status, headers, text = ask(port, path)
    assert status == 200
    assert 'data-renewed="' in text
    assert '<span class="fate running">running</span>' in text
    assert "&lt;b&gt;up&lt;/b&gt; 1" in text
    assert "was running" in text
    assert headers["Cache-Control"] == "no-store"
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    (tmp_path / "fail").touch()
    assert job.wait() == 3
    served_again, port, path = served(RUN, "--serve", str(free_port()))
    text = ask(port, path)[2]
    assert '<span class="fate failed">failed</span>' in text
    assert "exit code 3" in text
    assert "data-renewed" not in text
    for each in process, served_again:
        each.signal(signal.SIGINT)
        assert each.wait() == 0


def test_the_server_refuses_other_hosts_paths_methods_and_addresses(served):
    keep(run_id=RUN, code=1)
    process, port, path = served(RUN, "--serve")
    assert ask(port, path)[0] == 200
    assert ask(port, path, Host="127.0.0.1:9")[0] == 200
    for bad in "evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "":
        assert ask(port, path, Host=bad)[0] == 403
    for other in "/", path[:-1], f"{path}x", "/etc/passwd", f"{path}../../etc/passwd":
        assert ask(port, other)[0] == 404
    for method in "POST", "PUT", "DELETE", "OPTIONS", "HEAD":
        assert ask(port, path, method)[0] == 501
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET ")
        assert ask(port, path)[0] == 200, "a silent client delays no other"
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", port))
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b"GET / HT")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    assert ask(port, path)[0] == 200
    assert process.stderr() == ""


def test_invalid_ports_are_refused(run_in_fork):
    keep(run_id=RUN, code=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, expected in (
            (("--serve", "x"), "--serve x: expected a port"),
            (("--serve", "70000"), "--serve 70000: expected a port"),
            (("--serve", port), f"--serve {port}: Address already in use"),
            (("--serve", "0", "--json"), "--serve and --json contradict each other"),
            (("--html", "a.html", "--serve"), "--serve and --html contradict each other"),
        ):
            assert_refused(run_in_fork("report", RUN, *words), expected)
