"""Lists the fields of all JSON that ddplaunch writes, from the code."""

import json
from collections.abc import Iterator
from typing import Any

from ddplaunch.base.stack_frames import Frame
from ddplaunch.cli.lookup.running_jobs import RunningJob
from ddplaunch.core.events import EVENT_TYPES, event_name
from ddplaunch.core.failures import FailureReport, RankFailure
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.features.devices.command import devices_json
from ddplaunch.features.programs.sidecars import SidecarExited, SidecarListening, SidecarStarted
from ddplaunch.features.runs.ps import ObservedJob, ended_run_to_json, running_job_to_json
from ddplaunch.observe.diagnosis import inspection as hangs
from ddplaunch.observe.history.run_record import (
    AttemptRecord,
    ImportMismatchRecord,
    RankRecord,
    RunRecord,
    record_to_json,
)
from ddplaunch.observe.stacks_text import stacks_to_json as stacks_json
from ddplaunch.system.devices.vendor import VisibleGpu, VisibleGpus
from ddplaunch.system.plan.hardware import Cpu, Gpu, GpuProcess, Hardware, MigInstance, NumaNode
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.planner import MachineInfo, PlanSpec, make_plan
from ddplaunch.system.plan.rank_layout import DeviceSlot
from ddplaunch.system.target.target import Target, TargetKind


def _make_plan() -> dict[str, Any]:
    machine = MachineInfo(host="n0", allowed_cpus=(0,), physical_cpus=1, slots=(DeviceSlot("cpu"),), slots_source="")
    target = Target(TargetKind.SCRIPT, "train.py", (), path="train.py")
    plan: Plan = make_plan(PlanSpec(nproc="1"), target, machine, {}, "id")
    return plan.to_json()


def list_plan_fields() -> list[str]:
    """List the fields of a plan as JSON, with ``name[]`` for lists."""
    proven = ZygotePlan(True, ("torch",), fallback=("torch",), excluded=(("", ""),))
    return list(_list_paths({**_make_plan(), "preload": proven.to_json()}, ""))


def list_devices_fields() -> list[str]:
    """List the fields of ``ddplaunch devices --json``."""
    user = GpuProcess(pid=1, name=None, user=None, memory=None)
    gpu = Gpu("nvidia", 0, "", mig=(MigInstance("", "", None),), processes=(user,))
    cpu = Cpu(None, logical=1, physical=1, allowed=(0,), numa=(NumaNode(0, (0,)),))
    visible = VisibleGpus((VisibleGpu(gpu, None, "0"),), "", devices=("cuda:0",))
    return list(_list_paths(devices_json(Hardware(cpu, (gpu,)), visible), ""))


def list_runs_fields() -> list[str]:
    """List the fields of ``ddplaunch ps --json``, which are the same for running and ended jobs."""
    running = running_job_to_json(ObservedJob("", RunningJob("", "", 1), None, None))
    assert running.keys() == ended_run_to_json(_make_record()).keys()
    return list(running)


def list_record_fields() -> list[str]:
    """List the fields of ``ddplaunch report --json``."""
    return list(_list_paths(json.loads(record_to_json([_make_record()], [], _make_record().spent)), ""))


def list_inspection_fields() -> list[str]:
    """List the fields of stacks.json."""
    return list(_list_paths(json.loads(json.dumps(_make_inspection().to_json())), ""))


def list_stacks_fields() -> list[str]:
    """List the fields of ``ddplaunch stacks --json`` that stacks.json does not have."""
    found = json.loads(json.dumps(stacks_json(_make_inspection())))
    return [path for path in _list_paths(found, "") if path.partition("[")[0] not in _make_inspection().to_json()]


def _make_inspection() -> hangs.Inspection:
    """Make an inspection of two ranks: the first waits for the second."""
    alive = hangs.ProcessCondition.ALIVE
    frames = (Frame("load", "train.py", 1, True),)
    waiting = hangs.RankInspection(
        0, "", 1, alive, threads=(hangs.Thread(frames),), answers=True, groups=(hangs.GroupState("0", 1, 0),),
        last=(hangs.Collective("0", 1, "all_reduce", "", 1.0, 0.0, False, True),),
        known=(hangs.Group("0", "default_pg", (0, 1)),),
        inside=hangs.ActiveCall("all_reduce", "all_reduce", None), workers=(hangs.Worker(3, frames),),
    )  # fmt: skip
    return hangs.Inspection(1.0, (waiting, hangs.RankInspection(1, "", 2, alive, answers=True)), 2)


def _make_record() -> RunRecord:
    attempt = AttemptRecord(0, 0.0, ranks=(RankRecord(0, ""),), mismatches=(ImportMismatchRecord("", "", ""),))
    return RunRecord("", "", "", (), "", "", 1, 0.0, attempts=(attempt,))


def make_plan_environment() -> dict[str, str]:
    """The environment variables of a plan's rank."""
    variables: dict[str, str] = _make_plan()["ranks"][0]["env"]
    return variables


def _list_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and not path.endswith("env"):
        for name, inner in value.items():
            yield from _list_paths(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from _list_paths(value[0], f"{path}[]")
    else:
        yield f"{path}[]" if path in ("notes", "argv") else path


def list_event_fields() -> dict[str, list[str]]:
    """By event of events.jsonl: its own fields."""
    only_in_history = ("ranks_inspected", "attempts_omitted")
    of_features = {event_name(kind): kind for kind in (SidecarStarted, SidecarListening, SidecarExited)}
    kinds = {**EVENT_TYPES, **of_features}
    return {
        name: ["failure" if field == "verdict" else field for field in kind.__struct_fields__]
        for name, kind in kinds.items()
        if name not in only_in_history
    }


def list_failure_fields() -> tuple[list[str], list[str]]:
    """List the fields of failure.json, and of a failure in it."""
    blank: dict[str, Any] = dict.fromkeys(RankFailure.__struct_fields__) | {"exit_code": 1}
    first = RankFailure(**blank)
    verdict = FailureReport(first, (), (), 0, 1).to_json()
    return list(verdict), list(first.to_json())
