"""Checks whether nodes of a Slurm step that have not joined are still alive.

A task whose node lacks the interpreter, for example, ends at once; srun only writes that to the log, and the other
nodes would wait until the join timeout. So node 0 runs ``scontrol listpids`` on the missing nodes: it lists the tasks
of the step that are alive there. The other nodes check node 0 in the same way, one after the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.helper_process import HelperProcess
from ddplaunch.base.options import Options
from ddplaunch.base.text import join_names
from ddplaunch.cli.cluster_detection import SLURM, find_slurm_step, task_count
from ddplaunch.core import messages
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.messages import Message, NodeStartError
from ddplaunch.core.option_values import AUTO
from ddplaunch.core.options import Elastic, Nodes
from ddplaunch.system.clusters.cluster_env import ClusterEnv
from ddplaunch.system.clusters.nodelist import expand_hosts
from ddplaunch.system.clusters.systems.slurm_env import DISTRIBUTION, JOB_ID, PROCID, STEP_ID, STEP_NODELIST
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.processes.proc_utils import die_with_parent

CHECK_INTERVAL_S = 5.0  # until the first check, and between two checks
CHECK_TIMEOUT_S = 20.0  # for a check: on a busy cluster starting a step takes long
STAGGER_S = 0.2  # between the checks of two nodes for node 0: there may be thousands
MAX_HOSTS = 64  # with more there is no check; if each rank is a task, all hosts are checked: a task's host is unknown

_SLURM_VARIABLES = {"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"}
"""Slurm variables that srun needs; other variables of this step would change the step that makes the check."""


def is_step_of_job(options: Options, cluster_env: ClusterEnv | None, node_rank: int) -> bool:
    """Whether the tasks of a Slurm step are the job's nodes or ranks, so that a node rank is a task number."""
    if cluster_env is not None:
        return cluster_env.cluster == SLURM and not cluster_env.is_batch_script
    step = find_slurm_step(options)
    if step is None or task_count(step) != options[Nodes].nnodes[1] + options[Elastic].spares:
        return False
    return options[Nodes].node_rank == AUTO or (step.rank_assignment is None and node_rank == step.node_rank)


class JoinWatcher(NodeSide):
    """Checks the missing nodes while the job waits for them."""

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self._missing: MissingNodeChecker | None = None

    def on_message(self, message: Message) -> None:
        match message:
            case messages.JoinStatus(missing=missing) if message.min_nodes == message.max_nodes:
                if not self._context.plan.node_rank:
                    self._set_missing(missing)
            case messages.ConnectingToNodeZero():
                self._set_missing((0,))
            case messages.JoinAccepted() | messages.AttemptMessage() | messages.StartAttempt() | messages.EndJob():
                self.close()

    def _set_missing(self, missing: Sequence[int]) -> None:
        if self._missing is None:
            context = self._context
            self._missing = MissingNodeChecker(context.loop, os.environ, context.plan, context.job.send)
        self._missing.set_missing(missing)

    def close(self) -> None:
        if self._missing:
            self._missing.close()
            self._missing = None


class MissingNodeChecker:
    """Checks whether missing nodes are alive, until ``close``; calls ``on_missing`` if two checks in a row miss one."""

    def __init__(
        self, loop: EventLoop, environ: Mapping[str, str], plan: Plan, on_missing: Callable[[NodeStartError], None]
    ) -> None:
        self._loop, self._environ, self._on_missing = loop, environ, on_missing
        self._kind = "node" if plan.has_node_rank and not plan.started_rank else "task"
        self._all = None if plan.has_node_rank else range(plan.nnodes)  # it is not known which task is which node
        self._pause = CHECK_INTERVAL_S + STAGGER_S * int(environ[PROCID])
        self._missing: Sequence[int] = ()
        self._gone: set[int] = set()
        self._child: HelperProcess | None = None
        self._output = b""
        self._timer = loop.call_later(self._pause, self._check)

    def set_missing(self, missing: Sequence[int]) -> None:
        """Set the nodes that are missing now."""
        self._missing = self._all or missing

    def close(self) -> None:
        self._timer.cancel()
        if self._child is not None:
            self._child.close()
            self._child = None

    def _check(self) -> None:
        hosts = expand_hosts(self._environ[STEP_NODELIST], STEP_NODELIST)
        if self._kind == "node" or self._missing == (0,):
            hosts = tuple(hosts[number] for number in self._missing)
        if not 0 < len(hosts) <= MAX_HOSTS or "arbitrary" in self._environ.get(DISTRIBUTION, ""):
            return  # too many hosts, or a task may be on any of them
        environ = {
            name: value
            for name, value in self._environ.items()
            if name in _SLURM_VARIABLES or not name.startswith(("SLURM_", "SRUN_", "PMI"))
        }
        count, job = len(hosts), self._environ[JOB_ID]
        where = [f"--nodelist={','.join(hosts)}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        how = ["--overlap", f"--jobid={job}", "--input=none", "--label", "--quiet"]
        command = ["srun", *how, *where, "scontrol", "listpids", f"{job}.{self._environ[STEP_ID]}"]
        self._output = b""
        try:
            self._child = HelperProcess(
                self._loop,
                command,
                partial(self._on_output, count),
                self.close,
                deadline=CHECK_TIMEOUT_S,
                merge_stderr=True,
                environ=environ,
                preexec_fn=die_with_parent,
            )
        except OSError:  # as in many containers
            return

    def _on_output(self, count: int, data: bytes) -> None:
        self._output += data
        if data:
            return
        self.close()
        alive = parse_listpids(self._output.decode(errors="replace"), count)
        gone = set(self._missing) - alive if alive is not None else set()
        if both := sorted(gone & self._gone):
            return self._on_missing(self._make_error(both))
        self._gone = gone
        self._timer = self._loop.call_later(self._pause, self._check)

    def _make_error(self, gone: list[int]) -> NodeStartError:
        hosts = expand_hosts(self._environ[STEP_NODELIST], STEP_NODELIST)
        names = [f"{number} ({hosts[number]})" if self._kind == "node" else str(number) for number in gone]
        what = f"{self._kind} {names[0]} has" if len(gone) == 1 else f"{self._kind}s {join_names(names)} have"
        return NodeStartError(
            f"Slurm reports that {what} ended",
            "see the output of srun: are Python and the job's files there?",
        )


def parse_listpids(listed: str, count: int) -> set[int] | None:
    """Parse the tasks alive from ``srun --label scontrol listpids``; None unless ``count`` nodes replied.

    ``0: PID JOBID STEPID LOCALID GLOBALID``, then such lines, with ``-`` in place of the last two for children; or
    ``0: StepId=7.0 does not exist on node (null).`` Other lines are srun's own.
    """
    answered, tasks = set(), set()
    for line in listed.splitlines():
        if answer := re.fullmatch(r"(\d+): (?:PID .*|StepId=\S+ does not exist on node .*)", line):
            answered.add(answer[1])
        elif task := re.fullmatch(r"\d+: \d+ +\S+ +\S+ +\S+ +(\d+) *", line):
            tasks.add(int(task[1]))
    return tasks if len(answered) == count else None
