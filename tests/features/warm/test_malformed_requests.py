"""Tests of malformed requests to a warm zygote: it goes on serving, without delay, and keeps nothing."""

import os
import random
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from ddplaunch.core.rank import zygote_channel
from tests.conftest import wait_until
from tests.features.warm.conftest import Shell
from tests.scaled_timeouts import scaled_timeout

pytestmark = pytest.mark.slow

RUN = b'{"op": "run"}'
REQUESTS = [
    b"", b"[1]", b"null", b"3", b"{}", b'"op"', b'{"op": 3}', b'{"op": null}', b'{"op": []}', b'{"op": "run"',
    b"\xff\xfe", b"[" * 4000, b'{"op":' * 600, b'{"op": "run"}' * 9, RUN,
]  # fmt: skip
ORDERS = [b"", b"\xff", b"[" * 100_000, b"3", b"{}", b'{"fingerprint": 3}', b'{"fingerprint": {}, "config": []}']


def frame(body: bytes) -> bytes:
    return zygote_channel.HEADER.pack(len(body)) + body


def ask(path: Path, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send data, and wait until the zygote closes the connection."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(scaled_timeout(10))
        asking.connect(str(path))
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(asking, [data], fds) if data else asking.shutdown(socket.SHUT_WR)
            while asking.recv(1 << 16):
                pass


def test_malformed_requests_do_not_end_it(shell: Shell):
    made = shell.run().made
    (path,) = (shell.runtime / "ddplaunch-warm").iterdir()
    before = _list_fds_once_idle(made, path)
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as file, open("/dev/zero") as endless, open(os.devnull) as nothing:
        some = [reading, writing, file.fileno(), endless.fileno(), nothing.fileno()]
        for body in REQUESTS:
            for count in (0, 1, 2, 3, 5):
                ask(path, frame(body), some[:count])
        for data in (b"", b"\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff{}", frame(RUN)[:-1], os.urandom(9000)):
            ask(path, data)
        ask(path, frame(RUN), [nothing.fileno()] * 40)
        chance = random.Random(23)
        for _ in range(50):
            ask(path, frame(RUN), chance.choices(some, k=3))
    for body in ORDERS:
        send_order(path, body)
    os.close(reading)
    os.close(writing)
    assert shell.run().made == made
    assert _list_fds_once_idle(made, path) == before


def send_order(path: Path, body: bytes) -> None:
    (ours, theirs), (line, its) = socket.socketpair(), socket.socketpair()
    with ours, theirs, line, its, tempfile.TemporaryFile() as file:
        file.write(body)
        file.flush()
        ask(path, frame(RUN), [file.fileno(), theirs.fileno(), its.fileno()])


def test_a_client_that_does_not_read_does_not_block_it(shell: Shell):
    made = shell.run().made
    (path,) = (shell.runtime / "ddplaunch-warm").iterdir()
    full, other = socket.socketpair()
    with full, other, tempfile.TemporaryFile() as file:
        full.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                full.send(b"x" * 4096)
        full.setblocking(True)
        file.write(b'{"fingerprint": {}}')
        file.flush()
        ask(path, frame(RUN), [file.fileno(), other.fileno(), full.fileno()])
    wait_until(lambda: shell.list_zygotes() == [made], "a reply of the zygote")


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _list_fds_once_idle(pid: int, path: Path) -> list[str]:
    """Return the descriptors of a warm zygote without runs; it closes those of the last one before it replies."""
    wait_until(lambda: _children(pid) == [], "the end of all guardians")
    ask(path, frame(b'{"op": "status"}'))
    return sorted(os.listdir(f"/proc/{pid}/fd"))
