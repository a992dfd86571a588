"""Tests of node sides that raise."""

from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent import node_sides
from ddplaunch.core.agent.node_sides import NodeSides
from ddplaunch.core.feature import Feature, NodeSide


class Broken(NodeSide):
    def __init__(self):
        self.called = []

    def on_resume(self):
        raise ZeroDivisionError

    def close(self):
        self.called.append("close")
        raise ZeroDivisionError

    def finish(self):
        self.called.append("finish")
        raise ZeroDivisionError


class Adds(Feature):
    def __init__(self, side):
        self.side = side

    def make_node_side(self, context):
        return self.side


@pytest.mark.parametrize("raises_before", [False, True])
def test_a_side_that_raises_at_the_end_is_named_once(raises_before, monkeypatch):
    side, notes = Broken(), []
    monkeypatch.setattr(node_sides, "load_features", lambda: [("broken", Adds(side))])
    sides = NodeSides(EventLoop(), notes.append)
    sides.make(lambda loop, others: SimpleNamespace(loop=loop))
    if raises_before:
        sides.on_resume()
    sides.close()
    sides.finish()
    assert side.called == ["close", "finish"]
    assert ["the feature broken" in each for each in notes] == [True]
