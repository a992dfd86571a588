"""The trial of what could be imported once, which runs while the ranks do, and ends with them at the latest.

It hangs below a zygote of its own, an empty one: that ends it, and all that it has started, when we are killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent import limits
from ddplaunch.agent.ranks import imports_file
from ddplaunch.agent.tree import Tree
from ddplaunch.agent.zygote_client import ZygoteClient
from ddplaunch.files import create, read_regular
from ddplaunch.loop import Loop
from ddplaunch.output import events
from ddplaunch.preload.cache import MAX_LATE, Entry
from ddplaunch.preload.choice import Choice
from ddplaunch.preload.question import Question

if TYPE_CHECKING:
    from ddplaunch.rank.messages import Program, Usage

_MODULE = "ddplaunch.preload.trial"

_BEHIND_ALL = """\
import os, runpy, sys
if not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)
os.nice(19)
try:
    import ctypes
    ctypes.CDLL(None).syscall({"x86_64": 251, "aarch64": 30}[os.uname().machine], 1, 0, 3 << 13)
except Exception:
    pass
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Run a module with what processor and disk have left over: ioprio_set(2) of IOPRIO_CLASS_IDLE, for ourselves."""

_MEMORY, _SHARE = 4 << 30, 0.1  # what must be left of it, in bytes, and of all
_MAX_BYTES = 1 << 20  # of the names that a rank tells


class Trial:
    """Observes the job: tries ``choice.question`` once all ranks run, and keeps what rank 0 had imported by its end."""

    def __init__(self, loop: Loop, choice: Choice, entry: Entry, tree: Tree, environ: Mapping[str, str]) -> None:
        """``environ`` is what the ranks' zygote has."""
        self._loop, self._question, self._entry, self._tree = loop, choice.question, entry, tree
        self._environ = dict(environ)
        self._awaited = self._attempt = 0
        self._first = -1  # local rank 0
        self._zygote: ZygoteClient | None = None

    def observe(self, event: events.Event) -> None:
        if isinstance(event, events.Planned):
            self._attempt, self._awaited = event.attempt, len(event.plan.local_ranks)
            self._first = event.plan.local_ranks[0].rank
        elif isinstance(event, events.Ready) and not event.forks:
            self._question = None
        elif isinstance(event, events.Started):
            self._awaited -= 1
            if self._awaited == 0 and self._question is not None:
                question, self._question = self._question, None
                self._begin(question)
        elif isinstance(event, events.Exited):
            if event.rank == self._first and event.code == 0:
                self._keep()
        elif isinstance(event, events.Signalled | events.Restarting | events.Swept | events.Ended):
            self._over()

    def _begin(self, question: Question) -> None:
        folder = self._tree.temporary.path
        if folder is None or not _has_memory() or not self._entry.make_room():
            return
        file = os.path.join(folder, "question.json")  # what the trial makes beside it goes with this folder
        try:
            with open(create(file, os.O_TRUNC, 0o600), "w", encoding="utf-8") as writing:
                json.dump(vars(question), writing, default=vars)
        except OSError:
            return
        with suppress(limits.CannotStart):
            self._zygote = ZygoteClient(self._loop, listener=self, environment=self._environ)
            self._zygote.spawn([(0, partial(self._prepare, file))])

    def _prepare(self, question: str, fds: dict[str, int]) -> Program:
        for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
            fds[name] = os.open(os.devnull, flags)
        words = ["-c", _BEHIND_ALL, _MODULE, question, self._entry.verdict_file]
        return {
            "rank": 0,
            "kind": "program",
            "typed": sys.executable,
            "path": sys.executable,
            "args": words,
            "env": {},
            "cpus": None,
        }

    def _keep(self) -> None:
        """Keep what local rank 0 has told beside what others had, if there is anything new in it."""
        if self._tree.temporary.path is None:
            return
        path = imports_file(self._tree.temporary.path, self._first, self._attempt)
        try:
            names = read_regular(path, _MAX_BYTES, links=False).decode("ascii").split()
        except (OSError, ValueError):
            return
        late = dict.fromkeys(self._entry.late)
        if not late.keys() >= set(names):
            self._entry.keep_late((*late, *(name for name in names if name not in late))[:MAX_LATE])

    def _over(self) -> None:
        """End it, if it is still there."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    # ---------------------------------------------------------------------------------- what comes from its zygote

    def ready(self, forks: bool, failed: str | None, unsafe: str | None, seconds: float) -> None: ...

    def refused(self, message: str) -> None: ...

    def spawned(self, rank: int, pid: int, pidfd: int | None) -> None:
        if pidfd is not None:
            os.close(pidfd)

    def unborn(self, rank: int, errno: int) -> None:
        self._loop.soon(self._over)

    def exited(self, rank: int, pid: int, code: int, usage: Usage) -> None:
        self._loop.soon(self._over)

    def swept(self, found: list[str], stuck: list[str]) -> None: ...

    def lost(self) -> None:
        self._loop.soon(self._over)


def _has_memory() -> bool:
    """Whether nobody will miss what a trial takes, here and under each limit of our control groups (version 2)."""
    found = {}
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) << 10
    free = found.get("MemAvailable", 0)
    if free < max(_MEMORY, _SHARE * found.get("MemTotal", 0)):
        return False
    group = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "/")
    while group not in ("", "/"):
        folder = "/sys/fs/cgroup" + group
        most, used = (_number(os.path.join(folder, f"memory.{name}")) for name in ("max", "current"))
        if most is not None and used is not None:
            cached = next(
                (int(line.split()[1]) for line in _lines(folder + "/memory.stat") if line.startswith("inactive_file ")),
                0,
            )
            if most - used + cached < max(_MEMORY, _SHARE * most):
                return False
        group = os.path.dirname(group)
    return True


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return []


def _number(path: str) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None
