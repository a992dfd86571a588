"""Descriptions of the fields of a dry run, an event and a failure; the fields come from the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddplaunch
from ddplaunch.base.stack_frames import Frame
from ddplaunch.cli.run_locator import RunningJob
from ddplaunch.core.events import EVENT_TYPES
from ddplaunch.core.failures import FailureReport, RankFailure
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.features.devices.command import devices_json
from ddplaunch.features.inspect.diagnosis.inspection import (
    ActiveCall,
    Collective,
    Group,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
    Worker,
)
from ddplaunch.features.inspect.stacks_text import stacks_to_json as stacks_json
from ddplaunch.features.runs.ps import ObservedJob, ended_to_json, running_to_json
from ddplaunch.features.runs.run_record import AttemptRecord, RankRecord, RunRecord, record_to_json
from ddplaunch.features.sidecars.node import SidecarExited, SidecarListening, SidecarStarted
from ddplaunch.system.devices.vendor import VisibleGpu, VisibleGpus
from ddplaunch.system.plan.hardware import Cpu, Gpu, GpuProcess, Hardware, MigInstance, NumaNode
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.planner import MachineInfo, PlanSpec, make_plan
from ddplaunch.system.plan.rank_layout import DeviceSlot
from ddplaunch.system.target.target import Target, TargetKind

PLAN = {
    "run_id": "the job's name: `--run-id`, or the time and a few random digits",
    "nnodes": "number of nodes, rank of this node, number of ranks",
    "node_rank": "likewise",
    "world_size": "likewise",
    "master_addr": "address and port of torch's store; port 0 is chosen at the start",
    "master_port": "likewise",
    "target": "as typed",
    "backend": "of the process group, if ddplaunch makes it; else `null`",
    "init_method": "likewise",
    "facts[].name": "a value of the plan, and its source: a flag, a variable, what was found, or `assumed`",
    "facts[].value": "likewise",
    "facts[].source": "likewise",
    "notes[]": "sentences for people",
    "nodes[].node_rank": "each node: its rank, name (`null` if not known) and number of ranks; the source of that "
    "number",
    "nodes[].host": "likewise",
    "nodes[].local_world_size": "likewise",
    "nodes[].source": "likewise",
    "ranks[].rank": "each rank: its number, that on its node, its node",
    "ranks[].local_rank": "likewise",
    "ranks[].node_rank": "likewise",
    "ranks[].host": "likewise",
    "ranks[].device": "`cuda:0`, `cpu`, …",
    "ranks[].cpus": "its CPUs; `null` for any",
    "ranks[].env": "its variables, besides the inherited ones",
    "ranks[].argv": "its command",
    "preload.modules": "imported once for all ranks; not in plan.json, but in the event `ready`, as the next two",
    "preload.because": "why later imports, or all but torch, were left out; else `null`",
    "preload.excluded": "what each rank imports itself, and why",
}

DEVICES = {
    "cpu.name": "the processor",
    "cpu.logical": "CPUs of the machine; cores that may be used",
    "cpu.physical": "likewise",
    "cpu.allowed": "the CPUs that may be used, like `0-3,8`",
    "cpu.quota": "a container's limit of CPU time, in CPUs; `null` for none",
    "cpu.memory_total": "memory of the machine; what is free or can be freed",
    "cpu.memory_available": "likewise",
    "cpu.numa[].index": "each NUMA node: its CPUs and memory",
    "cpu.numa[].cpus": "likewise",
    "cpu.numa[].memory_total": "likewise",
    "gpus[].vendor": "`nvidia`, `amd` or `intel`",
    "gpus[].index": "its number, as `--gpus` takes it",
    "gpus[].device": "torch's name, like `cuda:0`; `null` if hidden from a job",
    "gpus[].name": "the model",
    "gpus[].uuid": "as `--gpus` takes it too",
    "gpus[].pci": "its address, like `0000:17:00.0`",
    "gpus[].driver": "the driver's version",
    "gpus[].memory_total": "its memory, and how much is in use",
    "gpus[].memory_used": "likewise",
    "gpus[].numa_node": "the NUMA node and the CPUs beside it",
    "gpus[].cpus": "likewise",
    "gpus[].mig_mode": "whether it is to be divided into MIG instances",
    "gpus[].mig[].uuid": "each MIG instance: as above; its profile; its numbers in the driver",
    "gpus[].mig[].device": "likewise",
    "gpus[].mig[].name": "likewise",
    "gpus[].mig[].memory_total": "likewise",
    "gpus[].mig[].gpu_instance": "likewise",
    "gpus[].mig[].compute_instance": "likewise",
    "gpus[].processes[].pid": "each process that uses the GPU: its program, its user, its share of the memory",
    "gpus[].processes[].name": "likewise",
    "gpus[].processes[].user": "likewise",
    "gpus[].processes[].memory": "likewise",
    "visible.source": "what decides: a variable, or the driver",
    "visible.devices[].device": "each visible device: torch's name, the GPU's index, its vendor, its name in the "
    "vendor's variable",
    "visible.devices[].gpu": "likewise",
    "visible.devices[].vendor": "likewise",
    "visible.devices[].token": "likewise",
    "notes[]": "sentences for people",
}

EVENTS = {
    "begun": "an attempt is planned: this node, the number of nodes and ranks, this node's ranks with their hosts",
    "ready": "the zygote is: whether ranks are forked from it, else why not; seconds of its imports; its modules, "
    "why no more, what each rank imports itself; with `--warm` why it is not a warm one",
    "started": "a rank has its process",
    "failed_to_start": "a rank has no process; `errno` says why",
    "exited": "a rank's process has ended; `code` is negative for a signal; peak bytes of memory and seconds of CPU "
    "time, children included",
    "signal": "the launcher got a signal",
    "preempt": "the preemption notice",
    "restart": "the next attempt, after `wait` seconds; the message; [the failure](#failurejson) without the "
    "`others`, or `null`",
    "swept": "the attempt is over: leftover processes, and those that cannot be killed",
    "sidecar_started": "a sidecar has its process",
    "sidecar_answers": "TensorBoard listens",
    "sidecar_exited": "a sidecar has ended; `code` is negative for a signal",
    "note": "a message",
    "first_collective": "when the last rank of this node entered a collective of this attempt",
    "stalled": "the ranks make no progress: since when, and the message, or nothing if they are stopped for it",
    "went_on": "the ranks that had stalled make progress again",
    "node_lost": "a node with ranks was lost; on node 0 alone",
    "checkpoint": "what `--checkpoint` found on node 0 at the end of the attempt, and its time; `null` for none",
    "ended": "the job is over: its exit code, [the failure](#failurejson), a remark like `at the stop: …`; or `null`",
}

MESSAGE_FIELDS = {
    "source": "`ddplaunch`; always the first field",
    "kind": "one of those below",
    "level": "`info`, `warning` or `error`",
    "time": "seconds since the epoch",
    "run_id": "the job's name; `null` before it has one",
    "node_rank": "of the sending node; `null` before it has a rank, and for a job over SSH as a whole",
    "text": "a sentence for people",
}

MESSAGE_KINDS: dict[str, tuple[str, str]] = {
    "note": ("none; of a stored file: `path`, `host`", "a message"),
    "waiting": ("none", "the nodes that are missing; again every 30 s"),
    "restart": (
        "`attempt`, `wait`, `verdict`",
        "as in events.jsonl; `null` if a zygote was lost",
    ),
    "stacks": (
        "`stacks`",
        "after Ctrl-\\: the output of [`stacks --json`](#the-stacks-as-json)",
    ),
    "failure": ("`verdict`", "the failure report, as in failure.json"),
    "error": ("`code`, `hint`, or `problems[]`: `host`, `text`", "a usage error, or hosts that cannot run the job"),
    "end": ("`code`", "the exit code; the last line"),
}
"""Of each kind: its own fields, and what it means."""

NOTIFY_FIELDS = {
    "event": "one of those below",
    "time": "seconds since the epoch",
    "run_id": "the job's name",
    "target": "as typed",
    "host": "node 0's name; of `fails` the host of the rank",
    "nnodes": "number of nodes and of ranks",
    "world_size": "likewise",
    "attempt": "0 is the first",
    "text": "a sentence for people",
}

NOTIFY_EVENTS: dict[str, tuple[str, str]] = {
    "starts": ("none", "all nodes have joined"),
    "fails": (
        "`rank`, `exit_code`, `signal`, `traceback[]`",
        "an attempt failed: the first rank, its exit code or signal (the other is `null`), the end of its traceback",
    ),
    "restarts": ("`next_attempt`, `wait`", "the next attempt, after `wait` seconds"),
    "stalls": ("`since`", "no progress, since then, in seconds since the epoch"),
    "preempted": ("none", "a preemption notice"),
    "ends": (
        "`code`, `seconds`, `remark`",
        "the job is over: its exit code, its duration, a remark or `null`",
    ),
}
"""Of each event of --notify: its own fields, and what it means."""

VERDICT = {
    "first": "the first cause, with the fields below",
    "alike": "ranks with the same failure at the same place",
    "others": "other failures, like `first`",
    "stopped": "number of ranks that were stopped because of it",
    "world_size": "number of ranks",
    "blame": "the rank that the failed ones had waited for, and its line; `null` for none",
}

FAILURE = {
    "rank": "of the rank: its number, that on its node, its node's name, its process (0 for none)",
    "local_rank": "likewise",
    "host": "likewise",
    "pid": "likewise",
    "attempt": "0 is the first",
    "exit_code": "one of them is `null`",
    "signal": "likewise",
    "message": "the exception's last line; `null` for none",
    "traceback": "as Python printed it, the user's frames only",
    "moment": "of the exception, else of the end of the process, in seconds since the epoch",
    "hint": "what the kernel reports, or what to do; four lines at most",
    "refused": "a usage error found only in the rank: message and hint",
    "tail": "its last lines of output",
    "collectives": "how many it had entered in all its process groups; `null` for none, or if not known",
    "reason": "how it ended, in words",
    "code": "its exit code, or 128 + the signal's number",
}


RUNS = {
    "run": "its name",
    "state": "of a running job `joining`, `starting`, `running`, `preempted`, `stopping`, `swept`, `restarting`, or "
    "`null` if its launcher does not answer; of one that has ended `done`, `failed`, `stopped`, `preempted`, `lost`",
    "pid": "of its launcher",
    "node_rank": "this node",
    "world_size": "number of ranks on all nodes; the ranks of this node",
    "ranks": "likewise",
    "attempt": "0 is the first, -1 none yet",
    "restarts": "their number",
    "began": "of the launcher, in seconds since the epoch; `null` while it runs",
    "ended": "likewise",
    "code": "its exit code",
    "collectives_per_second": "of its lowest rank here in the default process group; `null` if not known",
    "effective": "the [goodput](effective.md), from 0 to 1, once it has ended; else `null`",
    "target": "as typed",
    "hosts": "of a job that was started here over SSH, as ssh names them; else `null`",
}

RECORD = {
    "run": "its name: the run id, or `ID.2` if an earlier run had that",
    "run_id": "likewise",
    "target": "as typed",
    "argv[]": "the whole command, without its token",
    "host": "where this record was stored",
    "cwd": "where the command was typed",
    "pid": "of the launcher",
    "began": "start of the launcher, in seconds since the epoch, as all times here",
    "born": "start of that process in ticks of the kernel",
    "node_rank": "of the node whose record this is",
    "nnodes": "number of nodes and of all ranks",
    "world_size": "likewise",
    "log_dir": "the run's folder of `--log-dir`",
    "ended": "end of the job; `null` while it runs, and if it was lost",
    "code": "its exit code",
    "fate": "`running`, `done`, `failed`, `stopped`, `preempted` or `lost`",
    "signal": "the first that the launcher got",
    "attempts[].number": "each attempt, 0 the first; when its ranks started, and when all its processes were gone",
    "attempts[].began": "likewise",
    "attempts[].ended": "likewise",
    "attempts[].ranks[].rank": "each rank of this node; its process (0 for none), its start and end",
    "attempts[].ranks[].host": "likewise",
    "attempts[].ranks[].pid": "likewise",
    "attempts[].ranks[].started": "likewise",
    "attempts[].ranks[].ended": "likewise",
    "attempts[].ranks[].code": "its exit code, negative for a signal; `null` if not known",
    "attempts[].ranks[].peak_memory": "bytes of the largest of it and its children; 0 if not known",
    "attempts[].ranks[].cpu": "seconds of CPU time of it and its children",
    "attempts[].why": "why it ended, in a line",
    "attempts[].verdict": "of a failed attempt, as in failure.json, without `others`",
    "left_out": "number of attempts that are not stored, as there were too many",
    "verdict": "as in failure.json, of a run that failed",
    "remark": "on its end, like `at the stop: …`; or `null`",
    "inspections": "what the ranks were doing before they were stopped",
    "notes[]": "sentences for people",
    "lost": "the hosts of lost nodes; in node 0's record alone",
    "job": "the scheduler's number of the job that it ran in; or `null`",
    "spent.queued": "seconds of each [category](effective.md), all of the wall time; `steady` is the effective time",
    "spent.waiting": "likewise",
    "spent.imports": "likewise",
    "spent.first_collective": "likewise",
    "spent.steady": "likewise",
    "spent.stalled": "likewise",
    "spent.straggler": "likewise",
    "spent.stopping": "likewise",
    "spent.restarting": "likewise",
    "spent.discarded": "likewise",
    "spent.restarts": "their number",
    "stalls": "begin and end of each stall",
    "runs": "all runs of the scheduler's job, if its number was typed, which `spent` is of; else this one",
}


INSPECTION = {
    "moment": "in seconds since the epoch",
    "ranks[].rank": "each rank of the job; its node's name; its process there, 0 for none",
    "ranks[].host": "likewise",
    "ranks[].pid": "likewise",
    "ranks[].condition": "`alive`, `stopped` (SIGSTOP), `blocked` (uninterruptible sleep), `exited`, `pending`, "
    "`replaced` (by exec), `ending` (its program is over)",
    "ranks[].code": "its exit code, negative for a signal; when its process was gone, in seconds since the epoch",
    "ranks[].ended": "likewise",
    "ranks[].threads[].frames[].function": "the innermost call first; the main thread first; files relative to the "
    "job's folder",
    "ranks[].threads[].frames[].file": "likewise",
    "ranks[].threads[].frames[].line": "likewise",
    "ranks[].threads[].frames[].own": "whether it is the user's code, and not Python's or a package's",
    "ranks[].threads[].name": "in Python 3.14; `task …` of a task of asyncio that waits",
    "ranks[].no_stack": "why there are no threads",
    "ranks[].workers[].pid": "each worker of a DataLoader, or child of multiprocessing, that it waits for; frames as "
    "above",
    "ranks[].workers[].frames[].function": "likewise",
    "ranks[].workers[].frames[].file": "likewise",
    "ranks[].workers[].frames[].line": "likewise",
    "ranks[].workers[].frames[].own": "likewise",
    "ranks[].workers[].code": "its exit code; whether it is stopped",
    "ranks[].workers[].stopped": "likewise",
    "ranks[].answers": "whether it answered; `false`: native code holds the GIL; `null`: no process group",
    "ranks[].groups[].group": "each process group, `0` the default one; the number of the last operation entered, "
    "send and recv included, and completed, which gloo counts late",
    "ranks[].groups[].enqueued": "likewise",
    "ranks[].groups[].completed": "likewise",
    "ranks[].moved": "whether these changed within 0.1 s",
    "ranks[].last[].group": "the last collectives, if asked: group, number in it from 1, `all_reduce`, input like "
    "`float32[6]`, torch's timeout in seconds",
    "ranks[].last[].number": "likewise",
    "ranks[].last[].operation": "likewise",
    "ranks[].last[].tensors": "likewise",
    "ranks[].last[].timeout": "likewise",
    "ranks[].last[].entered": "when, by the clock of that host; whether it is completed",
    "ranks[].last[].completed": "likewise",
    "ranks[].last[].alone": "whether `groups` counts no send or recv of that group",
    "ranks[].known[].group": "the groups of these ranks; the program's name of it; its members",
    "ranks[].known[].description": "likewise",
    "ranks[].known[].ranks": "likewise",
    "ranks[].inside.function": "the function of torch.distributed that it is in, like `broadcast_object_list`, and "
    "what that calls: `broadcast`",
    "ranks[].inside.operation": "likewise",
    "ranks[].inside.names": "the peer of a send or recv, or the root; `null` for none",
    "ranks[].inside.members": "the ranks of the group that it makes; empty if not known",
    "ranks[].cpu": "seconds of CPU time of it and its ended children",
    "ranks[].arrivals": "always empty here",
    "ranks[].quiet": "seconds since it printed, or moved",
    "ranks[].standstill": "seconds in the same collective",
    "ranks[].busy": "share of a CPU of it and its child processes since the last inspection; `null` if not known",
    "ranks[].traffic": "their bytes a second in files and pipes, and on TCP connections except to ranks; `null` if "
    "not known",
    "ranks[].network": "likewise",
    "ranks[].late": "its mean delay at collectives in seconds; `null` if not asked",
    "ranks[].awaits": "what its main thread waits for on a TCP connection: `store`, or like `10.0.0.7:443`; or empty",
    "ranks[].asleep": "the system call in which its main thread sleeps, in words: `waits for a file lock`, `asleep`",
    "ranks[].lock_holder": "the rank that holds that lock; `null` if not known",
    "world_size": "number of ranks",
    "silent": "the nodes that did not answer",
    "node_only": "whether other nodes were not asked (`--control none`)",
    "pace": "who is slow, in sentences, if asked",
}

STACKS = {
    "sentences": "who waits for whom",
    "notes[]": "what was not asked, or did not answer",
    "waits[].text": "one of the sentences",
    "waits[].operation": "the call, its group, its number (0 if it is not a collective), the ranks that wait in it",
    "waits[].group": "likewise",
    "waits[].number": "likewise",
    "waits[].waiting": "likewise",
    "waits[].missing[].rank": "a rank that they wait for; whether it waits too; its call",
    "waits[].missing[].waits": "likewise",
    "waits[].missing[].calls": "likewise",
    "waits[].partners": "in send and recv: each rank and its peer",
    "waits[].cycle": "ranks that wait, each for the next and the last for the first",
    "waits[].different": "if calls differ: `operation`, `tensors` and `ranks` of each",
    "groups[].ranks": "ranks with equal stacks, what they do, for how many seconds",
    "groups[].state": "likewise",
    "groups[].waited": "likewise",
}

TOP = {
    "status": "`run_id`, `target`, `pid`, `node_rank`, `world_size`, `began`, `since`, `attempt`, `state`, `ranks`, "
    "`restarts`, `code` and `spent` of this node",
    "inspection": "as in `stacks.json`, without threads",
    "doing": "each rank: `running`, `waiting`, `silent`, `blocked`, `stopped`, `ended`, `failed`, `starting`",
    "waits": "who waits for whom, in sentences",
    "collectives_per_second": "`null` if not known",
    "cpus": "CPUs used, and bytes, of each rank of this node",
    "memory": "likewise",
}


def _plan() -> dict[str, Any]:
    machine = MachineInfo(host="n0", allowed_cpus=(0,), physical_cpus=1, slots=(DeviceSlot("cpu"),), slots_source="")
    target = Target(TargetKind.SCRIPT, "train.py", (), path="train.py")
    plan: Plan = make_plan(PlanSpec(nproc="1"), target, machine, {}, "id")
    return plan.to_json()


def plan_fields() -> list[str]:
    """The fields of a plan as JSON, lists as ``name[]``."""
    proven = ZygotePlan(True, ("torch",), fallback=("torch",), excluded=(("", ""),))
    return list(_paths({**_plan(), "preload": proven.to_json()}, ""))


def devices_fields() -> list[str]:
    """Return the fields of ``ddplaunch devices --json``."""
    user = GpuProcess(pid=1, name=None, user=None, memory=None)
    gpu = Gpu("nvidia", 0, "", mig=(MigInstance("", "", None),), processes=(user,))
    cpu = Cpu(None, logical=1, physical=1, allowed=(0,), numa=(NumaNode(0, (0,)),))
    visible = VisibleGpus((VisibleGpu(gpu, None, "0"),), "", devices=("cuda:0",))
    return list(_paths(devices_json(Hardware(cpu, (gpu,)), visible), ""))


def runs_fields() -> list[str]:
    """Those of ``ddplaunch ps --json``, alike for jobs that run and that have ended."""
    running = running_to_json(ObservedJob("", RunningJob("", "", 1), None, None))
    assert running.keys() == ended_to_json(_record()).keys()
    return list(running)


def record_fields() -> list[str]:
    """Return the fields of ``ddplaunch report --json``."""
    return list(_paths(json.loads(record_to_json(_record(), [], _record().spent)), ""))


def inspection_fields() -> list[str]:
    """Return the fields of stacks.json."""
    return list(_paths(json.loads(json.dumps(_inspection().to_json())), ""))


def stacks_fields() -> list[str]:
    """What ``ddplaunch stacks --json`` has beside them."""
    found = json.loads(json.dumps(stacks_json(_inspection())))
    return [path for path in _paths(found, "") if path.partition("[")[0] not in _inspection().to_json()]


def _inspection() -> Inspection:
    """Two ranks, of which the first waits for the second."""
    frames = (Frame("load", "train.py", 1, True),)
    collective = Collective("0", 1, "all_reduce", "", 1.0, 0.0, False, True)
    waiting = RankInspection(
        0, "", 1, ProcessCondition.ALIVE, threads=(Thread(frames),), answers=True, groups=(GroupState("0", 1, 0),),
        last=(collective,), known=(Group("0", "default_pg", (0, 1)),),
        inside=ActiveCall("all_reduce", "all_reduce", None), workers=(Worker(3, frames),),
    )  # fmt: skip
    return Inspection(1.0, (waiting, RankInspection(1, "", 2, ProcessCondition.ALIVE, answers=True)), 2)


def _record() -> RunRecord:
    attempt = AttemptRecord(0, 0.0, ranks=(RankRecord(0, ""),))
    return RunRecord("", "", "", (), "", "", 1, 0.0, attempts=(attempt,))


def plan_environment() -> dict[str, str]:
    """The variables of its rank."""
    variables: dict[str, str] = _plan()["ranks"][0]["env"]
    return variables


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and not path.endswith("env"):
        for name, inner in value.items():
            yield from _paths(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from _paths(value[0], f"{path}[]")
    else:
        yield f"{path}[]" if path in ("notes", "argv") else path


def events() -> dict[str, list[str]]:
    """Each event that events.jsonl has, with its own fields."""
    kept_alone = ("inspected", "left_out")  # in the history
    of_features = {str(kind.__struct_config__.tag): kind for kind in (SidecarStarted, SidecarListening, SidecarExited)}
    kinds = {**EVENT_TYPES, **of_features}
    return {name: list(kind.__struct_fields__) for name, kind in kinds.items() if name not in kept_alone}


def failure_fields() -> tuple[list[str], list[str]]:
    """The fields of a verdict, and of a failure in it, as failure.json has them."""
    blank: dict[str, Any] = dict.fromkeys(RankFailure.__struct_fields__) | {"exit_code": 1}
    first = RankFailure(**blank)
    verdict = FailureReport(first, (), (), 0, 1).to_json()
    return list(verdict), list(verdict["first"])


EXITS = {
    0: ("All ranks returned 0.", ""),
    1: ("The code of the first rank that failed; 1 after an exception.", "`raise`, `sys.exit(3)`, an error in torch"),
    2: ("", "a misspelt option, a port in use; or a rank's own `sys.exit(2)`"),
    69: ("", "a machine that went down"),
    70: ("", "please report it, with the file that the message names"),
    71: ("", "`pids.max`, `ulimit -u`; the message says how many ranks had started"),
    75: ("", "[preemption](preemption.md), a time limit"),
    126: ("What `--no-python` names cannot be executed.", "a missing execute permission"),
    130: ("Ctrl-C (SIGINT).", ""),
    134: ("SIGABRT.", "a failed check in native code, a broken heap"),
    135: ("SIGBUS.", "`/dev/shm` is full, a mapped file shrank"),
    137: ("SIGKILL.", "`kill -9`, the kernel's out-of-memory killer"),
    139: ("SIGSEGV.", "a segmentation fault in native code"),
    143: ("SIGTERM, to ddplaunch, or to one rank from outside.", "a scheduler's time limit"),
}
"""Exit codes: what they mean, where ``errors.py`` does not say it, and what brings them about."""


def error_codes() -> Iterator[tuple[str, int, str]]:
    """The exit codes that the launcher itself chooses: name, number, and the text below it in ``errors.py``."""
    text = (Path(ddplaunch.__file__).parent / "base" / "errors.py").read_text(encoding="utf-8")
    for match in re.finditer(r'^(EXIT_\w+) = (\d+)\n"""(.*?)"""', text, re.MULTILINE | re.DOTALL):
        yield match[1], int(match[2]), " ".join(match[3].split())
