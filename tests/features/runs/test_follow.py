"""Tests of following output and waiting for a job's end, with a real run and a misbehaving one."""

import pytest
from click.testing import CliRunner

from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.core.control_socket.server import MAX_STREAMING_CLIENTS
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.features.runs.logs import logs
from ddplaunch.features.runs.output_request import MAX_UNSENT_BYTES, OutputChunk, TailOutputRequest
from ddplaunch.observe.history import history_store
from tests.conftest import wait_until, write_program
from tests.core.control_socket.test_server import find_socket_path
from tests.start_modes import LIGHT

SPEAKS = """
    import os, sys, time
    print("begun", os.environ["RANK"], flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    for number in range(3):
        print("then", number, flush=True)
    print("no end of line", end="", flush=True)
"""


@pytest.fixture
def job(start_ddplaunch, tmp_path):
    """Two ranks that wait for the file ``go``."""
    write_program(tmp_path, "speaks.py", SPEAKS)
    begun = start_ddplaunch("run", "--nproc", "2", "--no-history", *LIGHT, "speaks.py", tmp_path / "go")
    begun.wait_for("begun", 2)
    return begun


def printed(pieces) -> dict[int, str]:
    found: dict[int, str] = {}
    for piece in pieces:
        found[piece.rank] = found.get(piece.rank, "") + piece.data.decode()
    return found


def test_output_in_memory_and_following_to_the_last_byte(job, tmp_path):
    path = find_socket_path(job)
    assert printed(client.stream_replies(path, TailOutputRequest())) == {0: "begun 0\n", 1: "begun 1\n"}
    assert printed(client.stream_replies(path, TailOutputRequest((1,)))) == {1: "begun 1\n"}
    assert printed(client.stream_replies(path, TailOutputRequest((7,)))) == {}
    pieces = client.stream_replies(path, TailOutputRequest(follow=True))
    first = [next(pieces), next(pieces)]
    assert printed(first) == {0: "begun 0\n", 1: "begun 1\n"}
    (tmp_path / "go").touch()
    rest = "then 0\nthen 1\nthen 2\nno end of line"
    assert printed(pieces) == {0: rest, 1: rest}
    assert job.wait() == 0


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("words", [("--log-dir", "logs"), ()], ids=["files", "memory"])
@pytest.mark.parametrize("typed", [("--follow",), ()], ids=["follow", "once"])
def test_a_job_that_ends_before_the_request_for_its_output(start_ddplaunch, tmp_path, monkeypatch, words, typed):
    """It was found running; its output is complete all the same, and nothing has failed."""
    write_program(tmp_path, "speaks.py", SPEAKS)
    job = start_ddplaunch("run", "--run-id", "p", "--nproc", "2", *words, *LIGHT, "speaks.py", tmp_path / "go")
    job.wait_for("begun", 2)
    wait_until(lambda: history_store.read_run_record("p"), "the record of the run")
    at_once = client.stream_replies

    def too_late(*arguments):
        (tmp_path / "go").touch()
        assert job.wait() == 0
        return at_once(*arguments)

    monkeypatch.setattr(client, "stream_replies", too_late)
    done = CliRunner().invoke(logs, ["p", "--rank", "1", *typed])
    whole = "begun 1\nthen 0\nthen 1\nthen 2\nno end of line"
    assert (done.exit_code, done.stdout, done.stderr) == (0, whole if typed or not words else "begun 1\n", "")


def test_the_number_of_followers_is_limited(job, tmp_path):
    path = find_socket_path(job)
    followers = [client.stream_replies(path, TailOutputRequest(follow=True)) for _ in range(MAX_STREAMING_CLIENTS)]
    for each in followers:
        next(each)
    with pytest.raises(JobNotResponding, match="clients already follow this job"):
        next(client.stream_replies(path, TailOutputRequest(follow=True)))
    assert client.send_request(path, StatusQuery()).world_size == 2, "others are still answered"
    followers.pop().close()  # type: ignore[attr-defined]  # it is a generator

    def admitted() -> bool:
        try:
            followers.append(client.stream_replies(path, TailOutputRequest(follow=True)))
            next(followers[-1])
        except JobNotResponding:
            return False
        return True

    wait_until(admitted, "the place of the one that left")
    (tmp_path / "go").touch()
    assert job.wait() == 0


class Slow:
    """A client that reads nothing, and the job that it follows."""

    def __init__(self, unread: int) -> None:
        self.job = self.streams = self
        self.unsent_bytes = unread
        self.sent: list[object] = []

    def status(self) -> None: ...

    def on_job_end(self, leave) -> None: ...

    def guard(self, callback):
        return callback

    def send(self, message: object) -> None:
        self.sent.append(message)

    def ranks_in_memory(self) -> list[int]:
        return [0, 1]

    def tail(self, rank: int) -> bytes:
        return b"before"

    def subscribe(self, on_output) -> None:
        self.on_output = on_output

    def unsubscribe(self, on_output) -> None:
        pass


def test_a_slow_reader_misses_some_and_gets_a_note():
    slow = Slow(0)
    TailOutputRequest((1,), follow=True).handle(slow)  # type: ignore[arg-type]
    slow.on_output(0, b"another rank")
    slow.on_output(1, b"one")
    slow.unsent_bytes = MAX_UNSENT_BYTES + 1
    slow.on_output(1, b"two")
    slow.on_output(1, b"three")
    slow.unsent_bytes = 0
    slow.on_output(1, b"four")
    assert slow.sent[1:] == [OutputChunk(1, b"before"), OutputChunk(1, b"one"), OutputChunk(1, b"four", missed=8)]
