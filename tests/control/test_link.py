"""A node's way to the others: what it is answered."""

from __future__ import annotations

from ddplaunch.control import messages
from ddplaunch.control.link import make_link
from ddplaunch.control.rules import Rules
from ddplaunch.loop import Loop
from tests.job.samples import plan


def test_an_answer_never_comes_within_the_question():
    loop, heard = Loop(), []
    link = make_link(loop, plan(ranks=1), Rules(), heard.append)

    def answered() -> list[type]:
        assert not heard
        while not heard:
            loop.step()
        kinds = [type(message) for message in heard]
        heard.clear()
        return kinds

    link.begin()
    assert answered() == [messages.Start]
    link.tell(messages.Drained(0, (), 0, 0.0))
    assert answered() == [messages.End]
    link.close()
    assert link.closed
