"""The plan of a zygote: whether it forks the ranks, and which modules it imports before. A feature makes the plan."""

from __future__ import annotations

from msgspec import Struct


class ZygotePlan(Struct, frozen=True):
    """What the zygote does before it forks the ranks.

    Attributes:
        forks: whether it forks at all; otherwise every rank is a new interpreter.
        modules: the modules that it imports, in this order.
        user_modules: those of them that the user listed; if one fails, the run fails.
        fallback: what it imports instead if ``modules`` fail, or change the process in an unexpected way.
        settings: environment variables, with values, that the program sets before its imports.
        unsafe: why forking is not safe; None if it is, or was not considered.
        reason: why fewer modules are preloaded than the program imports.
        excluded: the modules that each rank imports itself, each with the reason, like "not in the table".
        known: the top-level modules that the imports may load; used with a fallback.
        native_reads: a pattern of the environment variables that native code reads as it is loaded.
        import_auditor: the file of the package with the ``ImportAuditor`` of imports that have a fallback.
        fork_fixups: the file of the package that is loaded before the imports, and repairs each fork; "" for none.
        source: where the choice comes from, in the printed plan.
    """

    forks: bool = False
    modules: tuple[str, ...] = ()
    user_modules: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    unsafe: str | None = None
    reason: str | None = None
    excluded: tuple[tuple[str, str], ...] = ()
    known: tuple[str, ...] = ()
    native_reads: str = ""
    import_auditor: str = ""
    fork_fixups: str = ""
    source: str = "imported once for all ranks"

    @property
    def imports_torch(self) -> bool:
        """Whether torch is among ``modules``; another module may import it too."""
        return self.forks and any(each.partition(".")[0] == "torch" for each in self.modules)

    def to_json(self) -> dict[str, object]:
        """Return the part of the plan that ``--dry-run`` and the event ``zygote_ready`` show."""
        because, excluded = self.explain_exclusions(None)
        return {"modules": list(self.modules), "because": because, "excluded": [list(each) for each in excluded]}

    def explain_exclusions(self, failed: str | None) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        """Return why ``modules`` lacks some imports, and ``excluded``; ``failed``: why the fallback was imported."""
        return failed or self.unsafe or self.reason, () if failed else self.excluded


class ZygoteSettings(Struct, frozen=True):
    """How this node starts its zygotes; known before the rest of the job, as the first zygote starts early."""

    plan: ZygotePlan
    preempt_signal: int | None = None  # the scheduler's preemption signal, if any
