"""What one process imports for all ranks of a run: as was typed, as the table of known packages allows, or torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.preload import interpreter, program
from ddplaunch.preload.admission import TORCH_READS, Admission
from ddplaunch.preload.facts import Assignment, Barrier
from ddplaunch.preload.hiding import Hiding
from ddplaunch.preload.program import TORCH
from ddplaunch.preload.table import Table
from ddplaunch.target.target import Target, TargetKind

if TYPE_CHECKING:
    from ddplaunch.rank import messages

AUTO, NONE = "auto", "none"
"""Words of ``--preload`` beside ``torch`` and names of modules."""

DYNAMO = "torch._dynamo"
"""``DistributedDataParallel`` and the first optimizer import it, over a second in every rank: it pays to import it once
from two ranks on, and is pure loss for a program that never needs it (docs/performance.md has the measurement)."""

_DYNAMO_READS = re.compile(
    r"HOME|TMPDIR|TEMP|TMP|USER|LOGNAME|LNAME|USERNAME|(TORCHDYNAMO|TORCHINDUCTOR|TORCH_(DYNAMO|COMPILE|LOGS|TRACE|FAKE)"
    r"|AOT|INDUCTOR|PARTITIONER|SYMPY|TRITON|CUTLASS)[A-Z0-9_]*"
)
"""Those that torch._dynamo reads, or makes the name of a folder of, which it leaves in the environment."""

_NOTHING: messages.AllowedJson = {"tops": [], "sets": [], "generators": []}


@dataclass(frozen=True)
class Choice:
    """What the zygote is to do before it forks.

    Attributes:
        forks: whether it forks at all; otherwise every rank is a new interpreter.
        modules: what it imports, in this order.
        asked: those that the user named, which must not fail.
        fallback: what it imports instead where ``modules`` fail, or leave anything that is not ``allowed``.
        settings: variables that the program has set by the time that it imports torch.
        unsafe: why it does not fork where it otherwise would.
        reason: why not all imports of the program could be made once.
        excluded: what each rank imports itself, and why: modules, and "not in the table".
        allowed: what the imports may leave in the process, where there is a fallback.
        folders: those of the program's own that come before installed packages.
        reads: variables that the imports read.
    """

    forks: bool = False
    modules: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    unsafe: str | None = None
    reason: str | None = None
    excluded: tuple[tuple[str, str], ...] = ()
    allowed: messages.AllowedJson = field(default_factory=lambda: _NOTHING)
    folders: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def imports_torch(self) -> bool:
        """Whether torch is among ``modules``; another one may import it too."""
        return self.forks and any(each.partition(".")[0] == TORCH for each in self.modules)

    def to_json(self) -> dict[str, object]:
        """What a dry run says of it, as the event ``ready`` does once it is done."""
        because, excluded = self.account(None)
        return {"modules": list(self.modules), "because": because, "excluded": [list(each) for each in excluded]}

    def account(self, failed: str | None) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        """Why there is not more in ``modules``, and ``excluded``; ``failed``: why the fallback was imported."""
        return failed or self.unsafe or self.reason, () if failed else self.excluded


def choose(target: Target, preload: str, environ: Mapping[str, str], own: Collection[str], *, lone: bool) -> Choice:
    """Choose for ranks that are to be forked.

    Args:
        preload: of ``--preload``.
        environ: the zygote's.
        own: the names of variables that each rank gets.
        lone: there will be one process only, so that a fork must be worth it by itself.
    """
    if target.kind is TargetKind.PROGRAM:
        return Choice()
    if mentioned := interpreter.reads_rank(own):
        return Choice(unsafe=f"{mentioned}, which a zygote has not when Python starts")
    if preload == NONE:
        return Choice(forks=True)
    found = program.read(target)
    variables = {*environ, *own}
    assigned = (each for each in found.steps if isinstance(each, Assignment))
    here = [each for each in assigned if not (each.default and each.name in variables)]
    settings = tuple((each.name, each.value) for each in here if each.early and each.name and each.value is not None)
    if preload not in (AUTO, TORCH):
        modules = tuple(preload.split(","))
        return Choice(forks=True, modules=modules, asked=modules, settings=settings)
    before_torch = [each for each in here if not each.after and (not each.name or TORCH_READS.fullmatch(each.name))]
    for each in before_torch if preload == TORCH else ():
        if each.name and not (each.early and each.value is not None):  # only running shows what torch will read
            unshown = f"sets {each.name}, which torch reads at its import, to what its source does not show"
            return Choice(unsafe=f"{each.where} {unshown}")
    if target.first and (file := Hiding([target.first, *found.folders]).hides_python()):
        return Choice() if lone else Choice(unsafe=f"{file} has the name of a module that torch imports")
    if preload == AUTO and (backend := interpreter.find_backend(target.first, {**environ, **dict(settings)})):
        return Choice(unsafe=f"{backend} adds to torch.backends, which torch loads at its import")
    late = any(each.name and _DYNAMO_READS.fullmatch(each.name) for each in here)
    usual = (TORCH, DYNAMO) if found.dynamo and not lone and not late else (TORCH,)
    choice = Choice(forks=True, modules=usual, settings=settings, folders=found.folders)
    if preload == TORCH or not target.first:
        return choice
    admission = Admission(found, Table(), target.first, variables, late=not lone)
    doubt = before_torch or any(isinstance(each, Barrier) for each in found.steps)
    if lone and (doubt or admission.torch_barrier or not found.imports_torch):
        return Choice()
    excluded = tuple(admission.excluded.items())
    if admission.torch_barrier:
        return Choice(reason=admission.torch_barrier, excluded=excluded)
    choice = replace(choice, excluded=excluded, reason=admission.barrier)
    if not admission.packages:
        return choice
    return replace(
        choice,
        modules=(TORCH, *admission.modules, *(name for name in usual if name != TORCH)),
        fallback=usual,
        allowed=admission.allowed,
        reads=tuple(sorted({name for each in admission.packages.values() for name in each.variables})),
    )
