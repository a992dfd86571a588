"""Tests of the usage of processes and GPUs while a job runs, and of a driver that does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.system.devices import gpu_usage
from ddplaunch.system.devices.gpu_usage import GpuUsageQuery
from ddplaunch.system.devices.process_usage import read_tree_usage
from tests.conftest import is_alive, wait_until
from tests.fake_nvml import FakeNvml, without_gpus
from tests.scaled_timeouts import scaled_timeout

NO_LIBRARY = pytest.param({"LD_LIBRARY_PATH": "/proc/nowhere"}, marks=without_gpus)
TREE = """
import os, sys, time
data = bytearray(100 << 20)
if os.fork():
    sum(range(10_000_000))
    print("up", flush=True)
time.sleep(600)
"""


def test_a_tree_of_processes():
    process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    process.stdout.readline()
    used = read_tree_usage(process.pid)
    assert used is not None
    assert used.memory > 200 << 20
    assert used.read > 10_000, "Python's own files"
    assert used.written >= len("up\n")
    assert 0.05 < used.cpu < scaled_timeout(30)
    os.killpg(process.pid, 9)
    process.communicate()
    assert read_tree_usage(process.pid) is None


class Asked:
    """A watch in a loop of its own, with the GPUs of an environment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        self.loop = EventLoop()
        self.replies = 0
        self.watch = GpuUsageQuery(self.loop, self._on_reply)

    def _on_reply(self) -> None:
        self.replies += 1

    def ask(self):
        """Return the usage after a reply or a timeout."""
        before = self.replies
        self.watch.query()
        ends = self.loop.call_later(scaled_timeout(30), lambda: pytest.fail("no answer"))
        while self.replies == before:
            self.loop.run_once()
        ends.cancel()
        return self.watch.usage


def test_how_busy_gpus_are(fake_nvml: FakeNvml, monkeypatch):
    environ = fake_nvml.environ(2, busy=[(0, 4242, 1024), (1, 77, 2048)], ailing="1:91:64")
    asked = Asked(monkeypatch, {**environ, "FAKE_NVML_RATES": "87;12", "FAKE_NVML_POWER": "310;55"})
    first, second = asked.ask()
    assert (first.gpu, first.busy, first.pids) == (0, 87, (4242,))
    assert first.memory_total == 81559 << 20
    assert first.memory_used == 1025 << 20
    assert (second.busy, second.pids) == (12, (77,))
    assert [(each.power, each.slowed) for each in (first, second)] == [(310.0, False), (55.0, True)]
    child = asked.watch._child.pid
    assert asked.ask() == (first, second)
    assert asked.watch._child.pid == child
    asked.watch.close()
    assert not is_alive(child)


@pytest.mark.parametrize("trouble", [{"lost": 1}, {"lost_later": 1}, {"unsupported": 1}])
def test_a_gpu_that_is_unwell(fake_nvml: FakeNvml, monkeypatch, trouble):
    asked = Asked(monkeypatch, {**fake_nvml.environ(2, **trouble), "FAKE_NVML_RATES": "87;12"})
    first, second = asked.ask()
    assert first.busy == 87
    assert (second.gpu, second.busy) == (1, None)
    asked.watch.close()


@pytest.mark.parametrize("trouble", [{"init_error": 9}, {"init_error": 18}, NO_LIBRARY])
def test_no_gpu_is_asked_for_once(fake_nvml: FakeNvml, monkeypatch, trouble):
    environ = fake_nvml.environ(2, **{k: v for k, v in trouble.items() if k.islower()})
    asked = Asked(monkeypatch, {**environ, **{k: v for k, v in trouble.items() if k.isupper()}})
    assert asked.ask() == ()
    asked.watch.query()
    assert asked.watch._child is None


def test_a_wedged_driver(fake_nvml: FakeNvml, monkeypatch, tmp_path):
    """The helper process is killed and not started again, and the event loop continues meanwhile."""
    monkeypatch.setattr(gpu_usage, "QUERY_TIMEOUT_S", 0.3)
    asked = Asked(monkeypatch, {**fake_nvml.environ(1), "FAKE_NVML_WEDGED": str(tmp_path / "wedged")})
    assert asked.ask()[0].busy == 0
    child = asked.watch._child.pid
    (tmp_path / "wedged").touch()
    began, ticks = time.monotonic(), []
    asked.loop.call_later(0.1, lambda: ticks.append(time.monotonic() - began))
    assert asked.ask() is None
    assert ticks
    assert ticks[0] < scaled_timeout(0.25)
    wait_until(lambda: not is_alive(child), "the child's end")
    asked.watch.query()
    assert asked.watch.usage is None


def test_a_child_that_is_killed(fake_nvml: FakeNvml, monkeypatch):
    asked = Asked(monkeypatch, fake_nvml.environ(1))
    asked.ask()
    os.kill(asked.watch._child.pid, 9)
    assert asked.ask() is None


def test_the_child_ends_with_us(fake_nvml: FakeNvml, monkeypatch):
    asked = Asked(monkeypatch, fake_nvml.environ(1))
    asked.ask()
    child = asked.watch._child._child
    child.stdin.close()
    assert child.wait(scaled_timeout(10)) == 0
    child.stdout.close()


def test_invalid_replies_are_ignored(monkeypatch):
    for answer in (b"", b"{", b"[1]", b"[[1,2]]", b"[[0,1,2,3,4]]", b"null"):
        assert gpu_usage._parse_reply(answer) is None
    assert gpu_usage._parse_reply(b"[]") == ()
