"""What one process imports for all ranks of a run: as was typed, as a verdict allows, or torch alone."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate

from ddplaunch.dataclass import dataclass, replace
from ddplaunch.preload import cache, program
from ddplaunch.preload.cache import Entry
from ddplaunch.preload.program import DYNAMO, TORCH, Program, Variable
from ddplaunch.preload.question import Question
from ddplaunch.preload.verdict import Excluded, Verdict
from ddplaunch.target import source
from ddplaunch.target.target import Kind, Target

_MAX_BYTES = 100_000  # of the names of modules

AUTO, NONE = "auto", "none"
"""Words of ``--preload`` beside ``torch`` and names of modules."""

_TORCH_READS = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|NVPL|BLIS|VECLIB|ATEN|ONEDNN|DNNL|KINETO|LRU_CACHE|NUMPY|NPY|FX|AOT"
    r"|PYTORCH|TORCH|COMPILE_STROBELIGHT)_?[A-Z0-9_]*"
)
"""Variables that torch, and the libraries that it is linked with, read as they are loaded (traced with torch 2.13).

Some of these are read later, and then no harm is done.
"""

_DYNAMO_READS = re.compile(
    r"TMPDIR|TEMP|TMP|USER|LOGNAME|(TORCHDYNAMO|TORCHINDUCTOR|TORCH_(DYNAMO|COMPILE|LOGS|TRACE|FAKE)|AOT|INDUCTOR"
    r"|PARTITIONER|SYMPY|TRITON|CUTLASS)[A-Z0-9_]*"
)
"""Those that torch._dynamo reads, or makes the name of a folder of, which it leaves in the environment."""


@dataclass(frozen=True)
class Choice:
    """What the zygote is to do before it forks.

    Attributes:
        forks: whether it forks at all; otherwise every rank is a new interpreter.
        modules: what it imports, in this order.
        asked: those that the user named, which must not fail.
        fallback: what it imports instead where ``modules`` fail, or cannot be forked with.
        settings: variables that the program has set by the time that it imports torch.
        unsafe: why it does not fork where it otherwise would.
        reason: why nothing was proven that could be imported beside torch.
        excluded: what each rank imports itself, as a trial has found.
        entry: where verdicts for this program are kept.
        question: what is to be tried while the ranks run.
    """

    forks: bool = False
    modules: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    unsafe: str | None = None
    reason: str | None = None
    excluded: tuple[Excluded, ...] = ()
    entry: Entry | None = None
    question: Question | None = None

    @property
    def proven(self) -> bool:
        """Whether ``modules`` are those of a verdict."""
        return bool(self.fallback)

    def to_json(self) -> dict[str, object]:
        """What a dry run says of it, as the event ``ready`` does once it is done."""
        because, excluded, verdict = self.account(None)
        pairs = [list(each) for each in excluded]
        return {"modules": list(self.modules), "because": because, "excluded": pairs, "verdict": verdict}

    def account(self, failed: str | None) -> tuple[str | None, tuple[tuple[str, str], ...], str | None]:
        """Why there is not more in ``modules``, what each rank imports itself and why, the file that says so.

        ``failed``: why the fallback was imported.
        """
        if not self.proven or failed or not self.entry:
            return failed or self.unsafe or self.reason, (), None
        return None, tuple((each.name, each.reason) for each in self.excluded), self.entry.verdict_file


def choose(target: Target, preload: str, environ: Mapping[str, str], own: Collection[str], *, lone: bool) -> Choice:
    """Choose for ranks that are to be forked.

    Args:
        preload: of ``--preload``.
        environ: the zygote's.
        own: the names of variables that each rank gets.
        lone: there will be one process only, so that a fork must be worth it by itself.
    """
    if target.kind is Kind.PROGRAM:
        return Choice()
    if preload == NONE:
        return Choice(forks=True)
    found = program.read(target)
    here = [each for each in found.variables if not (each.default and (each.name in environ or each.name in own))]
    settings = tuple((each.name, each.value) for each in here if each.early and each.name and each.value is not None)
    if preload not in (AUTO, TORCH):
        modules = tuple(preload.split(","))
        return Choice(forks=True, modules=modules, asked=modules, settings=settings)
    if lone and not (found.imports_torch and found.doubt is None and not any(map(_concerns_torch, here))):
        return Choice()
    if unsafe := _too_late(here):
        return Choice(unsafe=unsafe)
    usual = _usual(found, here, lone=lone)
    choice = Choice(forks=True, modules=usual, settings=settings, reason=found.doubt)
    if preload == TORCH or found.doubt:
        return choice
    question = found.question({*environ, *own})
    if (entry := cache.entry(question, environ)) is None:
        return replace(choice, reason="there is no place for the cache")
    question = replace(question, late=entry.late)
    verdict = entry.verdict
    if verdict is None or not verdict.holds({**environ, **dict(settings)}) or TORCH not in verdict.modules:
        return replace(choice, entry=entry, question=question, reason="the other imports have not been tried yet")
    if hidden := _hidden(verdict, target, environ):
        return replace(choice, reason=f"{hidden} has the name of a module that would be imported")
    dynamo = _dynamo_may(here) and not (lone and DYNAMO not in question.late)
    return replace(
        choice,
        modules=_bounded(name for name in verdict.modules if dynamo or name != DYNAMO),
        fallback=choice.modules,
        excluded=verdict.excluded,
        entry=entry,
        question=None if verdict.tried.issuperset(question.late) else question,
    )


def _bounded(names: Iterable[str]) -> tuple[str, ...]:
    """As many as fit into one word of a command line, which the kernel limits to 128 KiB (MAX_ARG_STRLEN)."""
    listed = list(names)
    sizes = accumulate(len(name.encode()) + 4 for name in listed)
    return tuple(name for name, size in zip(listed, sizes, strict=True) if size < _MAX_BYTES)


def _usual(found: Program, here: list[Variable], *, lone: bool) -> tuple[str, ...]:
    """``DistributedDataParallel`` and the first optimizer import ``torch._dynamo``, over a second in every rank.

    Importing it once pays from two ranks on, and is pure loss for a program that never needs it, so its source decides
    (docs/performance.md has the measurement).
    """
    return (TORCH, DYNAMO) if found.dynamo and not lone and _dynamo_may(here) else (TORCH,)


def _dynamo_may(here: list[Variable]) -> bool:
    """Whether none of the variables set is one that torch._dynamo reads as it is imported, which may be late."""
    return not any(each.name and _DYNAMO_READS.fullmatch(each.name) for each in here)


def _concerns_torch(each: Variable) -> bool:
    return not each.after and (each.name is None or bool(_TORCH_READS.fullmatch(each.name)))


def _too_late(here: list[Variable]) -> str | None:
    """Why torch must be imported by the program itself: only running that shows what torch will read."""
    for each in here:
        if each.name and _concerns_torch(each) and not (each.early and each.value is not None):
            return f"{each.where} sets {each.name}, which torch reads at its import, to what its source does not show"
    return None


def _hidden(verdict: Verdict, target: Target, environ: Mapping[str, str]) -> str | None:
    """Name what ``import`` would find of the user's, had the zygote not looked for a module of its name before."""
    for folder in (target.first or os.getcwd(), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))):
        try:
            entries = sorted(each for each in os.listdir(folder) if each.partition(".")[0] in verdict.names)
        except OSError:
            continue
        for entry in entries:
            path = os.path.join(folder, entry)
            package = os.path.join(path, "__init__.py")
            if entry.endswith((".py", ".pyc", ".so")) and os.path.isfile(path):
                return path
            if os.path.isfile(package):
                return package
            installed = source.find_module(entry, os.devnull)
            if os.path.isdir(path) and (installed is None or installed.origin is None):  # else that is found, not this
                return path
    return None
