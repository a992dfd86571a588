"""Makes the plan of a run's zygote: whether it forks, and which modules it imports first (``--preload``)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ddplaunch.base.options import Options
from ddplaunch.core.options import Starting, Stopping
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.features.preload import program_source, site_hooks
from ddplaunch.features.preload.import_selector import select_imports
from ddplaunch.features.preload.known_packages import PackageTable
from ddplaunch.features.preload.mismatches import PreloadMismatch, find_mismatch
from ddplaunch.features.preload.options import Preloading
from ddplaunch.features.preload.program_source import TORCH, Assignment, ProgramSource
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.target.target import Target, TargetKind

AUTO_PRELOAD, NO_PRELOAD = "auto", "none"
"""Values of ``--preload``; others are ``torch`` and a list of modules."""

DYNAMO = "torch._dynamo"
"""``DistributedDataParallel`` and the first optimizer import it, over a second in every rank: it pays to import it once
from two ranks on, and is pure loss for a program that never needs it (docs/performance.md has the measurement)."""

_TORCH_READS = (
    "OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|NVPL|BLIS|VECLIB|ATEN|ONEDNN|DNNL|KINETO|LRU_CACHE|NUMPY|NPY|FX|AOT|PYTORCH|TORCH"
    "|COMPILE_STROBELIGHT"
)
_PACKAGES_READ = "ACC|ARROW|GFORTRAN|GRPC|HF_XET|I_MPI|INTEL_LIB|JE_ARROW|LD|MALLOC|MPI|OMPI|OPENSSL|RUST|THP"
TORCH_READS = re.compile(rf"(?:{_TORCH_READS})_?[A-Z0-9_]*")
NATIVE_READS = re.compile(
    rf"(?:{_TORCH_READS}|{_PACKAGES_READ})_?[A-Z0-9_]*|AZURE_LOG_LEVEL|CLICOLOR(_FORCE)?|NO_COLOR|SSLKEYLOGFILE|TOKENIZERS_LOG|TZ"
)
"""Variables that torch, and the packages of the table, read in native code as it is loaded (traced with torch 2.13)."""

_DYNAMO_READS = re.compile(
    r"HOME|TMPDIR|TEMP|TMP|USER|LOGNAME|LNAME|USERNAME|(TORCHDYNAMO|TORCHINDUCTOR|TORCH_(DYNAMO|COMPILE|LOGS|TRACE|FAKE)"
    r"|AOT|INDUCTOR|PARTITIONER|SYMPY|TRITON|CUTLASS)[A-Z0-9_]*"
)
"""Variables that the import of torch._dynamo reads: a program that sets one often trains already when it imports
that, and cannot start over then."""

_OBSTACLES = {
    "get_objects": "gc.get_objects, which does not find objects of preloaded modules",
    "get_referrers": "gc.get_referrers, which does not find objects of preloaded modules",
    "threadpoolctl": "threadpoolctl, which changes all libraries that are loaded",
}
"""Words in a program's source that exclude preloading, as a rank cannot check what they do; with a reason for users."""

_SUBCLASS_WALKER = "__subclasses__"
"""With it a program finds classes of preloaded packages that it has not imported yet."""

_VARIABLE_SETTER = "hydra"
"""hydra sets variables (``hydra.job.env_set``) and writes files before it calls the program's function: if an import in
this function does not fit, the rank cannot start over."""

_IMPORT_AUDITOR, _FORK_FIXUPS = "features/preload/rank/import_auditor", "features/preload/rank/fork_fixups"
"""Files of this feature that the zygote loads."""


