"""Tests of the fleet's decisions over time, with a manual clock, and of what a host checks before the job starts."""

import os
import socket
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddplaunch.features.ssh import fleet, remote_launcher
from ddplaunch.features.ssh.ssh_session import explain_host_key
from tests.features.ssh.test_client import JOB


class FakeLoop:
    """A loop whose clock stands still except in ``run_until``."""

    def __init__(self) -> None:
        self.now, self._timers = 1000.0, list[tuple[float, Callable[[], object]]]()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        self._timers.append((self.now + seconds, callback))

    def run_until(self, seconds: float) -> None:
        while self._timers and (first := min(self._timers, key=itemgetter(0)))[0] <= 1000 + seconds:
            self._timers.remove(first)
            self.now, callback = first
            callback()
        self.now = 1000 + seconds


class FakeHost(SimpleNamespace):
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, name: str) -> None:
        super().__init__(name=name, calls=[], facts=object(), began=1000.0, code=None, last_output_at=0.0)
        self.has_ended, self.has_replied, self.has_code_sent, self.last_input_at = False, True, False, 0.0

    def poll_exit(self) -> bool:
        return self.name == "a" and self.code is not None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words: self.calls.append(" ".join([name, *map(str, words)]))


@pytest.fixture
def hosts(monkeypatch):
    """A fleet of three hosts, its clock, its hosts, and the texts that it prints."""
    loop, printed = FakeLoop(), list[str]()
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: loop.now))
    sink = SimpleNamespace(is_full=False, is_drained=True, write=lambda data: printed.append(data.decode()))
    monkeypatch.setattr(fleet, "Sink", lambda loop, number: sink)
    monkeypatch.setattr(fleet, "EventLoop", lambda: loop)
    made = fleet.Fleet(15.0, 30.0, allow_mismatch=False, preempt_signal=None)
    made._hosts = [FakeHost(name) for name in "abc"]
    return SimpleNamespace(fleet=made, loop=loop, all=made._hosts, printed=printed, sink=sink)


def test_output_that_is_not_read_pauses_all_hosts_once(hosts):
    hosts.fleet._state = fleet.FleetState.RUNNING
    hosts.all[2].has_ended, hosts.sink.is_full = True, True
    for _ in range(2):
        hosts.fleet._on_line(hosts.all[0], 1, b"a line\n")
    hosts.sink.on_drained()  # there is still too much
    hosts.sink.is_full = False
    hosts.sink.on_drained()
    hosts.sink.on_drained()
    assert [host.calls for host in hosts.all] == [["pause_reading", "resume_reading"]] * 2 + [[]]
    assert hosts.printed == ["a line\n"] * 2


def test_hosts_that_do_not_reply_are_listed_once_and_then_given_up(hosts):
    hosts.all[0].facts = hosts.all[1].facts = None
    hosts.all[1].has_replied, hosts.all[1].began = False, 1004.0
    hosts.loop.call_later(fleet.SLOW_HOST_NOTICE_S, hosts.fleet._warn_about_slow_hosts)
    hosts.loop.run_until(59)
    assert hosts.printed == ["ddplaunch: waiting for a\n", "ddplaunch: waiting for a, b\n"]
    assert [{*host.calls} for host in hosts.all] == [set(), {"probe_shell"}, set()]
    hosts.loop.run_until(65)
    late = "give_up no reply within 60 s"
    asked = f"{late}; does `ssh b true` work without a prompt?"
    assert [{*host.calls} for host in hosts.all] == [{late}, {"probe_shell", asked}, set()]


def test_hosts_that_do_not_end_after_the_first_are_stopped_and_killed(hosts):
    """Output may be late: as long as some comes they are not stopped, but no longer than heartbeat and grace."""
    first, still, ended = hosts.all
    hosts.fleet._state, first.code = fleet.FleetState.RUNNING, 3
    hosts.fleet._check_exits()
    first.has_ended = ended.has_ended = True
    still.last_output_at = 1001.0
    hosts.loop.run_until(9)
    assert still.calls == []
    still.last_output_at = 1007.0
    hosts.fleet._paused = True
    hosts.loop.run_until(44)
    assert still.calls == []
    hosts.loop.run_until(79)
    assert still.calls == ["send b'T'"]
    assert hosts.printed == ["ddplaunch: a has ended with exit code 3; stopping the others\n"]
    hosts.loop.run_until(84)
    assert still.calls[1:] == ["close_stdin"]
    hosts.loop.run_until(85)
    assert (still.calls[2:], ended.calls) == (["kill"], [])


def test_hosts_that_end_after_a_success_have_all_the_time_they_print(hosts):
    hosts.fleet._state, hosts.all[0].code, hosts.all[2].has_ended = fleet.FleetState.RUNNING, 0, True
    hosts.fleet._wait_for_others(hosts.all[0])
    hosts.all[1].last_output_at = 9990.0
    hosts.loop.run_until(8990)
    assert hosts.all[1].calls == hosts.printed == []
    hosts.loop.run_until(8999)
    assert hosts.all[1].calls == ["send b'T'"]


