"""Tests of the launcher's end of the rank channel: what a rank, or a program that writes into it, may send."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent import node_ranks, rank_channel
from ddplaunch.core.agent.node_ranks import NodeRanks, RankProcess
from ddplaunch.core.agent.rank_channel import RankChannel
from ddplaunch.core.node.node_attempt import AttemptView, LiveRank, NodeAttempt
from ddplaunch.system.processes import proc_utils
from tests.conftest import wait_until


@pytest.fixture
def world():
    """A channel, the rank's end of it, and what has failed there."""
    failed = []
    channel = RankChannel(EventLoop(), failed.append)
    with socket.socket(fileno=channel.rank_fd) as rank_end:

        def receive(data):
            rank_end.sendall(data)
            channel.read_pending()

        yield SimpleNamespace(channel=channel, rank_end=rank_end, failed=failed, receive=receive)
    channel.close()


def test_what_a_rank_reports(world):
    channel = world.channel
    assert (channel.is_ready, channel.has_thread, channel.reserved_signals) == (False, False, (0, 0))
    world.receive(b"h 34 35")
    assert (channel.is_ready, channel.bytes_received) == (False, 7)
    world.receive(b" 9\ng wake 36\no profile 37\nt\n")
    assert (channel.is_ready, channel.stacks_fd, channel.has_thread) == (True, 9, True)
    assert channel.signals == {"wake": 36, "profile": 37}
    assert channel.reserved_signals == (34, 35, 36), "one that it will use on request may be the program's until then"
    for line, left in ((b"x 2\n", (34, 35)), (b"x 1\n", (34, 0)), (b"x 0\n", (0, 0))):
        world.receive(line)
        assert channel.stack_signals == left
    world.receive(b"l\nf ValueError: \xff\x1b[2J" + b"x" * 200 + b"\n")
    assert not channel.has_thread
    (what,) = world.failed
    assert what.startswith("ValueError: \ufffd\\x1b[2Jxxx")
    assert len(what) == 100


def test_malformed_lines_are_ignored(world):
    world.receive(b"\nh\nh 1\nh a b c\ng\ng x y z\ng x y\no\nx\nx y\nf\nhello\n \n\xff\xff\nt 3\n")
    channel = world.channel
    assert (channel.is_ready, channel.signals, channel.stack_signals, channel.stacks_fd) == (False, {}, (0, 0), 0)
    assert world.failed == []
    world.receive(b"h 34 35 9\n")
    assert channel.is_ready


def test_only_the_reply_to_the_last_request_counts(world):
    replies = []
    world.channel.request(b"s", replies.append)
    world.channel.request(b"s", replies.append)
    assert world.rank_end.recv(100) == b"s1\ns2\n"
    world.receive(b"s1 late\ns2 a reply\ns2\n")
    assert replies == [b"a reply"]
    world.channel.clear_reply_handler()
    world.receive(b"s2 later\n")
    assert replies == [b"a reply"]


def test_a_program_that_writes_without_a_newline_is_not_read_any_more(world, monkeypatch):
    monkeypatch.setattr(rank_channel, "_MAX_REPLY_BYTES", 1000)
    world.receive(b"t\n" + b"x" * 1000)
    assert world.channel.has_thread
    world.receive(b"x")
    assert not world.channel.has_thread
    assert world.channel._buffer == b""
    assert not world.channel._loop._selector.get_map(), "else the launcher would never sleep again"


def test_a_rank_that_has_closed_its_end_has_no_thread(world):
    world.receive(b"t\n")
    world.rank_end.close()
    world.channel.write_line(b"s1")
    assert not world.channel.has_thread
    assert world.channel._loop._selector.get_map()
    world.channel.read_pending()
    assert not world.channel._loop._selector.get_map()


