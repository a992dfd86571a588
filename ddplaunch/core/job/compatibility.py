"""Checks whether a node may join: compares its hello with node 0's. Pure functions that return the error text."""

from __future__ import annotations

from collections.abc import Iterator

from ddplaunch.core.job.job_attempt import JobPhase
from ddplaunch.core.job.node_table import NodeTable
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import JoinRefused, NodeHello
from ddplaunch.core.options import Connections, Elastic


def join_refusal(ours: NodeHello, theirs: NodeHello, nodes: NodeTable, phase: JobPhase) -> JoinRefused | None:
    """Return why a node may not join node 0, whose hello is ``ours``; None if it may."""
    options = nodes.config.options
    runs_no_ranks = not nodes.config.may_have_ranks(theirs.node_spec.node_rank)
    refusal = find_mismatch(ours, theirs, allow_mismatch=options[Connections].allow_mismatch or runs_no_ranks)
    if refusal is None and options[Elastic].spares and len(ours.node_spec.devices) != len(theirs.node_spec.devices):
        ranks, their_ranks = (str(len(hello.node_spec.devices)) for hello in (ours, theirs))
        counts = _format_difference("the number of ranks", ours, ranks, theirs, their_ranks)
        refusal = JoinRefused(
            f"{counts}: a spare must have as many ranks as every other node", "give every node the same --nproc"
        )
    open_to_all = nodes.config.is_elastic or phase is JobPhase.JOINING
    if refusal is None and (phase is JobPhase.ENDED or not open_to_all):
        over = "is over" if phase is JobPhase.ENDED else "is running already"
        name = theirs.name if theirs.has_node_rank else theirs.node_spec.host
        refusal = JoinRefused(f"the job {over}, without this {name}")
    return refusal or nodes.node_rank_refusal(theirs)


def find_mismatch(ours: NodeHello, theirs: NodeHello, *, allow_mismatch: bool) -> JoinRefused | None:
    """Return the first difference that keeps a node from running with node 0, whose hello is ``ours``; None if none."""
    for what, our_value, their_value, hint in _list_values_to_compare(ours, theirs):
        if our_value != their_value:
            return JoinRefused(_format_difference(what, ours, our_value, theirs, their_value), hint)
    specs = sorted((ours.node_spec, theirs.node_spec), key=lambda spec: spec.kind)
    # mpirun without local ranks in the environment
    if specs[0].kind != specs[1].kind and (count := len(specs[0].devices)) > 1:
        what = f"{specs[1].name} is one rank, but {specs[0].name}, alone on its host, starts {count}"
        return JoinRefused(what, "--nproc 1 for one rank each; or start one process on every host")
    if not allow_mismatch:
        for what, our_value, their_value, hint in _list_allowable_differences(ours, theirs):
            return JoinRefused(
                _format_difference(what, ours, our_value, theirs, their_value), f"{hint}, or --allow-mismatch on node 0"
            )
    return None


def compatibility_warnings(ours: NodeHello, theirs: NodeHello, config: JobConfig) -> Iterator[str]:
    """List the differences that are allowed, but may matter later."""
    if not config.may_have_ranks(theirs.node_spec.node_rank):
        return
    for what, our_value, their_value, _ in _list_allowable_differences(ours, theirs):
        yield _format_difference(what, ours, our_value, theirs, their_value)
    if ours.gpus and theirs.gpus and ours.gpus != theirs.gpus:
        yield (
            _format_difference("the GPU model", ours, _format_gpu_models(ours), theirs, _format_gpu_models(theirs))
            + ": the slower ones set the pace"
        )


def _list_values_to_compare(ours: NodeHello, theirs: NodeHello) -> Iterator[tuple[str, str, str, str]]:
    same = "give the same on every node"
    yield "--nnodes", ours.nnodes, theirs.nnodes, same
    yield "the run id", ours.run_id or "none", theirs.run_id or "none", "give every node of a job the same --run-id"
    if ours.fingerprint and theirs.fingerprint:
        what = f"the content of {theirs.target}"
        hint = "copy the newer file to every node; shown is the start of each one's SHA-256"
        yield what, ours.fingerprint, theirs.fingerprint, hint
    yield "--max-restarts", str(ours.max_restarts), str(theirs.max_restarts), same


def _list_allowable_differences(ours: NodeHello, theirs: NodeHello) -> Iterator[tuple[str, str, str, str]]:
    our_value, their_value, same = ours.versions, theirs.versions, "install the same on both"
    if our_value.python != their_value.python:
        yield "the Python version", our_value.python, their_value.python, same
    if our_value.torch and their_value.torch:
        if our_value.torch != their_value.torch:
            yield "torch's version", our_value.torch, their_value.torch, same
        if our_value.cuda != their_value.cuda:
            yield "the CUDA version of torch", our_value.cuda or "none", their_value.cuda or "none", same
    if our_value.nccl and their_value.nccl and our_value.nccl != their_value.nccl:
        yield "the NCCL version", our_value.nccl, their_value.nccl, same
    # a failed driver or CUDA_VISIBLE_DEVICES: the numbers of ranks would differ
    if bool(ours.gpus) != bool(theirs.gpus):
        cpus = "--gpus none on every node runs on CPUs"
        gpus, their_gpus = (_format_gpu_models(hello) or "CPUs alone" for hello in (ours, theirs))
        yield "the kind of devices", gpus, their_gpus, cpus


def _format_gpu_models(hello: NodeHello) -> str:
    return " and ".join(hello.gpus)


def _format_difference(what: str, ours: NodeHello, our_value: str, theirs: NodeHello, their_value: str) -> str:
    return f"{what} differs: {ours.node_spec.name} has {our_value}, {theirs.node_spec.name} has {their_value}"
