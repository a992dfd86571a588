"""Makes the plan of a run's zygote: whether it forks, and which modules it imports first (``--preload``)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ddplaunch.base.options import Options
from ddplaunch.cli.core_options import Starting, Stopping
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.features.preload import program_source, site_hooks
from ddplaunch.features.preload.import_selector import TORCH_READS, ImportSelector
from ddplaunch.features.preload.known_packages import PackageTable
from ddplaunch.features.preload.mismatches import Mismatch, find_mismatch
from ddplaunch.features.preload.options import Preloading
from ddplaunch.features.preload.program_source import TORCH
from ddplaunch.features.preload.shadowing import ShadowedPackages
from ddplaunch.features.preload.statements import Assignment, Barrier
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.target.target import Target, TargetKind

AUTO_PRELOAD, NO_PRELOAD = "auto", "none"
"""Values of ``--preload``; others are ``torch`` and a list of modules."""

DYNAMO = "torch._dynamo"
"""``DistributedDataParallel`` and the first optimizer import it, over a second in every rank: it pays to import it once
from two ranks on, and is pure loss for a program that never needs it (docs/performance.md has the measurement)."""

_DYNAMO_READS = re.compile(
    r"HOME|TMPDIR|TEMP|TMP|USER|LOGNAME|LNAME|USERNAME|(TORCHDYNAMO|TORCHINDUCTOR|TORCH_(DYNAMO|COMPILE|LOGS|TRACE|FAKE)"
    r"|AOT|INDUCTOR|PARTITIONER|SYMPY|TRITON|CUTLASS)[A-Z0-9_]*"
)
"""Variables that the import of torch._dynamo reads; some for a cache folder, whose name it puts in the environment."""

_OBJECT_WALKERS = frozenset({"__subclasses__", "get_objects", "get_referrers"})
"""What finds the classes and objects of preloaded modules that the program has not imported yet."""

_IMPORT_AUDITOR, _FORK_FIXUPS = "features/preload/rank/import_auditor", "features/preload/rank/fork_fixups"
"""Files of this feature that the zygote loads."""


def choose_preload(options: Options, plan: Plan) -> ZygotePlan:
    """Choose what the zygote imports; with one rank and no restarts it forks only if that is faster."""
    preload = options[Preloading].preload or AUTO_PRELOAD
    by_default = options[Starting].start == "auto" and preload == AUTO_PRELOAD
    is_single = by_default and len(plan.local_ranks) == 1 and not options[Stopping].max_restarts
    own = plan.environment(plan.local_ranks[0])
    environ = {**os.environ, **plan.shared_environment}
    zygote_plan = make_preload_plan(plan.target, preload, environ, own, is_single_process=is_single)
    if zygote_plan.forks and not zygote_plan.user_modules and (mismatch := find_mismatch(plan.target.source)):
        zygote_plan = _avoid_mismatch(zygote_plan, mismatch)
    patterns = (TORCH_READS.pattern, *(name.replace("*", ".*") for name in zygote_plan.environment_reads))
    return replace(
        zygote_plan, import_auditor=_IMPORT_AUDITOR, fork_fixups=_FORK_FIXUPS, native_reads="|".join(patterns)
    )


def _avoid_mismatch(plan: ZygotePlan, mismatch: Mismatch) -> ZygotePlan:
    """Preload less than in an earlier run of the program, in which this did not fit."""
    because = f"{mismatch.differs} when it imports {mismatch.module}"
    if mismatch.had_packages and mismatch.module.partition(".")[0] != TORCH and plan.fallback:
        return replace(plan, modules=plan.fallback, fallback=(), reason=because, environment_reads=())
    return ZygotePlan(reason=because)


def make_preload_plan(
    target: Target,
    preload: str,
    environ: Mapping[str, str],
    rank_variables: Collection[str],
    *,
    is_single_process: bool,
) -> ZygotePlan:
    """Decide what to preload for ranks that are to be forked.

    Args:
        target: what the ranks run.
        preload: the value of ``--preload``.
        environ: the environment of the zygote.
        rank_variables: the names of variables that each rank gets.
        is_single_process: the run has one rank: preloading saves nothing by itself, and a doubt ends in no fork.
    """
    if target.kind is TargetKind.PROGRAM:
        return ZygotePlan()
    if start_code := site_hooks.find_start_code(rank_variables):
        return ZygotePlan(unsafe=start_code)
    if preload == NO_PRELOAD:
        return ZygotePlan(forks=True, source="--preload")
    source = program_source.read_program(target)
    variables = {*environ, *rank_variables}
    assigned = (each for each in source.steps if isinstance(each, Assignment))
    effective = [each for each in assigned if not (each.default and each.name in variables)]
    settings = tuple(
        (each.name, each.value) for each in effective if each.before_imports and each.name and each.value is not None
    )
    if preload not in (AUTO_PRELOAD, TORCH):
        modules = tuple(preload.split(","))
        return ZygotePlan(True, modules, modules, settings=settings, source="--preload")
    before_torch = [
        each for each in effective if not each.after_torch and (not each.name or TORCH_READS.fullmatch(each.name))
    ]
    for each in before_torch if preload == TORCH else ():
        is_value_known = each.before_imports and each.value is not None
        if each.name and not is_value_known:
            unshown = f"sets {each.name}, which torch reads at its import, to a value that its source does not show"
            return ZygotePlan(unsafe=f"{each.where} {unshown}")
    if target.sys_path_0 and (file := ShadowedPackages([target.sys_path_0, *source.folders]).find_stdlib_shadow()):
        unsafe = f"{file} has the name of a module that torch imports"
        return ZygotePlan() if is_single_process else ZygotePlan(unsafe=unsafe)
    if preload == AUTO_PRELOAD and (
        backend := site_hooks.find_backend(target.sys_path_0, {**environ, **dict(settings)})
    ):
        return ZygotePlan(unsafe=f"{backend} adds to torch.backends, which torch loads at its import")
    walks_objects = not source.words.isdisjoint(_OBJECT_WALKERS)
    late = walks_objects or any(each.name and _DYNAMO_READS.fullmatch(each.name) for each in effective)
    usual = (TORCH, DYNAMO) if source.dynamo and not is_single_process and not late else (TORCH,)
    plan = ZygotePlan(forks=True, modules=usual, settings=settings, import_dirs=source.folders)
    if preload == TORCH or not target.sys_path_0 or walks_objects:
        return plan
    selector = ImportSelector(
        source, PackageTable(), target.sys_path_0, variables, include_deferred=not is_single_process
    )
    has_doubt = before_torch or any(isinstance(each, Barrier) for each in source.steps)
    if is_single_process and (has_doubt or selector.torch_barrier or not source.imports_torch):
        return ZygotePlan()
    return _add_selected(plan, selector)


def _add_selected(plan: ZygotePlan, selector: ImportSelector) -> ZygotePlan:
    """Add the selected imports to a plan for torch alone, which becomes the fallback."""
    excluded = tuple(selector.excluded.items())
    if selector.torch_barrier:
        return ZygotePlan(reason=selector.torch_barrier, excluded=excluded)
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
