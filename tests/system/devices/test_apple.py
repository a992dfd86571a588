"""Tests of the Apple reader, with a made-up system where this is not a Mac."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ddplaunch.system.devices.apple import read_apple
from ddplaunch.system.devices.vendor import KernelTrees


@pytest.fixture
def apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="arm64"))


@pytest.mark.usefixtures("apple_silicon")
def test_one_gpu_named_after_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="Apple M3 Max\n"))
    (gpu,), notes = read_apple(KernelTrees())
    assert (gpu.vendor, gpu.index, gpu.name) == ("apple", 0, "Apple M3 Max")
    assert notes == []


@pytest.mark.usefixtures("apple_silicon")
def test_a_silent_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError("sysctl")

    monkeypatch.setattr(subprocess, "run", fail)
    assert read_apple(KernelTrees())[0][0].name == "Apple GPU"


@pytest.mark.usefixtures("apple_silicon")
def test_an_intel_mac_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    assert read_apple(KernelTrees()) == ([], [])


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert read_apple(KernelTrees()) == ([], [])
