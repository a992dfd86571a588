"""The tests of ``doctor --thorough``: all nodes at once, and networks that nodes share besides that to node 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from ddplaunch.features.doctor import benchmark, messages
from ddplaunch.features.doctor.benchmark import PrepareDevices
from ddplaunch.features.doctor.connectivity import ListenReply
from ddplaunch.features.doctor.examination import MAX_GPUS, CollectiveResult, DoctorResults, Examiner, Rail
from ddplaunch.features.doctor.probe import REPLY_TIMEOUT_S, TORCH_IMPORT_TIMEOUT_S

_MEMORY_DIVISOR = 16  # of the available memory, for one tensor of one process: some are copied


class ThoroughExaminer(Examiner):
    """Runs the tests of ``Examiner``, and then longer ones."""

    def examine(self) -> DoctorResults:
        results = super().examine()
        together = list(self._measure_all_nodes(results))
        rails = self._try_rails(list(self._find_rails()))
        together += self._measure_rails(rails)
        return replace(results, nodes=tuple(self._found), together=tuple(together), rails=tuple(rails))

    def _measure_all_nodes(self, examination: DoctorResults) -> Iterator[CollectiveResult]:
        """Measure each collective on all nodes at once; with GPUs, also on each node alone."""
        failed = {node for speed in examination.speeds if speed.error for node in speed.nodes}
        failed |= {node for path in examination.ways if path.outcome != "ok" for node in (path.source, path.target)}
        able = {node for speed in examination.speeds for node in speed.nodes}
        nodes = [node for node in self._responding_nodes() if node in able - failed]
        nodes = [node for node in nodes if self._backend_for(node) == self._backend_for(nodes[0])]
        groups = [nodes] if nodes else []
        if nodes and self._backend_for(nodes[0]) == "nccl":
            groups += [[node] for node in nodes if len(nodes) > 1 and len(self._devices_for(node)) > 1]
        for name in benchmark.COLLECTIVES if groups else ():
            what = "of all nodes at once" if len(nodes) > 1 else "of larger tensors"
            self._report_progress(f"measuring {name} {what}")
            for group in groups:
                yield from self._measure_collective(group, name)

    def _measure_collective(self, nodes: Sequence[int], name: str) -> Iterable[CollectiveResult]:
        """Measure a collective on these nodes; on CPUs with one process per node, so that it measures the network."""
        most = 1 if len(nodes) > 1 and self._backend_for(nodes[0]) == "gloo" else MAX_GPUS
        facts = (self._found[node].facts for node in nodes)
        free = min((each.memory_available or 0 for each in facts if each), default=0)
        processes = max(min(most, len(self._devices_for(node))) for node in nodes)
        max_bytes = max(benchmark.SIZES[-1], free // (_MEMORY_DIVISOR * processes))
        return self._measure_in_groups([tuple(nodes)], name, most=most, max_bytes=max_bytes).values()

    def _find_rails(self) -> Iterator[Rail]:
        """Yield the networks that nodes share, except that of the interface to node 0."""
        shared: dict[str, dict[int, tuple[str, str]]] = {}
        for node in self._any_port:
            facts = self._found[node].facts
            main = facts.link.interface if facts and facts.link else None
            for each in facts.networks if facts else ():
                if each.interface != main:
                    shared.setdefault(each.network, {})[node] = (each.interface, each.address)
        for network, places in shared.items():
            addresses = {node: address for node, (_, address) in places.items()}
            if 1 < len(places) == len(set(addresses.values())):  # else each node has its own, of containers
                yield Rail(network, {node: interface for node, (interface, _) in places.items()}, addresses)

    def _try_rails(self, rails: Sequence[Rail]) -> list[Rail]:
        """Test the connections between nodes over each of these networks."""
        nodes = {node for rail in rails for node in rail.addresses if node in self._responding_nodes()}
        listening_nodes = self._query(dict.fromkeys(nodes, messages.ListenOnPorts(())), ListenReply, REPLY_TIMEOUT_S)
        self._any_port |= {node: reply.any_port for node, reply in listening_nodes.items()}
        tried = []
        for rail in rails:
            self._report_progress(f"testing connectivity over {rail.network}")
            there = [node for node in rail.addresses if node in listening_nodes]
            ends = [(node, rail.addresses[node], self._any_port[node]) for node in there]
            places = {node: [end for end in ends if end[0] != node] for node in there}
            outcomes = tuple((node, to, each.outcome) for node, to, _, each in self._connect(places))
            tried.append(replace(rail, outcomes=outcomes))
        return tried

    def _measure_rails(self, rails: Sequence[Rail]) -> Iterator[CollectiveResult]:
        """Measure an all_reduce of CPUs over each network on which all nodes reach each other."""
        for rail in rails:
            nodes = [node for node in rail.addresses if node in self._responding_nodes()]
            if len(nodes) < 2 or any(outcome != "ok" for _, _, outcome in rail.outcomes):
                continue
            self._report_progress(f"measuring all_reduce over {rail.network}")
            questions = {node: PrepareDevices(("cpu",), rail.interfaces[node], force_interface=True) for node in nodes}
            ready = self._query(questions, messages.PrepareReply, TORCH_IMPORT_TIMEOUT_S)
            if all(node in ready and not ready[node].error for node in nodes):
                yield from self._measure_in_groups([tuple(nodes)], most=1, rail=rail).values()
