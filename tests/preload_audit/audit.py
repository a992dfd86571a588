"""Audits distributions: which of their modules may be preloaded for all ranks, or why they may not.

*Plain* interpreters import the modules as ranks 0 (twice), 1 and 11; *forks* of a zygote that has imported them are the
same ranks, and *perturbed* plain ones have done before what a program may do. What an import does beyond making modules
is noted (recorder.py, process_state.py), and what all modules keep is compared (state.py). What one distribution reads
is asked of interpreters that import torch and this distribution alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ddplaunch.features.preload.rank.fork_fixups import GENERATORS
from tests.preload_audit import allowed_differences
from tests.preload_audit.installed import Installed
from tests.preload_audit.perturbations import PERTURBATIONS, TERMINAL
from tests.preload_audit.probe_report import Attribute, ProbeReport, Snapshot, Stack, Stacks, diff_snapshots
from tests.preload_audit.recorder import RANK_VARIABLE, SETS
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
_TORCH_FIRST = "torch's import before its own"

_Reasons = dict[str, dict[str, None]]
"""By module: what the audit has found, in the order in which it was found."""


def may_be_set(variable: str) -> bool:
    """Whether an import may set a variable, as only those read it that the table names."""
    return variable in allowed_differences.SETTABLE or not (
        _NATIVE.fullmatch(variable) or RANK_VARIABLE.fullmatch(variable)
    )


@dataclass(frozen=True)
class Finding:
    """What came of one distribution.

    Attributes:
        guilty: by module: what it did that refuses it. bound_by: what makes it depend on when it is imported.
        tries: the modules that it imports where they are installed, and that are not installed here.
        seeks: those that it only looks for.
    """

    name: str
    guilty: Mapping[str, Sequence[str]]
    bound_by: Sequence[str] = ()
    variables: Sequence[str] = ()
    sets: Sequence[str] = ()
    tries: Sequence[str] = ()
    seeks: Sequence[str] = ()
    loads: Sequence[str] = ()
    generators: Sequence[str] = ()


class Audit:
    """One audit of some distributions, together."""

    def __init__(self, installed: Installed, runs: Runs, asked: Mapping[str, Sequence[str]]) -> None:
        self._installed, self._runs, self._asked = installed, runs, asked
        self._first = () if "torch" in asked else BY_CONTRACT
        self._modules = tuple(dict.fromkeys(module for modules in asked.values() for module in modules))
        self._guilt: _Reasons = {}
        self._binds: _Reasons = {}
        self._generators: dict[str, set[str]] = {}
        self._by_itself = set[Attribute]()
        self._opaque = set[tuple[str, str]]()

    def run(self) -> list[Finding]:
        """Look at everything; Failed if an interpreter does not get to its end."""
        with ThreadPoolExecutor(2) as pool:

            def begin(kind: str = "plain", modules: Sequence[str] = self._modules, **how: Any) -> Future[ProbeReport]:
                return pool.submit(self._runs.run, kind, modules, **{"first": self._first, **how})

            again, fork = begin(), begin("fork", ranks=RANKS)
            self._plain = again.result()
            self._in_any_case = self._plain.closure(self._first)
            ranks = [begin(ranks=[number]) for number in RANKS]
            # A value that was asked for is often kept (the folder for temporary files), so another distribution, or
            # torch._dynamo, would hide which asks for it. Without variables, those that are asked for next are seen
            # too.
            alone = {
                name: [begin(modules=modules, first=self._first[:1], bare=bare) for bare in (False, True)]
                for name, modules in self._asked.items()
            }
            compared = list(self._plain.snapshots[0].modules)
            perturbed = {name: begin(perturbation=name, compared=compared) for name in PERTURBATIONS}
            if self._first:
                perturbed[_TORCH_FIRST] = begin(first=(), last=self._first, compared=compared)
            self._judge_done(self._plain)
            self._judge_done(fork.result())
            self._judge_kept([each.result() for each in ranks], fork.result())
            for what, each in perturbed.items():
                self._judge_order(each, what)
            return [
                self._make_finding(name, modules, [each.result() for each in alone[name]])
                for name, modules in self._asked.items()
            ]

    def _accuse(self, module: str, what: str) -> None:
        self._note(self._guilt, module, what)

    def _note(self, reasons: _Reasons, module: str, what: str) -> None:
        if module.partition(".")[0] not in _OF_TORCH:
            reasons.setdefault(module, {})[what] = None

    def _culprit(self, stack: Stack) -> str | None:
        """The innermost module of a stack that is not Python's; None if torch's import led there, or no import did."""
        if not self._in_any_case.isdisjoint(stack):
            return None
        return next((name for name in reversed(stack) if not self._is_python(name)), None)

    def _is_python(self, module: str) -> bool:
        return self._installed.is_python(module, self._plain.files.get(module, ""))

    def _judge_done(self, report: ProbeReport) -> None:
        for stack, what in report.actions:
            module = self._culprit(stack)
            if module is None:
                continue
            if _BINDS.fullmatch(what):
                self._note(self._binds, module, what)
            elif not what.startswith(SETS) or not may_be_set(what.removeprefix(SETS)):
                self._accuse(module, what)
        for module, reason in report.import_errors.items():
            self._accuse(module, f"cannot be imported: {reason}")

    def _judge_kept(self, plain: Sequence[ProbeReport], fork: ProbeReport) -> None:
        """Compare ranks with each other, and each with the fork that is to be it."""
        zero = plain[0].snapshots[0]
        self._by_itself = set(diff_snapshots(zero, self._plain.snapshots[0]))
        for number, report, fork_snapshot in zip(RANKS, plain, fork.snapshots, strict=True):
            own = report.snapshots[0]
            for module, name in diff_snapshots(own, fork_snapshot):
                self._judge_difference(module, name, number)
            self._judge_shared(own, fork_snapshot, report, fork)
            self._judge_unread(own)
            self._judge_unread(fork_snapshot)
        for module, name in sorted(self._by_itself):
            self._judge_difference(module, name, 0)
        for module, names in allowed_differences.ANEW.items():
            for name in names:
                kept = {snapshot.modules[module].get(name) for snapshot in fork.snapshots if module in snapshot.modules}
                if kept and len(kept - {None}) == 1:
                    self._accuse(module, f"has the same {module}.{name} in all forks")

    def _judge_difference(self, module: str, name: str, rank: int) -> None:
        if name in allowed_differences.ANEW.get(module, ()):
            return
        if not name:
            self._accuse(module, "is imported in one order only")
        elif (module, name) in self._by_itself:
            self._accuse(module, f"has another {module}.{name} in each process")
        else:
            self._accuse(module, f"has another {module}.{name} in a fork that is rank {rank}")

    def _judge_shared(self, plain: Snapshot, fork: Snapshot, one: ProbeReport, other: ProbeReport) -> None:
        for what in plain.shared.keys() | fork.shared.keys():
            if plain.shared.get(what) != fork.shared.get(what):
                stacks = {*one.state_changes.get(what, ()), *other.state_changes.get(what, ())}
                culprits = {self._culprit(stack) for stack in stacks} - {None}
                if any(done == f"changes {what}" for _, done in (*one.actions, *other.actions)):
                    continue  # a module is blamed for it already
                for module in culprits or self._modules:
                    self._accuse(str(module), f"leaves another {what} in a fork")

    def _judge_unread(self, snapshot: Snapshot) -> None:
        for (module, name), kinds in snapshot.opaque.items():
            for kind in sorted(kinds):
                if (module, kind) not in self._opaque:
                    self._opaque.add((module, kind))
                    self._accuse(module, f"keeps {kind} in {module}.{name}, which cannot be read")
        for (module, name), kinds in snapshot.generators.items():
            place = f"{module}.{name}"
            if place in GENERATORS:  # which forks seed anew
                self._generators.setdefault(module, set()).add(place)
            else:
                self._accuse(module, f"keeps a random generator ({', '.join(sorted(kinds))}) in {place}")

    def _judge_order(self, perturbed: Future[ProbeReport], what: str) -> None:
        """Look at what an import keeps that it would not without a perturbation."""
        try:
            report = perturbed.result()
        except Failed as error:
            for module in self._modules:
                self._accuse(module, f"cannot be imported after {what}: {error}")
            return
        for module, reason in report.import_errors.items():
            if module not in self._plain.import_errors:
                self._accuse(module, f"cannot be imported after {what}: {reason}")
        for name in report.loggers:
            if not self._is_python(name) and name in self._plain.files:
                self._note(self._binds, name, "logs at import")
        found = diff_snapshots(self._plain.snapshots[0], report.snapshots[0], only_common=what == _TORCH_FIRST)
        for module, name in found:
            own = module not in self._in_any_case and (module, name) not in self._by_itself
            if own and name not in allowed_differences.ANEW.get(module, ()):
                reasons = self._guilt if what in (_TORCH_FIRST, TERMINAL) else self._binds
                self._note(reasons, module, f"minds {what} ({module}.{name})")

    def _make_finding(self, name: str, modules: Sequence[str], alone: Sequence[ProbeReport]) -> Finding:
        closure = self._plain.closure(modules, self._in_any_case) | {each for each in modules if each in self._guilt}
        guilty = {each: list(self._guilt[each]) for each in sorted(closure & self._guilt.keys())}
        for each in modules:
            if each not in self._plain.files and each not in guilty:
                guilty[each] = ["is not there after its import"]

        def seen(found: Iterable[Stacks]) -> set[str]:
            """What was noted while anything but torch's own import was executed."""
            return {name for each in found for name, stacks in each.items() if not all(map(self._of_first, stacks))}

        absent = seen(each.absent_imports for each in alone)
        loaded = {name.partition(".")[0] for each in alone for name in each.files}
        return Finding(
            name=name,
            guilty=guilty,
            bound_by=[f"{each} {what}" for each in sorted(closure & self._binds.keys()) for what in self._binds[each]],
            variables=sorted({_FAMILY.sub(r"\1*", each) for each in seen(each.variable_reads for each in alone)}),
            sets=sorted(set(self._variables_set(alone))),
            tries=sorted(absent),
            seeks=sorted(seen(each.searches for each in alone) - absent - loaded),
            loads=sorted(self._installed.owners(self._plain.files.get(each, "") for each in closure) - {name}),
            generators=sorted(chain.from_iterable(self._generators.get(each, ()) for each in closure)),
        )

    def _variables_set(self, reports: Sequence[ProbeReport]) -> Iterator[str]:
        for report in reports:
            for stack, what in report.actions:
                if what.startswith(SETS) and not self._of_first(stack):
                    yield what.removeprefix(SETS)

    def _of_first(self, stack: Stack) -> bool:
        return stack[:1] == self._first[:1]