def test_what_a_host_checks_before_the_job_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "closed").mkdir(mode=0o555)
    monkeypatch.setattr(remote_launcher, "resolve", lambda name: os.stat("/none"))
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for changes, problems in (
            ({"log_dir": "new/logs"}, []),
            ({"cwd": "/none/x"}, ["/none/x: No such file or directory"]),
            ({"log_dir": "train.py/logs"}, [f"--log-dir train.py/logs: {tmp_path}/train.py is not a folder"]),
            ({"log_dir": "closed"}, [f"--log-dir closed: cannot write to {tmp_path}/closed"] * (os.geteuid() != 0)),
            ({"target": "other.py"}, ["no such script: other.py"]),
            ({"address": "n0"}, ["--master-addr n0 does not resolve on this host"]),
            ({"ports": (0, port)}, [f"port {port}: Address already in use"]),
        ):
            job = replace(JOB, **{"cwd": str(tmp_path), "address": "", "ports": (), **changes})
            assert [each.splitlines()[0] for each in remote_launcher._find_problems(job)] == problems


def test_a_lost_host_is_reported_in_one_line(hosts):
    """By node 0, which says what follows from it; the other launchers, ssh and the end of the job repeat it."""
    first, second, third = hosts.all
    hosts.fleet._state = fleet.FleetState.RUNNING
    hosts.fleet._report_lost_later(third)
    for host in (first, second):
        hosts.fleet._on_line(
            host, 2, b"ddplaunch: node 2 (c.local) was lost: it was silent for 15 s; stopping the others\n"
        )
    hosts.fleet._on_line(first, 2, b"ddplaunch: node 2 (c.local) was lost: it was silent for 15 s\n")
    hosts.loop.run_until(60)
    assert hosts.printed == ["ddplaunch: node 2 (c.local) was lost: it was silent for 15 s; stopping the others\n"]
    first.code = 69
    hosts.fleet._wait_for_others(first)
    first.has_ended = second.has_ended = True
    hosts.loop.run_until(300)
    assert len(hosts.printed) == 1


CHANGED = """@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Offending ECDSA key in /home/ada/.ssh/known_hosts:3
  remove with:
  ssh-keygen -f '/home/ada/.ssh/known_hosts' -R '[n2]:2222'
Host key verification failed."""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (CHANGED, "the host key of [n2]:2222 has changed: if the machine is new, `ssh-keygen -R '[n2]:2222'`"),
        ("Host key for n2 has changed and you have requested strict checking.", "`ssh-keygen -R n2`"),
        (
            "No ED25519 host key is known for n2 and you have requested strict checking.",
            "the host key of n2 is not known here: connect once by `ssh n2`, and confirm it",
        ),
        ("ada@n2: Permission denied (publickey).", ""),
    ],
)
def test_what_to_do_about_a_host_key(lines, expected):
    found = explain_host_key(lines.split("\n"), "n2")
    assert found.endswith(expected)
    assert bool(found) is bool(expected)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_host_that_node_0_does_not_report(hosts, lost):
    hosts.fleet._state = fleet.FleetState.RUNNING
    hosts.all[lost].last_error_line = "Timeout, server not responding."
    hosts.fleet._report_lost_later(hosts.all[lost])
    hosts.loop.run_until(60)
    assert hosts.printed == [f"ddplaunch: {'abc'[lost]} was lost: Timeout, server not responding.\n"]


@pytest.mark.parametrize(
    ("spares", "bad", "starts"),
    [(1, "c", True), (1, "b", True), (0, "b", False), (1, "a", False), (1, "bc", False)],
)
def test_a_spare_takes_the_place_of_a_host_that_cannot_start(hosts, spares, bad, starts):
    hosts.fleet._spares = spares
    for host in hosts.all:
        host.facts = SimpleNamespace(problems=["no such script: t.py"] if host.name in bad else [], machine=host.name)
    hosts.fleet._allow_mismatch = True
    hosts.fleet._start_if_ready()
    began = [host.name for host in hosts.all if "send b'g'" in "".join(host.calls).lower()]
    assert began == ([name for name in "abc" if name not in bad] if starts else [])
    left_out = f"ddplaunch: {bad} is left out, a spare takes its place: no such script: t.py\n"
    assert hosts.printed == ([left_out] if starts else [])
    assert bool(hosts.fleet.problems) is not starts


@pytest.mark.parametrize(("spares", "bad", "sent"), [(1, "b", b"g"), (2, "b", b"G"), (1, "", b"G"), (0, "", b"G")])
def test_no_host_waits_for_one_that_is_left_out(hosts, spares, bad, sent):
    """Spares that are left may join later."""
    hosts.fleet._spares, hosts.fleet._allow_mismatch = spares, True
    for host in hosts.all:
        host.facts = SimpleNamespace(problems=["no such script: t.py"] if host.name in bad else [], machine=host.name)
    hosts.fleet._start_if_ready()
    assert [f"send {sent}" in host.calls for host in hosts.all] == [host.name not in bad for host in hosts.all]
