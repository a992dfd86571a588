"""Nodes of a Slurm step that do not join: whether they run at all, which srun knows and only writes to the log.

A node without the interpreter, say, ends at once, and the others would wait for it until the join timeout. So node 0
has ``scontrol listpids`` run there: it names the tasks of our step that live, and it does so on a node without any.
The others look for node 0 in the same way, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddplaunch.clusters.nodelist import expand_hosts
from ddplaunch.clusters.systems.slurm import DISTRIBUTION, JOB_ID, PROCID, STEP_ID, STEP_NODELIST
from ddplaunch.control.messages import Unable
from ddplaunch.loop import Loop
from ddplaunch.plan.plan import Plan
from ddplaunch.rank.processes import die_with_parent
from ddplaunch.wire.child import AskedChild
from ddplaunch.words import named

LATE = 5.0  # seconds after which those that have not joined are looked for, and between two looks
DEADLINE = 20.0  # seconds for a look: on a busy cluster a step takes its time
APART = 0.2  # seconds between the looks of two nodes for node 0: there may be thousands
MAX_HOSTS = 64  # of a step with a task a rank, where nobody says which host the missing ones are on

_OURS = {"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"}
"""What srun needs of the step's variables; the others would shape the step that looks."""


class MissingNodes:
    """Looks for missing nodes until ``close``; ``tell`` is called with those that were not found twice."""

    def __init__(self, loop: Loop, environ: Mapping[str, str], plan: Plan, tell: Callable[[Unable], None]) -> None:
        self._loop, self._environ, self._tell = loop, environ, tell
        self._kind = "node" if plan.numbered and not plan.started_rank else "task"
        self._all = None if plan.numbered else range(plan.nnodes)  # which of the tasks is which node is not known
        self._pause = LATE + APART * int(environ[PROCID])
        self._missing: Sequence[int] = ()
        self._gone: set[int] = set()
        self._child: AskedChild | None = None
        self._said = b""
        self._timer = loop.after(self._pause, self._look)

    def heard(self, missing: Sequence[int]) -> None:
        """Take in who is missing now."""
        self._missing = self._all or missing

    def close(self) -> None:
        self._timer.cancel()
        if self._child is not None:
            self._child.close()
            self._child = None

    def _look(self) -> None:
        hosts = expand_hosts(self._environ[STEP_NODELIST], STEP_NODELIST)
        if self._kind == "node" or self._missing == (0,):
            hosts = tuple(hosts[number] for number in self._missing)
        if not 0 < len(hosts) <= MAX_HOSTS or "arbitrary" in self._environ.get(DISTRIBUTION, ""):
            return  # too many to ask, or a task may be on any of them
        environ = {name: value for name, value in self._environ.items() if name in _OURS or not _is_slurms(name)}
        count, job = len(hosts), self._environ[JOB_ID]
        where = [f"--nodelist={','.join(hosts)}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        how = ["--overlap", f"--jobid={job}", "--input=none", "--label", "--quiet"]
        command = ["srun", *how, *where, "scontrol", "listpids", f"{job}.{self._environ[STEP_ID]}"]
        self._said = b""
        try:
            self._child = AskedChild(
                self._loop,
                command,
                partial(self._hear, count),
                self.close,
                deadline=DEADLINE,
                errors=True,
                environ=environ,
                begun=die_with_parent,
            )
        except OSError:  # as in many containers
            return

    def _hear(self, count: int, data: bytes) -> None:
        self._said += data
        if data:
            return
        self.close()
        alive = tasks(self._said.decode(errors="replace"), count)
        gone = set(self._missing) - alive if alive is not None else set()
        if both := sorted(gone & self._gone):
            return self._tell(self._unable(both))
        self._gone = gone
        self._timer = self._loop.after(self._pause, self._look)

    def _unable(self, gone: list[int]) -> Unable:
        hosts = expand_hosts(self._environ[STEP_NODELIST], STEP_NODELIST)
        names = [f"{number} ({hosts[number]})" if self._kind == "node" else str(number) for number in gone]
        what = f"{self._kind} {names[0]} has" if len(gone) == 1 else f"{self._kind}s {named(names)} have"
        return Unable(f"Slurm says that {what} ended", "srun's lines say why; are Python and the job's files there?")


def tasks(listed: str, count: int) -> set[int] | None:
    """The numbers of the tasks that ``srun --label scontrol listpids`` has found; None unless ``count`` nodes answered.

    ``0: PID JOBID STEPID LOCALID GLOBALID``, then such lines, with ``-`` in place of the last two for children; or
    ``0: StepId=7.0 does not exist on node (null).`` Other lines are srun's own.
    """
    answered, found = set(), set()
    for line in listed.splitlines():
        if answer := re.fullmatch(r"(\d+): (?:PID .*|StepId=\S+ does not exist on node .*)", line):
            answered.add(answer[1])
        elif task := re.fullmatch(r"\d+: \d+ +\S+ +\S+ +\S+ +(\d+) *", line):
            found.add(int(task[1]))
    return found if len(answered) == count else None


def _is_slurms(name: str) -> bool:
    return name.startswith(("SLURM_", "SRUN_", "PMI"))
