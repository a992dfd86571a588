"""Makes the preload plan of a run: whether the zygote forks, and which modules it imports first (``--preload``)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.text import join_names
from ddplaunch.core.rank import zygote_messages
from ddplaunch.features.preload import program_source, site_hooks
from ddplaunch.features.preload.import_selector import TORCH_READS, ImportSelector
from ddplaunch.features.preload.known_packages import PackageTable
from ddplaunch.features.preload.program_source import TORCH
from ddplaunch.features.preload.shadowing import ShadowedPackages
from ddplaunch.features.preload.statements import Assignment, Barrier
from ddplaunch.system.plan.plan import Fact
from ddplaunch.system.target.target import Target, TargetKind

AUTO_PRELOAD, NO_PRELOAD = "auto", "none"
"""Values of ``--preload``; others are ``torch`` and a list of modules."""

MAX_NOTED = 5
"""At most this many modules that each rank imports itself are in the text of a dry run; JSON has all."""

DYNAMO = "torch._dynamo"
"""``DistributedDataParallel`` and the first optimizer import it, over a second in every rank: it pays to import it once
from two ranks on, and is pure loss for a program that never needs it (docs/performance.md has the measurement)."""

_DYNAMO_READS = re.compile(
    r"HOME|TMPDIR|TEMP|TMP|USER|LOGNAME|LNAME|USERNAME|(TORCHDYNAMO|TORCHINDUCTOR|TORCH_(DYNAMO|COMPILE|LOGS|TRACE|FAKE)"
    r"|AOT|INDUCTOR|PARTITIONER|SYMPY|TRITON|CUTLASS)[A-Z0-9_]*"
)
"""Variables that the import of torch._dynamo reads; some for a cache folder, whose name it puts in the environment."""

_NOTHING: zygote_messages.AllowedState = {"top_modules": [], "changed_variables": [], "generators": []}


class PreloadPlan(Struct, frozen=True):
    """What the zygote does before it forks the ranks.

    Attributes:
        forks: whether it forks at all; otherwise every rank is a new interpreter.
        modules: the modules that it imports, in this order.
        user_modules: those of them that the user listed; if one fails, the run fails.
        fallback: what it imports instead if ``modules`` fail, or change what ``allowed`` does not list.
        settings: variables, with values, that the program sets before it imports torch.
        unsafe: why forking is not safe; None if it is, or was not considered.
        reason: why some imports of the program are not preloaded: the barrier.
        excluded: the modules that each rank imports itself, each with the reason, like "not in the table".
        allowed: what the imports may change in the process; used with a fallback.
        import_dirs: the program's own folders that come before site-packages on ``sys.path``.
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
    allowed: zygote_messages.AllowedState = field(default_factory=lambda: _NOTHING)
    import_dirs: tuple[str, ...] = ()
    environment_reads: tuple[str, ...] = ()

    @property
    def imports_torch(self) -> bool:
        """Whether torch is among ``modules``; another module may import it too."""
        return self.forks and any(each.partition(".")[0] == TORCH for each in self.modules)

    def to_json(self) -> dict[str, object]:
        """Return the part of the plan that ``--dry-run`` and the event ``ready`` show."""
        because, excluded = self.explain(None)
        return {"modules": list(self.modules), "because": because, "excluded": [list(each) for each in excluded]}

    def to_fact(self) -> Fact:
        """Return the line of the printed plan on preloaded modules."""
        if not self.forks:
            return Fact("preloaded", "nothing", self.unsafe or "each rank is a new interpreter")
        source = "--preload" if self.user_modules or not self.modules else "imported once for all ranks"
        return Fact("preloaded", join_names(self.modules) or "nothing", source)

    def excluded_notes(self) -> list[str]:
        """Return the note of the printed plan on the first modules that each rank imports itself, if there are any."""
        if not self.excluded:
            return []
        first = [f"{name} ({reason})" for name, reason in self.excluded[:MAX_NOTED]]
        more = [f"and {len(self.excluded) - MAX_NOTED} more"] if len(self.excluded) > MAX_NOTED else []
        return [f"imported in each rank: {', '.join([*first, *more])}"]

    def explain(self, failed: str | None) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        """Return why ``modules`` has not all imports, and ``excluded``; ``failed``: why the fallback was imported."""
        return failed or self.unsafe or self.reason, () if failed else self.excluded


