"""Inspection: ``ddplaunch stacks``, and Ctrl-\\ in the launcher's terminal."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature, FeatureContext, NodeSide


class Inspect(Feature):
    commands = (Command("stacks", "Show the stacks of all ranks and which ranks wait for which."),)
    requests = ("request",)
    rpc_kinds = ("rpc",)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.inspect.node.inspect_side import InspectSide

        return InspectSide(context)


FEATURE = Inspect()