@pytest.mark.parametrize("only_handlers", [True, False])
def test_a_forwarded_signal_spares_ranks_without_a_handler_or_in_which_ddplaunch_uses_it(monkeypatch, only_handlers):
    """Without a handler it would end the rank."""
    sent, number = [], signal.SIGUSR1
    monkeypatch.setattr(node_ranks.proc_utils, "catches_signal", lambda pid, wanted: wanted == number and pid != 101)
    monkeypatch.setattr(node_ranks.proc_utils, "send_signal", lambda pid, which, pidfd: sent.append((pid, which)))
    ranks = NodeRanks(SimpleNamespace(number=0), SimpleNamespace(), EventLoop(), SimpleNamespace())
    ranks.processes = {rank: RankProcess(SimpleNamespace(), 100 + rank, None) for rank in range(4)}
    channel = SimpleNamespace(reserved_signals=())
    channel.read_pending = lambda: setattr(channel, "reserved_signals", (number,))
    other = SimpleNamespace(reserved_signals=(signal.SIGUSR2,), read_pending=lambda: None, is_ready=False)
    ranks.channels, channel.is_ready = {2: channel, 3: other}, True
    assert ranks.is_signal_handled(number)
    assert not ranks.is_signal_handled(signal.SIGUSR2)
    ranks.forward_signal(number, only_handlers=only_handlers)
    assert sent == [(100 + rank, number) for rank in range(4) if not only_handlers or rank in (0, 3)]


def test_a_signal_waits_until_a_fork_has_removed_the_handlers_of_the_zygote(monkeypatch):
    """It has them at first, and blocks all signals until it has removed them."""
    number, sent = signal.SIGUSR1, []
    woken, wake = os.pipe()
    before = signal.signal(number, lambda *_: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, proc_utils.FORWARDED_SIGNALS)
    if (pid := os.fork()) == 0:
        os.read(woken, 1)
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.pause()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(number, before)
    try:
        monkeypatch.setattr(node_ranks.proc_utils, "send_signal", lambda *_: sent.append(number))
        ranks = NodeRanks(SimpleNamespace(number=0), SimpleNamespace(), EventLoop(), SimpleNamespace())
        ranks.processes = {0: RankProcess(SimpleNamespace(), pid, None)}
        assert proc_utils.catches_signal(pid, number)
        assert not ranks.is_signal_handled(number)
        ranks.channels = {0: SimpleNamespace(reserved_signals=(), read_pending=lambda: None, is_ready=False)}
        assert ranks.forward_signal(number, only_handlers=True) == set()
        os.write(wake, b"x")
        wait_until(lambda: not proc_utils.blocks_forwarded_signals(pid), "the fork has removed them")
        assert ranks.forward_signal(number, only_handlers=True) == set()
        assert sent == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(woken)
        os.close(wake)


def test_the_processes_of_an_attempt(monkeypatch):
    closed, called, loop = [], [], EventLoop()
    monkeypatch.setattr(node_ranks.os, "close", closed.append)
    attempt = NodeAttempt(3, live={0: LiveRank(7, stop_requested=True), 1: LiveRank(8)})
    plan = SimpleNamespace(rank_of=lambda rank: SimpleNamespace(rank=rank))
    ranks = NodeRanks(AttemptView(attempt), plan, loop, SimpleNamespace(path="/run"))
    assert [ranks.is_stop_requested(rank) for rank in range(3)] == [True, False, False]
    assert ranks.rank_file_path(1, "json") == "/run/1.3.json"
    for rank, pidfd in ((0, 40), (1, None), (2, 42)):
        ranks.add_process(rank, 100 + rank, pidfd)
    ranks.remove_process(0, 999, 0)
    ranks.remove_process(7, 100, 0)
    assert (ranks.exit_codes, closed) == ({}, []), "of an earlier attempt"
    ranks.remove_process(0, 100, -9)
    assert (ranks.exit_codes, [*ranks.ends], [*ranks.processes], closed) == ({0: -9}, [0], [1, 2], [40])
    ranks.on_hold_changed = lambda: called.append(ranks.is_holding)
    ranks.set_waits_for_user(True)
    ranks.set_waits_for_user(False)
    assert called == [True, False]
    for end in (ranks.forget_processes, ranks.close):
        ranks.timers.call_later(0.0, lambda: called.append("timer"))
        end()
        loop.call_soon(lambda: None)
        loop.run_once()
    assert (ranks.processes, closed, called) == ({}, [40, 42], [True, False])


def test_a_signal_to_stop_continues_a_rank_that_is_stopped(monkeypatch):
    sent = []
    monkeypatch.setattr(node_ranks.proc_utils, "send_signal", lambda *arguments: sent.append(arguments))
    RankProcess(SimpleNamespace(), 100, 40).stop(signal.SIGTERM)
    assert sent == [(100, signal.SIGTERM, 40), (100, signal.SIGCONT, 40)]
