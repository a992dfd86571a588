"""Repairs per-process state that libraries read at import, after a fork of the process that imported them.

Lightning and torchmetrics read RANK and LOCAL_RANK at import and store the number, to do some things on rank 0 only.
An audit shows that this is all they store: tests/tools/preload_audit compares repaired forks with plain Python.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Modules = Mapping[str, Any]

RANK_READERS = frozenset(
    {
        "lightning.fabric.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "torchmetrics.utilities.prints",
    }
)
"""The modules that read a rank's variables at import and are repaired."""


PREFIX_READERS = {
    "diffusers.utils.import_utils": "COLAB_",
    "fsspec.config": "FSSPEC_",
    "networkx": "NETWORKX_",
}
"""The modules that go through all variables at import, and the prefix of the variables that they use."""

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
"""Random generators that libraries seed from the system at import; reseeded in each fork."""


def apply_fixups(modules: Modules) -> None:
    """Repair the preloaded ``modules`` for this process; a module with an unknown layout is left alone."""
    repairs = (
        _fix_stored_ranks,
        _reseed_generators,
        _reset_session_id,
        _renew_authentication_keys,
        _reset_cpu_times,
        _patch_store_creation,
        _reset_logging_start,
    )
    for repair in repairs:
        try:
            repair(modules)
        except Exception:  # of an untested version
            pass


def resolve_name(path: str, modules: Modules) -> Any:
    """Find the object of a dotted name in ``modules``; None if there is none."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if (found := modules.get(".".join(parts[:count]))) is not None:
            for part in parts[count:]:
                found = getattr(found, part, None)
            return found
    return None


def _fix_stored_ranks(modules: Modules) -> None:
    """Set the rank as the modules themselves would: Lightning has a function for it, torchmetrics a statement."""
    for name in sorted(RANK_READERS & modules.keys()):
        module = modules[name]
        compute = getattr(module, "_get_rank", None)
        if hasattr(module.rank_zero_only, "rank"):
            module.rank_zero_only.rank = compute() or 0 if compute else int(os.environ.get("LOCAL_RANK", 0))


def _reseed_generators(modules: Modules) -> None:
    for name in GENERATORS:
        generator = resolve_name(name, modules)
        if generator is not None:
            generator.seed()


def _reset_session_id(modules: Modules) -> None:
    """Give the rank its own session id, which Hugging Face's libraries send in HTTP's User-Agent."""
    for name in ("transformers.utils.hub", "diffusers.utils.hub_utils"):
        module: Any = modules.get(name)
        if module is not None and len(module.SESSION_ID) == 32:
            module.SESSION_ID = modules["uuid"].uuid4().hex


def _renew_authentication_keys(modules: Modules) -> None:
    """Give the rank its own random key, with which multiprocessing's connections are authenticated."""
    for name in ("multiprocessing.process", "multiprocess.process"):
        module: Any = modules.get(name)
        if module is not None:
            module._current_process._config["authkey"] = module.AuthenticationString(os.urandom(32))


def _reset_cpu_times(modules: Modules) -> None:
    """Restart psutil's CPU statistics, which begin when it is imported."""
    module = modules.get("psutil")
    if module is None:
        return
    thread = modules["threading"].current_thread().ident
    for name, every in (("_last_cpu_times", False), ("_last_per_cpu_times", True)):
        if hasattr(module, name):
            setattr(module, name, {thread: module.cpu_times(percpu=every)})
            setattr(module, f"{name}_2", dict(getattr(module, name)))


def _patch_store_creation(modules: Modules) -> None:
    """Let a program create its own store at another port than the job's: ``init_method="tcp://…"``, MASTER_PORT.

    With TORCHELASTIC_USE_AGENT_STORE every rank is a client, whatever the port, and torch's C++ code ignores that a
    port is in use: all ranks would wait for a server.
    """
    module: Any = modules.get("torch.distributed.rendezvous")
    if module is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    create, job_port = module._create_c10d_store, int(os.environ["MASTER_PORT"])

    def _create_c10d_store(hostname: str, port: int, *args: Any, **named: Any) -> Any:
        former = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None) if port != job_port else None
        try:
            return create(hostname, port, *args, **named)
        finally:
            if former is not None:
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = former

    module._create_c10d_store = _create_c10d_store


def _reset_logging_start(modules: Modules) -> None:
    """Make ``relativeCreated`` of log records count from the rank's start."""
    module: Any = modules.get("logging")
    if module is not None:  # nanoseconds since Python 3.13
        module._startTime = time.time_ns() if isinstance(module._startTime, int) else time.time()
