"""Tests of the connection to the doctor's process on a node, which a shell stands in for."""

import time

import pytest

from ddplaunch import __version__
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.types import encode
from ddplaunch.cli.host_connector import NodeCommand
from ddplaunch.features.doctor import peers
from ddplaunch.features.doctor.messages import START_MARK, Exit, GetTime, Ready, TimeReply
from ddplaunch.features.doctor.peers import UNREADABLE_REPLY_ERROR, CommandPeer

READY = b"Last login: today\n" * 9 + START_MARK + encode(Ready(__version__))
OTHER_VERSION = START_MARK + encode(Ready("9.9"))
IN_PARTS = f"""head -c 170 output; until [ -e go ]; do :; done; tail -c +171 output
head -c {len(encode(GetTime()))} >sent; cat reply; cat >>sent"""


@pytest.mark.parametrize(
    ("script", "output", "error"),
    [
        ("echo last login; echo 'no such file' >&2; exit 9", b"", "no such file"),
        ("printf 'not found\\n  indented\\n\\nexit code 1\\n' >&2; exit 9", b"", "not found"),
        ("exit 9", b"", "it exited without a message (exit code 9)"),
        ("cat output; exit 9", READY, "it exited without a message (exit code 9)"),
        ("cat output; cat >/dev/null", OTHER_VERSION, f"ddplaunch 9.9 there, {__version__} here"),
        ("cat output; cat >/dev/null", READY + encode(Ready("")), UNREADABLE_REPLY_ERROR),
        ("exec sleep 600", b"", "no answer within 0.05 s"),
        (IN_PARTS, READY, None),
    ],
)
def test_a_node_replies_or_why_it_does_not(tmp_path, monkeypatch, script, output, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").write_bytes(output)
    (tmp_path / "reply").write_bytes(encode(TimeReply(5.0)))
    if "sleep" in script:
        monkeypatch.setattr(peers, "START_TIMEOUT_S", 0.05)
    loop = EventLoop()
    peer = CommandPeer(loop, NodeCommand("n1", "", ["sh", "-c", script], "ssh n1 true"))
    peer.send_request(GetTime(), TimeReply)
    assert (peer.name, peer.check_command, peer.is_waiting) == ("n1", "ssh n1 true", True)
    while peer.is_waiting:
        loop.run_once()
        if peer._tail:
            (tmp_path / "go").touch()
    peer.send_exit(1)
    peer.wait_for_exit(time.monotonic() + (0 if "sleep" in script else 60))
    assert peer.error == error
    if error is None:
        assert (peer.answer, 0 < peer.took < 60) == (TimeReply(5.0), True)
        assert (tmp_path / "sent").read_bytes() == encode(GetTime()) + encode(Exit(1))
    peer.close()