def make_preload_plan(
    target: Target,
    preload: str,
    environ: Mapping[str, str],
    rank_variables: Collection[str],
    *,
    is_single_process: bool,
) -> PreloadPlan:
    """Decide what to preload for ranks that are to be forked.

    Args:
        target: what the ranks run.
        preload: the value of ``--preload``.
        environ: the environment of the zygote.
        rank_variables: the names of variables that each rank gets.
        is_single_process: the run has one rank: preloading saves nothing by itself, and a doubt ends in no fork.
    """
    if target.kind is TargetKind.PROGRAM:
        return PreloadPlan()
    if mentioned := site_hooks.find_rank_reader(rank_variables):
        return PreloadPlan(unsafe=f"{mentioned}, which is not set when the zygote starts Python")
    if preload == NO_PRELOAD:
        return PreloadPlan(forks=True)
    source = program_source.read_program(target)
    variables = {*environ, *rank_variables}
    assigned = (each for each in source.steps if isinstance(each, Assignment))
    effective = [each for each in assigned if not (each.default and each.name in variables)]
    settings = tuple(
        (each.name, each.value) for each in effective if each.before_imports and each.name and each.value is not None
    )
    if preload not in (AUTO_PRELOAD, TORCH):
        modules = tuple(preload.split(","))
        return PreloadPlan(forks=True, modules=modules, user_modules=modules, settings=settings)
    before_torch = [
        each for each in effective if not each.after_torch and (not each.name or TORCH_READS.fullmatch(each.name))
    ]
    for each in before_torch if preload == TORCH else ():
        is_value_known = each.before_imports and each.value is not None
        if each.name and not is_value_known:
            unshown = f"sets {each.name}, which torch reads at its import, to a value that its source does not show"
            return PreloadPlan(unsafe=f"{each.where} {unshown}")
    if target.sys_path_0 and (file := ShadowedPackages([target.sys_path_0, *source.folders]).find_stdlib_shadow()):
        unsafe = f"{file} has the name of a module that torch imports"
        return PreloadPlan() if is_single_process else PreloadPlan(unsafe=unsafe)
    if preload == AUTO_PRELOAD and (
        backend := site_hooks.find_backend(target.sys_path_0, {**environ, **dict(settings)})
    ):
        return PreloadPlan(unsafe=f"{backend} adds to torch.backends, which torch loads at its import")
    late = any(each.name and _DYNAMO_READS.fullmatch(each.name) for each in effective)
    usual = (TORCH, DYNAMO) if source.dynamo and not is_single_process and not late else (TORCH,)
    plan = PreloadPlan(forks=True, modules=usual, settings=settings, import_dirs=source.folders)
    if preload == TORCH or not target.sys_path_0:
        return plan
    selector = ImportSelector(
        source, PackageTable(), target.sys_path_0, variables, include_deferred=not is_single_process
    )
    has_doubt = before_torch or any(isinstance(each, Barrier) for each in source.steps)
    if is_single_process and (has_doubt or selector.torch_barrier or not source.imports_torch):
        return PreloadPlan()
    return _add_selected(plan, selector)


def _add_selected(plan: PreloadPlan, selector: ImportSelector) -> PreloadPlan:
    """Add the selected imports to a plan for torch alone, which becomes the fallback."""
    excluded = tuple(selector.excluded.items())
    if selector.torch_barrier:
        return PreloadPlan(reason=selector.torch_barrier, excluded=excluded)
    plan = replace(plan, excluded=excluded, reason=selector.barrier)
    if not selector.packages:
        return plan
    return replace(
        plan,
        modules=(TORCH, *selector.modules, *(name for name in plan.modules if name != TORCH)),
        fallback=plan.modules,
        allowed=selector.allowed_state,
        environment_reads=tuple(sorted({name for each in selector.packages.values() for name in each.variables})),
    )
