"""What one process imports for all ranks of a run: as was typed, as the table of known packages allows, or torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.preload import interpreter, program
from ddplaunch.preload.admission import TORCH_READS, ImportSelector
from ddplaunch.preload.facts import Assignment, Barrier
from ddplaunch.preload.hiding import ShadowedPackages
from ddplaunch.preload.program import TORCH
from ddplaunch.preload.table import PackageTable
from ddplaunch.target.target import Target, TargetKind

if TYPE_CHECKING:
    from ddplaunch.rank import messages

AUTO_PRELOAD, NO_PRELOAD = "auto", "none"
"""Words of ``--preload`` beside ``torch`` and names of modules."""

DYNAMO = "torch._dynamo"
"""``DistributedDataParallel`` and the first optimizer import it, over a second in every rank: it pays to import it once
from two ranks on, and is pure loss for a program that never needs it (docs/performance.md has the measurement)."""

_DYNAMO_READS = re.compile(
    r"HOME|TMPDIR|TEMP|TMP|USER|LOGNAME|LNAME|USERNAME|(TORCHDYNAMO|TORCHINDUCTOR|TORCH_(DYNAMO|COMPILE|LOGS|TRACE|FAKE)"
    r"|AOT|INDUCTOR|PARTITIONER|SYMPY|TRITON|CUTLASS)[A-Z0-9_]*"
)
"""Those that torch._dynamo reads, or makes the name of a folder of, which it leaves in the environment."""

_NOTHING: messages.AllowedState = {"tops": [], "sets": [], "generators": []}


@dataclass(frozen=True)
class PreloadPlan:
    """What the zygote is to do before it forks.

    Attributes:
        forks: whether it forks at all; otherwise every rank is a new interpreter.
        modules: what it imports, in this order.
        user_modules: those that the user named, which must not fail.
        fallback: what it imports instead where ``modules`` fail, or leave anything that is not ``allowed``.
        settings: variables that the program has set by the time that it imports torch.
        unsafe: why it does not fork where it otherwise would.
        reason: why not all imports of the program could be made once.
        excluded: what each rank imports itself, and why: modules, and "not in the table".
        allowed: what the imports may leave in the process, where there is a fallback.
        import_dirs: those of the program's own that come before installed packages.
        environment_reads: variables that the imports read.
    """

    forks: bool = False
    modules: tuple[str, ...] = ()
    user_modules: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    unsafe: str | None = None
    reason: str | None = None
    excluded: tuple[tuple[str, str], ...] = ()
    allowed: messages.AllowedState = field(default_factory=lambda: _NOTHING)
    import_dirs: tuple[str, ...] = ()
    environment_reads: tuple[str, ...] = ()

    @property
    def imports_torch(self) -> bool:
        """Whether torch is among ``modules``; another one may import it too."""
        return self.forks and any(each.partition(".")[0] == TORCH for each in self.modules)

    def to_json(self) -> dict[str, object]:
        """What a dry run says of it, as the event ``ready`` does once it is done."""
        because, excluded = self.explain(None)
        return {"modules": list(self.modules), "because": because, "excluded": [list(each) for each in excluded]}

    def explain(self, failed: str | None) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        """Why there is not more in ``modules``, and ``excluded``; ``failed``: why the fallback was imported."""
        return failed or self.unsafe or self.reason, () if failed else self.excluded


def make_preload_plan(
    target: Target,
    preload: str,
    environ: Mapping[str, str],
    rank_variables: Collection[str],
    *,
    is_single_process: bool,
) -> PreloadPlan:
    """Choose for ranks that are to be forked.

    Args:
        preload: of ``--preload``.
        environ: the zygote's.
        rank_variables: the names of variables that each rank gets.
        is_single_process: there will be one process only, so that a fork must be worth it by itself.
    """
    if target.kind is TargetKind.PROGRAM:
        return PreloadPlan()
    if mentioned := interpreter.find_rank_reader(rank_variables):
        return PreloadPlan(unsafe=f"{mentioned}, which a zygote has not when Python starts")
    if preload == NO_PRELOAD:
        return PreloadPlan(forks=True)
    found = program.read_program(target)
    variables = {*environ, *rank_variables}
    assigned = (each for each in found.steps if isinstance(each, Assignment))
    here = [each for each in assigned if not (each.default and each.name in variables)]
    settings = tuple(
        (each.name, each.value) for each in here if each.before_imports and each.name and each.value is not None
    )
    if preload not in (AUTO_PRELOAD, TORCH):
        modules = tuple(preload.split(","))
        return PreloadPlan(forks=True, modules=modules, user_modules=modules, settings=settings)
    before_torch = [
        each for each in here if not each.after_torch and (not each.name or TORCH_READS.fullmatch(each.name))
    ]
    for each in before_torch if preload == TORCH else ():
        if each.name and not (
            each.before_imports and each.value is not None
        ):  # only running shows what torch will read
            unshown = f"sets {each.name}, which torch reads at its import, to what its source does not show"
            return PreloadPlan(unsafe=f"{each.where} {unshown}")
    if target.sys_path_0 and (file := ShadowedPackages([target.sys_path_0, *found.folders]).hides_python()):
        return (
            PreloadPlan()
            if is_single_process
            else PreloadPlan(unsafe=f"{file} has the name of a module that torch imports")
        )
    if preload == AUTO_PRELOAD and (
        backend := interpreter.find_backend(target.sys_path_0, {**environ, **dict(settings)})
    ):
        return PreloadPlan(unsafe=f"{backend} adds to torch.backends, which torch loads at its import")
    late = any(each.name and _DYNAMO_READS.fullmatch(each.name) for each in here)
    usual = (TORCH, DYNAMO) if found.dynamo and not is_single_process and not late else (TORCH,)
    choice = PreloadPlan(forks=True, modules=usual, settings=settings, import_dirs=found.folders)
    if preload == TORCH or not target.sys_path_0:
        return choice
    admission = ImportSelector(
        found, PackageTable(), target.sys_path_0, variables, include_deferred=not is_single_process
    )
    doubt = before_torch or any(isinstance(each, Barrier) for each in found.steps)
    if is_single_process and (doubt or admission.torch_barrier or not found.imports_torch):
        return PreloadPlan()
    excluded = tuple(admission.excluded.items())
    if admission.torch_barrier:
        return PreloadPlan(reason=admission.torch_barrier, excluded=excluded)
    choice = replace(choice, excluded=excluded, reason=admission.barrier)
    if not admission.packages:
        return choice
    return replace(
        choice,
        modules=(TORCH, *admission.modules, *(name for name in usual if name != TORCH)),
        fallback=usual,
        allowed=admission.allowed_state,
        environment_reads=tuple(sorted({name for each in admission.packages.values() for name in each.variables})),
    )
