"""Audits distributions: which of their modules may be preloaded for all ranks, or why they may not.

*Plain* interpreters import the modules as ranks 0 (twice), 1 and 11; *forks* of a zygote that has imported them are the
same ranks, and *disturbed* plain ones have done before what a program may do. What an import does beyond making modules
is noted (findings.py, surroundings.py), and what all modules keep is compared (state.py). What one distribution reads
is asked of interpreters that import torch and this distribution alone.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ddplaunch.features.preload.rank.fork_fixups import GENERATORS
from tests.preload_audit import allowed_differences
from tests.preload_audit.account import Account, Dump, Place, Stack, Stacks, differences
from tests.preload_audit.disturbances import DISTURBANCES, VARIABLES
from tests.preload_audit.findings import RANK_VARIABLE, SETS
from tests.preload_audit.installed import Installed
from tests.preload_audit.runs import RANKS, Failed, Runs

_NATIVE = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|VECLIB|NUMEXPR|MALLOC|LD|DYLD|PYTHON|CUDA|NCCL|GLOO|UCX)_?\w*"
    r"|PATH|HOME|USER|LOGNAME|SHELL|PWD|LANG|LANGUAGE|LC_\w+|TZ|TERM|COLUMNS|LINES"
)
"""Variables that native code, Python or any program may read from the first line on: no import is to set them."""

_BINDS = re.compile(r"moves \S+ random state|changes the warning filters|looks for .* in the working folder")
"""What is the same wherever a program begins with it."""

BY_CONTRACT = ("torch", "torch._dynamo")
"""Imported for all ranks in any case (docs/performance.md): neither these nor other modules of torch are judged."""

_FAMILY = re.compile(r"((?:TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE|TORCH_DYNAMO|AOT_?INDUCTOR|INDUCTOR|SYMPY)_).*")
"""Variables of torch._dynamo, of which each version has others, some hundreds: all that begin so count as read."""

_OF_TORCH = frozenset({"torch", "functorch", "torchgen"})
_TERMINAL = "a terminal"
_TORCH_FIRST = "torch's import before its own"


def may_be_set(variable: str) -> bool:
    """Whether an import may set a variable, as only those read it that the table names."""
    return variable in allowed_differences.SETTABLE or not (
        _NATIVE.fullmatch(variable) or RANK_VARIABLE.fullmatch(variable)
    )


@dataclass
class Guilt:
    """What the audit holds against modules, in the order in which it was found."""

    of: dict[str, dict[str, None]] = field(default_factory=dict)
    binds: dict[str, dict[str, None]] = field(default_factory=dict)  # what makes them depend on when they are imported

    def accuse(self, module: str, what: str) -> None:
        if module.partition(".")[0] not in _OF_TORCH:
            self.of.setdefault(module, {})[what] = None

    def bind(self, module: str, what: str) -> None:
        if module.partition(".")[0] not in _OF_TORCH:
            self.binds.setdefault(module, {})[what] = None


@dataclass(frozen=True)
class Look:
    """What an import asks of its process, and sets there.

    Attributes:
        tries: the modules that it imports where they are installed, and that are not installed here.
        seeks: those that it only looks for.
    """

    variables: Sequence[str] = ()
    sets: Sequence[str] = ()
    tries: Sequence[str] = ()
    seeks: Sequence[str] = ()


@dataclass(frozen=True)
class Finding:
    """What came of one distribution."""

    name: str
    guilty: Mapping[str, Sequence[str]]  # by module: what it did
    by_module: Mapping[str, Sequence[str]]  # which of these each of the audited modules leads to
    bound_by: Sequence[str] = ()
    look: Look = Look()
    loads: Sequence[str] = ()
    generators: Sequence[str] = ()


class Audit:
    """One audit of some distributions, together."""

    def __init__(self, installed: Installed, runs: Runs, asked: Mapping[str, Sequence[str]]) -> None:
        self._installed, self._runs, self._asked = installed, runs, asked
        self._first = () if "torch" in asked else BY_CONTRACT
        self._modules = tuple(dict.fromkeys(module for modules in asked.values() for module in modules))
        self._guilt = Guilt()
        self._generators: dict[str, set[str]] = {}
        self._by_itself = set[Place]()
        self._opaque = set[tuple[str, str]]()
        self._in_any_case = frozenset[str]()
        self._alone: dict[str, tuple[Account, ...]] = {}

    def run(self) -> list[Finding]:
        """Look at everything; Failed if an interpreter does not get to its end."""
        with ThreadPoolExecutor(2) as pool:
            begun = [pool.submit(self._runs.run, "plain", self._modules, first=self._first, ranks=[RANKS[0]])]
            fork = pool.submit(self._runs.run, "fork", self._modules, first=self._first, ranks=RANKS)
            self._plain = plain = begun[0].result()
            self._in_any_case = plain.closure(self._first)
            for number in RANKS:
                begun.append(pool.submit(self._runs.run, "plain", self._modules, first=self._first, ranks=[number]))
            alone = self._begin_alone(pool)
            disturbed = self._begin_disturbed(pool)
            accounts = [each.result() for each in begun]
            self._judge_done(plain)
            self._judge_done(fork.result())
            self._judge_kept(accounts[1:], fork.result(), plain)
            self._judge_order(pool, disturbed)
            self._alone = {name: tuple(each.result() for each in runs) for name, runs in alone.items()}
        return [self._finding(name, modules) for name, modules in self._asked.items()]

    def _begin_alone(self, pool: ThreadPoolExecutor) -> dict[str, list[Future[Account]]]:
        """Import the modules of each distribution after torch only, in the environment that is here and in a bare one.

        A value that was asked for is often kept (the folder for temporary files), so another distribution, or
        torch._dynamo, would hide who asks for it. Without variables, those that are asked for next are seen too.
        """
        return {
            name: [
                pool.submit(self._runs.run, "plain", modules, first=self._first[:1], bare=bare)
                for bare in (False, True)
            ]
            for name, modules in self._asked.items()
        }

    def _begin_disturbed(self, pool: ThreadPoolExecutor) -> dict[str, Future[Account]]:
        found = {
            "": self._begin(pool, disturbances=list(DISTURBANCES), variables=self._variables()),
            _TERMINAL: self._begin(pool, terminal=True),
        }
        if self._first:
            found[_TORCH_FIRST] = self._begin(pool, first=(), last=self._first)
        return found

    def _begin_singly(self, pool: ThreadPoolExecutor) -> dict[str, Future[Account]]:
        runs = {name: self._begin(pool, disturbances=[name]) for name in DISTURBANCES}
        return {**runs, "variables that it does not name": self._begin(pool, variables=self._variables())}

    def _begin(self, pool: ThreadPoolExecutor, **how: Any) -> Future[Account]:
        """Import what the plain run has imported, and compare what it has compared."""
        how = {"first": self._first, "compared": list(self._plain.dumps[0].modules), **how}
        return pool.submit(self._runs.run, "plain", self._modules, **how)

    def _variables(self) -> dict[str, str]:
        return {name: value for name, value in VARIABLES.items() if name not in self._plain.read}

    def _culprit(self, stack: Stack) -> str | None:
        """The innermost module of a stack that is not Python's; None if torch's import led there, or no import did."""
        if not self._in_any_case.isdisjoint(stack):
            return None
        return next((name for name in reversed(stack) if not self._is_python(name)), None)

    def _is_python(self, module: str) -> bool:
        return self._installed.is_python(module, self._plain.files.get(module, ""))

    def _judge_done(self, account: Account) -> None:
        for stack, what in account.found:
            module = self._culprit(stack)
            if module is None:
                continue
            if _BINDS.fullmatch(what):
                self._guilt.bind(module, what)
            elif not what.startswith(SETS) or not may_be_set(what.removeprefix(SETS)):
                self._guilt.accuse(module, what)
        for module, reason in account.failed.items():
            self._guilt.accuse(module, f"cannot be imported: {reason}")

    def _judge_kept(self, plain: Sequence[Account], fork: Account, again: Account) -> None:
        """Compare ranks with each other, and each with the fork that is to be it."""
        zero = plain[0].dumps[0]
        self._by_itself = by_itself = set(differences(zero, again.dumps[0]))
        forks = dict(zip(RANKS, fork.dumps, strict=True))
        for number, account in zip(RANKS, plain, strict=True):
            own = account.dumps[0]
            for module, name in differences(own, forks[number]):
                self._judge_difference(module, name, by_itself, number)
            self._judge_shared(own, forks[number], account, fork)
            self._judge_unread(own)
            self._judge_unread(forks[number])
        for module, name in sorted(by_itself):
            self._judge_difference(module, name, by_itself, 0)
        for module, names in allowed_differences.ANEW.items():
            for name in names:
                kept = {dump.modules[module].get(name) for dump in fork.dumps if module in dump.modules}
                if kept and len(kept - {None}) == 1:
                    self._guilt.accuse(module, f"has the same {module}.{name} in all forks")

    def _judge_difference(self, module: str, name: str, by_itself: set[Place], rank: int) -> None:
        if name in allowed_differences.ANEW.get(module, ()):
            return
        if not name:
            self._guilt.accuse(module, "is imported in one order only")
        elif (module, name) in by_itself:
            self._guilt.accuse(module, f"has another {module}.{name} in each process")
        else:
            self._guilt.accuse(module, f"has another {module}.{name} in a fork that is rank {rank}")

    def _judge_shared(self, plain: Dump, fork: Dump, one: Account, other: Account) -> None:
        for what in plain.shared.keys() | fork.shared.keys():
            if plain.shared.get(what) != fork.shared.get(what):
                stacks = {*one.changed.get(what, ()), *other.changed.get(what, ())}
                culprits = {self._culprit(stack) for stack in stacks} - {None}
                if any(done == f"changes {what}" for _, done in (*one.found, *other.found)):
                    continue  # a module is blamed for it already
                for module in culprits or self._modules:
                    self._guilt.accuse(str(module), f"leaves another {what} in a fork")

    def _judge_unread(self, dump: Dump) -> None:
        for (module, name), kinds in dump.opaque.items():
            for kind in kinds:
                if (module, kind) not in self._opaque:
                    self._opaque.add((module, kind))
                    self._guilt.accuse(module, f"keeps {kind} in {module}.{name}, which cannot be read")
        for (module, name), kinds in dump.generators.items():
            place = f"{module}.{name}"
            if place in GENERATORS:  # which forks seed anew
                self._generators.setdefault(module, set()).add(place)
            else:
                self._guilt.accuse(module, f"keeps a random generator ({', '.join(kinds)}) in {place}")

    def _judge_order(self, pool: ThreadPoolExecutor, begun: Mapping[str, Future[Account]]) -> None:
        for what, each in begun.items():
            changed = self._changed(each, what or "what stands before")
            if not changed:
                continue
            if what:
                for module, name in changed:
                    self._guilt.accuse(module, f"minds {what} ({module}.{name})")
                continue
            blamed = set[Place]()
            for single, account in self._begin_singly(pool).items():
                hold = self._guilt.accuse if single == "sys.argv" else self._guilt.bind
                for module, name in self._changed(account, single):
                    blamed.add((module, name))
                    hold(module, f"minds {single} ({module}.{name})")
            for module, name in changed - blamed:
                self._guilt.bind(module, f"minds what stands before ({module}.{name})")

    def _changed(self, begun: Future[Account], what: str) -> set[Place]:
        """What an import keeps that it would not without a disturbance."""
        try:
            account = begun.result()
        except Failed as error:
            for module in self._modules:
                self._guilt.accuse(module, f"cannot be imported after {what}: {error}")
            return set()
        for module, reason in account.failed.items():
            if module not in self._plain.failed:
                self._guilt.accuse(module, f"cannot be imported after {what}: {reason}")
        for name in account.logged:
            if not self._is_python(name) and name in self._plain.files:
                self._guilt.bind(name, "logs at import")
        found = differences(self._plain.dumps[0], account.dumps[0], only_common=what == _TORCH_FIRST)
        ours = {place for place in found if place[0] not in self._in_any_case} - self._by_itself
        return {place for place in ours if place[1] not in allowed_differences.ANEW.get(place[0], ())}

    def _finding(self, name: str, modules: Sequence[str]) -> Finding:
        closures = {each: self._plain.closure([each], self._in_any_case) for each in modules}
        closure = frozenset[str]().union(*closures.values()) | {each for each in modules if each in self._guilt.of}
        guilty = {each: list(self._guilt.of[each]) for each in sorted(closure & self._guilt.of.keys())}
        for each in modules:
            if each not in self._plain.files and each not in guilty:
                guilty[each] = ["is not there after its import"]
        bound = [
            f"{each} {what}" for each in sorted(closure & self._guilt.binds.keys()) for what in self._guilt.binds[each]
        ]
        loads = self._installed.owners(self._plain.files.get(each, "") for each in closure) - {name}
        return Finding(
            name=name,
            guilty=guilty,
            by_module={each: sorted((closures[each] | {each}) & guilty.keys()) for each in modules},
            bound_by=bound,
            look=self._looked(self._alone[name]),
            loads=sorted(loads),
            generators=sorted(chain.from_iterable(self._generators.get(each, ()) for each in closure)),
        )

    def _looked(self, accounts: Sequence[Account]) -> Look:
        def seen(found: Sequence[Stacks]) -> set[str]:
            """What was noted while anything but torch's own import was executed."""
            return {name for each in found for name, stacks in each.items() if not all(map(self._of_first, stacks))}

        found = chain.from_iterable(each.found for each in accounts)
        sets = {what.removeprefix(SETS) for stack, what in found if what.startswith(SETS) and not self._of_first(stack)}
        tried = seen([each.tried for each in accounts])
        loaded = {name.partition(".")[0] for each in accounts for name in each.files}
        return Look(
            variables=sorted({_FAMILY.sub(r"\1*", each) for each in seen([each.read for each in accounts])}),
            sets=sorted(sets),
            tries=sorted(tried),
            seeks=sorted(seen([each.sought for each in accounts]) - tried - loaded),
        )

    def _of_first(self, stack: Stack) -> bool:
        return stack[:1] == self._first[:1]
