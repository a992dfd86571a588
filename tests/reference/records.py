"""Descriptions of the fields of a dry run, an event and a failure; the fields come from the code."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import ddplaunch
from ddplaunch.commands.devices import devices_json
from ddplaunch.commands.runs.ps import SeenJob, ended_to_json, running_to_json
from ddplaunch.console.stacks import stacks_to_json as stacks_json
from ddplaunch.control.failure import FailureReport, RankFailure
from ddplaunch.devices.vendor import VisibleGpu, VisibleGpus
from ddplaunch.diagnosis.inspection import (
    ActiveCall,
    Collective,
    Frame,
    Group,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
    Worker,
)
from ddplaunch.job.record import AttemptRecord, RankRecord, RunRecord, record_to_json
from ddplaunch.job.runs import RunningJob
from ddplaunch.output.events import EVENT_TYPES
from ddplaunch.plan.hardware import Cpu, Gpu, GpuProcess, Hardware, MigInstance, NumaNode
from ddplaunch.plan.layout import DeviceSlot
from ddplaunch.plan.make import MachineInfo, PlanSpec, make_plan
from ddplaunch.plan.plan import Plan
from ddplaunch.preload.choice import PreloadPlan
from ddplaunch.target.target import Target, TargetKind

PLAN = {
    "run_id": "the job's name: `--run-id`, or the time and a few random digits",
    "nnodes": "how many nodes",
    "node_rank": "this node",
    "world_size": "how many ranks",
    "master_addr": "where torch's store will be",
    "master_port": "its port; 0 is chosen at the start",
    "target": "as typed",
    "backend": "of the process group, if ddplaunch makes it; else `null`",
    "init_method": "likewise",
    "facts[].name": "what was found out",
    "facts[].value": "as text",
    "facts[].source": "a flag, a variable, what was found, or `assumed`",
    "notes[]": "sentences for people",
    "nodes[].node_rank": "the node's",
    "nodes[].host": "its name; `null` if not known",
    "nodes[].local_world_size": "how many ranks it has",
    "nodes[].source": "where that count comes from",
    "ranks[].rank": "among all",
    "ranks[].local_rank": "among those of its node",
    "ranks[].node_rank": "its node",
    "ranks[].host": "that node's name; `null` if not known",
    "ranks[].device": "`cuda:0`, `cpu`, …",
    "ranks[].cpus": "its CPUs; `null` for any",
    "ranks[].env": "its variables, beside those that it inherits",
    "ranks[].argv": "its command",
    "preload.modules": "what is imported once for all ranks; the event `ready` has these four too, and plan.json not",
    "preload.because": "what kept later imports out, or why only torch was imported; else `null`",
    "preload.excluded": "what each rank imports itself, and why",
}

DEVICES = {
    "cpu.name": "the processor's",
    "cpu.logical": "how many CPUs the machine has",
    "cpu.physical": "how many cores those that may be used have",
    "cpu.allowed": "the CPUs that may be used, like `0-3,8`",
    "cpu.quota": "a container's limit of CPU time, in CPUs; `null` for none",
    "cpu.memory_total": "of the machine",
    "cpu.memory_available": "what is free of that or can be freed",
    "cpu.numa[].index": "the NUMA node",
    "cpu.numa[].cpus": "its CPUs",
    "cpu.numa[].memory_total": "its memory",
    "gpus[].vendor": "`nvidia`, `amd`, `intel` or `apple`",
    "gpus[].index": "its number, as `--gpus` takes it",
    "gpus[].device": "torch's name, like `cuda:0`; `null` if hidden from a job",
    "gpus[].name": "the model",
    "gpus[].uuid": "as `--gpus` takes it too",
    "gpus[].pci": "its address, like `0000:17:00.0`",
    "gpus[].driver": "the driver's version",
    "gpus[].memory_total": "its memory",
    "gpus[].memory_used": "what is in use",
    "gpus[].numa_node": "the NUMA node beside it",
    "gpus[].cpus": "the CPUs beside it",
    "gpus[].mig_mode": "whether it is to be divided into MIG instances",
    "gpus[].mig[].uuid": "a MIG instance, as `--gpus` takes it",
    "gpus[].mig[].device": "torch's name; `null` if hidden from a job",
    "gpus[].mig[].name": "its profile",
    "gpus[].mig[].memory_total": "its memory",
    "gpus[].mig[].gpu_instance": "its number in the driver",
    "gpus[].mig[].compute_instance": "likewise",
    "gpus[].processes[].pid": "a process that uses the GPU",
    "gpus[].processes[].name": "its program",
    "gpus[].processes[].user": "whose it is",
    "gpus[].processes[].memory": "its share of the GPU's memory",
    "visible.source": "what decides: a variable, or the driver",
    "visible.devices[].device": "torch's name",
    "visible.devices[].gpu": "the index of the GPU",
    "visible.devices[].vendor": "as above",
    "visible.devices[].token": "its name in the vendor's variable",
    "notes[]": "sentences for people",
}

EVENTS = {
    "begun": "an attempt is planned: this node, how many nodes and ranks there are, and its own ranks with their hosts",
    "ready": "the zygote is: are ranks forked from it, why not, how long its imports took, in seconds; "
    "what it has imported, why no more, what each rank imports itself and why; "
    "why it is not a warm one, where that was asked for",
    "started": "a rank has its process",
    "failed_to_start": "a rank has no process; why, as a number of `errno`",
    "exited": "a rank's process has ended; `code` is negative for a signal; bytes of memory that it had at most and "
    "seconds of CPU time, its children's included",
    "signal": "a signal has come to the launcher",
    "preempt": "the ranks are warned",
    "restart": "the attempt that follows, after `wait` seconds; what people are told, and "
    "[the failure](#failurejson) without the `others`, or `null`",
    "swept": "the attempt is gone: what it left behind, what could not be killed",
    "sidecar_started": "a sidecar has its process",
    "sidecar_answers": "TensorBoard says where it listens",
    "sidecar_exited": "a sidecar has ended; `code` is negative for a signal",
    "note": "what people are told",
    "first_collective": "every rank of this node has entered a collective of this attempt: when the last of them did",
    "stalled": "the ranks get nowhere: since when, and what people are told, or nothing where they are stopped for it",
    "went_on": "the ranks that had stalled work again",
    "node_lost": "a node that took part was lost; on node 0 alone",
    "checkpoint": "what `--checkpoint` found on node 0 as the attempt ended, and since when it is; `null` for none",
    "ended": "the job is over; its exit code, [the failure](#failurejson) that decided it, or `null`, and a last word, "
    "like `when it was stopped: …`, or `null`",
}

MESSAGE_FIELDS = {
    "source": "`ddplaunch`; always first, so that each of these lines begins alike",
    "kind": "one of those below",
    "level": "`info`, `warning` or `error`",
    "time": "seconds since the epoch",
    "run_id": "the job's name; `null` before it has one",
    "node_rank": "which node says it; `null` before it has a rank, and for a job over SSH as a whole",
    "text": "a sentence for people",
}

MESSAGE_KINDS: dict[str, tuple[str, str]] = {
    "note": ("none; where a file is kept: `path`, `host`", "what people are told"),
    "waiting": ("none", "whom node 0, or this node, waits for; again every 30 s"),
    "restart": (
        "`attempt`, `wait`, `verdict`",
        "as `restart` in events.jsonl, and the failure before it; `null` where a zygote was lost",
    ),
    "stacks": (
        "`stacks`",
        "after Ctrl-\\: what the ranks do, as [`stacks --json`](#the-stacks-as-json) prints it",
    ),
    "failure": ("`verdict`", "the failure report, as failure.json has it"),
    "error": ("`code`, `hint`, or `problems[]`: `host`, `text`", "the command is refused, or a host over SSH is"),
    "end": ("`code`", "the job has ended with this exit code; the last line"),
}
"""Of each kind: its own fields, and what it means."""

NOTIFY_FIELDS = {
    "event": "one of those below",
    "time": "seconds since the epoch",
    "run_id": "the job's name",
    "target": "as typed",
    "host": "node 0's name; of `fails` the host of the rank",
    "nnodes": "how many nodes",
    "world_size": "how many ranks",
    "attempt": "0 is the first",
    "text": "a sentence for people",
}

NOTIFY_EVENTS: dict[str, tuple[str, str]] = {
    "starts": ("none", "all nodes have joined, and the ranks are about to start"),
    "fails": (
        "`rank`, `exit_code`, `signal`, `traceback[]`",
        "an attempt failed: the rank that failed first, its exit code or the signal that ended it (the other is "
        "`null`), the last lines of its traceback",
    ),
    "restarts": ("`next_attempt`, `wait`", "the attempt that follows, after `wait` seconds"),
    "stalls": ("`since`", "the job gets nowhere, since then, in seconds since the epoch"),
    "preempted": ("none", "the scheduler wants the machines back, and the ranks are warned"),
    "ends": (
        "`code`, `seconds`, `remark`",
        "the job is over: its exit code, the seconds since the launcher's start, and a last word or `null`",
    ),
}
"""Of each event of --notify: its own fields, and what it means."""

VERDICT = {
    "first": "the first cause, with the fields below",
    "alike": "ranks that failed alike, at the same place",
    "others": "other failures, like `first`",
    "stopped": "how many ranks were stopped because of it",
    "world_size": "how many ranks there were",
    "blame": "the rank that those which failed had waited for, and its line; `null` for none",
}

FAILURE = {
    "rank": "which",
    "local_rank": "among those of its node",
    "host": "its node's name",
    "pid": "its process there; 0 for none",
    "attempt": "0 is the first",
    "exit_code": "`null` if a signal ended it",
    "signal": "its number; `null` if the rank exited",
    "message": "the exception's last line; `null` for none",
    "traceback": "as Python printed it, the user's frames only",
    "moment": "of the exception, else of the end of the process, in seconds since the epoch",
    "hint": "what the kernel adds, as about its out-of-memory killer, or what to do; four lines at most",
    "refused": "ddplaunch's own error, found inside the rank: message and hint",
    "tail": "the last lines that it printed",
    "collectives": "how many it had entered in all its process groups; `null` for none, or where it is not known",
    "reason": "how it ended, in words",
    "code": "its exit code, or 128 + the signal's number",
}


RUNS = {
    "run": "its name",
    "state": "of a running job `joining`, `starting`, `running`, `preempted`, `stopping`, `swept`, `restarting`, or "
    "`null` if its launcher does not answer; of one that has ended `done`, `failed`, `stopped`, `preempted`, `lost`",
    "pid": "of its launcher",
    "node_rank": "this node",
    "world_size": "how many ranks it has on all nodes",
    "ranks": "those of this node",
    "attempt": "0 is the first, -1 none yet",
    "restarts": "how many there were",
    "began": "when the launcher did, in seconds since the epoch",
    "ended": "when it did; `null` while it runs",
    "code": "its exit code",
    "collectives_per_second": "what its lowest rank here completes in the default process group; `null` if not known",
    "effective": "the [effective](effective.md) part of its time, 1 for all, once it has ended; else `null`",
    "target": "as typed",
    "hosts": "of a job that was started here over SSH and runs there, as ssh names them; else `null`",
}

RECORD = {
    "run": "its name: the run id, or `ID.2` where an earlier run had that",
    "run_id": "the run id",
    "target": "as typed",
    "argv[]": "the whole command, without its token",
    "host": "where this record was kept",
    "cwd": "where the command was typed",
    "pid": "of the launcher",
    "began": "when the launcher did, in seconds since the epoch, as all times here",
    "born": "when the kernel made that process, in its ticks",
    "node_rank": "of the node whose record this is",
    "nnodes": "how many nodes",
    "world_size": "how many ranks on all nodes",
    "log_dir": "the run's folder of `--log-dir`",
    "ended": "when the job did; `null` while it runs, and where it was lost",
    "code": "its exit code",
    "fate": "`running`, `done`, `failed`, `stopped`, `preempted` or `lost`",
    "signal": "the first that came to the launcher",
    "attempts[].number": "0 is the first",
    "attempts[].began": "when its ranks were about to start",
    "attempts[].ended": "when nothing of it was left",
    "attempts[].ranks[].rank": "a rank of this node",
    "attempts[].ranks[].host": "its node's name",
    "attempts[].ranks[].pid": "its process; 0 for none",
    "attempts[].ranks[].started": "when it had its process",
    "attempts[].ranks[].ended": "when that was gone",
    "attempts[].ranks[].code": "its exit code, negative for a signal; `null` if nobody saw its end",
    "attempts[].ranks[].peak_memory": "bytes that the largest of it and its children had at most; 0 if not known",
    "attempts[].ranks[].cpu": "seconds of CPU time of it and its children",
    "attempts[].why": "why it ended, in a line",
    "attempts[].verdict": "as in failure.json, but for `others`, of an attempt that failed",
    "left_out": "attempts that are not here, as there were too many: those before the last",
    "verdict": "as in failure.json, of a run that failed",
    "remark": "a last word on its end, like `when it was stopped: …`; `null` if there is none",
    "inspections": "what the ranks were doing when they were about to be stopped",
    "notes[]": "sentences for people",
    "lost": "the hosts of nodes that were lost; in node 0's record alone",
    "job": "the scheduler's number of the job that it ran in; `null` outside of one",
    "spent.queued": "[where its time went](effective.md), in seconds; the parts add up to the wall time",
    "spent.waiting": "for the other nodes, before the first attempt",
    "spent.imports": "until all ranks had a process",
    "spent.first_collective": "from then until every rank had entered a collective",
    "spent.steady": "the effective time, of which goodput is the share",
    "spent.stalled": "the ranks made no progress",
    "spent.straggler": "some ranks were done, others were not",
    "spent.stopping": "from a failure or a signal until nothing was left",
    "spent.restarting": "from then until all ranks had a process again",
    "spent.discarded": "work after the last checkpoint of an attempt that failed",
    "spent.restarts": "how many there were",
    "stalls": "when its ranks were stalled: begin and end of each stall",
    "runs": "all runs of its job, which `spent` is of, where the scheduler's number was typed; else it alone",
}


INSPECTION = {
    "moment": "when, in seconds since the epoch",
    "ranks[].rank": "all ranks of the job",
    "ranks[].host": "its node's name",
    "ranks[].pid": "its process there; 0 for none",
    "ranks[].condition": "`alive`, `stopped` (SIGSTOP), `blocked` (uninterruptible sleep), `exited`, `pending`, or "
    "`replaced` (by exec), `ending` (its program is over)",
    "ranks[].code": "how it ended: its exit code, negative for a signal",
    "ranks[].ended": "when its process was seen to be gone, in seconds since the epoch",
    "ranks[].threads[].frames[].function": "the innermost call first; of the main thread, then of the others",
    "ranks[].threads[].frames[].file": "relative to the job's folder where it is below that",
    "ranks[].threads[].frames[].line": "the line",
    "ranks[].threads[].frames[].own": "whether it is the user's code, and not Python's or a package's",
    "ranks[].threads[].name": "where Python tells it (3.14); `task …` of a task of asyncio that waits",
    "ranks[].no_stack": "why there are no threads",
    "ranks[].workers[].pid": "where it waits for its DataLoader, or for multiprocessing: a worker or child process",
    "ranks[].workers[].frames[].function": "as in `threads`, from what runs the process on",
    "ranks[].workers[].frames[].file": "likewise",
    "ranks[].workers[].frames[].line": "likewise",
    "ranks[].workers[].frames[].own": "likewise",
    "ranks[].workers[].code": "how it ended, where it has",
    "ranks[].workers[].stopped": "whether it is stopped, by SIGSTOP or a debugger",
    "ranks[].answers": "whether it said how far it is; `false`: native code holds the GIL; `null`: no process group",
    "ranks[].groups[].group": "torch's name of a process group: `0` is the default one",
    "ranks[].groups[].enqueued": "the operation that it entered last, send and recv included",
    "ranks[].groups[].completed": "the last that completed; gloo is late to count, and out of order",
    "ranks[].moved": "whether these changed within 0.1 s",
    "ranks[].last[].group": "the last collectives, of the ranks that were asked for them: a process group",
    "ranks[].last[].number": "the collective's, from 1, in its group",
    "ranks[].last[].operation": "`all_reduce`",
    "ranks[].last[].tensors": "what goes in: `float32[6]`",
    "ranks[].last[].timeout": "torch's, in seconds",
    "ranks[].last[].entered": "when, by the clock of that host",
    "ranks[].last[].completed": "whether it has",
    "ranks[].last[].alone": "whether no send or recv is counted in `groups` of that group",
    "ranks[].known[].group": "the groups that it is in, of the same ranks",
    "ranks[].known[].description": "what the program calls it",
    "ranks[].known[].ranks": "its members",
    "ranks[].inside.function": "the function of torch.distributed that it is in, like `broadcast_object_list`",
    "ranks[].inside.operation": "what that has called in turn: `broadcast`",
    "ranks[].inside.names": "the rank that it sends to or receives from, or the root; `null` for none",
    "ranks[].inside.members": "the ranks of the group that it makes; empty where that is not known",
    "ranks[].cpu": "seconds of CPU time of it and its children that have ended",
    "ranks[].arrivals": "always empty here",
    "ranks[].quiet": "seconds since it printed, or moved",
    "ranks[].standstill": "seconds for which it has been in the same collective",
    "ranks[].busy": "share of a CPU that it and what is below it used since it was last looked at; `null` if not known",
    "ranks[].traffic": "bytes a second that they read and wrote, in files and pipes; `null` if not known",
    "ranks[].network": "bytes a second on their TCP connections to others than ranks; `null` if not known",
    "ranks[].late": "seconds by which it arrived last at collectives, in the mean; `null` if not asked",
    "ranks[].awaits": "what its main thread waits for on a TCP connection: `store`, or like `10.0.0.7:443`; or empty",
    "ranks[].asleep": "the system call in which its main thread sleeps, in words: `waits for a file lock`, `asleep`",
    "ranks[].lock_holder": "the rank that holds the lock it waits for; `null` where that is not known",
    "world_size": "how many ranks",
    "silent": "the nodes that did not answer",
    "node_only": "whether other nodes were not asked (`--control none`)",
    "pace": "who is slow, in sentences, where that was asked",
}

STACKS = {
    "sentences": "who waits for whom",
    "notes[]": "what was not asked, or did not answer",
    "waits[].text": "one of the sentences",
    "waits[].operation": "what ranks wait in",
    "waits[].group": "its group",
    "waits[].number": "its number; 0 if it is no collective",
    "waits[].waiting": "the ranks that wait",
    "waits[].missing[].rank": "a rank that they wait for",
    "waits[].missing[].waits": "whether it waits itself, for somebody else",
    "waits[].missing[].calls": "in what",
    "waits[].partners": "in send and recv: a rank, and the one that it sends to or receives from",
    "waits[].cycle": "ranks that wait, each for the next and the last for the first; in the first such wait",
    "waits[].different": "where all came, but not to the same: `operation`, `tensors` and `ranks` of each",
    "groups[].ranks": "ranks with equal stacks",
    "groups[].state": "what they do, in words",
    "groups[].waited": "for how many seconds",
}

TOP = {
    "status": "`run_id`, `target`, `pid`, `node_rank`, `world_size`, `began`, `since`, `attempt`, `state`, `ranks`, "
    "`restarts`, `code` and `spent` of this node's share",
    "inspection": "as in `stacks.json`, without threads",
    "doing": "what each rank does: `running`, `waiting`, `silent`, `blocked`, `stopped`, `ended`, `failed`, `starting`",
    "waits": "who waits for whom, in sentences",
    "collectives_per_second": "how fast the job is; `null` if not known",
    "cpus": "CPUs that each rank of this node uses",
    "memory": "bytes of each rank of this node",
}


def _plan() -> dict[str, Any]:
    machine = MachineInfo(host="n0", allowed_cpus=(0,), physical_cpus=1, slots=(DeviceSlot("cpu"),), slots_source="")
    target = Target(TargetKind.SCRIPT, "train.py", (), path="train.py")
    plan: Plan = make_plan(PlanSpec(nproc="1"), target, machine, {}, "id")
    return plan.to_json()


def plan_fields() -> list[str]:
    """The fields of a plan as JSON, lists as ``name[]``."""
    proven = PreloadPlan(True, ("torch",), fallback=("torch",), excluded=(("", ""),))
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
    running = running_to_json(SeenJob("", RunningJob("", "", 1), None, None))
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
    return {name: list(kind.__match_args__) for name, kind in EVENT_TYPES.items() if name not in kept_alone}


def failure_fields() -> tuple[list[str], list[str]]:
    """The fields of a verdict, and of a failure in it, as failure.json has them."""
    blank: dict[str, Any] = {field.name: None for field in fields(RankFailure)} | {"exit_code": 1}
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
    text = (Path(ddplaunch.__file__).parent / "errors.py").read_text(encoding="utf-8")
    for match in re.finditer(r'^(EXIT_\w+) = (\d+)\n"""(.*?)"""', text, re.MULTILINE | re.DOTALL):
        yield match[1], int(match[2]), " ".join(match[3].split())
