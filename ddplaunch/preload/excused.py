"""What modules keep that differs between two processes and that no program can mind: left out of the comparison.

Standard library only; loaded inside the interpreters of a trial. Each entry was looked at; whatever is not here counts.
"""

from __future__ import annotations

NAMES: dict[str, frozenset[str]] = {
    # Numbered anew in each rank: rank/repairs.py.
    "transformers.utils.hub": frozenset({"SESSION_ID"}),
    "psutil": frozenset({"_last_cpu_times", "_last_cpu_times_2", "_last_per_cpu_times", "_last_per_cpu_times_2"}),
    # The hour in a comment of the C code that f2py writes.
    "numpy.f2py.rules": frozenset({"generationtime", "module_rules"}),
    # Left over from a loop over a set of functions, and in its order, which is one of addresses.
    "scipy.sparse._data": frozenset({"name", "npfunc"}),
    "pandas.core.computation.expr": frozenset(
        {"PARSERS", "BaseExprVisitor", "PandasExprVisitor", "PythonExprVisitor", "unsupported_nodes"}
    ),
    # None in a fork, which fsspec's own function for forks has set.
    "fsspec.asyn": frozenset({"lock"}),
}
"""By module."""

ATTRIBUTES: dict[str, frozenset[str]] = {
    # A filesystem compares its pid with that of its process, and begins with an empty cache where they differ.
    "fsspec.spec": frozenset({"_pid", "_fs_token", "_fs_token_", "_cache", "_latest"}),
}
"""Of objects and classes, by the module of one of their base classes."""

READ_LATE = frozenset({"CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"})
"""Variables that native code reads when it is used first, not when it is loaded."""
