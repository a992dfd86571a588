"""Audits distributions: which of their modules may be preloaded for all ranks, or why they may not.

*Plain* interpreters import the modules as ranks 0 (twice), 1 and 11; *forks* of a zygote that has imported them are the
same ranks, and *perturbed* plain ones first do what a program may do before. What an import does beyond defining
modules is recorded (recorder.py, process_state.py), and the content of all modules is compared (state.py). What a rank
checks itself before it uses a preloaded module (core/rank/import_check.py) does not count.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ddplaunch.features.preload.rank.fork_fixups import GENERATORS
from tests.tools.preload_audit import allowed_differences
from tests.tools.preload_audit.distributions import InstalledDistributions
from tests.tools.preload_audit.perturbations import PERTURBATIONS
from tests.tools.preload_audit.probe_report import Attribute, ProbeReport, Snapshot, Stack, diff_snapshots
from tests.tools.preload_audit.probe_runner import RANKS, ProbeFailed, ProbeRunner
from tests.tools.preload_audit.recorder import RANK_VARIABLE, SETS

_NATIVE_VARIABLE = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|VECLIB|NUMEXPR|MALLOC|LD|DYLD|PYTHON|CUDA|NCCL|GLOO|UCX)_?\w*"
    r"|PATH|HOME|USER|LOGNAME|SHELL|PWD|LANG|LANGUAGE|LC_\w+|TZ|TERM|COLUMNS|LINES"
)
"""Variables that native code, Python or any program may read from the first line on: no import may set them."""

_CHECKED_ACTION = re.compile(
    r"moves Python's random state|changes the warning filters|looks for .* in the working folder"
)
"""Actions that ranks redo or check."""

ALWAYS_IMPORTED = ("torch", "torch._dynamo")
"""Imported for all ranks in any case (docs/performance.md): modules of torch have no violations."""

_TORCH_PACKAGES = frozenset({"torch", "functorch", "torchgen"})
_TORCH_FIRST = "torch's import before its own"

_Reasons = dict[str, dict[str, None]]
"""Texts by module, in the order in which the audit found them."""


def may_be_set(variable: str) -> bool:
    """Whether an import may set a variable: only the packages that the table names read it."""
    return variable in allowed_differences.SETTABLE or not (
        _NATIVE_VARIABLE.fullmatch(variable) or RANK_VARIABLE.fullmatch(variable)
    )


@dataclass(frozen=True)
class AuditResult:
    """The result for one distribution; the fields with the names of the table's keys have its values.

    Attributes:
        violations: by module: why it must not be preloaded.
        tries: the modules that it imports where they are installed, and that are not installed here.
    """

    name: str
    violations: Mapping[str, Sequence[str]]
    tries: Sequence[str] = ()
    loads: Sequence[str] = ()


class Audit:
    """One audit of some distributions, together."""

    def __init__(
        self,
        installed: InstalledDistributions,
        runner: ProbeRunner,
        modules: Mapping[str, Sequence[str]],
        *,
        together: bool = False,
    ) -> None:
        """``modules``: the modules to audit, by distribution; ``together``: one interpreter for all perturbations."""
        self._installed, self._runner, self._modules_by_name = installed, runner, modules
        names = [tuple(PERTURBATIONS)] if together else [(name,) for name in PERTURBATIONS]
        self._perturbations = {" or ".join(each): each for each in names}
        self._first = () if "torch" in modules else ALWAYS_IMPORTED
        self._modules = tuple(dict.fromkeys(chain.from_iterable(modules.values())))
        self._violations: _Reasons = {}
        self._unstable = set[Attribute]()  # attributes that differ in each process
        self._opaque = set[tuple[str, str]]()  # modules and the kinds of unreadable objects that were found in them

    def run(self) -> list[AuditResult]:
        """Audit all; ProbeFailed if an interpreter fails."""
        with ThreadPoolExecutor(2) as pool:

            def start(
                kind: str = "plain", modules: Sequence[str] = self._modules, **options: Any
            ) -> Future[ProbeReport]:
                return pool.submit(self._runner.run, kind, modules, **{"first": self._first, **options})

            baseline, fork = start(), start("fork", ranks=RANKS)
            self._baseline = baseline.result()
            self._always_imported = self._baseline.closure(self._first)
            ranks = [start(ranks=[number]) for number in RANKS]
            compared = list(self._baseline.snapshots[0].modules)
            perturbed = {
                title: start(perturbations=names, compared=compared) for title, names in self._perturbations.items()
            }
            if self._first:
                perturbed[_TORCH_FIRST] = start(first=(), last=self._first, compared=compared)
            self._check_actions(self._baseline)
            self._check_actions(fork.result())
            self._check_snapshots([each.result() for each in ranks], fork.result())
            for perturbation, each in perturbed.items():
                self._check_perturbed(each, perturbation)
            return [self._make_result(name, modules) for name, modules in self._modules_by_name.items()]

    def _add_violation(self, module: str, reason: str) -> None:
        self._add(self._violations, module, reason)

    def _add(self, reasons: _Reasons, module: str, reason: str) -> None:
        if module.partition(".")[0] not in _TORCH_PACKAGES:
            reasons.setdefault(module, {})[reason] = None

    def _find_responsible(self, stack: Stack) -> str | None:
        """The innermost module that is not Python's; None if torch's import is on the stack, or nothing is."""
        if not self._always_imported.isdisjoint(stack):
            return None
        return next((name for name in reversed(stack) if not self._is_python(name)), None)

    def _is_python(self, module: str) -> bool:
        return self._installed.is_python(module, self._baseline.files.get(module, ""))

    def _check_actions(self, report: ProbeReport) -> None:
        for stack, action in report.actions:
            module = self._find_responsible(stack)
            if module is None:
                continue
            if _CHECKED_ACTION.fullmatch(action):
                continue
            if not action.startswith(SETS) or not may_be_set(action.removeprefix(SETS)):
                self._add_violation(module, action)
        for module, error in report.import_errors.items():
            self._add_violation(module, f"cannot be imported: {error}")

    def _check_snapshots(self, plain: Sequence[ProbeReport], fork: ProbeReport) -> None:
        """Compare two processes of rank 0, and each rank with its fork."""
        self._unstable = set(diff_snapshots(plain[0].snapshots[0], self._baseline.snapshots[0]))
        for rank, report, fork_snapshot in zip(RANKS, plain, fork.snapshots, strict=True):
            snapshot = report.snapshots[0]
            for module, name in diff_snapshots(snapshot, fork_snapshot):
                self._add_difference(module, name, rank)
            self._check_shared_state(snapshot, fork_snapshot, report, fork)
            self._check_objects(snapshot)
            self._check_objects(fork_snapshot)
        for module, name in sorted(self._unstable):
            self._add_difference(module, name, 0)
        for module, names in allowed_differences.REMADE_NAMES.items():
            for name in names:
                values = {each.modules[module].get(name) for each in fork.snapshots if module in each.modules}
                if values and len(values - {None}) == 1:
                    self._add_violation(module, f"has the same {module}.{name} in all forks")

    def _add_difference(self, module: str, name: str, rank: int) -> None:
        if name in allowed_differences.REMADE_NAMES.get(module, ()):
            return
        if not name:
            self._add_violation(module, "is imported in one order only")
        elif (module, name) in self._unstable:
            self._add_violation(module, f"has another {module}.{name} in each process")
        else:
            self._add_violation(module, f"has another {module}.{name} in a fork that is rank {rank}")

    def _check_shared_state(self, plain: Snapshot, fork: Snapshot, *reports: ProbeReport) -> None:
        """Compare what belongs to no module, at the end of the imports."""
        for state in plain.shared.keys() | fork.shared.keys():
            if plain.shared.get(state) == fork.shared.get(state):
                continue
            if any(action == f"changes {state}" for each in reports for _, action in each.actions):
                continue  # it is a violation of the responsible module already
            stacks = {stack for each in reports for stack in each.state_changes.get(state, ())}
            for module in {self._find_responsible(stack) for stack in stacks} - {None} or self._modules:
                self._add_violation(str(module), f"leaves another {state} in a fork")

    def _check_objects(self, snapshot: Snapshot) -> None:
        """Add violations for objects that cannot be read, and for random generators."""
        for (module, name), kinds in snapshot.opaque.items():
            for kind in sorted(kinds):
                if (module, kind) not in self._opaque:
                    self._opaque.add((module, kind))
                    self._add_violation(module, f"keeps {kind} in {module}.{name}, which cannot be read")
        for (module, name), kinds in snapshot.generators.items():
            path = f"{module}.{name}"
            if path not in GENERATORS:  # those are reseeded in forks
                self._add_violation(module, f"keeps a random generator ({', '.join(sorted(kinds))}) in {path}")

    def _check_perturbed(self, perturbed: Future[ProbeReport], perturbation: str) -> None:
        """Compare the modules with those of an import without the perturbation."""
        try:
            report = perturbed.result()
        except ProbeFailed as error:
            for module in self._modules:
                self._add_violation(module, f"cannot be imported after {perturbation}: {error}")
            return
        for module, reason in report.import_errors.items():
            if module not in self._baseline.import_errors:
                self._add_violation(module, f"cannot be imported after {perturbation}: {reason}")
        one, other = self._baseline.snapshots[0], report.snapshots[0]
        for module, name in diff_snapshots(one, other, only_common=perturbation == _TORCH_FIRST):
            is_stable = module not in self._always_imported and (module, name) not in self._unstable
            if is_stable and name not in allowed_differences.REMADE_NAMES.get(module, ()):
                self._add_violation(module, f"minds {perturbation} ({module}.{name})")

    def _make_result(self, name: str, modules: Sequence[str]) -> AuditResult:
        closure = self._baseline.closure(modules, self._always_imported)
        closure |= {each for each in modules if each in self._violations}
        violations = {each: list(self._violations[each]) for each in sorted(closure & self._violations.keys())}
        for each in modules:
            if each not in self._baseline.files and each not in violations:
                violations[each] = ["is not there after its import"]

        absent = {
            each
            for each, stacks in self._baseline.absent_imports.items()
            if any(stack and stack[-1] in closure for stack in stacks)
        }
        hidden = allowed_differences.HIDDEN_IMPORTS
        absent |= {name for each in closure & hidden.keys() for name in hidden[each]}
        return AuditResult(
            name=name,
            violations=violations,
            tries=sorted(absent),
            loads=sorted(self._installed.find_owners(self._baseline.files.get(each, "") for each in closure) - {name}),
        )
