"""Whether nodes can run one job together, by what they said and how the job stands: pure, in words for people."""

from __future__ import annotations

from collections.abc import Iterator

from ddplaunch.control.attempt import JobPhase
from ddplaunch.control.messages import JoinRefused, NodeHello
from ddplaunch.control.seat import NodeTable


def join_refusal(ours: NodeHello, theirs: NodeHello, seats: NodeTable, stage: JobPhase) -> JoinRefused | None:
    """Why a node may not join node 0, whose hello is ``ours``; None where it may."""
    rules = seats.rules
    refused = find_mismatch(ours, theirs, allow_mismatch=rules.allow_mismatch)
    if refused is None and rules.spares and len(ours.node_spec.devices) != len(theirs.node_spec.devices):
        counts = _format_difference(
            "the number of ranks", ours, _format_rank_count(ours), theirs, _format_rank_count(theirs)
        )
        refused = JoinRefused(f"{counts}: a spare must fit in any place", "give every node the same --nproc")
    open_to_all = rules.is_elastic or stage is JobPhase.JOINING
    if refused is None and (stage is JobPhase.ENDED or not open_to_all):
        over = "is over" if stage is JobPhase.ENDED else "is running already"
        name = theirs.name if theirs.has_node_rank else theirs.node_spec.host
        refused = JoinRefused(f"the job {over}, without this {name}")
    return refused or seats.rank_refusal(theirs)


def find_mismatch(ours: NodeHello, theirs: NodeHello, *, allow_mismatch: bool) -> JoinRefused | None:
    """Say what keeps a node from running with node 0, whose hello is ``ours``; None where nothing does."""
    for what, mine, other, hint in _required_equal(ours, theirs):
        if mine != other:
            return JoinRefused(_format_difference(what, ours, mine, theirs, other), hint)
    shares = sorted((ours.node_spec, theirs.node_spec), key=lambda share: share.kind)
    if shares[0].kind != shares[1].kind and (count := len(shares[0].devices)) > 1:  # mpirun that does not say which
        what = f"{shares[1].name} is one rank, but {shares[0].name}, alone on its host, starts {count}"
        return JoinRefused(what, "--nproc 1 for one rank each; or start one process on every host")
    if not allow_mismatch:
        for what, mine, other, hint in _should_equal(ours, theirs):
            return JoinRefused(
                _format_difference(what, ours, mine, theirs, other), f"{hint}, or --allow-mismatch on node 0"
            )
    return None


def compatibility_warnings(ours: NodeHello, theirs: NodeHello) -> Iterator[str]:
    """Say what differs and does no harm at once."""
    for what, mine, other, _ in _should_equal(ours, theirs):
        yield _format_difference(what, ours, mine, theirs, other)
    if ours.gpus and theirs.gpus and ours.gpus != theirs.gpus:
        yield (
            _format_difference("the GPU model", ours, _format_gpu_models(ours), theirs, _format_gpu_models(theirs))
            + ": the slower ones set the pace"
        )


def _required_equal(ours: NodeHello, theirs: NodeHello) -> Iterator[tuple[str, str, str, str]]:
    same = "give the same on every node"
    yield "--nnodes", ours.nnodes, theirs.nnodes, same
    yield "the run id", ours.run_id or "none", theirs.run_id or "none", "give every node of a job the same --run-id"
    if ours.fingerprint and theirs.fingerprint:
        what = f"the content of {theirs.target}"
        hint = "copy the newer file to every node; shown is the start of each one's SHA-256"
        yield what, ours.fingerprint, theirs.fingerprint, hint
    yield "--max-restarts", str(ours.max_restarts), str(theirs.max_restarts), same


def _should_equal(ours: NodeHello, theirs: NodeHello) -> Iterator[tuple[str, str, str, str]]:
    mine, other, same = ours.versions, theirs.versions, "install the same on both"
    if mine.python != other.python:
        yield "the Python version", mine.python, other.python, same
    if mine.torch and other.torch:
        if mine.torch != other.torch:
            yield "torch's version", mine.torch, other.torch, same
        if mine.cuda != other.cuda:
            yield "the CUDA version of torch", mine.cuda or "none", other.cuda or "none", same
    if mine.nccl and other.nccl and mine.nccl != other.nccl:
        yield "the NCCL version", mine.nccl, other.nccl, same
    if bool(ours.gpus) != bool(theirs.gpus):  # a driver that has failed, or a mask: the other's ranks would be fewer
        cpus = "--gpus none on every node runs on CPUs"
        yield (
            "the kind of devices",
            _format_gpu_models(ours) or "CPUs alone",
            _format_gpu_models(theirs) or "CPUs alone",
            cpus,
        )


def _format_rank_count(hello: NodeHello) -> str:
    return str(len(hello.node_spec.devices))


def _format_gpu_models(hello: NodeHello) -> str:
    return " and ".join(hello.gpus)


def _format_difference(what: str, ours: NodeHello, mine: str, theirs: NodeHello, other: str) -> str:
    return f"{what} differs: {ours.node_spec.name} has {mine}, {theirs.node_spec.name} has {other}"
