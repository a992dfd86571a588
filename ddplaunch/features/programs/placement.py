"""Decides on which nodes the programs of a job run. Pure: every node of a job computes the same placement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_count
from ddplaunch.features.programs.spec import Programs, ProgramSpec


class Instance(NamedTuple):
    """One process of a program: a program has several where it runs on several nodes."""

    spec: ProgramSpec  # its name is unique: "infer", or "infer.0" of several; ``after`` has such names
    program: str
    node: int
    position: int  # index among the instances of the program


class Placement(NamedTuple):
    """The nodes of all processes beside the ranks, by --node-rank; the nodes with ranks come first."""

    instances: tuple[Instance, ...]
    gate: tuple[str, ...]  # the instances that the ranks wait for
    nodes_with_ranks: int

    def of(self, program: str) -> list[Instance]:
        return [each for each in self.instances if each.program == program]

    def on(self, node: int) -> list[Instance]:
        return [each for each in self.instances if each.node == node]

    def nearest_instance(self, program: str, node: int) -> str:
        """Return the name of the instance of a program that processes on a node use: the one there, else the first."""
        found = self.of(program)
        return next((each for each in found if each.node == node), found[0]).spec.name if found else program


def place_programs(programs: Programs, nnodes: int) -> Placement:
    """Assign nodes to each program; nodes for one program alone follow the nodes with ranks, in the order of programs.

    Raises UsageError if the job has another number of nodes than the programs need.
    """
    with_ranks = _count_nodes_with_ranks(programs, nnodes)
    own: dict[str, list[int]] = {programs.target.name: [*range(with_ranks)]}  # of each program
    first = with_ranks
    for spec in programs.beside:
        shared = nnodes if spec.each_node else 1
        own[spec.name] = [*range(first, first + spec.nodes)] if spec.nodes else [*range(shared)]
        first += spec.nodes
    places = {spec.name: _list_process_nodes(spec, own[spec.beside or spec.name]) for spec in programs.beside}
    names = {name: _name_instances(name, len(nodes)) for name, nodes in places.items()}

    def expand(after: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for each in after for name in names[each])

    instances = []
    for spec in programs.beside:
        after = None if spec.after is None else expand(spec.after)
        for index, (name, node) in enumerate(zip(names[spec.name], places[spec.name], strict=True)):
            # If several instances have one world of ranks, only the first reports that it is ready.
            ready = "" if spec.is_world and index else spec.ready
            instances.append(Instance(replace(spec, name=name, after=after, ready=ready), spec.name, node, index))
    return Placement(tuple(instances), expand(programs.gate), with_ranks)


class NodeGroup(NamedTuple):
    """The nodes of one program: those with ranks, or those that a program has for itself."""

    program: str
    nodes: int
    gpus: int  # on each node


def group_nodes(programs: Programs, nnodes: int, gpus_per_node: int) -> list[NodeGroup]:
    """Return the groups of nodes, in the order of their node ranks; ``gpus_per_node``: of nodes with ranks.

    A node without ranks has as many GPUs as its programs ask for. Raises UsageError as ``place_programs``.
    """
    placement = place_programs(programs, nnodes)
    own = [(each.name, each.nodes) for each in programs.beside if each.nodes]
    groups = [NodeGroup(programs.target.name, placement.nodes_with_ranks, gpus_per_node)]
    for name, nodes in own:
        asked = [each.spec.gpus or 0 for each in placement.on(sum(group.nodes for group in groups))]
        counts = [each for each in asked if isinstance(each, int)]
        groups.append(NodeGroup(name, nodes, sum(counts) if len(counts) == len(asked) else gpus_per_node))
    return groups


def _count_nodes_with_ranks(programs: Programs, nnodes: int) -> int:
    target, own = programs.target, {each.name: each.nodes for each in programs.beside if each.nodes}
    with_ranks = target.nodes or max(1, nnodes - sum(own.values()))
    needed = with_ranks + sum(own.values())
    if needed != nnodes and (own or target.nodes):
        least = "" if target.nodes else "at least "
        counts = ", ".join(f"{name} {count}" for name, count in {target.name: with_ranks, **own}.items())
        what = f"the programs need {least}{format_count(needed, 'node')}, and the job has {nnodes}"
        raise UsageError(what, f"{counts}; --nodes, --nnodes or --hosts must name as many")
    return with_ranks


def _list_process_nodes(spec: ProgramSpec, nodes: list[int]) -> list[int]:
    """Return the node of each process of a program."""
    return [node for node in nodes for _ in range(spec.count)]


def _name_instances(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}.{index}" for index in range(count)]