def choose_zygote_plan(options: Options, plan: Plan) -> ZygotePlan:
    """Choose what the zygote imports; with one rank and no restarts, the zygote forks only if that is faster."""
    preload = options[Preloading].preload or AUTO_PRELOAD
    by_default = options[Starting].start == "auto" and preload == AUTO_PRELOAD
    is_single = by_default and len(plan.local_ranks) == 1 and not options[Stopping].max_restarts
    own = plan.rank_environment(plan.local_ranks[0])
    environ = {**os.environ, **plan.shared_environment}
    zygote_plan = make_preload_plan(plan.target, preload, environ, own, is_single_process=is_single)
    if zygote_plan.forks and not zygote_plan.user_modules and (mismatch := find_mismatch(plan.target.source)):
        zygote_plan = _avoid_mismatch(zygote_plan, mismatch)
    return replace(
        zygote_plan, import_auditor=_IMPORT_AUDITOR, fork_fixups=_FORK_FIXUPS, native_reads=NATIVE_READS.pattern
    )


def _avoid_mismatch(plan: ZygotePlan, mismatch: PreloadMismatch) -> ZygotePlan:
    """Return a plan that preloads less than the earlier run of the program, in which preloaded modules did not fit."""
    because = f"{mismatch.differs} when it imports {mismatch.module}"
    if mismatch.had_packages and mismatch.module.partition(".")[0] != TORCH and plan.fallback:
        return replace(plan, modules=plan.fallback, fallback=(), reason=because)
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
        is_single_process: whether the run has a single rank, so that preloading saves nothing by itself.
    """
    if target.kind is TargetKind.PROGRAM:
        return ZygotePlan()
    if start_code := site_hooks.find_unsafe_start_code(rank_variables):
        return ZygotePlan(unsafe=start_code)
    if preload == NO_PRELOAD:
        return ZygotePlan(forks=True, source="--preload")
    source = program_source.read_program(target)
    effective = [each for each in source.assignments if not (each.is_default and each.name in environ)]
    settings = {each.name: each.value for each in effective if each.before_imports and each.value is not None}
    if preload not in (AUTO_PRELOAD, TORCH):
        modules = tuple(preload.split(","))
        return ZygotePlan(True, modules, modules, settings=tuple(settings.items()), source="--preload")
    if preload == AUTO_PRELOAD and (
        backend := site_hooks.find_backend_plugin(target.sys_path_0, {**environ, **settings})
    ):
        return ZygotePlan(unsafe=f"{backend} adds to torch.backends, which torch loads at its import")
    if because := _find_obstacle(source, effective, settings):
        return ZygotePlan(reason=because)
    if is_single_process and not source.imports_torch:
        return ZygotePlan()
    walks_subclasses = _SUBCLASS_WALKER in source.words
    late = walks_subclasses or any(_DYNAMO_READS.fullmatch(each.name) for each in effective)
    usual = (TORCH, DYNAMO) if source.dynamo and not is_single_process and not late else (TORCH,)
    plan = ZygotePlan(forks=True, modules=usual, settings=tuple(settings.items()))
    if preload == TORCH or not target.sys_path_0 or walks_subclasses:
        return plan
    include_deferred = not is_single_process and _VARIABLE_SETTER not in source.words
    selected = select_imports(source, PackageTable(), target.sys_path_0, include_deferred=include_deferred)
    plan = replace(plan, excluded=selected.excluded)
    if not selected.modules:
        return plan
    modules = (TORCH, *selected.modules, *(name for name in plan.modules if name != TORCH))
    return replace(plan, modules=modules, fallback=plan.modules, known=selected.known)


def _find_obstacle(
    source: ProgramSource, assignments: Collection[Assignment], settings: Mapping[str, str]
) -> str | None:
    """Return why a preloaded torch certainly would not suit the program; a rank detects all other cases."""
    for each in assignments:
        is_known = each.value is not None and settings.get(each.name) == each.value
        if each.before_torch and not is_known and TORCH_READS.fullmatch(each.name):
            return f"{each.where}, which sets {each.name}"
    if _VARIABLE_SETTER in source.words and not source.imports_torch:
        return f"{_VARIABLE_SETTER}, which may set variables before torch is imported"
    return next((text for word, text in _OBSTACLES.items() if word in source.words), None)
