"""Whether nodes can run one job together, by what they said and how the job stands: pure, in words for people."""

from __future__ import annotations

from collections.abc import Iterator

from ddplaunch.control.attempt import Stage
from ddplaunch.control.messages import Hello, Refused
from ddplaunch.control.seat import Seats


def refusal(ours: Hello, theirs: Hello, seats: Seats, stage: Stage) -> Refused | None:
    """Why a node may not join node 0, whose hello is ``ours``; None where it may."""
    rules = seats.rules
    refused = disagreement(ours, theirs, allow_mismatch=rules.allow_mismatch)
    if refused is None and rules.spares and len(ours.share.devices) != len(theirs.share.devices):
        counts = _differs("the number of ranks", ours, _count(ours), theirs, _count(theirs))
        refused = Refused(f"{counts}: a spare must fit in any place", "give every node the same --nproc")
    open_to_all = rules.elastic or stage is Stage.JOINING
    if refused is None and (stage is Stage.ENDED or not open_to_all):
        over = "is over" if stage is Stage.ENDED else "is running already"
        name = theirs.name if theirs.numbered else theirs.share.host
        refused = Refused(f"the job {over}, without this {name}")
    return refused or seats.refusal(theirs)


def disagreement(ours: Hello, theirs: Hello, *, allow_mismatch: bool) -> Refused | None:
    """Say what keeps a node from running with node 0, whose hello is ``ours``; None where nothing does."""
    for what, mine, other, hint in _musts(ours, theirs):
        if mine != other:
            return Refused(_differs(what, ours, mine, theirs, other), hint)
    shares = sorted((ours.share, theirs.share), key=lambda share: share.kind)
    if shares[0].kind != shares[1].kind and (count := len(shares[0].devices)) > 1:  # mpirun that does not say which
        what = f"{shares[1].name} is one rank, but {shares[0].name}, alone on its host, starts {count}"
        return Refused(what, "--nproc 1 for one rank each; or start one process on every host")
    if not allow_mismatch:
        for what, mine, other, hint in _mismatches(ours, theirs):
            return Refused(_differs(what, ours, mine, theirs, other), f"{hint}, or --allow-mismatch on node 0")
    return None


def warnings(ours: Hello, theirs: Hello) -> Iterator[str]:
    """Say what differs and does no harm at once."""
    for what, mine, other, _ in _mismatches(ours, theirs):
        yield _differs(what, ours, mine, theirs, other)
    if ours.gpus and theirs.gpus and ours.gpus != theirs.gpus:
        yield _differs("the GPU model", ours, _models(ours), theirs, _models(theirs)) + ": the slower ones set the pace"


def _musts(ours: Hello, theirs: Hello) -> Iterator[tuple[str, str, str, str]]:
    same = "give the same on every node"
    yield "--nnodes", ours.nnodes, theirs.nnodes, same
    yield "the run id", ours.run_id or "none", theirs.run_id or "none", "give every node of a job the same --run-id"
    if ours.fingerprint and theirs.fingerprint:
        what = f"the content of {theirs.target}"
        hint = "copy the newer file to every node; shown is the start of each one's SHA-256"
        yield what, ours.fingerprint, theirs.fingerprint, hint
    yield "--max-restarts", str(ours.max_restarts), str(theirs.max_restarts), same


def _mismatches(ours: Hello, theirs: Hello) -> Iterator[tuple[str, str, str, str]]:
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
        yield "the kind of devices", _models(ours) or "CPUs alone", _models(theirs) or "CPUs alone", cpus


def _count(hello: Hello) -> str:
    return str(len(hello.share.devices))


def _models(hello: Hello) -> str:
    return " and ".join(hello.gpus)


def _differs(what: str, ours: Hello, mine: str, theirs: Hello, other: str) -> str:
    return f"{what} differs: {ours.share.name} has {mine}, {theirs.share.name} has {other}"
