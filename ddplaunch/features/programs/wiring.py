"""Makes the parts of the feature in a job that has programs, and checks these before anything starts."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from shlex import join

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.base.types import JsonObject
from ddplaunch.core.feature import FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.core.options import Connections, Stopping
from ddplaunch.features.programs.addresses import list_ports
from ddplaunch.features.programs.gpus import divide_gpus
from ddplaunch.features.programs.job import ProgramsJob
from ddplaunch.features.programs.node import ProgramRunner
from ddplaunch.features.programs.options import ProgramOptions
from ddplaunch.features.programs.sidecars import read_sidecars, read_url_patterns
from ddplaunch.features.programs.spec import Programs, ProgramSpec, decode_programs
from ddplaunch.features.programs.words import default_target_name
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.network.reserved_port import bind_reusable, describe_listener
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.planner import PlanSpec
from ddplaunch.system.target.target import Target


def _read_programs(options: Options, target: str) -> Programs | None:
    """Return the programs of ``--program``, on all nodes; ``target``: the name of the ranks' program."""
    return decode_programs(options[ProgramOptions].program, default_target_name([target]))


def _read_sidecars(options: Options, plan: Plan, *, is_remote: bool = False) -> tuple[ProgramSpec, ...]:
    """Return the sidecars of this node; only node 0 has any."""
    if plan.node_rank:
        return ()
    return read_sidecars(options[ProgramOptions], options[Stopping].grace, is_remote=is_remote)


def complete_spec(options: Options, spec: PlanSpec, target: Target, *, is_remote: bool) -> PlanSpec:
    """Return the planner's input with the programs, and the GPUs that they leave to the ranks.

    All programs are on node 0. Raises UsageError if there are too few GPUs, or one is given twice.
    """
    programs = _read_programs(options, target.text)
    if programs is None:
        return spec
    spec = replace(spec, programs=tuple(_program_to_json(each) for each in programs.beside))
    if is_remote or (spec.node_rank or 0) != 0 or not spec.has_node_rank:
        return spec
    division = divide_gpus(programs, spec.gpus, read_hardware(), os.environ)
    listed = tuple({**each, "gpus": [*division.by_program.get(str(each["name"]), ())]} for each in spec.programs)
    return replace(spec, programs=listed, gpus=spec.gpus if division.rest is None else division.rest)


def _program_to_json(spec: ProgramSpec) -> JsonObject:
    """Return a program as in plan.json; its GPUs are known on node 0."""
    fields: JsonObject = {"name": spec.name, "kind": spec.kind, "command": list(spec.command), "gpus": None}
    return {**fields, "ready": spec.ready, "after": list(spec.after or ())}


def make_node_side(context: FeatureContext) -> NodeSide | None:
    sidecars = _read_sidecars(context.options, context.plan)
    programs = _read_programs(context.options, context.plan.target.text)
    if not (sidecars or programs):
        return None
    return ProgramRunner(context, sidecars, programs, read_url_patterns(context.options[ProgramOptions]))


def make_job_side(context: JobContext) -> JobSide | None:
    programs = _read_programs(context.options, "")
    return ProgramsJob(context, programs) if programs else None


def check_start(options: Options, plan: Plan, *, is_remote: bool) -> None:
    """Raise UsageError if a program does not exist, or its fixed port is taken; ``is_remote``: not on this machine."""
    _read_sidecars(options, plan, is_remote=is_remote)
    programs = _read_programs(options, plan.target.text)
    if programs is None:
        return
    if plan.nnodes > 1 and options[Connections].control == "none":
        raise UsageError("several programs do not work with --control none", "leave --control none out")
    if plan.started_rank:
        what = "several programs do not work where another launcher has started each rank"
        raise UsageError(what, "start one task on each node")
    ports = list_ports(programs, plan.target.args)
    if plan.node_rank or is_remote:
        return
    for spec in programs.beside:
        _check_command(spec)
    for (name, _), number in ports.items():
        if number is not None and not _is_free(number):
            what = f"port {number} of {name} is in use by {describe_listener(number)}"
            raise UsageError(what, "end that program, or write {port} for a free one")


def describe(options: Options, plan: Plan, *, is_remote: bool) -> list[str]:
    """Return the notes of a dry run: on programs only where their GPUs are not known, so that there is no table."""
    programs = _read_programs(options, plan.target.text)
    notes = [_describe_program(each) for each in (programs.beside if programs and is_remote else ())]
    sidecars = _read_sidecars(options, plan, is_remote=is_remote)
    return [*notes, *(f"sidecar on node 0: {join(each.command)}" for each in sidecars)]


def _check_command(spec: ProgramSpec) -> None:
    if spec.cwd and not os.path.isdir(os.path.expanduser(spec.cwd)):
        raise UsageError(f"{spec.name}: the folder {spec.cwd} does not exist", "name one that exists with cwd")
    command = spec.command[0]
    where = os.path.join(os.path.expanduser(spec.cwd), command) if os.sep in command else command
    if shutil.which(where, path=spec.env.get("PATH")) is None:
        hint = "name one on PATH, or ./NAME; for a shell: sh -c '…'"
        raise UsageError(f"program {command} not found", hint)


def _is_free(number: int) -> bool:
    try:
        with bind_reusable(socket.AF_INET, "", number) as sock:
            sock.listen()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _describe_program(spec: ProgramSpec) -> str:
    """Return the note of a dry run: "service vllm, ready by http:/health: vllm serve …"."""
    facts = [f"{spec.kind} {spec.name}"]
    facts += [f"GPUs {spec.gpus}"] * bool(spec.gpus)
    facts += [f"ready by {spec.ready}"] * bool(spec.ready)
    facts += [f"after {', '.join(spec.after or ())}"] * bool(spec.after)
    return f"{', '.join(facts)}: {join(spec.command)}"
