"""Tests decisions about sidecars that no real process shows in time."""

from types import SimpleNamespace
from unittest.mock import MagicMock

from ddplaunch.features.programs import node


def test_a_zygote_that_is_killed_is_not_waited_for(monkeypatch):
    """The end of the job does not depend on end of file: a blocked fork of the zygote may keep its socket open."""
    zygote, loop, context = MagicMock(pid=7), MagicMock(), MagicMock()
    context.loop, context.job_config.grace = loop, 2.0
    monkeypatch.setattr(node, "ZygoteClient", lambda *args, **named: zygote)
    runner = node.SidecarRunner(context, [SimpleNamespace(name="deaf", url_pattern=None)])
    loop.call_soon = lambda callback: callback()
    runner.on_attempt_start(MagicMock())
    timers = []
    loop.call_later = lambda seconds, callback: timers.append(callback)
    loop.run_once = lambda: timers.pop()()  # nothing arrives before the timer is due, and nothing after it
    runner.finish()
    assert [call[0] for call in zygote.method_calls] == ["withdraw_spawns", "sweep", "kill", "close"]
    context.tree.kill_remaining.assert_called_once_with()
