"""What some libraries keep of their process from their import on, set right where they were imported before a fork.

Lightning and torchmetrics read RANK and LOCAL_RANK as they are imported, and keep the number for what only rank 0 is to
do. That this is all that they keep was audited: tests/preloads compares forks so repaired with plain Python.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RANK_READERS = frozenset(
    {
        "lightning.fabric.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "torchmetrics.utilities.prints",
    }
)
"""The modules whose reading of a rank's variables is repaired."""


GENERATORS = frozenset(
    {
        "datasets.fingerprint.fingerprint_rng",
        "diffusers.utils.export_utils.global_rng",
        "diffusers.utils.testing_utils.global_rng",
        "joblib._multiprocessing_helpers._rand._rng",
        "sympy.core.random._assumptions_rng",
        "sympy.core.random.rng",
        "sympy.core.symbol.Dummy._prng",
    }
)
"""Random generators that libraries keep, seeded from the system at their import; each fork has them seeded anew."""


def apply_fixups() -> None:
    """Set what loaded modules keep of their process right for this one; a module that differs is left alone."""
    for repair in (_fix_rank_variables, _reseed_generators, _reset_session_id, _reset_cpu_times, _stores, _logging):
        try:
            repair()
        except Exception:  # of a version that nobody has tried
            pass


def resolve_name(path: str) -> Any:
    """What a dotted name stands for, by the modules that are loaded; None where they have no such thing."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if (found := sys.modules.get(".".join(parts[:count]))) is not None:
            for part in parts[count:]:
                found = getattr(found, part, None)
            return found
    return None


def _fix_rank_variables() -> None:
    """Compute what the modules themselves would: Lightning has a function for it, torchmetrics a line."""
    for name in sorted(RANK_READERS & sys.modules.keys()):
        module = sys.modules[name]
        compute = getattr(module, "_get_rank", None)
        if hasattr(module.rank_zero_only, "rank"):
            module.rank_zero_only.rank = compute() or 0 if compute else int(os.environ.get("LOCAL_RANK", 0))


def _reseed_generators() -> None:
    for name in GENERATORS:
        generator = resolve_name(name)
        if generator is not None:
            generator.seed()


def _reset_session_id() -> None:
    """Give the rank an id of its own, which Hugging Face's libraries tell a server (HTTP's User-Agent)."""
    for name in ("transformers.utils.hub", "diffusers.utils.hub_utils"):
        module: Any = sys.modules.get(name)
        if module is not None and len(module.SESSION_ID) == 32:
            module.SESSION_ID = sys.modules["uuid"].uuid4().hex


def _reset_cpu_times() -> None:
    """psutil tells how busy the CPUs were since its import."""
    module = sys.modules.get("psutil")
    if module is None:
        return
    thread = sys.modules["threading"].current_thread().ident
    for name, every in (("_last_cpu_times", False), ("_last_per_cpu_times", True)):
        if hasattr(module, name):
            setattr(module, name, {thread: module.cpu_times(percpu=every)})
            setattr(module, f"{name}_2", dict(getattr(module, name)))


def _stores() -> None:
    """Let a program open a store of its own at another port than the job's: ``init_method="tcp://…"``, MASTER_PORT.

    TORCHELASTIC_USE_AGENT_STORE makes every rank a client, whatever the port, and torch's C++ ignores with it that a
    port is taken: all would wait for a server.
    """
    module: Any = sys.modules.get("torch.distributed.rendezvous")
    if module is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    create, of_job = module._create_c10d_store, int(os.environ["MASTER_PORT"])

    def _create_c10d_store(hostname: str, port: int, *args: Any, **named: Any) -> Any:
        kept = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None) if port != of_job else None
        try:
            return create(hostname, port, *args, **named)
        finally:
            if kept is not None:
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = kept

    module._create_c10d_store = _create_c10d_store


def _logging() -> None:
    """Count ``relativeCreated`` of records from the rank's start."""
    module: Any = sys.modules.get("logging")
    if module is not None:  # nanoseconds since Python 3.13
        module._startTime = time.time_ns() if isinstance(module._startTime, int) else time.time()
