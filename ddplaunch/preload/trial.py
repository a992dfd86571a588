"""Proves what may be imported once for all ranks: ``python -m ddplaunch.preload.trial QUESTION VERDICT``.

QUESTION is a file with a ``question.Question`` as JSON, VERDICT where the answer goes (``verdict.key`` has its name).

Its ``sys.path`` is to have no folder of the user's; the working directory is to be the program's.

It runs in the background of a job and may be killed at any moment: the verdict appears whole or not at all, the
interpreters that it starts end with it, and its scratch folder is made beside QUESTION, for whoever removes that one.
One trial runs at a time for each folder of verdicts; another ends at once. What was found so far is kept as
``VERDICT.progress``, with which the next trial goes on.

The proof. One interpreter is *plain* Python as a rank has it: with the rank's variables it executes the program's
import statements. Another is the zygote's *fork*: it imports a list of modules without these variables, forks itself,
sets the variables, repairs what rank/repairs.py can, and executes the same statements. Both note what imports do beyond
making modules (findings.py, surroundings.py), and tell what all modules keep at the end (state.py). Whatever was found,
and whatever differs, takes modules from the list (culprits.py), until a fork finds nothing and differs in nothing.

Both have the same variables otherwise, TMPDIR among them, and one seed of hashes: a zygote's ranks differ in neither.
They differ in pid, in time and in random bytes, so a module that keeps one of these is seen; addresses do not count.

What is not proven: what native code keeps to itself, and what a module that changes others means to the lines between
the program's first and the import of that module, from which on it would have changed them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddplaunch.preload import culprits, installed, verdict
from ddplaunch.preload.findings import RANK_VARIABLE, SETS, harmless, settable
from ddplaunch.preload.question import Question, Setting, Statement
from ddplaunch.preload.verdict import Excluded, Verdict
from ddplaunch.rank.processes import die_with_parent

_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
_ROUNDS = 6
_SEED = "1"

VARIABLES = {
    "RANK": "11",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "11",
    "ROLE_WORLD_SIZE": "16",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29531",
    "TORCHELASTIC_RUN_ID": "trial",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "DDPLAUNCH_DEVICE": "cpu",
}
"""What a rank has and its zygote has not (``Plan.environment``), with values that no library takes for granted."""

_NATIVE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "MASTER_ADDR")
_CARE_FOR_ORDER = ("gevent", "eventlet", "unsloth")
"""What changes modules that are imported after it, or wants to be imported first."""


class _Failed(Exception):
    """A probe did not get to its end."""


def main(words: Sequence[str]) -> int:
    asked, answer = words
    die_with_parent()
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass
    with open(asked, encoding="utf-8") as file:
        question = read_question(json.load(file))
    with open(os.path.join(os.path.dirname(answer) or ".", "trial.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        scratch = tempfile.mkdtemp(prefix="trial-", dir=os.path.dirname(asked) or ".")
        try:
            verdict.write(Trial(question, scratch, answer + ".progress").run(), answer)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        Path(answer + ".progress").unlink(missing_ok=True)
    return 0


def read_question(found: dict[str, Any]) -> Question:
    """Read a question that ``dataclasses.asdict`` has made plain; KeyError, TypeError or ValueError if it is none."""
    return Question(
        statements=tuple(
            Statement(str(each["module"]), tuple(map(str, each["names"]))) for each in found["statements"]
        ),
        settings=tuple(Setting(str(each["name"]), each["value"]) for each in found["settings"]),
        sets_unseen=bool(found["sets_unseen"]),
        late=tuple(map(str, found["late"])),
        seeds_first=bool(found.get("seeds_first", True)),
    )


class Trial:
    def __init__(self, question: Question, scratch: str, progress: str) -> None:
        statements = question.statements
        if not any(each.module.partition(".")[0] == "torch" for each in statements):
            statements = (Statement("torch"), *statements)
        self._question = dataclasses.replace(question, statements=statements)
        self._scratch, self._progress = scratch, progress
        self._installed = installed.Installed()
        self._files: dict[str, str] = {}
        self._folders = tuple(verdict.Folder(path, os.stat(path).st_mtime_ns) for path in verdict.folders())
        self._late = frozenset[str]()  # what only these modules load
        self._unseen = frozenset(each.name for each in question.settings if each.value is None)

    def run(self) -> Verdict:
        for each in self._question.statements:
            if (top := each.module.partition(".")[0]) in _CARE_FOR_ORDER:
                return self._nothing(top, "must be imported before all others")
        try:
            plain = self._probe("plain", ())
        except _Failed:
            return self._nothing("the program", "its imports do not end when they are tried")
        self._files.update(plain.files)
        self._late = frozenset(each.name for each in plain.loaded if each.statement in self._question.late)
        found = culprits.Culprits(plain, self._is_python)
        for name, guilt in self._resume().items():
            found.guilty[name] = guilt
        self._judge(found, plain, found.exempt(), threads=False)
        self._judge_owners(found, plain)
        for _ in range(_ROUNDS):
            found.spread()
            modules = found.innocent()
            if modules == ("torch",):
                return self._verdict(modules, found, plain)
            try:
                fork = self._probe("fork", modules)
            except _Failed:
                return self._nothing("the program", "its imports do not end when they are tried")
            self._files.update(fork.files)
            found.learn(fork)
            exempt = found.exempt()
            news = self._judge(found, fork, exempt, threads=True)
            for name in fork.failed.keys() & set(modules):
                news |= found.accuse_module(name, "cannot be imported by itself", frozenset())
            differ, guilty = self._judge_differences(found, plain, fork, exempt)
            news |= guilty
            if differ is None and not news:
                return self._verdict(modules, found, fork)
            if differ and not news:
                return self._nothing("the program", f"a fork differs from plain Python in {differ}")
            self._judge_owners(found, fork)
            self._keep(found)
        return self._nothing("the program", f"no answer in {_ROUNDS} rounds")

    def _judge(
        self, found: culprits.Culprits, account: culprits.Account, exempt: frozenset[str], *, threads: bool
    ) -> bool:
        """Hold guilty what an account shows; return whether that is news."""
        news = False
        for stack, what in account.found:
            if (threads or what != "starts a thread") and not self._allows(what, stack[0]):
                news |= found.accuse(stack, f"{what} at import", exempt)
        torch = found.exempt(("torch",))  # which reads what the program sets too late: no matter of a trial
        for name, stacks in account.read.items():
            if name in self._unseen or (self._question.sets_unseen and not harmless(name)):
                for stack in stacks:
                    news |= found.accuse(stack, f"reads {name} at import, which the program sets", torch)
        unseen = self._question.sets_unseen
        for stack, what in culprits.natives(account, _NATIVE, sorted(self._unseen), any_name=unseen):
            news |= found.accuse(stack, f"{what} at import", exempt)
        return news

    def _allows(self, what: str, outermost: str) -> bool:
        """Whether this program does not mind: a variable of no interest to it, or draws before it seeds anything."""
        if what.startswith(SETS):
            name = what.removeprefix(SETS)
            named = {each.name for each in self._question.settings}
            return settable(name) and name not in named and not self._question.sets_unseen
        drawn = what.startswith("moves ") and what.endswith(" random state")
        return drawn and not self._question.seeds_first and outermost not in self._late

    def _judge_owners(self, found: culprits.Culprits, account: culprits.Account) -> None:
        """What is in no distribution's RECORD can change without anybody noticing."""
        exempt = found.exempt()
        for name, path in account.files.items():
            if path and os.path.isfile(path) and not self._is_python(name) and name not in ("__main__", "__mp_main__"):
                owner = self._installed.owner(path)
                if isinstance(owner, str) and not path.startswith(os.path.dirname(_PROBE)):
                    found.accuse_module(name, owner, exempt)

    def _judge_differences(
        self, found: culprits.Culprits, plain: culprits.Account, fork: culprits.Account, exempt: frozenset[str]
    ) -> tuple[str | None, bool]:
        """Hold guilty who keeps something else in a fork; return a name of what differs, and whether guilt is news.

        What a guilty module keeps is of no interest: a fork imports it as plain Python does.
        """
        differ, news = None, False
        for module, name in culprits.differences(plain, fork):
            if module in exempt or module in found.guilty or self._is_python(module):
                continue
            differ = f"{module}.{name}" if name else module
            reason = f"has another {module}.{name} in each process" if name else "is imported in one order only"
            news |= found.accuse_module(module, reason, frozenset())
        for what in plain.shared.keys() | fork.shared.keys():
            if plain.shared.get(what) == fork.shared.get(what):
                continue
            stacks = {*plain.changed.get(what, ()), *fork.changed.get(what, ())}
            if stacks and all(not found.guilty.keys().isdisjoint(stack) for stack in stacks):
                continue
            for stack in stacks:
                news |= found.accuse(stack, f"changes {what} at import", exempt)
            differ = what
        return differ, news

    def _verdict(self, modules: tuple[str, ...], found: culprits.Culprits, account: culprits.Account) -> Verdict:
        owners = {}
        for name, path in account.files.items():
            if path and os.path.isfile(path) and not self._is_python(name):
                owner = self._installed.owner(path)
                if isinstance(owner, verdict.Distribution):
                    owners[owner.name] = owner
        read = {name for name in account.read if not harmless(name) and not RANK_VARIABLE.fullmatch(name)}
        read |= {what.removeprefix(SETS) for _, what in account.found if what.startswith(SETS)}
        read -= {each.name for each in self._question.settings}
        excluded = tuple(Excluded(name, reason) for name, reason in found.excluded())
        loaded = {each.name.partition(".")[0] for each in account.loaded}
        return Verdict(
            modules=modules,
            excluded=excluded,
            distributions=tuple(owners[name] for name in sorted(owners)),
            names=frozenset(loaded | account.asked),
            tried=frozenset(self._question.late),
            folders=self._folders,
            variables=tuple((name, verdict.digest_of(name, os.environ.get(name))) for name in sorted(read)),
        )

    def _nothing(self, name: str, reason: str) -> Verdict:
        """torch alone, until something is installed anew."""
        tried = frozenset(self._question.late)
        return Verdict(("torch",), (Excluded(name, reason),), (), frozenset({"torch"}), tried, self._folders)

    def _is_python(self, name: str) -> bool:
        return self._installed.is_python(name, self._files.get(name, ""))

    def _probe(self, kind: str, modules: Sequence[str]) -> culprits.Account:
        request, answer, first = (os.path.join(self._scratch, name) for name in ("request", "answer", "first"))
        os.makedirs(first, exist_ok=True)
        asked = {
            "kind": kind,
            "statements": [(each.module, each.names) for each in self._question.statements],
            "late": self._question.late,
            "settings": {each.name: each.value for each in self._question.settings if each.value is not None},
            "modules": modules,
            "variables": VARIABLES,
            "first": first,
            "parent": os.getpid(),
        }
        with open(request, "w", encoding="utf-8") as file:
            json.dump(asked, file)
        Path(answer).unlink(missing_ok=True)
        environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        with open(os.path.join(self._scratch, "output"), "wb") as output:
            ended = subprocess.run(
                [sys.executable, _PROBE, request, answer],
                env={"PYTHONHASHSEED": _SEED, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            )
        if ended.returncode == -signal.SIGKILL:  # by whoever wants its memory: that says nothing about the program
            sys.exit(1)
        if ended.returncode != 0:
            said = Path(self._scratch, "output").read_text(errors="replace")[-2000:]
            sys.stderr.write(f"{said}\n{kind}: exit code {ended.returncode}\n")
            raise _Failed(kind)
        try:
            with open(answer, encoding="utf-8") as file:
                return culprits.Account.of(json.load(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _Failed(kind) from error

    def _resume(self) -> dict[str, culprits.Guilt]:
        """What an interrupted trial had found, if all is still as it was."""
        try:
            with open(self._progress, encoding="utf-8") as file:
                found = json.load(file)
            if found["folders"] == [list(dataclasses.astuple(each)) for each in self._folders]:
                return {name: culprits.Guilt(*guilt) for name, guilt in found["guilty"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return {}

    def _keep(self, found: culprits.Culprits) -> None:
        guilty = {name: dataclasses.astuple(guilt) for name, guilt in found.guilty.items()}
        kept = {"folders": [dataclasses.astuple(each) for each in self._folders], "guilty": guilty}
        with open(self._progress + ".new", "w", encoding="utf-8") as file:
            json.dump(kept, file)
        os.replace(self._progress + ".new", self._progress)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
