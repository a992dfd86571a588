"""Tests of a node's control link and the answers to its requests."""

from __future__ import annotations

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core import messages
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.net.link import make_link
from tests.features.runs.recorded_events import plan


def test_an_answer_never_comes_within_the_question():
    loop, received = EventLoop(), []
    link = make_link(loop, plan(ranks=1), JobConfig(), received.append)

    def answered() -> list[type]:
        assert not received
        while not received:
            loop.run_once()
        kinds = [type(message) for message in received]
        received.clear()
        return kinds

    link.start()
    assert answered() == [messages.StartAttempt]
    link.send(messages.AttemptReport(0, 0, 0.0))
    assert answered() == [messages.EndJob]
    link.close()
    assert link.is_closed
